"""What crosses the seam between core and backend: the plan of a step, and what became of it.

A plan says everything that a device needs and nothing else; a backend never reads its own memory of an earlier step.
Everything here is a NamedTuple or a frozen, slotted dataclass.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from enum import StrEnum
from typing import NamedTuple, Protocol, overload

from testbed.core.request import Request, SamplingParams


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # EOS, a stop token, or the backend says so (a stop string)
    LENGTH = "length"  # max_tokens, max_model_len, or the end of a forced output
    ABORT = "abort"
    IGNORED = "ignored"  # can never fit
    DROPPED = "dropped"  # a beam that lost; of a member of a group, never of a request


class BlockedBy(StrEnum):
    """What kept the head of the waiting queue out of a step."""

    KV_BLOCKS = "kv_blocks"
    TOKEN_BUDGET = "token_budget"
    MAX_NUM_SEQS = "max_num_seqs"
    PARTIAL_PREFILLS = "partial_prefills"
    PREEMPTION = "preemption"
    SWAPPED_FIRST = "swapped_first"
    ADMISSION = "admission"  # the admission policy
    BATCH = "batch"  # the running batch must end first


class PreemptionMode(StrEnum):
    RECOMPUTE = "recompute"
    SWAP = "swap"


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step.

    tokens: the `num_tokens` ids at positions start … start + num_tokens - 1. samples: whether one token is drawn from
    the logits of the last of them. forced: the drawn token is not fed back, the core already knows the next one.
    block_table: physical GPU blocks; the slot of position p is `block_table[p // B] * B + p % B`.
    num_samples: tokens to draw from these logits; more than one where a group's members part (the prompt of parallel
    samples): the first continues this sequence, the others come back as `Outcome.forks`. group_id: the same for all
    sequences of a request; the rows of a group's beams stand together, in their order, and are searched together.
    num_prompt_tokens: how many of the known tokens are the prompt's. history: all known tokens, given only where
    `sampling.needs_history`. score: summed log-probability of what the sequence emitted, where it came with the tokens;
    num_finished: members of its group that have ended.
    """

    seq_id: int
    start: int
    num_tokens: int
    tokens: Seq[int]
    samples: bool
    forced: bool
    block_table: Seq[int]
    sampling: SamplingParams
    num_samples: int = 1
    group_id: int = 0
    num_prompt_tokens: int = 0
    history: Seq[int] = ()
    score: float = 0.0
    num_finished: int = 0


class Preemption(NamedTuple):
    seq_id: int
    request_id: str
    mode: PreemptionMode
    num_computed_tokens: int  # what recompute will compute again


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


class PrefillChunk(NamedTuple):
    """The shape of one prefill in a step: attention reads `start + num_tokens` positions.

    With a sliding window start is at most what the window reaches back to; the chunk's own tokens all count.
    """

    start: int
    num_tokens: int


class BatchShape(NamedTuple):
    """The integers that a cost model prices. A decode row is one token of a sequence whose prompt is computed."""

    num_decodes: int
    decode_context_tokens: int  # sum over decode rows of the positions attended, the new one included
    prefills: tuple[PrefillChunk, ...]
    num_samples: int  # rows that need logits
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_blocks_copied: int = 0

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.prefills)

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens


class RowSource(Protocol):
    """Makes the rows of a plan when a device asks for them; a simulator never does."""

    def __call__(self) -> tuple[ScheduledSequence, ...]: ...


class BatchPlan(NamedTuple):
    """One step, decided; or `num_steps` of them, each of the same decodes and, if any, one more chunk of a prompt. What
    else a plan says (admitted, …) is of its first step.

    A device first swaps out, then swaps in, then copies, then computes. Pairs are (source, destination) block ids; all
    sources of a kind are read before any of its destinations is written, and a destination that stands twice gets equal
    contents.
    """

    step: int
    num_steps: int
    shape: BatchShape
    rows: RowSource
    num_scheduled: tuple[tuple[str, int], ...] | None  # (request_id, tokens), only when decisions are recorded
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[Preemption, ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    swapped_in: tuple[str, ...] = ()  # ids of the requests behind `swap_in`
    copies: tuple[tuple[int, int], ...] = ()
    ignored: tuple[Ignored, ...] = ()
    blocked_by: BlockedBy | None = None
    has_beams: bool = False  # whether rows of a beam search are among them

    @property
    def scheduled(self) -> tuple[ScheduledSequence, ...]:
        """The rows, in the order scheduled. Valid until the plan is committed."""
        return self.rows()

    def shape_of(self, index: int) -> BatchShape:
        """The shape of step `index` of the plan: every decode attends to one more position than in the step before, and
        a chunk begins where the one before ended."""
        num_decodes, context, prefills, *rest = self.shape
        if prefills:
            prefills = tuple([PrefillChunk(start + index * count, count) for start, count in prefills])
        return BatchShape(num_decodes, context + index * num_decodes, prefills, *rest)

    @property
    def is_empty(self) -> bool:
        return not (
            self.shape.num_decodes
            or self.shape.prefills
            or self.preempted
            or self.ignored
            or self.swap_out
            or self.swap_in
        )


class TokenLogprobs(NamedTuple):
    """How likely the model found a token, before sampling parameters changed anything.

    rank: 1 + the number of tokens that are likelier. top: the likeliest tokens with theirs, likeliest first, as many as
    were asked for.
    """

    logprob: float  # natural logarithm
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprobs(NamedTuple):
    """The tokens of a prompt at positions start, start + 1, …, each as predicted from those before it.

    A prompt comes in as many pieces as it is computed in; its first token is predicted by nothing.
    """

    seq_id: int
    start: int
    tokens: tuple[TokenLogprobs, ...]


class Outcome(NamedTuple):
    """What a backend says of one sequence that was not forced.

    tokens: what it emits. forks: the first token of each new sequence that parts from it here: it shares all that was
    known before, and differs from this token on. dropped: the sequence ends here and emits nothing (a beam that lost);
    its forks, if any, live. logprobs: of each of `tokens`, then of each of `forks`, where `sampling.needs_logprobs`.
    fork_stops: what `stop` is to the sequence, to each of its forks; empty: none stops.
    """

    seq_id: int
    tokens: tuple[int, ...]
    stop: FinishReason | None = None
    forks: tuple[int, ...] = ()
    dropped: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()
    fork_stops: tuple[FinishReason | None, ...] = ()


class Spans(NamedTuple):
    """Where the time of a step went, in ns. What the parts do not cover is idle or overlap."""

    schedule_ns: int = 0
    prepare_ns: int = 0
    swap_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0


class RunSpans(Seq[Spans]):
    """The spans of steps that differ in forward_ns alone; each is made when somebody looks at it.

    first: of the first step. forward_ns: of each step, the first included.
    """

    __slots__ = ("first", "forward_ns")

    def __init__(self, first: Spans, forward_ns: list[int]) -> None:
        self.first = first
        self.forward_ns = forward_ns

    def __len__(self) -> int:
        return len(self.forward_ns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seq) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of any list

    @overload
    def __getitem__(self, index: int) -> Spans: ...
    @overload
    def __getitem__(self, index: slice) -> RunSpans: ...
    def __getitem__(self, index: int | slice) -> Spans | RunSpans:
        if isinstance(index, slice):
            return RunSpans(self.first, self.forward_ns[index])
        return self.first._replace(forward_ns=self.forward_ns[index])

    def __iter__(self) -> Iterator[Spans]:
        schedule_ns, prepare_ns, swap_ns, _, sample_ns = self.first
        return iter([Spans(schedule_ns, prepare_ns, swap_ns, ns, sample_ns) for ns in self.forward_ns])


class StepResult(NamedTuple):
    """The end of each executed step (absolute ns; fewer than planned if a wake cut the plan), and what came out.

    outcomes: one for each sampled row that was not forced; None means that every row was. spans: of the first step;
    later_spans: of those after it. prompt_logprobs: of the rows that computed a part of a prompt whose
    `sampling.prompt_logprobs` is set, forced or not.
    """

    end_ns: tuple[int, ...]
    outcomes: tuple[Outcome, ...] | None = None
    spans: Spans = Spans()
    later_spans: Seq[Spans] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class Completion(NamedTuple):
    """One sequence of a request that ended.

    cumulative_logprob: the sum over its tokens, and logprobs: of each of them; where `sampling.needs_logprobs`,
    otherwise 0 and empty. Forced tokens have none.
    """

    token_ids: Seq[int]
    reason: FinishReason
    cumulative_logprob: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()


class Finished(NamedTuple):
    """A request left the scheduler."""

    request: Request
    reason: FinishReason
    message: str
    num_output_tokens: int  # of all its sequences
    output_token_ids: Seq[int]  # of its only sequence, or of the first that ended
    outputs: tuple[Seq[int], ...] = ()  # of each sequence of a group, in the order they ended
    completions: tuple[Completion, ...] = ()  # each sequence, also an only one, in the order they ended
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # one for each of its tokens where asked for; None: unknown
