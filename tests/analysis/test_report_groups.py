"""Which runs a report compares, in which groups, and what it says of those that it cannot compare."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from analysis import format as fmt
from analysis.comparison.arms import Arm, infer_arms
from analysis.comparison.compare import LATENCY, Metric, compare
from analysis.comparison.groups import experiments
from analysis.comparison.pairs import Pair, infer_pairs
from analysis.load import load_run, load_sweep
from analysis.reports import tables
from analysis.reports.parts import ReportInput
from analysis.reports.report import report_from_folders, write_report
from testbed.errors import RunFolderError
from tests.analysis.page import Page
from tests.analysis.runs import change_config, change_manifest, write_run, write_runs

FEW = {"num_requests": 10}
BOTH = [False, True]


@pytest.mark.usefixtures("unrendered")
def test_loads_become_conditions_and_a_curve(tmp_path):
    write_runs(tmp_path, rate=[10.0, 4.0], chunked=BOTH, num_requests=25)
    path = report_from_folders([tmp_path], tmp_path / "report.html")
    text = Page(path.read_text()).text
    assert text.index("Latency at rate = 4") < text.index("Latency at rate = 10")
    assert (tmp_path / "report_files" / "throughput_latency.svg").exists()


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("seeds", [2, 3])
def test_replicates_are_counted_at_each_load(tmp_path, seeds):
    write_runs(tmp_path, rate=[4, 10], chunked=BOTH, seed=[*range(seeds)], num_requests=8)
    text = report_from_folders([tmp_path], tmp_path / "r.html").with_suffix(".md").read_text()
    assert f"There are only {seeds} replicates" in text


@pytest.mark.usefixtures("unrendered")
def test_of_a_mixture_the_largest_experiment_is_reported_and_the_others_are_named(tmp_path):
    for chunked, rates in ((False, [10.0]), (True, [6.0, 10.0])):
        write_runs(tmp_path / "a" / str(chunked), seed=[0, 1], chunked=chunked, rate=rates, **FEW)
    for scale in (1.0, 2.0):
        folder = write_run(tmp_path / "b" / f"x{scale}", num_requests=12)
        change_config(folder, cost__name="linear", trace__rate_scale=scale)
    write_run(tmp_path / "c" / "sim", seed=9, num_requests=10)
    write_run(tmp_path / "c" / "real", "real", seed=9, num_requests=10, noise=0.1)
    write_run(tmp_path / "c" / "real-again", "real", seed=9, num_requests=10, noise=0.5)
    path = report_from_folders([tmp_path], tmp_path / "report.html", baseline="prefill_first")
    text = " ".join(Page(path.read_text()).text.split())
    assert re.search(r"2 runs at or below b are another experiment \(other [^)]*trace.num_requests[^)]*\)", text)
    assert "At rate = 6 the baseline is decode_first: prefill_first has no run there." in text
    assert "Latency at rate = 10" in text
    assert "run again on one trace" in text


@pytest.mark.usefixtures("unrendered")
def test_of_points_that_one_sweep_made_twice_the_newest_count(tmp_path):
    for day, memory in ((1, 8), (2, 9)):
        for folder in write_runs(tmp_path / "s", chunked=BOTH, seed=[0, 1], **FEW):
            point = folder.rename(folder.with_name(f"{folder.name}-{day}"))
            given = {"scheduler": folder.name, "slo.ttft_s": f"{day}"}
            change_manifest(point, given=given, sweep="testbed run -m", created=f"2026-12-0{day}")
            change_config(point, device__memory_bytes=memory)
    text = report_from_folders([tmp_path], tmp_path / "r.html").with_suffix(".md").read_text()
    newer = "the same sweep has newer ones of the same settings, of other defaults (device.memory_bytes)."
    assert f"- 4 runs left out: {newer}" in text
    assert "another experiment" not in text
    assert "s/True-1-2 |" in text
    assert "-1 |" not in text


@pytest.mark.usefixtures("unrendered")
def test_an_arm_that_lacks_a_load_is_named_before_the_findings(tmp_path):
    write_runs(tmp_path, rate=[6.0, 8.0, 10.0], watermark=0.01, **FEW)
    write_run(tmp_path / "another", rate=6.0, watermark=0.1, **FEW)
    text = report_from_folders([tmp_path], tmp_path / "report.html").with_suffix(".md").read_text()
    said, _, rest = text.partition("## Setup")
    assert "- There is no run of watermark 0.1 at rate = 8 and rate = 10." in said
    assert "no run of" not in rest


@pytest.mark.usefixtures("unrendered")
def test_routers_are_arms_of_one_experiment_though_not_each_of_them_ran_under_every_policy(tmp_path):
    places = [("round_robin", "lru"), ("round_robin", "lfu"), ("prefix_affinity", "lru")]  # the fourth did not end
    for router, eviction in places:
        folder = write_run(tmp_path / f"{router}-{eviction}", **FEW)
        change_config(folder, backend__router=router, cache__eviction=eviction)
    router = {"_target_": "mine.Router", "measure": "tokens"}
    change_config(write_run(tmp_path / "own", **FEW), backend__router=router, cache__eviction="lru")
    runs = load_sweep(tmp_path).runs
    assert [len(group) for group in experiments(runs)] == [4]
    text = report_from_folders([tmp_path], tmp_path / "r.html").with_suffix(".md").read_text()
    assert "another experiment" not in text


def test_a_measured_fleet_is_paired_with_the_simulated_one_of_its_router_and_size(tmp_path):
    fleets = [("round_robin", 2), ("prefix_affinity", 2), ("prefix_affinity", 4)]
    for router, num in fleets:
        for kind in ("sim", "real"):
            folder = write_run(tmp_path / f"{router}-{num}" / kind, kind, **FEW)
            change_config(folder, backend__router=router, backend__num_replicas=num)
    pairs = infer_pairs(load_sweep(tmp_path).runs)
    assert [pair.sim.path.parent for pair in pairs] == [pair.real.path.parent for pair in pairs]
    assert len(pairs) == len(fleets)


@pytest.mark.usefixtures("unrendered")
def test_a_folder_that_was_named_is_never_left_out_in_silence(tmp_path):
    write_runs(tmp_path / "a", chunked=BOTH, **FEW)
    change_config(write_run(tmp_path / "b", seed=7, num_requests=12), device__name="a100")
    with pytest.raises(
        RunFolderError, match=r"b is another experiment .*device.*; report it by itself: testbed report"
    ):
        report_from_folders([tmp_path / "a", tmp_path / "b"], tmp_path / "report.html")
    write_run(tmp_path / "a" / "real", "real", chunked=False, prefix_caching=False, **FEW)
    change_config(tmp_path / "a" / "real", cache__eviction="lfu")
    text = report_from_folders([tmp_path / "a"], tmp_path / "report.html").with_suffix(".md").read_text()
    before = text.partition("**Before you read on**")[2].partition("## Setup")[0]
    assert "1 run at or below a/real is another experiment" in before


@pytest.mark.usefixtures("unrendered")
def test_two_traces_are_a_section_each_by_the_fewest_words(tmp_path):
    for name, num, seed in (("azure", 30, 1), ("burstgpt", 40, 2)):
        for folder in write_runs(tmp_path / name, num_requests=num, seed=seed, chunked=BOTH):
            change_config(folder, trace__name=name, trace__path=f"{name}.csv", trace__limit=num, seed=0)
    text = report_from_folders([tmp_path], tmp_path / "report.html").with_suffix(".md").read_text()
    assert "The loads are different traces, each to be read by itself: they differ in num_requests, path" in text
    assert not (tmp_path / "report_files" / "throughput_latency.svg").exists(), "no curve joins two traces"
    titles = [line for line in text.partition("\n## Ablation\n")[2].splitlines() if line.startswith("### ")]
    for title, name in zip(titles, ("azure", "burstgpt"), strict=True):
        assert re.fullmatch(rf"### trace = {name} \([\d.]+ requests/s\)", title), "their rates differ"


def test_all_pairs_share_a_cost_model_where_they_can(tmp_path):
    change_config(write_run(tmp_path / "another-sim", num_requests=8), cost__path="another.json")
    for chunked in (False, True):
        change_config(write_run(tmp_path / f"sim-{chunked}", chunked=chunked, num_requests=8), cost__path="one.json")
        write_run(tmp_path / f"real-{chunked}", "real", chunked=chunked, num_requests=8)
    pairs = infer_pairs(load_sweep(tmp_path).runs)
    assert {pair.sim.path.name for pair in pairs} == {"sim-False", "sim-True"}


def test_a_crossed_sweep_over_the_trace_or_the_device_is_one_experiment(tmp_path):
    for device in ("h100", "a100"):
        for folder in write_runs(tmp_path / device, chunked=BOTH, num_requests=8):
            change_config(folder, device__name=device)
    (members,) = experiments(load_sweep(tmp_path).runs)
    assert len(infer_arms(members)) == 4


def test_runs_that_differ_only_in_permissions_are_one_arm(tmp_path):
    for index, folder in enumerate(write_runs(tmp_path, seed=[0, 1], num_requests=8)):
        change_config(folder, overwrite=bool(index), allow_ignored=bool(index), experiment=f"e{index}")
    assert [len(arm.runs) for arm in infer_arms(load_sweep(tmp_path).runs)] == [2]


def test_when_nothing_can_be_compared_the_message_is_short_and_names_the_keys(tmp_path):
    for chunked in (False, True):
        write_run(tmp_path / str(chunked), chunked=chunked, seed=int(chunked), num_requests=8)
    with pytest.raises(RunFolderError, match=r"different traces \(other seed\)\. Report them separately") as caught:
        report_from_folders([tmp_path], tmp_path / "report.html")
    assert len(str(caught.value)) <= 300


@pytest.mark.usefixtures("unrendered")
def test_the_rate_of_a_synthetic_trace_has_a_unit(tmp_path):
    for folder in write_runs(tmp_path, rate=[4.0, 10.0], num_requests=8):
        change_config(folder, trace__name="synthetic", trace__max_turns=5)
    path = report_from_folders([tmp_path], tmp_path / "report.html")
    assert "Latency at rate = 4 sessions/s" in Page(path.read_text()).text


def test_arms_on_different_traces_are_refused(tmp_path):
    runs = [load_run(folder) for folder in write_runs(tmp_path, seed=[0, 1], num_requests=8)]
    arms = [Arm(f"arm {n}", {"n": n}, (run,)) for n, run in enumerate(runs)]
    with pytest.raises(RunFolderError, match="different traces"):
        write_report(ReportInput(arms), tmp_path / "report.html")
    with pytest.raises(RunFolderError, match="different traces"):
        write_report(ReportInput(arms[:1], [Pair("p", runs[0], runs[1])]), tmp_path / "report.html")
    with pytest.raises(RunFolderError, match="at least one arm"):
        write_report(ReportInput([]), tmp_path / "report.html")
    with pytest.raises(RunFolderError, match="no run folder given"):
        report_from_folders([], tmp_path / "report.html")


def test_an_arm_equal_to_the_baseline_is_called_identical(tmp_path):
    runs = tuple(map(load_run, write_runs(tmp_path, seed=[0, 1], **FEW)))
    arms = [Arm("base", {}, runs), Arm("same", {}, runs)]
    assert {row.verdict for row in compare(arms, arms[0], LATENCY)} == {"identical"}


def test_the_names_of_replicates_cost_one_reading_of_the_configurations(tmp_path, monkeypatch):
    write_runs(tmp_path, chunked=BOTH, seed=[0, 1, 2], **FEW)
    arms, read = infer_arms(load_sweep(tmp_path).runs), []
    links = {str(run.path): "" for arm in arms for run in arm.runs}
    swept_keys = tables.swept_keys
    monkeypatch.setattr(tables, "swept_keys", lambda runs: read.append(len(runs)) or swept_keys(runs))
    assert [name for _, name, _ in tables.runs_table({"": arms}, links)] == ["seed 0", "seed 1", "seed 2"] * 2
    assert read == [6], "of all runs, once"
    loads = {"rate = 1": arms[:1], "rate = 2": arms[1:]}
    assert [name for _, name, _ in tables.runs_table(loads, links)][2:4] == ["rate = 1, seed 2", "rate = 2, seed 0"]


def test_a_class_of_ones_own_is_told_once_with_every_value_of_its_parameters(tmp_path):
    """Not once for each preset, rate and seed."""
    for place, folder in enumerate(write_runs(tmp_path, chunked=BOTH, seed=[0, 1], **FEW)):
        change_config(folder, cost={"_target_": "mine.Noisy", "of": "roofline", "seed": place % 2})
        if place >= 2:  # decode_first
            change_config(folder, model__dtype="float16", device__name="other", device__num_sms=1)
            change_config(folder, scheduler__victim={"_target_": "mine.Last"}, scheduler__watermark=0.01)
        change_manifest(folder, identity={"classes": {"mine": "0123456789"}})
    rows = {row[0].text: row[1].text for row in tables.setup_table("", load_sweep(tmp_path).runs).rows}
    assert rows["the arms differ in"] == (
        "scheduler.name prefill_first/decode_first; scheduler.victim._target_ null/mine.Last; "
        "scheduler.watermark null/0.01; model.dtype null/float16"
    )
    assert "; rates: until the last request came, " in rows["time base"]
    assert rows["classes of one's own"] == (
        "cost = mine.Noisy(of=roofline, seed=0/1), file 01234567; "
        "decode_first: scheduler.victim = mine.Last(), file 01234567"
    )


def test_the_setup_has_the_preset_and_what_every_command_gave_in_no_arm_s_name(tmp_path):
    for place, folder in enumerate(write_runs(tmp_path, chunked=BOTH, **FEW)):
        given = {"scheduler": "vllm_v0", "scheduler.queue_order": "sjf", "cache.watermark": str(place), "seed": "3"}
        change_manifest(folder, scheduler="vllm_v0", given=given)
    rows = {row[0].text: row[1].text for row in tables.setup_table("", load_sweep(tmp_path).runs).rows}
    assert (rows["scheduler"], rows["given to all runs"]) == ("vllm_v0", "scheduler.queue_order=sjf")


def test_what_is_equal_in_all_arms_takes_no_column(tmp_path):
    metrics = [Metric(name, name, 0, fmt.number) for name in ("sent", "preempted", "swapped", "unknown")]
    arms = []
    for place, folder in enumerate(write_runs(tmp_path, chunked=BOTH, **FEW)):
        run = load_run(folder)
        run.summary.update(sent=40, preempted=place, swapped=0, unknown=None)
        arms.append(Arm(str(place), {}, (run,)))

    def told(arms, metrics):
        table = tables.ablation_table("", arms, metrics, (), 0.02, None)
        return table.headers[1:], table.note

    assert told(arms, metrics) == (("preempted",), "The same in all arms: sent 40, swapped 0, unknown not recorded.")
    assert told(arms[1:], metrics) == (("sent", "preempted"), "Left out: swapped 0, unknown not recorded.")
    alike, took = (metrics[0], metrics[2], metrics[3]), Metric("took", "took", 0, fmt.seconds)
    assert told(arms, [*alike, took]) == (
        ("sent", "swapped"), "The same in all arms: unknown not recorded, took not recorded."
    ), "what is known is not hidden"  # fmt: skip
    assert told(arms, metrics[:1]) == (("sent",), ""), "a table has a column"
    assert told(arms, [*LATENCY[:1], metrics[2]])[0] == (LATENCY[0].label,)
    assert told(arms[1:], [replace(metrics[2], better=1), metrics[3]])[0] == ("swapped",), "a goodput of 0 is a result"


@pytest.mark.usefixtures("unrendered")
def test_two_versions_of_one_class_are_arms_named_by_their_folders(tmp_path):
    folders = [tmp_path / "rel1", tmp_path / "rel2"]
    for folder, chunked in zip(folders, BOTH, strict=True):
        for seed in range(3):
            run = write_run(folder / str(seed), chunked=chunked, seed=seed, num_requests=20)
            change_config(run, scheduler={"name": "mine"})
            identity = {"config": str(seed), "classes": {"mine": str(chunked)}, "code": "a"}
            change_manifest(run, identity=identity, scheduler="mine")
    for given in (folders, [run for folder in folders for run in sorted(folder.iterdir())]):
        text = report_from_folders(given, tmp_path / "r.html").with_suffix(".md").read_text()
        assert "How does rel2 differ from rel1 on the same trace?" in text
        assert text.count("Baseline: rel1,") == 1
        assert "the arms differ in | version.name rel1/rel2" in text
        assert "changed, and what looks like" not in text
    text = report_from_folders([tmp_path], tmp_path / "r.html").with_suffix(".md").read_text()
    assert "versions to compare: from a folder each, and report on these folders" in text
    for run in folders[1].iterdir():
        change_manifest(run, identity={"config": run.name, "classes": {"mine": "False"}, "code": "a"})
    text = report_from_folders(folders, tmp_path / "same.html").with_suffix(".md").read_text()
    assert "rel2" not in text.partition("## Runs")[0], "of one class, the same runs twice"
