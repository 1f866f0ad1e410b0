"""Exact conversion of columns to and from pandas: null instants stay null, token lists stay flat Arrow arrays.

Owns only the conversions. Instants are int64 ns in the files and frames; `numbers` makes them float64 ns with NaN for
null, which is exact below 2**53 ns (104 days). pandas is slow to import, so it is imported only when a frame is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from analysis.reading.rows import FloatArray

if TYPE_CHECKING:
    import pandas as pd

NULLABLE = frozenset(
    {"turn", "queued_ns", "first_scheduled_ns", "first_token_ns", "finish_ns", "first_sent_ns", "last_sent_ns"}
)


def as_frame(data: Any) -> pd.DataFrame:
    """A frame from a pandas frame (returned unchanged) or an Arrow table (lists stay Arrow, nullable ints are ints)."""
    import pandas as pd

    if isinstance(data, pd.DataFrame):
        return data
    if not isinstance(data, pa.Table):
        raise TypeError(f"records are a pandas DataFrame or a pyarrow Table, not {type(data).__name__}")
    frame: pd.DataFrame = data.to_pandas(
        types_mapper=lambda kind: pd.ArrowDtype(kind) if pa.types.is_nested(kind) else None
    )
    whole = {pa.int64(): pd.Int64Dtype()}
    for name in sorted(NULLABLE & set(frame.columns)):
        frame[name] = data.column(name).cast(pa.int64()).to_pandas(types_mapper=whole.get)
    return frame


def numbers(frame: pd.DataFrame, name: str) -> FloatArray:
    """One numeric column as float64 `[num_rows]`, NaN for null."""
    return frame[name].to_numpy(dtype="float64", na_value=np.nan)


def json_safe(value: Any) -> Any:
    """`value` converted to JSON types: numpy scalars become Python's, NaN and infinities None, and -0.0 becomes 0.0. A
    frame becomes a list of its rows, and a NamedTuple an object."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if hasattr(value, "to_dict"):
        value = value.to_dict("records")
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
