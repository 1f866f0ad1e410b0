"""The output of `testbed tables` as plain lines: coverage, engines, ranges, doubts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow.compute as pc

from experiments.tables.aiconfigurator import Coverage
from testbed.specs.operator_tables import SIZES, OperatorTables

_LEFT = "  "


def coverage_lines(found: Iterable[Coverage]) -> Iterator[str]:
    yield f"{'device':<14} {'engine':<18} {'points':>9}  operators"
    for item in found:
        engine = f"{item.engine} {item.version}"
        yield f"{item.device:<14} {engine:<18} {item.num_points:>9,}  {', '.join(item.operators)}"


def engine_lines(tables: OperatorTables) -> Iterator[str]:
    yield f"{tables.device} ({tables.device_description}): {tables.rows.num_rows:,} points"
    yield f"{_LEFT}{'engine':<18} {'operator':<18} {'points':>9}  {'source':<28} licence"
    keys = ["engine", "operator", "source", "licence"]
    counted = tables.rows.group_by(keys, use_threads=False).aggregate([([], "count_all")])
    for row in counted.to_pylist():
        line = f"{row['engine']:<18} {row['operator']:<18} {row['count_all']:>9,}  {row['source']:<28} {row['licence']}"
        yield _LEFT + line


def range_lines(tables: OperatorTables, operators: Iterable[str]) -> Iterator[str]:
    """For each operator its dtypes, kernels, and the range of each size and of the times."""
    yield f"{tables.device} ({tables.device_description}), {_names(tables.rows, 'engine')}"
    for operator in operators:
        rows = tables.select(operator)
        yield f"{operator}: {rows.num_rows:,} points, {_names(rows, 'dtype')}"
        yield f"{_LEFT}{'kernels':<15} {_names(rows, 'kernel')}"
        for name in (*SIZES[operator], "window"):
            span = pc.min_max(rows[name]).as_py()
            if span["min"] is not None:
                num = pc.count_distinct(rows[name]).as_py()
                spread = f"{span['min']:,}" if num == 1 else f"{span['min']:,} to {span['max']:,} ({num:,} sizes)"
                yield f"{_LEFT}{name:<15} {spread}"
        span = pc.min_max(rows["time_ns"]).as_py()
        yield f"{_LEFT}{'time':<15} {span['min'] / 1e3:,.4g} us to {span['max'] / 1e3:,.6g} us"


def doubt_lines(tables: OperatorTables) -> list[str]:
    return [f"{_LEFT}doubt: {doubt}" for doubt in tables.doubts]


def _names(rows: Any, column: str) -> str:
    """The distinct values of a column, the most frequent first."""
    counts = pc.value_counts(rows[column]).to_pylist()
    counts.sort(key=lambda count: -count["counts"])
    names = [str(count["values"]) for count in counts]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
