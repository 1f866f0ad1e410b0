"""Checks single values of trace rows. Each error reads "file:line: field 'x' is 'y'; expected ..."."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from testbed.errors import TraceError
from testbed.foreign_text import number as number_between
from testbed.foreign_text import shown
from testbed.traces.schema import MAX_NS, MAX_NUM_TOKENS

MAX_SECONDS = MAX_NS // 10**9
MAX_TOKEN_ID = 2**31 - 1
_TOKENS = f"a whole number of tokens from 1 to {MAX_NUM_TOKENS:,}"
_may_be_seconds = number_between(0, 2 * MAX_SECONDS)  # as a float at most, which has no bound of its own
_NANOSECONDS = f"a whole number of ns from 0 to {MAX_NS:,}"
_INSTANT = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?[0-5]\d)?", re.ASCII)
_DATE = re.compile(r"\s*\d{4}-\d\d-\d\d")
_YEAR_1 = datetime(1, 1, 1, tzinfo=UTC)
_EPOCH = 1_262_304_000, 4_102_444_800  # 2010 and 2100 in s since 1970: as seconds of a run they are 40 years and more
_UNITS = {"seconds since 1970": 10**9, "milliseconds since 1970": 10**6}  # in ns
NO_OFFSET = "instants without an offset"
_ANY_INSTANT = "an instant as 2023-11-16 18:15:46.6805900, with or without an offset as +00:00 (up to 23:59)"


def refuse(place: str, field: str, value: object, expected: str) -> TraceError:
    """Returns the error for a value that is not what was expected. Long values are shortened."""
    return TraceError(f"{place}: field {field!r} is {shown(value)}; expected {expected}")


def whole_number(value: object, place: str, field: str, minimum: int, maximum: int, expected: str = "") -> int:
    """Returns a whole number from an int, a whole float (pandas writes 3 as 3.0 next to missing values), or the text of
    one. Raises TraceError otherwise. expected: for the message, if it is not just a number."""
    number = value
    if isinstance(value, str):
        text = value.strip()
        try:
            number = int(text) if is_plain(text) else None
        except ValueError:
            number = decimal(text)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if not isinstance(number, int) or isinstance(number, bool) or not minimum <= number <= maximum:
        raise refuse(place, field, value, expected or f"a whole number from {minimum:,} to {maximum:,}")
    return number


def token_count(value: object, place: str, field: str) -> int:
    """Returns a number of tokens, 1 to MAX_NUM_TOKENS. Raises TraceError otherwise."""
    if type(value) is str and len(value) < 9 and value.isdigit() and value.isascii():  # nearly always
        number = int(value)
        if number:
            return number
    return whole_number(value, place, field, 1, MAX_NUM_TOKENS, _TOKENS)


def seconds(value: object, place: str, field: str, otherwise: str = "") -> int:
    """Returns seconds as ns, rounded to the nearest. Raises TraceError unless they are from 0 to MAX_SECONDS.
    otherwise: what else may stand there, for the message."""
    number: Any = decimal(value.strip()) if isinstance(value, str) else value
    if not _may_be_seconds(number) or (ns := float(number * 1e9)) > MAX_NS:
        raise refuse(place, field, value, f"a number of seconds from 0 to {MAX_SECONDS:,}{otherwise}")
    return round(ns)


def instant(text: str, place: str, field: str) -> tuple[int, bool]:
    """Returns (ns since the year 1, whether the text has an offset), exactly. Naive instants count as UTC."""
    match = _INSTANT.fullmatch(text.strip())
    if match is None:
        raise refuse(place, field, text, _ANY_INSTANT)
    whole, fraction, offset = match.groups()
    try:
        since = datetime.fromisoformat(f"{whole}{offset or 'Z'}") - _YEAR_1
    except ValueError:
        raise refuse(place, field, text, _ANY_INSTANT) from None
    return (since.days * 86400 + since.seconds) * 10**9 + int((fraction or "0").ljust(9, "0")), offset is not None


def arrival(value: object, place: str, field: str) -> tuple[int, str]:
    """Returns ns, and the clock that they are of: "" is the run's, whose 0 is the start; others are told in words.

    A text that begins with a date, and Arrow's timestamp, is an instant (ISO 8601). A number that is a time from 2010
    to 2100, in seconds or milliseconds since 1970, is that. Any other number is seconds of the run.
    """
    if isinstance(value, datetime):
        value = value.isoformat()
    if isinstance(value, str) and _DATE.match(value):
        ns, has_offset = instant(value, place, field)
        return ns, "instants with an offset" if has_offset else NO_OFFSET
    number: Any = decimal(value.strip()) if isinstance(value, str) else value
    if isinstance(number, int | float):
        for clock, unit_ns in _UNITS.items():
            low, high = (end * 10**9 // unit_ns for end in _EPOCH)
            if low <= number < high:
                return round(number * unit_ns), clock
    return seconds(value, place, field, ", or an instant (ISO 8601, or s or ms since 1970)"), ""


def nanoseconds(value: object, place: str, field: str) -> int:
    return whole_number(value, place, field, 0, MAX_NS, _NANOSECONDS)


def token_ids(value: object, place: str, field: str) -> array[int]:
    """Returns token ids from a list or its text ("[1, 2]" or "1 2"). Raises TraceError if empty or not all are ids."""
    expected = f"a list of at least one token id, each from 0 to {MAX_TOKEN_ID}"
    items: Any = value
    if isinstance(value, str):
        try:
            items = json.loads(value) if value.lstrip().startswith("[") else _numbers(value)
        except (ValueError, RecursionError):
            raise refuse(place, field, value, expected) from None
    if not isinstance(items, list | tuple | array) or len(items) == 0:
        raise refuse(place, field, value, expected)
    for position, item in enumerate(items):
        if type(item) is not int or not 0 <= item <= MAX_TOKEN_ID:
            raise refuse(place, f"{field}[{position}]", item, f"a token id from 0 to {MAX_TOKEN_ID}")
    return array("i", items)


def _numbers(text: str) -> list[int]:
    if not is_plain(text):
        raise ValueError("digits of another script, or an underscore")
    return [int(word) for word in text.split()]


def name_text(value: object, place: str, field: str) -> str:
    """Returns a non-empty name; of a whole number its text. Raises TraceError otherwise."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise refuse(place, field, value, "a name that is not empty")
    return value


class _TwiceError(ValueError):
    """A JSON object has a name twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _TwiceError(next(name for name, num in Counter(name for name, _ in pairs).items() if num > 1))
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_once)


def json_object(line: str, place: str) -> dict[str, Any]:
    """Returns the object on one line of JSONL. Raises TraceError on anything else, and on a name that occurs twice."""
    found = json_value(line, place)
    if not isinstance(found, dict):
        raise TraceError(f"{place}: found a JSON {type(found).__name__}; expected one object on each line")
    return found


def json_value(line: str, place: str) -> Any:
    """Like json_object, but also returns a value of another kind."""
    try:
        found = _DECODER.decode(line)
    except _TwiceError as error:
        raise TraceError(f"{place}: field {error.args[0]!r} occurs twice; expected each name once") from None
    except (ValueError, RecursionError) as error:
        is_python = line.lstrip().startswith("{'")  # what str() makes of a dict
        expected = "double quotes, as json.dumps writes" if is_python else "one whole object on each line"
        raise TraceError(f"{place}: not JSON: {json_reason(error)}; expected {expected}") from None
    if "\\u" in line:
        refuse_half_characters(found, place)
    return found


def refuse_half_characters(value: object, place: str) -> None:
    """Raises TraceError if a text within a JSON value has half of a surrogate pair, which cannot be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 20) : error.start].rpartition('"')[2]
        half = f"{ord(error.object[error.start]):04x}"
        raise TraceError(f"{place}: half a character, \\u{half}, after {near!r}; expected whole ones") from None
    except RecursionError:
        raise TraceError(f"{place}: not JSON: nested too deeply; expected values nested a few levels deep") from None


def json_reason(error: ValueError | RecursionError) -> str:
    """Returns why json.loads rejected a text, in a few words."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


def present(fields: dict[str, Any], field: str, place: str) -> Any:
    """Returns the value of a required field. Raises TraceError if it is missing."""
    if field not in fields:
        raise TraceError(f"{place}: field {field!r} is missing; found {listed(fields) or 'nothing'}")
    return fields[field]


def listed(names: Iterable[str]) -> str:
    """Returns the names of fields or columns as one text, cut: a file of another kind has many."""
    text = ", ".join(islice(names, 100))
    return text if len(text) <= 120 else text[:117] + "..."


def is_plain(text: str) -> bool:
    """Whether a number's text has no digits of other scripts and no underscores, which Python would accept."""
    return text.isascii() and "_" not in text


def header_hint(names: Sequence[str]) -> str:
    """Returns what a CSV file lacks whose first line has no names of columns; "" if it may have."""
    is_row = any(decimal(name) is not None for name in names)
    return "; the first line has values: put the columns' names before it" if is_row else ""


def decimal(text: str) -> float | None:
    """Returns the number of a text, also infinity and NaN; None if the text is not a number."""
    try:
        return float(text) if is_plain(text) else None
    except ValueError:
        return None
