"""Parquet files that grow by groups of rows: memory does not grow with a run. Knows columns, and steps of plans."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from testbed.plan import BlockedBy, RunSpans, Spans

if TYPE_CHECKING:
    from testbed.interfaces import StepView


_REASONS = (None, *(reason.value for reason in BlockedBy))
_REASON_CODES = {None: 0} | {reason: code for code, reason in enumerate(BlockedBy, 1)}


class CodedTexts(NamedTuple):
    """A column of few different texts. codes: [num_rows], indices into `texts`, which may hold None."""

    codes: Any
    texts: tuple[str | None, ...]


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
            return self._coded(column) if isinstance(column, CodedTexts) else self._strings(column)
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

    def _coded(self, column: CodedTexts) -> Any:
        np, codes = self._np, column.codes
        texts = [b"" if text is None else text.encode() for text in column.texts]
        offsets = np.append(0, np.cumsum(np.array([len(text) for text in texts])[codes])).astype(np.int32)
        is_known = np.array([text is not None for text in column.texts])[codes]
        known = None if is_known.all() else np.packbits(is_known, bitorder="little")
        data = b"".join([texts[code] for code in codes[is_known].tolist()])
        return self._array(self._pa.string(), len(codes), known, offsets, data)

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

    CONDENSE_PLANS = 256  # whose views are kept until their numbers are taken, a column at a time: a third of the time

    def __init__(self, path: Path, columns: dict[str, str], flush_rows: int) -> None:
        self._table = RowTable(path, columns, flush_rows)
        self._flush_rows = flush_rows
        self._plans: list[tuple[Any, ...]] = []  # not yet condensed
        self._reset()

    def _reset(self) -> None:
        self._columns: list[list[int]] = [[] for _ in range(24)]  # of plans; see `_condense` and `_flush`
        self._ends = array("q")
        self._free = array("q")
        self._digests = array("Q")
        self._forward = array("q")  # forward_ns of each step
        self._others: list[tuple[int, Spans]] = []  # steps whose spans differ in more than that from their plan's first

    def append(self, step: StepView, num_recomputed: int, num_swapped_out: int, replica: int) -> None:
        plan, plan_ns, result, digests, emitters, num_running, num_waiting, num_swapped, free_blocks, free_cpu = step
        end_ns, _, spans, later, _ = result
        self._plans.append(
            (
                plan, spans, plan_ns, len(end_ns), len(emitters), num_running, num_waiting, num_swapped, free_cpu,
                num_recomputed, num_swapped_out, replica,
            )
        )  # fmt: skip
        self._ends.extend(end_ns)
        self._free.extend(free_blocks)
        self._digests.extend(digests)
        self._forward.append(spans.forward_ns)
        if isinstance(later, RunSpans):
            self._forward.extend(later.forward_ns)
        elif later:
            self._append_spans(spans, later)
        if len(self._plans) >= self.CONDENSE_PLANS:
            self._condense()
        if len(self._ends) >= self._flush_rows:
            self._flush()

    def _append_spans(self, first: Spans, later: Sequence[Spans]) -> None:
        for spans in later:
            if spans._replace(forward_ns=first.forward_ns) != first:
                self._others.append((len(self._forward), spans))
            self._forward.append(spans.forward_ns)

    def _condense(self) -> None:
        """Takes the numbers of the plans: their views hold much more."""
        plans, spans, *counts = zip(*self._plans, strict=True)
        step, _, shapes, _, _, admitted, _, _, _, swapped_in, _, ignored, blocked_by, _ = zip(*plans, strict=True)
        num_decodes, context, prefills, *_ = zip(*shapes, strict=True)
        schedule_ns, prepare_ns, swap_ns, _, sample_ns = zip(*spans, strict=True)
        columns = (
            step, num_decodes, context, *counts, schedule_ns, prepare_ns, swap_ns, sample_ns,
            [len(chunks) for chunks in prefills],
            [sum([chunk.num_tokens for chunk in chunks]) if chunks else 0 for chunks in prefills],
            [len(some) for some in admitted],
            [sum([one.num_cached_tokens for one in some]) if some else 0 for some in admitted],
            [len(some) for some in swapped_in],
            [len(some) for some in ignored],
            [_REASON_CODES[reason] for reason in blocked_by],
        )  # fmt: skip
        for column, values in zip(self._columns, columns, strict=True):
            column += values
        self._plans = []

    def _flush(self) -> None:
        if self._plans:
            self._condense()
        if not self._ends:
            return
        import numpy as np

        (
            step, num_decodes, context, plan_ns, _, num_emitted, running, waiting, swapped, free_cpu,
            recomputed, swapped_out, replica, schedule_ns, prepare_ns, swap_ns, sample_ns, num_prefills, prefill_tokens,
            admitted, cached, swapped_in, ignored, blocked_by,
        ) = np.repeat(np.array(self._columns, dtype=np.int64), self._columns[4], axis=1)  # fmt: skip
        spans = [schedule_ns, prepare_ns, swap_ns, np.array(self._forward), sample_ns]
        for index, other in self._others:
            for column, value in zip(spans, other, strict=True):
                column[index] = value
        ends = np.array(self._ends)
        before = np.concatenate(([0], ends[:-1]))
        first = np.cumsum(self._columns[4]) - self._columns[4]  # index of each plan's first step
        nth = np.arange(len(ends)) - np.repeat(first, self._columns[4])  # of its plan
        self._table.write(
            [
                replica, step + nth, np.where(nth == 0, plan_ns, before), ends, num_decodes, num_prefills, num_decodes,
                prefill_tokens, context + nth * num_decodes, num_emitted, running, waiting, swapped,
                np.array(self._free), free_cpu, admitted, cached, recomputed, swapped_out, swapped_in, ignored,
                CodedTexts(blocked_by, _REASONS), *spans, np.array(self._digests),
            ]
        )  # fmt: skip
        self._reset()

    def close(self) -> None:
        self._flush()
        self._table.close()
