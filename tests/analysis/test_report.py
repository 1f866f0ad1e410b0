"""The report, from folders to page: self-contained, escaped, and claiming no more than the numbers."""

from __future__ import annotations

import base64
import json
import re

import pandas as pd
import pytest

from analysis import format as fmt
from analysis.comparison import fidelity
from analysis.comparison.arms import find_arm, infer_arms, level_groups
from analysis.comparison.compare import LATENCY, compare
from analysis.comparison.effects import main_effects
from analysis.comparison.pairs import Pair, infer_pairs
from analysis.load import load_run, load_sweep
from analysis.reports import fidelity_findings, tables
from analysis.reports.cautions import lost
from analysis.reports.figures import _timeline_choice, run_plots
from analysis.reports.parts import ReportInput, Sections
from analysis.reports.report import report_from_folders, write_report
from testbed.errors import RunFolderError
from tests.analysis.page import Page
from tests.analysis.runs import change_config, change_manifest, write_run, write_runs

FEW = {"num_requests": 10}
SMALL = {"num_requests": 40, "rate": 12.0, "num_blocks": 120}
BOTH = [False, True]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A 2 x 2 design over three seeds, and a pair of runs for each composition on another trace."""
    root = tmp_path_factory.mktemp("sweep")
    write_runs(root / "ablation", chunked=BOTH, prefix_caching=BOTH, seed=[0, 1, 2], **SMALL)
    write_runs(root / "pairs" / "sim", seed=9, chunked=BOTH, num_requests=20)
    write_runs(root / "pairs" / "real", "real", seed=9, chunked=BOTH, num_requests=20, noise=0.1)
    write_run(root / "ablation" / "broken", stop_s=1.0, num_requests=30)
    return root


@pytest.fixture(scope="module")
def page(sweep, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "report.html"
    title = "<script>alert(1)</script> [x](http://y) for $1 or $2"
    path = report_from_folders([sweep / "ablation", sweep / "pairs"], out, title=title, question="1. Is a < b & c?")
    assert path == out
    return path


def test_the_page_is_self_contained(page):
    parsed = Page(page.read_text())
    assert parsed.loads
    assert all(target.startswith("data:image/") for target in parsed.loads)
    assert "script" not in parsed.tags
    assert "url(" not in page.read_text()
    assert not any(link.startswith(("http", "/", "file")) for link in parsed.links)


def test_every_figure_fits_a_phone(page):
    folder = page.with_name("report_files")
    figures = re.findall(r"<figure><picture>(.*?)</picture>", page.read_text())
    assert len(figures) == 4
    for figure, stem in zip(figures, ("ablation_0", "latency_cdf", "timeline", "sim_versus_real"), strict=True):
        source = r'<source media="screen and \(max-width: 40rem\)" srcset="data:image/svg\+xml;base64,(.*?)">'
        narrow = base64.b64decode(re.match(source, figure).group(1)).decode()
        wide = (folder / f"{stem}.svg").read_text()
        assert [float(re.search(r'width="([\d.]+)pt"', one).group(1)) for one in (wide, narrow)] == [7.2 * 72, 3.6 * 72]


def test_a_print_shows_all_sections_with_their_headings(page):
    (printed,) = re.findall(r"@media print \{(.*?)\n\}", page.read_text(), re.DOTALL)
    hidden = re.findall(r"([^{};]*)\{[^}]*display: none", printed)
    assert not hidden, "headings are in the summaries of the sections that fold"
    assert "details::details-content { content-visibility: visible" in printed
    assert "figure img { max-height: 235mm" in printed, "a figure of many arms is higher than a sheet of paper"


def test_a_name_without_spaces_is_broken_instead_of_leaving_its_place(page):
    rules = dict(re.findall(r"^([^@{}\n]+?) \{([^{}]*)\}", page.read_text(), re.MULTILINE))
    assert "overflow-wrap: break-word" in rules["body"]
    assert "overflow-wrap: anywhere" in rules["td:first-child, td a"], "arms, whose column has a largest width"
    assert "minmax(0, 1fr)" in rules[".trust"], "else the column is as wide as its longest word"


def test_links_lead_to_the_run_folders(page):
    links = Page(page.read_text()).links
    assert len(links) > 1
    for link in links:
        assert (page.parent / link).is_dir()


def test_what_a_user_wrote_is_escaped(page):
    text = page.read_text()
    assert "<script>" not in text
    assert "1. Is a &lt; b &amp; c?" in text
    twin = page.with_suffix(".md").read_text()
    assert r"\<script\>alert(1)\</script\> [x\](http://y) for \$1 or \$2" in twin
    assert r"1\. Is a \< b & c?" in twin, "no list"


def test_the_page_never_prints_what_is_no_number(page):
    for text in (Page(page.read_text()).text, page.with_suffix(".md").read_text()):
        assert not re.search(r"\bnan\b|\bNone\b|\binf\b|(?<![\w.])[-−]0(?:\.0+)?(?![\d.])", text)


def test_the_page_says_what_it_compared_and_what_it_left_out(page):
    text = " ".join(Page(page.read_text()).text.split())
    assert "prefix caching on instead of off" in text
    assert "3 replicates" in text
    assert "the run is partial" in text
    assert "The real runs used another trace than the ablation" in text
    assert "testbed run -m seed=0,1,2 trace.rate=" in text
    assert "the arms differ in scheduler.name prefill_first/decode_first; " in text
    assert "; cache.prefix_caching off/on" in text
    assert not any(what in text for what in ("fingerprint", "mypyc", "packages")), "manifests have these"


def test_figures_of_one_replicate_show_the_one_in_the_middle(page, sweep):
    runs = load_sweep(sweep / "ablation").runs
    text = Page(page.read_text()).text
    (shown,) = set(re.findall(r"Latency distributions, seed (\d)", text))
    means = {
        seed: sum(run.summary["ttft_s"]["mean"] for run in runs if run.manifest["seed"] == seed and run.is_complete)
        for seed in range(3)
    }
    assert sorted(means, key=means.__getitem__)[1] == int(shown)


def test_of_four_arms_the_timeline_shows_three_and_says_which(page, sweep):
    told = "Of 4 arms, shown are the baseline and the 2 arms whose mean TTFT is furthest from its."
    assert told in Page(page.read_text()).text
    runs = dict(zip("abcd", load_sweep(sweep / "ablation").runs, strict=False))
    for run, ttft_s in zip(runs.values(), (5.0, 9.0, 5.5, 3.0), strict=True):
        run.summary["ttft_s"]["mean"] = ttft_s
    assert list(_timeline_choice(runs)) == ["a", "b", "d"]
    assert list(_timeline_choice(dict(list(runs.items())[:3]))) == ["a", "b", "c"]
    runs["d"].manifest["digest"] = runs["b"].manifest["digest"] = "one"
    assert list(_timeline_choice(runs)) == ["a", "b", "c"], "b and d took the same decisions"
    assert list(_timeline_choice({name: runs[name] for name in "abd"})) == ["a", "b", "d"]


def test_a_timeline_is_chosen_from_all_arms_though_few_have_curves(sweep, monkeypatch):
    monkeypatch.setattr("analysis.reports.figures._MAX_CURVES", 2)
    arms, shown = infer_arms(load_sweep(sweep / "ablation").runs), {}
    for arm, ttft_s in zip(arms, (5.0, 5.1, 5.2, 9.0), strict=True):
        for run in arm.runs:
            run.summary["ttft_s"]["mean"] = ttft_s
    monkeypatch.setattr(Sections, "plot", lambda _, draw, name, *__: shown.setdefault(name, [*draw.args[0]]))
    run_plots(Sections(sweep, sweep), {"": arms}, arms[0], ReportInput(arms))
    names = [arm.name for arm in arms]
    assert shown == {"latency_cdf": names[:2], "timeline": [names[0], *names[2:]]}
    for run in [run for arm in arms for run in arm.runs]:
        run.summary["num_requests"] = 500
    run_plots(Sections(sweep, sweep), {"": arms}, arms[0], ReportInput(arms))
    assert shown["latency_over_time"] == shown["timeline"], "of many requests also over time"


def test_without_a_place_for_its_figures_there_is_no_page(tmp_path, monkeypatch):
    monkeypatch.setattr("analysis.reports.report._pages", lambda *_: ("html", "text"))
    (tmp_path / "page_files").touch()
    write_run(tmp_path / "run", **FEW)
    with pytest.raises(FileExistsError):
        write_report(ReportInput(infer_arms([load_run(tmp_path / "run")])), tmp_path / "page.html")
    assert not list(tmp_path.glob("page.*"))


def test_of_two_reports_into_one_place_at_once_each_is_whole(tmp_path, monkeypatch):
    write_run(tmp_path / "run", **FEW)
    report, others = ReportInput(infer_arms([load_run(tmp_path / "run")])), [tmp_path / "page.html"]

    def pages(report: ReportInput, sections: Sections) -> tuple[str, str]:
        (sections.part / "timeline.png").write_text(str(len(others)))
        if others:
            write_report(report, others.pop())
        return "html", "text"

    monkeypatch.setattr("analysis.reports.report._pages", pages)
    write_report(report, tmp_path / "page.html")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "page.html", "page.md", "page_files"}
    assert (tmp_path / "page_files" / "timeline.png").read_text() == "1", "the last one's stays"


def test_figures_lie_beside_the_page_in_both_formats(page):
    files = {path.name for path in page.with_name("report_files").iterdir()}
    stems = {"latency_cdf", "timeline", "ablation_0", "sim_versus_real"}
    figures = {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    assert files == figures | {"comparisons.csv"}
    for target in re.findall(r"!\[.*?\]\((.*?)\)", page.with_suffix(".md").read_text()):
        assert (page.parent / target).exists()


@pytest.mark.usefixtures("unrendered")
def test_without_a_real_run_the_page_says_that_nothing_was_measured(sweep, tmp_path):
    folders = [path for path in (sweep / "ablation").iterdir() if path.name.endswith("-0")]
    path = report_from_folders(folders, tmp_path / "one_seed.html", baseline="prefill_first, prefix caching off")
    text = " ".join(Page(path.read_text()).text.split())
    assert "No real run was given." in text
    assert "There is one replicate. Changes are relative; their 95 % intervals are of a circular-block" in text
    assert "one replicate: nothing says how the result varies between traces" in text


@pytest.mark.usefixtures("unrendered")
def test_a_noisy_machine_is_told_first(tmp_path):
    pair = Pair("p", *[load_run(write_run(tmp_path / kind, kind, num_requests=8)) for kind in ("sim", "real")])
    errors = {"p": fidelity.error_table(pair.sim, pair.real)}
    calm = fidelity_findings.fidelity_findings([pair], errors, {}, 0.02, {"ttft_s.p99": 0.1})
    noisy = fidelity_findings.fidelity_findings([pair], errors, {}, 0.02, {"ttft_s.p50": 0.8})
    assert "a smaller error cannot be told from that" in calm[-1]
    assert not any("smaller error" in text for text in noisy)
    assert fidelity_findings.too_noisy({"ttft_s.p50": 0.1}, is_scaled=False) == []
    assert fidelity_findings.too_noisy({}, is_scaled=False) == []
    assert not fidelity_findings.too_noisy({"ttft_s.p99": 0.8}, is_scaled=False), "the worst of few requests"
    write_runs(tmp_path / "all", chunked=BOTH, **FEW)
    for name, noise in (("real", 0.1), ("real-again", 0.8)):
        write_run(tmp_path / "all" / name, "real", num_requests=10, noise=noise)
    path = report_from_folders([tmp_path / "all"], tmp_path / "report.html")
    before = path.with_suffix(".md").read_text().partition("**Before you read on**")[2]
    said = [line for line in before.splitlines() if line.startswith("- ")]
    assert re.search(r"two equal real runs differed by up to .* % in .*\. Run it again", said[0])
    text = Page(path.read_text()).text
    assert text.index("Run it again") < text.index("There is one replicate.")


@pytest.mark.usefixtures("unrendered")
def test_what_failed_or_was_ignored_is_told_first_with_its_arm(tmp_path):
    write_runs(tmp_path / "runs", chunked=BOTH, **FEW)
    write_run(tmp_path / "runs" / "cut", chunked=True, seed=1, stop_s=0.2, **FEW)
    runs = load_sweep(tmp_path / "runs").runs
    first = next(run for run in runs if run.path.name == "False")
    first.summary["finish_reasons"]["ignored"] = 3
    (first.path / "summary.json").write_text(json.dumps(first.summary))
    text = report_from_folders([tmp_path / "runs"], tmp_path / "report.html").with_suffix(".md").read_text()
    before, _, judged = text.partition("**Before you read on**")[2].partition("## Setup")
    assert "1 run of decode_first" in before
    assert "failed or did not end, and is left out (runs/cut: " in before
    assert "prefill_first ignored 3 of 10 requests (they can never fit, or nothing admits them)" in before
    (arm,) = re.findall(r"^\| decode_first \| (.*) \|", judged.partition("**Latency**")[2], re.MULTILINE)[:1]
    assert all(cell.endswith("<br>not comparable") for cell in arm.split(" | ")), "with an arm that ignored requests"
    assert "| records | fair | 1 of the runs failed or did not end" in text
    assert not re.search(r"\| load \| good", text)


def test_a_real_engine_that_tells_no_policies_apart_is_said_so(tmp_path):
    runs = {name: load_run(write_run(tmp_path / name, num_requests=8)) for name in ("a", "b")}
    ranking = fidelity.ranking_agreement({name: (run, run) for name, run in runs.items()})
    assert {row[3].text for row in tables.ranking_table(ranking, "").rows} == {"none told apart"}
    (errors,) = tables.error_tables({name: fidelity.error_table(run, run) for name, run in runs.items()})
    assert errors.headers == ("metric", "a", "b")
    assert errors.rows[0][1].notes == (fmt.change(0.0),)
    assert " → " in errors.rows[0][1].text


def test_no_table_is_wider_than_a_page_of_1280_pixels(page, tmp_path):
    """With ten columns of numbers the last are cut."""
    run = load_run(write_run(tmp_path / "run", num_requests=8))
    many = tables.error_tables({f"pair {i}": fidelity.error_table(run, run) for i in range(20)})
    assert [len(table.headers) for table in many] == [10, 10, 3]
    assert [name for table in many for name in table.headers[1:]] == [f"pair {i}" for i in range(20)]
    heads = re.findall(r"<thead><tr>(.*?)</tr>", page.read_text())
    assert len(heads) > 8
    assert max(head.count("<th>") for head in heads) <= 10


@pytest.mark.usefixtures("unrendered")
def test_whether_the_simulator_picks_the_winner_is_said_first(tmp_path):
    sims, reals = (
        map(load_run, write_runs(tmp_path / kind, kind, chunked=BOTH, num_requests=60, rate=20.0))
        for kind in ("sim", "real")
    )
    pairs = [Pair(f"chunked {on}", *both) for on, *both in zip(BOTH, sims, reals, strict=True)]
    write_report(ReportInput(infer_arms([pair.sim for pair in pairs]), pairs), tmp_path / "report.html")
    said = [line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("- ")]
    first = next(line for line in said if "simulator" in line)
    assert re.search(
        r"On this trace the simulator picks the real engine's best policy in (\d+) of the \1 metrics", first
    )
    ranking = fidelity.ranking_agreement({pair.label: (pair.sim, pair.real) for pair in pairs})
    swapped = ranking.assign(sim_winner="chunked False", same_winner=False, regret=0.034)
    (missed,) = fidelity_findings.winners({"9 requests/s": swapped}, {"ttft_s.mean": 0.1})
    assert missed.startswith("At 9 requests/s the simulator picks the real engine's best policy in 0 of the ")
    assert missed.count("(chunked False, on the engine 3.4 % behind chunked ") == 3
    assert missed.endswith(" more.")
    assert "each policy ran once" in first
    assert "each policy ran once" not in missed
    (none,) = fidelity_findings.winners({"": ranking.assign(winner_is_clear=False)}, {})
    assert "tells no policy apart as the best" in none


def test_swap_space_is_not_told_where_no_run_swapped(page):
    assert "CPU KV blocks" not in page.read_text()


@pytest.mark.usefixtures("unrendered")
def test_a_single_run_is_described_not_compared(tmp_path):
    path = report_from_folders([write_run(tmp_path / "run", num_requests=10)], tmp_path / "report.html")
    text = Page(path.read_text()).text
    assert "Run report" in text
    assert re.search(
        r"decode_first with tiny on cpu \(sim\), 10 requests at [\d.]+ req/s: TTFT [\d.]+ ms in the mean", text
    )
    assert "No other arm ran on its trace, so nothing is compared" in text
    assert "Baseline" not in text
    assert "What happened inside" in text
    assert "means over" not in text
    kept = report_from_folders([tmp_path / "run"], tmp_path / "slo.html", slo={"ttft_s": 0.03})
    said = Page(kept.read_text()).text
    assert re.search(r"\d+ % \[[\d.]+ %, [\d.]+ %\] of its requests kept the SLO: goodput [\d.]+ req/s", said)
    assert "The interval (Wilson's) takes requests as independent, which they are not as they queue" in said


def test_tables_without_intervals_say_that_they_have_means(page):
    captions = re.findall(r"<caption>(.*?)</caption>", page.read_text())
    assert {"What happened inside (means over replicates)", "Latency"} <= set(captions)


def test_arms_and_factors_are_inferred_from_what_was_swept(sweep):
    arms = infer_arms(load_sweep(sweep / "ablation").runs)
    assert [arm.name for arm in arms] == [
        "prefill_first, prefix caching off",
        "prefill_first, prefix caching on",
        "decode_first, prefix caching off",
        "decode_first, prefix caching on",
    ]
    assert level_groups(arms) == [("scheduler.name",), ("cache.prefix_caching",)]
    assert find_arm(arms, "decode_first, prefix caching on") is arms[3]
    with pytest.raises(RunFolderError, match="2 arms have it in their names; the arms are: "):
        find_arm(arms, "decode_first")
    pairs = infer_pairs(load_sweep(sweep / "pairs").runs)
    assert {pair.label for pair in pairs} == {"prefill_first", "decode_first"}
    assert all(pair.sim.config["scheduler"] == pair.real.config["scheduler"] for pair in pairs)


def test_main_effects_average_over_the_other_factor(sweep):
    arms = infer_arms(load_sweep(sweep / "ablation").runs)
    effects = main_effects(arms, arms[0], LATENCY[:1])
    assert [(e.factor, len(e.pairs)) for e in effects] == [("scheduler.name", 2), ("cache.prefix_caching", 2)]
    caching = effects[1].comparison
    cells = [compare([arms[i], arms[i + 1]], arms[i], LATENCY[:1])[0].estimate.value for i in (0, 2)]
    assert caching.estimate.value == pytest.approx(sum(cells) / 2)
    assert caching.estimate.value < 0


@pytest.mark.usefixtures("unrendered")
def test_a_fleet_names_its_replicas_and_router_and_one_engine_none(tmp_path):
    for router in ("random", "round_robin"):
        folder = write_run(tmp_path / router, **FEW)
        change_config(folder, fleet__router=router)
        change_manifest(folder, num_replicas=4, router=router)
    write_run(tmp_path / "alone" / "run", **FEW)
    fleet = report_from_folders([tmp_path / "random", tmp_path / "round_robin"], tmp_path / "f.html")
    text = fleet.with_suffix(".md").read_text()
    assert re.search(r"\| replicas[^|]*\| 4 \|", text)
    assert re.search(r"\| router \| random; round_robin \|", text)
    assert "busiest replica over mean" in text
    alone = report_from_folders([tmp_path / "alone"], tmp_path / "a.html").with_suffix(".md").read_text()
    assert "replica" not in re.sub(r"replicate", "", alone)


@pytest.mark.usefixtures("unrendered")
def test_a_markdown_report_has_no_empty_section(tmp_path):
    write_run(tmp_path / "run", "real", **FEW)
    text = report_from_folders([tmp_path], tmp_path / "report.html", slo={"ttft_s": 1.0}).with_suffix(".md").read_text()
    sections = dict(part.partition("\n")[::2] for part in text.split("\n## ")[1:])
    assert list(sections) == ["Answer", "Setup", "Ablation", "Distributions and time", "Reproduce"]
    assert all(body.strip() for body in sections.values())


def test_a_run_that_left_no_configuration_is_called_what_its_sweep_gave_it(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"swept": {"cache.watermark": "0.1", "seed": "3"}}))
    (said,) = lost([], [(tmp_path, "config.yaml missing")], tmp_path)
    assert said == "1 run of watermark 0.1 failed or did not end, and is left out (.: config.yaml missing)."


def test_runs_of_one_class_that_failed_are_told_apart_by_its_arguments(tmp_path):
    change_config(write_run(tmp_path / "done", **FEW), scheduler__queue_order="fcfs")
    arms, missing = infer_arms([load_run(tmp_path / "done")]), []
    for num in (2, 3):
        folder = write_run(tmp_path / str(num), **FEW)
        change_config(folder, scheduler__queue_order={"_target_": "mine.Own", "n": num})
        missing.append((folder, "TypeError"))
    assert [text.partition(" failed")[0] for text in lost(arms, missing, tmp_path)] == [
        f"1 run of queue order Own(n={num})" for num in (2, 3)
    ]


def test_runs_that_an_interrupted_sweep_left_are_one_sentence(tmp_path):
    for eviction in ("lru", "fifo"):
        change_config(write_run(tmp_path / "done" / eviction, **FEW), cache__eviction=eviction)
    arms = infer_arms(load_sweep(tmp_path / "done").runs)
    missing = []
    for num in range(1, 9):
        for seed in range(2):
            folder = tmp_path / f"{num}-{seed}"
            folder.mkdir()
            (folder / "manifest.json").write_text(json.dumps({"swept": {"cache.block_size": num}}))
            missing.append((folder, f"interrupted at {seed}" if num == 1 else "interrupted before it began"))
    (said,) = lost(arms, missing, tmp_path)
    assert said == (
        "16 runs of 8 arms failed or did not end, and are left out (1-0 and 1 more: interrupted at 0; 2-0 and 13 "
        "more: interrupted before it began)."
    )
    assert len([*lost(arms, missing[:4], tmp_path)]) == 2, "an arm each"


def test_a_busy_machine_of_the_real_run_of_a_pair_is_told_first(tmp_path):
    """Else what the machine did would be told as the simulator's error."""
    for kind in ("sim", "real"):
        write_run(tmp_path / kind, kind, num_requests=8)
    busy = {"notes": ["BUSY MACHINE: for 52 % of the time this run waited for a core"]}
    change_manifest(tmp_path / "real", replay=busy, host={"core_wait_share": 0.52})
    text = report_from_folders([tmp_path], tmp_path / "report.html").with_suffix(".md").read_text()
    first = text.partition("**Before you read on**")[2].partition("## ")[0]
    assert "BUSY MACHINE: for 52" in first


@pytest.mark.usefixtures("unrendered")
def test_one_point_of_a_sweep_is_reported_without_the_baseline_of_the_sweep(tmp_path):
    folder = write_run(tmp_path / "run", num_requests=8)
    change_config(folder, report={"baseline": "another arm"})
    page = report_from_folders([folder], tmp_path / "report.html").with_suffix(".md")
    assert "nothing is compared" in page.read_text()
    assert pd.read_csv(tmp_path / "report_files" / "comparisons.csv").empty
    with pytest.raises(RunFolderError, match="baseline 'yet another': no arm is called so"):
        report_from_folders([folder], tmp_path / "named.html", baseline="yet another")


def test_each_change_of_the_tables_is_a_row_of_numbers(page):
    rows = pd.read_csv(page.with_name("report_files") / "comparisons.csv")
    text = page.with_suffix(".md").read_text()
    by_arm = rows[rows.baseline.notna() & rows["class"].isna()]
    assert by_arm.groupby("arm").size().tolist() == [9, 9, 9], "arms x metrics"
    steps = {arm.partition(", with ")[0] for arm in rows[rows.baseline.isna()].arm}
    assert steps == {"scheduler decode_first instead of prefill_first", "prefix caching on instead of off"}
    assert set(rows["class"].dropna()) == {"tenant a", "tenant b"}
    known = rows[(rows.unit == "%") & rows.low.notna()]
    assert len(known) > 20
    for row in known.itertuples():
        change, low, high = (end.removesuffix(f"{fmt.SPACE}%") for end in fmt.changes((row.change, row.low, row.high)))
        between = "<br>" if pd.isna(row.baseline) else " "
        assert f"{change}{fmt.SPACE}%{between}[{low},{fmt.SPACE}{high}]" in text, row
        assert row.verdict.partition(" ")[0] in text
    assert (rows.p_corrected.dropna() >= rows.p[rows.p_corrected.notna()]).all()
    assert (known[known.p_corrected < 0.05].verdict != "inside the noise").all()
