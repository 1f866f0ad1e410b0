"""Routers, one by one, on replicas that are only numbers."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from testbed.core.commands import Arrive
from testbed.core.request import Request
from testbed.errors import ConfigError
from testbed.routing.dispatch import LiveView, Probe, ReplicaInbox
from testbed.routing.routers import (
    ROUTERS,
    LeastLoaded,
    PowerOfTwo,
    PrefixAffinity,
    PrefixHash,
    Random,
    RoundRobin,
    Router,
    RouterContext,
    SessionSticky,
    ShortestQueue,
    bind,
)


@dataclass
class View:
    number: int
    num_requests: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_tokens: int = 0
    num_kv_blocks: int = 0
    hits: Mapping[str, int] = field(default_factory=dict)

    def num_cached_tokens(self, request: Request) -> int:
        return self.hits.get(request.request_id, 0)


def request(name: str, prompt: int | list[int] = 10, session: str | None = None, salt: str = "") -> Request:
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    return Request(name, array("i", tokens), session_id=session, cache_salt=salt)


def fleet(**columns: list[int]) -> list[View]:
    rows = zip(*columns.values(), strict=True)
    return [View(number, **dict(zip(columns, row, strict=True))) for number, row in enumerate(rows)]


def idle(num: int) -> list[View]:
    return [View(number) for number in range(num)]


def seeded(router: Router, seed: int = 0, num: int = 4) -> Router:
    bind(router, RouterContext(seed, num))
    return router


def test_round_robin_goes_round() -> None:
    router = RoundRobin()
    assert [router.route(request(str(i)), idle(3)) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("name", ["random", "power_of_two"])
def test_what_is_drawn_hangs_on_seed_and_request_alone(name: str) -> None:
    names = [f"r{i}" for i in range(4000)]
    draws = {one: seeded(ROUTERS[name]()).route(request(one), idle(4)) for one in names}
    other = seeded(ROUTERS[name]())
    assert {one: other.route(request(one), idle(4)) for one in reversed(names)} == draws
    assert {one: seeded(ROUTERS[name](), 1).route(request(one), idle(4)) for one in names} != draws


def test_random_is_uniform() -> None:
    router = seeded(Random())
    counts = Counter(router.route(request(f"r{i}"), idle(4)) for i in range(8000))
    assert all(abs(counts[number] - 2000) < 5 * (8000 * 3 / 16) ** 0.5 for number in range(4))


def test_power_of_two_compares_two_different_ones() -> None:
    """Of four, the most loaded is never chosen, the least in half of all pairs, the middle ones in a third and a sixth;
    of equals, the lower number."""
    router = seeded(PowerOfTwo())
    loaded = fleet(num_requests=[3, 1, 4, 2])
    counts = Counter(router.route(request(f"r{i}"), loaded) for i in range(6000))
    assert counts[2] == 0
    assert abs(counts[1] - 3000) < 200
    assert abs(counts[3] - 2000) < 200
    assert abs(counts[0] - 1000) < 200
    assert all(router.route(request(f"r{i}"), idle(2)) == 0 for i in range(50))
    assert router.route(request("a"), idle(1)) == 0
    assert seeded(PowerOfTwo("tokens")).route(request("a"), fleet(num_requests=[0, 1], num_tokens=[1, 0])) == 1


@pytest.mark.parametrize(("measure", "number"), [("requests", 0), ("tokens", 1), ("kv_blocks", 2)])
def test_least_loaded_by_each_measure(measure: str, number: int) -> None:
    loaded = fleet(num_requests=[1, 2, 3], num_tokens=[9, 7, 8], num_kv_blocks=[5, 5, 4])
    assert LeastLoaded(measure).route(request("a"), loaded) == number
    assert LeastLoaded(measure).route(request("a"), idle(3)) == 0
    assert LeastLoaded().route(request("a"), loaded) == 1


def test_shortest_queue_breaks_ties_by_running_then_number() -> None:
    router = ShortestQueue()
    assert router.route(request("a"), fleet(num_waiting=[2, 1, 1], num_running=[0, 5, 4])) == 2
    assert router.route(request("a"), fleet(num_waiting=[1, 0, 0], num_running=[0, 3, 3])) == 1


def test_a_load_counts_what_was_sent_and_not_taken_and_who_waits_swapped_out() -> None:
    blocks = SimpleNamespace(num_gpu_blocks=100, num_free_blocks=93)
    scheduler = SimpleNamespace(num_waiting=2, num_swapped=3, num_running=5, num_known_tokens=50, blocks=blocks)
    inbox = ReplicaInbox(lambda requests, now_ns: None)
    replica = LiveView(0, inbox, cast(Any, scheduler), Probe())
    inbox.put(Arrive(request("a", 10)), 0)
    assert (replica.num_requests, replica.num_waiting, replica.num_tokens) == (1, 6, 60)
    inbox.due(0)
    assert (replica.num_requests, replica.num_waiting, replica.num_tokens) == (1, 5, 50)
    assert (replica.num_running, replica.num_kv_blocks) == (5, 7)


def test_prefix_affinity_goes_to_the_longest_cached_prefix() -> None:
    views = fleet(num_requests=[0, 3, 2], num_waiting=[0, 3, 0], num_running=[0, 0, 2])
    views[1].hits = {"most": 8, "equal": 5}
    views[2].hits = {"most": 4, "equal": 5, "little": 3}
    router = PrefixAffinity()
    assert router.route(request("most"), views) == 1
    assert router.route(request("equal"), views) == 2, "the less loaded of equals"
    assert router.route(request("little"), views) == 0, "3 of 10 is not more than 0.3"
    assert router.route(request("little", 9), views) == 2
    assert router.route(request("nothing"), views) == 0


def test_prefix_affinity_gives_way_to_balance() -> None:
    """More than 4 apart, and more than twice as many; by default, 64 apart and 1.5 times as many."""
    router = PrefixAffinity(balance_abs_threshold=4, balance_rel_threshold=2.0)

    def sent_to(low: int, high: int) -> int:
        views = fleet(num_requests=[high, low + 1, low], num_waiting=[1, 0, 1], num_running=[0, 0, 9])
        views[0].hits = {"a": 10}
        return router.route(request("a"), views)

    assert sent_to(1, 5) == 0
    assert sent_to(1, 6) == 2
    assert sent_to(6, 12) == 0
    assert sent_to(6, 13) == 2
    router = PrefixAffinity()
    assert [sent_to(low, high) for low, high in ((9, 73), (9, 74), (130, 195), (130, 196))] == [0, 2, 0, 2]


def test_prefix_hash_keeps_prefixes_together_and_moves_few() -> None:
    router = seeded(PrefixHash(num_tokens=4))
    prompts = [[i, i + 1, i + 2, i + 3] for i in range(600)]
    homes = [router.route(request("a", [*prompt, 1]), idle(4)) for prompt in prompts]
    assert homes == [router.route(request("b", [*prompt, 2, 3]), idle(4)) for prompt in prompts]
    assert min(Counter(homes).values()) > 100
    salted = [router.route(request("a", prompt, salt="s"), idle(4)) for prompt in prompts]
    assert salted != homes
    grown = [router.route(request("a", prompt), idle(5)) for prompt in prompts]
    assert all(new in (old, 4) for new, old in zip(grown, homes, strict=True))
    router = seeded(PrefixHash())
    alike, unlike = ({router.route(request("a", [7] * num + [i]), idle(4)) for i in range(20)} for num in (64, 63))
    assert (len(alike), len(unlike)) == (1, 4), "64 tokens by default"


def test_session_sticky_stays_whatever_the_load() -> None:
    router = SessionSticky()
    assert router.route(request("a", session="s"), fleet(num_tokens=[3, 1, 2])) == 1
    assert router.route(request("b", session="s"), fleet(num_tokens=[0, 99, 0])) == 1
    assert router.route(request("c", session="t"), fleet(num_tokens=[5, 9, 0])) == 2
    assert router.route(request("d"), fleet(num_tokens=[0, 9, 0])) == 0
    turns = SessionSticky("round_robin")
    assert [turns.route(request(str(i), session=s), idle(3)) for i, s in enumerate("abab")] == [0, 1, 0, 1]
    draws = seeded(SessionSticky(Random()), seed=5)
    assert [draws.route(request(f"r{i}"), idle(9)) for i in range(40)] == [
        seeded(Random(), seed=5).route(request(f"r{i}"), idle(9)) for i in range(40)
    ]


def test_session_sticky_remembers_the_sessions_that_were_routed_last() -> None:
    router = SessionSticky("round_robin", max_sessions=2)
    turns = "abacab"  # c comes: b is forgotten, not a; then b begins anew, and c is forgotten
    assert [router.route(request(str(i), session=s), idle(9)) for i, s in enumerate(turns)] == [0, 1, 0, 2, 0, 3]
    for i in range(1_000):
        router.route(request(f"r{i}", session=f"s{i}"), idle(9))
    assert list(router._homes) == ["s998", "s999"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LeastLoaded("token"), "measure of router least_loaded is 'token'; did you mean 'tokens'?"),
        (lambda: PowerOfTwo("blocks"), "measure of router power_of_two is 'blocks'"),
        (lambda: SessionSticky("shortest"), "others of router session_sticky is 'shortest'; did you mean"),
        (lambda: SessionSticky(None), "others of router session_sticky is None; give a router's name"),
        (lambda: PrefixAffinity(1.5), "cache_threshold of router prefix_affinity is 1.5; it must be from 0 to 1"),
        (lambda: PrefixAffinity(0.3, -1), "balance_abs_threshold of router prefix_affinity is -1; it must be at least"),
        (lambda: PrefixAffinity(0.3, 0, 0.5), "balance_rel_threshold of router prefix_affinity is 0.5; it must be at"),
        (lambda: SessionSticky(max_sessions=0), "max_sessions of router session_sticky is 0; it must be at least 1"),
        (lambda: PrefixHash(0), "num_tokens of router prefix_hash is 0; it must be at least 1"),
    ],
)
def test_bad_options_are_named(make: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()  # type: ignore[operator]
    assert str(caught.value).startswith(message) or message in str(caught.value)
