"""The time of a run by operator: summed while it runs, written as operators.json. A `Recorder`.

The cost model splits a step into parts (`itemise`); without it, the parts of a step are its spans. The parts of every
step add up exactly to its spans, so the file's sums equal those of steps.parquet. Knows no cost model.

    {"format": 1, "parts": "operators" or "spans", "phases": {phase: {"num_steps", "duration_ns", "ns": {part: ns}}}}

A part is at least 0 ns, except `link`: the swap time on the PCIe link minus the estimated one, below 0 where the link
worked behind the device. Phases: `prefill` (prefills only), `decode` (decodes only), `mixed`, and `moves` (nothing was
computed). duration_ns is from plan, or the end of the step then in flight, to commit; its difference from the sum of
the parts is idle time or overlap.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed.core.commands import Recorder, StepView
from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape

FORMAT = 1
OPERATORS_FILE = "operators.json"
PARTS = ("operators", "spans")
PHASES = ("prefill", "decode", "mixed", "moves")  # the kinds of a BatchShape, in the order shown
Itemise = Callable[[BatchShape, Spans], dict[str, int]]


class OperatorLedger:
    """Sums the parts of every step by phase. itemise: returns a step's parts from its shape and spans; they must add up
    to the spans. None: the parts are the spans. Each engine of a run has a recorder (`of_engine`)."""

    def __init__(self, folder: Path, itemise: Itemise | None) -> None:
        self._file = folder / OPERATORS_FILE
        self._itemise = itemise
        self._phases: dict[str, dict[str, Any]] = {}

    def of_engine(self) -> Recorder:
        return _OfEngine(self)

    def add(self, step: StepView, start_ns: int) -> None:
        """start_ns: the instant of its plan, or the end of the step that was in flight then."""
        shape, spans = step.plan.shape, step.spans
        phase = self._phases.setdefault(shape.kind, {"num_steps": 0, "duration_ns": 0, "ns": {}})
        phase["num_steps"] += 1
        phase["duration_ns"] += step.end_ns - start_ns
        parts = self._itemise(shape, spans) if self._itemise is not None else _by_span(spans)
        assert sum(parts.values()) == spans.total_ns, f"{parts} must add up to {spans}"
        sums = phase["ns"]
        for name, ns in parts.items():
            sums[name] = sums.get(name, 0) + ns

    def close(self) -> None:
        """Writes the file, also if the run ended early."""
        phases = {name: self._phases[name] for name in PHASES if name in self._phases}
        parts = "spans" if self._itemise is None else "operators"
        document = {"format": FORMAT, "parts": parts, "phases": phases}
        self._file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


class _OfEngine(Recorder):
    def __init__(self, ledger: OperatorLedger) -> None:
        self._ledger, self._end_ns = ledger, 0

    def committed(self, step: StepView) -> None:
        self._ledger.add(step, max(step.plan_ns, self._end_ns))
        self._end_ns = step.end_ns


def _by_span(spans: Spans) -> dict[str, int]:
    return {name.removesuffix("_ns"): ns for name, ns in spans.as_dict().items()}
