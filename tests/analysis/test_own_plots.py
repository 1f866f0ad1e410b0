"""Plots of the user's own in a report: what they are given, where they stand, and what one that fails costs."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib import pyplot

from analysis.comparison.arms import infer_arms
from analysis.load import Sweep, load_run, load_sweep
from analysis.plots import style
from analysis.reports.parts import OwnPlot, PlotError, ReportInput
from analysis.reports.report import report_from_folders, write_report
from testbed.errors import ConfigError
from tests.analysis.page import Page
from tests.analysis.runs import write_run, write_runs


def test_own_plots_get_all_compared_runs_and_stand_after_the_others(tmp_path):
    """Of the figures of pyplot each plot finds none of another's."""
    write_runs(tmp_path / "runs", chunked=[False, True], num_requests=10)
    given = []

    def dots(sweep: Sweep):
        given.append(sweep)
        assert not pyplot.get_fignums()
        return pyplot.plot(sweep.requests.ttft_s)[0].axes

    def panels(sweep: Sweep):
        return [*pyplot.subplots(1, 2)[1]]

    plots = [OwnPlot("a <b>", "Dots_of_it.", dots), OwnPlot("again", "", dots), OwnPlot("two", "", panels)]
    asked = []
    page = report_from_folders([tmp_path / "runs"], tmp_path / "r.html", plots=lambda runs: asked.append(runs) or plots)
    assert not pyplot.get_fignums()
    first, second = given
    assert first is second
    assert first.runs == load_sweep(tmp_path / "runs").runs == tuple(asked[0])
    assert list(first.requests.run.unique()) == ["False", "True"], "folders as analysis.load names them"
    section = page.read_text().partition("Distributions and time")[2].partition("</details>")[0]
    assert section.index("KV usage") < section.index("<b>a &lt;b&gt;.</b> Dots_of_it.") < section.index("again")
    assert len(Page(section).loads) == 2 * 2 + 3, "an own plot has no second version for phones"
    twin = page.with_suffix(".md").read_text()
    assert "![a \\<b\\>](r_files/own_1.png)\n\n*a \\<b\\>.* Dots_of_it." in twin
    widths = [pyplot.imread(page.with_name("r_files") / f"own_{number}.png").shape[1] for number in (1, 2, 3)]
    assert widths == [int(7.2 * 200)] * 3


def test_what_fails_costs_its_own_place_only(tmp_path):
    def titled(sweep: Sweep):
        axes = pyplot.subplots()[1]
        axes.set_title("$\\bad{$")
        return axes

    def two_figures(sweep: Sweep):
        return [pyplot.subplots()[1] for _ in range(2)]

    report = ReportInput(
        infer_arms([load_run(write_run(tmp_path / "run", num_requests=10))]),
        plots=[
            OwnPlot("raises", "", lambda _: {}["a\nb"]), OwnPlot("none", "", lambda _: None),
            OwnPlot("not to be drawn", "", titled), OwnPlot("good", "Good.", lambda _: pyplot.subplots()[0]),
            OwnPlot("two", "", two_figures),
        ],
    )  # fmt: skip
    with pytest.raises(PlotError) as failure:
        write_report(report, tmp_path / "r.html")
    said = str(failure.value)
    assert said.startswith(f"{tmp_path / 'r.html'} is written without 4 plots of your own: raises: KeyError: 'a\\nb'; ")
    assert "none: a plot returns its Axes, an array of them or its Figure, and this one None; " in said
    assert "not to be drawn: ValueError: " in said
    assert said.endswith("; two: a plot is one figure, and this one returns Axes of 2; make a plot of each")
    assert "\n" not in said
    text = (tmp_path / "r.md").read_text()
    assert "*none.* It could not be drawn: a plot returns its Axes" in text
    assert "![good](r_files/own_4.png)" in text
    assert "![none]" not in text
    html = (tmp_path / "r.html").read_text()
    assert "<figure><figcaption><b>none.</b> It could not be drawn" in html
    assert "own_2.png" not in {path.name for path in (tmp_path / "r_files").iterdir()}
    assert not pyplot.get_fignums()


@pytest.mark.parametrize("drawn", [None, [], "axes", {"a": 1}, np.zeros(3)])
def test_what_is_no_plot_is_not_saved(tmp_path, drawn):
    with pytest.raises(ConfigError, match="a plot returns its Axes, an array of them or its Figure, and this one"):
        style.save(drawn, tmp_path / "a")


def test_a_figure_on_which_nothing_is_drawn_is_no_plot(tmp_path):
    with pytest.raises(ConfigError, match="a plot draws something, and the Figure of this one is empty"):
        style.save(pyplot.figure(), tmp_path / "a")
    pyplot.close("all")
