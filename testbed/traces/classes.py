"""Classes of requests: their checks and shares, and whether the requests of a trace differ in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from testbed.checks import require
from testbed.traces.schema import MAX_PRIORITY, TraceRequest


def check_class(where: str, priority: int | None, deadline_s: float | None) -> None:
    """Raises ConfigError for a value out of range. None: absent. where: what the keys belong to, as "trace."."""
    is_priority = priority is None or -MAX_PRIORITY - 1 <= priority <= MAX_PRIORITY
    require(f"{where}priority", priority, is_priority, f"{-MAX_PRIORITY - 1:,} to {MAX_PRIORITY:,}")
    require(f"{where}deadline_s", deadline_s, deadline_s is None or 0 <= deadline_s <= 1e9, "0 to 1e9, or absent")


def relative_shares(where: str, shares: Sequence[Any]) -> list[float]:
    """Returns each share over their sum. Raises ConfigError for one that is not a number above 0, up to 1e15."""
    numbers: list[float] = []
    for position, share in enumerate(shares):
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        require(f"{where}[{position}].share", share, is_number and 0 < share <= 1e15, "above 0, up to 1e15")
        numbers.append(float(share))
    total = sum(numbers)
    return [number / total for number in numbers]


class ClassFields:
    """Finds the fields of a class in which requests differ. A deadline is counted from the arrival."""

    NAMES = ("priority", "tenant", "deadline")

    def __init__(self) -> None:
        self._first: tuple[object, ...] | None = None
        self._differs = [False] * len(self.NAMES)

    def add(self, row: TraceRequest) -> None:
        fields = (row.priority, row.tenant, row.deadline_ns)
        if self._first is None:
            self._first = fields
        elif fields != self._first:
            before = zip(self._differs, fields, self._first, strict=True)
            self._differs = [differs or one != first for differs, one, first in before]

    @property
    def differing(self) -> list[str]:
        return [name for name, differs in zip(self.NAMES, self._differs, strict=True) if differs]
