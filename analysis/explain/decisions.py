"""Reads a run's decisions step by step, from decisions.jsonl and steps.parquet; neither is ever completely in memory.

Owns reading and the errors in these files; does not interpret the decisions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from analysis.load import Run
from analysis.reading.rows import FileRows, whole
from testbed.errors import RunFolderError
from testbed.foreign_text import parsed

DECISIONS_FILE = "decisions.jsonl"
_NUMBERS = ("replica", "step", "start_ns", "end_ns", "swap_ns", "num_prefill_tokens")


@dataclass(frozen=True, slots=True)
class DecidedStep:
    """The decisions of a step; ids are in the order decided. victims: request id -> how it was preempted.

    preempted_for, lost_tokens, recomputed_tokens: see `testbed.records.schema.explanation`; empty without it.
    """

    replica: int
    step: int
    start_ns: int
    end_ns: int
    swap_ns: int
    num_prefill_tokens: int
    blocked_by: str | None
    plan_ns: int
    free_blocks: int
    scheduled: dict[str, int]
    admitted: dict[str, int]
    swapped_in: list[str]
    ignored: list[str]
    victims: dict[str, str]
    preempted_for: dict[str, str | None]
    lost_tokens: dict[str, int]
    recomputed_tokens: dict[str, int]


def decided_steps(run: Run, *, explained: bool = True) -> Iterator[DecidedStep]:
    """Every step of the run; steps of several replicas are mixed, in the order of the records.

    explained: the causes of preemptions are required, which record.decisions alone does not record.
    Raises RunFolderError if the decisions are missing, incomplete, or of another run.
    """
    file = run.path / DECISIONS_FILE
    need = f"run it with record.explain=true, or let `testbed explain {run.path} --keep <folder>` repeat it"
    if not file.is_file():
        raise RunFolderError(f"{run.path} has no {DECISIONS_FILE}; {need}")
    rows = FileRows(run.path / "steps.parquet")
    if not rows.num_rows and run.manifest.get("num_steps"):
        raise RunFolderError(f"{run.path / 'steps.parquet'} is empty (record.steps=false); {need}")
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, row in enumerate(_rows(rows), 1):
            place = f"{file}, line {number}"
            try:
                line = parsed(json.loads, lines.readline())
                step = _decided(row, line)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise RunFolderError(f"{place}: no decision of a step ({error}); {need}") from None
            if (line.get("replica", 0), line["step"]) != (step.replica, step.step):
                raise RunFolderError(f"{place} is not of the step that steps.parquet has there; {need}")
            if explained and step.victims and not step.lost_tokens:
                raise RunFolderError(f"{place} preempts, and does not say for whom; {need}")
            yield step


def _rows(rows: FileRows) -> Iterator[tuple[Any, ...]]:
    for batch in rows.batches([*_NUMBERS, "blocked_by"]):
        columns = [whole(array).tolist() for array in batch[:-1]]
        yield from zip(*columns, batch[-1].to_pylist(), strict=True)


def _decided(row: tuple[Any, ...], line: dict[str, Any]) -> DecidedStep:
    victims = dict.fromkeys(line["preempted"], "recompute") | dict.fromkeys(line["swapped_out"], "swap")
    told = [line[name] for name in ("free_blocks", "scheduled", "cached_tokens", "swapped_in", "ignored")]
    more = [line.get(name, {}) for name in ("preempted_for", "lost_tokens", "recomputed_tokens")]
    values: list[Any] = [*row, round(line["time_s"] * 1e9), *told, victims, *more]
    return DecidedStep(*values)
