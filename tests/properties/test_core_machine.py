"""Random lives of a core: every call is followed by an independent reference, every KV slot's content is known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from testbed.policies.config import Limits
from tests.properties.core_machine import RULES, Pair, Setup, Shape, random_setup, random_shape
from tests.testbed.core_kit import COMPOSITIONS

shapes = st.builds(
    Shape,
    text=st.integers(0, 1),
    num_shared=st.sampled_from((1, 4, 8, 9, 16)),
    num_own=st.integers(0, 4),
    num_output=st.sampled_from((1, 2, 5, 12)),
    is_forced=st.booleans(),
    salt=st.sampled_from(("", "a")),
    ignore_eos=st.booleans(),
    stops=st.sampled_from(((), (3,))),
)
limits = st.integers(1, 20).flatmap(
    lambda budget: st.builds(
        Limits,
        st.sampled_from((1, 2, 8)),
        st.just(budget),
        st.sampled_from((8, 30, 512)),
        st.sampled_from((0, 1, budget)),
        st.integers(1, 3),
    )
)


def setups(composition: str) -> st.SearchStrategy[Setup]:
    return st.builds(
        Setup,
        composition=st.just(composition),
        rules=st.sampled_from(tuple(RULES)),
        caching=st.booleans(),
        num_hashes=st.sampled_from((None, 1, 2, 5)),
        block_size=st.sampled_from((1, 2, 4, 512)),
        num_blocks=st.integers(1, 24),
        watermark=st.sampled_from((0.0, 0.01, 0.2)),
        limits=limits,
        last_is_victim=st.sampled_from((True, True, True, False)),
    )


def followed(method: Callable[..., None]) -> Callable[..., None]:
    """A call that failed leaves nothing to drain."""

    @wraps(method)
    def call(self: CoreMachine, **drawn: Any) -> None:
        self.is_sound = False
        method(self, **drawn)
        self.is_sound = True

    return call


class CoreMachine(RuleBasedStateMachine):
    composition: str
    pair: Pair | None = None
    is_sound = False

    @initialize(data=st.data())
    @followed
    def start(self, data: st.DataObject) -> None:
        self.pair = Pair(data.draw(setups(self.composition)))

    @rule(shape=shapes)
    @followed
    def add(self, shape: Shape) -> None:
        self.pair.add(shape)

    @rule(choice=st.integers(0, 20))
    @followed
    def abort(self, choice: int) -> None:
        self.pair.abort(choice)

    @rule(times=st.sampled_from((1, 1, 2, 5)))
    @followed
    def step(self, times: int) -> None:
        for _ in range(times):
            self.pair.step()

    def teardown(self) -> None:
        if self.is_sound and self.pair is not None:
            self.pair.drain()
            self.pair.check_repeats(seed=1)


def _machine(name: str) -> type:
    machine = type(f"{name}_machine", (CoreMachine,), {"composition": name})
    case = machine.TestCase
    case.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, print_blob=True)
    return case


TestPrefillFirst = _machine("prefill_first")
TestDecodeFirst = _machine("decode_first")
TestUnified = _machine("unified")


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("composition", COMPOSITIONS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=15)
def test_long_lives_under_pressure_follow_the_reference(composition: str, rules: str, seed: int) -> None:
    """Denser than the state machine: many requests in a small pool, so that hits, evictions and preemptions abound."""
    rng = random.Random(seed)
    pair = Pair(replace(random_setup(rng), composition=composition, rules=rules))
    for _ in range(80):
        choice = rng.random()
        if choice < 0.35:
            pair.add(random_shape(rng))
        elif choice < 0.4:
            pair.abort(rng.randrange(100))
        else:
            pair.step()
    pair.drain()
    pair.check_repeats(seed)
