"""Arrow from Python and numpy, and back, without pandas.

pyarrow's own conversions (`pa.array`, `pa.scalar`, a Python value in a comparison, `to_numpy`, `read_table`) import
pandas where it is installed: 0.25 s and 170 MB. Lists of instants they convert element by element.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa


class CodedTexts:
    """A column of few different strings. codes: [num_rows], indices into `texts`, which may contain None."""

    def __init__(self, codes: Any, texts: tuple[str | None, ...]) -> None:
        self.codes, self.texts = codes, texts


def as_arrow(column: Any, kind: Any) -> Any:
    """Returns a column, of Python values (None: null) or a numpy array, as an Arrow array of type `kind`. A list of
    int64 is given as a buffer. Raises OverflowError if a number does not fit."""
    if kind == pa.string():
        return _coded(column) if isinstance(column, CodedTexts) else _strings(column)
    if kind == pa.list_(pa.int64()):
        lists = [b"" if one is None else one for one in column]
        child = _array(kind.value_type, sum(map(len, lists)), None, b"".join(lists))
        return _array(kind, len(lists), _known(column), _offsets(lists), children=[child])
    if kind == pa.bool_():
        return _array(kind, len(column), _known(column), np.packbits(np.array(column, bool), bitorder="little"))
    dtype = kind.to_pandas_dtype()
    if not isinstance(column, np.ndarray):
        known = _known(column)
        values = column if known is None else [0 if value is None else value for value in column]
        return _array(kind, len(column), known, np.array(values, dtype=dtype))
    numbers = np.ascontiguousarray(column, dtype=dtype)
    if numbers.dtype != column.dtype and (numbers != column).any():
        raise OverflowError(f"a number does not fit into {kind}")
    return _array(kind, len(column), None, numbers)


def constant(value: Any, kind: Any) -> Any:
    """Returns one value as an Arrow scalar, to compare a column with."""
    return as_arrow([value], kind)[0]


def numbers_of(column: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns a column of numbers, none of them null, as floats."""
    return np.concatenate([np.from_dlpack(chunk).astype(np.float64) for chunk in column.chunks] or [np.zeros(0)])


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
    """Returns which values are not None, as bits; None if all are."""
    if None not in column:
        return None
    return np.packbits([value is not None for value in column], bitorder="little")


def _array(kind: Any, num_rows: int, *buffers: Any, children: Any = None) -> Any:
    made = [None if buffer is None else pa.py_buffer(buffer) for buffer in buffers]
    return pa.Array.from_buffers(kind, num_rows, made, children=children)
