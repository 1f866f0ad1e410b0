"""Sequences: a request's tokens and how far they are computed. Owns the counts of tokens.

A request is one sequence, or a group of sequences that grow from one prompt (parallel samples, beams). Queues hold one
entry for a group, its first live member: what happens to that one happens to its `siblings` too.
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
    """All sequences of one request that asks for several. It finishes with its last member."""

    def __init__(self, first: Sequence) -> None:
        self.group_id = first.seq_id
        self.num_seqs = first.sampling.num_seqs  # wanted
        self.members: list[Sequence] = [first]  # live ones, in the order they came to be
        self.finished: list[Sequence] = []
        self.has_parted = False  # whether the prompt's end has made the members
        self.is_beam = first.sampling.beam_width > 1

    def leave(self, member: Sequence, reason: FinishReason) -> None:
        """It has ended; what was dropped is forgotten."""
        self.members.remove(member)
        if reason is not FinishReason.DROPPED:
            self.finished.append(member)


class Sequence(KVSequence):
    """One growing sequence of tokens.

    `num_tokens` are known: the prompt and what was emitted. What a forced sequence will emit is for the core alone.
    `num_computed_tokens` of them have their KV in GPU blocks. A token is emitted whenever the computed tokens reach all
    known ones. Where a step is planned while another runs, both counts include what the plans in flight will bring:
    `num_in_flight_tokens` are not computed yet, and the last `num_placeholders` are drawn by nobody yet.
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
        self.unit_id: i64 = seq_id  # the same for sequences that are scheduled together
        self.group: SequenceGroup | None = None
        self.siblings: tuple[Sequence, ...] | None = None  # scheduled together with it, itself included; None: alone
        self.num_together: i64 = 1  # of these
        self.num_in_flight_tokens = self.num_placeholders = i64(0)
        self.record: object = None  # what the recorder of a run keeps of its request
        self.state = SequenceState.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_tokens = stop_token_ids
        wanted = sampling.max_tokens if forced is None else len(forced)
        # at how many tokens it ends; one is always emitted, even at the model's length
        limit = max(max_model_len, self.num_prompt_tokens + 1)
        self.token_limit: i64 = limit if wanted is None else min(self.num_prompt_tokens + wanted, limit)
        # the end that is known beforehand: a forced output may be shorter than it has leave to be
        leave = min(self.num_prompt_tokens + (sampling.max_tokens or 0), limit)
        self.foreseen_end: i64 = max(self.token_limit, leave)
        self.is_forced = forced is not None and sampling.beam_width <= 1  # beams are searched: only their length is
        self._tokens: array[int] | None = None  # None: nobody has read them
        self._newest: vec[i32] = vec[i32]()  # drawn since; a token costs a tenth of what appending to an array does
        self.logprobs: list[TokenLogprobs] | None = [] if sampling.needs_logprobs else None  # of what was emitted
        self.score = self.score_before = 0.0  # their sum, and the one without the newest
        # of the prompt's tokens, as far as they came; one list for all members of a group
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if self.computes_whole_prompt:
            self.prompt_logprobs = [None] * self.num_prompt_tokens
        if sampling.num_seqs > 1:  # at the end: whom it tells of itself may look at all of it
            self.group = SequenceGroup(self)
            self.shares_blocks = True

    # --- tokens ---

    @property
    def tokens(self) -> array[int]:
        """The prompt and what was emitted, or will be by a plan in flight where that is known."""
        return self.known_tokens(0, self.num_tokens)

    @property
    def _content(self) -> array[int]:
        """The tokens; of a forced sequence also what it will emit. Made when somebody asks."""
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
        """At least so many of its tokens, of which no more are made than that takes."""
        if self._tokens is None and num_tokens <= self.num_prompt_tokens:
            return array("i", self.request.prompt_token_ids[:num_tokens])
        return self._content

    @property
    def output_token_ids(self) -> Seq[int]:
        forced = self.request.forced_output
        if self._tokens is None and forced is not None and len(forced) == self.num_output_tokens:
            return forced
        return self._content[self.num_prompt_tokens : self.num_tokens]

    def known_tokens(self, start: int, stop: int) -> array[int]:
        """The known tokens at positions start … stop - 1, as far as there are any."""
        return self._content[start : min(stop, self.num_tokens)]

    def next_tokens(self, start: int, num_tokens: int) -> Seq[int]:
        """The tokens from position `start` on, which are computed next; PLACEHOLDER for one that is drawn by then."""
        if num_tokens == 1 and len(self._newest) and start == self.num_known_tokens - 1:
            return (int(self._newest[-1]),)
        tokens = self._content[start : start + num_tokens]
        return tokens or (PLACEHOLDER,)

    @property
    def num_output_tokens(self) -> i64:
        """Emitted ones."""
        return self.num_known_tokens - self.num_prompt_tokens

    @property
    def num_known_tokens(self) -> i64:
        """Those of `num_tokens` that are no placeholders."""
        return self.num_tokens - self.num_placeholders

    # --- progress ---

    def restart(self, num_cached_tokens: int = 0) -> None:
        """Its computed tokens are those that were found in the cache."""
        self.give_up_flight()
        self.num_computed_tokens = num_cached_tokens

    def give_up_flight(self) -> None:
        """What plans in flight compute of it is lost; the token that one of them draws is not."""
        self.num_computed_tokens -= self.num_in_flight_tokens
        self.num_tokens -= self.num_placeholders
        self.num_in_flight_tokens = self.num_placeholders = 0

    def advance(self, num_tokens: i64) -> bool:
        """So many tokens more are computed; whether that reaches all there are, so that one is emitted."""
        self.num_computed_tokens += num_tokens
        return self.num_computed_tokens >= self.num_tokens

    def advance_ahead(self, num_tokens: i64) -> bool:
        """The same before they are computed. Of the token to be emitted there is a placeholder."""
        samples = self.advance(num_tokens)
        self.num_in_flight_tokens += num_tokens
        self.num_tokens += samples
        self.num_placeholders += samples
        return samples

    def arrive(self, num_tokens: i64, *, samples: bool) -> bool:
        """What `advance_ahead` promised is there; False: it was given up since."""
        if not self.num_in_flight_tokens:
            return False
        self.num_in_flight_tokens -= num_tokens
        self.num_tokens -= samples
        self.num_placeholders -= samples
        return True

    @property
    def awaits_outcome(self) -> bool:
        """Whether only what a plan in flight brings says how it goes on: it may end with it, or part into several; or
        its next draw wants to know all tokens before."""
        return self.num_placeholders > 0 and (
            self.num_tokens >= self.foreseen_end or self.may_part or (self.needs_history and not self.is_forced)
        )

    def emit(self, token: int) -> None:
        """One more known token; a forced sequence has it already."""
        self.num_tokens += 1
        if not self.is_forced:
            self._newest = append(self._newest, i32(token))

    def note_logprobs(self, ones: tuple[TokenLogprobs, ...]) -> None:
        """What came with the newest token, if anything."""
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
        """What to say of the sequence when it has ended."""
        assert self.finish_reason is not None
        return Completion(self.output_token_ids, self.finish_reason, self.score, tuple(self.logprobs or ()))

    @property
    def members(self) -> list[Sequence]:
        """The live sequences of its request, in the order they came to be."""
        return [self] if self.group is None else self.group.members

    def finished(self, message: str) -> Finished:
        """What to say, once, of its request, of which it was the last sequence to end."""
        assert self.finish_reason is not None
        ended = [self]
        if self.group is not None:
            ended, self.group.finished = self.group.finished, []  # its members know it: no circle is left behind
        done = tuple([one.completion for one in ended])
        outputs = [one.token_ids for one in done]
        return Finished(
            self.request, done[-1].reason if done else self.finish_reason, message, sum(map(len, outputs)),
            outputs[0] if outputs else (), done, tuple(self.prompt_logprobs or ()),
        )  # fmt: skip

    # --- groups ---

    def join(self, siblings: tuple[Sequence, ...]) -> None:
        """It is scheduled together with these from now on, itself included."""
        self.num_together = len(siblings)
        self.siblings = siblings if len(siblings) > 1 else None

    def part(self) -> None:
        """It stands for itself from now on."""
        self.siblings, self.num_together, self.unit_id = None, 1, self.seq_id

    @property
    def num_seqs(self) -> int:
        """Sequences that run together with this one, itself included, now or once the group's members have parted."""
        if self.group is not None and (not self.group.has_parted or self.group.is_beam):
            return self.group.num_seqs
        return self.num_together

    @property
    def together(self) -> tuple[Sequence, ...]:
        """The sequences that are scheduled together with this one, itself included."""
        return (self,) if self.siblings is None else self.siblings

    @property
    def may_part(self) -> bool:
        """Whether others may part from it with its next token."""
        return self.group is not None and (self.group.is_beam or not self.group.has_parted)

    @property
    def num_samples(self) -> int:
        """Tokens to draw when it samples next: several where a group's members are about to part."""
        return self.group.num_seqs if self.group is not None and not self.group.has_parted else 1

    def fork(self, seq_id: int, token: int, logprobs: tuple[TokenLogprobs, ...] = ()) -> Sequence:
        """A new member of the group: all that is computed of this one, and `token` after it, with its logprobs."""
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
