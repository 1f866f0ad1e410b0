"""The Azure LLM inference traces of 2023 and 2024 (Azure/AzurePublicDataset; Splitwise, ISCA 2024; DynamoLLM, 2025).

CSV `TIMESTAMP,ContextTokens,GeneratedTokens`; a timestamp is naive with 7 fractional digits (2023) or has an offset
(2024). There is no content: every request is independent and has its own tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from itertools import islice
from pathlib import Path

from testbed.errors import TraceError
from testbed.traces.arrange import arrange
from testbed.traces.readers.fields import refuse, token_count
from testbed.traces.readers.open_text import read_csv
from testbed.traces.schema import MAX_NS, Span, Trace, TraceRequest
from testbed.traces.stream import StreamedTrace
from testbed.traces.synthesis import numbered_keys

_INSTANT = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:(Z)|([+-])(\d\d):?(\d\d))?", re.ASCII
)
_Row = tuple[int, int, int, str]
_key_of = numbered_keys("azure")
_EXPECTED = "an instant as 2023-11-16 18:15:46.6805900, with or without an offset as +00:00 (up to 23:59)"


def read_azure(path: str | Path, limit: int | None = None) -> Trace:
    """Reads a 2023 or 2024 file (plain, .gz, .zst), at most its first `limit` rows; the first request arrives at 0.

    Raises TraceError, with file and line, on a malformed row, a missing column, or a file that mixes instants with and
    without offset.
    """
    rows = list(_rows(path, limit))
    if not rows:
        raise no_rows(path)
    start_ns = min(row[0] for row in rows)
    last = max(rows, key=lambda row: row[0])
    if last[0] - start_ns > MAX_NS:
        raise _too_late(path, last[3])
    return arrange("azure", (_request(i, row, start_ns) for i, row in enumerate(rows)))


def stream_azure(path: str | Path, limit: int | None = None) -> StreamedTrace:
    """Like read_azure, row by row; iterating raises OutOfOrderError if the file is out of order."""

    def make() -> Iterator[TraceRequest]:
        start_ns: int | None = None
        for i, row in enumerate(_rows(path, limit)):
            start_ns = row[0] if start_ns is None else start_ns
            if row[0] - start_ns > MAX_NS:
                raise _too_late(path, row[3])
            yield _request(i, row, start_ns)
        if start_ns is None:
            raise no_rows(path)

    return StreamedTrace("azure", make)


def no_rows(path: str | Path) -> TraceError:
    return TraceError(f"{path}: no requests; expected at least one row after the header")


def _too_late(path: str | Path, place: str) -> TraceError:
    """Returns the error for a row more than MAX_NS after the first; reads its timestamp again for the message."""
    stamp = next(cells[0] for where, cells in read_csv(path, ("TIMESTAMP",)) if where == place)
    return refuse(place, "TIMESTAMP", stamp, f"an instant at most {MAX_NS // 10**9:,} s after the first")


def _rows(path: str | Path, limit: int | None) -> Iterator[_Row]:
    """Yields (instant in ns, prompt tokens, output tokens, place) of each row, in the file's order."""
    has_offset: bool | None = None
    days: dict[str, int] = {}  # text of a date -> seconds since the year 1
    for place, (stamp, context, generated) in islice(
        read_csv(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")), limit
    ):
        quick = _quick_instant(stamp, days) if stamp is not None else None
        instant_ns, offset = quick or parse_instant(stamp or "", place, "TIMESTAMP")
        if has_offset is None:
            has_offset = offset
        elif has_offset != offset:
            raise refuse(place, "TIMESTAMP", stamp, "an offset in all rows or in none")
        num_prompt = token_count(context, place, "ContextTokens")
        yield instant_ns, num_prompt, token_count(generated, place, "GeneratedTokens"), place


def _quick_instant(text: str, days: dict[str, int]) -> tuple[int, bool] | None:
    """Returns what parse_instant returns for the format of nearly all rows; None for others. days: a cache of dates."""
    day, digits = text[:11], text[11:13] + text[14:16] + text[17:19] + text[20:]
    if not (text[13:20:3] == "::." and digits.isdigit() and digits.isascii() and len(digits) <= 15):
        return None
    days_s = days.get(day)
    if days_s is None:
        match = _INSTANT.fullmatch(day + "00:00:00")
        if match is None:
            return None
        try:
            days_s = days[day] = date(*(int(part) for part in match.groups()[:3])).toordinal() * 86400
        except ValueError:
            return None
    number = int(digits.ljust(15, "0"))
    clock, fraction = divmod(number, 10**9)
    hour, minute, second = clock // 10000, clock // 100 % 100, clock % 100
    if hour > 23 or minute > 59 or second > 60 or len(digits) < 7:
        return None
    return (days_s + hour * 3600 + minute * 60 + second) * 10**9 + fraction, False


def _request(i: int, row: _Row, start_ns: int) -> TraceRequest:
    instant_ns, num_prompt, num_output, place = row
    key = _key_of(i)
    return TraceRequest(
        request_id=f"azure-{i}",
        arrival_ns=instant_ns - start_ns,
        prompt=(Span(key, 0, num_prompt),),
        output=Span(key, num_prompt, num_output),
        place=place,
    )


def parse_instant(text: str, place: str, field: str) -> tuple[int, bool]:
    """Returns (ns since the year 1, whether the text has an offset), exactly. Naive instants count as UTC."""
    match = _INSTANT.fullmatch(text.strip())
    if match is None:
        raise refuse(place, field, text, _EXPECTED)
    year, month, day, hour, minute, second, fraction, zulu, sign, offset_hours, offset_minutes = match.groups()
    try:
        days = date(int(year), int(month), int(day)).toordinal()
    except ValueError:
        raise refuse(place, field, text, _EXPECTED) from None
    is_offset = not sign or (int(offset_hours) <= 23 and int(offset_minutes) <= 59)
    if int(hour) > 23 or int(minute) > 59 or int(second) > 60 or not is_offset:  # 60: a leap second
        raise refuse(place, field, text, _EXPECTED)
    total_s = ((days * 24 + int(hour)) * 60 + int(minute)) * 60 + int(second)
    if sign:
        offset_s = (int(offset_hours) * 60 + int(offset_minutes)) * 60
        total_s -= offset_s if sign == "+" else -offset_s
    return total_s * 10**9 + int((fraction or "0").ljust(9, "0")), bool(sign or zulu)
