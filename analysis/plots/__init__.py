"""The plots: each takes runs (or comparisons), returns its Axes or an array of them; `style.save` writes PNG and SVG.

`plots.latency_cdf(run)` and its like are here by name; matplotlib is loaded with the first of them.
"""

from importlib import import_module
from typing import Any

_STUDY_PLOTS = ("ablation_bars", "latency_cdf", "sim_versus_real", "throughput_latency", "timeline")
_PLACES = {
    **dict.fromkeys(_STUDY_PLOTS, "study_plots"),
    **dict.fromkeys(("batch_composition", "gantt", "preemption_scatter"), "run_plots"),
    **dict.fromkeys(("heatmap", "pareto"), "sweep_plots"),
}
__all__ = list(_PLACES)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(f"analysis.plots.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'analysis.plots' has no attribute {name!r}")
