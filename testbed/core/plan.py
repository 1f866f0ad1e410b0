"""The plan of one step, which the core passes to a backend.

A plan contains everything that a device needs, except the KV of earlier steps and the token behind a PLACEHOLDER.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import StrEnum
from typing import ClassVar, Final, NamedTuple

from mypy_extensions import mypyc_attr

from testbed.core.request import SamplingParams
from testbed.core.value import Value

PLACEHOLDER: Final = -1  # stands for the token that the previous plan, still in flight, samples for this sequence
RESET: Final = ""  # in `BatchPlan.preempted_for`: a reset of the prefix cache instead of a request
Pair = tuple[int, int]  # (source, destination) blocks


class BlockedBy(StrEnum):
    """Why the head of the waiting queue was not admitted in a step."""

    KV_BLOCKS = "kv_blocks"
    TOKEN_BUDGET = "token_budget"
    MAX_NUM_SEQS = "max_num_seqs"
    PARTIAL_PREFILLS = "partial_prefills"
    PREEMPTION = "preemption"
    SWAPPED_FIRST = "swapped_first"
    ADMISSION = "admission"  # rejected by the admission policy
    BATCH = "batch"  # the running batch must end, or decode, first


class PreemptionMode(StrEnum):
    RECOMPUTE = "recompute"
    SWAP = "swap"


class Preemption(NamedTuple):
    seq_id: int
    request_id: str
    mode: PreemptionMode
    num_computed_tokens: int  # before the preemption; recompute computes them again, except prefix-cache hits


class Ignored(NamedTuple):
    seq_id: int
    request_id: str
    reason: str


class Admission(NamedTuple):
    """A waiting sequence that this step admitted. num_cached_tokens: prefix tokens found in the cache."""

    seq_id: int
    request_id: str
    num_cached_tokens: int
    is_resumed: bool


class PrefillChunk(Value):
    """The shape of one prefill in a step: attention reads `start + num_tokens` positions. With a sliding window, start
    is at most window - 1; the chunk's own tokens all count."""

    FIELDS: ClassVar = ("start", "num_tokens")
    __slots__ = FIELDS

    def __init__(self, start: int, num_tokens: int) -> None:
        self.start, self.num_tokens = start, num_tokens


class ScheduledSequence(Value):
    """One row of a plan: what one sequence computes in the step.

    tokens: the `num_tokens` ids at positions start … start + num_tokens - 1. A single PLACEHOLDER stands for the token
    that the previous plan, still in flight, samples. samples: whether a token is sampled from the logits of the last
    position. forced: the sampled token is not used, as the core already has the next one. block_table: physical GPU
    blocks; the slot of position p is `block_table[p // B] * B + p % B` for blocks of B tokens.
    num_samples: tokens to sample from these logits; several at the fork of a group (after the prompt): the first one
    continues this sequence, the others are returned as `Outcome.forks`. group_id: equal for all sequences of a
    request; the rows of a group's beams are adjacent, in their order, and are searched together.
    num_prompt_tokens: the length of the prompt. history: prompt and emitted tokens, only if `sampling.needs_history`.
    score: the sum of the emitted tokens' log-probabilities, if a backend returned them. num_finished: members of its
    group that have ended, without pruned beams.
    """

    FIELDS: ClassVar = (
        "seq_id", "start", "num_tokens", "tokens", "samples", "forced", "block_table", "sampling", "num_samples",
        "group_id", "num_prompt_tokens", "history", "score", "num_finished",
    )  # fmt: skip
    __slots__ = FIELDS

    def __init__(
        self, seq_id: int, start: int, num_tokens: int, tokens: Seq[int], samples: bool, forced: bool,
        block_table: Seq[int], sampling: SamplingParams, num_samples: int = 1, group_id: int = 0,
        num_prompt_tokens: int = 0, history: Seq[int] = (), score: float = 0.0, num_finished: int = 0,
    ) -> None:  # fmt: skip
        self.seq_id, self.start, self.num_tokens, self.tokens = seq_id, start, num_tokens, tokens
        self.samples, self.forced, self.block_table, self.sampling = samples, forced, block_table, sampling
        self.num_samples, self.group_id, self.num_prompt_tokens = num_samples, group_id, num_prompt_tokens
        self.history, self.score, self.num_finished = history, score, num_finished

    @property
    def awaits_token(self) -> bool:
        """Whether its only token is a PLACEHOLDER."""
        return self.start >= self.num_prompt_tokens and list(self.tokens) == [PLACEHOLDER]


@mypyc_attr(free_list_len=1)
class BatchShape(Value):
    """The input of a cost model: integers. A decode row is one token of a sequence whose prompt is computed.

    decode_context_tokens: positions attended, the new one included, summed over the decode rows; the largest of them
    is longest_decode_context (0: not given). repeated_context_tokens: those of them in blocks that another running
    sequence holds too, but for one of each: a device may find them in its cache. num_samples: rows that need logits."""

    FIELDS: ClassVar = (
        "num_decodes", "decode_context_tokens", "prefills", "num_samples", "num_blocks_swapped_out",
        "num_blocks_swapped_in", "num_blocks_copied", "longest_decode_context", "repeated_context_tokens",
    )  # fmt: skip
    __slots__ = FIELDS

    def __init__(
        self, num_decodes: int, decode_context_tokens: int, prefills: tuple[PrefillChunk, ...], num_samples: int,
        num_blocks_swapped_out: int = 0, num_blocks_swapped_in: int = 0, num_blocks_copied: int = 0,
        longest_decode_context: int = 0, repeated_context_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.num_decodes, self.decode_context_tokens, self.prefills = num_decodes, decode_context_tokens, prefills
        self.num_samples, self.num_blocks_swapped_out = num_samples, num_blocks_swapped_out
        self.num_blocks_swapped_in, self.num_blocks_copied = num_blocks_swapped_in, num_blocks_copied
        self.longest_decode_context, self.repeated_context_tokens = longest_decode_context, repeated_context_tokens

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.prefills)

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens

    @property
    def num_blocks_moved(self) -> int:
        """Blocks swapped out, swapped in or copied."""
        return self.num_blocks_swapped_out + self.num_blocks_swapped_in + self.num_blocks_copied

    @property
    def kind(self) -> str:
        """What the step computes: `decode`, `prefill`, or `mixed`; `moves` if nothing (blocks may be moved)."""
        if self.prefills:
            return "mixed" if self.num_decodes else "prefill"
        return "decode" if self.num_decodes else "moves"

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed or moved. Such a step may still preempt, or end requests as ignored."""
        return not (self.num_decodes or self.prefills or self.num_blocks_moved)


class Rows:
    """The rows of a plan, made only when a device reads them; a simulator does not. Not an ABC, as `TokenSource`."""

    def make(self) -> tuple[ScheduledSequence, ...]:
        """Returns the rows. Callable until the plan is committed or another plan is made."""
        raise NotImplementedError

    def num_scheduled(self) -> list[tuple[str, int]]:
        """(request id, tokens) of each row."""
        raise NotImplementedError


@mypyc_attr(free_list_len=1)
class BatchPlan(Value):
    """A decided step. step: its number, from 0 on.

    A device first swaps out, then swaps in, then copies, then computes. Pairs are (source, destination) block ids. Of
    each kind, all sources are read before any destination is written; sources of the same destination have equal
    content. swapped_in: ids of the requests that `swap_in` brings back. has_beams: whether any row belongs to a beam
    search. preempted_for: for each of `preempted`, the request whose growth needed the blocks; None: the victim yields
    to the head of the queue; RESET: a reset of the prefix cache (these come first).
    """

    FIELDS: ClassVar = (
        "step", "shape", "rows", "admitted", "preempted", "swap_out", "swap_in", "swapped_in", "copies", "ignored",
        "blocked_by", "has_beams", "preempted_for",
    )  # fmt: skip
    __slots__ = FIELDS

    def __init__(
        self, step: int, shape: BatchShape, rows: Rows, admitted: tuple[Admission, ...] = (),
        preempted: tuple[Preemption, ...] = (), swap_out: tuple[Pair, ...] = (), swap_in: tuple[Pair, ...] = (),
        swapped_in: tuple[str, ...] = (), copies: tuple[Pair, ...] = (), ignored: tuple[Ignored, ...] = (),
        blocked_by: BlockedBy | None = None, has_beams: bool = False, preempted_for: tuple[str | None, ...] = (),
    ) -> None:  # fmt: skip
        self.step, self.shape, self.rows, self.admitted = step, shape, rows, admitted
        self.preempted, self.swap_out, self.swap_in, self.swapped_in = preempted, swap_out, swap_in, swapped_in
        self.copies, self.ignored, self.blocked_by, self.has_beams = copies, ignored, blocked_by, has_beams
        self.preempted_for = preempted_for

    @property
    def scheduled(self) -> tuple[ScheduledSequence, ...]:
        """The rows, in the order scheduled. Readable until the plan is committed or another plan is made."""
        return self.rows.make()

    @property
    def num_scheduled(self) -> list[tuple[str, int]]:
        """(request id, tokens) of each row, in the order scheduled."""
        return self.rows.num_scheduled()

    @property
    def is_empty(self) -> bool:
        return self.shape.is_empty and not (self.preempted or self.ignored or self.swapped_in)
