"""Reading of the CSVs of a source, with errors that name the bad value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.tables.columns import LEAST_NS, MOST_NS, UNIT_NS, plain, time_span
from testbed.errors import ProfileError, TraceError
from testbed.foreign_text import shown
from testbed.traces.readers.open_text import csv_header, read_csv


class CsvTable:
    """The columns of a CSV, converted on demand. Errors are ProfileErrors that name file, line, column and value."""

    def __init__(self, path: Path, needed: Sequence[str]) -> None:
        """needed: columns that must be in the file."""
        self.path = path
        if not path.is_file():
            raise ProfileError(f"no file at {path}; docs/tables.md says what each source has")
        self._table, self._places = _read(path)
        missing = [name for name in needed if name not in self._table]
        if missing:
            names = ", ".join(map(plain, self._table.columns[:30]))
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
        values: np.ndarray[Any, Any] = self.numbers(name, may_be_empty=may_be_empty) * UNIT_NS[unit]
        with np.errstate(invalid="ignore"):
            self.refuse_where((values < LEAST_NS) | (values > MOST_NS), name, time_span(unit))
        return values

    def refuse_where(self, is_bad: np.ndarray[Any, Any], name: str, expected: str) -> None:
        """Raises ProfileError for the first bad row of a column, if there is one."""
        if is_bad.any():
            row = int(is_bad.argmax())
            value = self._table[name].iloc[row]
            text = "empty" if pd.isna(value) else shown(value)
            raise ProfileError(f"{self._places[row]}: {name} is {text}; expected {expected}")


def _read(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """All columns that have a name, as texts, None for empty cells; and the place of each row, `<file>:<line>`."""
    try:
        names = tuple(filter(None, csv_header(path)))
        rows = [(place, [cell.strip() or None for cell in values]) for place, values in read_csv(path, names)]
    except TraceError as error:
        raise ProfileError(str(error)) from None
    cells = pd.DataFrame([values for _, values in rows], columns=names, dtype=object)
    return cells.replace({"nan": None, "NaN": None}), [place for place, _ in rows]
