"""Figures of a paper: plots in the axes, fonts and formats of who writes it."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis import plots
from analysis.load import Sweep, load_sweep
from analysis.plots import style
from testbed.errors import ConfigError
from tests.analysis.runs import write_run


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Sweep:
    root = tmp_path_factory.mktemp("sweep")
    for name, chunked in (("a", False), ("b", True)):
        write_run(root / name, chunked=chunked, num_requests=20, num_blocks=120)
    return load_sweep(root)


@pytest.mark.parametrize("kind", ["latency_cdf", "throughput_latency", "timeline"])
def test_plots_of_several_panels_draw_into_own_axes(sweep, kind):
    drawn_of = sweep.runs[1] if kind == "timeline" else sweep
    ours = getattr(plots, kind)(drawn_of)
    own = Figure(figsize=(7, 4)).subplots(2, 3)
    given = own[0] if kind == "latency_cdf" else own[:, :1] if kind == "timeline" else [own[0, 0], own[0, 1]]
    drawn = getattr(plots, kind)(drawn_of, ax=given)
    assert [*drawn.flat] == [*np.ravel(given)]
    for mine, same in zip(drawn.flat, ours.flat, strict=True):
        assert [line.get_xydata().tolist() for line in mine.lines] == [
            line.get_xydata().tolist() for line in same.lines
        ]
        assert mine.get_ylim() == same.get_ylim()
        assert mine.get_ylabel() == same.get_ylabel()
    assert not own[0, 0].figure.legends, "the legend of several plots is the caller's"
    named = [text.get_text() for text in ours.flat[0].figure.legends[0].texts]
    assert own[-1 if kind == "timeline" else 0, 0].get_legend_handles_labels()[1] == named
    with pytest.raises(ConfigError, match=r"this plot has . panels, and needs as many Axes"):
        getattr(plots, kind)(drawn_of, ax=own[0, 0])
    with pytest.raises(ConfigError, match=r"and needs as many Axes"):
        getattr(plots, kind)(drawn_of, ax=[None] * drawn.size)


def test_each_column_of_a_timeline_has_the_limits_though_no_axis_is_shared(sweep):
    upper, lower = plots.timeline(sweep, ax=Figure().subplots(2, 2))
    assert [axes.get_ylim() for axes in upper] == [(0, 105)] * 2
    assert all(float(tick).is_integer() for axes in lower for tick in axes.get_yticks())


def test_plots_of_one_panel_refuse_more_axes(sweep):
    with pytest.raises(ConfigError, match=r"this plot has 1 panel, and needs as many Axes"):
        plots.pareto(sweep, ax=Figure().subplots(1, 2))


def test_what_is_drawn_into_own_axes_has_their_fonts(sweep):
    with mpl.rc_context({"font.family": "monospace", "font.size": 5.0}):
        axes = Figure().subplots(3, 3)
        plots.batch_composition(sweep.runs[0], ax=axes[0, 0])
        plots.pareto(sweep, ax=axes[0, 1])
        plots.preemption_scatter(sweep, ax=axes[0, 2])
        plots.latency_cdf(sweep, ax=axes[1])
        plots.gantt(sweep.runs[0], ax=axes[2, 0])
    texts = [text for one in axes.flat for text in one.findobj(mpl.text.Text)]
    assert {name for text in texts for name in text.get_fontfamily()} == {"monospace"}


@pytest.mark.parametrize("name", ["load.jpg", "load.EPS", ""])
def test_a_figure_of_another_kind_or_without_a_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"figures are \.pdf, \.png or \.svg; name one|^the figure's file is empty"):
        style.save(Figure().subplots(), name and tmp_path / name)


def test_a_file_with_a_suffix_is_the_only_one_and_a_pdf_embeds_its_fonts(sweep, tmp_path):
    (pdf,) = style.save(plots.latency_cdf(sweep), tmp_path / "cdf.pdf")
    assert [*tmp_path.iterdir()] == [pdf]
    content = pdf.read_bytes()
    assert b"/Subtype /Type0" in content
    assert b"/Subtype /Type3" not in content
    assert not {b"/CreationDate", b"/Creator", b"/Producer"} & set(content.split())
    style.save(plots.latency_cdf(sweep), pdf)
    assert pdf.read_bytes() == content, "no date"
    assert [file.name for file in style.save(plots.latency_cdf(sweep), tmp_path / "cdf.PNG")] == ["cdf.PNG"]
    assert [file.name for file in style.save(plots.latency_cdf(sweep), tmp_path / "run.v1")] == [
        "run.v1.png",
        "run.v1.svg",
    ]
