"""Admission policies: whether a waiting sequence with enough free blocks may start, in addition to the watermark.

All of them admit a sequence while nothing runs: it has the whole pool, and waiting would not give it more. Where KV
blocks are counted, each sequence is rounded up to whole blocks, and a group's shared prompt counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from typing import Any

from mypy_extensions import mypyc_attr

from testbed.blocks.kv_sequence import num_distinct
from testbed.checks import choose, require, require_whole
from testbed.core.interfaces import AdmissionPolicy
from testbed.core.limits import Limits
from testbed.core.policies import allows
from testbed.core.sequence import Sequence
from testbed.errors import ConfigError
from testbed.foreign_text import Unchecked
from testbed.policies.context import LengthOracle, PolicyContext
from testbed.policies.oracle import has_no_opinion


@mypyc_attr(allow_interpreted_subclasses=True)
class Watermark:
    """Only the block manager's own rule, the watermark."""

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        return True


@mypyc_attr(allow_interpreted_subclasses=True)
class NoEvict:
    """Reserves blocks until completion, so that no running sequence is preempted (TensorRT-LLM's GUARANTEED_NO_EVICT).

    A sequence starts if the free blocks cover what it needs and what all running sequences still need until they end;
    blocks that it shares with running ones count once. reserve: `declared` uses `sampling.max_tokens` (max_model_len if
    not set); `oracle` uses the predicted length, and `declared_else_oracle` that of requests without `max_tokens`. The
    guarantee holds if no length is above what is reserved for it.

    There are two exceptions: a sequence that started alone and is larger than the pool, and the KV rule
    `growth_test=one_per_sequence`. TensorRT-LLM reserves one more slot, for the last token, whose KV is never computed.
    Raises ConfigError for any other value of `reserve`, or if it names an oracle and there is none.
    """

    def __init__(self, reserve: Unchecked = "declared") -> None:
        choose("scheduler.admission.reserve", reserve, ("declared", "oracle", "declared_else_oracle"))
        self._reserve = reserve
        self.asks = () if reserve == "declared" else ("oracle",)
        self._context: PolicyContext | None = None

    def bind(self, context: PolicyContext) -> None:
        if self._reserve != "declared" and has_no_opinion(context.oracle):
            raise ConfigError(
                f"scheduler.admission.reserve is {self._reserve!r}, but scheduler.oracle is none; choose an oracle, or "
                "'declared'"
            )
        self._context = context

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        return not running or _fits(_bound(self._context), seq, running, self._num_at_end)

    def _num_at_end(self, seq: Sequence) -> int:
        """Returns the number of tokens whose KV is held when the last one is sampled."""
        context = _bound(self._context)
        goes_by_declared = self._reserve != "oracle" and seq.request.sampling.max_tokens is not None
        oracle = None if goes_by_declared or self._reserve == "declared" else context.oracle
        return final_num_tokens(seq, context.limits, oracle) - 1


@mypyc_attr(allow_interpreted_subclasses=True)
class MaxUtilization:
    """Fills the next step as far as possible (TensorRT-LLM's MAX_UTILIZATION): looks only one token ahead.

    A sequence starts if its prompt fits in addition to one more token of every running sequence (and the whole prompt
    of those that are partly prefilled). If blocks run out later, a victim is preempted; with `most_recently_admitted`
    it is the one that started last, as in TensorRT-LLM.
    """

    def __init__(self) -> None:
        self._context: PolicyContext | None = None

    def bind(self, context: PolicyContext) -> None:
        self._context = context

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        return not running or _fits(_bound(self._context), seq, running, lambda one: one.num_tokens)


@mypyc_attr(allow_interpreted_subclasses=True)
class FuturePeak:
    """Admits if the largest future KV use fits (LightLLM; Past-Future Scheduler, ASPLOS 2025).

    It is assumed that all running sequences and the candidate emit one token per step. They are sorted by remaining
    output, the longest first. Just before the k-th one ends, the first k are left, each grown by what the k-th still
    emits; the peak is the largest of these sums. It must leave the share `reserved` of the pool free, as a margin for
    predictions that are too low. Lengths are the oracle's; without a prediction `sampling.max_tokens`, else
    max_model_len.

    As in LightLLM, a prefix shared by several requests is counted for each. LightLLM counts tokens, in a pool without
    blocks, predicts from past outputs, and adds steps for the chunks of a prompt; here the oracle predicts, and a
    prompt takes one step. Raises ConfigError if `reserved` is not in [0, 1).
    """

    asks = ("oracle",)

    def __init__(self, reserved: Unchecked = 0.0) -> None:
        require("scheduler.admission.reserved", reserved, 0 <= reserved < 1, "in [0, 1)")
        self._reserved = reserved
        self._context: PolicyContext | None = None

    def bind(self, context: PolicyContext) -> None:
        self._context = context

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        if not running:
            return True
        num_blocks = _bound(self._context).blocks.num_gpu_blocks
        return self.peak_blocks([*running, seq]) <= num_blocks - int(self._reserved * num_blocks)

    def peak_blocks(self, seqs: Collection[Sequence]) -> int:
        """Returns the largest number of KV blocks that these sequences will hold at once."""
        context = _bound(self._context)
        blocks = context.blocks
        block_size: int = blocks.block_size
        lookahead: int = blocks.lookahead_slots
        num_with_residue = [0] * block_size
        full_blocks = peak = 0
        growing = sorted((item for seq in seqs for item in self._growing(seq, block_size)), reverse=True)
        for rank, (remaining, num_tokens) in enumerate(growing, start=1):
            # the sum over the first `rank` of ceil((num_tokens + lookahead - 1 + remaining) / block_size), in O(1) each
            full, residue = divmod(num_tokens + lookahead - 1 + block_size - 1, block_size)
            full_blocks += full
            num_with_residue[residue] += 1
            more, rest = divmod(remaining, block_size)
            peak = max(peak, full_blocks + rank * more + sum(num_with_residue[block_size - rest :]))
        if blocks.sliding_window is not None:  # it keeps them from growing so far
            peak = min(peak, sum(_num_blocks(seq, self._num_at_end, context) for seq in seqs))
        return peak

    def _num_at_end(self, seq: Sequence) -> int:
        context = _bound(self._context)
        return final_num_tokens(seq, context.limits, context.oracle) - 1

    def _growing(self, seq: Sequence, block_size: int) -> list[tuple[int, int]]:
        """Returns (remaining tokens, tokens now) of each sequence of a request; the shared prompt counts once."""
        context = _bound(self._context)
        growing = [
            (final_num_tokens(member, context.limits, context.oracle) - member.num_tokens, member.num_tokens)
            for member in seq.together
        ]
        growing += growing[:1] * (seq.num_seqs - len(growing))  # those that have not forked yet
        shared = seq.num_prompt_tokens // block_size * block_size
        return growing[:1] + [(remaining, num_tokens - shared) for remaining, num_tokens in growing[1:]]


@mypyc_attr(allow_interpreted_subclasses=True)
class MaxRunningTokens:
    """Limits the tokens of all running sequences when another one starts; running sequences may grow beyond the limit.

    Raises ConfigError for a limit below 1.
    """

    def __init__(self, max_tokens: Unchecked) -> None:
        self._max_tokens = require_whole("scheduler.admission.max_tokens", max_tokens, 1)

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        return not running or sum(map(_context_tokens, running)) + _context_tokens(seq) <= self._max_tokens


@mypyc_attr(allow_interpreted_subclasses=True)
class MaxRunningRequests:
    """Limits the requests that run at once, whatever their numbers of sequences. ConfigError for a limit below 1."""

    def __init__(self, max_requests: Unchecked) -> None:
        self._max_requests = require_whole("scheduler.admission.max_requests", max_requests, 1)

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        return len({other.request_id for other in [*running, seq]}) <= self._max_requests  # at least 1


@mypyc_attr(allow_interpreted_subclasses=True)
class All:
    """Admits a sequence if all of several policies admit it. Raises ConfigError for none, or for others."""

    def __init__(self, of: Seq[AdmissionPolicy]) -> None:
        if not of or not all(hasattr(rule, "allows") for rule in of):
            raise ConfigError(f"scheduler.admission.of is {of}; list admission rules, each as {{_target_: your.Class}}")
        self.parts: tuple[Any, ...] = tuple(of)  # a user's own may answer anything

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        return all(allows(rule, seq, running) for rule in self.parts)


# --- expected lengths ---


def final_num_tokens(seq: Sequence, limits: Limits, oracle: LengthOracle | None) -> int:
    """Returns the number of tokens that the sequence is expected to have when it ends, at least one more than now.

    From the oracle's prediction, if there is one; otherwise from `sampling.max_tokens`; otherwise max_model_len. The
    true length of a forced output is not used.
    """
    most = max(limits.max_model_len - seq.num_prompt_tokens, 1)
    wanted = oracle.predict(seq) if oracle is not None else None
    if wanted is None:
        wanted = seq.request.sampling.max_tokens
    num_output_tokens = most if wanted is None else min(wanted, most)
    return max(seq.num_prompt_tokens + num_output_tokens, seq.num_tokens + 1)


# --- block arithmetic ---


def _fits(
    context: PolicyContext, seq: Sequence, running: Collection[Sequence], num_tokens: Callable[[Sequence], int]
) -> bool:
    """Whether the free blocks are enough for `seq` and all running sequences to hold the KV of `num_tokens` each."""
    blocks = context.blocks
    available = blocks.num_free_blocks
    for other in running:
        num_held = num_distinct([member.block_table for member in other.together])
        available -= max(_num_blocks(other, num_tokens, context) - num_held, 0)
    needed = _num_blocks(seq, num_tokens, context)
    if needed <= available:
        return True
    hit = blocks.lookup(seq)  # only now, as most answers do not depend on it
    # the block of the last token is written, so it may have to be copied
    num_shared = min(len(hit.blocks) - hit.num_unreferenced, (seq.num_tokens - 1) // blocks.block_size)
    return needed - num_shared <= available


def _num_blocks(seq: Sequence, num_tokens: Callable[[Sequence], int], context: PolicyContext) -> int:
    """Returns the number of distinct blocks that the sequences of the request hold until each has `num_tokens`.

    The full blocks of the prompt are shared; all others belong to one sequence each (for beams, an upper bound). Behind
    a sliding window nothing stays shared, and a chunk is held in addition to the window.
    """
    blocks = context.blocks
    shared = 0 if blocks.sliding_window is not None or seq.num_seqs == 1 else seq.num_prompt_tokens // blocks.block_size
    chunk = max(1, min(seq.num_tokens - seq.num_computed_tokens, context.limits.max_num_batched_tokens))
    own = [blocks.demand.num_held_at_most(num_tokens(member), chunk) - shared for member in seq.together]
    return shared + sum(own) + (seq.num_seqs - len(own)) * own[0]


def _context_tokens(seq: Sequence) -> int:
    """Returns the tokens so far of all sequences of the request; the prompt counts once."""
    if seq.num_seqs == 1:
        return seq.num_tokens
    return seq.num_prompt_tokens + sum(member.num_output_tokens for member in seq.together)


# --- context ---


def _bound(context: PolicyContext | None) -> PolicyContext:
    assert context is not None, "bind comes first"
    return context
