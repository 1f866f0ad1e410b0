"""How far the simulator's steps are from measured ones of the same shape.

Two runs of one trace do not take the same steps, so steps are compared by shape: those of one cell (region, and powers
of two of decodes, prefill tokens and context) on both sides, median against median. A cell that only one run has is
left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.load import Run
from analysis.reading.frames import numbers
from analysis.reading.rows import FloatArray

REGIONS = ("decode", "prefill", "mixed")
_COLUMNS = ("region", "decodes", "prefill", "context")


class StepErrors(NamedTuple):
    """One row each group: group, num_steps, measured_s and sim_s (medians over those steps of their cells' medians),
    error (median over steps of the signed error of their cell). num_compared, num_steps: of the measured steps."""

    by_region: pd.DataFrame
    by_decodes: pd.DataFrame
    num_compared: int
    num_steps: int


def step_errors(sim: Run, real: Run) -> StepErrors | None:
    """None where either run has no steps."""
    cells = [_cells(run) for run in (sim, real)]
    if any(frame.empty for frame in cells):
        return None
    medians = cells[0].groupby(list(_COLUMNS))["time_s"].median().rename("sim_s")
    real_medians = cells[1].groupby(list(_COLUMNS))["time_s"].median().rename("real_s")
    joined = cells[1].join(medians, on=list(_COLUMNS), how="inner").join(real_medians, on=list(_COLUMNS))
    joined["error"] = (joined["sim_s"] - joined["real_s"]) / joined["real_s"]
    only_decodes = joined[joined["region"] == "decode"]
    return StepErrors(
        _by(joined, "region", REGIONS), _by(only_decodes, "decodes", sorted(only_decodes["decodes"].unique())),
        len(joined), len(cells[1]),
    )  # fmt: skip


def _cells(run: Run) -> pd.DataFrame:
    """The steps that computed something: their time and cell."""
    steps = run.steps
    time_s = (numbers(steps, "end_ns") - numbers(steps, "start_ns")) / 1e9
    decodes, prefill = numbers(steps, "num_decode_tokens"), numbers(steps, "num_prefill_tokens")
    region = np.where(prefill == 0, "decode", np.where(decodes == 0, "prefill", "mixed"))
    frame = pd.DataFrame({
        "region": region, "decodes": _power(decodes), "prefill": _power(prefill),
        "context": _power(numbers(steps, "decode_context_tokens")), "time_s": time_s,
    })  # fmt: skip
    return frame[((decodes > 0) | (prefill > 0)) & (time_s > 0)]


def _power(values: FloatArray) -> FloatArray:
    """The power of two that reaches each value; 0 for 0."""
    return np.where(values > 0, 2.0 ** np.ceil(np.log2(np.maximum(values, 1))), 0.0)


def _by(joined: pd.DataFrame, column: str, groups: Iterable[Any]) -> pd.DataFrame:
    table = joined.groupby(column).agg(
        num_steps=("error", "size"), measured_s=("real_s", "median"), sim_s=("sim_s", "median"),
        error=("error", "median"),
    )  # fmt: skip
    table = table.reindex([group for group in groups if group in table.index])
    return table.rename_axis("group").reset_index()
