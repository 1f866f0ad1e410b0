"""Checks the arguments of plots. An error names only the type of a wrong one, as a frame's content would be long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

import numpy as np
import pandas as pd

from analysis.comparison.arms import Runs, named
from analysis.load import Run, Sweep
from analysis.reading.rows import FloatArray
from testbed.errors import ConfigError

MAX_RUNS = 6  # in one figure
_WORDS = {
    Run: "a Run (of a Sweep: one of its runs)",
    Sweep: "a Sweep",
    pd.DataFrame: "one of their frames",
    Sequence: "a list of Runs",
    Mapping: "a dict of them by label",
}


def require(source: object, *wanted: type) -> None:
    """Raises ConfigError unless `source` is of one of these types."""
    if not isinstance(source, wanted) or isinstance(source, str):
        choices = [_WORDS[kind] for kind in wanted]
        raise ConfigError(f"a plot is given a {type(source).__name__}; this one takes {' or '.join(choices)}")


def requests_of(source: Run | Sweep | pd.DataFrame, *wanted: type) -> pd.DataFrame:
    """The requests of a source, or the frame itself. Raises ConfigError for another type, or another frame."""
    require(source, *wanted, pd.DataFrame)
    requests = source if isinstance(source, pd.DataFrame) else source.requests
    if "arrival_ns" not in requests.columns:
        raise ConfigError("a plot of requests is given a frame without them; give it a run's or a sweep's .requests")
    return requests


def column_of(frame: pd.DataFrame, name: str) -> FloatArray:
    """A column of numbers. Raises ConfigError for one that the frame lacks, or one of texts."""
    if name not in frame.columns:
        near = ", ".join(get_close_matches(str(name), map(str, frame.columns), n=3, cutoff=0.0))
        raise ConfigError(f"the runs' table has no column {name!r}; nearest: {near}")
    try:
        return pd.to_numeric(frame[name]).to_numpy(dtype=np.float64)
    except (ValueError, TypeError):
        raise ConfigError(f"the column {name!r} of the runs' table has no numbers; name another") from None


def list_of(runs: object) -> Sequence[Run]:
    """The runs of a list. Raises ConfigError for something else."""
    require(runs, Sequence)
    assert isinstance(runs, Sequence)
    for run in runs:
        require(run, Run)
    return runs


def runs_of(runs: Runs, most: int | None = None) -> dict[str, Run]:
    """Label -> run. Raises ConfigError if these are not runs, or more than `most`."""
    require(runs, Run, Sweep, Sequence, Mapping)
    if not isinstance(runs, Run | Sweep):
        list_of([*runs.values()] if isinstance(runs, Mapping) else runs)
    each = named(runs)
    if most is not None and len(each) > most:
        raise ConfigError(f"{len(each)} runs are too many for one picture; choose at most {most} of them")
    return each
