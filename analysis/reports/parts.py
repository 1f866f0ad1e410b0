"""The input of a report, and the parts that are collected while it is built."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from analysis.comparison.arms import Arm
from analysis.comparison.compare import Metric
from analysis.comparison.effects import Compared
from analysis.comparison.pairs import Pair
from analysis.load import Run, Sweep, relative
from analysis.measures.slo import SLO
from analysis.plots import style
from analysis.plots.style import AxesArray
from analysis.reports.gates import Gate
from testbed.errors import TestbedError

DEFAULT_MARGIN = 0.02
_MAX_SVG_BYTES = 400_000
_MAX_RAN = 4  # pairs of model and device that are named at the top


class PlotError(TestbedError):
    """Plots of the user's own failed. The report is written, and says so in their places."""


class OwnPlot(NamedTuple):
    """A plot of the user's own. draw: gets all compared runs as one Sweep; returns Axes, an array of them or a
    Figure."""

    title: str
    caption: str
    draw: Callable[[Sweep], Any]


@dataclass(frozen=True)
class ReportInput:
    """The input of a report. `arms` may span seeds and loads; `commands` default to those in the manifests."""

    arms: Sequence[Arm]
    pairs: Sequence[Pair] = ()
    title: str = "Ablation report"
    question: str = ""
    baseline: str | None = None  # an arm's name; the first arm by default
    slo: SLO | Mapping[str, float | None] | None = None
    margin: float = DEFAULT_MARGIN  # a relative change up to this counts as none
    replicated: Sequence[str] = ()  # keys of the trace whose values are replicates, not loads
    commands: Sequence[str] = ()
    command: str = ""  # the command that made the report
    notes: Sequence[str] = ()  # limits that only the author knows
    cautions: Sequence[str] = ()  # warnings, shown first
    incomplete: Sequence[tuple[Path, str]] = ()  # folders left out, and why
    metrics: Sequence[Metric] = ()  # compared in addition to those of every report
    plots: Sequence[OwnPlot] = ()
    gates: Sequence[Gate] = ()  # limits of changes

    @property
    def runs(self) -> list[Run]:
        """All compared runs, of arms and of pairs."""
        return [run for members in (self.arms, self.pairs) for one in members for run in one.runs]


class Plot(NamedTuple):
    title: str
    caption: str
    data_uri: str = ""  # without it, the caption says why nothing is shown
    file: str = ""  # the PNG, relative to the report
    narrow_uri: str = ""  # the version for a phone, if there is one


@dataclass
class Sections:
    out: Path
    part: Path  # the folder of figures until `keep` is called
    drawn: Callable[[], object] = lambda: None  # called after each figure
    ablation: list[Any] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # sentences on what could not be compared
    failed: list[str] = field(default_factory=list)  # plots of the user's own, each with the reason

    @property
    def files(self) -> Path:
        """The folder of figures that the page names."""
        return self.out.with_name(f"{self.out.stem}_files")

    def keep(self) -> None:
        """Moves the figures to where the page names them. Those that only the page before it named are deleted."""
        self.files.mkdir(exist_ok=True)
        earlier = self.out.with_suffix(".md")  # not yet replaced
        text = earlier.read_text(encoding="utf-8", errors="replace") if earlier.exists() else ""
        left = [png for png in self.files.glob("*.png") if f"({self._named(png).replace(' ', '%20')})" in text]
        for figure in self.part.glob("*"):
            figure.replace(self.files / figure.name)
            left = [png for png in left if png.stem != figure.stem]
        for png in left:
            png.unlink()
            png.with_suffix(".svg").unlink(missing_ok=True)

    def plot(self, draw: Callable[..., AxesArray], name: str, title: str, caption: str) -> Plot:
        """Saves a figure for the report. draw: makes it, with `is_narrow=True` in the version for a phone, which only
        the page has."""
        narrow_uri = _embedded(*style.save(draw(is_narrow=True), self.part / name))
        png, svg = style.save(draw(), self.part / name)
        self.drawn()
        return Plot(title, caption, _embedded(png, svg), self._named(png), narrow_uri)

    def own_plot(self, plot: OwnPlot, name: str, sweep: Sweep) -> Plot:
        """Saves a plot of the user's own. The place of one that fails says why, and so does `failed`."""
        try:
            with style.of_others():
                png, svg = style.save(plot.draw(sweep), self.part / name)
        except Exception as error:  # noqa: BLE001  (the user's code may raise anything)
            kind = "" if isinstance(error, TestbedError) else f"{type(error).__name__}: "
            said = kind + " ".join(str(error).split())
            self.failed.append(f"{plot.title}: {said}")
            return Plot(plot.title, f"It could not be drawn: {said}")
        self.drawn()
        return Plot(plot.title, plot.caption, _embedded(png, svg), self._named(png))

    def _named(self, png: Path) -> str:
        return relative(self.files / png.name, self.out.parent)


def _embedded(png: Path, svg: Path) -> str:
    """The figure as a data URI."""
    small = svg.stat().st_size <= _MAX_SVG_BYTES
    kind, data = ("svg+xml", svg.read_bytes()) if small else ("png", png.read_bytes())
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def what_ran(runs: Sequence[Run]) -> str:
    """A sentence that names the models and devices, and whether they were simulated or measured."""
    said: dict[str, None] = {}
    for run in runs:
        on = f"{run.manifest.get('model')} on {run.manifest.get('device')}"
        said[f"simulated: {on}, cost={run.manifest.get('cost')}" if run.is_simulated else f"measured: {on}"] = None
    shown = [*said][:_MAX_RAN]
    more = f"; and {len(said) - len(shown)} more" if len(said) > len(shown) else ""
    text = "; ".join(shown) + more
    return f"{text[0].upper()}{text[1:]}."


def baseline_text(report: ReportInput, baseline: Arm) -> str:
    if len(report.arms) < 2:
        return ""
    is_point = baseline.runs[0].manifest.get("point") is not None
    why = "the first point of the sweep" if is_point else "the first run, in the order of the folders"
    why += "; --baseline or report.baseline names another"
    return f"Baseline: {baseline.name}, {'as named' if report.baseline else why}."


def default_question(arms: Sequence[Arm], baseline: Arm) -> str:
    if len(arms) == 1:
        return f"How does {baseline.name} serve {'this trace' if len(arms[0].runs) == 1 else 'these traces'}?"
    variants = f"{len(arms) - 1} variants" if len(arms) > 2 else next(a.name for a in arms if a.name != baseline.name)
    return f"How {'do' if len(arms) > 2 else 'does'} {variants} differ from {baseline.name} on the same trace?"
