"""The running and the swapped-out sequences. Owns both lists, their order, and which sequences are in their prefill."""

from __future__ import annotations

from testbed.core.sequence import Sequence
from testbed.core.state import SequenceState


class Running:
    """Holds units. A unit is one sequence, or several of a group scheduled together, represented by the first one."""

    def __init__(self) -> None:
        self.units: dict[int, Sequence] = {}  # by unit id, in running order
        self.swapped: dict[int, Sequence] = {}  # by unit id, in the order swapped out
        self.prefilling: dict[int, Sequence] = {}  # running, prefill unfinished, by seq_id, as admitted or swapped in
        self._found_no_room: dict[tuple[int, int], int] = {}  # by (seq_id, computed tokens): failed attempts
        self.num_groups = 0  # running units that belong to a sequence group
        self._in_order: tuple[Sequence, ...] | None = ()  # the cached `in_order`; None: the units have changed

    @property
    def num_seqs(self) -> int:
        """Running sequences; a group that has not forked yet counts all sequences that it will have."""
        return sum([seq.num_seqs for seq in self.units.values()]) if self.num_groups else len(self.units)

    @property
    def num_existing(self) -> int:
        """Running sequences that exist now; a group that has not forked yet counts once."""
        return sum([seq.num_together for seq in self.units.values()]) if self.num_groups else len(self.units)

    @property
    def in_order(self) -> tuple[Sequence, ...]:
        """A snapshot of the units in running order."""
        if self._in_order is None:
            self._in_order = tuple(self.units.values())
        return self._in_order

    def admit(self, seq: Sequence) -> None:
        """Starts the prefill of a sequence, behind all running units."""
        seq.is_prefilling = True
        self.start(seq)

    def start(self, seq: Sequence) -> None:
        """Adds a unit behind all running units."""
        self.units[seq.unit_id] = seq
        self._in_order = None
        self.num_groups += seq.group is not None
        for one in seq.together:
            one.enter(SequenceState.RUNNING)
            if one.is_prefilling:
                self.prefilling[one.seq_id] = one

    def stop(self, seq: Sequence) -> None:
        """Removes a unit from the running or the swapped-out ones."""
        if self.swapped.pop(seq.unit_id, None) is not None:
            return
        del self.units[seq.unit_id]
        self._in_order = None
        self.num_groups -= seq.group is not None
        self.prefilling.pop(seq.seq_id, None)

    def leave(self, seq: Sequence) -> None:
        """Removes one sequence from the running or the swapped-out ones; its siblings stay."""
        units = self.units if seq.state is SequenceState.RUNNING else self.swapped
        self.prefilling.pop(seq.seq_id, None)
        self._in_order = None
        if seq.siblings is None:
            del units[seq.unit_id]
            self.num_groups -= units is self.units and seq.group is not None
            return
        left = tuple([one for one in seq.siblings if one is not seq])
        for one in left:
            one.join(left)
        units[seq.unit_id] = left[0]

    def swap_out(self, seq: Sequence) -> None:
        """Adds a unit to the swapped-out ones; it has been removed from the running ones."""
        for one in seq.together:
            one.enter(SequenceState.SWAPPED)
        self.swapped[seq.unit_id] = seq

    def note_prefill(self, seq: Sequence) -> None:
        """Notes whether its prefill is over, or unfinished again, as tokens in flight of a victim are taken back."""
        seq.is_prefilling = seq.num_computed_tokens < max(seq.num_prompt_tokens, seq.num_tokens - 1)
        self.prefilling.pop(seq.seq_id, None)

    def finds_no_room(self, seq: Sequence) -> bool:
        """Counts that the only running unit found no free blocks. Returns True the third time at the same position with
        no progress of any request in between. Once may be chance: the next time, more of its prefix may be cached."""
        place = seq.seq_id, seq.num_computed_tokens
        self._found_no_room[place] = times = self._found_no_room.get(place, 0) + 1
        return times > 2

    def got_on(self) -> None:
        """Resets the counts of `finds_no_room`: some sequence emitted a token or ended."""
        self._found_no_room.clear()

    def reorder(self, seqs: list[Sequence]) -> None:
        """Changes the running order to `seqs`, which must list every running unit once."""
        if seqs == list(self.units.values()):
            return
        units = {seq.unit_id: seq for seq in seqs}
        is_same = len(seqs) == len(units) and units.keys() == self.units.keys()
        assert is_same, f"put in order is not each that runs, once: {', '.join([seq.request_id for seq in seqs])}"
        self._in_order, self.units = None, units

    def check_invariants(self, *, is_between_steps: bool) -> None:
        assert self._in_order is None or list(self._in_order) == list(self.units.values())
        assert self.num_groups == sum([1 for seq in self.units.values() if seq.group is not None])
        if is_between_steps:
            prefilling = [seq.seq_id for seq in self.units.values() if seq.is_prefilling]
            assert sorted(self.prefilling) == sorted(prefilling), "unfinished prefills are kept apart"
