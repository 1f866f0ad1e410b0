"""Sequences: the tokens of a request and how many of them are computed. Owns the token counts.

A request is one sequence, or a group of sequences that grow from one prompt (parallel samples, beams). Queues hold one
entry for each group, its first live member: what is done to it is done to its `siblings` too.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from librt.vecs import append, vec
from mypy_extensions import i32, i64

from testbed.blocks.kv_sequence import KVSequence
from testbed.core.outcome import Completion, Finished, FinishReason, TokenLogprobs
from testbed.core.plan import PLACEHOLDER
from testbed.core.request import Request
from testbed.core.state import TRANSITIONS, SequenceState
from testbed.errors import IllegalTransitionError


class SequenceGroup:
    """All sequences of a request that asks for several. The request finishes with its last member."""

    def __init__(self, first: Sequence) -> None:
        self.group_id = first.seq_id
        self.num_seqs = first.sampling.num_seqs  # as requested
        self.members: list[Sequence] = [first]  # live ones, in order of creation
        self.finished: list[Sequence] = []
        self.rejected = ""  # why a member was ignored: then the request is not complete, even if others are
        self.has_forked = False  # whether the members have forked, which they do at the end of the prompt
        self.is_beam = first.sampling.beam_width > 1

    def leave(self, member: Sequence, reason: FinishReason, message: str) -> bool:
        """Removes a member that has ended; a pruned beam is not kept in `finished`. Returns whether it was the last."""
        self.members.remove(member)
        self.rejected = "" if reason is FinishReason.ABORT else self.rejected or message
        if reason is not FinishReason.DROPPED:
            self.finished.append(member)
        return not self.members


class Sequence(KVSequence):
    """One growing sequence of tokens.

    `num_tokens` counts the tokens so far: the prompt and the emitted ones. Only the core sees the rest of a forced
    output. `num_computed_tokens` of them have their KV in blocks. A token is emitted whenever the computed tokens reach
    `num_tokens`. If steps are planned while others run, both counts include the plans in flight:
    `num_in_flight_tokens` are not computed yet, and the last `num_placeholders` are not sampled yet.
    """

    def __init__(self, seq_id: int, request: Request, max_model_len: int, stop_token_ids: tuple[int, ...] = ()) -> None:
        sampling, forced = request.sampling, request.forced_output
        super().__init__(
            seq_id, len(request.prompt_token_ids), request.cache_salt, request.tenant or "",
            sampling.prompt_logprobs is not None,
        )  # fmt: skip
        self.request = request
        self.request_id = request.request_id
        self.sampling = sampling
        self.needs_history = sampling.needs_history
        self.unit_id: i64 = seq_id  # equal for sequences that are scheduled together
        self.group: SequenceGroup | None = None
        self.siblings: tuple[Sequence, ...] | None = None  # all sequences scheduled together; None: only this one
        self.num_together: i64 = 1  # how many these are
        self.num_in_flight_tokens = self.num_placeholders = i64(0)
        self.record: object = None  # the run's recorder keeps its state of the request here
        self.state = SequenceState.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_tokens = stop_token_ids
        wanted = sampling.max_tokens if forced is None else len(forced)
        # the number of tokens at which it ends; at least one is emitted, even if the prompt has the model's length
        limit = max(max_model_len, self.num_prompt_tokens + 1)
        self.token_limit: i64 = limit if wanted is None else min(self.num_prompt_tokens + wanted, limit)
        # the latest end that the request allows; a forced output may end before it, which must not be foreseen
        leave = min(self.num_prompt_tokens + (sampling.max_tokens or 0), limit)
        self.foreseen_end: i64 = max(self.token_limit, leave)
        self.is_forced = forced is not None and sampling.beam_width <= 1  # for beams only the length is forced
        self._tokens: array[int] | None = None  # made on the first read
        self._newest: vec[i32] = vec[i32]()  # sampled since; appending here costs a tenth of appending to an array
        self.logprobs: list[TokenLogprobs] | None = [] if sampling.needs_logprobs else None  # of the emitted tokens
        self.score = self.score_before = 0.0  # the sum of `logprobs`, with and without the newest
        # one entry for each prompt token, None until it is computed; all members of a group have the same list
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if self.computes_whole_prompt:
            self.prompt_logprobs = [None] * self.num_prompt_tokens
        if sampling.num_seqs > 1:  # last, as the group reads attributes of this sequence
            self.group = SequenceGroup(self)
            self.shares_blocks = True

    # --- tokens ---

    @property
    def tokens(self) -> array[int]:
        """The tokens so far; of a forced output also those that plans in flight will emit."""
        return self.known_tokens(0, self.num_tokens)

    @property
    def _content(self) -> array[int]:
        """The tokens so far and the rest of a forced output. Made on the first read."""
        if self._tokens is None:
            self._tokens = array("i", self.request.prompt_token_ids[:])
            forced = self.request.forced_output
            if self.is_forced and forced is not None:
                self._tokens.extend(array("i", forced[: self.token_limit - self.num_prompt_tokens]))
        if len(self._newest):
            self._tokens.frombytes(memoryview(self._newest).cast("B"))
            self._newest = vec[i32]()
        return self._tokens

    def first_tokens(self, num_tokens: int) -> array[int]:
        """Returns at least the first `num_tokens` tokens. If the prompt was not read before, only these are made."""
        if self._tokens is None and num_tokens <= self.num_prompt_tokens:
            return array("i", self.request.prompt_token_ids[:num_tokens])
        return self._content

    @property
    def output_token_ids(self) -> Seq[int]:
        forced, num_tokens = self.request.forced_output, self.num_output_tokens
        if self._tokens is None and forced is not None and (self.is_forced or len(forced) == num_tokens):
            return forced if len(forced) == num_tokens else array("i", forced[:num_tokens])
        return self._content[self.num_prompt_tokens : self.num_known_tokens]

    def known_tokens(self, start: int, stop: int) -> array[int]:
        """Returns the tokens so far at positions start … stop - 1, or those of them that exist."""
        return self._content[start : min(stop, self.num_tokens)]

    def next_tokens(self, start: int, num_tokens: int) -> Seq[int]:
        """Returns the `num_tokens` tokens to compute from position `start` on; PLACEHOLDER for one not sampled yet."""
        if num_tokens == 1 and len(self._newest) and start == self.num_known_tokens - 1:
            return (int(self._newest[-1]),)
        return self._content[start : start + num_tokens] or (PLACEHOLDER,)

    @property
    def num_output_tokens(self) -> i64:
        """Emitted tokens."""
        return self.num_known_tokens - self.num_prompt_tokens

    @property
    def num_known_tokens(self) -> i64:
        """Tokens so far, without placeholders."""
        return self.num_tokens - self.num_placeholders

    # --- progress ---

    def restart(self, num_cached_tokens: int = 0) -> None:
        """Resets the computed tokens to those found in the prefix cache."""
        self.give_up_flight()
        self.num_computed_tokens = num_cached_tokens

    def give_up_flight(self) -> None:
        """Takes back the tokens that plans in flight compute. A token sampled by such a plan is still emitted."""
        self.num_computed_tokens -= self.num_in_flight_tokens
        self.num_tokens -= self.num_placeholders
        self.num_in_flight_tokens = self.num_placeholders = 0

    def advance(self, num_tokens: i64) -> bool:
        """Counts `num_tokens` more as computed; returns whether all are computed now, so that a token is emitted."""
        self.num_computed_tokens += num_tokens
        return self.num_computed_tokens >= self.num_tokens

    def advance_ahead(self, num_tokens: i64) -> bool:
        """As `advance`, for tokens that are still in flight. The token to be emitted becomes a placeholder."""
        samples = self.advance(num_tokens)
        self.num_in_flight_tokens += num_tokens
        self.num_tokens += samples
        self.num_placeholders += samples
        return samples

    def arrive(self, num_tokens: i64, *, samples: bool) -> bool:
        """Marks the tokens of `advance_ahead` as computed. Returns False if they were taken back in between."""
        if not self.num_in_flight_tokens:
            return False
        self.num_in_flight_tokens -= num_tokens
        self.num_tokens -= samples
        self.num_placeholders -= samples
        return True

    @property
    def awaits_outcome(self) -> bool:
        """Whether it cannot be scheduled before the token in flight is sampled: it may end or fork with that token, or
        sampling the next one needs all tokens before it."""
        return self.num_placeholders > 0 and (
            self.num_tokens >= self.foreseen_end or self.may_fork or (self.needs_history and not self.is_forced)
        )

    def emit(self, token: int) -> None:
        """Appends an emitted token; a forced sequence already contains it."""
        self.num_tokens += 1
        if not self.is_forced:
            self._newest = append(self._newest, i32(token))

    def note_logprobs(self, ones: tuple[TokenLogprobs, ...]) -> None:
        """Appends the log-probabilities of the newest token, if there are any."""
        for one in ones:
            assert self.logprobs is not None, f"{self} asked for no logprobs"
            self.logprobs.append(one)
            self.score_before, self.score = self.score, self.score + one.logprob

    def enter(self, state: SequenceState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"sequence {self.seq_id}: {self.state.name} does not lead to {state.name}")
        self.state = state

    # --- the end ---

    @property
    def completion(self) -> Completion:
        """The result of this sequence, which must have ended."""
        assert self.finish_reason is not None
        return Completion(self.output_token_ids, self.finish_reason, self.score, tuple(self.logprobs or ()))

    @property
    def members(self) -> list[Sequence]:
        """The live sequences of its request, in order of creation."""
        return [self] if self.group is None else self.group.members

    def finished(self, message: str) -> Finished:
        """Returns the result of its request, whose last sequence this is. Callable once."""
        ended, rejected = [self], ""
        if self.group is not None:
            ended, self.group.finished, rejected = self.group.finished, [], self.group.rejected  # leaves no cycle
        done = tuple([one.completion for one in ended])
        reason = FinishReason.IGNORED if rejected else done[-1].reason if done else FinishReason.DROPPED
        return Finished(
            self.request, reason, rejected or message, sum([len(one.token_ids) for one in done]),
            done[0].token_ids if done else (), done, tuple(self.prompt_logprobs or ()),
        )  # fmt: skip

    # --- groups ---

    def join(self, siblings: tuple[Sequence, ...]) -> None:
        """Schedules it together with these sequences, itself included, from now on."""
        self.num_together = len(siblings)
        self.siblings = siblings if len(siblings) > 1 else None

    def part(self) -> None:
        """Schedules it separately from now on."""
        self.siblings, self.num_together, self.unit_id = None, 1, self.seq_id

    @property
    def num_seqs(self) -> int:
        """Sequences that run together with this one, itself included; before a fork, as many as there will be after."""
        if self.group is not None and (not self.group.has_forked or self.group.is_beam):
            return self.group.num_seqs
        return self.num_together

    @property
    def together(self) -> tuple[Sequence, ...]:
        """The sequences that are scheduled together with this one, itself included."""
        return (self,) if self.siblings is None else self.siblings

    @property
    def may_fork(self) -> bool:
        """Whether other sequences may fork from it at its next token."""
        return self.group is not None and (self.group.is_beam or not self.group.has_forked)

    @property
    def num_samples(self) -> int:
        """Tokens to sample the next time: several if the group's members are about to fork."""
        return self.group.num_seqs if self.group is not None and not self.group.has_forked else 1

    def fork(self, seq_id: int, token: int, logprobs: tuple[TokenLogprobs, ...] = ()) -> Sequence:
        """Returns a new member of the group: the computed tokens of this one, then `token` with its logprobs."""
        child = Sequence(seq_id, self.request, 0, self.stop_tokens)
        child.token_limit, child.foreseen_end = self.token_limit, self.foreseen_end
        child.group, child.shares_blocks, child.unit_id = self.group, self.shares_blocks, self.unit_id
        child.state, child.last_step, child.num_computed_tokens = self.state, self.last_step, self.num_computed_tokens
        child.num_preemptions, child.num_cached_tokens = self.num_preemptions, self.num_cached_tokens
        child.num_tokens = self.num_computed_tokens + 1
        child._tokens = self._content[: None if self.is_forced else self.num_computed_tokens]
        if not self.is_forced:
            child._tokens.append(token)
        child.prompt_logprobs = self.prompt_logprobs
        if self.logprobs is not None:
            num_before = child.num_tokens - 1 - self.num_prompt_tokens
            child.score = self.score if len(self.logprobs) <= num_before else self.score_before
            child.logprobs = self.logprobs[:num_before]
            child.note_logprobs(logprobs)
        return child

    def __repr__(self) -> str:
        computed = f"{self.num_computed_tokens}/{self.num_tokens} computed"
        return f"Sequence({self.seq_id}, {self.request.request_id!r}, {self.state.name}, {computed})"
