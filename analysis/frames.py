"""Columns in and out of pandas, exactly: null instants stay null, token lists stay flat Arrow arrays.

Owns nothing but conversions. Instants are int64 ns in the files; here they become float64 ns with NaN for null, which
is exact below 2**53 ns (104 days). Lists of token instants never become Python lists: they are (flat values, offsets).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_INT64 = {pa.int64(): pd.Int64Dtype()}
NULLABLE = frozenset({"turn", "queued_ns", "first_scheduled_ns", "first_token_ns", "finish_ns"})


def as_frame(data: Any) -> pd.DataFrame:
    """A frame from a pandas frame (returned as it is) or an Arrow table (lists stay Arrow, nullable ints stay ints)."""
    if isinstance(data, pd.DataFrame):
        return data
    if not isinstance(data, pa.Table):
        raise TypeError(f"records are a pandas DataFrame or a pyarrow Table, not {type(data).__name__}")
    frame: pd.DataFrame = data.to_pandas(types_mapper=_list_dtype)
    for name in sorted(NULLABLE & set(frame.columns)):
        frame[name] = data.column(name).cast(pa.int64()).to_pandas(types_mapper=_INT64.get)
    return frame


def _list_dtype(kind: Any) -> Any:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return pd.ArrowDtype(kind) if is_list else None


def numbers(frame: pd.DataFrame, name: str) -> FloatArray:
    """One numeric column as float64 `[num_rows]`, NaN for null."""
    plain = frame[name]
    if isinstance(plain.dtype, np.dtype) and plain.dtype.kind in "iuf":
        return plain.to_numpy(dtype="float64")
    column = pd.to_numeric(plain).astype("Float64")
    return np.asarray(column.to_numpy(dtype="float64", na_value=np.nan), dtype=np.float64)


def whole(frame: pd.DataFrame, name: str, missing: int | None = None) -> IntArray:
    """One column of whole numbers as int64 `[num_rows]`, exactly; `missing` for null, which raises where it is None."""
    column = frame[name]
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "iu":
        return column.to_numpy(dtype=np.int64)
    nullable = pd.to_numeric(column).astype("Int64")
    if missing is None and nullable.isna().any():
        raise ValueError(f"column {name} has nulls")
    return np.asarray(nullable.to_numpy(dtype=np.int64, na_value=missing or 0), dtype=np.int64)


def texts(frame: pd.DataFrame, name: str, missing: str = "") -> NDArray[np.object_]:
    """One string column as an object array `[num_rows]`, `missing` for null."""
    column = frame[name].astype(object)
    return np.asarray(column.where(column.notna(), missing), dtype=object)


def token_lists(requests: pd.DataFrame) -> tuple[FloatArray, IntArray] | None:
    """Every token's instant: (flat ns `[num_tokens]`, offsets `[num_requests + 1]`); None where none was recorded."""
    if "token_ns" not in requests.columns or requests["token_ns"].isna().all():
        return None
    lists = pa.array(requests["token_ns"], type=pa.list_(pa.int64()), from_pandas=True)
    if isinstance(lists, pa.ChunkedArray):
        lists = lists.combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    flat = np.asarray(lists.flatten().to_numpy(zero_copy_only=False), dtype=np.float64)
    return flat, offsets


def json_safe(value: Any) -> Any:
    """`value` with only JSON's types: numpy scalars become Python's, NaN and infinities None, -0.0 becomes 0.0."""
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [json_safe(item) for item in value]
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value) + 0.0 if np.isfinite(value) else None
    return value if value is None or isinstance(value, str) else str(value)
