"""Conversion of a source's data to rows of the schema, and reading of CSVs with errors that name the bad value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from testbed.errors import ProfileError, TraceError
from testbed.foreign_text import shown
from testbed.specs.operator_tables import OPERATOR_COLUMNS
from testbed.traces.readers.open_text import csv_header, read_csv

LEAST_NS, MOST_NS = 100.0, 1e12  # no kernel is as short as 0.1 us, none as long as 1,000 s
_UNIT_NS = {"ms": 1e6, "us": 1e3, "ns": 1.0}


def rows_of(num_rows: int, **columns: Any) -> pa.Table:
    """A table with OPERATOR_COLUMNS. columns: arrays, or one value for all rows; a column that is not given is null."""
    arrays = []
    for name, kind in OPERATOR_COLUMNS.items():
        of_type, given = pa.type_for_alias(kind), columns.pop(name, None)
        if given is None:
            arrays.append(pa.nulls(num_rows, of_type))
        elif isinstance(given, str | int | float):
            arrays.append(pa.repeat(pa.scalar(given, of_type), num_rows))
        else:
            array = given if isinstance(given, pa.Array | pa.ChunkedArray) else pa.array(given)
            arrays.append(array.cast(of_type))
    assert not columns, f"no such columns: {', '.join(columns)}"
    return pa.table(arrays, names=list(OPERATOR_COLUMNS))


def latencies_ns(latencies: Any, place: str) -> Any:
    """Latencies in ms converted to ns. Raises ProfileError that names the row if a time is impossible for a kernel."""
    values = pc.multiply(latencies.cast(pa.float64()), _UNIT_NS["ms"]).fill_null(float("nan"))
    fits = pc.and_(pc.greater_equal(values, LEAST_NS), pc.less_equal(values, MOST_NS))  # false for NaN
    row = pc.index(fits, False).as_py()
    if row >= 0:
        value = latencies[row].as_py()
        text = "null" if value is None else shown(value)
        raise ProfileError(f"{place}, row {row}: latency is {text}; expected {_span('ms')}")
    return values


def _span(unit: str) -> str:
    return f"{unit}, from {LEAST_NS / _UNIT_NS[unit]:g} to {MOST_NS / _UNIT_NS[unit]:g}"


class CsvTable:
    """The columns of a CSV, converted on demand. Errors are ProfileErrors that name file, line, column and value."""

    def __init__(self, path: Path, needed: Sequence[str]) -> None:
        """needed: columns that must be in the file."""
        self.path = path
        if not path.is_file():
            raise ProfileError(f"no file at {path}; docs/tables.md says what each source has")
        self._table = _read(path)
        missing = [name for name in needed if name not in self._table]
        if missing:
            names = ", ".join(map(_plain, self._table.columns[:30]))
            raise ProfileError(f"{path} lacks the column {missing[0]!r}; it has {names}")
        self.num_rows = len(self._table)
        if not self.num_rows:
            raise ProfileError(f"{path} has no rows")

    def has(self, name: str) -> bool:
        return name in self._table

    def texts(self, name: str) -> np.ndarray[Any, Any]:
        """A column as strings; "" for empty cells."""
        return self._table[name].fillna("").to_numpy(str)

    def numbers(self, name: str, *, may_be_empty: bool = False) -> np.ndarray[Any, Any]:
        """A column as floats; NaN for empty cells, which raise an error unless `may_be_empty`."""
        column = self._table[name]
        is_bad = pd.to_numeric(column, errors="coerce").isna() & (not may_be_empty or column.notna())
        self.refuse_where(is_bad.to_numpy(), name, "a number")
        array = column.to_numpy(np.float64)
        self.refuse_where(np.isinf(array), name, "a finite number")
        return array

    def counts(self, name: str, least: int = 1) -> np.ndarray[Any, Any]:
        values = self.numbers(name)
        is_bad = (values != np.floor(values)) | (values < least) | (values > 2**53)
        self.refuse_where(is_bad, name, f"a whole number, at least {least}")
        return values.astype(np.int64)

    def times(self, name: str, unit: str, *, may_be_empty: bool = False) -> np.ndarray[Any, Any]:
        """A column of times in ns; NaN for empty cells, which raise an error unless `may_be_empty`."""
        values: np.ndarray[Any, Any] = self.numbers(name, may_be_empty=may_be_empty) * _UNIT_NS[unit]
        with np.errstate(invalid="ignore"):
            self.refuse_where((values < LEAST_NS) | (values > MOST_NS), name, _span(unit))
        return values

    def refuse_where(self, is_bad: np.ndarray[Any, Any], name: str, expected: str) -> None:
        """Raises ProfileError for the first bad row of a column, if there is one."""
        if is_bad.any():
            row = int(is_bad.argmax())  # its line in the file is row + 2, after the header
            value = self._table[name].iloc[row]
            text = "empty" if pd.isna(value) else shown(value)
            raise ProfileError(f"{self.path}, line {row + 2}: {name} is {text}; expected {expected}")


def reason(error: Exception) -> str:
    """The first line of a library's error message, with unprintable characters escaped."""
    return _plain((str(error).splitlines() or [type(error).__name__])[0], 160)


def _plain(text: str, length: int = 40) -> str:
    escaped = repr(text)[1:-1]
    return escaped if len(escaped) <= length else escaped[: length - 1] + "…"


def _read(path: Path) -> pd.DataFrame:
    """All columns that have a name, as texts; None for empty cells."""
    try:
        names = tuple(filter(None, csv_header(path)))
        cells = [values for _, values in read_csv(path, (), names)]
    except TraceError as error:
        raise ProfileError(str(error)) from None
    return pd.DataFrame(cells, columns=names, dtype=object).replace({"nan": None, "NaN": None})
