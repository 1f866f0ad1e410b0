"""Requests: what enters the core. Owns the shape of a request and its validation; knows no blocks and no policies."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from testbed.errors import RequestError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when a sequence stops.

    temperature: 0 is greedy. max_tokens: None means up to the model's length. seed: None derives one from the run's.
    n: sequences that grow from the prompt. best_of: as many instead, if given. beam_width: 0 is no beam search;
    otherwise the beams kept at each step. All that were grown are returned: which n are best is not decided here.
    """

    temperature: float = 0.0
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    beam_width: int = 0

    @property
    def num_seqs(self) -> int:
        """How many sequences grow from the prompt at most."""
        return self.beam_width or self.best_of or self.n

    def __post_init__(self) -> None:
        if self.n < 1:
            raise RequestError(f"sampling.n is {self.n}; it must be at least 1")
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"sampling.best_of is {self.best_of}; it must be at least n ({self.n})")
        if self.beam_width < 0 or 0 < self.beam_width < self.n:
            raise RequestError(
                f"sampling.beam_width is {self.beam_width}; it must be 0 (no beam search) or at least n ({self.n})"
            )
        if self.beam_width and self.best_of is not None:
            raise RequestError("sampling.best_of and sampling.beam_width exclude each other; set one")
        if not self.temperature >= 0.0:
            raise RequestError(f"sampling.temperature is {self.temperature}; it must be 0 (greedy) or above")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"sampling.max_tokens is {self.max_tokens}; it must be at least 1")


GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and what is wanted of it.

    `forced_output` holds the very tokens that are emitted, one whenever the computed tokens reach all known ones; the
    model still runs and samples. None means that the backend's sampled tokens count, up to `sampling.max_tokens`.
    All instants are ns on the run's clock, which starts at 0.
    """

    request_id: str
    prompt_token_ids: Seq[int]
    arrival_ns: int = 0
    forced_output: Seq[int] | None = None
    sampling: SamplingParams = field(default=GREEDY)
    priority: int = 0
    tenant: str | None = None
    session_id: str | None = None
    turn: int | None = None
    deadline_ns: int | None = None
    cancel_after_ns: int | None = None
    cache_salt: str = ""  # requests share cached prefixes only with requests of the same salt

    def __post_init__(self) -> None:
        if len(self.prompt_token_ids) == 0:
            raise RequestError(f"request {self.request_id!r} has an empty prompt; give it at least one token")
        if self.forced_output is not None and len(self.forced_output) == 0:
            raise RequestError(f"request {self.request_id!r} forces an empty output; force at least one token")
        if self.arrival_ns < 0:
            raise RequestError(f"request {self.request_id!r} arrives at {self.arrival_ns} ns; it must be 0 or later")
