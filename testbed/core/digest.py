"""The decision digest: one 64-bit hash over all scheduling decisions of a run, extended by every step.

xxh64 over (previous digest, composition hash, free GPU blocks, free CPU blocks, events of the step), each a
little-endian int64. The composition hash covers the ids and token counts of the scheduled sequences, in order. Physical
block ids are left out: runs with equal decisions have equal digests, whatever the order of the free list.
"""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter, read_i64_be, write_i64_le
from xxhash import xxh64_digest

from testbed.core.outcome import FinishReason
from testbed.core.plan import PreemptionMode
from testbed.core.step import Step

VERSION: Final = 2  # of this definition; digests of different versions are not comparable
_xxh64: Final = xxh64_digest  # compiled code reads a Final without a lookup by name
_REASONS: Final = tuple(FinishReason)
_MODES: Final = tuple(PreemptionMode)


class Digest:
    """Running digest of a scheduler's decisions. `value`: the digest after the last step, 8 bytes, big-endian.

    A step is added by `begin`, then by the events of its commit (`forked`, `finished`), then by `end`.
    """

    def __init__(self) -> None:
        self.value = bytes(8)
        self._numbers = BytesWriter()  # the step's input to the hash so far
        self._aborted: list[int] = []  # sequences aborted since the last step

    def begin(self, step: Step) -> None:
        """Adds the step's batch, free blocks, aborts, admissions with hits, preemptions, ignored requests, swaps."""
        for seq in step.batch.seqs:
            write_i64_le(self._numbers, seq.seq_id)
        for num_tokens in step.batch.counts:
            write_i64_le(self._numbers, num_tokens)
        composition = self._hash()
        write_i64_le(self._numbers, read_i64_be(self.value, 0))
        write_i64_le(self._numbers, read_i64_be(composition, 0))
        write_i64_le(self._numbers, step.free_gpu_blocks)
        write_i64_le(self._numbers, step.free_cpu_blocks)
        for seq_id in self._aborted:
            self._add(5, seq_id)
        self._aborted = []
        for admission in step.admitted:
            self._add(1, admission.seq_id, admission.num_cached_tokens, admission.is_resumed)
        for preemption in step.leaving.preempted:
            self._add(2, preemption.seq_id, preemption.num_computed_tokens, _MODES.index(preemption.mode))
        for ignored in step.ignored:
            self._add(3, ignored.seq_id)
        if step.leaving.swap_out or step.swap_in:
            self._add(6, len(step.leaving.swap_out), len(step.swap_in))

    def forked(self, parent_id: int, seq_id: int) -> None:
        self._add(7, parent_id, seq_id)

    def finished(self, seq_id: int, reason: FinishReason) -> None:
        self._add(4, seq_id, _REASONS.index(reason))

    def aborted(self, seq_id: int) -> None:
        """Notes an abort between two steps; it is added to the next step."""
        self._aborted.append(seq_id)

    def end(self) -> None:
        self.value = self._hash()

    def _add(self, *numbers: int) -> None:
        for number in numbers:
            write_i64_le(self._numbers, number)

    def _hash(self) -> bytes:
        """Returns the hash of the collected numbers and clears them."""
        digest: bytes = _xxh64(self._numbers.getvalue())
        self._numbers.truncate(0)
        return digest
