"""The decision digest: one 64-bit number that sums up every decision of a run, step by step.

xxh64 over (digest before, composition hash, free GPU blocks, free CPU blocks, events of the step). Physical block ids
stay out: two runs that decide alike have equal digests whatever the free list's order.
"""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter, write_i64_le
from xxhash import xxh64_digest

from testbed.core.batch import Batch
from testbed.core.outcome import FinishReason
from testbed.core.plan import PreemptionMode
from testbed.core.sequence import Sequence
from testbed.core.step import Step

VERSION: Final = 2  # of the definition below; tapes do not compare across versions
_REASONS: Final = tuple(FinishReason)
_MODES: Final = tuple(PreemptionMode)


class Digest:
    """Running digest of a scheduler's decisions. `value`: after the last step, 8 bytes, the lowest first."""

    def __init__(self) -> None:
        self.value = bytes(8)
        self._seqs: list[Sequence] = []
        self._counts: list[int] = []
        self._composition = _hash(BytesWriter())  # of these

    def composition(self, batch: Batch) -> bytes:
        """Hash of who computes how many tokens, in order; recomputed only when that changes."""
        if batch.seqs != self._seqs or batch.counts != self._counts:
            self._seqs, self._counts = batch.seqs, batch.counts
            numbers = BytesWriter()
            for seq in batch.seqs:
                write_i64_le(numbers, seq.seq_id)
            for num_tokens in batch.counts:
                write_i64_le(numbers, num_tokens)
            self._composition = _hash(numbers)
        return self._composition

    def add(self, composition: bytes, free_gpu: int, free_cpu: int, events: list[int]) -> None:
        """Adds one step."""
        numbers = BytesWriter()
        numbers.write(self.value)
        numbers.write(composition)
        write_i64_le(numbers, free_gpu)
        write_i64_le(numbers, free_cpu)
        for number in events:
            write_i64_le(numbers, number)
        self.value = _hash(numbers)


def _hash(numbers: BytesWriter) -> bytes:
    return xxh64_digest(numbers.getvalue())[::-1]


def plan_events(step: Step) -> list[int]:
    """The events of a plan as integers: admissions with their hits, preemptions, requests ended as ignored."""
    events: list[int] = []
    if not (step.admitted or step.preempted or step.ignored or step.swap_out or step.swap_in):
        return events  # most steps
    for admission in step.admitted:
        events += (1, admission.seq_id, admission.num_cached_tokens, int(admission.is_resumed))
    for preemption in step.preempted:
        events += (2, preemption.seq_id, preemption.num_computed_tokens, _MODES.index(preemption.mode))
    for ignored in step.ignored:
        events += (3, ignored.seq_id)
    if step.swap_out or step.swap_in:
        events += (6, len(step.swap_out), len(step.swap_in))
    return events


def finish_event(seq_id: int, reason: FinishReason) -> tuple[int, int, int]:
    return (4, seq_id, _REASONS.index(reason))


def abort_event(seq_id: int) -> tuple[int, int]:
    return (5, seq_id)


def fork_event(parent_id: int, seq_id: int) -> tuple[int, int, int]:
    return (7, parent_id, seq_id)
