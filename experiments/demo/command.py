"""`make demo`: an ablation in the simulator, a shortened trace of the same kind on the real engine, and one report."""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.comparison.arms import Arm, infer_arms
from analysis.comparison.fidelity import real_noise
from analysis.comparison.pairs import Pair
from analysis.load import Run, load_run
from analysis.progress import progress, progressing
from analysis.reports.fidelity_findings import probe_of, too_noisy
from analysis.reports.parts import ReportInput
from analysis.reports.report import write_report
from experiments.calibration.calibrate import Extent, Fitted, fit_and_save, profile, together
from experiments.configuration.compose import compose_config
from experiments.console import Parser, from_here
from experiments.runs.parity import check_parity
from experiments.runs.run import FailedError, execute
from experiments.wiring.build_engine import real_packages
from testbed.errors import RunFolderError

# token budget of each scheduler: whole prompts first; chunks in the same steps as decodes
SCHEDULERS: dict[str, int | None] = {"prefill_first": None, "decode_first": 512}
WATERMARKS = (0.0, 0.1)
CACHING = (True, False)
SEEDS = (0, 1, 2, 3, 4)
OTHER_RATES = (1.5, 4.0, 5.0)  # sessions/s; at the overlay's own rate, 3, no arm is overloaded
QUESTION = (
    "Serving multi-turn chats with a KV pool that is too small for comfort: whole prompts first, or chunks beside the "
    f"decodes in steps of {SCHEDULERS['decode_first']} tokens; with or without a watermark, with or without prefix "
    "caching?"
)
SHORTER = 3  # how much shorter prompts, outputs and chunks are in the replay: more requests in the time, less noise
RATE_SCALES = tuple(round(8.0 * 0.8**step, 2) for step in range(20))  # candidates for the replay, the fastest first
BUSY_SHARE = 0.75  # largest share of the replay's time in which the engine is busy: loaded, but not overloaded
MAX_REPLAY_S = 30  # of each of the eight replays: on a slow machine they have fewer requests
LEAST_REQUESTS = 50


def main(arguments: list[str]) -> int:
    parser = Parser("testbed demo", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder of runs and report (runs/demo-<time>)")
    parser.add_argument("--quick", action="store_true", help="two seeds, fewer requests: half the time")
    options = parser.parse_args(arguments)
    out: Path = options.out or Path("runs", time.strftime("demo-%Y-%m-%d-%H-%M-%S"))
    if out.exists() and any(out.iterdir()):
        raise RunFolderError(f"{out} is not empty, and runs are not overwritten; choose another --out")
    began = time.monotonic()
    seeds = SEEDS[:2] if options.quick else SEEDS
    arms = _ablation(out, seeds)
    page = ReportInput(
        arms,
        title="Chunked prefill, watermark and prefix caching: an ablation",
        question=QUESTION,
        baseline=arms[0].name,
        commands=_commands(out, seeds, options.quick),
        notes=("The ablation's prices are the roofline model's for Qwen3-8B on an H100, not measured on one.",),
    )
    report = write_report(page, out / "report.html").absolute()
    print(f"simulated   {sum(len(arm.runs) for arm in arms)} runs of {len(arms)} arms")
    print(f"report      {report}, still without the real engine  ({time.monotonic() - began:.0f} s)")
    policies = {
        f"{name}, caching {'on' if caching else 'off'}": _policy(name, caching, shorter=SHORTER)
        for name, caching in itertools.product(SCHEDULERS, CACHING)
    }
    print(f"replaying   {len(policies)} policies on the real engine of this machine: a few minutes", flush=True)
    pairs, made_by = measure_fidelity(out, policies, quick=options.quick)
    is_scaled = probe_of(pairs[0].real.manifest) is not None
    noisy = too_noisy(real_noise([pair.reals for pair in pairs]), is_scaled=is_scaled)
    print(f"replayed    {' '.join(noisy) or f'{len(policies)} policies, each with its simulation: {made_by}'}")
    decisions = same_decisions([run for pair in pairs for run in pair.reals])
    print(f"checked     {decisions}", flush=True)
    made = (
        "The sim-against-real section measures the simulator's error on this machine, with a small model.",
        f"How the sim-against-real section was made: {made_by}.",
        f"{decisions}.",
    )
    write_report(replace(page, pairs=pairs, notes=(*page.notes, *made)), report)
    print(f"report      {report}  ({time.monotonic() - began:.0f} s)")
    return 0


def _policy(scheduler: str, caching: bool, *, shorter: int = 1) -> list[str]:
    return [*_scheduler(scheduler, shorter=shorter), f"cache.prefix_caching={str(caching).lower()}"]


def _scheduler(name: str, *, shorter: int = 1) -> list[str]:
    budget = SCHEDULERS[name]
    return [f"scheduler={name}", *([] if budget is None else [f"scheduler.max_num_batched_tokens={budget // shorter}"])]


# --- the ablation, simulated ---


def _ablation(out: Path, seeds: tuple[int, ...]) -> list[Arm]:
    points = []
    for scheduler, watermark, caching in itertools.product(SCHEDULERS, WATERMARKS, CACHING):
        policy = [*_policy(scheduler, caching), f"cache.watermark={watermark}"]
        has_curve = watermark == WATERMARKS[0] and caching  # of throughput and latency
        for rate, seed in itertools.product((None, *(OTHER_RATES if has_curve else ())), seeds):
            load = [f"seed={seed}", *([] if rate is None else [f"trace.rate={rate}"])]
            folder = f"{scheduler}-w{watermark:g}-{'cache' if caching else 'nocache'}-r{rate or 'base'}-s{seed}"
            points.append((["experiment=demo", *policy, *load], out / "sim" / folder))
    return infer_arms([run_point(*point) for point in progressing(points, "ablation", "point")])


def _commands(out: Path, seeds: tuple[int, ...], quick: bool) -> list[str]:
    """Returns the commands that reproduce the report: the whole demo, or only the ablation, as sweeps."""
    design = f"cache.watermark={','.join(f'{w:g}' for w in WATERMARKS)} cache.prefix_caching=true,false"
    curve = f"cache.watermark={WATERMARKS[0]:g} trace.rate={','.join(f'{rate:g}' for rate in OTHER_RATES)}"
    sweeps = [
        f"testbed run -m experiment=demo {' '.join(_scheduler(scheduler))} {swept} seed={','.join(map(str, seeds))} "
        f"hydra.sweep.dir=sweeps/demo/{scheduler}{suffix}"
        for scheduler, (swept, suffix) in itertools.product(SCHEDULERS, ((design, ""), (curve, "-rates")))
    ]
    everything: list[Any] = ["testbed demo", *(["--quick"] if quick else []), "--out", shlex.quote(str(out)) + "-again"]
    baseline = shlex.quote(f"{next(iter(SCHEDULERS))}, watermark {WATERMARKS[0]:g}, prefix caching on")
    report = f"testbed report sweeps/demo --baseline {baseline} --out ablation.html"
    return [" ".join(everything), *sweeps, report]


# --- the real engine ---


def run_point(overrides: list[str], folder: Path) -> Run:
    """Makes one run in `folder`. Raises TestbedError if it failed."""
    command = shlex.join(["testbed", "run", *overrides])
    result = execute(compose_config(overrides), folder, command=command)
    if result.exit_status:
        raise FailedError(result.message, result.exit_status)
    return load_run(folder)


def measure_fidelity(out: Path, policies: dict[str, list[str]], *, quick: bool) -> tuple[list[Pair], str]:
    """Replays the shortened trace under each policy ({name: overrides}) with a newly made small model. Returns the real
    runs with their simulations and repeats, and how they were made.

    The engine is profiled before, between and after the two rounds of replays, so that the fit reflects the speed of
    the machine in that time. Each policy is replayed twice, so that the report can state how much runs vary.
    """
    with real_packages("the real half"):
        from real.checkpoint import make_checkpoint
    model = make_checkpoint(out / "small_qwen3", compose_config(["model=tiny"]).model, seed=0)
    base = _real_overrides(model, quick=quick)
    extent = Extent(is_quick=True, repeats=1, num_requests=10 if quick else 16, max_s=30 if quick else 60)
    profiles = [profile(compose_config(base), extent)]
    if (probe_ns := profiles[0].manifest.probe_ns) is not None:
        base.append(f"backend.probe_ns={probe_ns}")  # all runs are scaled by the same reference
    scale, limit = _load(out / "load", base, list(policies.values()), fit_and_save(profiles[0], out / "load"))
    load = [f"trace.rate_scale={scale:g}", f"trace.limit={limit}"]
    points = {name: [*base, *load, *policy] for name, policy in policies.items()}
    reals: dict[str, list[Run]] = {name: [] for name in points}
    with progress("replay on the real engine", "run", 2 * len(points)) as bar:
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
    return pairs, f"{limit} requests, {scale:g} x the rate, {_scaled_by(reals)}{fitted.description}"


def same_decisions(reals: Sequence[Run]) -> str:
    """Replays every decision of real runs through the simulator; returns a sentence of how many there were. Raises
    FailedError if one differs."""
    num_steps = 0
    for run in progressing(reals, "replay through the simulator", "run"):
        report = check_parity(run.path)
        if (other := report.divergence) is not None:
            folder = from_here(run.path)
            raise FailedError(f"the simulator decides otherwise at step {other.step}: see `testbed parity {folder}`")
        num_steps += report.num_steps
    return f"Every decision of {len(reals)} real runs replayed through the simulator: identical, {num_steps:,} steps"


def _scaled_by(reals: dict[str, list[Run]]) -> str:
    """Returns how much the machine's speed varied, if a probe measured it; else an empty text."""
    probes = [run.manifest["replay"]["probe"] for runs in reals.values() for run in runs]
    if None in probes:
        return ""
    medians = [probe["slowness"]["p50"] for probe in probes]
    return (
        f"time scaled by a probe (a step of one token), which took {min(medians):.2f} to {max(medians):.2f} times its "
        f"{probes[0]['probe_ns'] / 1e6:.2g} ms, "
    )


def _real_overrides(model: Path, *, quick: bool) -> list[str]:
    from real.device import resolve_device

    # one thread, and on a CPU time scaled by a probe: least affected by other processes; a GPU is not shared
    pace = ["backend.pace=probe_scaled"] if resolve_device("auto").type == "cpu" else []
    short = ["trace.limit=50"] if quick else []
    return ["experiment=demo_real", f"model.path={model}", "backend=real", "backend.num_threads=1", *pace, *short]


def _simulated(overrides: list[str], fitted: Fitted) -> list[str]:
    """Turns the overrides of a real run into those of its simulation with fitted step times."""
    return [*(item for item in overrides if not item.startswith("backend")), *fitted.overrides]


def _load(folder: Path, base: list[str], policies: list[list[str]], fitted: Fitted) -> tuple[float, int]:
    """Returns the highest rate scale at which, in simulation, no policy overloads this machine, and the number of
    requests to replay."""
    summary: dict[str, Any] = {}
    for scale in progressing(RATE_SCALES, "choosing the load", "scale"):
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
