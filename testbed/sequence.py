"""Sequences: a request's tokens and how far they are computed. Owns the states; knows no blocks and no policies."""

from __future__ import annotations

from array import array
from enum import IntEnum

from testbed.errors import IllegalTransitionError
from testbed.plan import FinishReason
from testbed.request import Request


class SequenceState(IntEnum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    FINISHED = 3


TRANSITIONS: dict[SequenceState, tuple[SequenceState, ...]] = {
    SequenceState.WAITING: (SequenceState.RUNNING, SequenceState.FINISHED),
    SequenceState.RUNNING: (SequenceState.WAITING, SequenceState.SWAPPED, SequenceState.FINISHED),
    SequenceState.SWAPPED: (SequenceState.RUNNING, SequenceState.WAITING, SequenceState.FINISHED),
    SequenceState.FINISHED: (),
}


class Sequence:
    """One growing sequence of tokens.

    `tokens` is everything known: the prompt and what was emitted. `num_computed_tokens` of them have their KV in GPU
    blocks. A token is emitted whenever the computed tokens reach all known ones.
    """

    __slots__ = (
        "finish_reason",
        "forced",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_slots",
        "request",
        "seq_id",
        "state",
        "stop_tokens",
        "token_limit",
        "tokens",
    )

    def __init__(self, seq_id: int, request: Request, max_model_len: int, stop_token_ids: tuple[int, ...] = ()) -> None:
        self.seq_id = seq_id  # the order of arrival; ties break by it
        self.request = request
        self.tokens = array("i", request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None  # prefix tokens found at the first admission
        self.num_slots = 0  # tokens that its KV blocks have room for; kept by the block manager
        self.num_preemptions = 0
        self.state = SequenceState.WAITING
        self.finish_reason: FinishReason | None = None
        self.forced = request.forced_output
        self.stop_tokens = stop_token_ids
        wanted = len(self.forced) if self.forced is not None else request.sampling.max_tokens
        # the number of tokens at which the sequence ends; one token is always emitted, even at the model's length
        limit = max(max_model_len, self.num_prompt_tokens + 1)
        self.token_limit = limit if wanted is None else min(self.num_prompt_tokens + wanted, limit)

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and what was emitted."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_seqs(self) -> int:
        """Sequences that run together with this one, itself included, now or once the group's members have parted."""
        return 1

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token is still to be computed."""
        return self.num_computed_tokens < len(self.tokens) - 1 or self.num_computed_tokens < self.num_prompt_tokens

    def enter(self, state: SequenceState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"sequence {self.seq_id}: {self.state.name} does not lead to {state.name}")
        self.state = state

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.request.request_id!r}, {self.state.name}, "
            f"{self.num_computed_tokens}/{len(self.tokens)} computed)"
        )
