"""Parquet files that grow by groups of rows: memory does not grow with a run. Knows columns, and steps of plans."""

from __future__ import annotations

from array import array
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.plan import Spans

if TYPE_CHECKING:
    from testbed.interfaces import StepView


class RowTable:
    """Rows that become a Parquet file, group by group. The file exists, complete, once closed.

    What could not be written raises OSError with the file's name, again when it is closed.
    """

    def __init__(self, path: Path, columns: dict[str, str], flush_rows: int) -> None:
        import pyarrow as pa  # not at the top: the core runs without it
        import pyarrow.parquet as pq

        types = {"list<int64>": pa.list_(pa.int64()), "double": pa.float64()}
        self._schema = pa.schema([(name, types.get(kind) or pa.type_for_alias(kind)) for name, kind in columns.items()])
        self._make = pa.record_batch
        self._arrays = ArrowArrays()
        texts = [name for name, kind in columns.items() if kind == "string"]  # instants rarely come twice
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd", use_dictionary=texts)
        self._rows: list[tuple[Any, ...]] = []
        self._flush_rows = flush_rows
        self._path = path
        self._failure: OSError | None = None

    def append(self, row: tuple[Any, ...]) -> None:
        self._rows.append(row)
        if len(self._rows) >= self._flush_rows:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            self.write(list(zip(*self._rows, strict=True)))
            self._rows = []

    def write(self, columns: list[Any]) -> None:
        """One group of rows, by column."""
        if self._failure is not None:
            raise self._failure
        arrays = [self._arrays.of(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        try:
            self._writer.write_batch(self._make(arrays, schema=self._schema))
        except OSError as error:
            raise self._failed(error) from None

    def close(self) -> None:
        if self._failure is not None:
            raise self._failure
        self.flush()
        try:
            self._writer.close()
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> OSError:
        """The file is given up: pyarrow, asked to close it again, would say something else."""
        self._writer.is_open = False
        self._failure = OSError(error.errno, error.strerror or str(error), str(self._path))
        return self._failure


class ArrowArrays:
    """Arrow arrays from columns of Python's values or numpy arrays; None is null.

    By way of buffers: pyarrow's own conversion imports pandas where there is one, which takes longer than a short run,
    and goes through lists of instants one by one.
    """

    def __init__(self) -> None:
        import numpy as np
        import pyarrow as pa

        self._np, self._pa = np, pa

    def of(self, column: Any, kind: Any) -> Any:
        """kind: the Arrow type. OverflowError if a number does not fit."""
        if kind == self._pa.string():
            return self._strings(column)
        if kind == self._pa.list_(self._pa.int64()):
            return self._lists(column, kind)
        dtype = kind.to_pandas_dtype()
        if not isinstance(column, self._np.ndarray):
            known = self._known(column)
            values = column if known is None else [0 if value is None else value for value in column]
            return self._array(kind, len(column), known, self._np.array(values, dtype=dtype))
        numbers = self._np.ascontiguousarray(column, dtype=dtype)
        if numbers.dtype != column.dtype and (numbers != column).any():
            raise OverflowError(f"a number does not fit into {kind}")
        return self._array(kind, len(column), None, numbers)

    def _strings(self, column: Any) -> Any:
        texts = [b"" if text is None else text.encode() for text in column]
        offsets = self._offsets(texts)
        return self._array(self._pa.string(), len(texts), self._known(column), offsets, b"".join(texts))

    def _lists(self, column: Any, kind: Any) -> Any:
        np = self._np
        lists = [np.array(() if one is None else one, dtype=np.int64) for one in column]
        flat = np.concatenate(lists)
        child = self._array(kind.value_type, len(flat), None, flat)
        return self._array(kind, len(lists), self._known(column), self._offsets(lists), children=[child])

    def _offsets(self, items: Any) -> Any:
        lengths = self._np.fromiter(map(len, items), self._np.int64, len(items))
        return self._np.append(0, self._np.cumsum(lengths)).astype(self._np.int32)

    def _known(self, column: Any) -> Any:
        """Which are not None, as bits; None: all."""
        if None not in column:
            return None
        return self._np.packbits([value is not None for value in column], bitorder="little")

    def _array(self, kind: Any, num_rows: int, *buffers: Any, children: Any = None) -> Any:
        made = [None if buffer is None else self._pa.py_buffer(buffer) for buffer in buffers]
        return self._pa.Array.from_buffers(kind, num_rows, made, children=children)


class StepTable:
    """Steps, one row each, taken plan by plan: what a plan's steps have in common is kept once until it is written."""

    def __init__(self, path: Path, columns: dict[str, str], flush_rows: int) -> None:
        self._table = RowTable(path, columns, flush_rows)
        self._flush_rows = flush_rows
        self._reset()

    def _reset(self) -> None:
        self._plans: list[tuple[Any, ...]] = []
        self._num_steps: list[int] = []
        self._ends = array("q")
        self._free = array("q")
        self._digests = array("Q")
        self._spans: list[Spans] = []

    def append(self, step: StepView, num_recomputed: int, num_swapped_out: int, replica: int) -> None:
        plan, result = step.plan, step.result
        shape = plan.shape
        admitted = plan.admitted
        self._plans.append(
            (
                replica, plan.step, step.plan_ns, shape.num_decodes, len(shape.prefills), shape.num_prefill_tokens,
                shape.decode_context_tokens, len(step.emitters), step.num_running, step.num_waiting, step.num_swapped,
                step.free_cpu_blocks, len(admitted), sum([one.num_cached_tokens for one in admitted]), num_recomputed,
                num_swapped_out, len(plan.swapped_in), len(plan.ignored),
                plan.blocked_by.value if plan.blocked_by is not None else None,
            )
        )  # fmt: skip
        self._num_steps.append(len(result.end_ns))
        self._ends.extend(result.end_ns)
        self._free.extend(step.free_blocks)
        self._digests.extend(step.digests)
        self._spans.append(result.spans)
        self._spans += result.later_spans
        if len(self._ends) >= self._flush_rows:
            self._flush()

    def _flush(self) -> None:
        if not self._plans:
            return
        import numpy as np

        num_steps = np.array(self._num_steps)  # [num_plans]
        first = np.cumsum(num_steps) - num_steps  # index of each plan's first step
        nth = np.arange(len(self._ends)) - np.repeat(first, num_steps)  # of its plan
        *columns, blocked_by = zip(*self._plans, strict=True)
        (
            replica, step, plan_ns, num_decodes, num_prefills, num_prefill_tokens, context, num_emitted, running,
            waiting, swapped, free_cpu, admitted, cached, recomputed, swapped_out, swapped_in, ignored,
        ) = (np.repeat(np.array(column, dtype=np.int64), num_steps) for column in columns)  # fmt: skip
        ends = np.array(self._ends)
        starts = np.where(nth == 0, plan_ns, np.concatenate(([0], ends[:-1])))
        spans = np.fromiter(chain.from_iterable(self._spans), np.int64, 5 * len(ends)).reshape(-1, 5)
        blocked = [why for why, count in zip(blocked_by, self._num_steps, strict=True) for _ in range(count)]
        self._table.write(
            [
                replica, step + nth, starts, ends, num_decodes, num_prefills, num_decodes, num_prefill_tokens,
                context + nth * num_decodes, num_emitted, running, waiting, swapped, np.array(self._free), free_cpu,
                admitted, cached, recomputed, swapped_out, swapped_in, ignored, blocked, *spans.T,
                np.array(self._digests),
            ]
        )  # fmt: skip
        self._reset()

    def close(self) -> None:
        self._flush()
        self._table.close()
