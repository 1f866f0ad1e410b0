"""The steps of each engine in order of time, in batches, each step together with the start of the next one.

An engine is a replica of a fleet, or the only engine of a run. Requests' instants are matched with the steps while the
steps are read, so that memory does not grow with the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.reading.request_columns import RequestColumns, Requests
from analysis.reading.rows import IntArray, Rows, is_known, whole

WINDOW = 1 << 17  # requests whose instants are in memory at once


@dataclass(frozen=True, slots=True)
class StepRun:
    """Consecutive steps of one engine: int64 columns `[num_steps]`, null as 0.

    following: the start of the next step, ns; for the engine's last step its own end. is_last: these include that step.
    """

    columns: dict[str, IntArray]
    following: IntArray
    is_last: bool
    with_nulls: frozenset[str]  # columns with a null in the rows read so far

    @property
    def start(self) -> IntArray:
        return self.columns["start_ns"]

    @property
    def end(self) -> IntArray:
        return self.columns["end_ns"]

    def __len__(self) -> int:
        return self.following.size


def step_runs(steps: Rows, names: Sequence[str], engines: Sequence[int] | None) -> Iterator[tuple[int, StepRun]]:
    """(engine, some of its steps) up to each engine's last step. The columns always include start_ns and end_ns.

    engines: the replicas to distinguish (rows of other replicas are left out); None: all rows belong to engine 0, in
    the order of the rows.
    """
    wanted = list(dict.fromkeys(("start_ns", "end_ns", *names)))
    read = wanted if engines is None else [*wanted, "replica"]
    held: dict[int, dict[str, IntArray]] = {}  # each engine's newest step, until its next one is read
    with_nulls: frozenset[str] = frozenset()
    for arrays in (steps if engines is None else steps.by_time()).batches(read):
        columns = {name: whole(array) for name, array in zip(read, arrays, strict=True)}
        with_nulls |= frozenset(name for name, array in zip(read, arrays, strict=True) if array.null_count)
        for engine in (0,) if engines is None else engines:
            rows = slice(None) if engines is None else columns["replica"] == engine
            part = {name: columns[name][rows] for name in wanted}
            if not part["start_ns"].size:
                continue
            if engine in held:
                part = {name: np.concatenate((held[engine][name], column)) for name, column in part.items()}
            held[engine] = {name: column[-1:].copy() for name, column in part.items()}
            following = part["start_ns"][1:]
            if following.size:
                before = {name: column[:-1] for name, column in part.items()}
                yield engine, StepRun(before, following, False, with_nulls)
    for engine, part in held.items():
        yield engine, StepRun(part, part["end_ns"], True, with_nulls)


def replicas_of(steps: Rows) -> list[int]:
    found: set[int] = set()
    for (array,) in steps.batches(["replica"]):
        found |= set(np.flatnonzero(np.bincount(whole(array)[is_known(array)])).tolist())
    return sorted(found)


class Instants:
    """One instant of each request, ns, in order of time. Use either `num_until` or `take` while the steps are read.

    One window of instants is in memory at a time. A pass over the columns finds the next window, so memory does not
    grow with the number of requests. Equal instants are ordered by row. read: functions that return, for a piece of
    requests, the instants and any further columns, `[num_requests]` each.
    """

    def __init__(self, requests: Requests, *read: Callable[[RequestColumns], IntArray]) -> None:
        self._requests, self._read = requests, read
        # [instant, row, *further columns; num_instants]; at first a sentinel before all instants, of no request
        self._window = np.full((1 + len(read), 1), np.iinfo(np.int64).min)
        self._num_done = 1  # instants of the window that `take` has returned
        self._num_before = -1  # instants in earlier windows; -1 offsets the sentinel
        self._has_more = True

    def num_until(self, instants_ns: IntArray) -> IntArray:
        """The number of instants at or before each of `instants_ns`. From one call to the next the largest of these may
        not fall by more than a window. Do not use together with `take`."""
        most = int(instants_ns.max(initial=0))
        window = self._window
        found = self._num_before + np.searchsorted(window[0], instants_ns, side="right")
        while self._has_more and window[0, -1] <= most:
            self._num_before += window.shape[1]
            window = self._next()
            found += np.searchsorted(window[0], instants_ns, side="right")
        return found

    def take(self, run: StepRun) -> Iterator[IntArray]:
        """[instant, row, *further columns; num_instants] before the start of the step that follows `run`, in parts;
        with the last step, all that are left. Each instant is returned once."""
        window = self._window
        while True:
            size = window.shape[1]
            high = size if run.is_last else int(np.searchsorted(window[0], run.following[-1], side="left"))
            if high > self._num_done:
                yield window[:, self._num_done : high]
                self._num_done = high
            if high < size or not self._has_more:
                return
            window = self._next()

    def _next(self) -> IntArray:
        after_ns, after_row = self._window[:2, -1].tolist()
        found = np.empty((self._window.shape[0], 0), dtype=np.int64)
        self._has_more, self._num_done = False, 0
        for piece in self._requests.pieces():
            at = self._read[0](piece)
            columns = np.stack((at, piece.index, *[read(piece) for read in self._read[1:]]))
            later = (at > after_ns) | ((at == after_ns) & (columns[1] > after_row))
            found = np.concatenate((found, columns[:, later]), axis=1)
            found = found[:, np.lexsort((found[1], found[0]))]
            self._has_more |= found.shape[1] > WINDOW
            found = found[:, :WINDOW]
        self._window = found
        return found


def joined(halves: dict[int, int], rows: IntArray, values: IntArray) -> IntArray:
    """For each value the sum of its row's two values, if it is the second one of the row; else 0, and `halves` keeps
    the value."""
    sums = np.zeros(rows.size, dtype=np.int64)
    for number, (row, value) in enumerate(zip(rows.tolist(), values.tolist(), strict=True)):
        first = halves.pop(row, None)
        if first is None:
            halves[row] = value
        else:
            sums[number] = first + value
    return sums
