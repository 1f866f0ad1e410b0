"""Parquet files that grow by groups of rows, written by Arrow in a thread; columns of Python's values as Arrow arrays.

Knows columns, and nothing of what they say. Imported where a run is recorded: the core runs without Arrow. Arrays are
made by way of buffers: pyarrow's own conversion imports pandas where there is one, which takes longer than a short run,
and goes through lists of instants one by one.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_TYPES = {"list<int64>": pa.list_(pa.int64()), "double": pa.float64()}


def schema_of(columns: dict[str, str]) -> Any:
    """Arrow's, of columns by their names and types."""
    return pa.schema([(name, _TYPES.get(kind) or pa.type_for_alias(kind)) for name, kind in columns.items()])


class ParquetFile:
    """A file that exists, complete, once closed. columns: names and types. worker: one thread, which writes.

    What could not be written raises OSError with the file's name, by a later group and again when it is closed.
    """

    def __init__(self, path: Path, columns: dict[str, str], worker: ThreadPoolExecutor) -> None:
        self._schema = schema_of(columns)
        texts = [name for name, kind in columns.items() if kind == "string"]  # instants rarely come twice
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd", use_dictionary=texts)
        self._path = path
        self._worker = worker
        self._group: Future[None] | None = None  # the last one

    def write(self, columns: list[Any]) -> None:
        """One group of rows, by column. Waits until the one before is written, and until the thread has begun: a
        compiled loop hardly ever lets another thread have Python's lock, and Arrow needs it only to begin and to end.
        """
        self._wait()
        arrays = [as_arrow(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        has_begun: Future[None] = Future()
        group = pa.record_batch(arrays, schema=self._schema)
        try:
            self._group = self._worker.submit(self._write, group, has_begun)
        except RuntimeError:  # the interpreter ends, and with it all threads: a vLLM of a script closes as late as that
            self._write(group, has_begun)
        has_begun.result()

    def close(self) -> None:
        self._wait()
        try:
            self._writer.close()
        except OSError as error:
            raise self._failed(error) from None

    def _wait(self) -> None:
        """Until the last group is written. Raises what went wrong with it, each time."""
        if self._group is not None:
            self._group.result()

    def _write(self, group: pa.RecordBatch, has_begun: Future[None]) -> None:
        has_begun.set_result(None)
        try:
            self._writer.write_batch(group)
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> OSError:
        """The file is given up: pyarrow, asked to close it again, would say something else."""
        self._writer.is_open = False
        return OSError(error.errno, error.strerror or str(error), str(self._path))


class CodedTexts:
    """A column of few different texts. codes: [num_rows], indices into `texts`, which may hold None."""

    def __init__(self, codes: Any, texts: tuple[str | None, ...]) -> None:
        self.codes, self.texts = codes, texts


def columns_of(data: bytes, columns: dict[str, str], texts: tuple[str | None, ...]) -> list[Any]:
    """The columns, as numpy arrays, of rows of int64; a string is its code in `texts`. A last row that was cut
    short is left out."""
    num_rows = len(data) // (8 * len(columns))
    rows = np.frombuffer(data, np.int64, num_rows * len(columns)).reshape(num_rows, len(columns))
    kinds = zip(columns.values(), rows.T, strict=True)
    return [
        CodedTexts(column, texts) if kind == "string" else column.view(np.uint64) if kind == "uint64" else column
        for kind, column in kinds
    ]


def as_arrow(column: Any, kind: Any) -> Any:
    """A column of Python's values, None for null, or a numpy array, as an Arrow array of type `kind`. A list of int64
    is a buffer of them. OverflowError if a number does not fit."""
    if kind == pa.string():
        return _coded(column) if isinstance(column, CodedTexts) else _strings(column)
    if kind == pa.list_(pa.int64()):
        lists = [b"" if one is None else one for one in column]
        child = _array(kind.value_type, sum(map(len, lists)), None, b"".join(lists))
        return _array(kind, len(lists), _known(column), _offsets(lists), children=[child])
    dtype = kind.to_pandas_dtype()
    if not isinstance(column, np.ndarray):
        known = _known(column)
        values = column if known is None else [0 if value is None else value for value in column]
        return _array(kind, len(column), known, np.array(values, dtype=dtype))
    numbers = np.ascontiguousarray(column, dtype=dtype)
    if numbers.dtype != column.dtype and (numbers != column).any():
        raise OverflowError(f"a number does not fit into {kind}")
    return _array(kind, len(column), None, numbers)


def _coded(column: CodedTexts) -> Any:
    codes = column.codes
    texts = [b"" if text is None else text.encode() for text in column.texts]
    offsets = np.append(0, np.cumsum(np.array([len(text) for text in texts])[codes])).astype(np.int32)
    is_known = np.array([text is not None for text in column.texts])[codes]
    known = None if is_known.all() else np.packbits(is_known, bitorder="little")
    data = b"".join([texts[code] for code in codes[is_known].tolist()])
    return _array(pa.string(), len(codes), known, offsets, data)


def _strings(column: Any) -> Any:
    texts = [b"" if text is None else text.encode() for text in column]
    return _array(pa.string(), len(texts), _known(column), _offsets(texts), b"".join(texts))


def _offsets(items: Any) -> Any:
    lengths = np.fromiter(map(len, items), np.int64, len(items))
    return np.append(0, np.cumsum(lengths)).astype(np.int32)


def _known(column: Any) -> Any:
    """Which are not None, as bits; None: all."""
    if None not in column:
        return None
    return np.packbits([value is not None for value in column], bitorder="little")


def _array(kind: Any, num_rows: int, *buffers: Any, children: Any = None) -> Any:
    made = [None if buffer is None else pa.py_buffer(buffer) for buffer in buffers]
    return pa.Array.from_buffers(kind, num_rows, made, children=children)
