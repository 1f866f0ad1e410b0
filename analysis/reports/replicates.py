"""Judges the quality of replicates by the requests that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from analysis import format as fmt
from analysis.comparison.arms import grouped
from analysis.load import Run, read_frame

_DRAWN = ("bootstrap", "jitter", "thin", "sample_sessions", "window")  # transformations that make replicates
_MOSTLY = 0.75  # share of common requests above which replicates are poor

Level = Literal["good", "fair", "poor"]


def drawn_by(runs: Sequence[Run]) -> list[str]:
    """The transformations of the trace that make the runs replicates."""
    given = grouped((step for run in runs for step in _steps(run)), lambda step: str(step.get("name")))
    return [name for name in _DRAWN if len(set(map(repr, given.get(name, ())))) > (name == "window")]


def shared(runs: Sequence[Run]) -> tuple[Level, str]:
    """The best level that replicates of one load can have, given the requests that they share, and the reason."""
    drawn = drawn_by(runs)
    narrow = "intervals are narrower than those of other traces would be"
    if any(early_end > late_start for (_, early_end), (late_start, _) in pairwise(sorted(set(map(_window, runs))))):
        return "poor", f": their windows overlap, so {narrow}"
    steps = [step for run in runs for step in _steps(run)]
    kept = [float(step.get("fraction", 1.0)) for step in steps if step.get("name") == "thin"]
    if "bootstrap" in drawn:  # of twelve intervals at 95 % over sixteen of them, one held what other traces gave
        return "fair", f": all are drawn from the same requests, so {narrow}"
    if "window" in drawn:
        return "good", ""
    if "sample_sessions" in drawn:
        kept.append(_common(runs))
    if kept:
        told = f": each shares {fmt.share(max(kept))} of another's requests, so {narrow}"
        return "poor" if max(kept) > _MOSTLY else "fair", told
    if any(step.get("name") == "set_rate" and step.get("by") == "thin" for step in steps):
        return "fair", f": each shares a part of another's requests, so {narrow}"
    if "jitter" in drawn:
        return "poor", " of the same requests: how the result hangs on exact arrivals, and nothing of other traces"
    return "good", ""


def _common(runs: Sequence[Run]) -> float:
    """The largest share of its requests that a trace has in common with the next one."""
    traces = grouped(runs, lambda run: str(run.fingerprint)).values()
    ids = [set(read_frame(run.path / "requests.parquet", ["request_id"])["request_id"]) for run, *_ in traces]
    return max(
        (len(one & other) / min(len(one), len(other)) for one, other in pairwise(ids) if one and other), default=0.0
    )


def _steps(run: Run) -> list[Mapping[str, Any]]:
    """The trace's transformations."""
    return [step for step in run.flat_config.get("trace.transforms") or () if isinstance(step, dict)]


def _window(run: Run) -> tuple[float, float]:
    """The window of its trace that the run uses: (start, end) in s."""
    spans = [(run.flat_config.get("trace.start_s"), run.flat_config.get("trace.end_s"))]
    spans += [(step.get("start_s"), step.get("end_s")) for step in _steps(run) if step.get("name") == "window"]
    return max(start or 0.0 for start, _ in spans), min(float("inf") if end is None else end for _, end in spans)
