"""Tables of one's own: a CSV with a row for each measured point, and columns as in OPERATOR_COLUMNS.

Needed are `operator`, the sizes that it has (SIZES), and the time as `time_ns`, `time_us` or `time_ms`. `dtype` and
`kv_dtype` are bfloat16 if they are left out, or empty; `kernel`, `engine`, `source` and `licence` may be left out too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from experiments.tables.columns import UNIT_NS, rows_of
from experiments.tables.csv_table import CsvTable
from testbed.errors import ProfileError
from testbed.specs.model import KV_DTYPE_BYTES
from testbed.specs.operator_tables import OPERATOR_COLUMNS, OPERATORS, OperatorTables, check_rows

_TIMES = tuple(f"time_{unit}" for unit in UNIT_NS)


def read(file: Path, device: str) -> OperatorTables:
    """Reads the CSV. device: that was measured. Raises ProfileError with file, line, column and value."""
    table = CsvTable(file, ("operator",))
    named = [name for name in _TIMES if table.has(name)]
    if len(named) != 1:
        raise ProfileError(f"{file} has {' and '.join(named) or 'no time'}; expected one of {', '.join(_TIMES)}")
    operators = table.texts("operator")
    table.refuse_where(~np.isin(operators, OPERATORS), "operator", f"one of {', '.join(OPERATORS)}")
    default = {"kernel": "own", "dtype": "bfloat16", "engine": "own", "source": file.name, "licence": "own"}
    columns: dict[str, Any] = {**default, "operator": operators, "time_ns": table.times(named[0], named[0][5:])}
    has_attention = np.char.startswith(operators.astype(str), "attention")
    columns["kv_dtype"] = pa.array(np.where(has_attention, "bfloat16", ""), mask=~has_attention)
    for name, kind in OPERATOR_COLUMNS.items():
        if name in ("operator", "time_ns") or not table.has(name):
            continue
        if kind == "string":
            texts = table.texts(name)
            if name.endswith("dtype"):
                table.refuse_where(~np.isin(texts, ("", *KV_DTYPE_BYTES)), name, f"one of {', '.join(KV_DTYPE_BYTES)}")
            given = pa.array(texts, mask=texts == "")
            columns[name] = pc.coalesce(given, columns[name])
        else:
            sizes = table.numbers(name, may_be_empty=True)
            is_empty = np.isnan(sizes)
            is_whole = (sizes == np.floor(sizes)) & (np.abs(sizes) <= 2**53)
            table.refuse_where(~is_empty & ~is_whole, name, "a whole number, up to 2^53")
            columns[name] = pa.array(np.nan_to_num(sizes).astype(np.int64), mask=is_empty)
    rows = rows_of(table.num_rows, **columns)
    check_rows(rows, str(file))
    return OperatorTables(device, device, rows)
