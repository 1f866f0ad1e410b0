"""Reads a trace file as lines of text: plain, .gz or .zst. Owns the errors of files, encodings and compression."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from testbed.errors import TraceError

COMPRESSIONS = (".gz", ".zst")
_LINES_TOLD = 2000
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
    return Path(file.stem).suffix.lower() if file.suffix.lower() in COMPRESSIONS else file.suffix.lower()


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, line without its line end), except blank lines. Accepts any line end, and removes a
    byte-order mark.

    Raises TraceError if the file is absent or is not UTF-8, and DamagedError if its compression is damaged.
    """
    file = existing_file(path)
    numbers = [0]
    watch = _watcher.get()
    with _failures(path, file, numbers), open_text(file) as stream:
        for line in stream:
            numbers[0] += 1
            if numbers[0] % _LINES_TOLD == 0 and watch is not None:
                watch(_LINES_TOLD)
            if line.strip():
                yield numbers[0], line.rstrip("\r\n")


def read_pieces(path: str | Path, num_characters: int = 1 << 20) -> Iterator[str]:
    """Yields the text of a file in pieces, for files whose lines may be very long. Raises the errors of read_lines."""
    file = existing_file(path)
    numbers = [0]
    watch = _watcher.get()
    with _failures(path, file, numbers), open_text(file) as stream:
        while piece := stream.read(num_characters):
            num_lines = piece.count("\n")
            numbers[0] += num_lines
            if watch is not None:
                watch(num_lines)
            yield piece


@contextmanager
def _failures(path: str | Path, file: Path, numbers: list[int]) -> Iterator[None]:
    """Within this context, a file that cannot be read raises TraceError. numbers[0]: lines that were read so far."""
    try:
        yield
    except UnicodeDecodeError as error:
        bad = _undecodable_line(file) or numbers[0] + 1
        raise TraceError(f"{path}:{bad}: not UTF-8 text ({error.reason}); expected a text file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DamagedError(f"{path}:{numbers[0] + 1}: damaged compressed file: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "zstandard":
            raise
        raise DamagedError(f"{path}:{numbers[0] + 1}: damaged compressed file: {error}") from None


def _undecodable_line(file: Path) -> int | None:
    """Returns the number of the first line that is not UTF-8: the failed stream had decoded ahead of its lines."""
    with open_text(file, errors="surrogateescape") as stream:
        numbered = enumerate(stream, 1)
        return next((number for number, line in numbered if any("\udc80" <= c <= "\udcff" for c in line)), None)


def open_text(file: Path, errors: str = "strict") -> TextIO:
    """Opens a file as text, decompressed by its extension. errors: for bytes that are not UTF-8, as in `open`."""
    suffix = file.suffix.lower()
    if suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8-sig", errors=errors)
    if suffix == ".zst":
        return io.TextIOWrapper(io.BufferedReader(ZstdFile(file)), encoding="utf-8-sig", errors=errors)
    return file.open("rt", encoding="utf-8-sig", errors=errors)


class ZstdFile(io.RawIOBase):
    """Decompresses a .zst file, frame after frame. A file that ends within a frame raises EOFError, as gzip does."""

    def __init__(self, file: Path) -> None:
        import zstandard  # heavy, and seldom needed

        self._packed = file.open("rb")
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._rest = b""
        self._unpacked = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            packed = self._rest or self._packed.read(1 << 17)
            if not packed:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return 0
            if self._frame is None:
                self._frame = self._new_frame()
            self._unpacked = self._frame.decompress(packed)
            self._rest = b""
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._unpacked))
        buffer[:size] = self._unpacked[:size]
        self._unpacked = self._unpacked[size:]
        return size

    def close(self) -> None:
        self._packed.close()
        super().close()


def read_csv(
    path: str | Path, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> Iterator[tuple[str, list[str | None]]]:
    """Yields (place, cells) of each row: those of `required`, then of `optional` (None: no such column, or empty).

    Columns are found by the header's names. Raises TraceError on a missing or repeated column, a row with more or fewer
    cells than the header, or quotes that do not end.
    """
    numbers = [0]
    reader = csv.reader(_numbered(path, numbers), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if not header:
            raise TraceError(f"{path}: the file is empty; expected a header and rows")
        _check_once([name for name in header if name], path)
        missing = [name for name in required if name not in header]
        if missing:
            raise TraceError(
                f"{path}:1: column {missing[0]!r} is missing; expected {', '.join(required)}, found {', '.join(header)}"
            )
        picks = [header.index(name) for name in required]
        extras = [header.index(name) if name in header else None for name in optional]
        width = len(header)
        for cells in reader:
            place = f"{path}:{numbers[0]}"
            if len(cells) != width:
                raise TraceError(f"{place}: {len(cells)} cells; expected {width}, as in the header")
            chosen: list[str | None] = [cells[pick] for pick in picks]
            chosen += [None if pick is None else cells[pick].strip() or None for pick in extras]
            yield place, chosen
    except csv.Error as error:
        raise TraceError(f"{path}:{numbers[0]}: not CSV: {error}") from None


def csv_header(path: str | Path) -> tuple[str, ...]:
    """Returns the names of a CSV file's columns. Raises TraceError if a name occurs twice."""
    names = tuple(name.strip() for name in next(csv.reader(_numbered(path, [0])), []))
    _check_once(names, path)
    return names


def _check_once(names: Sequence[str], path: str | Path) -> None:
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise TraceError(f"{path}:1: column {twice[0]!r} occurs twice; expected each name once")


def _numbered(path: str | Path, numbers: list[int]) -> Iterator[str]:
    """Yields the lines of `path`, and sets numbers[0] to the number of each."""
    for number, line in read_lines(path):
        numbers[0] = number
        yield line
