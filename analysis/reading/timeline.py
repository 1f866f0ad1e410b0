"""The steps of each engine as they follow one another: batches of rows, each step beside the start of the next.

An engine is a replica of a fleet, or the one that there is. What is asked of the steps at given instants is answered as
they pass by, so that memory does not grow with their number.
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
    if "replica" in steps.names:
        for (array,) in steps.batches(["replica"]):
            found |= set(np.flatnonzero(np.bincount(whole(array)[is_known(array)])).tolist())
    return sorted(found)


class Instants:
    """An instant of each request, ns, in order of time: looked up as steps pass by, in one of two ways.

    They are held a window at a time, the next of which is found in a pass over the columns, so that memory does not
    grow with the requests; rows tell apart what is at one instant. read: the instants of a piece's requests, and after
    them columns that come along `[num_instants, num_requests]`.
    """

    def __init__(self, requests: Requests, *read: Callable[[RequestColumns], IntArray]) -> None:
        self._requests, self._read = requests, read
        # [instant, row, *what comes along; num_instants]; at first what stands before all, and is of no request
        self._window = np.full((1 + len(read), 1), np.iinfo(np.int64).min)
        self._num_done = 1  # of the window
        self._num_before = -1  # in earlier windows
        self._has_more = True

    def num_until(self, instants_ns: IntArray) -> IntArray:
        """How many are at or before each of `instants_ns`, whose largest does not come down from call to call by more
        than a window. Not to be mixed with `take`."""
        most = int(instants_ns.max(initial=0))
        window = self._window
        found = self._num_before + np.searchsorted(window[0], instants_ns, side="right")
        while self._has_more and window[0, -1] <= most:
            self._num_before += window.shape[1]
            window = self._next()
            found += np.searchsorted(window[0], instants_ns, side="right")
        return found

    def take(self, run: StepRun) -> Iterator[IntArray]:
        """[instant, row, *what comes along; num_instants] of those up to the start of the step after these, once; with
        the last step all that are left. In parts."""
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
    """The sum of each row's two values, once both are there, and 0 until then; the first of them waits in `halves`."""
    sums = np.zeros(rows.size, dtype=np.int64)
    for number, (row, value) in enumerate(zip(rows.tolist(), values.tolist(), strict=True)):
        first = halves.pop(row, None)
        if first is None:
            halves[row] = value
        else:
            sums[number] = first + value
    return sums
