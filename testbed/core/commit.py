"""The commit of executed steps: advances counts, appends sampled tokens, forks the members of sequence groups.

Owns the list of emitters. Ends no sequence: it returns those that have reached their end to the scheduler.
"""

from __future__ import annotations

from mypy_extensions import i64

from testbed.blocks.manager import BlockManager
from testbed.core.batch import Batch
from testbed.core.digest import Digest
from testbed.core.outcome import FinishReason, Outcome, PromptLogprobs
from testbed.core.running import Running
from testbed.core.sequence import Sequence, SequenceGroup
from testbed.core.state import FINISHED, RUNNING

Ending = tuple[Sequence, FinishReason]
Forking = tuple[Sequence, Outcome]


class Commit:
    """Applies the outcomes of steps, one step at a time."""

    def __init__(self, running: Running, blocks: BlockManager, digest: Digest) -> None:
        self.emitters: list[Sequence] = []  # of the last step, in the order scheduled, one entry per token
        self.next_seq_id = 0
        self.num_new_tokens = 0  # of the last step: emitted tokens, and the tokens that forked sequences start with
        self._running, self._blocks, self._digest = running, blocks, digest

    def new_seq_ids(self, num_ids: int) -> int:
        """Reserves `num_ids` consecutive sequence ids and returns the first."""
        self.next_seq_id += num_ids
        return self.next_seq_id - num_ids

    def plan_ahead(self, batch: Batch) -> None:
        """Advances the counts of a batch that is still in flight, so that the next step is decided as if it had run."""
        batch.samples = [seq.advance_ahead(batch.counts[index]) for index, seq in enumerate(batch.seqs)]
        for seq in batch.seqs:
            if seq.is_prefilling and seq.num_placeholders:
                self._running.note_prefill(seq)

    def advance(self, batch: Batch, outcomes: tuple[Outcome, ...]) -> tuple[Ending, ...]:
        """Applies the outcomes of an executed batch; returns the sequences that end with it. A sequence that was
        preempted after the plan still gets its token; one that has ended gets none."""
        batch.is_over = True
        self.emitters, self.num_new_tokens = [], 0
        ending: tuple[Ending, ...] = ()
        forking: tuple[Forking, ...] = ()
        num_taken = 0
        index: i64
        counts, samples_ahead = batch.counts, batch.samples
        publishes = samples_ahead is not None or not self._blocks.publishes_early  # otherwise published when planned
        for index, seq in enumerate(batch.seqs):
            is_there = True
            if samples_ahead is None:
                samples = seq.advance(counts[index])  # also if it was aborted
            else:
                samples = samples_ahead[index]
                is_there = seq.arrive(counts[index], samples=samples)
            if publishes and is_there and seq.state is RUNNING:
                self._blocks.prefixes.publish(seq, seq.num_computed_tokens - seq.num_in_flight_tokens)
            if not samples:
                continue
            outcome: Outcome | None = None
            if not seq.is_forced:
                assert num_taken < len(outcomes), "a row that sampled has no outcome"
                outcome = outcomes[num_taken]
                num_taken += 1
                assert outcome.seq_id == seq.seq_id, "outcomes come in the order scheduled"
            if seq.state is FINISHED or (not is_there and seq.may_fork):
                continue  # preempted before its fork: it samples this token again
            if seq.is_prefilling:
                self._running.note_prefill(seq)
            if seq.group is not None:
                forking += self._forking(seq, seq.group, outcome)
            reason = self._emit(seq, outcome)
            if reason is not None:
                ending += ((seq, reason),)
        assert num_taken == len(outcomes), "more outcomes than sampled rows"
        for parent, outcome in forking:
            ending += self._fork(parent, outcome)
        self.num_new_tokens += len(self.emitters)
        return ending

    def _emit(self, seq: Sequence, outcome: Outcome | None) -> FinishReason | None:
        """Appends the outcome's token; returns the reason if the sequence ends. outcome: None for a forced token."""
        token = 0  # a forced sequence already has its token
        stop: FinishReason | None = None
        if outcome is not None:
            if outcome.dropped:
                return outcome.stop or FinishReason.DROPPED
            token, stop = outcome.tokens[0], outcome.stop
            if outcome.logprobs:
                seq.note_logprobs(outcome.logprobs[:1])
        seq.emit(token)
        self.emitters.append(seq)
        return _end_of(seq, token, stop)

    # --- groups ---

    def _forking(self, seq: Sequence, group: SequenceGroup, outcome: Outcome | None) -> tuple[Forking, ...]:
        """Returns the sequence with its outcome if members of its group fork from it in this step, else nothing."""
        if outcome is None:  # forced: each member emits the same tokens
            outcome = Outcome(seq.seq_id, (0,), forks=(0,) * (seq.num_samples - 1))
        group.has_forked = True
        return ((seq, outcome),) if outcome.forks else ()

    def _fork(self, parent: Sequence, outcome: Outcome) -> tuple[Ending, ...]:
        """Adds the forks of a sequence to its group; returns those that end with their first token."""
        group = parent.group
        assert group is not None
        ending: tuple[Ending, ...] = ()
        siblings = parent.together
        logprobs = outcome.logprobs[len(outcome.tokens) :]
        for index, token in enumerate(outcome.forks):
            seq_id = group.group_id + len(group.members)  # independent of other arrivals: a sampler may seed by it
            if group.is_beam:
                seq_id = self.new_seq_ids(1)
            child = parent.fork(seq_id, token, logprobs[index : index + 1])
            self._blocks.fork(parent, child)
            siblings = (*siblings, child)
            group.members.append(child)
            self.emitters.append(child)
            self.num_new_tokens += child.num_known_tokens - 1  # the emitted token is counted by `emitters`
            self._digest.forked(parent.seq_id, child.seq_id)
            stop = _end_of(child, token, outcome.fork_stops[index] if outcome.fork_stops else None)
            if stop is not None:
                ending += ((child, stop),)
        for one in siblings:
            one.join(siblings)
        return ending


def _end_of(seq: Sequence, token: int, stop: FinishReason | None) -> FinishReason | None:
    """Returns the reason if the sequence ends with this token, else None. stop: the backend's reason, if any."""
    if stop is not None:
        return stop
    if not seq.is_forced and seq.stop_tokens and token in seq.stop_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if seq.num_known_tokens >= seq.token_limit else None


def note_prompts(batch: Batch, parts: tuple[PromptLogprobs, ...]) -> None:
    """Stores the prompt logprobs of a step in its sequences. At positions computed again, the first values stay."""
    seqs = {seq.seq_id: seq for seq in batch.seqs}
    for part in parts:
        known = seqs[part.seq_id].prompt_logprobs
        assert known is not None, "prompt logprobs that nobody asked for"
        for position, one in enumerate(part.tokens, part.start):
            if known[position] is None:
                known[position] = one
