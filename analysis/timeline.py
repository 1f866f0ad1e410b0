"""The steps of each engine as they follow one another: batches of rows, each step beside the start of the next.

An engine is a replica of a fleet, or the one that there is. What is asked of the steps at given instants is answered as
they pass by, so that memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.rows import BoolArray, IntArray, Rows, is_known, whole


@dataclass(frozen=True, slots=True)
class StepRun:
    """Some steps of one engine, one after the other: int64 columns `[num_steps]`, null as 0.

    following: start of the step after each, ns; of the engine's last step its own end. is_last: that one is here.
    """

    columns: dict[str, IntArray]
    following: IntArray
    is_last: bool
    with_nulls: frozenset[str]  # columns in which there was one, in these rows or before

    @property
    def start(self) -> IntArray:
        return self.columns["start_ns"]

    @property
    def end(self) -> IntArray:
        return self.columns["end_ns"]

    def __len__(self) -> int:
        return self.following.size


def step_runs(steps: Rows, names: Sequence[str], engines: Sequence[int] | None) -> Iterator[tuple[int, StepRun]]:
    """(engine, steps of it) until each engine's last step. start_ns and end_ns are always among the columns.

    engines: the replicas that are told apart (rows of others are left out); None: all rows are engine 0's, in the order
    in which they lie.
    """
    wanted = list(dict.fromkeys(("start_ns", "end_ns", *names)))
    read = wanted if engines is None else [*wanted, "replica"]
    held: dict[int, dict[str, IntArray]] = {}  # each engine's newest step, until the next is known
    with_nulls: frozenset[str] = frozenset()
    for arrays in (steps if engines is None else steps.by_time()).batches(read):
        columns = {name: whole(array) for name, array in zip(read, arrays, strict=True)}
        with_nulls |= frozenset(name for name, array in zip(read, arrays, strict=True) if array.null_count)
        for engine, rows in _by_engine(columns, engines):
            part = {name: columns[name] if rows is None else columns[name][rows] for name in wanted}
            if engine in held:
                part = {name: np.concatenate((held[engine][name], column)) for name, column in part.items()}
            held[engine] = {name: column[-1:].copy() for name, column in part.items()}
            following = part["start_ns"][1:]
            if following.size:
                yield (
                    engine,
                    StepRun({name: column[:-1] for name, column in part.items()}, following, False, with_nulls),
                )
    for engine, part in held.items():
        yield engine, StepRun(part, part["end_ns"], True, with_nulls)


def _by_engine(columns: dict[str, IntArray], engines: Sequence[int] | None) -> Iterator[tuple[int, BoolArray | None]]:
    """(engine, which rows are its; None: all)."""
    num_rows = columns["start_ns"].size
    if engines is None:
        if num_rows:
            yield 0, None
        return
    for engine in engines:
        rows = columns["replica"] == engine
        if rows.any():
            yield engine, rows


def replicas_of(steps: Rows) -> list[int]:
    """Which replicas took steps, in ascending order."""
    found: set[int] = set()
    if "replica" in steps.names:
        for (array,) in steps.batches(["replica"]):
            found |= set(np.flatnonzero(np.bincount(whole(array)[is_known(array)])).tolist())
    return sorted(found)


def last_end_ns(steps: Rows) -> int | None:
    """The end of the last step of all; None where there is none."""
    ends = [int(whole(array).max()) for (array,) in steps.batches(["end_ns"]) if len(array)]
    return max(ends, default=None)


class Instants:
    """Instants of requests, ns, at which something of the steps is wanted, to be looked up in order of time."""

    def __init__(self, instants: IntArray, requests: IntArray | None = None) -> None:
        """requests: whose they are; None: one of each request."""
        order = np.argsort(instants, kind="stable")
        self.sorted = instants[order]
        small = order.astype(np.int32) if order.size < 1 << 31 else order
        self._requests: NDArray[np.integer] = small if requests is None else requests[order]
        self._num_done = 0

    def within(self, run: StepRun) -> tuple[IntArray, NDArray[np.integer]]:
        """(instants, whose) up to the start of the step after these; with the last step all that are left."""
        low = self._num_done
        last = self.sorted.size if run.is_last else int(np.searchsorted(self.sorted, run.following[-1], side="left"))
        self._num_done = last = max(low, last)
        return self.sorted[low:last], self._requests[low:last]
