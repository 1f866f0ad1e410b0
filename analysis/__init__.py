"""Analysis: reads run folders into pandas; metrics, statistics, plots, reports. Knows nothing of backends.

`analysis.load(...)` reads runs and sweeps (docs/analysis.md). Behind it, each package built on those before it:
`reading` (records as columns), `measures` (one run), `comparison` (several), `explain` (why requests waited), `plots`,
`timelines`, and `reports`, which put all of it on one page.
pandas and matplotlib are imported where they are needed.
"""

from importlib import import_module
from typing import Any

from analysis.load import Run, Sweep, load  # the name is the function's; its module is imported from as before

__all__ = ["Run", "Sweep", "load"]


def __getattr__(name: str) -> Any:
    """`analysis.plots` after `import analysis`, without loading matplotlib for every command."""
    if name in ("comparison", "explain", "measures", "plots", "reports"):
        return import_module(f"analysis.{name}")
    raise AttributeError(f"module 'analysis' has no attribute {name!r}")
