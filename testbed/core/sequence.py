"""Sequences: a request's tokens and how far they are computed. Owns the states; knows no blocks and no policies.

A request is one sequence, or a group of sequences that grow from one prompt (parallel samples, beams). Queues hold one
entry for a group, its first live member: what happens to that one happens to its `siblings` too.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from enum import IntEnum
from typing import Protocol

from testbed.core.lazy_tokens import LazyTokens
from testbed.core.plan import Completion, Finished, FinishReason, TokenLogprobs
from testbed.core.request import Request
from testbed.errors import IllegalTransitionError


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


class DecodeClock(Protocol):
    """Counts decode steps for the sequences that take part in each of them."""

    tick: int


class SequenceGroup:
    """All sequences of one request that asks for several. It finishes with its last member."""

    __slots__ = ("finished", "group_id", "has_parted", "members", "request")

    def __init__(self, first: Sequence) -> None:
        self.request = first.request
        self.group_id = first.seq_id
        self.members: list[Sequence] = [first]  # live ones, in the order they came to be
        self.finished: list[Sequence] = []
        self.has_parted = False  # whether the prompt's end has made the members

    @property
    def is_beam(self) -> bool:
        return self.request.sampling.beam_width > 1


class Sequence:
    """One growing sequence of tokens.

    `num_tokens` of `tokens` are known: the prompt and what was emitted; a forced sequence holds its future tokens too.
    `num_computed_tokens` of them have their KV in GPU blocks. A token is emitted whenever the computed tokens reach all
    known ones. While a sequence takes part in every decode step its counts follow from the clock of those steps, and
    nothing is written to it.
    """

    __slots__ = (
        "_base",
        "_clock",
        "_num_computed_tokens",
        "_num_tokens",
        "_tokens",
        "admission",
        "finish_reason",
        "group",
        "is_forced",
        "is_prefilling",
        "last_step",
        "logprobs",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_slots",
        "prompt_logprobs",
        "request",
        "score",
        "score_before",
        "seq_id",
        "siblings",
        "state",
        "stop_tokens",
        "stuck_at",
        "token_limit",
        "unit_id",
    )

    def __init__(self, seq_id: int, request: Request, max_model_len: int, stop_token_ids: tuple[int, ...] = ()) -> None:
        sampling, forced = request.sampling, request.forced_output
        self.seq_id = seq_id  # the order of arrival; ties break by it
        self.unit_id = seq_id  # the same for sequences that are scheduled together
        self.request = request
        self.group: SequenceGroup | None = SequenceGroup(self) if sampling.num_seqs > 1 else None
        self.siblings: list[Sequence] | None = None  # those scheduled together with it, itself included; None: alone
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_cached_tokens: int | None = None  # prefix tokens found at the first admission
        self.num_slots = 0  # tokens that its KV blocks have room for; kept by the block manager
        self.num_preemptions = 0
        self.admission = 0  # its place in running order: larger comes later; kept by the scheduler
        self.stuck_at = (0, 0)  # known and computed tokens when it last found no room although nothing else ran
        self.is_prefilling = False  # admitted, and nothing emitted since
        self.last_step = -1  # the step that scheduled it last, where the eviction rule asks for it
        self.state = SequenceState.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_tokens = stop_token_ids
        wanted = sampling.max_tokens if forced is None else len(forced)
        # the number of tokens at which the sequence ends; one token is always emitted, even at the model's length
        limit = max(max_model_len, self.num_prompt_tokens + 1)
        self.token_limit = limit if wanted is None else min(self.num_prompt_tokens + wanted, limit)
        self.is_forced = (
            forced is not None and sampling.beam_width <= 1
        )  # beams are searched: only the length is forced
        is_lazy = isinstance(request.prompt_token_ids, LazyTokens)
        self._tokens = None if is_lazy else self._made_tokens()  # None: nobody has read them
        self.logprobs: list[TokenLogprobs] | None = [] if sampling.needs_logprobs else None  # of what was emitted
        self.score = self.score_before = 0.0  # their sum, and the one without the newest
        # of the prompt's tokens, as far as they came; one list for all members of a group
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * self.num_prompt_tokens
        self._num_tokens = self.num_prompt_tokens
        self._num_computed_tokens = 0
        self._clock: DecodeClock | None = None
        self._base = 0

    # --- tokens ---

    @property
    def tokens(self) -> array[int]:
        """The prompt and what was emitted; of a forced sequence also what it will emit."""
        if self._tokens is None:
            self._tokens = self._made_tokens()
        return self._tokens

    def _made_tokens(self) -> array[int]:
        tokens = array("i", self.request.prompt_token_ids[:])  # a slice: lazy ones are copied as an array is
        forced = self.request.forced_output
        if self.is_forced and forced is not None:
            tokens.extend(array("i", forced[: self.token_limit - self.num_prompt_tokens]))
        return tokens

    def first_tokens(self, num_tokens: int) -> array[int]:
        """At least so many of `tokens`, of which no more are made than that takes."""
        prompt = self.request.prompt_token_ids
        if self._tokens is None and isinstance(prompt, LazyTokens) and num_tokens <= len(prompt):
            return prompt[:num_tokens]
        return self.tokens

    @property
    def output_token_ids(self) -> Seq[int]:
        num_output, forced = self.num_output_tokens, self.request.forced_output
        if self._tokens is None and forced is not None and len(forced) == num_output:
            return forced
        return self.tokens[self.num_prompt_tokens : self.num_tokens]

    def known_tokens(self, start: int, stop: int) -> array[int]:
        """The known tokens at positions start … stop - 1, as far as there are any."""
        return self.tokens[start : min(stop, self.num_tokens)]

    # --- counts ---

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and what was emitted."""
        return self._num_tokens if self._clock is None else self._clock.tick - self._base

    @property
    def num_computed_tokens(self) -> int:
        return self._num_computed_tokens if self._clock is None else self._clock.tick - self._base - 1

    @num_computed_tokens.setter
    def num_computed_tokens(self, num_tokens: int) -> None:
        assert self._clock is None, "a sequence in step with the decodes has all but its newest token computed"
        self._num_computed_tokens = num_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_in_step(self) -> bool:
        """Whether its counts follow from the clock of decode steps."""
        return self._clock is not None

    def emit(self, token: int) -> None:
        """One more known token; a forced sequence has it already."""
        self._num_tokens += 1
        if not self.is_forced:
            self.tokens.append(token)

    def note_logprobs(self, ones: tuple[TokenLogprobs, ...]) -> None:
        """What came with the newest token, if anything."""
        for one in ones:
            assert self.logprobs is not None, f"{self} asked for no logprobs"
            self.logprobs.append(one)
            self.score_before, self.score = self.score, self.score + one.logprob

    @property
    def completion(self) -> Completion:
        """What to say of the sequence when it has ended."""
        assert self.finish_reason is not None
        return Completion(self.output_token_ids, self.finish_reason, self.score, tuple(self.logprobs or ()))

    def finished(self, message: str) -> Finished:
        """What to say of its request, of which it was the last sequence to end."""
        assert self.finish_reason is not None
        prompt = tuple(self.prompt_logprobs or ())
        if self.group is None:
            one = self.completion
            return Finished(
                self.request, self.finish_reason, message, len(one.token_ids), one.token_ids,
                completions=(one,), prompt_logprobs=prompt,
            )  # fmt: skip
        done = tuple([member.completion for member in self.group.finished])
        outputs = tuple([one.token_ids for one in done])
        reason = done[-1].reason if done else self.finish_reason
        first = outputs[0] if outputs else ()
        return Finished(self.request, reason, message, sum(map(len, outputs)), first, outputs, done, prompt)

    def join(self, clock: DecodeClock) -> None:
        """All but the newest token is computed: from here on it takes part in each decode step, or says it lags."""
        assert self._clock is None
        assert self._num_computed_tokens == self._num_tokens - 1
        self._clock = clock
        self._base = clock.tick - self._num_tokens

    def lag(self) -> None:
        """It took no part in the decode step that the clock has just counted."""
        self._base += 1

    def leave(self) -> None:
        """Its counts are its own again."""
        num_tokens = self.num_tokens
        self._clock = None
        self._num_tokens, self._num_computed_tokens = num_tokens, num_tokens - 1

    # --- groups ---

    @property
    def num_seqs(self) -> int:
        """Sequences that run together with this one, itself included, now or once the group's members have parted."""
        if self.group is None:
            return 1
        if not self.group.has_parted or self.group.is_beam:
            return self.request.sampling.num_seqs
        return len(self.siblings) if self.siblings is not None else 1

    @property
    def together(self) -> list[Sequence]:
        """The sequences that are scheduled together with this one, itself included."""
        return [self] if self.siblings is None else self.siblings

    @property
    def num_samples(self) -> int:
        """Tokens to draw when it samples next: several where a group's members are about to part."""
        return self.request.sampling.num_seqs if self.group is not None and not self.group.has_parted else 1

    def fork(self, seq_id: int, token: int, logprobs: tuple[TokenLogprobs, ...] = ()) -> Sequence:
        """A new member of the group: all that is computed of this one, and `token` after it, with its logprobs."""
        assert self.group is not None
        assert self._clock is None
        child = Sequence.__new__(Sequence)
        for name in Sequence.__slots__:
            setattr(child, name, getattr(self, name))
        child.seq_id = seq_id
        child._num_tokens = self._num_computed_tokens + 1
        child._tokens = self.tokens[:]
        if not self.is_forced:
            del child._tokens[self._num_computed_tokens :]
            child._tokens.append(token)
        if self.logprobs is not None:
            num_before = child._num_tokens - 1 - self.num_prompt_tokens
            child.score = self.score if len(self.logprobs) <= num_before else self.score_before
            child.logprobs = self.logprobs[:num_before]
            child.note_logprobs(logprobs)
        return child

    # --- states ---

    def enter(self, state: SequenceState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"sequence {self.seq_id}: {self.state.name} does not lead to {state.name}")
        self.state = state

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.request.request_id!r}, {self.state.name}, "
            f"{self.num_computed_tokens}/{self.num_tokens} computed)"
        )
