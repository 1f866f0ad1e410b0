"""Admission: whether a waiting sequence whose blocks are there may start, beside what the watermark says."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from testbed.sequence import Sequence


class Admission(Protocol):
    """A user's own class with this method plugs in by `_target_`. It may have `bind(context: PolicyContext)`."""

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        """Whether `seq`, the head of the queue, may join the running sequences (in order of admission) in this step.

        Asked only if the block manager has room for it now. A head that is refused while nothing runs ends as ignored.
        """
        ...


class Watermark:
    """The block manager's own rule (C7) and nothing else."""

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        return True
