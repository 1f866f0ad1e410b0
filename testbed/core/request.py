"""Requests: what enters the core. Owns the shape of a request and its validation; knows no blocks and no policies."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from testbed.core.sampling import GREEDY as GREEDY
from testbed.core.sampling import SamplingParams as SamplingParams
from testbed.errors import RequestError


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
