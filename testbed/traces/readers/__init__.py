"""Readers of trace files, one module for each format. Each returns a StreamedTrace; bad rows raise TraceError when they
are read. `read_trace` returns the whole trace, `open_trace` what suits its size.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from testbed.errors import TraceError
from testbed.foreign_text import nearest
from testbed.traces.readers.agentic import stream_agentic
from testbed.traces.readers.azure import stream_azure
from testbed.traces.readers.bailian import stream_bailian
from testbed.traces.readers.burstgpt import stream_burstgpt
from testbed.traces.readers.lengths_csv import stream_lengths
from testbed.traces.readers.mooncake import stream_mooncake
from testbed.traces.readers.open_text import csv_header, existing_file, format_suffix, read_objects
from testbed.traces.readers.own import own_format, stream_csv, stream_jsonl, stream_parquet
from testbed.traces.readers.own_rows import foreign_format
from testbed.traces.readers.servegen import stream_servegen
from testbed.traces.readers.sharegpt import stream_sharegpt
from testbed.traces.schema import Trace, TraceSource
from testbed.traces.stream import OutOfOrderError, StreamedTrace, whole

READERS: dict[str, Callable[..., TraceSource]] = {
    "azure": stream_azure,
    "burstgpt": stream_burstgpt,
    "mooncake": stream_mooncake,
    "bailian": stream_bailian,
    "sharegpt": stream_sharegpt,
    "servegen": stream_servegen,
    "lengths": stream_lengths,
    "agentic": stream_agentic,
    "jsonl": stream_jsonl,
    "csv": stream_csv,
    "parquet": stream_parquet,
}
_MADE_IN_ORDER = ("servegen", "sharegpt", "agentic")  # the reader brings rows into order: no file is out of order
_SAMPLED = ("servegen", "lengths", "agentic")  # what the file does not have is drawn by a seed
MAX_WHOLE_BYTES = 32 << 20  # of a file: a larger file is read row by row if possible
MAX_WHOLE_ROWS = 100_000  # with a limit of up to this many rows, a file is read whole


def read_trace(format_name: str, path: str | Path, limit: int | None = None, **options: Any) -> Trace:
    """Reads `path` in a format of READERS, or "auto": a recognised format, else the testbed's schema by extension.

    Raises TraceError if the format is unknown.
    """
    return whole(open_trace(format_name, path, limit, stream=False, **options))


def recognise(path: str | Path) -> str | None:
    """Returns the format of a CSV or JSONL file by the names in its first line; None if it is the testbed's own schema,
    or unknown."""
    names: Iterable[str] = ()
    if existing_file(path) and format_suffix(path) == ".csv":
        names = csv_header(path)
    elif format_suffix(path) in (".jsonl", ".ndjson"):
        _, names = next(read_objects(path), ("", ()))
    return foreign_format(names)


def open_trace(
    format_name: str,
    path: str | Path,
    limit: int | None = None,
    stream: bool | None = None,
    seed: int = 0,
    **options: Any,
) -> TraceSource:
    """Like read_trace, but row by row if that is wanted and possible. seed: of formats that sample.

    stream: True: if the format allows it; False: never; None: for large files. A streamed file is read once in advance,
    for its order and number of rows. If it is out of order, OutOfOrderError is raised with stream=True; otherwise the
    file is read whole and sorted.
    """
    if limit is not None and limit < 1:
        raise TraceError(f"trace.limit is {limit}; it must be at least 1, or absent")
    if format_name == "auto":
        format_name = recognise(path) or own_format(path)
    elif format_name not in READERS:
        near = nearest(format_name, list(READERS))
        raise TraceError(f"unknown trace format {format_name!r}; {near}choose one of {', '.join(READERS)}, auto")
    if format_name in _SAMPLED:
        options["seed"] = seed
    source = READERS[format_name](path, limit, **options)
    if stream is False or (stream is None and not _is_large(format_name, path, limit)):
        return whole(source)
    is_known = format_name in _MADE_IN_ORDER or source.num_requests is not None
    if is_known or not isinstance(source, StreamedTrace):
        return source
    try:
        num_requests = sum(1 for _ in source)
    except OutOfOrderError as error:
        if stream:
            raise OutOfOrderError(f"{error}; set trace.stream=false: the file is then read whole and sorted") from None
        return whole(source)
    notes = source.notes if source.counted is None else tuple(source.counted())
    return replace(source.derived(lambda: iter(source), None, num_requests), notes=notes)


def _is_large(format_name: str, path: str | Path, limit: int | None) -> bool:
    if limit is not None and limit <= MAX_WHOLE_ROWS:
        return False
    if format_name == "servegen":
        return True
    if Path(path).is_dir() and format_name == "agentic":
        return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file()) > MAX_WHOLE_BYTES
    return existing_file(path).stat().st_size > MAX_WHOLE_BYTES
