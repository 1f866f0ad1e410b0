"""The comparisons of a report as numbers: `comparisons.csv`, which a paper's tables can be made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from analysis.comparison.compare import Comparison
from analysis.comparison.effects import Compared
from analysis.comparison.wording import has_bounds, step_text

if TYPE_CHECKING:
    import pandas as pd

FILE = "comparisons.csv"
_COLUMNS = (
    "load", "class", "arm", "baseline", "metric", "key", "better", "value", "baseline_value", "change", "low", "high",
    "unit", "num_replicates", "num_requests", "p", "p_corrected", "d", "verdict",
)  # fmt: skip


def comparisons_frame(groups: Sequence[Compared]) -> pd.DataFrame:
    """One row for each change that the page's tables have, without main effects on one replicate. docs/sweeps.md has
    its columns."""
    import pandas as pd  # not at the top: it is slow to import

    return pd.DataFrame([row for group in groups for row in _rows(group)], columns=_COLUMNS)


def _rows(group: Compared) -> Iterator[dict[str, Any]]:
    judged = [(row.arm, group.arms[0].name, "", row) for row in group.rows]
    judged += [(row.arm, group.arms[0].name, name, row) for name, rows in group.classes.items() for row in rows]
    for effect in group.effects:
        step = step_text(effect)
        if effect.is_uneven:  # then its average says nothing
            judged += [(f"{step}, with {end.arm}", "", "", end) for end in effect.ends]
        else:
            judged.append((step, "", "", effect.comparison))
    for arm, baseline, of_class, row in judged:
        yield {"load": group.load, "class": of_class, "arm": arm, "baseline": baseline} | _numbers(row)


def _numbers(row: Comparison) -> dict[str, Any]:
    estimate = row.estimate
    ends: tuple[float | None, ...] = (None, None, None)
    unit = ""
    if estimate is not None and estimate.scale == "log_ratio":
        ends, unit = estimate.percent(), "%"
    elif estimate is not None:
        scale, unit = (100.0, "points") if row.metric.is_share else (1.0, "")
        ends = (scale * estimate.value, scale * estimate.low, scale * estimate.high)
    change, low, high = ends if has_bounds(row) else (ends[0], None, None)
    num = None if estimate is None else estimate.num
    of_requests = estimate is not None and estimate.is_within_trace
    return {
        "metric": row.metric.label, "key": row.metric.path,
        "better": {1: "higher", -1: "lower"}.get(row.metric.better, ""), "value": row.value, "baseline_value": row.base,
        "change": change, "low": low, "high": high, "unit": unit,
        "num_replicates": 1 if of_requests else num, "num_requests": num if of_requests else None,
        "p": None if estimate is None else estimate.p_value, "p_corrected": row.p_corrected, "d": row.effect,
        "verdict": row.claim or row.verdict,
    }  # fmt: skip
