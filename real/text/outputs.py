"""What comes out of the text layer: requests' outputs, under the names that users of vLLM know, and pieces of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from testbed.core.request import Request


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request, the place of its prompt among those given, and the prompt's text (None: token ids were given)."""

    request: Request
    index: int
    prompt: str | None = None


class Logprob(NamedTuple):
    """How likely the model found a token. rank: 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str | None


TokenLogprobs = dict[int, Logprob]  # by token id: the token that was taken first, then the likeliest


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sequence of a request.

    text: of token_ids, without a stop string and what follows it, and without the token that ended it (unless
    include_stop_str_in_output). finish_reason: stop, length, abort, ignored. stop_reason: the stop string or stop token
    that ended it; None for EOS. cumulative_logprob, logprobs: None where they were not asked for.
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
    """Instants on the engine's clock, which goes on from call to call.

    first_token_ns: None where there is no token. num_cached_tokens: of the prompt, found in the prefix cache at the
    first admission; None if it was never admitted.
    """

    arrival_ns: int
    first_token_ns: int | None
    finished_ns: int
    num_cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and all that came of it. message: why it was ignored, otherwise empty. It is finished."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    message: str = ""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finished: bool = field(default=True)


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step added to one sequence.

    index: of the prompt among those given. text: empty while a character, or what may be a stop string, is incomplete.
    finish_reason: None while it goes on.
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
