"""The records of a log of one's own: under our names (trace.columns), and without those that trace.where leaves out.

What is left out is not checked, as failed requests have no counts. It knows no field but the turns of a session, which
are counted anew where some are left out, or where the file has none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from testbed.errors import ConfigError, TraceError
from testbed.foreign_text import nearest, shortened, shown
from testbed.traces.readers.fields import NO_OFFSET, decimal, is_plain, listed
from testbed.traces.readers.open_text import Record
from testbed.traces.readers.own_rows import EXACT_FIELDS, FIELDS, KNOWN, ignored_fields, meant
from testbed.traces.schema import TraceRequest
from testbed.wording import count

Columns = Mapping[str, str | None]  # the testbed's field -> the file's name for it; None: the file has none
_NO_TOKEN = (0, "0", "0.0")  # of an output; pandas writes 0.0 next to missing values
Where = Mapping[str, Any]  # the file's name of a field -> the value, or the list of values, of the rows to keep


def check_columns(columns: object, also: Sequence[str] = ()) -> None:
    """Raises ConfigError, as of the key trace.columns, unless it maps fields of ours to different names. also: fields
    that somebody else reads."""
    if not isinstance(columns, Mapping):
        raise ConfigError(f"trace.columns is {shown(columns)}; it must be {{<our field>: <its name in the file>, …}}")
    given: dict[Any, str] = {}
    for field, name in columns.items():
        if field not in KNOWN and field not in also:
            near = nearest(str(field), (*FIELDS, *also, *EXACT_FIELDS))
            raise ConfigError(
                f"trace.columns has {field!r}, which is no field of ours; {near}valid: {', '.join((*FIELDS, *also))}"
            )
        if name is None:
            continue
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"trace.columns.{field} is {shown(name)}; it must be a name in the file, as a string, or null for none"
            )
        if name in given:
            raise ConfigError(f"trace.columns names {name!r} for {given[name]} and for {field}; a column is one field")
        given[name] = field


def check_where(where: object) -> None:
    """Raises ConfigError, as of the key trace.where, unless it maps names to values or lists of them."""
    if not isinstance(where, Mapping):
        raise ConfigError(f"trace.where is {shown(where)}; it must be {{<a name in the file>: <value or list>, …}}")
    for name, value in where.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"trace.where has {shown(name)}; it must be a name in the file, as a string")
        if not _values(value) or any(isinstance(one, Mapping | list | tuple) for one in _values(value)):
            raise ConfigError(f"trace.where.{name} is {shown(value)}; it must be a value, or a list of at least one")


def check_there(path: str | Path, columns: Columns | None, where: Where | None, names: Iterable[str]) -> None:
    """Raises TraceError if a name of `columns` or `where` is none of the file's."""
    there = list(names)
    for key, wanted in (("columns", _names_of(columns)), ("where", where or {})):
        if absent := [name for name in wanted if name not in there]:
            near = nearest(absent[0], there)
            raise TraceError(f"{path}: trace.{key} names {absent[0]!r}, which it has not; {near}found {listed(there)}")


def spread(columns: Columns | None, where: Where | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns what replaces, in the fields of a record, the objects that a name of `columns` or `where` leads into by
    their values: {"usage": {"prompt_tokens": 5}} by {"usage.prompt_tokens": 5}."""
    dotted = [name for name in (*_names_of(columns), *(where or {})) if "." in name]
    tops = list(dict.fromkeys(name.partition(".")[0] for name in dotted))

    def spreading(fields: dict[str, Any]) -> dict[str, Any]:
        inner = {name: fields[name] for name in tops if isinstance(fields.get(name), dict)}
        return {**_flat(inner), **{name: value for name, value in fields.items() if name not in inner}}

    return spreading if tops else lambda fields: fields


def _flat(fields: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        found |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else {above + name: value}
    return found


def _names_of(columns: Columns | None) -> list[str]:
    return [name for name in (columns or {}).values() if name is not None]


class Log:
    """The records of a file, any number of times; what is public is of the newest time.

    read: returns all records. limit: of those that are kept. notes: what is known of the file before it is read. also:
    names that somebody else reads. keeps: whether a record stays, of those that `where` keeps. With `columns` or
    `where`, requests without output are no mistake: they are left out.
    """

    def __init__(
        self,
        read: Callable[[], Iterator[Record]],
        limit: int | None,
        columns: Columns | None,
        where: Where | None,
        notes: tuple[str, ...] = (),
        *,
        also: Collection[str] = (),
        keeps: Callable[[str, dict[str, Any]], bool] | None = None,
    ) -> None:
        self._read, self._limit, self._columns, self._notes = read, limit, columns, notes
        self._kept = {name: {_compared(one) for one in _values(value)} for name, value in (where or {}).items()}
        said = ", ".join(f"{name}: {json.dumps(value, default=str)}" for name, value in (where or {}).items())
        self.where = f"trace.where={{{shortened(said)}}}" if where else ""
        self._also, self._keeps, self._is_foreign = {*self._kept, *also}, keeps, bool(columns or where)
        self._begin()

    def _begin(self) -> None:
        self._names: dict[str, None] = {}  # of the fields of all records that were kept
        self._num_read = self._num_without_output = 0
        self._num_left_out = dict.fromkeys(self._kept, 0)  # by the first name in `where` whose value is another
        self.clock: str | None = None  # of the arrivals, as `fields.arrival` calls it; its user sets it
        self._counts_turns = bool(self._kept)  # as some of a session may be left out
        self.has_turns: bool | None = None  # whether the rows of sessions have a turn; None: there are no such rows

    def __iter__(self) -> Iterator[Record]:
        self._begin()
        chosen = _renamed(self._chosen() if self._kept else self._read(), self._columns)
        is_sifted = self._is_foreign or self._keeps is not None
        for place, fields in islice(self._sifted(chosen) if is_sifted else chosen, self._limit):
            if not self._names.keys() >= fields.keys():
                self._names.update(dict.fromkeys(fields))
            yield place, fields

    def _chosen(self) -> Iterator[Record]:
        for place, fields in self._read():
            self._num_read += 1
            other = (name for name, values in self._kept.items() if _compared(fields.get(name)) not in values)
            if (name := next(other, None)) is None:
                yield place, fields
            else:
                self._num_left_out[name] += 1

    def _sifted(self, records: Iterator[Record]) -> Iterator[Record]:
        place, is_any = "", False
        for place, fields in records:
            num = fields.get("output_tokens")
            if self._keeps is not None and not self._keeps(place, fields):
                self._counts_turns = True
            elif self._is_foreign and num in _NO_TOKEN and not isinstance(num, bool):
                self._num_without_output += 1
                self._counts_turns = True
            else:
                is_any = True
                yield place, fields
        if self._num_without_output and not is_any:
            said = "field 'output_tokens' is 0, as in all rows before; expected a request with output"
            raise TraceError(f"{place}: {said}")

    def check_turn(self, row: TraceRequest) -> None:
        """Raises TraceError unless each row of a session has a turn, or none has one and each an arrival of its own."""
        if row.session_id is None:
            return
        has_turn = row.turn is not None
        if self.has_turns is None:
            self.has_turns = has_turn
        if not has_turn and row.think_ns is not None:
            raise TraceError(f"{row.place}: field 'turn' is absent; expected it beside 'session_id' and 'think_time'")
        if has_turn != self.has_turns:
            found = "given" if has_turn else "absent"
            raise TraceError(
                f"{row.place}: field 'turn' is {found}; expected it beside 'session_id' in all rows, or in none"
            )

    def with_turn(self, row: TraceRequest, last: int | None, previous: TraceRequest | None) -> TraceRequest:
        """Returns the row with its turn, counted from that of the row before it in its session (`previous`, whose turn
        is `last` in the file). If it is not the next, the row is out of order."""
        if row.session_id is None or (self.has_turns and not self._counts_turns):
            return row
        turn = row.turn or 0
        if previous is not None and previous.turn is not None:
            step = row.arrival_ns >= previous.arrival_ns if row.turn is None or last is None else min(turn - last, 1)
            turn = previous.turn + step
        return row._replace(turn=turn)

    def notes(self) -> list[str]:
        """Returns the notes on the newest time, which went to the end."""
        notes = [*ignored_fields(name for name in self._names if name not in self._also), *self._notes]
        if self._kept:
            each = ", ".join(f"{num:,} by {name}" for name, num in self._num_left_out.items())
            num, told = sum(self._num_left_out.values()), f" ({each})" * (len(self._kept) > 1)
            notes.append(f"{num:,} of {count(self._num_read, 'row')} left out{told}: {self.where}")
        if self._num_without_output:
            notes.append(f"{count(self._num_without_output, 'request')} without output left out: output_tokens is 0")
        if self.clock == NO_OFFSET:
            notes.append(
                "instants without an offset are read as UTC: where clocks were changed, a gap or order is false"
            )
        if self.has_turns is False:
            notes.append("the file has no turns: they are numbered by arrival within each session")
        return notes


def _values(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _compared(value: object) -> str | int | float | None:
    """Returns a value as it is compared: as its text, which may be of a number or a truth; None: it is absent."""
    text = "" if value is None else str(value).strip()
    if text.isdecimal() and is_plain(text) and len(text) < 100:
        return int(text)  # exactly, and equal to 200.0
    number = decimal(text)
    if number is not None and number == number:
        return number
    return (text.lower() if text.lower() in ("true", "false") else text) or None


def _renamed(records: Iterator[Record], columns: Columns | None) -> Iterator[Record]:
    """Returns the records with our names for the fields in `columns`, which take the place of any that have these."""
    if not columns:
        return records
    named = {ours: name for ours, name in columns.items() if name is not None}
    left = {*columns, *named.values()}
    none = {ours for ours, name in columns.items() if name is None}  # nor is a name that is like it taken for it
    return (
        (place, {ours: fields[name] for ours, name in named.items() if name in fields}
         | {name: value for name, value in fields.items() if name not in left and not (none and meant(name) in none)})
        for place, fields in records
    )  # fmt: skip
