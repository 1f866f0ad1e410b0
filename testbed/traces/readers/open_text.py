"""Reads a trace file as lines of text: plain, .gz or .zst. Owns the errors of files, encodings and compression."""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO, cast

from testbed.errors import TraceError
from testbed.traces.readers.fields import header_hint, json_object, listed

UNREADABLE = (OSError, EOFError, zlib.error)  # what a file raises that cannot be read
_LINES_TOLD = 2000
Record = tuple[str, dict[str, Any]]  # (place, the fields that are present)
_watcher: ContextVar[Callable[[int], object] | None] = ContextVar("watcher", default=None)


class DamagedError(TraceError):
    """A compressed file is damaged or truncated; the lines before that place were read."""


@contextmanager
def watching(told: Callable[[int], object]) -> Iterator[None]:
    """Within this context, `told` is called with the number of further lines that were read, for a progress bar."""
    token = _watcher.set(told)
    try:
        yield
    finally:
        _watcher.reset(token)


def existing_file(path: str | Path, wanted: str = "a trace file") -> Path:
    """Returns `path` as a Path. Raises TraceError if it is not a plain file: a device or a pipe cannot be read twice.
    wanted: what to give, for the message."""
    file = Path(path)
    if file.is_file():
        return file
    if file.is_dir():
        raise TraceError(f"{path}: is a folder; expected a file")
    what = "is no plain file" if file.exists() else "does not exist"
    raise TraceError(f"{path}: {what}; expected the path of {wanted}")


def format_suffix(path: str | Path) -> str:
    """Returns the extension of the format, without that of a compression: '.jsonl' of 'a.jsonl.gz'."""
    file = Path(path)
    return Path(file.stem).suffix.lower() if file.suffix.lower() in (".gz", ".zst") else file.suffix.lower()


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, line without its line end), except blank lines. Accepts any line end, and removes a
    byte-order mark.

    Raises TraceError if the file is absent or is not UTF-8, and DamagedError if its compression is damaged.
    """
    watch = _watcher.get()
    with _reading(path) as (stream, numbers):
        for line in stream:
            numbers[0] += 1
            if numbers[0] % _LINES_TOLD == 0 and watch is not None:
                watch(_LINES_TOLD)
            if line.strip():
                yield numbers[0], line.rstrip("\r\n")


def read_objects(path: str | Path) -> Iterator[Record]:
    """Yields the JSON object on each line; their places have line numbers. Raises TraceError for any other line."""
    for number, line in read_lines(path):
        place = f"{path}:{number}"
        yield place, json_object(line, place)


def read_pieces(path: str | Path, num_characters: int = 1 << 20) -> Iterator[str]:
    """Yields the text of a file in pieces, for files whose lines may be very long. Raises the errors of read_lines."""
    watch = _watcher.get()
    with _reading(path) as (stream, numbers):
        while piece := stream.read(num_characters):
            num_lines = piece.count("\n")
            numbers[0] += num_lines
            if watch is not None:
                watch(num_lines)
            yield piece


@contextmanager
def _reading(path: str | Path) -> Iterator[tuple[TextIO, list[int]]]:
    """Opens a file, and yields it with a list whose only item the reader sets to the number of lines that it has read.
    Within this context, a file that cannot be read raises TraceError."""
    file, numbers = existing_file(path), [0]
    try:
        with open_text(file) as stream:
            yield stream, numbers
    except UnicodeDecodeError as error:
        bad = _undecodable_line(file)
        raise TraceError(f"{path}:{bad}: not UTF-8 text ({error.reason}); expected a text file") from None
    except UNREADABLE as error:
        raise unreadable(path, error, f":{numbers[0] + 1}") from None


def unreadable(path: str | Path, error: Exception, place: str = "") -> TraceError:
    """Returns the error for a file that raised one of UNREADABLE. place: of what is damaged, if its compression is."""
    if isinstance(error, OSError) and error.errno is not None:  # the system's, not the decompressor's
        return TraceError(f"{path}: cannot be read: {error.strerror}")
    return DamagedError(f"{path}{place}: damaged compressed file: {error}")


def _undecodable_line(file: Path) -> int:
    """Returns the number of the first line that is not UTF-8: the failed stream had decoded ahead of its lines."""
    with open_text(file, errors="surrogateescape") as stream:
        numbered = enumerate(stream, 1)
        return next(number for number, line in numbered if any("\udc80" <= c <= "\udcff" for c in line))


def open_text(file: Path, errors: str = "strict") -> TextIO:
    """Opens a file as text, decompressed by its extension. errors: for bytes that are not UTF-8, as in `open`."""
    return io.TextIOWrapper(open_bytes(file), encoding="utf-8-sig", errors=errors)


def open_bytes(file: Path, mode: Literal["rb", "wb"] = "rb") -> BinaryIO:
    """Opens a file, compressed by its extension. Reading a damaged or truncated one raises one of UNREADABLE."""
    suffix = file.suffix.lower()
    if suffix in (".gz", ".tgz"):
        return cast(BinaryIO, gzip.open(file, mode))
    if suffix == ".zst":
        import pyarrow as pa  # heavy, and seldom needed

        return cast(BinaryIO, (pa.input_stream if mode == "rb" else pa.output_stream)(str(file), compression="zstd"))
    return file.open(mode)


def read_csv(path: str | Path, columns: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yields (place, cells) of each row: those of `columns`, which are found by the header's names.

    Raises TraceError on a missing or repeated column, a row with more or fewer cells than the header, or quotes that do
    not end.
    """
    numbers = [0]
    reader = csv.reader(_numbered(path, numbers), strict=True, delimiter=_separator(path))
    try:
        header = [name.strip() for name in next(reader, [])]
        if not header:
            raise TraceError(f"{path}: the file is empty; expected a header and rows")
        if twice := [name for name, num in Counter(header).items() if name and num > 1]:
            hint = header_hint(header)
            raise TraceError(f"{path}:1: column {twice[0]!r} occurs twice; expected each name once{hint}")
        place_of = {name: place for place, name in enumerate(header)}
        if missing := [name for name in columns if name not in place_of]:
            raise TraceError(
                f"{path}:1: column {missing[0]!r} is missing; expected {', '.join(columns)}, found "
                f"{listed(header)}{header_hint(header)}"
            )
        picks = [place_of[name] for name in columns]
        width = len(header)
        for cells in reader:
            place = f"{path}:{numbers[0]}"
            if len(cells) != width:
                hint = header_hint(header)
                raise TraceError(f"{place}: {len(cells)} cells; expected {width}, as in the header{hint}")
            yield place, [cells[pick] for pick in picks]
    except csv.Error as error:
        raise TraceError(f"{path}:{numbers[0]}: not CSV: {error}") from None


def csv_header(path: str | Path) -> tuple[str, ...]:
    """Returns the names of a CSV file's columns, which `read_csv` checks."""
    return tuple(name.strip() for name in next(csv.reader(_numbered(path, [0]), delimiter=_separator(path)), []))


def _separator(path: str | Path) -> str:
    """Returns what separates the columns' names: in a line without a comma it may be another character."""
    first = re.sub('"[^"]*"', "", next(_numbered(path, [0]), ""))  # a name in quotes may have any
    return next((one for one in ";\t|" if one in first and "," not in first), ",")


def _numbered(path: str | Path, numbers: list[int]) -> Iterator[str]:
    """Yields the lines of `path`, and sets numbers[0] to the number of each."""
    for number, line in read_lines(path):
        numbers[0] = number
        yield line
