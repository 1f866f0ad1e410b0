"""The real half of the demo: profile the engine, replay a trace under each policy, simulate the same at fitted prices.

The profile is taken in three parts, before, between and after the replays, so that the fit sees the machine as it was
meanwhile; each policy is replayed twice, so that the report knows how far the machine repeats itself.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from analysis.comparison.arms import Pair
from analysis.load import Run, load_run
from experiments.calibration.calibrate import Extent, Fitted, fit_and_save, profile, together
from experiments.configuration.compose import compose_config
from experiments.runs.run import execute
from testbed.errors import TestbedError

SHORTER = 3  # prompts, outputs and chunks than the ablation's: as many more requests in the same time, so less noise
RATE_SCALES = tuple(round(8.0 * 0.8**step, 2) for step in range(20))  # of the replay, the fastest first
BUSY_SHARE = 0.75  # of the replay's time that the engine is busy at most: loaded, but not drowned
MAX_REPLAY_S = 30  # of one of the eight: a slow machine replays fewer requests rather than for ten minutes
LEAST_REQUESTS = 50


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Real runs with their simulations and repeats, and how it was done."""

    pairs: list[Pair]
    description: str


def run_point(overrides: list[str], folder: Path) -> Run:
    """One run into `folder`. Raises TestbedError if it did not end well."""
    command = shlex.join(["testbed", "run", *overrides])
    result = execute(compose_config(overrides), folder, command=command)
    if result.exit_status:
        error = TestbedError(result.message)
        error.exit_status = result.exit_status
        raise error
    return load_run(folder)


def measure_fidelity(out: Path, policies: dict[str, list[str]], *, quick: bool) -> Fidelity:
    """Replays the shortened trace under each policy ({name: overrides}); a small model is made on the spot."""
    base = _real_overrides(_make_model(out / "small_qwen3"), quick=quick)
    extent = Extent(is_quick=True, repeats=1, num_requests=10 if quick else 16, max_s=30 if quick else 60)
    profiles = [profile(compose_config(base), extent)]
    if (probe_ns := profiles[0].manifest.probe_ns) is not None:
        base.append(f"backend.probe_ns={probe_ns}")  # everything is measured by one yardstick
    scale, limit = _load(out / "load", base, list(policies.values()), fit_and_save(profiles[0], out / "load"))
    load = [f"trace.rate_scale={scale:g}", f"trace.limit={limit}"]
    points = {name: [*base, *load, *policy] for name, policy in policies.items()}
    reals: dict[str, list[Run]] = {name: [] for name in points}
    with tqdm(total=2 * len(points), desc="replay on the real engine", disable=None) as bar:
        for folder, names in (("real", list(points)), ("real-again", list(reversed(points)))):
            for name in names:
                reals[name].append(run_point(points[name], out / folder / _slug(name)))
                bar.update()
            profiles.append(profile(compose_config(base), extent))
    fitted = fit_and_save(together(*profiles), out)
    pairs = [
        Pair(name, run_point(_simulated(point, fitted), out / "sim-of-real" / _slug(name)), first, tuple(again))
        for (name, point), (first, *again) in zip(points.items(), reals.values(), strict=True)
    ]
    return Fidelity(pairs, f"{limit} requests, {scale:g} x the rate, {_scaled_by(reals)}{fitted.description}")


def _scaled_by(reals: dict[str, list[Run]]) -> str:
    """How steady the machine was, as far as that was looked at."""
    probes = [run.manifest["replay"]["probe"] for runs in reals.values() for run in runs]
    if None in probes:
        return ""
    medians = [probe["slowness"]["p50"] for probe in probes]
    return (
        f"time scaled by a probe (a step of one token), which took {min(medians):.2f} to {max(medians):.2f} times its "
        f"{probes[0]['probe_ns'] / 1e6:.2g} ms, "
    )


def _make_model(folder: Path) -> Path:
    """A small Qwen3-shaped checkpoint of random weights."""
    try:
        from real.checkpoint import make_checkpoint
    except ModuleNotFoundError as error:
        raise TestbedError(f"the real half needs {error.name!r}: pip install '.[real]' in the repository") from None
    return make_checkpoint(folder, compose_config(["model=tiny"]).model, seed=0)


def _real_overrides(model: Path, *, quick: bool) -> list[str]:
    from real.device import resolve_device

    # one thread, and time scaled by a probe: the steadiest on a machine that others use too; a GPU is one's own
    pace = ["backend.pace=probe_scaled"] if resolve_device("auto").type == "cpu" else []
    short = ["trace.limit=50"] if quick else []
    return ["experiment=demo_real", f"model.path={model}", "backend=real", "backend.num_threads=1", *pace, *short]


def _simulated(overrides: list[str], fitted: Fitted) -> list[str]:
    """The overrides of a real run, turned into its simulation at fitted prices."""
    return [*(item for item in overrides if not item.startswith("backend")), *fitted.overrides]


def _load(folder: Path, base: list[str], policies: list[list[str]], fitted: Fitted) -> tuple[float, int]:
    """The fastest replay at which, says the simulator, no policy drowns this machine; how many requests it may have."""
    summary: dict[str, Any] = {}
    for scale in tqdm(RATE_SCALES, desc="choosing the load", disable=None, leave=False):
        for number, policy in enumerate(policies):
            overrides = _simulated([*base, *policy, f"trace.rate_scale={scale:g}"], fitted)
            summary = run_point(overrides, folder / f"x{scale:g}-{number}").summary
            if summary["busy_share"] > BUSY_SHARE:
                break
        else:
            break
    num, share = summary["num_requests"], MAX_REPLAY_S / summary["duration_s"]
    return scale, min(num, max(LEAST_REQUESTS, int(num * share)))


def _slug(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")
