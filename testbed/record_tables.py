"""Parquet files that grow by groups of rows: memory does not grow with a run. Knows columns, and steps of plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from struct import pack
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

    CONDENSE_PLANS = 64  # whose views are kept until their numbers are taken, a column at a time: a third of the time

    def __init__(self, path: Path, columns: dict[str, str], flush_rows: int) -> None:
        self._table = RowTable(path, columns, flush_rows)
        self._flush_rows = flush_rows
        self._plans: list[tuple[StepView, int, int, int]] = []  # not yet condensed; see `append`
        self._condensed: list[tuple[Any, ...]] = []  # [num_columns, num_plans], then [num_steps] each; see `_condense`
        self._num_steps = 0

    def append(self, step: StepView, num_recomputed: int, num_swapped_out: int, replica: int) -> None:
        self._plans.append((step, num_recomputed, num_swapped_out, replica))
        self._num_steps += len(step.digests)
        if self._num_steps >= self._flush_rows:
            self._flush()
        elif len(self._plans) >= self.CONDENSE_PLANS:
            self._condense()

    def _condense(self) -> None:
        """Takes the numbers of the plans: their views hold much more."""
        views, *recorded = zip(*self._plans, strict=True)
        plans, plan_ns, results, digests, emitters, *counts, free, free_cpu = zip(*views, strict=True)
        ends, _, spans, later, _ = zip(*results, strict=True)
        step, _, shapes, _, _, admitted, _, _, _, swapped_in, _, ignored, blocked_by, _ = zip(*plans, strict=True)
        num_decodes, context, prefills, *_ = zip(*shapes, strict=True)
        schedule_ns, prepare_ns, swap_ns, _, sample_ns = zip(*spans, strict=True)
        columns = (
            map(len, digests), step, num_decodes, context, plan_ns, map(len, emitters), *counts, free_cpu, *recorded,
            schedule_ns, prepare_ns, swap_ns, sample_ns,
            map(len, prefills),
            [sum([num_tokens for _, num_tokens in chunks]) if chunks else 0 for chunks in prefills],
            map(len, admitted),
            [sum([one.num_cached_tokens for one in some]) if some else 0 for some in admitted],
            map(len, swapped_in),
            map(len, ignored),
            map(_REASON_CODES.__getitem__, blocked_by),
        )  # fmt: skip
        forward, others = _forward_ns(spans, later)
        self._condensed.append(
            (
                _array(columns).reshape(len(columns), len(plans)), _array(ends), _array(free), _array(digests, "Q"),
                _array([forward]), others,
            )
        )  # fmt: skip
        self._plans = []

    def _flush(self) -> None:
        if self._plans:
            self._condense()
        if not self._condensed:
            return
        import numpy as np

        plans, instants, free, digests, forward, others = zip(*self._condensed, strict=True)
        of_plans, ends = np.concatenate(plans, axis=1), np.concatenate(instants)
        num_steps = of_plans[0]
        (
            _, step, num_decodes, context, plan_ns, num_emitted, running, waiting, swapped, free_cpu,
            recomputed, swapped_out, replica, schedule_ns, prepare_ns, swap_ns, sample_ns, num_prefills, prefill_tokens,
            admitted, cached, swapped_in, ignored, blocked_by,
        ) = np.repeat(of_plans, num_steps, axis=1)  # fmt: skip
        spans = [schedule_ns, prepare_ns, swap_ns, np.concatenate(forward), sample_ns]
        start = 0
        for numbers, differing in zip(forward, others, strict=True):
            for index, other in differing:
                for column, value in zip(spans, other, strict=True):
                    column[start + index] = value
            start += len(numbers)
        before = np.concatenate(([0], ends[:-1]))
        nth = np.arange(len(ends)) - np.repeat(np.cumsum(num_steps) - num_steps, num_steps)  # of its plan
        is_first = nth == 0
        self._table.write(
            [
                replica, step + nth, np.where(is_first, plan_ns, before), ends, num_decodes, num_prefills, num_decodes,
                prefill_tokens, context + nth * num_decodes, num_emitted, running, waiting, swapped,
                np.concatenate(free), free_cpu, is_first * admitted, is_first * cached, recomputed, swapped_out,
                swapped_in, ignored, CodedTexts(blocked_by, _REASONS), *spans, np.concatenate(digests),
            ]
        )  # fmt: skip
        self._condensed, self._num_steps = [], 0

    def close(self) -> None:
        self._flush()
        self._table.close()


def _array(lists: Iterable[Iterable[int]], kind: str = "q") -> Any:
    """Lists of numbers, one after the other. kind: q, int64, or Q, uint64. By struct: one call for all of them."""
    import numpy as np

    numbers = list(chain.from_iterable(lists))
    return np.frombuffer(pack(f"{len(numbers)}{kind}", *numbers), dtype=kind)


def _forward_ns(first: Sequence[Spans], later: Sequence[Sequence[Spans]]) -> tuple[list[int], list[tuple[int, Spans]]]:
    """forward_ns of each step of plans, from the spans of their first and of their later steps; and by index the steps
    whose spans differ in more than that from their plan's first."""
    forward: list[int] = []
    others: list[tuple[int, Spans]] = []
    for one, rest in zip(first, later, strict=True):
        forward.append(one[3])
        if type(rest) is RunSpans:  # isinstance of a class of collections.abc asks Python
            forward += rest.forward_ns
            continue
        for spans in rest:
            if spans[:3] != one[:3] or spans[4] != one[4]:
                others.append((len(forward), spans))
            forward.append(spans[3])
    return forward, others
