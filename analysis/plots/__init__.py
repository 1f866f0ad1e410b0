"""The plots: each takes runs (or comparisons), returns its Axes or an array of them; `style.save` writes PNG and SVG.

`plots.latency_cdf(run)` and its like are here by name; matplotlib is loaded with the first of them.
"""

from importlib import import_module
from typing import Any

__all__ = [
    "ablation_bars", "batch_composition", "gantt", "heatmap", "latency_cdf", "pareto", "preemption_scatter",
    "sim_versus_real", "throughput_latency", "timeline",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("analysis.plots.study_plots"), name)
    raise AttributeError(f"module 'analysis.plots' has no attribute {name!r}")
