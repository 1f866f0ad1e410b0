"""The requests of a run in pieces. Each column of a piece is read on first use.

Memory is limited to one piece, for any number of requests. There may be a hundred times as many token instants as
requests, so these are read in batches, and only each request's last instant and largest gap are kept. If there are few
token instants, all are kept: they are needed three times, and unpacking them takes most of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from analysis.reading.rows import BoolArray, Codes, FloatArray, IntArray, Rows, as_rows, is_known, numbers, whole
from testbed.records.schema import COMPLETED

PIECE_ROWS = 1 << 17  # requests of a piece; the runs of most experiments have no more
TOKEN_ROWS = 256  # requests whose token instants are in memory at once
KEPT_TOKENS = 2_500_000  # if a run has no more tokens than this, all instants stay in memory: 20 MB
STRINGS = ("finish_reason", "tenant")


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """For each request `[num_requests]`: instant of its last token and largest gap (ns, NaN for none), token count."""

    last_ns: FloatArray
    largest_gap_ns: FloatArray
    num: IntArray  # -1: not recorded


S = TypeVar("S", bound=np.generic)
_Batch = tuple[int, IntArray, IntArray, BoolArray]  # see RequestColumns._token_batches
Rule = Callable[["RequestColumns"], BoolArray]


class Requests:
    """Requests of a run: the rows that every rule selects. Each rule sees only the rows that earlier ones selected."""

    def __init__(self, rows: Rows, rules: tuple[Rule, ...] = (), base: RequestColumns | None = None) -> None:
        self.rows = rows
        self._rules = rules
        self._base = base if base is not None else RequestColumns(rows)  # shared, so that tokens are read once

    @classmethod
    def of(cls, data: Any) -> Requests:
        """The requests of a frame, a table or rows; `Requests` are returned unchanged."""
        return data if isinstance(data, Requests) else cls(as_rows(data))

    def where(self, rule: Rule) -> Requests:
        """Only the requests that `rule` selects. rule: columns -> bool `[num_requests]`."""
        return Requests(self.rows, (*self._rules, rule), self._base)

    @property
    def is_one_piece(self) -> bool:
        return self.rows.num_rows <= PIECE_ROWS

    def pieces(self) -> Iterator[RequestColumns]:
        """All requests in pieces of about PIECE_ROWS rows; at least one piece."""
        if self.is_one_piece:
            yield self._only
            return
        low = 0
        for part in self.rows.parts(PIECE_ROWS):
            yield self._chosen(RequestColumns(part, low=low))
            low += part.num_rows

    @cached_property
    def _only(self) -> RequestColumns:
        return self._chosen(self._base)

    def _chosen(self, piece: RequestColumns) -> RequestColumns:
        for rule in self._rules:
            piece = piece.where(rule(piece))
        return piece

    def sum(self, count: Callable[[RequestColumns], Any]) -> Any:
        """The sum of `count(piece)` over the pieces, as a Python number."""
        return sum(np.asarray(count(piece)).item() for piece in self.pieces())

    def __len__(self) -> int:
        return self._num

    @cached_property
    def _num(self) -> int:
        return self.sum(len) if self._rules else self.rows.num_rows


class RequestColumns:
    """Columns of `testbed.records.schema.REQUEST_COLUMNS` for some requests, `[num_requests]` each.

    low: the index of the first row among all rows of the run.
    """

    def __init__(
        self, rows: Rows, chosen: BoolArray | None = None, parent: RequestColumns | None = None, low: int = 0
    ) -> None:
        self.rows = rows
        self._low = low
        self._chosen, self._parent = chosen, parent
        self._num = rows.num_rows if chosen is None else int(chosen.sum())
        self._arrays_of: dict[str, list[Any]] = {}  # columns read so far, except token instants
        self._kept: list[_Batch] | None = None  # all token instants, if they are few

    @classmethod
    def of(cls, data: Any) -> RequestColumns:
        """The columns of a frame, a table or rows; `RequestColumns` are returned unchanged."""
        return data if isinstance(data, RequestColumns) else cls(as_rows(data))

    def __len__(self) -> int:
        return self._num

    def where(self, chosen: BoolArray) -> RequestColumns:
        """Only the chosen requests. chosen: `[num_requests]` of these columns."""
        if chosen.all():
            return self
        if self._chosen is not None:
            among, chosen = chosen, self._chosen.copy()
            chosen[chosen] = among
        return RequestColumns(self.rows, chosen, self._parent or self, self._low)

    @property
    def index(self) -> IntArray:
        """The index of each request among all rows of the run."""
        rows = np.arange(self._low, self._low + self.rows.num_rows)
        return rows if self._chosen is None else rows[self._chosen]

    def numbers(self, name: str) -> FloatArray:
        """float64, NaN for null."""
        return self._column(name, np.float64, numbers)

    def whole(self, name: str, missing: int = 0) -> IntArray:
        """int64, exact; `missing` for null."""
        return self._column(name, np.int64, partial(whole, missing=missing))

    def is_known(self, name: str) -> BoolArray:
        return self._column(name, np.bool_, is_known)

    def _column(self, name: str, kind: type[S], read: Callable[[Any], NDArray[S]]) -> NDArray[S]:
        result = np.empty(self.rows.num_rows, dtype=kind)
        for low, array in self._arrays(name):
            result[low : low + len(array)] = read(array)
        return result if self._chosen is None else result[self._chosen]

    def codes(self, name: str, missing: str = "") -> Codes:
        codes = Codes((array for _, array in self._arrays(name)), missing)
        if self._chosen is not None:
            codes.codes = codes.codes[self._chosen]
        return codes

    @cached_property
    def reasons(self) -> Codes:
        """The finish reason of each request; "unfinished" for null."""
        return self.codes("finish_reason", "unfinished")

    @property
    def is_completed(self) -> BoolArray:
        return self.reasons.among(COMPLETED)

    def _arrays(self, name: str) -> Iterator[tuple[int, Any]]:
        if self._parent is not None:
            yield from self._parent._arrays(name)
            return
        if name not in self._arrays_of:
            self._arrays_of[name] = [array for (array,) in self.rows.batches([name])]
        low = 0
        for array in self._arrays_of[name]:
            yield low, array
            low += len(array)

    # --- token instants ---

    @cached_property
    def tokens(self) -> TokenTimes | None:
        """Last tokens, largest gaps and counts; None if no token instant was recorded."""
        if self._parent is not None:
            times, chosen = self._parent.tokens, self._chosen
            if times is None or not (times.num[chosen] >= 0).any():
                return None
            return TokenTimes(times.last_ns[chosen], times.largest_gap_ns[chosen], times.num[chosen])
        last, largest = np.full(len(self), np.nan), np.full(len(self), np.nan)
        num = np.full(len(self), -1)
        for low, flat, offsets, known in self._token_batches():
            rows = slice(low, low + len(known))
            num[rows] = np.where(known, np.diff(offsets), -1)
            last[rows], largest[rows] = _last_and_largest(flat, offsets)
        return TokenTimes(last, largest, num) if (num >= 0).any() else None

    def num_tokens_within(self, start_ns: int, until_ns: int) -> int:
        """The number of tokens emitted from `start_ns` to `until_ns`, by the instants of the steps that emitted them.

        If the sequences of a group emitted together, each of the request's steps counts as its mean number of tokens
        per step.
        """
        per_step = self.whole("num_output_tokens") / np.maximum(self.whole("num_token_steps"), 1)
        low, total = 0, 0.0
        for flat, offsets in self._chosen_tokens():
            within = np.append(0, np.cumsum((flat >= start_ns) & (flat <= until_ns)))[offsets]
            num_requests = len(offsets) - 1
            total += float((np.diff(within) * per_step[low : low + num_requests]).sum())
            low += num_requests
        return round(total)

    def gaps_ns(self) -> Iterator[IntArray]:
        """Every gap between two successive tokens of a request, ns, in batches."""
        for flat, offsets in self._chosen_tokens():
            if flat.size > 1:
                inside = np.ones(flat.size - 1, dtype=np.bool_)
                borders = offsets[1:-1]
                inside[borders[(borders > 0) & (borders < flat.size)] - 1] = False
                yield np.diff(flat)[inside]

    def _chosen_tokens(self) -> Iterator[tuple[IntArray, IntArray]]:
        """(instants of all tokens, offsets `[num_requests + 1]` of each request's tokens), in batches of requests."""
        for low, flat, offsets, known in self._token_batches():
            if self._chosen is None:
                yield flat, offsets
            else:
                chosen, lengths = self._chosen[low : low + len(known)], np.diff(offsets)
                yield flat[np.repeat(chosen, lengths)], np.append(0, np.cumsum(lengths[chosen]))

    def _token_batches(self) -> Iterator[_Batch]:
        """(first row, instants, offsets, which rows are recorded) for batches of all rows."""
        if self._parent is not None:
            yield from self._parent._token_batches()
            return
        if self._kept is None and int(self.whole("num_token_steps").sum()) <= KEPT_TOKENS:
            # a copy, as Arrow's own buffer may be twice as long
            self._kept = [(low, flat.copy(), offsets, known) for low, flat, offsets, known in self._read_tokens()]
        yield from self._read_tokens() if self._kept is None else self._kept

    def _read_tokens(self) -> Iterator[_Batch]:
        low = 0
        if "token_ns" not in self.rows.names:
            return
        for (array,) in self.rows.batches(["token_ns"], TOKEN_ROWS):
            known, offsets = is_known(array), whole(array.offsets)
            flat, offsets = whole(array.values)[offsets[0] : offsets[-1]], offsets - offsets[0]
            if not known.all():  # drops the values that Arrow may keep behind a null
                lengths = np.diff(offsets)
                flat, offsets = flat[np.repeat(known, lengths)], np.append(0, np.cumsum(np.where(known, lengths, 0)))
            yield low, flat, offsets, known
            low += len(array)


def _last_and_largest(flat: IntArray, offsets: IntArray) -> tuple[FloatArray, FloatArray]:
    """Each request's last instant and largest gap between two tokens, ns; NaN for none."""
    counts = np.diff(offsets)
    has = counts > 0
    last, largest = np.full(counts.size, np.nan), np.full(counts.size, np.nan)
    if has.any():
        last[has] = flat[offsets[1:][has] - 1]
        gaps = np.diff(flat, prepend=flat[0])
        gaps[offsets[:-1][has]] = -1  # no gap ends at a request's first token
        largest[has] = np.maximum.reduceat(gaps, offsets[:-1][has])
    return last, np.where(counts >= 2, largest, np.nan)
