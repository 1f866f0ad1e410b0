"""`make demo`: one ablation in the simulator, the same trace on the real engine, one report that joins them."""

from __future__ import annotations

import itertools
import shlex
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from analysis.comparison.arms import Arm
from analysis.reports.parts import ReportInput
from analysis.reports.report import write_report
from experiments.console.arguments import Parser
from experiments.demo.real_half import SHORTER, measure_fidelity, run_point
from testbed.errors import RunFolderError

# tokens of a step: whole prompts first, against chunks beside the decodes
SCHEDULERS: dict[str, int | None] = {"prefill_first": None, "decode_first": 512}
WATERMARKS = (0.0, 0.1)
CACHING = (True, False)
SEEDS = (0, 1, 2, 3, 4)
OTHER_RATES = (1.5, 4.0, 5.0)  # sessions a second; at the overlay's own, 3, every arm keeps up
QUESTION = (
    "Serving multi-turn chats with a KV pool that is too small for comfort: whole prompts first, or chunks beside the "
    f"decodes in steps of {SCHEDULERS['decode_first']} tokens; with or without a watermark, with or without prefix "
    "caching?"
)


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
    print(f"simulated   {sum(len(arm.runs) for arm in arms)} runs of {len(arms)} arms")
    policies = {
        _name(name, caching): _policy(name, caching, shorter=SHORTER)
        for name, caching in itertools.product(SCHEDULERS, CACHING)
    }
    print(f"replaying   {len(policies)} policies on the real engine of this machine: a few minutes", flush=True)
    fidelity = measure_fidelity(out, policies, quick=options.quick)
    print(f"replayed    {len(policies)} policies on the real engine, each with its simulation: {fidelity.description}")
    report = write_report(
        ReportInput(
            arms,
            fidelity.pairs,
            title="Chunked prefill, watermark and prefix caching: an ablation",
            question=QUESTION,
            baseline=arms[0].name,
            commands=_commands(out, seeds, options.quick),
            notes=(
                "The ablation's prices are the roofline model's for Qwen3-8B on an H100, not measured on one. "
                "The sim-against-real section measures the simulator's error on this machine, with a small model.",
                f"How the sim-against-real section was made: {fidelity.description}.",
            ),
        ),
        out / "report.html",
    )
    print(f"report      {report.absolute()}  ({time.monotonic() - began:.0f} s)")
    return 0


def _name(scheduler: str, caching: bool) -> str:
    return f"{scheduler}, caching {'on' if caching else 'off'}"


def _policy(scheduler: str, caching: bool, *, shorter: int = 1) -> list[str]:
    return [*_scheduler(scheduler, shorter=shorter), f"cache.prefix_caching={str(caching).lower()}"]


def _scheduler(name: str, *, shorter: int = 1) -> list[str]:
    budget = SCHEDULERS[name]
    return [f"scheduler={name}", *([] if budget is None else [f"scheduler.max_num_batched_tokens={budget // shorter}"])]


# --- the ablation, simulated ---


def _ablation(out: Path, seeds: tuple[int, ...]) -> list[Arm]:
    points = list(itertools.product(SCHEDULERS, WATERMARKS, CACHING))
    arms = []
    with tqdm(total=len(points) * len(seeds) + 2 * len(OTHER_RATES) * len(seeds), desc="ablation", disable=None) as bar:
        for scheduler, watermark, caching in points:
            policy = [*_policy(scheduler, caching), f"cache.watermark={watermark}"]
            name = f"{scheduler}, watermark {watermark:g}, caching {'on' if caching else 'off'}"
            levels = {"scheduler.name": scheduler, "cache.watermark": watermark, "cache.prefix_caching": caching}
            rates: tuple[float | None, ...] = (None,)
            if watermark == WATERMARKS[0] and caching:
                rates = (None, *OTHER_RATES)  # the throughput-latency curve
            runs = []
            for rate, seed in itertools.product(rates, seeds):
                overrides = ["experiment=demo", *policy, f"seed={seed}"]
                overrides += [] if rate is None else [f"trace.rate={rate}"]
                folder = f"{scheduler}-w{watermark:g}-{'cache' if caching else 'nocache'}-r{rate or 'base'}-s{seed}"
                runs.append(run_point(overrides, out / "sim" / folder))
                bar.update()
            arms.append(Arm(name, levels, tuple(runs)))
    return arms


def _commands(out: Path, seeds: tuple[int, ...], quick: bool) -> list[str]:
    """What repeats the report: everything at once, or the ablation as sweeps of its own."""
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
