"""Real replicas in one thread's turns, on a clock and engines that the test turns: who gets what, and when."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.runs.interrupt import interruptible
from real.driver import Computed
from real.fleet import Fleet
from real.late_records import LateRecords
from real.replay import HostTimes
from testbed.core.commands import StepView
from testbed.core.outcome import Spans
from testbed.core.plan import BatchPlan
from testbed.core.request import Request
from testbed.core.scheduler import Scheduler
from testbed.core.serve import serve
from testbed.core.step import Step
from testbed.errors import LivelockError
from testbed.routing.routers import ROUTERS, RoundRobin, Router, RouterContext, bind
from tests.sim.fleets import Watched
from tests.sim.worlds import Log, Sessions
from tests.testbed.core_kit import make_scheduler

ANY = settings(max_examples=30, deadline=None)


class Clock:
    """Moves when somebody rests, and a little whenever it is read."""

    def __init__(self, tick_ns: int = 1) -> None:
        self.ns, self.tick_ns = 0, tick_ns

    def start(self) -> None:
        """It runs already."""

    def before_step(self) -> float:
        return 1.0

    def now_ns(self) -> int:
        self.ns += self.tick_ns
        return self.ns

    def wait_until(self, until_ns: int) -> None:
        self.ns = max(self.ns, until_ns)


@dataclass
class Engine:
    """Takes `step_ns` for each step; its descriptor is always readable, so that nobody sleeps in earnest."""

    clock: Clock
    step_ns: int
    readable: int
    ends_ns: list[int] = field(default_factory=list)
    plans: list[BatchPlan] = field(default_factory=list)
    dies_after: int | None = None

    def start(self, plan: BatchPlan) -> Engine:
        began_ns = max([self.clock.ns, *self.ends_ns[-1:]])
        self.ends_ns.append(began_ns + self.step_ns)
        self.plans.append(plan)
        return self

    @property
    def has_answer(self) -> bool:
        if self.dies_after is not None and len(self.plans) > self.dies_after:
            raise ConnectionError("gone")
        return self.clock.ns >= self.ends_ns[0]

    def fileno(self) -> int:
        self.clock.ns += self.step_ns // 3
        return self.readable

    def wait(self) -> Computed:
        assert self.clock.ns >= self.ends_ns.pop(0), "nobody waits while others could go on"
        return Computed(None, Spans(forward_ns=self.step_ns))


@pytest.fixture(scope="module")
def readable() -> Iterator[int]:
    reading, writing = os.pipe()
    os.write(writing, b".")
    yield reading
    os.close(reading)
    os.close(writing)


def requests(draw: random.Random, num: int) -> list[Request]:
    found, now_ns = [], 0
    for index in range(num):
        now_ns += draw.choice((0, draw.randint(1, 50_000)))
        output = tuple(range(draw.randint(1, 12)))
        prompt = tuple(range(draw.randint(1, 20)))
        found.append(Request(f"r{index}", prompt, arrival_ns=now_ns, forced_output=output))
    return found


def go(
    router: Router, inbox: Sessions, engines: list[Engine], clock: Clock, schedulers: list[Scheduler] | None = None
) -> list[Log]:
    fleet = Fleet(inbox, router, engines, clock, HostTimes())
    schedulers = schedulers or [make_scheduler() for _ in engines]
    logs = [Log() for _ in engines]
    lates = [LateRecords().of(log) for log in logs]
    loops = [
        serve(inbox, scheduler, late) for inbox, scheduler, late in zip(fleet.inboxes, schedulers, lates, strict=True)
    ]
    fleet.run(loops, schedulers, [late.catch_up for late in lates])
    for late in lates:
        late.close()
    for scheduler in schedulers:
        scheduler.check_invariants()
        assert not scheduler.has_work
    return logs


@ANY
@given(seed=st.integers(0, 2**32), num_engines=st.integers(1, 4), name=st.sampled_from(sorted(ROUTERS)))
def test_each_request_ends_once_on_the_replica_that_the_router_named(
    seed: int, num_engines: int, name: str, readable: int
) -> None:
    draw, clock = random.Random(seed), Clock()
    arrivals = requests(draw, draw.randint(1, 25))
    turns = {one.request_id: two.replace(request_id=f"{one.request_id}-2", arrival_ns=draw.randint(0, 90_000))
             for one, two in zip(arrivals[:4], requests(draw, 4), strict=False)}  # fmt: skip
    aborts = [(draw.randint(0, 400_000), one.request_id) for one in arrivals[4:7]]
    router = Watched(ROUTERS[name]())
    bind(router.router, RouterContext(seed, num_engines))
    engines = [Engine(clock, draw.randint(1_000, 40_000), readable) for _ in range(num_engines)]
    logs = go(router, Sessions(arrivals, aborts, turns), engines, clock)
    homes = {str(seen[0]): seen[1] for seen in router.seen}
    assert len(router.seen) == len(homes), "nobody is routed twice"
    ended = [(str(event[0]), number) for number, log in enumerate(logs) for event in log.events if len(event) == 5]
    assert sorted(ended) == sorted(homes.items())
    assert set(homes) == {one.request_id for one in (*arrivals, *turns.values())}


@ANY
@given(seed=st.integers(0, 2**32), num_engines=st.integers(1, 3), tick_ns=st.sampled_from((1, 5_000, 20_000)))
def test_a_replica_with_work_is_never_idle_and_sees_what_came_by_the_end_of_its_step(
    seed: int, num_engines: int, tick_ns: int, readable: int
) -> None:
    draw, clock = random.Random(seed), Clock(tick_ns)
    arrivals = requests(draw, draw.randint(2, 25))
    engines = [Engine(clock, draw.randint(1_000, 40_000), readable) for _ in range(num_engines)]
    logs = go(RoundRobin(), Sessions(arrivals, [], {}), engines, clock)
    came = {one.request_id: one.arrival_ns for one in arrivals}
    for log in logs:
        for before, after in pairwise(log.views):
            assert after.plan_ns >= before.end_ns
            if before.num_running + before.num_waiting > len(_ended_by(log, before.end_ns, before.plan_ns)):
                assert after.plan_ns == before.end_ns, "the step that follows is planned at the end of the one before"
        for kind, name, seen_ns, _ in [event for event in log.events if len(event) == 4]:
            assert kind == "arrived"
            assert seen_ns >= came[str(name)]
            late = [view for view in log.views if came[str(name)] < view.plan_ns < seen_ns]
            assert not late, "a plan after its arrival did not see it"


def _ended_by(log: Log, end_ns: int, plan_ns: int) -> list[object]:
    return [event for event in log.events if len(event) == 5 and plan_ns < int(str(event[4])) <= end_ns]


def test_steps_of_replicas_run_side_by_side(readable: int) -> None:
    clock = Clock()
    ones = [Request(f"r{i}", (1, 2), forced_output=tuple(range(10))) for i in range(2)]
    engines = [Engine(clock, 30_000, readable) for _ in range(2)]
    logs = go(RoundRobin(), Sessions(ones, [], {}), engines, clock)
    assert [len(log.views) for log in logs] == [10, 10]
    for one, other in zip(logs[0].views[1:-1], logs[1].views[1:-1], strict=True):
        assert abs(one.plan_ns - other.plan_ns) < 15_000, "not one after the other"


def test_what_ends_an_engine_passes_through_and_what_is_committed_stays(readable: int) -> None:
    clock = Clock()
    ones = [Request(f"r{i}", (1, 2), forced_output=tuple(range(30))) for i in range(2)]
    engines = [Engine(clock, 10_000, readable), Engine(clock, 10_000, readable, dies_after=5)]
    fleet = Fleet(Sessions(ones, [], {}), RoundRobin(), engines, clock, HostTimes())
    schedulers, logs = [make_scheduler(), make_scheduler()], [Log(), Log()]
    loops = [serve(box, one, log) for box, one, log in zip(fleet.inboxes, schedulers, logs, strict=True)]
    with pytest.raises(ConnectionError, match="gone"):
        fleet.run(loops, schedulers)
    assert len(logs[1].views) == 5
    assert len(logs[0].views) >= 4


class Lazy:
    """A composition that never schedules anything."""

    def compose(self, step: Step) -> None: ...


def test_work_that_nothing_will_move_is_a_livelock(readable: int) -> None:
    clock = Clock()
    ones = [Request(f"r{i}", (1, 2), forced_output=(1, 2)) for i in range(2)]
    engines = [Engine(clock, 10_000, readable) for _ in range(2)]
    with pytest.raises(LivelockError, match=r"1 left: r1 \(waiting\)"):
        go(RoundRobin(), Sessions(ones, [], {}), engines, clock, [make_scheduler(), make_scheduler(Lazy())])


def test_ctrl_c_ends_a_fleet_that_rests_long_before_the_next_request(readable: int) -> None:
    class Pressed(Clock):
        def wait_until(self, until_ns: int) -> None:
            if self.ns < 10**6:  # once: a second time would end anything
                signal.raise_signal(signal.SIGINT)
            assert self.ns < 10**9, "it goes on"
            super().wait_until(until_ns)

    clock = Pressed()
    inbox = Sessions([Request("r", (1, 2), arrival_ns=10**15, forced_output=(3,))], [], {})
    fleet = Fleet(inbox, RoundRobin(), [Engine(clock, 1_000, readable) for _ in range(2)], clock, HostTimes())
    schedulers = [make_scheduler() for _ in range(2)]
    loops = [serve(one, scheduler, Log()) for one, scheduler in zip(fleet.inboxes, schedulers, strict=True)]
    with pytest.raises(KeyboardInterrupt), interruptible(loops) as watched:
        fleet.run(watched, schedulers)


def test_a_replica_s_step_is_recorded_while_its_next_one_runs(readable: int) -> None:
    clock = Clock()
    engine = Engine(clock, 1_000, readable)
    launched: list[int] = []  # plans by the time that each step was recorded

    class Noting(Log):
        def committed(self, step: StepView) -> None:
            launched.append(len(engine.plans))

    inbox = Sessions([Request("r", (1, 2), forced_output=(3,) * 6)], [], {})
    fleet = Fleet(inbox, RoundRobin(), [engine], clock, HostTimes())
    scheduler, late = make_scheduler(), LateRecords().of(Noting())
    fleet.run([serve(fleet.inboxes[0], scheduler, late)], [scheduler], [late.catch_up])
    late.close()
    assert launched == [2, 3, 4, 5, 6, 6], "the last one has none behind it"
