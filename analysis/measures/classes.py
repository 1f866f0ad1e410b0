"""The classes of the requests of a trace: its tenants or, without several of these, its priorities.

It does not know how classes are compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.reading.request_columns import RequestColumns, Requests, Rule

MAX_CLASSES = 8  # with more, none is reported
_BY = ("tenant", "priority")
_NONE = "none"  # the tenant of requests that name none


def classes_of(requests: Requests) -> tuple[str, list[str]] | None:
    """The column that tells the classes, and their names in order; None if there are fewer than two, or too many."""
    for by in _BY:
        found: set[Any] = set()
        for piece in requests.pieces():
            found |= _values(piece, by)
        if 1 < len(found) <= MAX_CLASSES:
            return by, [str(value) for value in sorted(found)]
    return None


def _values(piece: RequestColumns, by: str) -> set[Any]:
    if by == "priority":
        return set(np.unique(piece.whole(by)).tolist())
    codes = piece.codes(by, _NONE)
    return {codes.labels[code] for code in np.unique(codes.codes).tolist()}


def is_of(by: str, name: str) -> Rule:
    """The rule that selects the requests of a class."""
    if by == "priority":
        return lambda piece: piece.whole(by) == int(name)
    return lambda piece: piece.codes(by, _NONE).among((name,))
