"""Readers of trace files, one module a format. `read_x(path, limit=None, ...) -> Trace`; bad rows raise TraceError."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed.errors import TraceError
from testbed.traces.readers.azure import read_azure
from testbed.traces.readers.bailian import read_bailian
from testbed.traces.readers.burstgpt import read_burstgpt
from testbed.traces.readers.mooncake import read_mooncake
from testbed.traces.readers.own import read_csv_trace, read_jsonl, read_own, read_parquet
from testbed.traces.readers.sharegpt import read_sharegpt
from testbed.traces.schema import Trace

READERS: dict[str, Callable[..., Trace]] = {
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "mooncake": read_mooncake,
    "bailian": read_bailian,
    "sharegpt": read_sharegpt,
    "jsonl": read_jsonl,
    "csv": read_csv_trace,
    "parquet": read_parquet,
}


def read_trace(format_name: str, path: str | Path, limit: int | None = None, **options: Any) -> Trace:
    """Reads `path` as one of READERS, or as "auto": our own schema, by extension. Raises TraceError if unknown."""
    if limit is not None and limit < 1:
        raise TraceError(f"trace.limit is {limit}; it must be at least 1, or absent")
    reader = read_own if format_name == "auto" else READERS.get(format_name)
    if reader is None:
        raise TraceError(f"unknown trace format {format_name!r}; choose one of {', '.join(READERS)}")
    return reader(path, limit, **options)


__all__ = [
    "READERS",
    "read_azure",
    "read_bailian",
    "read_burstgpt",
    "read_csv_trace",
    "read_jsonl",
    "read_mooncake",
    "read_own",
    "read_parquet",
    "read_sharegpt",
    "read_trace",
]
