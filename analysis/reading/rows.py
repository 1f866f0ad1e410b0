"""Records as numpy columns, batch by batch: from a pandas frame, an Arrow table or a Parquet file alike.

Owns the reading and exact conversions (an Arrow buffer is an array; null is apart from every number), not what is done
with the rows. Never all columns of a file at once: memory is that of a batch, or of the one column that is asked for.
pandas is not imported for files.
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

BATCH_ROWS = 8192  # as many as a recorder writes in one group
_LOW_BITS = 20


def as_rows(data: Any) -> Rows:
    """Rows from a pandas frame, an Arrow table, or rows themselves. TypeError for anything else."""
    if isinstance(data, Rows):
        return data
    if not isinstance(data, pa.Table) and not hasattr(data, "columns"):
        raise TypeError(f"records are a pandas DataFrame or a pyarrow Table, not {type(data).__name__}")
    return MemoryRows(data)


class MemoryRows:
    """Rows of a frame or table that is in memory. batch_rows: at most so many at once, None: all.

    Columns come as Arrow arrays; `whole`, `numbers` and `Codes` make numpy arrays of them.
    """

    def __init__(self, data: pd.DataFrame | pa.Table, batch_rows: int | None = None) -> None:
        self.num_rows = len(data)
        self.names = frozenset(data.column_names if isinstance(data, pa.Table) else data.columns)
        self._data, self._batch_rows = data, batch_rows

    def batches(self, names: Sequence[str], num_rows: int | None = None) -> Iterator[list[Any]]:
        """The columns `names` of the next rows, at most `num_rows` (None: as many as are good), in their order."""
        arrays = [self._column(name) for name in names]
        size = min(self._batch_rows or self.num_rows or 1, num_rows or self.num_rows or 1)
        for low in range(0, self.num_rows, size):
            yield [array.slice(low, size) for array in arrays]

    def by_time(self) -> MemoryRows:
        """The same rows by `start_ns`, ties in their order."""
        order = np.argsort(whole(self._column("start_ns")), kind="stable")
        return MemoryRows(self._data.take(order), self._batch_rows)

    def parts(self, num_rows: int) -> Iterator[MemoryRows]:
        """The rows in parts of about `num_rows`, in their order."""
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
    """The same of a Parquet file, read as they are asked for. RunFolderError for one that cannot be read.

    strings: columns of strings that may be asked for. The steps of each replica lie in the order of time there, as the
    recorder writes them, which `by_time` counts on.
    """

    def __init__(self, file: Path, strings: Sequence[str] = (), batch_rows: int = BATCH_ROWS) -> None:
        self._file, self._batch_rows = file, batch_rows
        with naming(file):
            self._source = pq.ParquetFile(file, read_dictionary=list(strings), pre_buffer=False)
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
        """Of whole row groups."""
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


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Says of what goes wrong in reading a file which one it was. Raises RunFolderError."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:  # Arrow's own are such
        raise RunFolderError(f"{file}: cannot be read as Parquet ({one_line(error)}); make the run again") from error


# --- one Arrow array into numpy ---


def is_known(array: Any) -> BoolArray:
    """Which values of an Arrow array are not null `[num_rows]`. (Arrow's `is_valid` imports its compute.)"""
    if pa.types.is_dictionary(array.type):
        array = array.indices
    if array.null_count in (0, len(array)):
        return np.full(len(array), array.null_count == 0)
    bits = np.frombuffer(array.buffers()[0], dtype=np.uint8)
    return np.unpackbits(bits, count=array.offset + len(array), bitorder="little")[array.offset :].astype(np.bool_)


def _raw(array: Any) -> NDArray[Any]:
    """The numbers of an Arrow array as they lie there, anything where they are null."""
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
    """int64 `[num_rows]`, exactly; `missing` for null. ValueError for a fraction."""
    raw = _raw(array)
    known = is_known(array) if array.null_count else None
    if raw.dtype.kind == "f":
        raw = raw if known is None else np.where(known, raw, 0.0)
        if (raw != np.rint(raw)).any():
            raise ValueError("a column of whole numbers has a fraction")
    values = raw.astype(np.int64, copy=False)
    return values if known is None else np.where(known, values, missing)


class Codes:
    """A column of strings as numbers: `codes` int32 `[num_rows]`, whose texts are `labels`; `missing` for null."""

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
    """sum(values), none of them negative, exact: many instants in ns may exceed 64 bits."""
    return (int((values >> _LOW_BITS).sum()) << _LOW_BITS) + int((values & ((1 << _LOW_BITS) - 1)).sum())


def product_sum(first: IntArray, second: IntArray) -> int:
    """sum(first * second), exact: counts times ns may exceed 64 bits. The second one is not negative."""
    high, low = second >> _LOW_BITS, second & ((1 << _LOW_BITS) - 1)
    return (int((first * high).sum()) << _LOW_BITS) + int((first * low).sum())
