"""Reads a Parquet file as records. Owns what is absent in one, and what is said of a file that is none."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testbed.errors import TraceError
from testbed.traces.readers.open_text import Record, existing_file


def parquet_records(path: str | Path) -> Iterator[Record]:
    """Yields the records of a file; their places are row numbers from 1."""
    import pyarrow.parquet as pq  # heavy, and seldom needed

    existing_file(path)
    number = 0
    with arrow_errors_named(path), pq.ParquetFile(path) as file:
        if twice := [name for name, num in Counter(file.schema_arrow.names).items() if num > 1]:
            raise TraceError(f"{path}: has the column {twice[0]!r} more than once; leave one")
        for batch in file.iter_batches(batch_size=4096):
            for record in batch.to_pylist():
                number += 1
                fields = {name: value for name, value in record.items() if not _is_null(name, value)}
                yield f"{path}:{number}", fields


def parquet_schema(path: str | Path) -> Any:
    """Returns a file's pyarrow.Schema: the names of its columns, and its metadata."""
    import pyarrow.parquet as pq  # heavy, and seldom needed

    existing_file(path)
    with arrow_errors_named(path):
        return pq.read_schema(path)


@contextmanager
def arrow_errors_named(path: str | Path) -> Iterator[None]:
    """Context in which what Arrow cannot read is a TraceError that names the file."""
    import pyarrow as pa  # heavy, and seldom needed

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's, not Arrow's for a damaged page or footer
        if Path(path).suffix.lower() in (".gz", ".zst"):
            raise TraceError(f"{path}: not a Parquet file, which is compressed inside; unpack it first") from None
        said = str(error).splitlines()[0].rstrip(": ")
        raise TraceError(f"{path}: not a whole Parquet file: {said}") from None


def _is_null(name: str, value: object) -> bool:
    """Whether a Parquet value is absent. pandas writes a missing number as NaN; as an arrival_time, NaN is an error."""
    return value is None or (isinstance(value, float) and math.isnan(value) and name != "arrival_time")
