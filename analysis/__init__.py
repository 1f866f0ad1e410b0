"""Analysis of run folders: metrics, statistics, plots and reports. It does not know the backends.

`analysis.load(...)` reads runs and sweeps into pandas (docs/analysis.md). The packages, each built on those before it:
`reading` (records as columns), `measures` (one run), `comparison` (several runs), `explain` (why requests waited),
`plots`, `timelines`, and `reports`, which combine all of these on one page.
pandas and matplotlib are imported only where they are needed.
"""

from importlib import import_module
from typing import Any

from analysis.load import Run, Sweep, load  # hides the module: use `from analysis.load import …`

__all__ = ["Run", "Sweep", "load"]


def __getattr__(name: str) -> Any:
    """Imports a package such as `analysis.plots` on first use, so that not every command loads matplotlib."""
    if name in ("comparison", "explain", "measures", "plots", "reports"):
        return import_module(f"analysis.{name}")
    raise AttributeError(f"module 'analysis' has no attribute {name!r}")
