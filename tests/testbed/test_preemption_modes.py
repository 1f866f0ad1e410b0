"""Preemption modes: what each wishes for a victim."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.core.plan import BatchShape, PreemptionMode
from testbed.core.sequence import Sequence
from testbed.policies.context import PolicyContext
from testbed.policies.oracle import NoOracle
from testbed.policies.preemption import Auto, Cheaper, Recompute, Swap
from tests.testbed.admission_kit import forked, make_seq
from tests.testbed.core_kit import make_blocks, make_limits

RECOMPUTE, SWAP = PreemptionMode.RECOMPUTE, PreemptionMode.SWAP


class Prices:
    """10 ns a token, and 1 ns for every 10 tokens of context; 60 ns a block, one way."""

    def step_ns(self, shape: BatchShape) -> int:
        raise AssertionError("no policy of ours asks")

    def recompute_ns(self, start: int, num_tokens: int) -> int:
        assert num_tokens > 0, "no time is asked for nothing"
        return 10 * num_tokens + start * num_tokens // 10

    def swap_ns(self, num_blocks: int) -> int:
        return 60 * num_blocks


def victim(num_computed: int, *, prompt: int = 8, members: tuple[int, ...] = ()) -> Sequence:
    """members: computed tokens of the other sequences of its group."""
    computed = [num_computed, *members]
    seqs = [make_seq(seq_id, prompt, num_seqs=len(computed)) for seq_id in range(len(computed))]
    for seq, num_tokens in zip(seqs, computed, strict=True):
        seq.num_computed_tokens = num_tokens
    return forked(*seqs)[0] if members else seqs[0]


def cheaper(estimator: Any) -> Cheaper:
    policy = Cheaper()
    policy.bind(PolicyContext(make_blocks(), make_limits(), NoOracle(), estimator, 0))
    return policy


def test_two_modes_never_change_their_mind() -> None:
    for seq in (victim(20), victim(20, members=(20, 20))):
        assert Recompute().mode(seq, 5) is RECOMPUTE
        assert Swap().mode(seq, 5) is SWAP


def test_auto_recomputes_one_sequence_and_swaps_a_group() -> None:
    assert Auto().mode(victim(20), 5) is RECOMPUTE
    assert Auto().mode(victim(20, members=(20,)), 5) is SWAP


@pytest.mark.parametrize(("num_computed", "mode"), [(59, RECOMPUTE), (60, RECOMPUTE), (61, SWAP)])
def test_cheaper_compares_computing_again_with_moving_out_and_in(num_computed: int, mode: PreemptionMode) -> None:
    """Five blocks take 2 x 5 x 60 = 600 ns, as long as 60 tokens: then recompute."""
    assert cheaper(Prices()).mode(victim(num_computed), 5) is mode


@pytest.mark.parametrize(("num_blocks", "mode"), [(3, SWAP), (4, RECOMPUTE)])
def test_cheaper_computes_a_groups_prompt_once(num_blocks: int, mode: PreemptionMode) -> None:
    """20 + 8 + 8 tokens at 10 ns, and 8 of them twice behind a context of 20 at 2 ns each: 200 + 96 + 96 = 392."""
    seq = victim(20, prompt=20, members=(28, 28))
    assert cheaper(Prices()).mode(seq, num_blocks) is mode  # 360, 480


def test_cheaper_recomputes_what_has_computed_nothing() -> None:
    assert cheaper(Prices()).mode(victim(0), 1) is RECOMPUTE
