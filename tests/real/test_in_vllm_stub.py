"""This testbed's core in vLLM's scheduler seat, without vLLM: random lives in a stub of its engine and of its workers.

Every request gets the tokens that it gets alone, through preemptions, merged blocks, aborts and pauses; and the tape
of it replays.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from testbed.blocks.config import KVRules
from testbed.core.limits import Limits
from tests.properties.setups import Setup, random_setup
from tests.real.vllm_stub import LOOPS, RUNNERS

pytestmark = pytest.mark.usefixtures("vllm_stub")

SPLIT_NO_PROMPT = ("prefill_first", "iteration_level", "static")


def setup_in_vllm(rng: random.Random, *, is_async: bool) -> Setup:
    """A random core whose plans vLLM can carry out: nobody swaps, no window, and hits are computed."""
    while True:
        setup = random_setup(rng)
        is_merged = setup.rules.duplicates == "merged"
        if is_merged and (is_async or setup.composition not in SPLIT_NO_PROMPT):
            continue
        return replace(
            setup, rules=replace(setup.rules, hits_frozen=False),
            limits=replace(setup.limits, max_num_plans=1 + is_async), num_cpu_blocks=0, preemption="recompute",
            window=None,
        )  # fmt: skip


def lived(setup: Setup, rng: random.Random, folder: Path, *, is_newer: bool, num_operations: int = 60) -> Counter[str]:
    from tests.real.vllm_stub_engine import InVllm

    life = InVllm(setup, rng, folder / "tape.jsonl", is_newer=is_newer)
    for _ in range(num_operations):
        rng.choices((life.add, life.step, life.abort, life.pause, life.reset), (5, 20, 1, 0.5, 0.8))[0]()
    life.drain()
    life.check_tape()
    return life.counts


@RUNNERS
@LOOPS
@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
@example(0)
def test_every_request_gets_the_tokens_that_it_gets_alone(
    tmp_path: Path, is_newer: bool, is_async: bool, seed: int
) -> None:
    rng = random.Random(seed)
    lived(setup_in_vllm(rng, is_async=is_async), rng, tmp_path, is_newer=is_newer)


@RUNNERS
@LOOPS
def test_long_lives_see_all_that_comes_from_outside(tmp_path: Path, is_newer: bool, is_async: bool) -> None:
    counts: Counter[str] = Counter()
    for number in range(30):
        rng = random.Random(f"in vllm/{number}")
        counts += lived(setup_in_vllm(rng, is_async=is_async), rng, tmp_path, is_newer=is_newer, num_operations=150)
    names = (
        "preempted",
        "hits",
        "aborted",
        "aborts in flight",
        "pauses with requests",
        "ends by stop",
        "ends by length",
        "resets of who runs",
        "resets in flight" if is_async else "resets of who runs",
    )
    assert min(counts[name] for name in names) > 40, counts


def merging(rng: random.Random) -> Setup:
    """Blocks of one content become one, while the requests run on."""
    rules = KVRules(duplicates="merged", hits_visible="plan", hit_cap=rng.choice(("last_block", "last_token")))
    return Setup(
        composition="prefill_first", rules=rules, limits=Limits(8, 64, 60, 0, 1), block_size=rng.choice((1, 2, 4)),
        num_blocks=rng.choice((16, 24, 40)), num_cpu_blocks=0, preemption="recompute",
    )  # fmt: skip


@RUNNERS
def test_a_table_that_changed_before_its_end_is_told_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_newer: bool
) -> None:
    from real.vllm import told

    def live_all() -> None:
        for number in range(20):
            rng = random.Random(f"merged/{number}")
            lived(merging(rng), rng, tmp_path, is_newer=is_newer)

    live_all()
    monkeypatch.setattr(told, "_continues", lambda table, known: True)
    with pytest.raises(AssertionError, match="reads a foreign token"):
        live_all()


@RUNNERS
@pytest.mark.parametrize(
    ("change", "is_async", "said"),
    [
        ("the null block", False, "uses the null block|writes where another row writes"),
        ("all blocks again", False, "reads a foreign|which nobody wrote|writes where another row writes"),
        ("no end", False, "the worker remembers who has ended|no place for one more"),
        ("starts a token late", False, "which nobody wrote|reads a foreign|computes|starts at|other tokens|no block"),
        ("no tokens of who was out", True, "its tokens are not told"),
    ],
)
def test_what_is_told_wrong_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_newer: bool, change: str, is_async: bool, said: str
) -> None:
    """That the stub's workers find what vLLM's would do wrong in silence."""
    if is_newer and change == "no tokens of who was out":
        pytest.skip("the newer runner keeps tokens itself")
    from real.vllm.told import Translator

    told = Translator._output

    def wrong(self: Any, new: Any, cached: Any, counts: Any, preempted: Any) -> Any:
        output = told(self, new, cached, counts, preempted)
        if change == "the null block":
            for one in new:
                one.block_ids = ([block - 1 for block in one.block_ids[0]],)
        elif change == "all blocks again":
            cached.new_block_ids = [None if item is None else ([1, *item[0]],) for item in cached.new_block_ids]
        elif change == "no end":
            output.finished_req_ids = set()
        elif change == "starts a token late":
            cached.num_computed_tokens = [num + 1 for num in cached.num_computed_tokens]
        else:
            cached.all_token_ids.clear()
        return output

    def live_all() -> None:
        for number in range(20):
            rng = random.Random(f"wrong/{number}")
            lived(setup_in_vllm(rng, is_async=is_async), rng, tmp_path, is_newer=is_newer)

    live_all()
    monkeypatch.setattr(Translator, "_output", wrong)
    with pytest.raises(AssertionError, match=said):
        live_all()
