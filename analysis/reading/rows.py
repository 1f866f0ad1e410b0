"""Reads records as columns, in batches, in the same way from a pandas frame, an Arrow table or a Parquet file.

Owns reading and the exact conversion to numpy (Arrow buffers are used directly; null is never mixed up with a number).
Does not know what the rows are used for. Only the requested columns are read, and memory is limited to one batch or one
column. pandas is not imported for files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from analysis.reading.files import one_line
from testbed.errors import RunFolderError

if TYPE_CHECKING:
    import pandas as pd

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

BATCH_ROWS = 8192  # of the first row groups of steps.parquet
_LOW_BITS = 20


def as_rows(data: Any) -> Rows:
    """Rows of a pandas frame or Arrow table; rows are returned unchanged. Raises TypeError for anything else."""
    if isinstance(data, Rows):
        return data
    if not isinstance(data, pa.Table) and not hasattr(data, "columns"):
        raise TypeError(f"records are a pandas DataFrame or a pyarrow Table, not {type(data).__name__}")
    return MemoryRows(data)


class MemoryRows:
    """Rows of a frame or table that is in memory. batch_rows: the most rows in one batch; None: all.

    Columns come as Arrow arrays; `whole`, `numbers` and `Codes` make numpy arrays of them.
    """

    def __init__(self, data: pd.DataFrame | pa.Table, batch_rows: int | None = None) -> None:
        self.num_rows = len(data)
        self.names = frozenset(data.column_names if isinstance(data, pa.Table) else data.columns)
        self._data, self._batch_rows = data, batch_rows

    def batches(self, names: Sequence[str], num_rows: int | None = None) -> Iterator[list[Any]]:
        """The columns `names` in batches of at most `num_rows` rows, in row order. None: the default size."""
        arrays = [self._column(name) for name in names]
        size = min(self._batch_rows or self.num_rows or 1, num_rows or self.num_rows or 1)
        for low in range(0, self.num_rows, size):
            yield [array.slice(low, size) for array in arrays]

    def by_time(self) -> MemoryRows:
        """The same rows sorted by `start_ns`; ties keep their order."""
        order = np.argsort(whole(self._column("start_ns")), kind="stable")
        return MemoryRows(self._data.take(order), self._batch_rows)

    def parts(self, num_rows: int) -> Iterator[MemoryRows]:
        """The rows in consecutive parts of at most `num_rows`."""
        for low in range(0, self.num_rows, num_rows):
            yield MemoryRows(self._data[low : low + num_rows], self._batch_rows)

    def _column(self, name: str) -> Any:
        kind = pa.list_(pa.int64()) if name == "token_ns" else None
        if isinstance(self._data, pa.Table):
            column = self._data.column(name)
        else:
            column = pa.array(self._data[name], type=kind, from_pandas=True)
        return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


class FileRows:
    """Rows of a Parquet file, read on demand. Raises RunFolderError if the file cannot be read.

    strings: the string columns that may be requested; they are read as dictionaries. `by_time` relies on the file
    having the steps of each replica in order of time, as the recorder writes them.
    """

    def __init__(self, file: Path, strings: Sequence[str] = (), batch_rows: int = BATCH_ROWS) -> None:
        self._file, self._batch_rows = file, batch_rows
        with naming(file):
            self._source = pq.ParquetFile(
                file, read_dictionary=list(strings), pre_buffer=False, page_checksum_verification=True
            )
            self.num_rows = int(self._source.metadata.num_rows)
            self.names = frozenset(self._source.schema_arrow.names)
        self._groups = range(self._source.num_row_groups)

    def batches(self, names: Sequence[str], num_rows: int | None = None) -> Iterator[list[Any]]:
        size = min(self._batch_rows, num_rows or self._batch_rows)
        with naming(self._file):
            for batch in self._source.iter_batches(size, self._groups, columns=list(names), use_threads=False):
                yield [batch.column(name) for name in names]

    def by_time(self) -> FileRows:
        return self

    def parts(self, num_rows: int) -> Iterator[FileRows]:
        """The rows in consecutive parts made of whole row groups, each but the last of at least `num_rows`."""
        part, low = copy(self), self._groups.start
        part.num_rows = 0
        for group in self._groups:
            part.num_rows += self._source.metadata.row_group(group).num_rows
            if part.num_rows >= num_rows or group == self._groups[-1]:
                part._groups = range(low, group + 1)
                yield part
                part, low = copy(self), group + 1
                part.num_rows = 0


Rows = MemoryRows | FileRows


def read_table(file: Path, columns: Iterable[str] | None = None) -> pa.Table:
    """Those of `columns` that the file has; None: all. Raises RunFolderError if it cannot be read, or is damaged."""
    with naming(file):
        source = pq.ParquetFile(file, page_checksum_verification=True)
        return source.read(None if columns is None else list(columns))


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Turns an error while reading `file` into a RunFolderError that names the file."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:  # Arrow's errors derive from these
        raise RunFolderError(f"{file}: cannot be read as Parquet ({one_line(error)}); make the run again") from error


# --- conversion of one Arrow array to numpy ---


def is_known(array: Any) -> BoolArray:
    """Which values of an Arrow array are not null `[num_rows]`. (Arrow's `is_valid` imports `pyarrow.compute`.)"""
    if array.null_count in (0, len(array)):
        return np.full(len(array), array.null_count == 0)
    bits = np.frombuffer(array.buffers()[0], dtype=np.uint8)
    return np.unpackbits(bits, count=array.offset + len(array), bitorder="little")[array.offset :].astype(np.bool_)


def _raw(array: Any) -> NDArray[Any]:
    """The numbers in the buffer of an Arrow array; the value at a null is undefined."""
    if array.null_count == len(array):
        return np.zeros(len(array), dtype=np.int64)
    values = np.frombuffer(array.buffers()[1], dtype=array.type.to_pandas_dtype())
    return values[array.offset : array.offset + len(array)]


def numbers(array: Any) -> FloatArray:
    """float64 `[num_rows]`, NaN for null."""
    values = _raw(array).astype(np.float64)
    if array.null_count:
        values[~is_known(array)] = np.nan
    return values


def whole(array: Any, missing: int = 0) -> IntArray:
    """int64 `[num_rows]`, exact; `missing` for null. Raises ValueError for a fraction."""
    raw = _raw(array)
    known = is_known(array) if array.null_count else None
    if raw.dtype.kind == "f":
        raw = raw if known is None else np.where(known, raw, 0.0)
        if (raw != np.rint(raw)).any():
            raise ValueError("a column of whole numbers has a fraction")
    values = raw.astype(np.int64, copy=False)
    return values if known is None else np.where(known, values, missing)


class Codes:
    """A column of strings as numbers: `codes`, int32 `[num_rows]`, index `labels`. Null has the label `missing`."""

    def __init__(self, arrays: Iterable[Any], missing: str) -> None:
        encoded = [array if pa.types.is_dictionary(array.type) else array.dictionary_encode() for array in arrays]
        column = pa.chunked_array(encoded, type=encoded[0].type if encoded else pa.dictionary(pa.int32(), pa.string()))
        column = column.unify_dictionaries().combine_chunks()
        labels = column.dictionary.to_pylist()
        self.labels = [*labels, *([missing] if column.null_count and missing not in labels else [])]
        null = self.labels.index(missing) if column.null_count else 0
        self.codes = whole(column.indices, null).astype(np.int32)

    def among(self, texts: Sequence[str]) -> BoolArray:
        return np.isin(self.codes, [number for number, label in enumerate(self.labels) if label in texts])

    def texts(self) -> NDArray[np.object_]:
        return np.array([*self.labels, None], dtype=object)[self.codes]


def exact_sum(values: IntArray) -> int:
    """The exact sum of non-negative values, as a Python int: the sum of many instants in ns may exceed 64 bits."""
    return (int((values >> _LOW_BITS).sum()) << _LOW_BITS) + int((values & ((1 << _LOW_BITS) - 1)).sum())


def product_sum(first: IntArray, second: IntArray) -> int:
    """The exact sum(first * second), as a Python int: counts times ns may exceed 64 bits. `second` is not negative."""
    high, low = second >> _LOW_BITS, second & ((1 << _LOW_BITS) - 1)
    return (int((first * high).sum()) << _LOW_BITS) + int((first * low).sum())
