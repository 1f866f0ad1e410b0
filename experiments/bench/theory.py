"""The simulator against queueing theory, as a table: mean waits of simulated queues, their intervals, and the formulas.

One server (`scheduler.max_num_seqs=1`), a constant step time, one-token prompts; wired as `testbed run` wires it.
Replication k has the seed k. Without priorities every wait is also compared with Lindley's recursion, to the
nanosecond. The formulas are in `analysis/measures/queueing.py`; docs/theory.md explains why they are exact here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

import numpy as np
from tqdm import tqdm

from analysis.measures.queueing import Service, cobham_waits, lindley_waits, pollaczek_khinchine_wait
from analysis.measures.statistics import mean_t
from experiments.bench import machine_line
from experiments.configuration.compose import compose_config
from experiments.configuration.config import RunConfig
from experiments.console import Parser
from experiments.wiring import build
from sim.driver import run as drive
from testbed.core.commands import Recorder, StepView
from testbed.core.serve import serve
from testbed.traces.arrange import arrange
from testbed.traces.generators import arrivals, stream
from testbed.traces.inbox import TraceInbox
from testbed.traces.schema import Span, Trace, TraceRequest

STEP_NS = 10_000_000
SETTINGS = (
    "model=tiny", "cost=constant", f"cost.step_s={STEP_NS / 1e9}", "scheduler.max_num_seqs=1",
    "cache.prefix_caching=false", "cache.num_gpu_blocks=4096",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A queue. urgent: the share of requests with the higher priority; None: first come, first served."""

    name: str
    service: Service
    utilisation: float
    urgent: float | None = None

    @property
    def rate(self) -> float:
        return self.utilisation / self.service.mean_s

    def formulas(self) -> list[tuple[str, float]]:
        """Returns (name, mean wait in seconds) of each priority class."""
        mean, second = self.service.mean_s, self.service.second_moment_s2
        if self.urgent is None:
            return [(self.name, pollaczek_khinchine_wait(self.rate, mean, second))]
        rates = (self.urgent * self.rate, (1 - self.urgent) * self.rate)
        waits = cobham_waits(rates, mean, second)
        return [(f"{self.name}, {who}", wait) for who, wait in zip(("urgent", "others"), waits, strict=True)]


CASES = (
    *(Case("M/D/1", Service.constant(1, STEP_NS), utilisation) for utilisation in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)),
    Case("M/D/1, 8 steps", Service.constant(8, STEP_NS), 0.7),
    *(Case("M/G/1, uniform 1 to 9", Service.uniform(1, 9, STEP_NS), utilisation) for utilisation in (0.5, 0.8)),
    *(Case("M/G/1, geometric, mean 5", Service.geometric(5.0, STEP_NS), utilisation) for utilisation in (0.5, 0.8)),
    Case("M/G/1, lognormal, median 5", Service.lognormal(5.0, 0.8, 100, STEP_NS), 0.8),
    Case("M/G/1, two priorities", Service.geometric(4.0, STEP_NS), 0.7, urgent=0.4),
)


def main(arguments: Sequence[str]) -> int:
    parser = Parser("python -m experiments.bench.theory", description=__doc__)
    parser.add_argument("--replications", type=int, default=20, help="of each case (20)")
    parser.add_argument("--recursions", type=int, default=400, help="seeds of Lindley's recursion alone, cheap (400)")
    parser.add_argument("--requests", type=int, default=10_000, help="of each replication (10000); a tenth is cut")
    options = parser.parse_args(arguments)
    if min(options.replications, options.recursions) < 2 or options.requests < 20:
        parser.error("an interval needs at least 2 replications, and a mean at least 20 requests")
    print(machine_line())
    print(
        f"{options.replications} replications of {options.requests} requests, the first tenth cut; "
        f"a step takes {STEP_NS / 1e6:g} ms\n"
    )
    print(
        "| queue | utilisation | formula, ms | simulated, ms | 95 % interval, ms | difference | inside | = Lindley | "
        f"Lindley over {options.recursions} seeds, ms |\n|---|---:|---:|---:|---:|---:|---|---|---:|"
    )
    num_inside = num_rows = 0
    for case in tqdm(CASES, disable=None, leave=False):
        for line, is_inside in _measure(case, options):
            tqdm.write(line)
            num_inside, num_rows = num_inside + is_inside, num_rows + 1
    print(f"\n{num_inside} of {num_rows} formulas lie inside their 95 % interval")
    return 0


def _measure(case: Case, options: argparse.Namespace) -> list[tuple[str, bool]]:
    """Returns, for each class of the case, a table row and whether the formula's value is inside the interval."""
    means: list[list[float]] = [[] for _ in case.formulas()]
    counted = range(options.requests // 10, options.requests)
    num_exact = 0
    for seed in range(options.replications):
        trace, classes = _trace(case, options.requests, seed)
        waits = simulated_waits(trace, "fcfs" if case.urgent is None else "priority")
        num_exact += waits == _recursion(case, options.requests, seed)
        for index, of_class in enumerate(means):
            of_class.append(fmean(waits[i] / 1e6 for i in counted if classes[i] == index))
    exact = further = "–"
    if case.urgent is None:
        exact = f"{num_exact} of {options.replications}"
        waited = (_recursion(case, options.requests, seed)[counted.start :] for seed in range(options.recursions))
        found = mean_t(np.array([fmean(waits) / 1e6 for waits in waited]))
        further = f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"
    rows = []
    for (name, wait_s), of_class in zip(case.formulas(), means, strict=True):
        found, formula = mean_t(np.array(of_class)), wait_s * 1e3
        is_inside = found.low <= formula <= found.high
        cells = (
            name, f"{case.utilisation:g}", f"{formula:.3f}", f"{found.value:.3f}",
            f"{found.low:.3f} to {found.high:.3f}", f"{100 * (found.value / formula - 1):+.2f} %",
            "yes" if is_inside else "no", exact, further,
        )  # fmt: skip
        rows.append((f"| {' | '.join(cells)} |", is_inside))
    return rows


def _recursion(case: Case, num_requests: int, seed: int) -> list[int]:
    instants, steps = _draws(case, num_requests, seed)
    return lindley_waits(instants, [k * STEP_NS for k in steps])


def _draws(case: Case, num_requests: int, seed: int) -> tuple[list[int], list[int]]:
    """Returns Poisson arrivals in ns, and service times in steps."""
    instants = arrivals("poisson", case.rate, num_requests, stream(seed, "arrival"))
    return instants, case.service.draw(num_requests, stream(seed, "output"))


def _trace(case: Case, num_requests: int, seed: int) -> tuple[Trace, list[int]]:
    """Returns a trace whose output lengths are the service times in steps, and the priority class of each request."""
    instants, steps = _draws(case, num_requests, seed)
    share = 1.0 if case.urgent is None else case.urgent
    classes = (stream(seed, "class").random(num_requests) >= share).astype(int).tolist()
    rows = [
        TraceRequest(f"r{i}", at, (Span(2 * i, 0, 1),), Span(2 * i + 1, 0, k), priority=of_class)
        for i, (at, k, of_class) in enumerate(zip(instants, steps, classes, strict=True))
    ]
    return arrange(case.name, rows), classes


@cache
def _config(queue_order: str) -> RunConfig:
    return compose_config([*SETTINGS, f"scheduler.queue_order={queue_order}"])


def simulated_waits(trace: Trace, queue_order: str) -> list[int]:
    """Returns the wait of each request, from arrival to the start of service, in ns, in order of arrival."""
    config = _config(queue_order)
    core = build.build_scheduler(config, build.simulated_pools(config))
    waits = _Waits()
    drive(
        serve(TraceInbox(trace, build.vocab_size(config)), core, waits),
        build.build_sim_backend(config, trace),
    )
    return [waits.start_ns[row.request_id] - row.arrival_ns for row in trace]


class _Waits(Recorder):
    """Records when each request was first scheduled."""

    def __init__(self) -> None:
        self.start_ns: dict[str, int] = {}

    def committed(self, step: StepView) -> None:
        for admission in step.plan.admitted:
            self.start_ns.setdefault(admission.request_id, step.plan_ns)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
