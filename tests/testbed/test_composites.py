"""A policy made of others: its parts are bound, told and asked as if each stood alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from testbed.composites import declared, with_parts
from testbed.policies.admission import All, Watermark
from testbed.policies.compositions.prefill_decode_split import PrefillDecodeSplit
from testbed.policies.compositions.prefill_first import PrefillFirst
from testbed.policies.context import bind
from testbed.policies.orders import WindowedQueue
from testbed.routing.routers import RouterContext, SessionSticky
from testbed.routing.routers import bind as bind_router
from tests.testbed.core_kit import make_limits, make_request, make_scheduler
from tests.testbed.stepping import add, drain, step


class FewAlive:
    """Admits while fewer than three requests are alive, of which it knows by what it is told only."""

    def __init__(self) -> None:
        self.now_ns = -1
        self.alive: set[int] = set()
        self.instants: list[int] = []
        self.num_bound = 0

    def bind(self, context: Any) -> None:
        self.num_bound += 1

    def allows(self, seq: Any, running: Any) -> bool:
        self.instants.append(self.now_ns)
        return len(self.alive) < 3

    def served(self, seq: Any, num_tokens: int, num_emitted: int, now_ns: int) -> None:
        self.alive.add(seq.seq_id)

    def left(self, seq: Any, now_ns: int) -> None:
        self.alive.discard(seq.seq_id)


class Arrives(FewAlive):
    def arrange(self, waiting: list[Any]) -> list[Any]:
        return waiting


class Wraps:
    """A user's composition on another one."""

    def __init__(self, of: Any) -> None:
        self.parts = (of,)

    def compose(self, step: Any) -> None:
        self.parts[0].compose(step)


def test_a_rule_of_a_list_decides_as_it_does_alone() -> None:
    numbers = []
    for made in (lambda rule: rule, lambda rule: All([Watermark(), rule]), lambda rule: All([All([rule])])):
        rule = FewAlive()
        scheduler = make_scheduler(admission=made(rule), limits=make_limits(seqs=1, budget=8))
        for number in range(6):
            add(scheduler, make_request(f"r{number}", 4, 6))
        numbers.append([])
        for _ in range(12):
            step(scheduler)
            numbers[-1].append((scheduler.num_running, len(rule.alive)))
        assert drain(scheduler)
        assert not rule.alive
        assert min(rule.instants) >= 0, "it was told the time before it was asked"
    assert numbers[0] == numbers[1] == numbers[2]


def test_every_part_is_bound_once_and_all_that_may_be_told_are() -> None:
    for made in (lambda part: All([part]), lambda part: Wraps(Wraps(part)), lambda part: WindowedQueue(part, 8)):
        part = Arrives()
        bind(made(part), SimpleNamespace())
        assert part.num_bound == 1
    order = Arrives()
    scheduler = make_scheduler(queue=WindowedQueue(order, 8))
    add(scheduler, make_request("a", 4, 6), make_request("b", 4, 6))
    step(scheduler)
    assert order.alive == {0, 1}
    router = Arrives()
    router.route = lambda request, replicas: 0
    bind_router(SessionSticky(router), RouterContext(0, 2))
    assert router.num_bound == 1


def test_what_a_composition_does_not_say_its_part_says() -> None:
    assert declared(Wraps(PrefillFirst()), "own_rules", ()) == ("budget",)
    assert declared(Wraps(Wraps(PrefillFirst())), "splits_prompts", True) is False
    assert declared(Wraps(FewAlive()), "own_rules", ()) == ()
    scheduler = make_scheduler(Wraps(PrefillDecodeSplit()), limits=make_limits(seqs=2))
    for number in range(6):
        add(scheduler, make_request(f"r{number}", 4, 6))
    for _ in range(3):
        step(scheduler)
    assert scheduler.num_running > 2
    scheduler.check_invariants()  # more run than fit into a batch, as with the inner one alone


def test_an_attribute_of_that_name_may_be_anything_else() -> None:
    for own in (3, "ab", None, {"a": 1}, lambda: ()):
        policy = SimpleNamespace(parts=own)
        assert with_parts([policy]) == [policy]
    assert with_parts([SimpleNamespace(parts=[1, 2])])[1:] == [1, 2]
