"""What executed steps computed: counts, the tokens that came back, members of groups that part.

Owns who emitted. Ends nothing itself: it says which sequences have reached their end, and the scheduler ends them.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from testbed.core.digest import fork_event
from testbed.core.plan import FinishReason, Outcome, PromptLogprobs, TokenLogprobs
from testbed.core.running import Core
from testbed.core.sequence import Sequence, SequenceGroup
from testbed.core.step import Step

Ending = tuple[Sequence, FinishReason]


class _Forks(NamedTuple):
    """Members that part from a sequence: first tokens, their logprobs where asked for, and which end with them."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    stops: tuple[FinishReason | None, ...] = ()


_NO_FORKS = _Forks()


class Progress:
    """Takes the outcomes of one step after the other."""

    def __init__(self, core: Core) -> None:
        self.emitters: list[Sequence] = []  # emitted a token in the last step, in the order scheduled
        self._core = core

    def advance(self, step: Step, outcomes: tuple[Outcome, ...], events: list[int]) -> list[Ending]:
        """The step is executed; the sequences that end with it. Adds to the step's events those of groups that part."""
        num_drawn = self._num_drawn(step.decoded) if self._core.decodes.num_drawn else 0
        ending = self._advance_decodes(step.decoded, outcomes[:num_drawn], num_drawn)
        if step.rows:
            return ending + self._advance_rows(step, outcomes[num_drawn:], events)
        assert len(outcomes) == num_drawn, "more outcomes than sampled rows"
        return ending

    def repeat(self, step: Step) -> list[Sequence]:
        """The same for a step of forced decodes, and chunks of prompts, in which nothing ends and nobody parts; the
        decodes that cross a border next."""
        blocks, decodes = self._core.blocks, self._core.decodes
        decodes.advance_all(len(step.decoded))
        crossing = decodes.crossing()
        if crossing and not blocks.publishes_at_allocation:
            blocks.publish_each(crossing, 0)
        for seq, start, num_tokens in step.rows:
            blocks.publish(seq, start + num_tokens)
            seq.num_computed_tokens = start + num_tokens
        return crossing

    def note_prompts(self, step: Step, parts: tuple[PromptLogprobs, ...]) -> None:
        """Keeps what came of the prompts that the step computed parts of; of a part computed again, the first."""
        seqs = {seq.seq_id: seq for seq, _, _ in step.rows}
        for part in parts:
            known = seqs[part.seq_id].prompt_logprobs
            assert known is not None, "prompt logprobs that nobody asked for"
            for position, one in enumerate(part.tokens, part.start):
                if known[position] is None:
                    known[position] = one

    def service(self, step: Step) -> list[tuple[Sequence, int, int]]:
        """(sequence, tokens computed, tokens emitted) of everything in the step."""
        emitters = {seq.seq_id for seq in self.emitters}
        served = [(seq, 1, 1) for seq in step.decoded]
        return served + [(seq, num_tokens, int(seq.seq_id in emitters)) for seq, _, num_tokens in step.rows]

    def _num_drawn(self, decoded: list[Sequence]) -> int:
        """Decodes whose token the backend draws."""
        decodes = self._core.decodes
        if decoded is decodes.members:
            return decodes.num_drawn
        return sum(1 for seq in decoded if not seq.is_forced)

    def _advance_decodes(self, decoded: list[Sequence], outcomes: tuple[Outcome, ...], num_drawn: int) -> list[Ending]:
        """One more token for each decode; those that end with it."""
        self.emitters = decoded
        if not decoded:
            return []
        decodes, blocks = self._core.decodes, self._core.blocks
        assert len(outcomes) == num_drawn, f"{num_drawn} sequences drew a token, and {len(outcomes)} outcomes came"
        stopped = self._take_drawn(decoded, outcomes) if num_drawn else {}
        decodes.advance(decoded)
        if blocks.caches_prefixes and not blocks.publishes_at_allocation:
            crossing = decodes.crossing()
            if crossing:
                blocks.publish_each(crossing, 0)
        ending = decodes.ending()
        if not ending and not stopped:
            return []
        if len(ending) == 1 and not stopped:
            return [(ending[0], FinishReason.LENGTH)]
        reasons = dict.fromkeys((seq.seq_id for seq in ending), FinishReason.LENGTH) | stopped
        return [(seq, reasons[seq.seq_id]) for seq in decoded if seq.seq_id in reasons]

    def _take_drawn(self, decoded: list[Sequence], outcomes: tuple[Outcome, ...]) -> dict[int, FinishReason]:
        """Appends the tokens that were drawn; the sequences that they stop. By column: a step's cost lies here."""
        drawn = self._core.decodes.drawn(decoded)
        seq_ids, tokens, stops, forks, dropped, logprobs, _ = zip(*outcomes, strict=True)
        assert drawn.seq_ids == seq_ids, "outcomes come in the order scheduled"
        assert forks == drawn.no_forks, "only the members of a group part"
        assert dropped == drawn.no_drops, "only beams are dropped"
        for append, (token,) in zip(drawn.appends, tokens, strict=True):
            append(token)
        if logprobs != drawn.no_logprobs:
            for seq, ones in zip(drawn.seqs, logprobs, strict=True):
                seq.note_logprobs(ones)
        stopped: dict[int, FinishReason] = {}
        if stops != drawn.no_stops:
            stopped = {seq_id: stop for seq_id, stop in zip(seq_ids, stops, strict=True) if stop is not None}
        stop_tokens = self._core.decodes.stop_tokens
        if stop_tokens and not stop_tokens.isdisjoint(chain.from_iterable(tokens)):
            for seq, (token,) in zip(drawn.seqs, tokens, strict=True):
                if token in seq.stop_tokens:
                    stopped.setdefault(seq.seq_id, FinishReason.STOP)
        return stopped

    def _advance_rows(self, step: Step, outcomes: tuple[Outcome, ...], events: list[int]) -> list[Ending]:
        """Counts the rows as computed, and takes what they emit; the sequences that end with it."""
        drawn = iter(outcomes)
        ending: list[Ending] = []
        emitted: list[Sequence] = []
        in_step: list[Sequence] = []
        parted: list[tuple[Sequence, _Forks]] = []
        for seq, start, num_tokens in step.rows:
            num_computed = start + num_tokens
            self._core.blocks.publish(seq, num_computed)
            outcome = None
            if num_computed == seq.num_tokens and not seq.is_forced:
                outcome = next(drawn, None)
                assert outcome is not None, f"no outcome for {seq}"
                assert outcome.seq_id == seq.seq_id, "outcomes come in the order scheduled"
            if seq.is_in_step:  # a decode that was scheduled as a row of its own
                in_step.append(seq)
                reason = self._row_emits(seq, outcome)
                emitted.append(seq)
                if reason is not None:
                    ending.append((seq, reason))
                continue
            seq.num_computed_tokens = num_computed
            if num_computed < seq.num_tokens:
                continue
            forks = self._forks(seq, outcome)
            if outcome is not None and outcome.dropped:
                ending.append((seq, FinishReason.DROPPED))
            else:
                reason = self._row_emits(seq, outcome)
                emitted.append(seq)
                if reason is not None:
                    ending.append((seq, reason))
            if seq.group is not None:
                seq.group.has_parted = True
            if forks.tokens:
                parted.append((seq, forks))
            self._prefilled(seq, is_ending=bool(ending) and ending[-1][0] is seq)
        assert next(drawn, None) is None, "more outcomes than sampled rows"
        if in_step:
            self._core.decodes.advance(in_step)
        for parent, forks in parted:
            ending += self._part(parent, forks, emitted, events)
        if emitted:
            self.emitters = [*self.emitters, *emitted]
        return ending

    def _row_emits(self, seq: Sequence, outcome: Outcome | None) -> FinishReason | None:
        """One more known token; the reason if the sequence ends with it."""
        num_tokens = seq.num_tokens + 1
        if outcome is None:
            if not seq.is_in_step:
                seq.emit(0)
            return FinishReason.LENGTH if num_tokens >= seq.token_limit else None
        (token,) = outcome.tokens
        seq.note_logprobs(outcome.logprobs[:1])
        if seq.is_in_step:
            seq.tokens.append(token)
        else:
            seq.emit(token)
        if outcome.stop is not None:
            return outcome.stop
        if token in seq.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= seq.token_limit else None

    def _prefilled(self, seq: Sequence, *, is_ending: bool = False) -> None:
        """The sequence is done with its prefill: alone in its group, it decodes in step with the others."""
        core = self._core
        core.prefilling.pop(seq.seq_id, None)
        seq.is_prefilling = False
        if seq.group is None and not is_ending:
            core.decodes.join(seq)

    # --- groups ---

    def _forks(self, seq: Sequence, outcome: Outcome | None) -> _Forks:
        """The members that part from the sequence here."""
        if seq.group is None:
            return _NO_FORKS
        if outcome is not None:
            return _Forks(outcome.forks, outcome.logprobs[len(outcome.tokens) :], outcome.fork_stops)
        return _Forks((0,) * (seq.num_samples - 1))  # forced: each member emits the same tokens

    def _part(self, parent: Sequence, forks: _Forks, emitted: list[Sequence], events: list[int]) -> list[Ending]:
        """New members of a group, after those that are there; the ones that end with their first token."""
        group = parent.group
        assert group is not None
        ending: list[Ending] = []
        siblings = parent.together
        for index, token in enumerate(forks.tokens):
            child = parent.fork(self._new_member_id(group), token, forks.logprobs[index : index + 1])
            child.is_prefilling = False
            self._core.blocks.fork(parent, child)
            siblings = [*siblings, child]
            group.members.append(child)
            emitted.append(child)
            events += fork_event(parent.seq_id, child.seq_id)
            stop = forks.stops[index] if forks.stops else None
            if stop is None and not child.is_forced and token in child.stop_tokens:
                stop = FinishReason.STOP
            if stop is not None:
                ending.append((child, stop))
            elif child.num_tokens >= child.token_limit:
                ending.append((child, FinishReason.LENGTH))
        for one in siblings:
            one.siblings = siblings
        return ending

    def _new_member_id(self, group: SequenceGroup) -> int:
        if not group.is_beam:  # independent of what else arrives, as a sampler's draws may go by it
            return group.group_id + len(group.members)
        self._core.next_seq_id += 1
        return self._core.next_seq_id - 1
