"""Requests and their sequences as the shadow sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

from testbed.core.outcome import FinishReason
from testbed.core.request import Request

WAITING, RUNNING, SWAPPED, REJECTED, ENDED = "waiting", "running", "swapped", "rejected", "ended"


@dataclass(eq=False)
class Member:
    """A live sequence as the model sees it. `unit`: those that are scheduled together with it, itself included."""

    seq_id: int
    job: Job
    tokens: list[int]
    prefixes: list[int]  # interned name of tokens[: i + 1]
    place: str = WAITING
    num_computed: int = 0
    num_hit: int = 0
    num_preempted: int = 0
    is_prefilling: bool = False  # admitted, and nothing emitted since
    was_admitted: bool = False
    merged: set[int] = field(default_factory=set)  # positions in a block that took the place of the own one
    table: list[int] = field(default_factory=list)  # as it was when it was looked at last
    at_fork: tuple[list[int], list[int]] = ([], [])  # tokens and prefixes that forks of this step share
    unit: list[Member] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.job.num_prompt :]

    @property
    def num_seqs(self) -> int:
        """Sequences that are, or will be, scheduled together with it."""
        return self.job.width if self.job.is_beam or not self.job.has_forked else len(self.unit)


@dataclass(eq=False)
class Job:
    """A live request."""

    request: Request
    group_id: int
    members: list[Member] = field(default_factory=list)  # live ones
    outputs: list[list[int]] = field(default_factory=list)  # of ended members, in order; dropped ones have none
    reasons: list[FinishReason] = field(default_factory=list)  # of each of them
    num_made: int = 1
    has_forked: bool = False

    @property
    def reason(self) -> FinishReason:
        """That of the member that ended last; but who had a member rejected is not complete."""
        if FinishReason.IGNORED in self.reasons and self.reasons[-1] is not FinishReason.ABORT:
            return FinishReason.IGNORED
        return self.reasons[-1] if self.reasons else FinishReason.DROPPED

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def is_beam(self) -> bool:
        return self.request.sampling.beam_width > 1

    @property
    def width(self) -> int:
        sampling = self.request.sampling
        return sampling.beam_width or sampling.best_of or sampling.n

    @property
    def is_forced(self) -> bool:
        return self.request.forced_output is not None and not self.is_beam

    def max_output(self, max_model_len: int) -> int:
        forced, wanted = self.request.forced_output, self.request.sampling.max_tokens
        room = max(1, max_model_len - self.num_prompt)
        wanted = wanted if forced is None else len(forced)
        return room if wanted is None else min(wanted, room)
