"""Runs into arms: what was varied, what replicates what, and which real run belongs to which simulated one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from analysis.format import plain
from analysis.load import Run, Sweep, as_cell, swept_keys
from testbed.errors import RunFolderError

Several = Sweep | Sequence[Run] | Mapping[str, Run]
Runs = Run | Several
NAMING_KEYS = ("name", "preset", "composition", "policy", "_target_")
_POLICY = ("scheduler.", "cache.")
_NO_POLICY = ("overwrite", "allow_ignored", "experiment", "trace", "record", "slo", "report")  # top-level keys


@dataclass(frozen=True)
class Arm:
    """One policy: its factors' levels, and its runs over seeds (replicates) and loads. naming: keys its name says."""

    name: str
    levels: Mapping[str, Any]
    runs: tuple[Run, ...]
    naming: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pair:
    """A simulated run and the real run of the same trace and policy."""

    label: str
    sim: Run
    real: Run


def is_seed(key: str) -> bool:
    return key.split(".")[-1] == "seed"


def is_policy(key: str) -> bool:
    """Whether a setting can make one arm another: seeds, the trace, what is recorded and permissions cannot."""
    return not is_seed(key) and key.split(".")[0] not in _NO_POLICY


def infer_arms(runs: Sequence[Run]) -> list[Arm]:
    """Arms by the swept policy keys, in the order of the runs.

    An arm is named by the fewest keys that tell all arms apart, a component's name first.
    """
    swept = sorted((key for key in swept_keys(runs) if is_policy(key)), key=_rank)
    naming = naming_keys([run.flat_config for run in runs], swept)
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(repr([run.flat_config.get(key) for key in swept]), []).append(run)
    arms = []
    for members in groups.values():
        levels = {key: members[0].flat_config.get(key) for key in swept}
        name = level_names({key: levels[key] for key in naming}) or "all runs"
        arms.append(Arm(name, levels, tuple(members), tuple(naming)))
    return arms


def named(runs: Runs) -> dict[str, Run]:
    """Label -> run: as given, or by the fewest swept keys that tell the runs apart, or by its folder's name."""
    if isinstance(runs, Mapping):
        return dict(runs)
    members = [runs] if isinstance(runs, Run) else list(runs.runs if isinstance(runs, Sweep) else runs)
    keys = naming_keys([run.flat_config for run in members], swept_keys(members))
    labels = [level_names({key: run.flat_config.get(key) for key in keys}) or run.path.name for run in members]
    shared = {label for label, count in Counter(labels).items() if count > 1}
    return {
        f"{label} ({run.path})" if label in shared else label: run for label, run in zip(labels, members, strict=True)
    }


def naming_keys(configs: Sequence[Mapping[str, Any]], swept: Sequence[str]) -> list[str]:
    """The keys of `swept` of which each tells some configurations apart that those before it did not: components' names
    first, seeds after all that may decide."""
    kept: list[str] = []
    groups = 1
    for key in sorted(swept, key=_rank):
        split = len({repr([config.get(k) for k in (*kept, key)]) for config in configs})
        if split > groups:
            kept, groups = [*kept, key], split
    return kept


def _rank(key: str) -> tuple[bool, bool, bool]:
    return key.split(".")[0] in ("slo", "report", "record"), is_seed(key), key.split(".")[-1] not in NAMING_KEYS


def levels_of(values: Iterable[Any]) -> list[Any]:
    """The different values of a setting: numbers in their order, then others as they come first."""
    levels = list(dict.fromkeys(as_cell(value) for value in values))
    numeric = [level for level in levels if isinstance(level, int | float)]
    return sorted(numeric) + [level for level in levels if not isinstance(level, int | float)]


def level_names(levels: Mapping[str, Any]) -> str:
    """ "sarathi, watermark 0.01": the levels of these keys in words; "" of none."""
    return ", ".join(_level_name(key, value, list(levels)) for key, value in levels.items())


def _level_name(key: str, value: Any, naming: Sequence[str]) -> str:
    leaf = key.split(".")[-1]
    if leaf in NAMING_KEYS:
        return plain(value).rsplit(".", 1)[-1] if leaf == "_target_" else plain(value)
    same_leaf = sum(other.split(".")[-1] == leaf for other in naming) > 1
    return f"{key if same_leaf else leaf.replace('_', ' ')} {plain(value)}"


def level_groups(arms: Sequence[Arm]) -> list[tuple[str, ...]]:
    """The factors: levels that differ between arms, those that always change together as one, its naming key first."""
    groups: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for arm in arms for key in arm.levels):
        values = [repr(arm.levels.get(key)) for arm in arms]
        if len(set(values)) > 1:
            groups.setdefault(repr([values.index(value) for value in values]), []).append(key)
    return [tuple(keys) for keys in groups.values()]


def factor_name(key: str) -> str:
    """A factor's key as words: "cache.prefix_caching" -> "prefix caching", "scheduler.name" -> "scheduler"."""
    parts = key.split(".")
    word = parts[-2] if parts[-1] in NAMING_KEYS and len(parts) > 1 else parts[-1]
    return word.replace("_", " ")


def find_arm(arms: Sequence[Arm], name: str | None) -> Arm:
    """The arm called `name`, or the only one whose name holds it; the first for None. Else RunFolderError."""
    if name is None:
        return arms[0]
    exact = [arm for arm in arms if arm.name == name]
    near = exact or [arm for arm in arms if name in arm.name]
    if len(near) != 1:
        what = "no arm is" if not near else f"{len(near)} arms are"
        raise RunFolderError(f"baseline {name!r}: {what} called so; the arms are: {'; '.join(a.name for a in arms)}")
    return near[0]


def infer_pairs(runs: Sequence[Run]) -> list[Pair]:
    """Every real run with the simulated one of its trace and policy (the scheduler.* and cache.* settings that differ).

    Settings of memory size follow from the device, and do not count. Where several simulated runs fit, the one whose
    cost model fits most real runs is taken, so that all pairs share their prices where they can.
    """
    sims = [run for run in runs if run.manifest.get("backend") == "sim"]
    reals = [run for run in runs if run.manifest.get("backend") in ("real", "vllm")]
    keys = [key for key in swept_keys(runs) if key.startswith(_POLICY) and not key.endswith(_FROM_MEMORY)]

    def policy(run: Run) -> str:
        return repr((run.fingerprint, [run.flat_config.get(key) for key in keys]))

    def prices(sim: Run) -> str:
        return repr(sim.config.get("cost"))

    fits = {id(real): [sim for sim in sims if real.fingerprint and policy(sim) == policy(real)] for real in reals}
    common = Counter(prices(sim) for found in fits.values() for sim in found)
    pairs = [
        (max(fits[id(real)], key=lambda sim: common[prices(sim)]), real)  # the first of those equally common
        for real in reals
        if fits[id(real)]
    ]
    if len(pairs) < 2:
        return [Pair("sim against real", sim, real) for sim, real in pairs]
    names = {id(run): arm.name for arm in infer_arms([real for _, real in pairs]) for run in arm.runs}
    labels = [names[id(real)] for _, real in pairs]
    distinct = {(label, sim.path) for label, (sim, _) in zip(labels, pairs, strict=True)}  # a repeat shares its sim
    shared = [label for label, count in Counter(label for label, _ in distinct).items() if count > 1]
    labels = [
        f"{label} ({real.path.name})" if label in shared else label
        for label, (_, real) in zip(labels, pairs, strict=True)
    ]
    return [Pair(label, sim, real) for label, (sim, real) in zip(labels, pairs, strict=True)]


def engine_of(run: Run) -> str:
    """What ran it, in a word or two: sim, real, vllm, or vllm's own where its scheduler decided."""
    backend, decides = run.manifest.get("backend"), run.flat_config.get("backend.decides")
    return "vllm's own" if backend == "vllm" and decides == "vllm" else str(backend)


def split_repeats(pairs: Sequence[Pair]) -> tuple[list[Pair], list[tuple[Run, Run]]]:
    """The first pair of each simulated run and engine, and (first real, further real) of those with more: equal real
    runs."""
    first: dict[tuple[Path, str], Pair] = {}
    repeats = []
    for pair in pairs:
        known = first.setdefault((pair.sim.path, engine_of(pair.real)), pair)
        if known is not pair:
            repeats.append((known.real, pair.real))
    return list(first.values()), repeats


_FROM_MEMORY = ("num_gpu_blocks", "num_cpu_blocks", "gpu_memory_utilization", "swap_space_gib")


def load_keys(runs: Sequence[Run], replicated: Sequence[str] = ()) -> list[str]:
    """The swept settings of the trace, without its seed: what makes one load (one condition) another. replicated: those
    whose values are replicates instead."""
    keys = [key for key in swept_keys(runs) if key.startswith("trace.") and not is_seed(key)]
    return [key for key in keys if not any(key == name or key.startswith(f"{name}.") for name in replicated)]


def _load_value(run: Run, key: str) -> str:
    value, config = run.flat_config.get(key), run.flat_config
    offered = run.summary["throughput"]["offered_per_s"]
    if key == "trace.rate_scale" and offered is not None:
        return f"{plain(value)} ({offered:.3g} requests/s)"
    if key != "trace.rate" or value is None or config.get("trace.name") != "synthetic":
        return plain(value)
    return f"{plain(value)} {'sessions' if (config.get('trace.max_turns') or 1) > 1 else 'requests'}/s"


def by_load(arms: Sequence[Arm], replicated: Sequence[str] = ()) -> dict[str, list[Arm]]:
    """Load -> the arms with their runs at it, the lightest first; the label says what differs ("" for one load).
    replicated: keys of the trace whose values are replicates and no loads."""
    keys = load_keys([run for arm in arms for run in arm.runs], replicated)

    def label(run: Run) -> str:
        return ", ".join(f"{key.removeprefix('trace.')} = {_load_value(run, key)}" for key in keys)

    offered: dict[str, float] = {}
    for run in (run for arm in arms for run in arm.runs):
        offered.setdefault(label(run), run.summary["throughput"]["offered_per_s"] or 0.0)
    loads = sorted(offered, key=lambda load: offered[load])
    result = {}
    for load in loads:
        parts = [replace(arm, runs=tuple(run for run in arm.runs if label(run) == load)) for arm in arms]
        result[load] = [arm for arm in parts if arm.runs]
    return result


Key = tuple[str | None, int | None, int]


def _by_key(arm: Arm) -> dict[Key, Run]:
    """An arm's runs by (trace fingerprint, seed, repetition)."""
    found: dict[Key, Run] = {}
    for run in arm.runs:
        key = (run.fingerprint, run.manifest.get("seed"))
        found[(*key, sum(known[:2] == key for known in found))] = run
    return found


def _observation(run: Run) -> tuple[str, ...]:
    """What a run saw: of a simulated one its trace and its decisions, whatever its seed; else itself."""
    if run.manifest.get("backend") == "sim" and run.manifest.get("digest"):
        return str(run.fingerprint), str(run.manifest["digest"])
    return (str(run.path),)


def replicates(arm: Arm) -> dict[Key, Run]:
    """An arm's different runs by (trace fingerprint, seed, repetition). Simulated runs of one trace that decided alike
    are one observation: of a recorded trace a seed makes no other."""
    found: dict[tuple[str, ...], tuple[Key, Run]] = {}
    for key, run in _by_key(arm).items():
        found.setdefault(_observation(run), (key, run))
    return dict(found.values())


def paired_replicates(baseline: Arm, arm: Arm) -> list[tuple[Run, Run]]:
    """(baseline run, arm's run) of each replicate that both have. RunFolderError where they share no trace."""
    ours, theirs = _by_key(arm), _by_key(baseline)
    shared = [key for key in theirs if key in ours and key[0] is not None]
    if not shared:
        raise RunFolderError(f"the arms '{arm.name}' and '{baseline.name}' share no run of one trace and seed")
    found = {_observation(theirs[key]) + _observation(ours[key]): (theirs[key], ours[key]) for key in reversed(shared)}
    return list(found.values())[::-1]


def comparable(arms: Sequence[Arm], baseline: Arm) -> list[Arm]:
    """The arms that share a trace and seed with `baseline`, which is one of them."""
    known = {key for key in _by_key(baseline) if key[0] is not None}
    return [arm for arm in arms if arm.name == baseline.name or known & set(_by_key(arm))]
