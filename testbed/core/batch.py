"""The batch of a step: how many tokens each sequence computes. Makes a device's rows and a cost model's shape of it."""

from __future__ import annotations

from librt.vecs import append, pop, vec
from mypy_extensions import i64

from testbed.core.plan import BatchShape, PrefillChunk, Rows, ScheduledSequence
from testbed.core.sequence import Sequence


class Batch(Rows):
    """Row i computes the next `counts[i]` tokens of `seqs[i]`, after those already computed. Owned by a step.

    token_budget: tokens left. samples: for each row whether it samples; None unless `Commit.plan_ahead` was called.
    """

    def __init__(self, token_budget: int) -> None:
        self.token_budget: i64 = token_budget
        self.seqs: list[Sequence] = []
        self.counts: vec[i64] = vec[i64](capacity=32)
        self.samples: list[bool] | None = None
        self.is_over = False  # True once committed: the counts of its sequences have advanced

    def add(self, seq: Sequence, num_tokens: i64) -> None:
        self.seqs.append(seq)
        self.counts = append(self.counts, num_tokens)
        self.token_budget -= num_tokens

    def remove(self, seq: Sequence) -> bool:
        """Removes a sequence; returns False if it is not in the batch."""
        for index, other in enumerate(self.seqs):
            if other is seq:
                del self.seqs[index]
                self.counts, num_tokens = pop(self.counts, index)
                self.token_budget += num_tokens
                return True
        return False

    def num_tokens_of(self, seq: Sequence) -> int:
        return sum([self.counts[index] for index, other in enumerate(self.seqs) if other is seq])

    def shape(self, window: int | None, num_repeated: int, num_out: int, num_in: int, num_copied: int) -> BatchShape:
        """Returns the input of a cost model. window, num_repeated: in tokens. num_out, num_in, num_copied: blocks."""
        num_decodes = context = longest = num_samples = i64(0)
        prefills: tuple[PrefillChunk, ...] = ()
        counts = self.counts
        index: i64
        for index, seq in enumerate(self.seqs):
            num_tokens, start = counts[index], seq.num_computed_tokens
            end = start + num_tokens
            if num_tokens == 1 and start >= seq.num_prompt_tokens:
                num_decodes += 1
                attended = end if window is None else min(end, window)
                context += attended
                longest = max(longest, attended)
            else:
                num_repeated -= start  # at most so many of them are of this prompt, and not of decodes
                prefills += (PrefillChunk(start if window is None else min(start, window - 1), num_tokens),)
            if end == seq.num_tokens:
                num_samples += 1
        repeated = max(0, min(num_repeated, context - longest))
        return BatchShape(num_decodes, context, prefills, num_samples, num_out, num_in, num_copied, longest, repeated)

    def make(self) -> tuple[ScheduledSequence, ...]:
        assert not self.is_over, "a plan's rows are valid until it is committed"
        return tuple([self._scheduled(index) for index in range(len(self.seqs))])

    def _scheduled(self, index: int) -> ScheduledSequence:
        seq, num_tokens, group = self.seqs[index], self.counts[index], self.seqs[index].group
        start, samples = seq.num_computed_tokens, seq.num_computed_tokens + num_tokens == seq.num_tokens
        if self.samples is not None:
            start, samples = start - num_tokens, self.samples[index]
        history = seq.known_tokens(0, max(seq.num_prompt_tokens, start + num_tokens)) if seq.needs_history else ()
        return ScheduledSequence(
            seq.seq_id, start, num_tokens, seq.next_tokens(start, num_tokens), samples, seq.is_forced,
            seq.block_table, seq.sampling, seq.num_samples, seq.seq_id if group is None else group.group_id,
            seq.num_prompt_tokens, history, seq.score, 0 if group is None else len(group.finished),
        )  # fmt: skip

    def num_scheduled(self) -> list[tuple[str, int]]:
        return [(seq.request_id, self.counts[index]) for index, seq in enumerate(self.seqs)]
