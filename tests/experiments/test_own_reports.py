"""A user's own plots and metrics get into reports by `_target_`: of the runs, or of the command line."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

from analysis.load import load_run, load_sweep
from experiments.wiring.foreign import own_classes
from tests.experiments.kit import SHORT, TINY, Say, config_of

DOCS = Path(__file__).parents[2] / "docs"
MINE = '''
import os
from matplotlib import pyplot

def dots(sweep, column="ttft_s"):
    """The requests,
    in order.

    Not of the caption.
    """
    return pyplot.plot(sweep.requests[column])[0].axes

class Histogram:
    def __init__(self, bins):
        self.bins = bins
    def __call__(self, sweep):
        """How many are how late."""
        return sweep.requests.ttft_s.plot.hist(bins=self.bins).figure

def raises(sweep):
    return 1 / 0

def ends(sweep):
    raise SystemExit(3)

def of_one(sweep):
    from analysis import plots
    return plots.gantt(sweep)

def of_two(sweep, other):
    return None

def elsewhere(sweep):
    os.chdir("/")
    return dots(sweep)

def share_slow(run, limit_s=0.1):
    return (run.requests.ttft_s > limit_s).mean()

class Longest:
    def __init__(self, unit_s=1.0):
        self.unit_s = unit_s
    def __call__(self, run):
        return run.requests.e2e_s.max() / self.unit_s

def text(run):
    return "abc"

def nothing(run):
    return None

def series(run):
    return run.requests.ttft_s[:0].reindex([0, 1]).fillna(0.5)

class Mute:
    pass

NUMBER = 3
'''
TWO = "report.plots=[{_target_: mine.dots, column: tpot_s}, {_target_: mine.Histogram, bins: 5}]"


def test_the_plots_that_a_sweep_states_are_in_its_report(home: Path, monkeypatch: pytest.MonkeyPatch, say: Say) -> None:
    """Also if the runs were finished when they were stated, and if the report is made elsewhere."""
    sweep = ("run", "-m", *TINY, *SHORT, "scheduler=vllm_v1,sarathi", "hydra.sweep.dir=s")
    say(*sweep).success()
    for stated in (TWO.replace("]", ", {_target_: mine.dots}]"), TWO):  # the second list begins the first
        assert "restated     2 of them" in say(*sweep, stated).success()
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    say("report", "../s").success()
    text = Path("report.md").read_text()
    assert "![mine.dots(column=tpot_s)](report_files/own_1.png)" in text
    assert "*mine.dots(column=tpot_s).* The requests, in order.\n" in text
    assert "*mine.Histogram(bins=5).* How many are how late.\n" in text
    assert "![mine.Histogram(bins=5)](report_files/own_2.png)" in text


@pytest.mark.usefixtures("unrendered")
def test_plots_come_from_where_the_runs_that_state_them_were_started(
    home: Path, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    for name in ("a", "b", "c"):
        (folder := home / name).mkdir()
        monkeypatch.chdir(folder)
        (folder / "yours.py").write_text(MINE if name == "b" else "")
        plots = ["report.plots=[{_target_: yours.dots}]"] if name == "b" else []
        say("run", *TINY, *SHORT, *plots, "hydra.run.dir=run").success()
        sys.modules.pop("yours", None)
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(folder)])
    monkeypatch.chdir(home)
    say("report", "a/run", "b/run", "c/run").success()
    assert "![yours.dots](report_files/own_1.png)" in Path("report.md").read_text()


@pytest.mark.usefixtures("unrendered")
def test_plots_of_the_command_line_take_their_place(home: Path, say: Say) -> None:
    say("run", *TINY, *SHORT, TWO, "hydra.run.dir=a").success()
    given = ("--plot", "mine.elsewhere", "--plot", "{_target_: analysis.plots.timeline}")
    say("report", "a", "--out", "r", *given).success()
    text = Path("r.md").read_text()
    assert re.findall(r"!\[([\w.()=]+)\]\(r_files/own_\d.png\)", text) == ["mine.elsewhere", "analysis.plots.timeline"]
    assert "--plot mine.elsewhere --plot '{_target_: analysis.plots.timeline}'" in text, "the command that repeats it"
    say("run", "from=a", "report.plots=[{_target_: mine.dots}]", "hydra.run.dir=b").success()
    assert load_run(Path("b")).flat_config["report.plots"] == [{"_target_": "mine.dots"}]
    said = say("report", "a", "b", "--out", "both")
    assert said.error().startswith("the runs state several report.plots: ")
    assert said.error().endswith("; choose one with --plot")


def test_a_plot_that_fails_does_not_take_the_report_along(home: Path, say: Say) -> None:
    plots = ", ".join(f"{{_target_: mine.{name}}}" for name in ("raises", "ends", "of_one", "dots"))
    say("run", *TINY, *SHORT, f"report.plots=[{plots}]", "hydra.run.dir=a").success()
    file, said = home / "mine.py", say("report", "a").error()
    line = {text: number for number, text in enumerate(MINE.splitlines(), 1)}
    raises = f"mine.raises: {file}:{line['    return 1 / 0']}: ZeroDivisionError: division by zero; mend it there"
    assert said.startswith(f"report.html is written without 3 plots of your own: {raises}; ")
    assert f"mine.ends: {file}:{line['    raise SystemExit(3)']}: SystemExit: 3; mend it there; " in said
    assert f"mine.of_one: {file}:{line['    return plots.gantt(sweep)']}: a plot is given a Sweep; this one" in said
    text = Path("report.md").read_text()
    assert "*mine.ends.* It could not be drawn: " in text
    assert "![mine.dots](report_files/own_4.png)" in text
    file.unlink()
    sys.modules.pop("mine")
    said = say("report", "a", "--out", "b").error()
    assert "b.html is written without 4 plots of your own: mine.raises: report.plots=mine.raises cannot be impo" in said
    assert Path("b.html").exists()


MISTAKES = [
    ("{_target_: mine.dot}", "=mine.dot cannot be imported (mine has no 'dot'; did you mean 'dots'?)"),
    ("{_target_: mien.dots}", "=mien.dots cannot be imported (there is no module 'mien' in"),
    ("{_target_: mine.NUMBER}", ": cannot make 'mine.NUMBER': Expected a callable target, got '3'"),
    ("{_target_: mine.Mute}", ": mine.Mute is no plot: its objects have no __call__(self, sweep)"),
    ("{_target_: mine.of_two}", ": mine.of_two gets the runs and what stands beside _target_, no more: missing a"),
    ("{_target_: mine.dots, colum: a}", ": mine.dots: it has no parameter 'colum'; did you mean 'column'?"),
    ("{_target_: mine.Histogram, bin: 3}", ": cannot make 'mine.Histogram': it has no parameter 'bin'; did you mean"),
]


@pytest.mark.parametrize(("plot", "said"), MISTAKES)
def test_a_plot_that_cannot_be_made_is_told_before_anything_runs(home: Path, say: Say, plot: str, said: str) -> None:
    run = ("run", *TINY, *SHORT, f"report.plots=[{plot}]")
    for arguments in ((*run, "hydra.run.dir=a"), (*run, "-m", "seed=0,1", "hydra.sweep.dir=a")):
        assert said in say(*arguments).error()
        assert not Path("a").exists()
    (home / "a").mkdir()
    assert said in say("report", "a", "--plot", plot).error()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("report.plots=mine.dots", "it must be a list, as in 'report.plots=[{_target_: mine.waiting}]'"),
        ("report.plots=[{bins: 3}]", "report.plots has {'bins': 3}; name a plot as {_target_: mine.waiting}"),
        ("report.plots=[mine.dots]", "report.plots has 'mine.dots'; name a plot as {_target_: mine.waiting}"),
    ],
)
def test_a_plot_is_named_as_every_class_is(say: Say, override: str, said: str) -> None:
    assert said in say("run", *TINY, *SHORT, override).error()


@pytest.mark.parametrize("text", ["{bins: 3}", "[mine.dots]", "mine.a, mine.b", "{_target_: mine.dots", "a=b", "3"])
def test_what_names_no_plot_on_the_command_line(tmp_path: Path, say: Say, text: str) -> None:
    told = f"--plot {text!r} names no plot; give one as mine.waiting, or {{_target_: mine.waiting, num_bins: 30}}"
    assert say("report", str(tmp_path), "--plot", text).error() == told


def test_a_plot_is_not_blamed_for_what_a_run_does() -> None:
    assert not own_classes(config_of(report__plots=[{"_target_": "mine.dots"}]))


@pytest.mark.parametrize(("title", "file"), [("A plot", "my_plots.py"), ("A metric", "my_metrics.py")])
def test_the_example_of_the_page_runs_as_it_stands(home: Path, say: Say, title: str, file: str) -> None:
    section = (DOCS / "extending.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    found = re.search(r"```python\n(.*?)```\n```sh\n(.*?)```", section, re.DOTALL)
    assert found is not None
    python, shell = found.groups()
    example = DOCS / "examples" / file
    assert python in example.read_text()
    shutil.copy(example, home)
    for line in shell.replace("\\\n", " ").splitlines():
        say(*shlex.split(line)[1:]).success()
    own = {path.name for path in Path("other_files").glob("own_?.png")}
    assert own == ({"own_1.png", "own_2.png"} if title == "A plot" else set())
    assert ("Chosen metrics" in Path("other.md").read_text()) is (title == "A metric")


# --- metrics ---

CHOSEN = (
    "report.metrics=[queueing_s.p90, {_target_: mine.share_slow, limit_s: 0.005, better: lower}, "
    "{_target_: mine.Longest}, {_target_: mine.nothing}, tpot_s.p99, queueing_s.p90]"
)


@pytest.mark.usefixtures("unrendered")
def test_metrics_that_a_sweep_states_are_compared_as_all_others(home: Path, say: Say) -> None:
    say("run", "-m", *TINY, *SHORT, "scheduler.max_num_seqs=1,8", "seed=0,1,2,3", CHOSEN, "hydra.sweep.dir=s").success()
    say("report", "s").success()
    page = Path("report.md").read_text()
    assert re.search(r"(better|worse|difference)[^;.]* in P99 TPOT", page.partition("## Setup")[0]), "chosen, too"
    table = page.partition("**Chosen metrics**")[2].partition("\n\n**")[0]
    header, _, few, many = table.strip().splitlines()
    names = [cell.strip() for cell in header.strip("|").split("|")][1:-1]
    assert names == ["P90 queueing delay", "mine.share_slow(limit_s=0.005)", "mine.Longest", "mine.nothing"]
    assert ("better" in many.split("|")[2], "lower" in many.split("|")[4]) == (True, True), many
    baselines = [run for run in load_sweep("s").runs if run.config["scheduler"]["max_num_seqs"] == 1]
    assert f" {sum((run.requests.ttft_s > 0.005).mean() for run in baselines) / 4:.3g} " in few
    longest = pd.read_csv("report_files/comparisons.csv").set_index("metric").loc["mine.Longest", "baseline_value"]
    assert longest == pytest.approx(sum(run.requests.e2e_s.max() for run in baselines) / 4)
    say("report", "s", "--out", "b", "--metric", "{_target_: mine.share_slow, better: higher}", "--metric", "itl_s.p50")
    table = Path("b.md").read_text().partition("**Chosen metrics**")[2].partition("\n\n**")[0]
    assert "| mine.share_slow | P50 ITL |" in table
    gates = ("--fail-if", "own.mine.Longest<0%", "--fail-if", "ttft_s.mean<0%", "--fail-if", "ttft_s.mean>5%")
    failed = say("report", "s", "--out", "c", *gates)
    assert (failed.status, Path("c.html").exists()) == (3, True)
    assert [line.rpartition(", beyond ")[2] for line in failed.err.splitlines()] == [repr(one) for one in gates[1:4:2]]


WRONG = [
    ("nope.p99", "has a number at nope.p99; a function of yours is {_target_: nope.p99}; docs/analysis.md"),
    ("ttft_s.p98", "a number at ttft_s.p98; did you mean 'ttft_s.p99'? docs/analysis.md#summaryjson lists all"),
    ("queueing.p99", "a number at queueing.p99; did you mean 'queueing_s.p99'? docs/analysis.md#summaryjson lists all"),
    ("status", "no run's summary has a number at status; docs/analysis.md"),
    ("time_base", "has a number at time_base; did you mean 'time_s.idle'? docs/analysis.md"),
    ("{_target_: mine.text}", "mine.text gives 'abc' for a; a metric is a number, or None where it has none"),
    ("{_target_: mine.series}", "mine.series gives 0 0.5 1 0.5 Name: ttft_s, dtype: "),
    ("{_target_: mine.raises}", "ZeroDivisionError: division by zero; mend it there"),
]
UNMADE = [
    ("{_target_: mine.share_slow, better: more}", "better of mine.share_slow is 'more'; choose one of lower, neither"),
    ("{_target_: mine.share_slow, limit: 1}", "it has no parameter 'limit'; did you mean 'limit_s'?"),
    ("{_target_: mine.Mute}", ": mine.Mute is no metric: its objects have no __call__(self, run)"),
    ("{_target_: mine.of_two}", ": mine.of_two gets a run and what stands beside _target_, no more: missing a"),
]


@pytest.mark.parametrize(("metric", "said"), [*WRONG, *UNMADE])
def test_a_metric_that_is_none_is_told_in_one_line(home: Path, say: Say, metric: str, said: str) -> None:
    run = say("run", *TINY, *SHORT, f"report.metrics=[{metric}]", "hydra.run.dir=a")
    if (metric, said) in UNMADE:
        assert said in run.error()
        assert not Path("a").exists()
    else:
        run.success()
        assert said in say("report", "a").error()
        assert not Path("report.html").exists()


@pytest.mark.parametrize("text", ["{limit_s: 3}", "[a, b]", "a, b", "3", "{_target_: 5}"])
def test_what_names_no_metric_on_the_command_line(tmp_path: Path, say: Say, text: str) -> None:
    assert (
        say("report", str(tmp_path), "--metric", text).error().startswith(f"--metric {text!r} names no metric; give ")
    )
    assert "report.metrics has" in say("run", *TINY, "report.metrics=[3]").error()
