"""Preemption mode: how a victim's KV is given up, by recompute or by swap."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from testbed.core.interfaces import Estimator
from testbed.core.plan import PreemptionMode
from testbed.core.sequence import Sequence
from testbed.policies.context import PolicyContext


@mypyc_attr(allow_interpreted_subclasses=True)
class Recompute:
    """Always frees the blocks; their tokens are computed again (vLLM V1, nano-vllm)."""

    def mode(self, seq: Sequence, num_blocks: int) -> PreemptionMode:
        return PreemptionMode.RECOMPUTE


@mypyc_attr(allow_interpreted_subclasses=True)
class Swap:
    """Always moves the blocks to the CPU pool and back."""

    def mode(self, seq: Sequence, num_blocks: int) -> PreemptionMode:
        return PreemptionMode.SWAP


@mypyc_attr(allow_interpreted_subclasses=True)
class Auto:
    """Recompute for a request with one running sequence, swap for a group with several (vLLM's first engine)."""

    def mode(self, seq: Sequence, num_blocks: int) -> PreemptionMode:
        return PreemptionMode.RECOMPUTE if seq.num_seqs == 1 else PreemptionMode.SWAP


@mypyc_attr(allow_interpreted_subclasses=True)
class Cheaper:
    """The mode with the shorter predicted time: computing the tokens again, or moving the blocks out and back in.

    If both times are equal, recompute: it uses neither the link nor the CPU pool. The comparison of swap and recompute
    is that of the vLLM paper (SOSP 2023, section 7.3), made for each victim. Prefix-cache hits that could shorten the
    recompute are not predicted.
    """

    asks = ("estimator",)

    def __init__(self) -> None:
        self._estimator: Estimator | None = None

    def bind(self, context: PolicyContext) -> None:
        self._estimator = context.estimator

    def mode(self, seq: Sequence, num_blocks: int) -> PreemptionMode:
        assert self._estimator is not None, "bind comes first"
        swap_ns = 2 * self._estimator.swap_ns(num_blocks)
        return PreemptionMode.SWAP if swap_ns < self._recompute_ns(seq) else PreemptionMode.RECOMPUTE

    def _recompute_ns(self, seq: Sequence) -> int:
        """Returns the time to recompute all sequences of the victim's request; their prompt counts once."""
        assert self._estimator is not None
        prompt, others = seq.num_prompt_tokens, [member for member in seq.together if member is not seq]
        parts = [(0, seq.num_computed_tokens), *((prompt, one.num_computed_tokens - prompt) for one in others)]
        return sum(self._estimator.recompute_ns(start, length) for start, length in parts if length > 0)
