"""Makes the plots of a report that a user names by `_target_`: in `report.plots`, or with --plot.

Such a plot is a function of the runs, whose other parameters are the keys beside `_target_`; or a class that has these
parameters, and whose object is called with the runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import chdir
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, NoReturn, cast

from experiments.configuration.config import RunConfig
from experiments.configuration.grammar import parsed
from experiments.configuration.own_class import imported, instantiate, place_in_own_code, stray, told
from experiments.configuration.saved import import_from
from experiments.configuration.settings import ReportConfig
from experiments.wiring.foreign import PolicyError
from testbed.errors import ConfigError, TestbedError

if TYPE_CHECKING:
    from analysis.load import Run, Sweep
    from analysis.reports.parts import OwnPlot

_KEY = "report.plots"


def check_plots(config: RunConfig) -> None:
    """Raises TestbedError if a plot of `report.plots` cannot be made; called before anything runs."""
    for node in config.report.plots:
        _made(_KEY, node)


def given_plots(texts: Iterable[str]) -> list[OwnPlot]:
    """Returns the plots that --plot names, by a dotted name or as an item of `report.plots`. Raises TestbedError for
    one that cannot be made."""
    return [_own("--plot", _given(text)) for text in texts]


def _given(text: str) -> dict[str, Any]:
    try:
        values: Any = parsed(f"{_KEY}=[{text}]").value()
        nodes = [{"_target_": value} if isinstance(value, str) else value for value in values]
        (node,) = ReportConfig(plots=tuple(nodes)).plots
    except (ConfigError, ValueError):
        raise ConfigError(
            f"--plot {text!r} names no plot; give one as mine.waiting, or {{_target_: mine.waiting, num_bins: 30}}"
        ) from None
    return cast(dict[str, Any], node)


def stated_plots(runs: Sequence[Run]) -> list[OwnPlot]:
    """Returns the plots that the runs state. One that cannot be made says so where it would be drawn."""
    from analysis.comparison.groups import stated  # not at the top: Arrow and Matplotlib are slow to import
    from analysis.reports.parts import OwnPlot

    for run in runs:
        if run.flat_config.get(_KEY):
            import_from(run.manifest.get("started_in"))
    plots = []
    for node in stated(runs, "plots") or ():
        try:
            plots.append(_own(_KEY, node))
        except TestbedError as error:
            plots.append(OwnPlot(_title(node), "", partial(_fail, error)))
    return plots


def _own(key: str, node: dict[str, Any]) -> OwnPlot:
    """Returns a plot with its name as title. Caption: the first paragraph of its docstring, of a class or its
    __call__."""
    from analysis.reports.parts import OwnPlot  # not at the top, as above

    plot, target = _made(key, node), imported(key, node["_target_"])
    told = target.__doc__ or (target.__call__.__doc__ if isinstance(target, type) else None) or ""
    return OwnPlot(_title(node), " ".join(told.strip().split("\n\n")[0].split()), partial(_draw, plot))


def _title(node: dict[str, Any]) -> str:
    given = ", ".join(f"{name}={value}" for name, value in node.items() if not name.startswith("_"))
    return f"{node['_target_']}({given})" if given else str(node["_target_"])


def _made(key: str, node: dict[str, Any]) -> Callable[[Sweep], Any]:
    """Makes the object of a class, or gives a function its parameters. Raises TestbedError if the result cannot be
    called with the runs."""
    target = node["_target_"]
    is_class = isinstance(imported(key, target), type)
    plot: Callable[[Sweep], Any] = instantiate(key, node if is_class else {**node, "_partial_": True})
    if said := stray(target, node):
        raise ConfigError(f"{key}: {target}: {said}")
    if not callable(plot):
        raise ConfigError(f"{key}: {target} is no plot: its objects have no __call__(self, sweep)")
    try:
        signature(plot).bind(None)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {target} gets the runs and what stands beside _target_, no more: {error}") from None
    return plot


def _draw(plot: Callable[[Sweep], Any], sweep: Sweep) -> Any:
    """Draws. Raises PolicyError, with the line of the user's file, for what the plot raises."""
    try:
        with chdir(os.curdir):  # which is then as it was: the report's files are named from there
            return plot(sweep)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        place = place_in_own_code(error)
        said = str(error) if isinstance(error, TestbedError) else told(error)
        raise PolicyError(f"{place}: {said}; mend it there" if place else said) from error


def _fail(error: TestbedError, sweep: Sweep) -> NoReturn:
    raise error
