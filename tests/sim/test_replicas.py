"""Replicas behind a router: events at their instants, one replica is the plain driver, order at an instant."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.cost.base import CostModel
from sim.cost.config import ConstantConfig
from sim.cost.constant import ConstantCost
from testbed.blocks.config import KVRules
from testbed.blocks.keys import TokenKeys
from testbed.core.commands import StepView
from testbed.core.limits import Limits
from testbed.core.request import Request
from testbed.core.scheduler import Scheduler
from testbed.core.thrash import Thrash
from testbed.errors import ConfigError
from testbed.routing.dispatch import Dispatcher
from testbed.routing.routers import ROUTERS, LeastLoaded, Replicas, RoundRobin, Router, RouterContext, bind
from tests.properties.setups import Setup, random_setup
from tests.sim.fleets import Watched, drive, go_fleet, go_plain, world_of
from tests.sim.worlds import Log, Sessions, expect_instants
from tests.testbed.core_kit import make_scheduler
from tests.testbed.stepping import step

ANY = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
STEP_NS = 10
ROOMY = Setup(num_blocks=64)


def step_of(ns: int = STEP_NS) -> CostModel:
    return ConstantCost(ConstantConfig(ns / 1e9))


def request(name: str, arrival_ns: int, num_output: int, num_prompt: int = 2) -> Request:
    return Request(name, list(range(2, 2 + num_prompt)), arrival_ns, forced_output=[0] * num_output)


class To:
    """Sends each request where it is told, by id."""

    def __init__(self, **numbers: int) -> None:
        self._numbers = numbers

    def route(self, request: Request, replicas: Replicas) -> int:
        return self._numbers[request.request_id]


def fleet_of(inbox: Sessions, router: Router, num: int, logs: Sequence[Log] | None = None) -> list[Log]:
    return drive(inbox, router, [ROOMY.scheduler() for _ in range(num)], [step_of()] * num, logs=logs)


def assert_same(setup: Setup, ours: list[Log], theirs: list[Log], case: object) -> None:
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.events == other.events, (setup, case, number)
        assert one.steps == other.steps, (setup, case, number)


# --- random worlds ---


@pytest.mark.parametrize("name", ROUTERS)
@ANY
@given(seed=st.integers(0, 2**32), num=st.integers(1, 4), per_link=st.sampled_from((None, 1, 2)))
def test_replicas_see_what_they_are_sent_where_a_step_ends(
    name: str, seed: int, num: int, per_link: int | None
) -> None:
    setup = random_setup(random.Random(seed))
    logs = go_fleet(setup, seed, ROUTERS[name](), num, replicas_per_link=per_link)
    arrivals, aborts, turns = world_of(seed)
    for log in logs:
        expect_instants(log, arrivals, aborts)
    arrived = [event[1] for log in logs for event in log.events if event[0] == "arrived"]
    assert len(arrived) == len(set(arrived)), "a request is served by one replica"
    assert (
        {one.request_id for one in arrivals} <= set(arrived) <= {one.request_id for one in [*arrivals, *turns.values()]}
    )
    again = go_fleet(setup, seed, ROUTERS[name](), num, replicas_per_link=per_link)
    assert_same(setup, again, logs, (name, seed, num, per_link))


@ANY
@given(seed=st.integers(0, 2**32), num=st.integers(2, 4), name=st.sampled_from(tuple(ROUTERS)))
def test_what_a_router_asks_changes_nothing(seed: int, num: int, name: str) -> None:
    setup = random_setup(random.Random(seed))
    router = ROUTERS[name]()
    bind(router, RouterContext(seed, num))
    watched = Watched(router)
    assert_same(
        setup, go_fleet(setup, seed, watched, num), go_fleet(setup, seed, ROUTERS[name](), num), (name, seed, num)
    )
    assert watched.seen


@ANY
@given(seed=st.integers(0, 2**32))
def test_one_replica_is_the_plain_driver(seed: int) -> None:
    setup = random_setup(random.Random(seed))
    assert_same(setup, go_fleet(setup, seed, RoundRobin(), 1), [go_plain(setup, seed)], seed)


def test_replicas_step_each_for_itself() -> None:
    logs = fleet_of(Sessions([request("a", 0, 30), request("b", 0, 30)], [], {}), RoundRobin(), 2)
    for log in logs:
        assert [step.plan_ns for step in log.views] == [i * STEP_NS for i in range(30)]


# --- events at their instants ---


def test_a_turn_that_is_due_at_once_is_routed_when_all_have_committed() -> None:
    """Both end at 30; the first one's next turn is due then."""
    watched = Watched(To(a=0, b=1, c=0))
    fleet_of(Sessions([request("a", 0, 3), request("b", 0, 3)], [], {"a": request("c", 0, 1)}), watched, 2)
    *_, (name, _, views) = watched.seen
    assert (name, [view[0] for view in views]) == ("c", [0, 0])


class Journal(Log):
    """What happens in a whole fleet, in order."""

    def __init__(self, journal: list[tuple[object, ...]], number: int) -> None:
        super().__init__()
        self._journal, self._number = journal, number

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        self._journal.append((now_ns, "plan with", request.request_id, self._number))

    def committed(self, step: StepView) -> None:
        self._journal.append((step.end_ns, "commit", self._number))


def test_the_order_at_one_instant() -> None:
    """Commits in replica order, session arrivals, routing, plans in replica order."""
    journal: list[tuple[object, ...]] = []

    class Notes(To):
        def route(self, request: Request, replicas: Replicas) -> int:
            journal.append((request.arrival_ns, "route", request.request_id, [one.num_requests for one in replicas]))
            return super().route(request, replicas)

    opened = [request("c", 0, 1), request("a", 0, 1), request("d", STEP_NS, 1)]
    turns = {"a": request("a+", 0, 1)}  # at once
    router = Notes(c=2, a=0, d=1, **{"a+": 1})
    fleet_of(Sessions(opened, [], turns), router, 3, [Journal(journal, number) for number in range(3)])
    assert journal == [
        (0, "route", "c", [0, 0, 0]), (0, "route", "a", [0, 0, 1]),
        (0, "plan with", "a", 0), (0, "plan with", "c", 2),
        (10, "commit", 0), (10, "commit", 2),
        (10, "route", "d", [0, 0, 0]), (10, "route", "a+", [0, 1, 0]),
        (10, "plan with", "d", 1), (10, "plan with", "a+", 1),
        (20, "commit", 1),
    ]  # fmt: skip


def test_an_arrival_is_seen_at_the_first_boundary_of_its_own_replica_alone() -> None:
    inbox = Sessions([request("a", 0, 9), request("b", 0, 9), request("late", 25, 1)], [], {})
    first, second = fleet_of(inbox, To(a=0, b=1, late=1), 2)
    assert ("arrived", "late", 30, 3) in second.events
    assert len(first.steps) == 9


def test_an_abort_follows_its_request() -> None:
    arrivals = [request("a", 0, 9), request("b", 0, 9)]
    inbox = Sessions(arrivals, [(35, "b"), (50, "never came")], {})
    first, second = fleet_of(inbox, RoundRobin(), 2)
    assert ("aborted", "b", 40, 4) in second.events
    assert len(first.steps) == 9
    assert len(second.steps) == 4


def test_a_reset_goes_to_all_replicas() -> None:
    inbox = Sessions([request("a", 0, 9), request("b", 3, 9)], [], {}, resets=(35,))
    busy, later, idle = fleet_of(inbox, To(a=0, b=1), 3)
    assert ("prefixes reset", 40, 4) in busy.events
    assert ("prefixes reset", 43, 4) in later.events
    assert idle.events == [("prefixes reset", 35, 0)]
    assert [len(log.steps) for log in (busy, later, idle)] == [9, 9, 0]
    assert [item.request_id for item in busy.views[4].plan.preempted] == ["a"]


def test_steps_that_are_over_count_when_a_router_looks() -> None:
    """A prompt of 2: after 3 steps 4 tokens are computed and 5 known. At 30 the third is over, and the next not yet
    planned: one block of 4 is held, and full, so it is cached. At 35 the fourth step has its second block."""
    same = request("same", 30, 1).replace(prompt_token_ids=[2, 3, 0, 0, 9])
    inbox = Sessions([request("a", 0, 9), same, request("other", 35, 1, num_prompt=5), request("c", 40, 1)], [], {})
    watched = Watched(To(a=0, same=1, other=1, c=1))
    fleet_of(inbox, watched, 2)
    at_0, at_30, at_35, at_40 = (views for _, _, views in watched.seen)
    assert at_0 == [(0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0)]
    assert at_30[0] == (1, 0, 1, 5, 1, 4)
    assert at_35[0] == (1, 0, 1, 5, 2, 0), "another prompt, and nothing is left of the look before"
    assert at_40[0][:5] == (1, 0, 1, 6, 2)
    assert at_35[1][:4] == (1, 0, 1, 5), "it is asked before what is sent now"
    assert at_40[1][:4] == (1, 1, 0, 5), "seen at 40, when its step is over"


def test_what_came_with_the_look_is_not_seen_before_it() -> None:
    """At 35, `b` goes to replica 0, `x` there is aborted, and then a router looks: at 30, neither was known."""
    inbox = Sessions(
        [request("a", 0, 9), request("x", 0, 9), request("b", 35, 1), request("c", 35, 1)],
        [(35, "x")],
        {"x": request("x+", 0, 1)},
    )
    watched = Watched(To(a=0, x=0, b=0, c=1, **{"x+": 1}))
    first, second = fleet_of(inbox, watched, 2)
    assert [event for event in first.events if event[0] in ("arrived", "aborted")] == [
        ("arrived", "a", 0, 0), ("arrived", "x", 0, 0), ("arrived", "b", 40, 4), ("aborted", "x", 40, 4),
    ]  # fmt: skip
    assert ("arrived", "x+", 45, 1) in second.events, "it came at 40, when the abort was seen"
    assert [views[0][:4] for _, _, views in watched.seen[2:4]] == [(2, 0, 2, 10), (3, 1, 2, 12)]


def test_a_step_that_ends_at_this_instant_is_over_for_the_next_look() -> None:
    """At 30 a step of `a` ends and `b` comes, and then `c` has its replica looked at."""
    inbox = Sessions([request("a", 0, 9), request("b", 30, 1), request("c", 30, 1)], [], {})
    watched = Watched(To(a=0, b=0, c=1))
    first, _ = fleet_of(inbox, watched, 2)
    assert watched.seen[2][2][0] == (2, 1, 1, 7, 1, 0)
    assert ("arrived", "b", 30, 3) in first.events


def test_what_an_abort_brings_is_routed_after_the_plans_of_its_instant() -> None:
    """At 40 replica 1 sees that `x` is aborted; `x+` follows at once, when replica 0 has planned."""
    inbox = Sessions([request("a", 0, 9), request("x", 0, 9)], [(35, "x")], {"x": request("x+", 0, 1)})
    first, second = fleet_of(inbox, To(a=0, x=1, **{"x+": 0}), 2)
    assert ("aborted", "x", 40, 4) in second.events
    assert ("arrived", "x+", 50, 5) in first.events


# --- ends and errors ---


def test_a_replica_that_nobody_needs_is_idle() -> None:
    logs = fleet_of(Sessions([request("a", 5, 3)], [], {}), To(a=1), 3)
    assert [len(log.steps) for log in logs] == [0, 3, 0]
    assert not logs[0].events
    assert fleet_of(Sessions([], [], {}), RoundRobin(), 2)[0].events == []


class Refuses:
    """Schedules nothing."""

    def compose(self, step: object) -> None: ...


def test_work_that_nothing_will_move_is_a_livelock_when_the_others_are_done() -> None:
    schedulers = [ROOMY.scheduler(), make_scheduler(Refuses())]
    inbox = Sessions([request("a", 5, 3), request("b", 6, 3)], [], {})
    logs = drive(inbox, To(a=0, b=1), schedulers, [step_of()] * 2)
    assert len(logs[0].steps) == 3
    assert logs[0].events[-1] == (
        "nothing can be scheduled and nothing will arrive, but 1 left: b (waiting); check the policy",
    )


def thrashing() -> Scheduler:
    """Two prompts of 36 tokens fit in one by one, not together, and are computed in chunks of 4 tokens, a block."""
    return Setup(
        limits=Limits(8, 64, 512, 4, 1), num_blocks=11, num_cpu_blocks=0, caching=False, victim="most_blocks",
        rules=KVRules(allocate="chunk"),
    ).scheduler()  # fmt: skip


@pytest.mark.parametrize("rescued", [(), ("a",), ("a", "c")])
def test_circles_of_replicas_are_told_once_nothing_is_to_come(rescued: tuple[str, ...]) -> None:
    """Two prompts that take each other's blocks on replicas 0 and 1, which never look at the same instant; 2 is done.
    An abort that comes later than the circles are seen to be such frees a replica."""
    schedulers = [thrashing(), thrashing(), ROOMY.scheduler()]
    arrivals = [request(name, 0, 2, num_prompt=36) for name in "abcd"] + [request("e", 0, 2)]
    late_ns = 20 * Thrash.MAX_RETURNS * STEP_NS
    inbox = Sessions(arrivals, [(late_ns, name) for name in rescued], {})
    logs = drive(inbox, To(a=0, b=0, c=1, d=1, e=2), schedulers, [step_of(), step_of(7), step_of()])
    ended = [event[0] for log in logs for event in log.events if event[0] != "arrived"]
    stuck = [name for name in ended if "get nowhere" in name]
    if rescued == ("a", "c"):
        assert not stuck
        assert ended.count("b") == ended.count("d") == 1
    else:
        assert len(stuck) == 1
        assert ("a, b" if not rescued else "c, d") in stuck[0]
        assert ("b" in ended) == bool(rescued)


@pytest.mark.parametrize("answer", [2, -1, None, "0", True])
def test_a_router_that_names_no_replica_is_told_so(answer: object) -> None:
    class Wrong:
        def route(self, request: Request, replicas: Replicas) -> int:
            return answer  # type: ignore[return-value]

    with pytest.raises(ConfigError, match=r"router Wrong sent request 'a' to .*; route\(\) must return the"):
        fleet_of(Sessions([request("a", 0, 1)], [], {}), Wrong(), 2)


def test_what_a_loop_raises_ends_the_run_as_it_is() -> None:
    class Special(Exception):  # noqa: N818
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} {two}")

    class Fails:
        def route(self, request: Request, replicas: Replicas) -> int:
            raise Special(1, 2)

    with pytest.raises(Special, match="1 2"):
        fleet_of(Sessions([request("a", 0, 1)], [], {}), Fails(), 2)


def shown(period_ns: int) -> list[tuple[object, ...]]:
    """What a router was shown of two replicas, and what it answered; a request every 5 ns, steps of 4."""
    arrivals = [request(f"r{number}", 5 * number, 3) for number in range(12)]
    watched, schedulers = Watched(LeastLoaded("requests")), [ROOMY.scheduler(), ROOMY.scheduler()]
    drive(Sessions(arrivals, [], {}), watched, schedulers, [step_of(4)] * 2, router_period_ns=period_ns)
    return watched.seen


def test_a_router_may_see_counts_as_of_the_last_scrape() -> None:
    now, scraped = shown(0), shown(20)
    assert shown(1) == shown(5) == now, "scraped at every arrival: after commits, before routing"
    assert [number for _, number, _ in scraped[:4]] == [0] * 4, "nobody has a request yet, as far as it knows"
    assert [number for _, number, _ in scraped[4:8]] == [1] * 4, "the herd goes on to where few were"
    counts = [[view[:-1] for view in views] for _, _, views in scraped]
    assert all(counts[first] == counts[first + more] for first in (0, 4, 8) for more in range(4))
    assert counts[4][0] > counts[0][0] == counts[4][1]


def test_replicas_may_have_different_prices() -> None:
    schedulers = [ROOMY.scheduler(), ROOMY.scheduler()]
    arrivals = [request("a", 0, 4), request("b", 0, 4), request("c", 15, 1).replace(priority=0)]
    slow, quick = drive(Sessions(arrivals, [], {}), To(a=0, b=1, c=1), schedulers, [step_of(30), step_of(7)])
    assert [event[4] for event in slow.events if event[0] == "a"] == [120]
    assert [event[2] for event in quick.events if event[:2] == ("arrived", "c")] == [21]


def test_a_request_that_all_replicas_are_asked_about_is_hashed_once() -> None:
    class Counting(TokenKeys):
        num_blocks = 0

        def key_of(self, content: bytes, previous_key: int) -> int:
            Counting.num_blocks += 1
            return super().key_of(content, previous_key)

    schedulers = [make_scheduler(num_blocks=64, block_size=4, key_source=Counting(4)) for _ in range(3)]
    dispatcher = Dispatcher(Sessions([], [], {}), RoundRobin(), len(schedulers))
    dispatcher.attach(schedulers)
    first, second = (request(name, 0, 9, num_prompt) for name, num_prompt in (("a", 17), ("b", 25)))
    for scheduler in schedulers[1:]:
        scheduler.add(first)
        step(scheduler)
    Counting.num_blocks = 0
    hits = [replica.num_cached_tokens(second) for replica in dispatcher._replicas]
    assert hits == [0, 16, 16]
    assert Counting.num_blocks == 2 * 3 + 24 // 4, "the rest of the two cached prefixes, and the request once"
    assert [replica.num_cached_tokens(first) for replica in dispatcher._replicas] == [0, 16, 16]
