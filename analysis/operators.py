"""Where the time of a run went, by operator: a table and a figure from a run folder's operators.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis.load import read_json
from analysis.style import COLOURS, grid, say_empty, styled
from testbed.errors import RunFolderError
from testbed.foreign_text import shown, whole
from testbed.records.operators import FORMAT, OPERATORS_FILE, PARTS, PHASES

MAX_SUM = 2**62
_UNCOVERED = "idle or overlap"
_HATCHES = ("", "///", "...", "xxx")


def load_operators(folder: Path) -> dict[str, Any]:
    """A run's operators.json. Raises RunFolderError if there is none, or it is damaged."""
    file = folder / OPERATORS_FILE
    if not file.is_file():
        raise RunFolderError(f"{folder} has no {OPERATORS_FILE}; run it with record.operators=true")
    document = read_json(file)
    if document.get("format") != FORMAT:
        raise _refused(file, "'format'", document.get("format"), str(FORMAT))
    if document.get("parts") not in PARTS:
        raise _refused(file, "'parts'", document.get("parts"), " or ".join(PARTS))
    phases = document.get("phases")
    if not isinstance(phases, dict) or not set(phases) <= set(PHASES):
        raise _refused(file, "'phases'", phases, f"an object with some of {', '.join(PHASES)}")
    for name, phase in phases.items():
        _check_phase(file, f"phases.{name}", phase)
    return document


def _check_phase(file: Path, place: str, phase: Any) -> None:
    """Raises RunFolderError unless it counts steps and sums ns. Of all parts, `link` alone may be below 0."""
    if not isinstance(phase, dict) or not {"num_steps", "duration_ns", "ns"} <= phase.keys():
        raise _refused(file, place, phase, "an object with num_steps, duration_ns and ns")
    if not isinstance(phase["ns"], dict):
        raise _refused(file, f"{place}.ns", phase["ns"], "an object with the ns of each part")
    counts = {f"{place}.{name}": phase[name] for name in ("num_steps", "duration_ns")}
    for name, value in (counts | {f"{place}.ns.{name}": value for name, value in phase["ns"].items()}).items():
        least = -MAX_SUM if name.endswith(".ns.link") else 0
        if not whole(least, MAX_SUM)(value):
            raise _refused(file, name, value, f"a whole number, from {least:,} to {MAX_SUM:,}")


def _refused(file: Path, place: str, value: Any, expected: str) -> RunFolderError:
    return RunFolderError(f"{file}: {place} is {shown(value)}; expected {expected}")


def operator_table(document: Mapping[str, Any]) -> pd.DataFrame:
    """One row an operator, most time first: ns in each phase and in all, and its share of all. int64 ns."""
    phases = document["phases"]
    names = list(dict.fromkeys(name for phase in phases.values() for name in phase["ns"]))
    by_phase = {phase: [phases.get(phase, {"ns": {}})["ns"].get(name, 0) for name in names] for phase in PHASES}
    frame = pd.DataFrame({"operator": names, **by_phase})
    frame["total"] = frame[list(PHASES)].sum(axis=1)
    whole = int(frame["total"].sum()) if names else 0
    frame["share"] = frame["total"] / whole if whole else 0.0
    return frame.sort_values(["total", "operator"], ascending=[False, True], ignore_index=True)


def format_operators(document: Mapping[str, Any]) -> str:
    """The table as text, in seconds, with what no part covers."""
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
    return " ".join([f"{name:<18}", *(f"{ns / 1e9:>12.6g}" for ns in cells), f"{total / 1e9:>12.6g}"]) + text


def operator_bars(document: Mapping[str, Any]) -> Figure:
    """Horizontal bars, one an operator, most time on top; a colour and a hatch for each phase. Shares above 0.05 %."""
    frame = operator_table(document)
    frame = frame[frame["share"] > 5e-4].iloc[::-1]
    whole = max(1, int(operator_table(document)["total"].sum()))
    with styled():
        figure, axes = grid(1, 1, 0.9 + 0.22 * max(3, len(frame)))
        panel, left = axes[0][0], frame["total"].to_numpy() * 0.0
        for index, phase in enumerate(PHASES):
            width = frame[phase].to_numpy() / whole * 100
            if width.any():
                panel.barh(
                    frame["operator"], width, left=left, color=COLOURS[index], hatch=_HATCHES[index], label=phase,
                    edgecolor="white", linewidth=0.4,
                )  # fmt: skip
                left = left + width
        for name, end, share in zip(frame["operator"], left, frame["share"], strict=True):
            panel.annotate(f"{share:.1%}", (end, name), xytext=(3, 0), textcoords="offset points", va="center")
        panel.set_xlim(0, max(1.0, float(left.max(initial=0.0)) * 1.12))
        panel.set_xlabel(f"share of {whole / 1e9:,.4g} s (%)")
        panel.grid(visible=False, axis="y")
        if len(frame):
            panel.legend(title="steps with", loc="lower right")
        else:
            say_empty(panel)
    return figure
