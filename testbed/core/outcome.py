"""What became of a plan: what a backend says of each sequence, how long it took, and what has ended with it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import StrEnum
from typing import ClassVar, NamedTuple

from mypy_extensions import mypyc_attr

from testbed.core.request import Request
from testbed.core.value import Value


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # EOS, a stop token, or the backend says so (a stop string)
    LENGTH = "length"  # max_tokens, max_model_len, or the end of a forced output
    ABORT = "abort"
    IGNORED = "ignored"  # can never fit
    DROPPED = "dropped"  # a beam that lost; of a member of a group, never of a request


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


class Outcome(Value):
    """What a backend says of one sequence that was not forced.

    tokens: what it emits. forks: the first token of each new sequence that parts from it here: it shares all that was
    known before, and differs from this token on. dropped: the sequence ends here and emits nothing, as a beam that lost
    or for the reason `stop`; its forks, if any, live. logprobs: of each of `tokens`, then of each of `forks`, where
    `sampling.needs_logprobs`. fork_stops: what `stop` is to the sequence, to each of its forks; empty: none stops.
    """

    FIELDS: ClassVar = ("seq_id", "tokens", "stop", "forks", "dropped", "logprobs", "fork_stops")
    __slots__ = FIELDS

    def __init__(
        self, seq_id: int, tokens: tuple[int, ...], stop: FinishReason | None = None, forks: tuple[int, ...] = (),
        dropped: bool = False, logprobs: tuple[TokenLogprobs, ...] = (),
        fork_stops: tuple[FinishReason | None, ...] = (),
    ) -> None:  # fmt: skip
        self.seq_id, self.tokens, self.stop, self.forks = seq_id, tokens, stop, forks
        self.dropped, self.logprobs, self.fork_stops = dropped, logprobs, fork_stops


@mypyc_attr(free_list_len=1)
class Spans(Value):
    """Where the time of a step went, in ns. What the parts do not cover is idle or overlap."""

    FIELDS: ClassVar = ("schedule_ns", "prepare_ns", "swap_ns", "forward_ns", "sample_ns")
    __slots__ = FIELDS

    def __init__(
        self, schedule_ns: int = 0, prepare_ns: int = 0, swap_ns: int = 0, forward_ns: int = 0, sample_ns: int = 0
    ) -> None:
        self.schedule_ns, self.prepare_ns, self.swap_ns = schedule_ns, prepare_ns, swap_ns
        self.forward_ns, self.sample_ns = forward_ns, sample_ns

    @property
    def total_ns(self) -> int:
        return self.schedule_ns + self.prepare_ns + self.swap_ns + self.forward_ns + self.sample_ns


@mypyc_attr(free_list_len=1)
class StepResult(Value):
    """The end of an executed step (absolute ns), and what came out.

    outcomes: one for each sampled row that was not forced; None means that every row was. prompt_logprobs: of the rows
    that computed a part of a prompt whose `sampling.prompt_logprobs` is set, forced or not.
    """

    FIELDS: ClassVar = ("end_ns", "outcomes", "spans", "prompt_logprobs")
    __slots__ = FIELDS

    def __init__(
        self, end_ns: int, outcomes: tuple[Outcome, ...] | None = None, spans: Spans | None = None,
        prompt_logprobs: tuple[PromptLogprobs, ...] = (),
    ) -> None:  # fmt: skip
        self.end_ns = end_ns
        self.outcomes = outcomes
        self.spans = spans if spans is not None else Spans()
        self.prompt_logprobs = prompt_logprobs


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
    completions: tuple[Completion, ...] = ()  # each sequence, also an only one, in the order they ended
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # one for each of its tokens where asked for; None: unknown
