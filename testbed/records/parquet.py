"""Parquet files that grow by groups of rows, written by Arrow in a thread.

Knows columns, but not their meaning. Imported only where a run is recorded: the core runs without Arrow.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from testbed.arrow import CodedTexts, as_arrow

SMALL_GROUPS = 64
_TYPES = {"list<int64>": pa.list_(pa.int64()), "double": pa.float64()}


def schema_of(columns: dict[str, str]) -> Any:
    """Returns the Arrow schema of columns, given by name and type."""
    return pa.schema([(name, _TYPES.get(kind) or pa.type_for_alias(kind)) for name, kind in columns.items()])


class _Writer(pq.ParquetWriter):
    """A writer that is given up without its `close`, which could fail again and print that: after an error."""

    def __del__(self) -> None:
        pass


class ParquetFile:
    """A Parquet file, complete once it is closed. columns: names and types. worker: one thread, which writes.

    A failed write raises OSError with the file's name, at a later group and again at `close`.
    """

    def __init__(self, path: Path, columns: dict[str, str], worker: ThreadPoolExecutor) -> None:
        self._schema = schema_of(columns)
        texts = [name for name, kind in columns.items() if kind == "string"]  # instants rarely repeat
        self._writer = _Writer(path, self._schema, compression="zstd", use_dictionary=texts, write_page_checksum=True)
        self._path = path
        self._worker = worker
        self._num_groups = 0  # that were given
        self._group: Future[None] | None = None  # the last group's write

    def write(self, columns: list[Any]) -> int:
        """Writes one group of rows, given by column. Waits until the previous group is written and the thread has begun
        this one: a compiled loop hardly ever releases Python's lock, and Arrow needs it only at the start and the end.

        Returns by what the size of a group is to be multiplied from now on: 8 after SMALL_GROUPS, because the metadata
        of each stays in memory to the end.
        """
        self._wait()
        self._num_groups += 1
        arrays = [as_arrow(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        has_begun: Future[None] = Future()
        group = pa.record_batch(arrays, schema=self._schema)
        try:
            self._group = self._worker.submit(self._write, group, has_begun)
        except RuntimeError:  # the interpreter ends, without threads: vLLM in a script may close this late
            self._write(group, has_begun)
        has_begun.result()
        return 8 if self._num_groups == SMALL_GROUPS else 1

    def close(self) -> None:
        self._wait()
        try:
            self._writer.close()
        except OSError as error:
            raise self._failed(error) from None

    def _wait(self) -> None:
        """Waits until the last group is written. If that failed, raises its error at every call."""
        if self._group is not None:
            self._group.result()

    def _write(self, group: pa.RecordBatch, has_begun: Future[None]) -> None:
        has_begun.set_result(None)
        try:
            self._writer.write_batch(group)
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> OSError:
        """Returns the error with the file's name."""
        return OSError(error.errno, error.strerror or str(error), str(self._path))


def columns_of(data: bytes, columns: dict[str, str], texts: tuple[str | None, ...]) -> list[Any]:
    """Returns the columns of rows of int64, as numpy arrays; a string is its index in `texts`. An incomplete last row
    is left out."""
    num_rows = len(data) // (8 * len(columns))
    rows = np.frombuffer(data, np.int64, num_rows * len(columns)).reshape(num_rows, len(columns))
    kinds = zip(columns.values(), rows.T, strict=True)
    return [
        CodedTexts(column, texts) if kind == "string" else column.view(np.uint64) if kind == "uint64" else column
        for kind, column in kinds
    ]
