"""Frozen traces: one Parquet file with every row exactly, in order, and the trace's name, notes and fingerprint.

The file is read back row by row on any machine, without random numbers, and checked against its fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from testbed.errors import TraceError
from testbed.output import whole_file
from testbed.traces.fingerprint import Fingerprint
from testbed.traces.readers.open_parquet import parquet_records, parquet_schema
from testbed.traces.readers.own_rows import row_from_fields
from testbed.traces.schema import TraceRequest, TraceSource
from testbed.traces.serialize import row_to_json
from testbed.traces.stream import StreamedTrace

LOST = "the file was a frozen trace; its metadata is gone, so it was not checked against its fingerprint"
_METADATA = b"testbed.trace"
_BATCH_ROWS = 4096
_COLUMNS = {  # the columns of a frozen file: the exact fields of the testbed's schema, and token counts for readers
    "request_id": "string", "arrival_ns": "int64", "think_ns": "int64", "prompt_tokens": "int64",
    "output_tokens": "int64", "prompt_parts": "string", "output_part": "string", "priority": "int32",
    "tenant": "string", "session_id": "string", "turn": "int32", "cancel_after_ns": "int64", "deadline_ns": "int64",
    "cache_salt": "string", "max_tokens": "int64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FrozenInfo:
    """The metadata of a frozen file."""

    name: str
    notes: tuple[str, ...]
    num_requests: int
    fingerprint: str
    closed_tail: bool = False


def freeze_trace(
    trace: TraceSource, path: str | Path, watch: Callable[[Iterator[TraceRequest]], Iterator[TraceRequest]] = iter
) -> FrozenInfo:
    """Writes `trace` to a Parquet file, row by row, whole or not at all. Iterates over it twice, as the fingerprint is
    written first.

    watch: wraps the iteration over the rows, for a progress bar. Raises OSError if the file cannot be written.
    """
    import pyarrow as pa  # heavy, and seldom needed
    import pyarrow.parquet as pq

    num = 0
    digest = Fingerprint()
    for row in watch(iter(trace)):
        digest.update(row)
        num += 1
    info = FrozenInfo(trace.name, trace.notes, num, digest.hexdigest(), trace.closed_tail)
    schema = pa.schema([(name, getattr(pa, kind)()) for name, kind in _COLUMNS.items()])
    schema = schema.with_metadata({_METADATA: json.dumps(asdict(info)).encode()})
    with whole_file(Path(path)) as part, pq.ParquetWriter(part, schema, compression="zstd") as writer:
        rows = watch(iter(trace))
        while batch := list(islice(rows, _BATCH_ROWS)):
            records = [_record(row) for row in batch]
            writer.write_table(pa.Table.from_pylist(records, schema=schema))
    return info


def frozen_info(path: str | Path) -> FrozenInfo | None:
    """Returns the metadata of a frozen file; None if the Parquet file is not frozen. Raises TraceError if it is not
    Parquet, or the metadata is damaged."""
    metadata = parquet_schema(path).metadata or {}
    if _METADATA not in metadata:
        return None
    try:
        said = json.loads(metadata[_METADATA])
        info = FrozenInfo(**{**said, "notes": (*said["notes"],) if isinstance(said["notes"], list) else (None,)})
    except (ValueError, KeyError, TypeError, RecursionError):
        info = None
    if info is None or not _is_sound(info):
        raise TraceError(f"{path}: its metadata is damaged; freeze the trace again")
    return info


def _is_sound(info: FrozenInfo) -> bool:
    """Whether all metadata have the right type."""
    return (
        all(isinstance(text, str) for text in (info.name, info.fingerprint, *info.notes))
        and type(info.num_requests) is int
        and info.num_requests >= 1
        and isinstance(info.closed_tail, bool)
    )


def has_lost_metadata(path: str | Path) -> bool:
    """Whether a Parquet file without metadata has the columns of a frozen file: another program wrote it again."""
    return set(parquet_schema(path).names) == set(_COLUMNS)


def stream_frozen(path: str | Path, info: FrozenInfo, limit: int | None = None) -> StreamedTrace:
    """Returns the rows of a frozen file as a stream. Iterating to the end checks the fingerprint (TraceError).

    A limit that leaves rows out makes the check impossible; a note of the trace states that.
    """
    is_whole = limit is None or limit >= info.num_requests

    def make() -> Iterator[TraceRequest]:
        digest = Fingerprint()
        num, latest_ns = 0, 0
        for place, fields in islice(parquet_records(path), limit):
            row = row_from_fields(fields, place)
            if row.arrival_ns < latest_ns:
                raise TraceError(
                    f"{row.place}: the row arrives before the one before it, as no frozen trace has it: "
                    "the file was changed; freeze the trace again"
                )
            latest_ns = row.arrival_ns
            digest.update(row)
            num += 1
            yield row
        if is_whole or num < (limit or 0):
            _check(path, info, digest.hexdigest(), num)

    num_requests = info.num_requests if is_whole else limit
    notes = info.notes
    if not is_whole:
        notes += (f"the first {limit} of {info.num_requests} frozen requests, not checked against their fingerprint",)
    return StreamedTrace(info.name, make, notes, num_requests, closed_tail=info.closed_tail)


def _check(path: str | Path, info: FrozenInfo, found: str, num: int) -> None:
    if found != info.fingerprint or num != info.num_requests:
        raise TraceError(
            f"{path}: {num} requests with fingerprint {found}, but {info.num_requests} with {info.fingerprint} were "
            "frozen: the file was changed; freeze the trace again"
        )


def _record(row: TraceRequest) -> dict[str, Any]:
    fields = row_to_json(row, exact_parts=True)
    for name in ("prompt_parts", "output_part"):
        if name in fields:
            fields[name] = json.dumps(fields[name], separators=(",", ":"))
    return fields
