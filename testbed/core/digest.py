"""The decision digest: one 64-bit number that sums up every decision of a run, step by step.

xxh64 over (digest before, composition hash, free GPU blocks, free CPU blocks, events of the step). Physical block ids
stay out: two runs that decide alike have equal digests whatever the free list's order. A plan of five steps adds the
same as five plans of one.
"""

from __future__ import annotations

from struct import Struct, pack

from xxhash import xxh64_intdigest

from testbed.core.plan import FinishReason, PreemptionMode
from testbed.core.sequence import Sequence
from testbed.core.step import Step

VERSION = 2  # of the definition below: another definition is another version, and tapes do not compare across them
_STEP = Struct("<QQqq")
_ONE = pack("<q", 1)
_REASONS = tuple(FinishReason)
_MODES = tuple(PreemptionMode)


class Digest:
    """Running digest of a scheduler's decisions. `value` is the digest after the last step."""

    __slots__ = ("_decoded", "_ids", "_of_decodes", "_ones", "value")

    def __init__(self) -> None:
        self.value = 0
        self._decoded: list[Sequence] = []
        self._ids = self._ones = b""  # of these: who they are, and how many tokens each computes
        self._of_decodes = xxh64_intdigest(b"")  # the composition of them alone

    def composition(self, step: Step) -> int:
        """Hash of who computes how many tokens, in order; recomputed only when that changes."""
        decoded, rows = step.decoded, step.rows
        if decoded is not self._decoded:
            self._decoded = decoded
            self._ids, self._ones = _packed([seq.seq_id for seq in decoded]), _ONE * len(decoded)
            self._of_decodes = xxh64_intdigest(self._ids + self._ones)
        if not rows:
            return self._of_decodes
        ids, counts = _packed([seq.seq_id for seq, _, _ in rows]), _packed([count for _, _, count in rows])
        return xxh64_intdigest(self._ids + ids + self._ones + counts)

    def add(self, composition: int, free_gpu: int, free_cpu: int, events: list[int]) -> int:
        """Adds one step; the value after it."""
        head = _STEP.pack(self.value, composition, free_gpu, free_cpu)
        self.value = xxh64_intdigest(head + _packed(events) if events else head)
        return self.value

    def add_steps(self, composition: int, free_gpu: list[int], free_cpu: int) -> list[int]:
        """The same for steps without events; the values after each."""
        value, values = self.value, []
        pack, digest = _STEP.pack, xxh64_intdigest
        for free in free_gpu:
            value = digest(pack(value, composition, free, free_cpu))
            values.append(value)
        self.value = value
        return values


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


def _packed(numbers: list[int]) -> bytes:
    return pack(f"<{len(numbers)}q", *numbers)
