"""The time of a run by operator, as a table: from operators.json in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.reading.files import read_json
from testbed.errors import RunFolderError
from testbed.foreign_text import visible, whole
from testbed.records.operators import FORMAT, OPERATORS_FILE, PARTS, PHASES

MAX_SUM = 2**62
_UNCOVERED = "idle or overlap"


def load_operators(folder: Path) -> dict[str, Any]:
    """A run's operators.json. Raises RunFolderError if there is none, or it is damaged."""
    file = folder / OPERATORS_FILE
    if not folder.is_dir():
        raise RunFolderError(f"no run at {folder}; name a folder that `testbed run` wrote")
    if not file.is_file():
        raise RunFolderError(f"{folder} has no {OPERATORS_FILE}; run it with record.operators=true")
    document = read_json(file)
    if not _is_whole(document):
        raise RunFolderError(f"{file} is not as this version writes it; run it again with record.operators=true")
    return document


def _is_whole(document: dict[str, Any]) -> bool:
    """Whether the document has counts of steps and sums in ns. Only the part `link` may be below 0."""
    count = whole(0, MAX_SUM)
    try:
        phases = document["phases"]
        return (
            (document["format"], document["parts"] in PARTS, set(phases) <= set(PHASES)) == (FORMAT, True, True)
            and all(count(phase["num_steps"]) and count(phase["duration_ns"]) for phase in phases.values())
            and all(
                count(abs(ns) if part == "link" else ns) for one in phases.values() for part, ns in one["ns"].items()
            )
        )
    except (KeyError, TypeError, AttributeError):
        return False


def operator_table(document: Mapping[str, Any]) -> pd.DataFrame:
    """One row for each operator, the longest time first: int64 ns in each phase and in total, and its share."""
    phases = document["phases"]
    names = list(dict.fromkeys(name for phase in phases.values() for name in phase["ns"]))
    by_phase = {phase: [phases.get(phase, {"ns": {}})["ns"].get(name, 0) for name in names] for phase in PHASES}
    frame = pd.DataFrame({"operator": names, **by_phase})
    frame["total"] = frame[list(PHASES)].sum(axis=1)
    whole = int(frame["total"].sum()) if names else 0
    frame["share"] = frame["total"] / whole if whole else 0.0
    return frame.sort_values(["total", "operator"], ascending=[False, True], ignore_index=True)


def format_operators(document: Mapping[str, Any]) -> str:
    """The table as text, in seconds, with the step time that no part covers."""
    frame, phases = operator_table(document), document["phases"]
    used = [phase for phase in PHASES if phase in phases]
    lines = [" ".join([f"{document['parts'].removesuffix('s'):<18}", *(f"{phase + ' s':>12}" for phase in used),
                       f"{'total s':>12} {'share':>7}"])]  # fmt: skip
    rows = [row for row in frame.to_dict("records") if row["total"]]
    lines += [_line(str(row["operator"]), [row[phase] for phase in used], row["total"], row["share"]) for row in rows]
    sums = [int(frame[phase].sum()) for phase in used]
    lines.append(_line("all", sums, sum(sums), 1.0 if any(sums) else 0.0))
    gaps = [phases[phase]["duration_ns"] - total for phase, total in zip(used, sums, strict=True)]
    if any(gaps):
        lines.append(_line(_UNCOVERED, gaps, sum(gaps), None))
    counts = [f"{phases[phase]['num_steps']:>12,}" for phase in used]
    num_steps = sum(phases[phase]["num_steps"] for phase in used)
    lines.append(" ".join([f"{'steps':<18}", *counts, f"{num_steps:>12,}"]))
    return "\n".join(lines)


def _line(name: str, cells: list[int], total: int, share: float | None) -> str:
    text = "" if share is None else f" {share:>7.1%}"
    return " ".join([f"{visible(name):<18}", *(f"{ns / 1e9:>12.6g}" for ns in cells), f"{total / 1e9:>12.6g}"]) + text
