"""Makes the plots and metrics of a report that a user names by `_target_`: in `report.plots` and `report.metrics`, or
with --plot and --metric.

A plot is a function of the runs, a metric one of a single run. Their other parameters are the keys beside `_target_`. A
class may have these parameters, too; its object is then called. A metric may also be a path in the summary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from experiments.configuration.config import RunConfig
from experiments.configuration.grammar import parsed
from experiments.configuration.own_class import imported, instantiate, place_in_own_code, stray, told
from experiments.configuration.saved import import_from
from experiments.configuration.settings import ReportConfig
from experiments.wiring.foreign import PolicyError
from testbed.checks import choose
from testbed.errors import ConfigError, TestbedError
from testbed.foreign_text import shown

if TYPE_CHECKING:
    from analysis.comparison.compare import Metric
    from analysis.load import Run, Sweep
    from analysis.reports.parts import OwnPlot

_PLOTS, _METRICS = "report.plots", "report.metrics"
_BETTER = {"lower": -1, "neither": 0, "higher": 1}


def check_reports(config: RunConfig) -> None:
    """Raises TestbedError if a plot or metric that the configuration names cannot be made; called before anything
    runs."""
    for node in config.report.plots:
        _made(_PLOTS, node)
    for item in config.report.metrics:
        _metric(_METRICS, item)


def given_plots(texts: Iterable[str]) -> list[OwnPlot]:
    """Returns the plots that --plot names, by a dotted name or as an item of `report.plots`. Raises TestbedError for
    one that cannot be made."""
    cure = "give one as mine.waiting, or {_target_: mine.waiting, num_bins: 30}"
    return [_own("--plot", _given("plot", text, cure)) for text in texts]


def given_metrics(texts: Iterable[str]) -> list[Metric]:
    """Returns the metrics that --metric names, as items of `report.metrics`. Raises TestbedError for one that cannot be
    made."""
    own = "{_target_: mine.share_slow, limit_s: 2}"
    cure = f"give a key of the summary, as queueing_s.p99, or one of your own, as {own}"
    return [_metric("--metric", _given("metric", text, cure)) for text in texts]


def _given(kind: str, text: str, cure: str) -> Any:
    """Returns the item of `report.plots` or `report.metrics` that --plot or --metric gives."""
    try:
        values: Any = parsed(f"report.{kind}s=[{text}]").value()
        (value,) = values
        if kind == "metric":
            return ReportConfig(metrics=(value,)).metrics[0]
        return ReportConfig(plots=({"_target_": value} if isinstance(value, str) else value,)).plots[0]
    except (ConfigError, ValueError):
        raise ConfigError(f"--{kind} {text!r} names no {kind}; {cure}") from None


def stated_plots(runs: Sequence[Run]) -> list[OwnPlot]:
    """Returns the plots that the runs state. One that cannot be made says so where it would be drawn."""
    from analysis.reports.parts import OwnPlot  # not at the top: Arrow and Matplotlib are slow to import

    plots = []
    for node in _stated(runs, _PLOTS):
        try:
            plots.append(_own(_PLOTS, node))
        except TestbedError as error:
            plots.append(OwnPlot(_title(node), "", partial(_fail, error)))
    return plots


def stated_metrics(runs: Sequence[Run]) -> list[Metric]:
    """Returns the metrics that the runs state. Raises TestbedError for one that cannot be made."""
    return [_metric(_METRICS, item) for item in _stated(runs, _METRICS)]


def _stated(runs: Sequence[Run], key: str) -> Sequence[Any]:
    from analysis.comparison.groups import stated  # not at the top, as above

    for run in runs:
        if run.flat_config.get(key):
            import_from(run.manifest.get("started_in"))
    return stated(runs, key.removeprefix("report.")) or ()


def _metric(key: str, item: str | dict[str, Any]) -> Metric:
    from analysis import format as fmt  # not at the top, as above
    from analysis.comparison.compare import Metric, metric_of

    if isinstance(item, str):
        return metric_of(item)
    node = dict(item)
    better = _BETTER[choose(f"{key}: better of {node['_target_']}", node.pop("better", "neither"), _BETTER)]
    title = _title(node)
    return Metric(title, f"own.{title}", better, fmt.number, _Measure(title, _made(key, node, "metric", "run")))


@dataclass(eq=False)
class _Measure:
    """The value of a metric of the user's own for a run, computed once."""

    title: str
    function: Callable[[Any], Any]
    known: dict[Path, float | None] = field(default_factory=dict)

    def __call__(self, run: Run) -> float | None:
        if run.path not in self.known:
            value = _called(self.function, run)
            try:
                number = math.nan if value is None else float(value)
            except (TypeError, ValueError):
                raise PolicyError(
                    f"{self.title} gives {' '.join(shown(value).split())} for {run.path}; a metric is a number, or "
                    "None where it has none"
                ) from None
            self.known[run.path] = number if math.isfinite(number) else None
        return self.known[run.path]


def _own(key: str, node: dict[str, Any]) -> OwnPlot:
    """Returns a plot with its name as title. Caption: the first paragraph of its docstring, of a class or its
    __call__."""
    from analysis.reports.parts import OwnPlot  # not at the top, as above

    plot, target = _made(key, node), imported(key, node["_target_"])
    told = target.__doc__ or (target.__call__.__doc__ if isinstance(target, type) else None) or ""
    return OwnPlot(_title(node), " ".join(told.strip().split("\n\n")[0].split()), partial(_called, plot))


def _title(node: dict[str, Any]) -> str:
    given = ", ".join(f"{name}={value}" for name, value in node.items() if not name.startswith("_"))
    return f"{node['_target_']}({given})" if given else str(node["_target_"])


def _made(key: str, node: dict[str, Any], kind: str = "plot", given: str = "sweep") -> Callable[[Any], Any]:
    """Makes the object of a class, or gives a function its parameters. Raises TestbedError if the result cannot be
    called with one argument."""
    target = node["_target_"]
    is_class = isinstance(imported(key, target), type)
    made: Callable[[Any], Any] = instantiate(key, node if is_class else {**node, "_partial_": True})
    if said := stray(target, node):
        raise ConfigError(f"{key}: {target}: {said}")
    if not callable(made):
        raise ConfigError(f"{key}: {target} is no {kind}: its objects have no __call__(self, {given})")
    try:
        signature(made).bind(None)
    except (TypeError, ValueError) as error:
        runs = "the runs" if given == "sweep" else "a run"
        raise ConfigError(f"{key}: {target} gets {runs} and what stands beside _target_, no more: {error}") from None
    return made


def _called(function: Callable[[Any], Any], given: Run | Sweep) -> Any:
    """What the user's function returns. Raises PolicyError, with the line of the user's file, for what it raises."""
    try:
        with chdir(os.curdir):  # which is then as it was: the report's files are named from there
            return function(given)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        place = place_in_own_code(error)
        said = str(error) if isinstance(error, TestbedError) else told(error)
        raise PolicyError(f"{place}: {said}; mend it there" if place else said) from error


def _fail(error: TestbedError, sweep: Sweep) -> NoReturn:
    raise error
