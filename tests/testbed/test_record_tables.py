"""Columns of Python's values become the Arrow arrays that pyarrow would make of them."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.records.tables import ArrowArrays

INSTANTS = st.lists(st.integers(0, 2**62), max_size=5)
COLUMNS: dict[Any, Any] = {
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float64(): st.floats(allow_nan=False),
    pa.string(): st.text(max_size=5).filter(lambda text: text.isprintable()),
    pa.list_(pa.int64()): st.one_of(INSTANTS, INSTANTS.map(lambda values: array("q", values))),
}


@pytest.mark.parametrize("kind", COLUMNS, ids=str)
@given(data=st.data())
def test_arrays_are_those_of_pyarrow(kind: Any, data: st.DataObject) -> None:
    values = COLUMNS[kind]
    column = data.draw(st.lists(values, min_size=1) | st.lists(st.none() | values, min_size=1))
    made = ArrowArrays().of(tuple(column), kind)
    made.validate(full=True)
    assert made.type == kind
    assert made.equals(pa.array(column, kind))
    assert made.null_count == column.count(None)


def test_numpy_columns_are_narrowed_and_none_is_cut() -> None:
    arrays = ArrowArrays()
    assert arrays.of(np.arange(5), pa.int32()).equals(pa.array(range(5), pa.int32()))
    for column in (np.array([1, 2**40]), (1, 2**40), (None, 2**40)):
        with pytest.raises(OverflowError):
            arrays.of(column, pa.int32())
