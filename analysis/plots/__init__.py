"""The plots: each takes runs (or comparisons), returns its Axes or an array of them; `style.save` writes PNG and SVG.

This package imports matplotlib, which is slow; `import analysis` on its own does not.
"""

from analysis.plots.bars import ablation_bars
from analysis.plots.over_time import latency_over_time
from analysis.plots.run_plots import batch_composition, gantt, preemption_scatter
from analysis.plots.study_plots import latency_cdf, sim_versus_real, throughput_latency, timeline
from analysis.plots.sweep_plots import heatmap, pareto

__all__ = [
    "ablation_bars", "batch_composition", "gantt", "heatmap", "latency_cdf", "latency_over_time", "pareto",
    "preemption_scatter", "sim_versus_real", "throughput_latency", "timeline",
]  # fmt: skip
