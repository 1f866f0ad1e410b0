"""Buffers for the rows of a run's records. Rows are written in groups, so that memory does not grow with their number.

Knows which numbers of a step are recorded.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from librt.strings import BytesWriter, read_i64_be, write_i64_le

from testbed.core.commands import StepView
from testbed.core.plan import BlockedBy
from testbed.records.schema import STEP_COLUMNS

_REASONS: Final[tuple[str | None, ...]] = (None, *[reason.value for reason in BlockedBy])
_REASON_CODES: Final = {reason: code for code, reason in enumerate(BlockedBy, 1)}
_ROW_BYTES: Final = 8 * len(STEP_COLUMNS)


class RowTable:
    """Buffers rows of Python values for a Parquet file. Raises OSError as `ParquetFile` does."""

    def __init__(self, path: Path, columns: dict[str, str], worker: ThreadPoolExecutor, flush_rows: int) -> None:
        from testbed.records.parquet import ParquetFile  # not at the top: the core runs without Arrow

        self._file = ParquetFile(path, columns, worker)
        self._rows: list[tuple[Any, ...]] = []
        self._size = flush_rows  # of a group

    def append(self, row: tuple[Any, ...]) -> None:
        self._rows.append(row)
        if len(self._rows) >= self._size:
            self._flush()

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        self._size *= self._file.write(list(zip(*rows, strict=True)))

    def close(self) -> None:
        if self._rows:
            self._flush()
        self._file.close()


class StepTable:
    """Buffers the rows of steps.parquet: one row of int64 for each step, in the order of the schema."""

    def __init__(self, path: Path, worker: ThreadPoolExecutor, flush_rows: int) -> None:
        from testbed.records.parquet import ParquetFile  # not at the top, as above

        self._file = ParquetFile(path, STEP_COLUMNS, worker)
        self._size = flush_rows * _ROW_BYTES  # of a group
        self._rows = BytesWriter()

    def append(self, step: StepView, start_ns: int, num_recomputed: int, num_swapped_out: int, replica: int) -> None:
        """Stores the step's numbers; the view itself, which is much larger, is not kept."""
        plan, shape, spans, rows = step.plan, step.plan.shape, step.spans, self._rows
        num_prefill_tokens = num_cached_tokens = 0
        for chunk in shape.prefills:
            num_prefill_tokens += chunk.num_tokens
        for admission in plan.admitted:
            num_cached_tokens += admission.num_cached_tokens
        write_i64_le(rows, replica)
        write_i64_le(rows, plan.step)
        write_i64_le(rows, start_ns)
        write_i64_le(rows, step.end_ns)
        write_i64_le(rows, shape.num_decodes)
        write_i64_le(rows, len(shape.prefills))
        write_i64_le(rows, shape.num_decodes)  # a token each
        write_i64_le(rows, num_prefill_tokens)
        write_i64_le(rows, shape.decode_context_tokens)
        write_i64_le(rows, len(step.emitters))
        write_i64_le(rows, step.num_running)
        write_i64_le(rows, step.num_waiting)
        write_i64_le(rows, step.num_swapped)
        write_i64_le(rows, step.free_gpu_blocks)
        write_i64_le(rows, step.free_cpu_blocks)
        write_i64_le(rows, len(plan.admitted))
        write_i64_le(rows, num_cached_tokens)
        write_i64_le(rows, num_recomputed)
        write_i64_le(rows, num_swapped_out)
        write_i64_le(rows, len(plan.swapped_in))
        write_i64_le(rows, len(plan.ignored))
        write_i64_le(rows, 0 if plan.blocked_by is None else _REASON_CODES[plan.blocked_by])
        write_i64_le(rows, spans.schedule_ns)
        write_i64_le(rows, spans.prepare_ns)
        write_i64_le(rows, spans.swap_ns)
        write_i64_le(rows, spans.forward_ns)
        write_i64_le(rows, spans.sample_ns)
        write_i64_le(rows, read_i64_be(step.digest_bytes, 0))
        if len(rows) >= self._size:
            self._flush()

    def _flush(self) -> None:
        from testbed.records.parquet import columns_of

        data = self._rows.getvalue()
        self._rows.truncate(0)
        self._size *= self._file.write(columns_of(data, STEP_COLUMNS, _REASONS))

    def close(self) -> None:
        if len(self._rows):
            self._flush()
        self._file.close()
