"""Swaps on the PCIe link: queueing, overlap with the computation, and blocks that must wait for a transfer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.backend import SchedulerTime, SimBackend
from sim.config import SimConfig
from sim.cost.base import CostModel
from sim.driver import LATEST_NS
from sim.fleet import Fleet
from sim.link import HostLink
from testbed.core.commands import Execute, Resume, WaitUntil
from testbed.core.outcome import Spans
from testbed.core.plan import BatchPlan, BatchShape, PrefillChunk, ScheduledSequence
from testbed.core.request import GREEDY
from testbed.core.scheduler import Scheduler
from testbed.core.serve import Loop
from testbed.errors import ConfigError
from testbed.made_rows import MadeRows
from testbed.routing.routers import RoundRobin

BLOCK_SIZE, BLOCK_NS, COMPUTE_NS = 4, 100, 1000
Timing = tuple[int, int, int]  # start, end, time waited on the link


class Prices:
    """A block takes 100 ns each way; a step with tokens computes for 1000 ns."""

    def price(self, shape: BatchShape) -> Spans:
        num_moved = shape.num_blocks_swapped_out + shape.num_blocks_swapped_in
        return Spans(swap_ns=num_moved * BLOCK_NS, forward_ns=COMPUTE_NS if shape.num_tokens else 0)


class PricesOfCopies(Prices):
    """A block that is copied takes 70 ns."""

    def price(self, shape: BatchShape) -> Spans:
        spans = super().price(shape)
        return spans.replace(swap_ns=spans.swap_ns + 70 * shape.num_blocks_copied)


class SlowPrices(Prices):
    """A block that comes back takes longer than the clock can say."""

    def price(self, shape: BatchShape) -> Spans:
        return super().price(shape).replace(swap_ns=shape.num_blocks_swapped_in * LATEST_NS)


class Nothing:
    """An inbox that brings nothing."""

    is_open = False

    def due(self, now_ns: int) -> list[Any]:
        return []

    def next_ns(self) -> int | None:
        return None

    def finished(self, requests: object, now_ns: int) -> None: ...


def plan_of(
    writes: Sequence[int] = (),
    out: Sequence[tuple[int, int]] = (),
    into: Sequence[tuple[int, int]] = (),
    copies: Sequence[tuple[int, int]] = (),
) -> BatchPlan:
    """A step that computes one token into each of these blocks, and moves these (source, destination) pairs."""
    rows = tuple(
        ScheduledSequence(i, BLOCK_SIZE, 1, [0], True, True, [-1, block, 77], GREEDY) for i, block in enumerate(writes)
    )
    shape = BatchShape(len(writes), 5 * len(writes), (), len(writes), len(out), len(into), len(copies))
    return BatchPlan(0, shape, MadeRows(rows), swap_out=tuple(out), swap_in=tuple(into), copies=tuple(copies))


def loop_of(plans: Sequence[BatchPlan | int], timings: list[Timing]) -> Loop:
    """Executes the plans one after the other; a number is an instant to wait for."""
    now_ns = 0
    for plan in plans:
        if isinstance(plan, int):
            now_ns = (yield WaitUntil(plan)).now_ns
            continue
        resume: Resume = yield Execute(plan)
        assert resume.result is not None
        assert resume.now_ns - now_ns == resume.result.end_ns - now_ns == max(1, resume.result.spans.total_ns)
        timings.append((now_ns, resume.now_ns, resume.result.spans.swap_ns))
        now_ns = resume.now_ns


def times(
    *replicas: Sequence[BatchPlan | int],
    per_link: int | None = 1,
    schedule_ns: int = 0,
    prices: CostModel | None = None,
) -> list[list[Timing]]:
    """Start, end and link time of each step, for each replica."""
    backends = [SimBackend(prices or Prices(), scheduler_time=SchedulerTime(schedule_ns)) for _ in replicas]
    fleet = Fleet(Nothing(), RoundRobin(), backends, replicas_per_link=per_link)
    timings: list[list[Timing]] = [[] for _ in replicas]
    schedulers = [cast(Scheduler, SimpleNamespace(blocks=SimpleNamespace(block_size=BLOCK_SIZE))) for _ in replicas]
    fleet.run([loop_of(plans, into) for plans, into in zip(replicas, timings, strict=True)], schedulers)
    return timings


def pairs(first: int, num: int, host: int = 0) -> list[tuple[int, int]]:
    """(GPU block, CPU block), `num` of them."""
    return [(first + i, host + i) for i in range(num)]


def back(first: int, num: int, host: int = 0) -> list[tuple[int, int]]:
    return [(cpu, gpu) for gpu, cpu in pairs(first, num, host)]


# --- one replica, by hand ---


def test_without_overlap_a_step_is_swap_then_compute() -> None:
    assert times([plan_of([50], pairs(0, 5)), plan_of([51], into=back(0, 3))], per_link=None) == [
        [(0, 1500, 500), (1500, 2800, 300)]
    ]


def test_a_swap_out_hides_behind_the_computation() -> None:
    assert times([plan_of([50], pairs(0, 5)), plan_of([51])]) == [[(0, 1000, 0), (1000, 2000, 0)]]


def test_copies_on_the_device_remain_a_part_of_the_step() -> None:
    plan = plan_of([50], pairs(0, 5), copies=[(60, 61)])
    assert times([plan], prices=PricesOfCopies()) == [[(0, 1070, 70)]]


def test_a_step_that_writes_a_block_on_its_way_out_waits_for_it() -> None:
    assert times([plan_of([3], pairs(0, 5))]) == [[(0, 1500, 500)]]
    assert times([plan_of([50], pairs(0, 5), copies=[(60, 3)])]) == [[(0, 1500, 500)]]


def test_a_later_step_waits_for_what_is_left() -> None:
    """The second step starts at 1000, the transfer of 15 blocks ends at 1500."""
    moved = plan_of([50], pairs(0, 15))
    assert times([moved, plan_of([14]), plan_of([14])]) == [[(0, 1000, 0), (1000, 2500, 500), (2500, 3500, 0)]]
    assert times([moved, plan_of([15])])[0][1] == (1000, 2000, 0)


def test_a_step_that_only_preempts_lasts_a_nanosecond() -> None:
    assert times([plan_of((), pairs(0, 5)), plan_of([0])]) == [[(0, 1, 0), (1, 1500, 499)]]


def test_a_step_ends_with_its_swap_in() -> None:
    assert times([plan_of([50], into=back(0, 5))]) == [[(0, 1000, 0)]]
    assert times([plan_of([50], into=back(0, 15))]) == [[(0, 1500, 500)]]
    assert times([plan_of((), into=back(0, 15))]) == [[(0, 1500, 1500)]]


def test_a_transfer_that_ends_beyond_the_clock_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"the simulated clock passes 4\.6e\+09 s: a step lasts 9\.22e\+9 s; check"):
        times([plan_of([50], into=back(0, 2))], prices=SlowPrices())


def test_a_swap_in_waits_for_what_it_reads_and_for_what_it_overwrites() -> None:
    """Out until 1500: blocks 0 to 14, to the host's 0 to 14."""
    first = plan_of([50], pairs(0, 15))
    assert times([first, plan_of([51], into=back(30, 7, host=8))])[0][1] == (1000, 2200, 200), "reads 8 to 14"
    assert times([first, plan_of([51], into=back(14, 7, host=20))])[0][1] == (1000, 2200, 200), "overwrites 14"
    assert times([first, plan_of([51], into=back(30, 7, host=20))])[0][1] == (1000, 2000, 0), "does neither"


def test_directions_do_not_slow_each_other_down() -> None:
    both = plan_of([50], pairs(0, 8), back(30, 12, host=20))
    assert times([both]) == [[(0, 1200, 200)]]


def test_swap_outs_queue() -> None:
    """Two transfers of 15 blocks: the second is asked for at 1000, begins at 1500 and ends at 3000."""
    steps = [plan_of([50], pairs(0, 15)), plan_of([51], pairs(20, 15, host=20)), plan_of([20])]
    assert times(steps)[0][2] == (2000, 4000, 1000)


def test_the_schedulers_time_comes_before_the_transfers() -> None:
    assert times([plan_of([3], pairs(0, 5))], schedule_ns=40) == [[(0, 1540, 500)]]
    assert times([plan_of([3], pairs(0, 5))], schedule_ns=40, per_link=None) == [[(0, 1540, 500)]]
    assert times([plan_of([3])], schedule_ns=40) == [[(0, 1040, 0)]]


# --- several replicas ---


def test_replicas_on_one_link_wait_for_each_other() -> None:
    step = [plan_of([0], pairs(0, 5))]
    assert times(step, step, step, per_link=1) == [[(0, 1500, 500)]] * 3
    assert times(step, step, step, per_link=2) == [[(0, 1500, 500)], [(0, 2000, 1000)], [(0, 1500, 500)]]
    assert times(step, step, step, per_link=3) == [[(0, 1500, 500)], [(0, 2000, 1000)], [(0, 2500, 1500)]]


def test_a_replica_does_not_wait_for_another_ones_blocks() -> None:
    """Both name their blocks by the same numbers."""
    assert times([plan_of((), pairs(0, 15))], [10, plan_of([0])], per_link=2)[1] == [(10, 1010, 0)]


# --- against a reference ---


@given(jobs=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30), st.booleans()), max_size=12))
def test_the_link_serves_in_order_of_arrival(jobs: list[tuple[int, int, bool]]) -> None:
    """end = max(arrival, end of the one before) + duration, in each direction by itself."""
    env = simpy.Environment()
    link = HostLink(env)
    ends: list[int | None] = [None] * len(jobs)

    def user(index: int, arrival: int, duration: int, is_out: bool) -> Any:
        yield env.timeout(arrival)
        yield link.move_out(duration) if is_out else link.move_in(duration, ())
        ends[index] = int(env.now)

    for index, job in enumerate(jobs):
        env.process(user(index, *job))
    env.run()
    free = {True: 0, False: 0}
    for index in sorted(range(len(jobs)), key=lambda i: (jobs[i][0], i)):
        arrival, duration, is_out = jobs[index]
        free[is_out] = max(arrival, free[is_out]) + duration
        assert ends[index] == free[is_out]


def random_plans(rng: random.Random) -> list[BatchPlan]:
    """Steps over few blocks, so that they meet."""
    plans = []
    for _ in range(rng.randint(1, 8)):
        blocks, hosts = rng.sample(range(30), 30), rng.sample(range(30), 30)
        num_out, num_in = rng.choice((0, 0, 1, 6, 12)), rng.choice((0, 0, 1, 6, 12))
        out = list(zip(blocks[:num_out], hosts[:num_out], strict=True))
        into = list(zip(hosts[-num_in:], blocks[-num_in:], strict=True)) if num_in else []
        plans.append(plan_of(rng.sample(range(30), rng.randrange(4)), out, into))
    return [plan for plan in plans if not plan.is_empty]


def reference(plans: Sequence[BatchPlan]) -> list[Timing]:
    """The same by arithmetic alone, for one replica."""
    timings: list[Timing] = []
    now_ns = out_free = 0
    gpu_until: dict[int, int] = {}
    cpu_until: dict[int, int] = {}
    for plan in plans:
        if plan.swap_out:
            out_free = max(now_ns, out_free) + BLOCK_NS * len(plan.swap_out)
            gpu_until |= {gpu: out_free for gpu, _ in plan.swap_out}
            cpu_until |= {cpu: out_free for _, cpu in plan.swap_out}
        end_ns = now_ns
        if plan.swap_in:
            untils = [cpu_until.get(cpu, 0) for cpu, _ in plan.swap_in] + [
                gpu_until.get(gpu, 0) for _, gpu in plan.swap_in
            ]
            end_ns = max(now_ns, *untils) + BLOCK_NS * len(plan.swap_in)
        writes = [row.block_table[1] for row in plan.scheduled]
        compute_ns = COMPUTE_NS if writes else 0
        computed = max([now_ns, *(gpu_until.get(block, 0) for block in writes)]) + compute_ns
        end_ns = max(end_ns, computed)
        timings.append((now_ns, max(end_ns, now_ns + 1), end_ns - now_ns - compute_ns))
        now_ns = timings[-1][1]
    return timings


@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_steps_end_when_arithmetic_says(seed: int) -> None:
    plans = random_plans(random.Random(seed))
    assert times(plans) == [reference(plans)], seed


def test_the_schedulers_time_is_added_to_every_step() -> None:
    backend = SimBackend(Prices(), scheduler_time=SchedulerTime(50, 3))
    work = backend.start(plan_of([1, 2]))
    assert work.duration_ns == 1056
    assert work.spans == Spans(schedule_ns=56, forward_ns=1000)
    shape = BatchShape(3, 3000, (PrefillChunk(1000, 96), PrefillChunk(0, 1000)), 5)
    config = SimConfig(schedule_ns=50, schedule_ns_per_seq=3, schedule_ns_per_1k_tokens=1000)
    assert config.scheduler_time.of(shape) == 50 + 5 * 3 + 4976  # (3000 + 1096 + 1000) / 1.024, rounded down
    assert SimConfig().scheduler_time.of(shape) == 0
