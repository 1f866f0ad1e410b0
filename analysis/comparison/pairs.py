"""Pairs runs of a real engine with the simulated runs of the same trace and policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from analysis.comparison.arms import by_load, grouped, infer_arms, stated_replicates
from analysis.load import Run, swept_keys
from analysis.naming import DECIDES, is_of_router

_POLICY = ("scheduler.", "cache.")
_DEVICE = ("device.name", "device.tensor_parallel_size")
_FROM_MEMORY = ("num_gpu_blocks", "num_cpu_blocks", "gpu_memory_utilization", "swap_space_gib")


@dataclass(frozen=True)
class Pair:
    """A simulated run and the real run of the same trace and policy. again: repeats of the real run."""

    label: str
    sim: Run
    real: Run
    again: tuple[Run, ...] = ()

    @property
    def reals(self) -> tuple[Run, ...]:
        return (self.real, *self.again)

    @property
    def runs(self) -> tuple[Run, ...]:
        return (self.sim, *self.reals)


def infer_pairs(runs: Sequence[Run]) -> list[Pair]:
    """Pairs every real run with the simulated run of its trace, model, replicas and policy (the swept scheduler.* and
    cache.* settings, and the router of several replicas).

    Memory sizes follow from the device and do not count. If several simulated runs fit, the one is taken that has the
    real run's device, and of these the one whose cost model fits most real runs, so that all pairs have the same cost
    model if possible.
    """
    sims = [run for run in runs if run.is_simulated]
    reals = [run for run in runs if run.manifest.get("backend") in ("real", "vllm")]
    swept = swept_keys(runs)
    keys = [key for key in swept if key.startswith(_POLICY) and not key.endswith(_FROM_MEMORY)]
    device = [key for key in swept if key in _DEVICE]

    def policy(run: Run) -> str:
        return repr((run.fingerprint, [run.flat_config.get(key) for key in keys], _fleet(run)))

    def is_of(sim: Run, real: Run) -> bool:
        """`testbed fidelity` may simulate another model; it keeps both runs beside each other."""
        is_kept = sim.manifest.get("measured_trace") is not None and sim.path.parent == real.path.parent
        return is_kept or sim.flat_config.get("model.name") == real.flat_config.get("model.name")

    def prices(sim: Run) -> str:
        return repr(sim.config.get("cost"))

    fits = {
        id(real): [sim for sim in sims if real.fingerprint and policy(sim) == policy(real) and is_of(sim, real)]
        for real in reals
    }
    common = Counter(prices(sim) for found in fits.values() for sim in found)

    def closeness(sim: Run, real: Run) -> tuple[int, int]:
        alike = sum(sim.flat_config.get(key) == real.flat_config.get(key) for key in device)
        return alike, common[prices(sim)]

    pairs = [(max(fits[id(real)], key=lambda sim: closeness(sim, real)), real) for real in reals if fits[id(real)]]
    if len(pairs) < 2:
        return [Pair("sim against real", sim, real) for sim, real in pairs]
    arms = infer_arms([real for _, real in pairs])
    loads = by_load(arms, stated_replicates(runs))
    at = {id(run): load for load, those in loads.items() for arm in those for run in arm.runs}
    names = {id(run): arm.name for arm in arms for run in arm.runs}
    found = [Pair(names[id(real)], sim, real) for sim, real in pairs]
    found = _told_apart(found, lambda real: f"at {at[id(real)]}" if at[id(real)] else "")
    found = _told_apart(found, lambda real: f"seed {real.manifest.get('seed')}")
    return _told_apart(found, lambda real: f"({real.path.parent.name}/{real.path.name})")


def _fleet(run: Run) -> tuple[int, list[tuple[str, Any]]]:
    """The number of replicas and, if there are several, the settings of their router."""
    num = run.flat_config.get("backend.num_replicas") or 1  # a run in vLLM has none
    return num, [item for item in run.flat_config.items() if num > 1 and is_of_router(item[0])]


def _told_apart(pairs: Sequence[Pair], by: Callable[[Run], str]) -> list[Pair]:
    """The pairs; if several simulated runs share a label, `by` is added to it. (Repeats of a real run keep theirs.)"""
    by_label = grouped(pairs, lambda pair: pair.label)
    shared = {
        label
        for label, those in by_label.items()
        if min(len({pair.sim.path for pair in those}), len({by(pair.real) for pair in those})) > 1
    }
    return [replace(pair, label=f"{pair.label} {by(pair.real)}") if pair.label in shared else pair for pair in pairs]


def engine_of(run: Run) -> str:
    """The engine of the run: sim, real, vllm, or "vllm's own" if vLLM's scheduler decided."""
    backend, decides = run.manifest.get("backend"), run.flat_config.get(DECIDES)
    return "vllm's own" if backend == "vllm" and decides == "vllm" else str(backend)


def join_repeats(pairs: Sequence[Pair]) -> list[Pair]:
    """One pair for each simulated run and engine: equal real runs are repeats of the first. Of those kept by `testbed
    fidelity` that is the one beside the simulated run, which has its requests; repeats may lack some."""
    joined: dict[tuple[Path, str], Pair] = {}
    for pair in sorted(pairs, key=lambda pair: pair.real.path.parent != pair.sim.path.parent):
        key = (pair.sim.path, engine_of(pair.real))
        joined[key] = replace(joined[key], again=(*joined[key].again, pair.real)) if key in joined else pair
    return list(joined.values())
