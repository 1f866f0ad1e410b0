"""Conversion of a source's data to rows of the schema. Imports no pandas, as a run may read tables."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from testbed.arrow import constant
from testbed.errors import ProfileError
from testbed.foreign_text import shown
from testbed.specs.operator_tables import OPERATOR_COLUMNS

LEAST_NS, MOST_NS = 100.0, 1e12  # no kernel is as short as 0.1 us, none as long as 1,000 s
UNIT_NS = {"ms": 1e6, "us": 1e3, "ns": 1.0}


def rows_of(num_rows: int, **columns: Any) -> pa.Table:
    """A table with OPERATOR_COLUMNS. columns: arrays, or one value for all rows; a column that is not given is null."""
    arrays = []
    for name, kind in OPERATOR_COLUMNS.items():
        of_type, given = pa.type_for_alias(kind), columns.pop(name, None)
        if given is None:
            arrays.append(pa.nulls(num_rows, of_type))
        elif isinstance(given, str | int | float):
            arrays.append(pa.repeat(constant(given, of_type), num_rows))
        else:
            array = given if isinstance(given, pa.Array | pa.ChunkedArray) else pa.array(given)
            arrays.append(array.cast(of_type))
    assert not columns, f"no such columns: {', '.join(columns)}"
    return pa.table(arrays, names=list(OPERATOR_COLUMNS))


def latencies_ns(latencies: Any, place: str) -> Any:
    """Latencies in ms converted to ns. Raises ProfileError that names the row if a time is impossible for a kernel."""
    kind = pa.float64()
    values = pc.multiply(latencies.cast(kind), constant(UNIT_NS["ms"], kind))
    fits = pc.and_(pc.greater_equal(values, constant(LEAST_NS, kind)), pc.less_equal(values, constant(MOST_NS, kind)))
    row = pc.index(pc.and_kleene(values.is_valid(), fits), constant(False, pa.bool_())).as_py()  # no NaN fits
    if row >= 0:
        value = latencies[row].as_py()
        text = "null" if value is None else shown(value)
        raise ProfileError(f"{place}, row {row}: latency is {text}; expected {time_span('ms')}")
    return values


def time_span(unit: str) -> str:
    """Returns the times that a kernel can take, in words."""
    return f"{unit}, from {LEAST_NS / UNIT_NS[unit]:g} to {MOST_NS / UNIT_NS[unit]:g}"


def reason(error: Exception) -> str:
    """The first line of a library's error message, with unprintable characters escaped."""
    return plain((str(error).splitlines() or [type(error).__name__])[0], 160)


def plain(text: str, length: int = 40) -> str:
    """The start of a text, with unprintable characters escaped."""
    escaped = repr(text)[1:-1]
    return escaped if len(escaped) <= length else escaped[: length - 1] + "…"
