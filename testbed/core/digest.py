"""The decision digest: one 64-bit number that sums up every decision of a run, step by step.

xxh64 over (digest before, composition hash, free GPU blocks, free CPU blocks, events of the step), each a little-endian
int64; the composition hash is over who computes how many tokens, in order. Physical block ids stay out: two runs that
decide alike have equal digests whatever the free list's order.
"""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter, read_i64_be, write_i64_le
from xxhash import xxh64_digest

from testbed.core.outcome import FinishReason
from testbed.core.plan import PreemptionMode
from testbed.core.step import Step

VERSION: Final = 2  # of the definition below; tapes do not compare across versions
_xxh64: Final = xxh64_digest  # compiled, what is final is found without a look at its name
_REASONS: Final = tuple(FinishReason)
_MODES: Final = tuple(PreemptionMode)


class Digest:
    """Running digest of a scheduler's decisions. `value`: after the last step, 8 bytes, the highest first.

    A step is added in this order: `begin`, what its commit brings, `end`.
    """

    def __init__(self) -> None:
        self.value = bytes(8)
        self._numbers = BytesWriter()  # of the step
        self._aborted: list[int] = []  # since the last step

    def begin(self, step: Step) -> None:
        """Its batch, admissions with their hits, preemptions, requests ended as ignored, numbers of swapped blocks."""
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
        """Between two steps; counts with the next."""
        self._aborted.append(seq_id)

    def end(self) -> None:
        self.value = self._hash()

    def _add(self, *numbers: int) -> None:
        for number in numbers:
            write_i64_le(self._numbers, number)

    def _hash(self) -> bytes:
        """Of the numbers, of which none is left."""
        digest: bytes = _xxh64(self._numbers.getvalue())
        self._numbers.truncate(0)
        return digest
