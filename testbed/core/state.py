"""The states of a sequence and their transitions. SWAPPED leads to WAITING on a reset, or to end as ignored."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class SequenceState(IntEnum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    FINISHED = 3


RUNNING: Final = SequenceState.RUNNING  # as a Final, because it is read for each row
FINISHED: Final = SequenceState.FINISHED

TRANSITIONS: Final[dict[SequenceState, tuple[SequenceState, ...]]] = {
    SequenceState.WAITING: (SequenceState.RUNNING, SequenceState.FINISHED),
    SequenceState.RUNNING: (SequenceState.WAITING, SequenceState.SWAPPED, SequenceState.FINISHED),
    SequenceState.SWAPPED: (SequenceState.RUNNING, SequenceState.WAITING, SequenceState.FINISHED),
    SequenceState.FINISHED: (),
}
