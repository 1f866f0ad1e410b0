"""Requests, the input of the core. Owns the fields of a request and its validation; knows no blocks and no policies."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar

from testbed.core.sampling import GREEDY as GREEDY
from testbed.core.sampling import SamplingParams as SamplingParams
from testbed.core.value import Value
from testbed.errors import RequestError


class Request(Value):
    """A prompt with its sampling parameters and arrival.

    forced_output: the tokens that are emitted instead of the sampled ones; the model still runs and samples. None: the
    backend's sampled tokens are emitted, up to `sampling.max_tokens`. cache_salt: requests share cached prefixes only
    if their salts are equal. All instants are ns on the run's clock, which starts at 0. Raises RequestError for an
    empty prompt, an empty forced output, or a negative arrival.
    """

    FIELDS: ClassVar = (
        "request_id", "prompt_token_ids", "arrival_ns", "forced_output", "sampling", "priority", "tenant", "session_id",
        "turn", "deadline_ns", "cancel_after_ns", "cache_salt",
    )  # fmt: skip
    __slots__ = FIELDS

    def __init__(
        self, request_id: str, prompt_token_ids: Seq[int], arrival_ns: int = 0, forced_output: Seq[int] | None = None,
        sampling: SamplingParams = GREEDY, priority: int = 0, tenant: str | None = None, session_id: str | None = None,
        turn: int | None = None, deadline_ns: int | None = None, cancel_after_ns: int | None = None,
        cache_salt: str = "",
    ) -> None:  # fmt: skip
        self.request_id, self.prompt_token_ids, self.arrival_ns = request_id, prompt_token_ids, arrival_ns
        self.forced_output, self.sampling, self.priority = forced_output, sampling, priority
        self.tenant, self.session_id, self.turn = tenant, session_id, turn
        self.deadline_ns, self.cancel_after_ns, self.cache_salt = deadline_ns, cancel_after_ns, cache_salt
        if len(prompt_token_ids) == 0:
            raise RequestError(f"request {request_id!r} has an empty prompt; give it at least one token")
        if forced_output is not None and len(forced_output) == 0:
            raise RequestError(f"request {request_id!r} forces an empty output; force at least one token")
        if arrival_ns < 0:
            raise RequestError(f"request {request_id!r} arrives at {arrival_ns} ns; it must be 0 or later")
