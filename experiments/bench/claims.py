"""How often the claims of reports hold, as a table: false and true claims, coverage of intervals, false "no
difference".

Traces of each load are simulated under five arms. Of these replicates a few are drawn, again and again, and judged as
a report judges an arm against the baseline. Two arms differ by chance only. A true change is the mean over all traces.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from analysis.comparison.compare import LATENCY, RATES, SLO_METRICS, Comparison, judge
from analysis.measures.statistics import Estimate, differences, mean_t
from analysis.reading.rows import FloatArray
from experiments import simulate
from experiments.bench import machine_line
from experiments.console import Parser

GROUPS = {"latencies": LATENCY, "rates": (*RATES, SLO_METRICS[1]), "attainment": SLO_METRICS[:1]}
METRICS = [metric for group in GROUPS.values() for metric in group]
LENGTHS = {
    what: {"value": median, "sigma": 1.0, "max_tokens": most}
    for what, median, most in (("prompt", 256, 4096), ("output", 24, 512))
}
LOADS: dict[str, dict[str, Any]] = {  # the engine serves some 33 requests/s
    "light: Poisson, 12/s": {"rate": 12},
    "near: Poisson, 26/s": {"rate": 26},
    "bursty: Gamma gaps, CV 3, 24/s": {"rate": 24, "arrival": "gamma", "cv": 3.0},
    "over: Poisson, 45/s": {"rate": 45},
    "mixed: bursts as long as a trace": {"rate": 42, "arrival": "mmpp", "burst_factor": 5},
}
ARMS: dict[str, dict[str, Any]] = {
    "base": {}, "random": {"queue_order": "random"}, "again": {"queue_order": "random"},
    "sarathi": {"name": "sarathi"}, "fewer slots": {"max_num_seqs": 12},
}  # fmt: skip
NUMS, DRAWS = (2, 3, 5, 10), 1000  # replicates of a report; reports of each kind
LIMIT, TRUTH, LEAST = np.log1p((0.02, 0.03, 0.01))  # no difference; one that is; the least whose intervals count
HEADER = (
    "| load | metrics | false claims, most | true claims, mean | coverage, median (least) | false no difference, most |"
)


def main(arguments: Sequence[str]) -> int:
    parser = Parser("python -m experiments.bench.claims", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="traces of each load (200)")
    options = parser.parse_args(arguments)
    if options.seeds < 2 * max(NUMS):
        parser.error(f"--seeds is {options.seeds}; draws of {max(NUMS)} replicates need at least {2 * max(NUMS)}")
    print(f"{machine_line()}\n{options.seeds} traces of 300 requests at each load, {DRAWS} draws each\n")
    print(f"In %, for {', '.join(map(str, NUMS))} replicates.\n\n{HEADER}\n{'|---' * 6}|")
    for load in tqdm(LOADS, disable=None, leave=False):
        for line in _measure(load, options):
            tqdm.write(line)
    return 0


def _measure(load: str, options: argparse.Namespace) -> Iterator[str]:
    values = {name: _values(load, name, options) for name in ARMS}
    found = {num: _shares(values, num) for num in NUMS}
    yield f"| {load} | any of {len(METRICS)} | {_cell(found[num][0].any(axis=0).mean() for num in NUMS)} | | | |"
    for name, group in GROUPS.items():
        rows = [index for index, metric in enumerate(METRICS) if metric in group]
        false, claimed, held, equal = ([found[num][kind][rows] for num in NUMS] for kind in range(4))
        claimed, known = ([each[~np.isnan(each)] for each in kind] for kind in (claimed, held))
        spans = [f"{100 * np.median(each):.0f} ({100 * each.min():.0f})" if each.size else "–" for each in known]
        most, alike = _cell(each.mean(axis=1).max() for each in false), _cell(each.max() for each in equal)
        true = _cell(each.mean() if each.size else math.nan for each in claimed)
        yield f"| | {name} | {most} | {true} | {', '.join(spans)} | {'' if name == 'attainment' else alike} |"


def _cell(shares: Iterable[float]) -> str:
    return ", ".join("–" if math.isnan(share) else f"{100 * share:.1f}" for share in shares)


def _values(load: str, arm: str, options: argparse.Namespace) -> FloatArray:
    """Returns the metrics of an arm under each trace: `[num_metrics, num_seeds]`."""
    rows = []
    for seed in range(options.seeds):
        trace = {"name": "synthetic", "num_requests": 300, "seed": seed, **LOADS[load]} | LENGTHS
        with tempfile.TemporaryDirectory(prefix="testbed-") as scratch:
            run = simulate(
                trace, folder=Path(scratch, "run"), model="llama3.1_8b", slo={"ttft_s": 0.3, "tpot_s": 0.03},
                seed=seed + 10**5 * [*ARMS].index(arm), scheduler={"name": "vllm_v1", "max_num_seqs": 16, **ARMS[arm]},
            )  # fmt: skip
            rows.append([metric.of(run) for metric in METRICS])
    return np.array(rows, dtype=np.float64).T


def _shares(values: dict[str, FloatArray], num: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Returns whether each draw of two equal arms has a false claim `[num_metrics, DRAWS]`; and, of both changes
    `[num_metrics, 2]`, how many are claimed, how many intervals hold the truth, and how many say "no difference" if its
    size is TRUTH."""
    rng = np.random.default_rng(num)
    drawn = [rng.choice(len(values["base"].T), num, replace=False) for _ in range(DRAWS)]
    swaps, equals = rng.integers(0, 2, (DRAWS, num)), np.stack([values["random"], values["again"]])
    false = _claims([_estimates(equals[[swap, 1 - swap], :, one]) for one, swap in zip(drawn, swaps, strict=True)])
    claimed, held, equal = (np.full((len(METRICS), 2), np.nan) for _ in range(3))
    for change, arm in enumerate(("sarathi", "fewer slots")):
        truths = [one.value for one in _estimates((values["base"].T, values[arm].T))]
        found = [_estimates((values["base"].T[one], values[arm].T[one])) for one in drawn]
        claims = _claims(found) == np.sign(truths)[:, None]
        for row, truth in enumerate(truths):
            mine = [of[row] for of in found]
            if abs(truth) >= LEAST:
                claimed[row, change] = claims[row].mean()
                held[row, change] = np.mean([each.low <= truth <= each.high for each in mine])
            shift = np.copysign(TRUTH, truth) - truth
            equal[row, change] = np.mean([max(-each.low - shift, each.high + shift) <= LIMIT for each in mine])
    return false != 0, claimed, held, equal


def _estimates(pair: Iterable[FloatArray]) -> list[Estimate]:
    """Returns the change in each metric, from the values of both arms `[num_replicates, num_metrics]`."""
    return [
        mean_t(*differences(*of, are_shares=metric.is_share), limit=metric.limit)
        for metric, of in zip(METRICS, zip(*(side.T for side in pair), strict=True), strict=True)
    ]


def _claims(drawn: Iterable[Sequence[Estimate]]) -> FloatArray:
    """Returns the claims of a report on each draw: 1 for higher, -1 for lower, else 0 `[num_metrics, num_draws]`."""
    signs = {"higher": 1.0, "lower": -1.0}
    found = []
    for estimates in drawn:
        rows = [
            Comparison("", metric, None, estimate, "unknown")
            for metric, estimate in zip(METRICS, estimates, strict=True)
        ]
        found.append([signs.get(row.verdict, 0.0) for row in judge(rows, 0.0, [""] * len(rows))])
    return np.array(found).T


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
