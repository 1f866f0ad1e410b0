"""Parquet files that grow by groups of rows: memory does not grow with a run. Knows columns, and steps of plans."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from struct import Struct, pack
from typing import TYPE_CHECKING, Any, NamedTuple

from testbed.core.outcome import Spans
from testbed.core.plan import BlockedBy, RunSpans

if TYPE_CHECKING:
    from testbed.core.interfaces import StepView


_REASONS = (None, *(reason.value for reason in BlockedBy))
_PLAN_COLUMNS = 24
_PLAN = Struct(f"{_PLAN_COLUMNS}q")
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
        lists = [array("q", () if one is None else one) for one in column]
        child = self._array(kind.value_type, sum(map(len, lists)), None, b"".join(lists))
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
        self._begin()

    def _begin(self) -> None:
        """Nothing is kept."""
        self._plans = bytearray()  # int64 [num_plans, num_columns]
        # of each step
        self._end_ns: list[int] = []
        self._free: list[int] = []
        self._forward_ns: list[int] = []
        self._digests: list[int] = []
        self._others: list[tuple[int, Spans]] = []  # steps whose spans differ in more than that from their plan's first

    def append(self, step: StepView, num_recomputed: int, num_swapped_out: int, replica: int) -> None:
        """Takes the numbers of a plan: its view, which holds much more, is not kept. Those of its steps come first: a
        plan that Ctrl-C cuts in two is not there."""
        plan, plan_ns, result, digests, emitters, num_running, num_waiting, num_swapped, free, free_cpu = step
        number, _, shape, _, _, admitted, _, _, _, swapped_in, _, ignored, blocked_by, _ = plan
        num_decodes, context, prefills, _, _, _, _ = shape
        end_ns, _, spans, later, _ = result
        schedule_ns, prepare_ns, swap_ns, forward_ns, sample_ns = spans
        self._end_ns.extend(end_ns)
        self._free.extend(free)
        self._digests.extend(digests)
        self._forward_ns.append(forward_ns)
        if type(later) is RunSpans:  # isinstance of a class of collections.abc asks Python
            self._forward_ns.extend(later.forward_ns)
        elif later:
            self._append_later(spans, later)
        self._plans += _PLAN.pack(
            len(digests), number, num_decodes, context, plan_ns, len(emitters), num_running, num_waiting, num_swapped,
            free_cpu, num_recomputed, num_swapped_out, replica, schedule_ns, prepare_ns, swap_ns, sample_ns,
            len(prefills), sum([num_tokens for _, num_tokens in prefills]) if prefills else 0,
            len(admitted), sum([one.num_cached_tokens for one in admitted]) if admitted else 0, len(swapped_in),
            len(ignored), _REASON_CODES[blocked_by],
        )  # fmt: skip
        if len(self._end_ns) >= self._flush_rows:
            self._flush()

    def _append_later(self, first: Spans, later: Sequence[Spans]) -> None:
        """The spans of a plan's steps after its first, whose spans are `first`."""
        for spans in later:
            if spans[:3] != first[:3] or spans[4] != first[4]:
                self._others.append((len(self._forward_ns), spans))
            self._forward_ns.append(spans[3])

    def _flush(self) -> None:
        if not self._plans:
            return
        import numpy as np

        of_plans = np.frombuffer(self._plans, np.int64).reshape(-1, _PLAN_COLUMNS).T
        num_steps = of_plans[0]
        num = int(num_steps.sum())
        ends, free, forward = [_array(kept[:num]) for kept in (self._end_ns, self._free, self._forward_ns)]
        (
            _, step, num_decodes, context, plan_ns, num_emitted, running, waiting, swapped, free_cpu,
            recomputed, swapped_out, replica, schedule_ns, prepare_ns, swap_ns, sample_ns, num_prefills, prefill_tokens,
            admitted, cached, swapped_in, ignored, blocked_by,
        ) = np.repeat(of_plans, num_steps, axis=1)  # fmt: skip
        for index, other in [item for item in self._others if item[0] < num]:
            schedule_ns[index], prepare_ns[index], swap_ns[index], _, sample_ns[index] = other
        before = np.concatenate(([0], ends[:-1]))
        nth = np.arange(len(ends)) - np.repeat(np.cumsum(num_steps) - num_steps, num_steps)  # of its plan
        is_first = nth == 0
        self._table.write(
            [
                replica, step + nth, np.where(is_first, plan_ns, before), ends, num_decodes, num_prefills, num_decodes,
                prefill_tokens, context + nth * num_decodes, num_emitted, running, waiting, swapped, free, free_cpu,
                is_first * admitted, is_first * cached, recomputed, swapped_out, swapped_in, ignored,
                CodedTexts(blocked_by, _REASONS), schedule_ns, prepare_ns, swap_ns, forward, sample_ns,
                _array(self._digests[:num], "Q"),
            ]
        )  # fmt: skip
        self._begin()

    def close(self) -> None:
        self._flush()
        self._table.close()


def _array(numbers: list[int], kind: str = "q") -> Any:
    """kind: q, int64, or Q, uint64. By struct, which is faster than numpy's own conversion. Read-only."""
    import numpy as np

    return np.frombuffer(pack(f"{len(numbers)}{kind}", *numbers), dtype=kind)
