"""Analysis: reads run folders into pandas; metrics, statistics, plots, reports. Knows nothing of backends.

`analysis.load(...)` reads runs and sweeps (docs/analysis.md); `summary.summarise` measures one run; `statistics`
compares replicates; `plots` draws; `fidelity` sets simulated against real runs; `report` puts all of it on one page.
pandas and matplotlib are imported where they are needed.
"""

from analysis.load import Run, Sweep, load  # the name is the function's; its module is imported from as before

__all__ = ["Run", "Sweep", "load"]
