"""What a report concludes holds: copies are no replicates, nothing varies unnamed, what says nothing is called so."""

from __future__ import annotations

import re
import shutil
from itertools import product
from pathlib import Path

import pytest

from analysis.comparison.arms import Arm, infer_arms
from analysis.comparison.compare import LATENCY, RATES, Comparison
from analysis.comparison.triggered import _never_used
from analysis.load import load_sweep
from analysis.measures.slo import SLO
from analysis.measures.statistics import Estimate
from analysis.reports.findings import limits
from analysis.reports.tables import ablation_table
from experiments.wiring.traces import build_trace
from testbed.traces.serialize import write_jsonl
from tests.experiments.kit import Say, config_of
from tests.experiments.report_kit import LOAD, TIGHT, answered, ran, ran_each, report
from tests.experiments.test_sweeps import sweep

pytestmark = pytest.mark.usefixtures("unrendered")  # words alone are looked at


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace in a file: seeds change nothing of it."""
    file = tmp_path_factory.mktemp("trace") / "recorded.jsonl"
    write_jsonl(build_trace(config_of((), trace__num_requests=150, trace__rate=60.0)), file)
    return file


def test_seeds_of_a_recorded_trace_are_no_replicates(recorded: Path, tmp_path: Path) -> None:
    trace = {"name": "jsonl", "path": str(recorded)}
    ran_each(tmp_path, num_seeds=3, trace=trace, cache=TIGHT)
    said = report(tmp_path)
    assert "4 of 6 runs repeat another one, decision for decision, and count once" in said
    assert "There is one replicate." in said
    assert "3 replicates" not in said
    assert "a seed makes no replicate of a trace that is recorded" in said


@pytest.mark.parametrize("how", ["windows", "bootstrap"])
def test_a_recorded_trace_is_replicated_by_windows_and_by_drawing(recorded: Path, tmp_path: Path, how: str) -> None:
    windows = [[{"name": "window", "start_s": start, "end_s": start + 0.8}] for start in (0.0, 0.8, 1.6)]
    for scheduler in ("vllm_v1", "sarathi"):
        for seed in range(3):
            steps = windows[seed] if how == "windows" else [{"name": "bootstrap"}]
            ran(
                tmp_path / f"{scheduler}-{seed}", trace={"name": "jsonl", "path": str(recorded), "transforms": steps},
                scheduler=scheduler, cache=TIGHT, seed=0 if how == "windows" else seed,
                report={"replicates": ["trace.transforms"]} if how == "windows" else {},
            )  # fmt: skip
    said = report(tmp_path)
    assert "over 3 replicates, paired on the same trace" in said
    assert "in one trace of ten, such as an overload, is in none of them with a chance of 73 %" in said
    assert "repeat another one" not in said


def test_a_random_policy_on_one_trace_is_one_observation(recorded: Path, tmp_path: Path) -> None:
    for order in ("fcfs", "random"):
        for seed in range(3):
            ran(
                tmp_path / f"{order}-{seed}", trace={"name": "jsonl", "path": str(recorded)}, seed=seed,
                scheduler={"name": "decode_first", "queue_order": order, "max_num_seqs": 8},
            )  # fmt: skip
    said = report(tmp_path)
    assert "2 of 6 runs repeat another one, decision for decision" in said
    assert "2 of 6 runs are on a trace that their arm had already. How a random policy varies on one" in said
    assert "There is one replicate." in said
    assert "| replicates | poor |" in said


def test_windows_at_two_loads_are_replicates_at_each(recorded: Path, tmp_path: Path) -> None:
    for scheduler in ("vllm_v1", "sarathi"):
        for scale in (1.0, 2.0):
            for number in range(3):
                length_s = 0.8 / scale
                step = {"name": "window", "start_s": length_s * number, "end_s": length_s * (number + 1)}
                ran(
                    tmp_path / f"{scheduler}-{scale}-{number}", scheduler=scheduler, cache=TIGHT,
                    trace={"name": "jsonl", "path": str(recorded), "rate_scale": scale, "transforms": [step]},
                    report={"replicates": ["trace.transforms"]},
                )  # fmt: skip
    said = report(tmp_path)
    assert said.count("over 3 replicates, paired on the same trace") == 1, "said once of both loads"
    assert len(re.findall(r"^### rate_scale = [12] \([\d.]+ requests/s\)$", said, re.MULTILINE)) == 2
    assert "| replicates | fair | 3 replicates, by window |" in said


@pytest.mark.parametrize("schedulers", [("vllm_v1",), ("prefill_first", "decode_first")])
def test_between_cost_models_a_report_compares_times_and_judges_no_policy(
    tmp_path: Path, schedulers: tuple[str, ...]
) -> None:
    for step_s in (0.002, 0.004):
        cost = {"name": "constant", "step_s": step_s}
        ran_each(tmp_path / str(step_s), schedulers, num_seeds=3, cost=cost, slo={"ttft_s": 0.02})
    answer = report(tmp_path).split("## Answer")[1].split("\n## ")[0]
    told = [line for line in answer.splitlines() if "step s 0.004" in line and "kept" not in line]
    assert any("longer in" in line for line in told), answer
    assert not [line for line in told if "better" in line or "worse" in line or "serves most" in line]


def test_a_setting_that_goes_along_with_another_is_named(tmp_path: Path) -> None:
    for scheduler, blocks in (("vllm_v1", 700), ("sarathi", 900)):
        ran(tmp_path / scheduler, scheduler=scheduler, cache={"num_gpu_blocks": blocks})
    said = report(tmp_path)
    limits = "max num seqs (128 in sarathi; 256 in vllm_v1), max num batched tokens (512 in sarathi; 2048 in vllm_v1)"
    assert f"their names say: {limits} and num gpu blocks (900 in sarathi; 700 in vllm_v1)." in said


def test_arms_that_share_a_value_are_named_by_the_level_that_they_share(tmp_path: Path) -> None:
    for scheduler, blocks in (("vllm_v1", 700), ("sarathi", 900)):
        for caching in (True, False):
            cache = {"num_gpu_blocks": blocks, "prefix_caching": caching}
            ran(tmp_path / f"{scheduler}{caching}", scheduler=scheduler, cache=cache)
    said = report(tmp_path)
    assert "The arms differ in more than their names say: max num seqs (128 in all with sarathi; 256 in all" in said
    assert " and num gpu blocks (900 in all with sarathi; 700 in all with vllm_v1)." in said


def test_a_pool_that_follows_from_memory_is_named_too(tmp_path: Path) -> None:
    ran_each(tmp_path)
    assert "512 in sarathi; 2048 in vllm_v1) and GPU KV blocks (" in report(tmp_path)
    ran_each(tmp_path / "same", ("vllm_v1", "vllm_v1_0_8"))
    assert "differ in more than" not in report(tmp_path / "same")


def test_what_holds_at_several_loads_and_for_several_levels_is_said_once(tmp_path: Path) -> None:
    for watermark, rate in product((0.0, 0.02, 0.1), (1.0, 2.0, 200.0)):
        trace = {**LOAD, "rate": rate, "num_requests": 30, "name": "synthetic"}
        cache = {"num_gpu_blocks": 400, "watermark": watermark}
        ran_each(tmp_path / f"{watermark}-{rate}", num_seeds=2, trace=trace, cache=cache)
    said = report(tmp_path, baseline="vllm_v1, watermark 0")
    why = "took the same decisions as watermark 0 at every step; what sets them apart was never triggered"
    loads = "rate = 1 requests/s and rate = 2 requests/s"
    assert f"- At {loads}, watermark 0.02 and watermark 0.1 {why}" in said
    assert said.count(why) == 1
    cautions = [line for line in said.splitlines() if "at every step; what sets" in line and "vllm_v1" in line]
    assert [line.partition(": “")[0] for line in cautions] == [f"- At {loads}"]


def test_where_no_value_can_be_compared_there_is_no_figure_of_changes(tmp_path: Path) -> None:
    ran_each(tmp_path, cache={"num_gpu_blocks": 2}, allow_ignored=True)
    said = report(tmp_path)
    assert "No request was served to its end" in said
    assert "Change against the baseline" not in said


def test_cautions_count_the_runs_at_every_load(tmp_path: Path) -> None:
    for rate, num in ((10.0, 60), (40.0, 120)):
        trace = {"name": "synthetic", "num_requests": num, "rate": rate}
        ran_each(tmp_path / str(rate), trace=trace, report={"warmup_s": 0.5})
    said = report(tmp_path)
    assert re.search(r"\(report.warmup_s\), \d+ of 360, count in no latency", said)
    assert re.search(r"A run has \d\d requests that ended", said)


def test_a_load_beyond_capacity_is_flagged(tmp_path: Path) -> None:
    for rate in (10.0, 400.0):
        ran_each(tmp_path / str(rate), trace={"num_requests": 300, "rate": rate}, cache=TIGHT)
    said = report(tmp_path)
    assert "At rate = 400 requests/s: Every arm is beyond capacity" in said
    assert "At rate = 10 requests/s: Every arm is beyond capacity" not in said
    assert "beyond the capacity of every arm at rate = 400 requests/s" in said
    assert "At rate = 400 requests/s: Until the last one came" not in said, "the presets serve in one order"


def test_what_was_not_recorded_is_said_to_be_so_and_has_no_table(tmp_path: Path) -> None:
    ran_each(tmp_path, record={"steps": False})
    said = report(tmp_path)
    assert "time of recompute not recorded, time of swaps not recorded." in said
    assert "not reached" not in said
    assert "How full the engine was" not in said


def test_beyond_capacity_a_rate_that_short_requests_served_first_make_is_told_from_a_faster_one(tmp_path: Path) -> None:
    for order in ("fcfs", "sjf"):
        scheduler = {"name": "vllm_v1", "queue_order": order}
        ran(tmp_path / order, scheduler=scheduler, trace={"num_requests": 600, "rate": 400.0}, cache=TIGHT)
    said = report(tmp_path)
    assert re.search(
        r"Until the last one came, queue order sjf has \+\d+ % requests/s and \+\d+ % output tokens/s against queue "
        r"order fcfs, but [+−]?\d(\.\d)? % requests/s over the whole runs: ", said
    ), said[:3000]  # fmt: skip
    assert "compare throughputs there" not in said


@pytest.mark.parametrize("faster", [20, 128])  # it is beyond capacity too, but serves more of all; it keeps up
def test_an_arm_that_is_faster_is_not_said_to_put_others_off(tmp_path: Path, faster: int) -> None:
    for num in (16, faster):
        scheduler = {"name": "vllm_v1", "max_num_seqs": num}
        ran(tmp_path / str(num), scheduler=scheduler, model="llama3.1_8b", trace={"num_requests": 150, "rate": 60.0})
    said = report(tmp_path, baseline="16")
    assert ("max num seqs 16 is" if faster == 128 else "Every arm is") + " beyond capacity" in said
    assert "compare throughputs there" in said


def test_one_factor_at_a_time_has_no_main_effects(tmp_path: Path) -> None:
    for name, changed in (
        ("base", {}), ("chunk", {"max_num_batched_tokens": 512}), ("seqs", {"max_num_seqs": 16}),
        ("order", {"queue_order": "sjf"}),
    ):  # fmt: skip
        for seed in range(2):
            scheduler = {"name": "decode_first", "oracle": "perfect", **changed}
            ran(tmp_path / f"{name}-{seed}", scheduler=scheduler, cache=TIGHT, seed=seed)
    said = report(tmp_path)
    assert "Main effects" not in said
    assert "On average over the other factors" not in said
    rows = said.partition("**Latency**")[2].partition("\n\n**")[0].splitlines()
    assert sum("[" in row for row in rows) == 3, "each arm against the baseline"


def test_a_goodput_that_falls_to_zero_is_told_in_requests_behind_who_keeps_the_slo(tmp_path: Path) -> None:
    """Prompts of 512 tokens in chunks of 16 take 32 steps, each as long as the limit."""
    trace = {**LOAD, "rate": 4.0, "num_requests": 30, "prompt": {"kind": "constant", "value": 512}}
    for budget in (2048, 16):
        for seed in range(3):
            scheduler = {"name": "sarathi", "max_num_batched_tokens": budget}
            ran(tmp_path / f"{budget}-{seed}", trace=trace, scheduler=scheduler, seed=seed)
    said = report(tmp_path, slo={"ttft_s": 0.02}, baseline="max num batched tokens 2048")
    first, second = [line for line in said.partition("## Answer")[2].splitlines() if line.startswith("- ")][:2]
    kept = "2048 keeps the SLO for 100 % of the requests in the mean over 3 replicates"
    assert first.endswith(f"{kept}, max num batched tokens 16 for 0 %.")
    assert re.search(r"worse in goodput \(from [\d.]+ req/s to 0 req/s\)", second)
    assert "−100 points<br>the same in all 3 replicates" in said, "of three no chance can be told"
    assert re.search(r"from [\d.]+ req/s to 0 req/s by \[−[\d.]+ req/s, −[\d.]+ req/s\]", said)
    assert "smaller than the simulator's" not in said


def test_an_effect_whose_size_depends_on_another_factor_is_told_so(tmp_path: Path) -> None:
    """Chunks cost many steps of a busy engine, and hardly any of one that serves a request at a time."""
    trace = {**LOAD, "num_requests": 40, "prompt": {"kind": "constant", "value": 512}}
    for budget in (2048, 64):
        for seqs in (64, 2):
            for seed in range(3):
                scheduler = {"name": "sarathi", "max_num_batched_tokens": budget, "max_num_seqs": seqs}
                ran(tmp_path / f"{budget}-{seqs}-{seed}", trace=trace, scheduler=scheduler, seed=seed)
    said = report(tmp_path)
    told = r"<br>depends on the other factors<br>[^|]* with max num seqs \d+<br>apart by .* \[.*\]"
    assert re.search(told, said.partition("**Main effects on latency")[2].partition("\n\n**")[0])
    assert " the effect depends on the other factors)" in said.partition("## Setup")[0]


def test_the_first_point_of_a_sweep_is_the_baseline_whenever_it_ran(tmp_path: Path, say: Say) -> None:
    arms = ("scheduler=vllm_v1,sarathi", "seed=0,1")
    sweep(say, tmp_path / "sweep", *arms)
    (first,) = [run.path for run in load_sweep(tmp_path / "sweep").runs if run.manifest["point"] == 0]
    shutil.rmtree(first)
    sweep(say, tmp_path / "sweep", *arms)
    arms = infer_arms(load_sweep(tmp_path / "sweep").runs)
    assert [arm.name for arm in arms] == ["vllm_v1", "sarathi"]
    assert [run.manifest["swept"] for run in arms[0].runs] == [
        {"scheduler": "vllm_v1", "seed": "0"}, {"scheduler": "vllm_v1", "seed": "1"}
    ]  # fmt: skip
    assert "Baseline: vllm_v1, the first point of the sweep" in report(tmp_path / "sweep")


def test_a_table_tells_every_metric_and_what_the_correction_took_back() -> None:
    metrics = (*LATENCY, *RATES)
    away = Estimate(0.1, 0.05, 0.15, 3, "paired t", "log_ratio", p_value=0.04)
    rows = [Comparison("b", metric, 1.0, away, "undecided", 0.2) for metric in metrics[:4]]
    rows += [Comparison("b", metric, 1.0, away, "higher", 0.01) for metric in metrics[4:6]]
    rows += [Comparison("b", metric, None, None, "unknown") for metric in metrics[6:]]
    told = ablation_table("", [Arm("a", {}, ()), Arm("b", {}, ())], metrics, rows, 0.02, None)
    assert told.headers == ("arm", *(metric.label for metric in metrics))
    told_all = ["undecided (corrected p = 0.2)"] * 4 + ["worse"] * 2 + ["not comparable"] * 3
    assert [cell.notes[-1] for cell in told.rows[1][1:]] == told_all


def test_the_deadlines_that_each_order_meets_are_compared_over_all_and_by_class(tmp_path: Path) -> None:
    classes = [{"tenant": "chat", "deadline_s": 0.3}, {"tenant": "batch", "deadline_s": 5.0}, {"tenant": "later"}]
    trace = LOAD | {"num_requests": 60, "transforms": [{"name": "label", "classes": classes}]}
    for order in ("fcfs", "edf"):
        ran(tmp_path / order, trace=trace, scheduler={"name": "vllm_v1", "queue_order": order, "max_num_seqs": 4})
    text = report(tmp_path, baseline="queue order fcfs")
    assert [line.count("deadlines met") for line in text.splitlines() if line.startswith("| arm |")].count(1) == 3, (
        "of all requests and of two classes"
    )
    for run in load_sweep(tmp_path).runs:
        rows = run.requests[run.requests["deadline_ns"].notna()]
        late_ns = rows["deadline_ns"] - rows["arrival_ns"]
        assert dict(zip(rows["tenant"], late_ns, strict=True)) == {"chat": 300_000_000, "batch": 5_000_000_000}
        met = rows["e2e_s"] <= late_ns / 1e9
        assert run.summary["deadlines"]["num_met"] == met.sum() > 0
        assert run.summary["classes"]["deadlines_met"] == met.groupby(rows["tenant"]).mean().to_dict()


def test_an_order_by_deadlines_of_a_trace_without_them_is_told_by_that(tmp_path: Path) -> None:
    for order in ("fcfs", "edf"):
        ran(tmp_path / order, trace=LOAD | {"num_requests": 40}, scheduler={"name": "vllm_v1", "queue_order": order})
    (told,) = answered(report(tmp_path, baseline="queue order fcfs"))
    assert told.startswith("- queue order edf took the same decisions as queue order fcfs at every step; what sets ")
    assert told.endswith(" and all have one deadline after arrival, or none.")
    runs, orders = load_sweep(tmp_path).runs, {"fcfs", "priority", "edf"}
    (limit,) = limits([], infer_arms(runs), SLO(lateness_s=0.0))
    assert limit.startswith("2 of 2 runs recorded no deadline: the limit on lateness")
    told_of_each = ["all have one priority", "all have one deadline after arrival, or none"]
    assert _never_used("scheduler.queue_order", orders, runs)[-2:] == told_of_each
    runs[0].manifest["trace"]["differ_in"] = ["deadline"]
    assert not {*told_of_each} & {*_never_used("scheduler.queue_order", orders, runs)}, (
        "one priority does not say why edf was alike"
    )


def test_of_several_arms_with_replicates_the_one_that_has_a_single_one_is_named(tmp_path: Path) -> None:
    ran_each(tmp_path, num_seeds=3, cache=TIGHT)
    ran(tmp_path / "orca", scheduler="orca", cache=TIGHT)
    said = report(tmp_path, baseline="vllm_v1")
    assert "There is one replicate" not in said
    assert "means of log-ratios over an arm's replicates" in said
    assert "Of orca there is one replicate: their 95 % intervals are of a circular-block bootstrap" in said
    assert "| poor | one replicate of orca: nothing says how the result varies between traces |" in said
