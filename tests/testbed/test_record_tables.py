"""Columns of Python's values become the Arrow arrays that pyarrow would make of them."""

from __future__ import annotations

from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.arrow import CodedTexts, as_arrow
from testbed.records.parquet import ParquetFile

INSTANTS = st.lists(st.integers(0, 2**62), max_size=5)
COLUMNS: dict[Any, Any] = {
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float64(): st.floats(allow_nan=False),
    pa.string(): st.text(max_size=5).filter(lambda text: text.isprintable()),
    pa.list_(pa.int64()): INSTANTS.map(lambda values: array("q", values)),
}


@pytest.mark.parametrize("kind", COLUMNS, ids=str)
@given(data=st.data())
def test_arrays_are_those_of_pyarrow(kind: Any, data: st.DataObject) -> None:
    values = COLUMNS[kind]
    column = data.draw(st.lists(values, min_size=1) | st.lists(st.none() | values, min_size=1))
    made = as_arrow(tuple(column), kind)
    made.validate(full=True)
    assert made.type == kind
    assert made.equals(pa.array(column, kind))
    assert made.null_count == column.count(None)


def test_numpy_columns_are_narrowed_and_none_is_cut() -> None:
    assert as_arrow(np.arange(5), pa.int32()).equals(pa.array(range(5), pa.int32()))
    for column in (np.array([1, 2**40]), (1, 2**40), (None, 2**40)):
        with pytest.raises(OverflowError):
            as_arrow(column, pa.int32())


def test_few_texts_are_those_of_their_codes() -> None:
    codes = np.array([2, 0, 1, 1, 0])
    made = as_arrow(CodedTexts(codes, (None, "", "é")), pa.string())
    made.validate(full=True)
    assert made.to_pylist() == ["é", None, "", "", None]


def test_groups_are_written_in_order(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as worker:
        file = ParquetFile(tmp_path / "t.parquet", {"a": "int64"}, worker)
        for number in range(50):
            file.write([(number,)])
        file.close()
    assert pq.read_table(tmp_path / "t.parquet").column("a").to_pylist() == list(range(50))


def test_what_comes_when_threads_have_ended_is_written_too(tmp_path: Path) -> None:
    """As the interpreter ends: vLLM closes the scheduler of a script's engine as late as that."""
    with ThreadPoolExecutor(1) as worker:
        file = ParquetFile(tmp_path / "t.parquet", {"a": "int64"}, worker)
        file.write([(1,)])
    file.write([(2,)])
    file.close()
    assert pq.read_table(tmp_path / "t.parquet").column("a").to_pylist() == [1, 2]


def test_what_does_not_fit_is_raised_at_once_and_the_file_goes_on(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as worker:
        file = ParquetFile(tmp_path / "t.parquet", {"a": "int32"}, worker)
        with pytest.raises(OverflowError):
            file.write([(2**40,)])
        file.write([(1,)])
        file.close()
    assert pq.read_table(tmp_path / "t.parquet").column("a").to_pylist() == [1]
