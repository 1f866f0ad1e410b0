"""The outputs of the text layer: outputs of requests, under the names that users of vLLM know, and pieces of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from testbed.core.request import Request


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request, the index of its prompt in the call, and the prompt's text (None: token ids were given)."""

    request: Request
    index: int
    prompt: str | None = None


class Logprob(NamedTuple):
    """The log-probability of a token under the model. rank: 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str | None


TokenLogprobs = dict[int, Logprob]  # by token id: first the token itself, then the likeliest ones


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sequence of a request.

    text: that of token_ids, up to a stop string, without the token that ended the sequence; stop string and token are
    included with include_stop_str_in_output. finish_reason: stop, length, abort, ignored. stop_reason: the stop string
    or stop token that ended it; None for EOS. cumulative_logprob, logprobs: None if they were not requested.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times on the engine's clock, which continues from call to call.

    first_token_ns: None if no token was emitted. num_cached_tokens: tokens of the prompt that were found in the prefix
    cache at the first admission; None if the request was never admitted.
    """

    arrival_ns: int
    first_token_ns: int | None
    finished_ns: int
    num_cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its outputs, always finished. message: why the request was ignored, otherwise empty."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    message: str = ""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finished: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step added to one sequence.

    index: that of the prompt in the call. text: empty while a character or a possible stop string is incomplete.
    finish_reason: None until the sequence ends.
    """

    index: int
    request_id: str
    output_index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
