"""Admission: whether a waiting sequence whose blocks are there may start, beside what the watermark says.

All of them let a sequence start when nothing runs: it has the pool to itself, and waiting would not make it larger.
They count KV blocks exactly, each sequence rounded up to whole blocks, a group's shared prompt once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq

from mypy_extensions import mypyc_attr

from testbed.checks import choose, require, require_whole
from testbed.core.interfaces import AdmissionPolicy
from testbed.core.limits import Limits
from testbed.core.sequence import Sequence
from testbed.errors import ConfigError
from testbed.foreign_text import Unchecked
from testbed.policies.context import LengthOracle, PolicyContext
from testbed.policies.oracle import has_no_opinion


@mypyc_attr(allow_interpreted_subclasses=True)
class Watermark:
    """The block manager's own rule, the watermark, and nothing else."""

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        return True


@mypyc_attr(allow_interpreted_subclasses=True)
class NoEvict:
    """Reserves to completion, so that what has started never stops (TensorRT-LLM's GUARANTEED_NO_EVICT).

    A sequence starts if the free blocks cover what all running sequences still lack until they end, and what it needs
    itself; blocks that it shares with running ones are not needed twice. reserve: `declared` goes by
    `sampling.max_tokens` (max_model_len where there is none) and keeps the promise wherever that is an upper bound;
    `oracle` goes by the predicted length, and keeps it as far as no prediction is too low.

    Two things break the promise: a sequence that started alone and is larger than the pool, and a growth test that
    wants a free block for each sequence, needed or not. TensorRT-LLM reserves one slot more, for the last token, whose
    KV nobody computes. Raises ConfigError: `reserve` is neither, or there is no oracle to ask.
    """

    def __init__(self, reserve: Unchecked = "declared") -> None:
        choose("scheduler.admission.reserve", reserve, ("declared", "oracle"))
        self._reserve = reserve
        self._context: PolicyContext | None = None

    def bind(self, context: PolicyContext) -> None:
        if self._reserve == "oracle" and has_no_opinion(context.oracle):
            raise ConfigError(
                "scheduler.admission.reserve is 'oracle', but scheduler.oracle is none; choose an oracle, or 'declared'"
            )
        self._context = context

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        return not running or _fits(_bound(self._context), seq, running, self._last_slot)

    def _last_slot(self, seq: Sequence) -> int:
        """Tokens whose KV is held when the last one is drawn."""
        context = _bound(self._context)
        oracle = context.oracle if self._reserve == "oracle" else None
        return final_num_tokens(seq, context.limits, oracle) - 1 + context.blocks.lookahead_slots


@mypyc_attr(allow_interpreted_subclasses=True)
class MaxUtilization:
    """Packs the next step (TensorRT-LLM's MAX_UTILIZATION): looks one token ahead and no further.

    A sequence starts if its prompt fits beside one more token for every running sequence (and the whole prompt of those
    that are part-way through it). What later cannot grow is paused: with `most_recently_admitted` as the victim, the
    last started one, as there.
    """

    def __init__(self) -> None:
        self._context: PolicyContext | None = None

    def bind(self, context: PolicyContext) -> None:
        self._context = context

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        return not running or _fits(_bound(self._context), seq, running, self._next_slot)

    def _next_slot(self, seq: Sequence) -> int:
        """Tokens whose KV is held when the next one is drawn."""
        return seq.num_tokens + _bound(self._context).blocks.lookahead_slots


@mypyc_attr(allow_interpreted_subclasses=True)
class FuturePeak:
    """Admits if the largest future KV use fits (LightLLM; Past-Future Scheduler, ASPLOS 2025).

    All running sequences and the candidate emit a token a step. With the longest remaining output first, the use just
    before the k-th ends is that of the first k, each grown by what the k-th still emits; the peak is the largest of
    these sums. It must leave the share `reserved` of the pool free, which is there for predictions that are too low.
    Lengths are the oracle's; where it has no opinion, `sampling.max_tokens`, else max_model_len.

    Prefixes that sequences share are counted for each, as LightLLM does. It counts tokens, in a pool without blocks,
    predicts by a moving average of past outputs, and adds steps for the chunks of a prompt: here the oracle predicts,
    and a prompt takes one step. Raises ConfigError if `reserved` is not in [0, 1).
    """

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
        """The most KV blocks that these sequences will hold at once."""
        block_size: int = _bound(self._context).blocks.block_size
        lookahead: int = _bound(self._context).blocks.lookahead_slots
        num_with_residue = [0] * block_size
        full_blocks = peak = 0
        growing = sorted((item for seq in seqs for item in self._growing(seq, block_size)), reverse=True)
        for rank, (remaining, num_tokens) in enumerate(growing, start=1):
            # the sum over the first `rank` of ceil((num_tokens + lookahead - 1 + remaining) / block_size), in one go
            full, residue = divmod(num_tokens + lookahead - 1 + block_size - 1, block_size)
            full_blocks += full
            num_with_residue[residue] += 1
            more, rest = divmod(remaining, block_size)
            peak = max(peak, full_blocks + rank * more + sum(num_with_residue[block_size - rest :]))
        return peak

    def _growing(self, seq: Sequence, block_size: int) -> list[tuple[int, int]]:
        """(tokens still to come, tokens now) of each sequence of a request; the shared prompt counts with its first."""
        context = _bound(self._context)
        members = [seq] if seq.num_seqs == 1 else seq.together
        growing = [
            (final_num_tokens(member, context.limits, context.oracle) - member.num_tokens, member.num_tokens)
            for member in members
        ]
        growing += growing[:1] * (seq.num_seqs - len(members))  # those that have yet to part from it
        shared = seq.num_prompt_tokens // block_size * block_size
        return growing[:1] + [(remaining, num_tokens - shared) for remaining, num_tokens in growing[1:]]


@mypyc_attr(allow_interpreted_subclasses=True)
class MaxRunningTokens:
    """A cap on the tokens known to the running sequences when one more starts; what runs may grow beyond it.

    Raises ConfigError for a cap below 1.
    """

    def __init__(self, max_tokens: Unchecked) -> None:
        self._max_tokens = require_whole("scheduler.admission.max_tokens", max_tokens, 1)

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        return not running or sum(map(_context_tokens, running)) + _context_tokens(seq) <= self._max_tokens


@mypyc_attr(allow_interpreted_subclasses=True)
class MaxRunningRequests:
    """A cap on requests that run at once, however many sequences each has. Raises ConfigError for a cap below 1."""

    def __init__(self, max_requests: Unchecked) -> None:
        self._max_requests = require_whole("scheduler.admission.max_requests", max_requests, 1)

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        ids = {other.request.request_id for other in running}
        ids.add(seq.request.request_id)
        return not running or len(ids) <= self._max_requests


@mypyc_attr(allow_interpreted_subclasses=True)
class All:
    """Admits what each of several rules admits. Raises ConfigError for an empty list."""

    def __init__(self, of: Seq[AdmissionPolicy]) -> None:
        if not of:
            raise ConfigError("scheduler.admission.of is empty; list at least one admission rule")
        self._rules = tuple(of)

    def bind(self, context: PolicyContext) -> None:
        for rule in self._rules:
            bind: Callable[[PolicyContext], None] | None = getattr(rule, "bind", None)
            if bind is not None:
                bind(context)

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        return all(rule.allows(seq, running) for rule in self._rules)


# --- foresight ---


def final_num_tokens(seq: Sequence, limits: Limits, oracle: LengthOracle | None) -> int:
    """Tokens that the sequence is expected to have when it ends, more than it has now.

    The oracle's opinion, if it has one; otherwise what the request declares; otherwise max_model_len. Never the true
    length of a forced output.
    """
    most = max(limits.max_model_len - seq.num_prompt_tokens, 1)
    wanted = oracle.predict(seq) if oracle is not None else None
    if wanted is None:
        wanted = seq.request.sampling.max_tokens
    num_output_tokens = most if wanted is None else min(wanted, most)
    return max(seq.num_prompt_tokens + num_output_tokens, seq.num_tokens + 1)


# --- block arithmetic ---


def _fits(
    context: PolicyContext, seq: Sequence, running: Collection[Sequence], num_slots: Callable[[Sequence], int]
) -> bool:
    """Whether the free blocks let `seq` and all running sequences come to `num_slots` tokens of KV each."""
    blocks = context.blocks
    available = blocks.num_free_blocks
    for other in running:
        available -= max(_num_blocks(other, num_slots, blocks.block_size) - _num_held(other, context), 0)
    needed = _num_blocks(seq, num_slots, blocks.block_size)
    if needed <= available:
        return True
    hit = blocks.lookup(seq)  # only now: most answers do not hang on it
    # the block of the last token is written to, and so may have to be copied
    num_shared = min(len(hit.blocks) - hit.num_unreferenced, (seq.num_tokens - 1) // blocks.block_size)
    return needed - num_shared <= available


def _num_blocks(seq: Sequence, num_slots: Callable[[Sequence], int], block_size: int) -> int:
    """Distinct blocks in which all sequences of the request have room for `num_slots` tokens each.

    The full blocks of the prompt are shared, all else is each sequence's own (for beams, that is the most).
    """
    if seq.num_seqs == 1:
        return -(-num_slots(seq) // block_size)
    shared = seq.num_prompt_tokens // block_size
    own = [-(-num_slots(member) // block_size) - shared for member in seq.together]
    return shared + sum(own) + (seq.num_seqs - len(own)) * own[0]


def _num_held(seq: Sequence, context: PolicyContext) -> int:
    """Distinct blocks that the running request has."""
    if seq.num_seqs == 1:
        return len(seq.block_table)
    return len({block for member in seq.together for block in member.block_table})


def _context_tokens(seq: Sequence) -> int:
    """Known tokens of all sequences of the request; the prompt counts once."""
    if seq.num_seqs == 1:
        return seq.num_tokens
    return seq.num_prompt_tokens + sum(member.num_output_tokens for member in seq.together)


# --- configuration ---


def _bound(context: PolicyContext | None) -> PolicyContext:
    assert context is not None, "bind comes first"
    return context
