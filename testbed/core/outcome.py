"""The outcome of a plan: the backend's results for each sequence, the times of the step, and the ended requests."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import StrEnum
from typing import ClassVar, NamedTuple

from mypy_extensions import mypyc_attr

from testbed.core.request import Request
from testbed.core.value import Value


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # EOS, a stop token, or a stop that the backend reports (a stop string)
    LENGTH = "length"  # max_tokens, max_model_len, or the end of a forced output
    ABORT = "abort"
    IGNORED = "ignored"  # rejected, as it, or a sample of it, can never run
    DROPPED = "dropped"  # a pruned beam; the reason of a group's member, never of a request


class TokenLogprobs(NamedTuple):
    """The log-probability of a token in the model's own distribution, before any sampling parameter is applied.

    rank: 1 + the number of more likely tokens. top: (token id, log-probability) of the most likely tokens, the most
    likely first, as many as were requested.
    """

    logprob: float  # natural logarithm
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprobs(NamedTuple):
    """Log-probabilities of a prompt's tokens at positions start, start + 1, …, each given the tokens before it.

    A prompt that is computed in chunks has one of these for each chunk. Its first token has no log-probability.
    """

    seq_id: int
    start: int
    tokens: tuple[TokenLogprobs, ...]


class Outcome(Value):
    """The backend's result for one sampled row whose output is not forced.

    tokens: the emitted token id. stop: the reason if the sequence ends. forks: the first token of each new sequence
    that forks here; a fork shares all tokens before it. dropped: the sequence ends and emits nothing, as a pruned beam
    or for the reason `stop`; its forks, if any, go on. logprobs: one for each of `tokens`, then for each of `forks`, if
    `sampling.needs_logprobs`. fork_stops: the reason of each fork that ends, else None; empty: no fork ends.
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
    """The parts of a step's time, in ns. Their sum may differ from the step's duration, by idle time or overlap."""

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
    """The result of an executed step. end_ns: when it ended, on the run's clock.

    outcomes: one for each sampled row that is not forced, in the order scheduled; None if there is no such row.
    prompt_logprobs: for the rows that computed a part of a prompt with `sampling.prompt_logprobs`, forced or not.
    """

    FIELDS: ClassVar = ("end_ns", "outcomes", "spans", "prompt_logprobs")
    __slots__ = FIELDS

    def __init__(
        self, end_ns: int, outcomes: tuple[Outcome, ...] | None = None, spans: Spans | None = None,
        prompt_logprobs: tuple[PromptLogprobs, ...] = (),
    ) -> None:  # fmt: skip
        self.end_ns, self.outcomes, self.prompt_logprobs = end_ns, outcomes, prompt_logprobs
        self.spans = spans if spans is not None else Spans()


class Completion(NamedTuple):
    """One ended sequence of a request.

    logprobs: one for each token; cumulative_logprob: their sum. Without `sampling.needs_logprobs` they are empty and 0.
    Forced tokens have none.
    """

    token_ids: Seq[int]
    reason: FinishReason
    cumulative_logprob: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()


class Finished(NamedTuple):
    """The result of a request that left the scheduler."""

    request: Request
    reason: FinishReason
    message: str
    num_output_tokens: int  # of all its sequences
    output_token_ids: Seq[int]  # of its only sequence, or of the first that ended
    completions: tuple[Completion, ...] = ()  # one for each sequence except pruned beams, in the order they ended
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # if requested, one for each prompt token; None: not known
