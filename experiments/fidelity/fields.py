"""Checked access to values of measured files. Every error is one line with place, field, value and what to do."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.errors import TraceError
from testbed.foreign_text import number as number_between
from testbed.foreign_text import parsed
from testbed.traces.readers.fields import decimal, json_object, name_text, refuse, token_count, whole_number
from testbed.traces.schema import MAX_NUM_TOKENS

MAX_S = 1e8  # three years; a larger value must be in another unit
_MAX_FIELD = 2**31 - 1  # characters of a CSV field; a list of 20,000 gaps exceeds the default limit


def json_value(text: str, place: str) -> Any:
    """The value of a JSON text. Raises TraceError if it is not JSON."""
    try:
        return parsed(json.loads, text)
    except ValueError as error:
        raise TraceError(f"{place}: not JSON ({error}); expected the file as the tool wrote it") from None


def json_lines(text: str, file: Path) -> Iterator[Fields]:
    """The object on each line that is not empty. Raises TraceError if a line is no object."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield Fields(json_object(line, f"{file}:{number}"), f"{file}:{number}")


def csv_rows(text: str, file: Path) -> Iterator[Fields]:
    """Each row of a CSV whose first line names the columns. Raises TraceError if it is no CSV."""
    csv.field_size_limit(_MAX_FIELD)
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    try:
        for values in reader:
            if None in values:
                raise TraceError(f"{file}:{reader.line_num}: more values than columns; quote lists")
            yield Fields(values, f"{file}:{reader.line_num}")
    except csv.Error as error:
        raise TraceError(f"{file}:{reader.line_num}: not CSV ({error}); expected the file as it was written") from None


def csv_columns(text: str) -> list[str]:
    """The column names in the first line; empty if it is not a line of a CSV."""
    csv.field_size_limit(_MAX_FIELD)
    try:
        return [name.strip() for name in next(csv.reader(text.splitlines()[:1]), [])]
    except csv.Error:
        return []


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of a measured file and its place. Values are checked when they are read, and raise TraceError.

    prefix: of the field names in errors, if it is part of a larger object.
    """

    values: Mapping[str, Any]
    place: str
    prefix: str = ""

    @classmethod
    def of(cls, value: Any, place: str, name: str, prefix: str = "") -> Fields:
        """Fields of `value`, which errors call `name`. Raises TraceError if it is not an object."""
        if not isinstance(value, dict):
            raise refuse(place, name, value, "an object")
        return cls(value, place, prefix)

    def get(self, field: str) -> Any:
        """The value of a field; None if it is absent."""
        return self.values.get(field)

    def required(self, field: str, expected: str) -> Any:
        if self.get(field) is None:
            raise TraceError(f"{self.place}: field {self.prefix + field!r} is absent; expected {expected}")
        return self.values[field]

    def within(self, field: str) -> Fields:
        name = self.prefix + field
        return self.of(self.required(field, "an object"), self.place, name, f"{name}.")

    def listed(self, field: str, expected: str = "a list") -> list[Any]:
        """The list in a field; its JSON text is accepted too, as in a CSV."""
        value = self.get(field)
        try:
            found = parsed(json.loads, value) if isinstance(value, str) else value
        except ValueError:
            found = None
        if not isinstance(found, list):
            raise refuse(self.place, self.prefix + field, value, expected)
        return found

    def durations_s(self, field: str, unit_s: float = 1.0) -> tuple[float, ...]:
        values = self.listed(field, "a list of latencies, as [1, 2]")
        return tuple(duration_s(value, self.place, self.prefix + field, unit_s) for value in values)

    def name(self, field: str) -> str:
        return name_text(self.required(field, "a name"), self.place, self.prefix + field)

    def count(self, field: str) -> int:
        """A number of tokens, 1 or more."""
        value = self.required(field, "a whole number above 0")
        return token_count(value, self.place, self.prefix + field)

    def whole(self, field: str) -> int:
        """A whole number of anything else, 1 or more."""
        value, expected = self.required(field, "a whole number above 0"), f"a whole number from 1 to {MAX_NUM_TOKENS:,}"
        return whole_number(value, self.place, self.prefix + field, 1, MAX_NUM_TOKENS, expected)

    def duration_s(self, field: str, unit_s: float = 1.0) -> float:
        value = self.required(field, "a number of 0 or more")
        return duration_s(value, self.place, self.prefix + field, unit_s)

    def instant_s(self, field: str) -> float:
        """An instant on any clock, in s."""
        value = self.required(field, "an instant in s")
        return real(value, self.place, self.prefix + field, -1e18, "a number of seconds")

    def request_id(self, field: str = "request_id", otherwise: object = None) -> str:
        """The request's id, a name or a number. If absent or empty: `otherwise`, or by default the line number."""
        value = self.get(field)
        if value is None or value == "":
            return str(self.place.rsplit(":", 1)[-1] if otherwise is None else otherwise)
        return name_text(value, self.place, self.prefix + field)


def real(value: Any, place: str, field: str, least: float, expected: str) -> float:
    """A finite number of at least `least`; text is accepted too, as in a CSV. Raises TraceError for other values."""
    found: Any = decimal(value) if isinstance(value, str) else value
    if not number_between(least, 1e30)(found):
        raise refuse(place, field, value, expected)
    return float(found)


def duration_s(value: Any, place: str, field: str, unit_s: float = 1.0) -> float:
    """A latency in seconds, from a number in units of `unit_s`. Raises TraceError unless it is in [0, MAX_S]."""
    found = real(value, place, field, -1e30, "a number, a latency of 0 or more; leave out what has none") * unit_s
    if found < 0:
        raise refuse(place, field, value, "a latency of 0 or more: the clock ran backwards, leave the row out")
    if found > MAX_S:
        raise refuse(place, field, value, f"a latency of at most {MAX_S:g} s: is the unit right?")
    return found
