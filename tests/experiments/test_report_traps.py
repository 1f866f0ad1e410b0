"""A report is not fooled by what a study may plant: starts left out, bursts, holes, few or aborted requests."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from analysis import plots
from analysis.comparison.arms import Arm, infer_arms
from analysis.comparison.compare import LATENCY, Comparison, compare
from analysis.comparison.effects import Compared, Effect
from analysis.comparison.triggered import _diluted
from analysis.format import change, count, number
from analysis.load import load, load_sweep
from analysis.measures.metrics import request_metrics
from analysis.measures.statistics import Estimate, Verdict
from analysis.measures.summary import summarise
from analysis.reports.cautions import cautions
from analysis.reports.first_screen import answer
from analysis.reports.load_cautions import change_by_warm_up
from analysis.reports.report import report_from_folders
from testbed.errors import RunFolderError, TestbedError
from tests.experiments.kit import SHORT, TINY, Say
from tests.experiments.report_kit import TIGHT, arms_of, ran, ran_each, report

pytestmark = pytest.mark.usefixtures("unrendered")  # words alone are looked at

LIGHT = {"num_requests": 120, "rate": 5.0}
PAIRS = (("base", "other"),)


def row(arm: str, metric: int, change: float, said: Verdict) -> Comparison:
    return Comparison(arm, LATENCY[metric], 1.0, Estimate(change, change, change, 3, "paired t", "log_ratio"), said)


def test_an_arm_s_gain_is_told_where_no_factor_has_an_average_one() -> None:
    arms = [Arm("base", {}, ())]
    effects = [Effect("watermark", 0, 0.1, row("0.1", 0, -0.01, "inside the noise"), PAIRS, None)]
    rows = [row("other", 0, -0.2, "lower"), row("other", 1, 0.1, "inside the noise")]
    (said, more) = answer([Compared("", arms, rows, effects)], None)
    assert said.replace("\u00a0", " ").endswith("other against base: better in mean TTFT (−18 %, to 1.00 s).")
    quiet = "On average over the other factors, watermark 0.1 instead of 0"
    assert more == f"{quiet} shows no difference beyond the noise."
    claimed = [Effect("watermark", 0, 0.1, row("0.1", 0, -0.1, "lower"), PAIRS, None)]
    (said,) = answer([Compared("", arms, rows, claimed)], None)
    assert "On average over the other factors, watermark 0.1 instead of 0" in said, "what a factor does is told as its"


def test_starts_of_two_lengths_are_not_compared(tmp_path: Path) -> None:
    for name, warmup_s in (("vllm_v1", 4.0), ("sarathi", 0.0)):
        ran(tmp_path / name, trace=LIGHT, scheduler=name, report={"warmup_s": warmup_s})
    with pytest.raises(RunFolderError, match=r"different starts \(report.warmup_s: 0, 4\)"):
        report_from_folders([tmp_path], tmp_path / "report.html")
    ran(tmp_path / "again", trace=LIGHT, scheduler="sarathi", report={"warmup_s": 4.0})
    (tmp_path / "sarathi" / "done").unlink()
    said = report(tmp_path)
    left = 2 * load_sweep(tmp_path).runs[0].summary["num_in_warmup"]
    assert f"came in the first 4 s of each run (report.warmup_s), {left} of 240, count in no latency and no SLO" in said
    assert "throughput and goodput count those of them, too, that ended after these seconds" in said


@pytest.mark.parametrize("leaves_out", ["start", "aborted"])
def test_a_change_on_one_trace_is_of_the_requests_that_its_values_are_of(tmp_path: Path, leaves_out: str) -> None:
    rows = [{"arrival_time": 0.02 * (i + i // 100 * 20), "prompt_tokens": 200, "output_tokens": 60} for i in range(600)]
    for row in rows[::2] if leaves_out == "aborted" else ():
        row["cancel_after"] = 0.2
    for seqs in (256, 4):
        more = {"scheduler": {"name": "vllm_v1", "max_num_seqs": seqs}, "report": {"warmup_s": 2.0}}
        ran(tmp_path / str(seqs), trace=rows, **(more if leaves_out == "start" else more | {"report": {}}))
    arms = arms_of(tmp_path)
    told = [row for row in compare(arms, arms[0], LATENCY) if row.estimate is not None and row.estimate.num > 1]
    assert {row.metric.label for row in told} >= {"P99 TTFT", "P99 E2E", "mean TPOT"}
    for row in told:
        assert row.estimate is not None
        assert row.base is not None
        assert row.value == pytest.approx(row.base * math.exp(row.estimate.value)), row.metric.label
    curve = plots.latency_cdf({"one": arms[0].runs[0]})[0].lines[0].get_xdata()
    ttft_s = request_metrics(arms[0].runs[0].requests)["ttft_s"].to_numpy()
    assert len(curve) - 1 == arms[0].runs[0].summary["ttft_s"]["count"] == len(ttft_s) - (leaves_out == "start") * 100


def test_what_was_computed_is_counted_alike_by_requests_and_by_steps(tmp_path: Path) -> None:
    ran(tmp_path, trace=LIGHT | {"rate": 60.0}, cache={"num_gpu_blocks": 300, "prefix_caching": False})
    (run,) = load_sweep(tmp_path).runs
    by_steps, by_requests = (summarise(run.requests, run.steps, run.manifest, None, warm) for warm in (0.0, 1e-12))
    assert by_steps["preemptions"]["recomputed_share"] > 0
    assert by_requests["preemptions"]["recomputed_share"] == by_steps["preemptions"]["recomputed_share"]


def test_a_start_that_is_all_there_is_is_told(tmp_path: Path, say: Say) -> None:
    options = (
        "report.warmup_s=1000",
        "slo.lateness_s=1",
        "slo.classes=[{priority: 0, ttft_s: 1}, {tenant: none, e2e_s: 1}]",
    )
    said = say("run", *TINY, *SHORT, *options, f"hydra.run.dir={tmp_path / 'run'}").success()
    assert "report.warmup_s=1000 leaves out all" in said
    assert "requests, so there are no numbers: lower it" in said
    assert "slo.lateness_s limits no request, as none has a deadline" in said
    assert "slo.classes names tenant none, and no request is of it but not of one before it" in said
    assert "slo.classes names priority 0" not in said


def test_a_burst_is_no_empty_start(tmp_path: Path) -> None:
    """Twenty requests at once, before a light load: what they wait for is theirs. An empty system is fast."""
    burst = [{"arrival_time": 0.001 * i, "prompt_tokens": 900, "output_tokens": 40} for i in range(20)]
    calm = [{"arrival_time": 5.0 + i, "prompt_tokens": 300, "output_tokens": 20} for i in range(60)]
    for name, rows, is_said in (("burst", burst + calm, False), ("empty", _rising(), True)):
        ran(tmp_path / name, trace=rows, cache={"num_gpu_blocks": 400})
        said = cautions({"": infer_arms([load_sweep(tmp_path / name).runs[0]])}, 0.02)
        assert any("The start, when the system is still empty" in text for text in said) is is_said, name


def test_of_requests_that_come_at_once_none_is_a_start(tmp_path: Path) -> None:
    ran(tmp_path, trace={"num_requests": 120, "arrival": "all_at_once"}, cache={"num_gpu_blocks": 400})
    (run,) = load_sweep(tmp_path).runs
    assert change_by_warm_up(run) == 0.0
    run.summary["steadiness"] = {"is_outrun": False}  # as of the same requests one by one
    assert change_by_warm_up(run) > 0.1


@pytest.mark.parametrize("is_recorded", [True, False])
def test_stalls_of_decodes_are_compared_where_gaps_are_known(tmp_path: Path, is_recorded: bool) -> None:
    """A mean over a request's gaps hides how long one of them is: chunks shorten it, whole prompts do not."""
    trace = {"num_requests": 60, "rate": 20.0, "prompt": {"kind": "constant", "value": 4000}}
    scheduler = {"name": "sarathi", "max_num_seqs": 64}
    record = {"token_times": is_recorded}
    for budget, seed in itertools.product((512, 4096), range(3)):
        limits = {"max_num_batched_tokens": budget}
        ran(tmp_path / f"{budget}-{seed}", trace=trace, scheduler=scheduler | limits, seed=seed, record=record)
    said = report(tmp_path)
    assert ("| P99 E2E | P99 ITL |" in said) is is_recorded
    assert ("512 against max num batched tokens 4096: better in P99 ITL (" in said) is is_recorded


@pytest.mark.parametrize(
    ("warmup_s", "start"),
    [
        (0.0, "The start, when the system is still empty, is part of all numbers"),
        (5.0, "After the first 5 s the system still fills up, which is part of all numbers"),
    ],
)
def test_what_a_start_weighs_is_told_of_all_runs_that_it_weighs_in(tmp_path: Path, warmup_s: float, start: str) -> None:
    for name, (seed, later) in itertools.product(("vllm_v1", "sarathi"), enumerate((900, 600, 100))):
        ran(tmp_path / f"{name}-{seed}", trace=_rising(later), scheduler=name, seed=seed, report={"warmup_s": warmup_s})
    arms = arms_of(tmp_path)
    (said,) = [text for text in cautions({"": arms}, 0.02) if text.startswith(start)]
    assert "(MSER-5's cut) mean TTFT in 4 of 6 runs (every arm; seed 0 and seed 1) would be up to +" in said
    changes = [change_by_warm_up(run) for arm in arms for run in arm.runs]
    assert f"up to {change(100 * max(changes))} off" in said
    assert sum(one > 0.02 for one in changes) == 4
    arms[0].runs[0].summary["steadiness"]["is_outrun"] = True
    (said,) = [text for text in cautions({"": arms}, 0.02) if text.startswith(start)]
    assert "in 3 of 6 runs (every arm; seed 0 and seed 1)" in said, "of the arm in which one of three is left, too"


def test_a_cut_that_leaves_one_request_is_told(tmp_path: Path) -> None:
    ran(tmp_path, trace=_rising(), report={"warmup_s": 119.4})
    (arm,) = arms_of(tmp_path)
    assert arm.runs[0].summary["throughput"]["offered_per_s"] is None
    assert any(text.startswith("The requests that came in the first 119.4 s") for text in cautions({"": [arm]}, 0.02))


def _rising(later: int = 900) -> list[dict[str, float]]:
    """A start that is faster than the rest."""
    sizes = [100] * 40 + [later] * 200
    return [{"arrival_time": 0.5 * i, "prompt_tokens": size, "output_tokens": 10} for i, size in enumerate(sizes)]


def test_a_capacity_that_was_exceeded_in_some_replicates_is_told_so(tmp_path: Path) -> None:
    ran_each(tmp_path, num_seeds=2, trace={"num_requests": 400, "rate": 90.0}, cache=TIGHT)
    arms = arms_of(tmp_path)
    arms[0].runs[0].summary["steadiness"]["is_outrun"] = False
    (answered,) = answer([Compared("", arms, [row(arms[1].name, 0, -0.2, "lower")], ())], None)
    names = f"{arms[0].name} (in 1 of 2 replicates) and {arms[1].name}"
    assert answered.startswith(
        "Over all runs (3 of 4 are beyond capacity), vllm_v1 against sarathi: better in mean TTFT"
    )
    arms[0].runs[0].summary["steadiness"]["is_outrun"] = True
    (answered,) = answer([Compared("", arms, [row(arms[1].name, 0, -0.2, "lower")], ())], None)
    assert answered.startswith("Beyond the capacity of every arm, vllm_v1 against sarathi: better in mean TTFT")
    arms[0].runs[0].summary["steadiness"]["is_outrun"] = False
    for run in (run for arm in arms for run in arm.runs):
        run.summary["throughput"]["offered_per_s"] = 1180.4
    (said,) = [text for text in cautions({"": arms}, 0.02) if "beyond capacity" in text]
    came = number(1180.4, "req/s")
    assert said.startswith(f"{names} are beyond capacity: in 3 of 4 runs on average {came} came, ")


def test_arms_with_more_replicates_than_others_are_named(tmp_path: Path) -> None:
    ran_each(tmp_path, ["vllm_v1"], num_seeds=3, trace=LIGHT)
    ran_each(tmp_path, ["sarathi"], num_seeds=2, trace=LIGHT)
    said = report(tmp_path)
    assert "The arms do not have the same replicates (2 of sarathi; 3 of vllm_v1): 2 in common. Means" in said
    assert "main effects" not in said, "of two arms there are none"


def test_a_rate_that_did_not_come_and_a_pool_that_cannot_be_are_told(tmp_path: Path) -> None:
    few = {"num_requests": 60, "rate": 20.0, "arrival": "diurnal"}
    ran(tmp_path / "night", trace=few)
    ran(tmp_path / "dream", trace=few, cache={"num_gpu_blocks": 1_000_000})
    told = cautions({"": arms_of(tmp_path)}, 0.02)
    (load,) = [text for text in told if text.startswith("Load, ")]
    assert "requests a second came: trace.rate=20 is the mean of trace.arrival=diurnal over all time" in load
    assert load.endswith("(the first of 2 runs that say so)")
    pool, kernels = [text for text in told if text.startswith("Step times, ")]
    assert "cache.num_gpu_blocks=1000000 and the weights take" in pool
    assert "nobody timed kernels of h100 as it is here" in kernels, "its floors are not the library's"


def test_p99_of_a_few_requests_and_aborted_ones_are_told(tmp_path: Path) -> None:
    cut = [
        {"arrival_time": 0.1 * i, "prompt_tokens": 100, "output_tokens": 200, "cancel_after": 0.2 if i % 3 else 9.0}
        for i in range(60)
    ]
    ran_each(tmp_path, trace=cut)
    said = report(tmp_path)
    aborted = load_sweep(tmp_path).runs[0].summary["finish_reasons"]["abort"]
    assert aborted > 5
    assert f"{aborted / 0.6:.3g} % of the requests of sarathi were aborted" in said
    assert f"A run has {60 - aborted} requests that ended: its P99s are all but its largest values" in said
    arms = arms_of(tmp_path)
    for num, words in ((1, "1 request that ended: its P99s"), (0, "no request that ended: it has no E2E latency.")):
        arms[0].runs[0].summary["num_finished"] = num
        assert any(text.startswith(f"A run has {words}") for text in cautions({"": arms}, 0.02))


@pytest.mark.parametrize(("num", "words"), [(1, "1 request"), (2, "2 requests at once")])
def test_requests_that_have_no_rate_are_told_without_one(tmp_path: Path, num: int, words: str) -> None:
    ran(tmp_path / "run", trace=[{"arrival_time": 0.0, "prompt_tokens": 50, "output_tokens": 5}] * num)
    assert f"(sim), {words}: TTFT" in report(tmp_path)
    assert count(num, "request") in str(load(tmp_path / "run"))


class Raises:
    """Admits nobody."""

    def allows(self, seq: object, running: object) -> bool:
        raise ValueError("no day for it")


def test_an_arm_that_failed_is_named_with_its_reason(tmp_path: Path) -> None:
    for name, scheduler in (("a", "vllm_v1"), ("b", "sarathi")):
        ran(tmp_path / name, trace=LIGHT, scheduler=scheduler)
    admission = {"_target_": f"{__name__}.Raises"}
    with pytest.raises(TestbedError):
        ran(tmp_path / "c", trace=LIGHT, scheduler={"name": "vllm_v1", "admission": admission})
    said = report(tmp_path)
    assert "failed or did not end, and is left out (c: " in said
    assert "ValueError: no day for it" in said


def test_a_class_of_one_s_own_and_one_of_ours_are_levels_of_one_factor(tmp_path: Path) -> None:
    for name, admission in (("a", "watermark"), ("b", {"_target_": "testbed.policies.admission.NoEvict"})):
        ran(tmp_path / name, trace=LIGHT, scheduler={"name": "vllm_v1", "admission": admission})
    arms = infer_arms(load([tmp_path / "a", tmp_path / "b"]).runs)
    assert [arm.name for arm in arms] == ["admission watermark", "admission NoEvict"]
    assert not any("more than their names say" in text for text in cautions({"": arms}, 0.02))


def test_cells_of_a_design_in_which_nothing_was_triggered_are_named(tmp_path: Path) -> None:
    for blocks in (5_000, 330):
        for victim in ("last_in_queue_order", "most_blocks"):
            for seed in range(2):
                ran(tmp_path / f"{blocks}-{victim}-{seed}", seed=seed, cache={"num_gpu_blocks": blocks},
                    scheduler={"name": "vllm_v1", "victim": victim})  # fmt: skip
    (said,) = [text for text in report(tmp_path).splitlines() if "took the same decisions as " in text]
    assert said.count("num gpu blocks 5000") == 2, "where the pool is small enough the victim matters"
    diluted = "This dilutes the average effect of victim over the other factors: between these arms there is none."
    assert said.endswith(f"was never triggered: nothing was preempted. {diluted}")


def test_arms_that_differ_in_two_factors_dilute_the_effect_of_neither() -> None:
    arms = [Arm(f"{a}{b}", {"x.a": a, "x.b": b}, ()) for a in (1, 2) for b in (1, 2)]
    same = {"11": "same", "12": "one", "21": "other", "22": "same"}
    assert _diluted([arms[0], arms[3]], arms, same) == ""
    assert " effect of a over " in _diluted([arms[0], arms[2]], arms, same | {"21": "same", "22": "other"})


def test_windows_that_were_called_replicates_are_one_load_in_a_curve(tmp_path: Path) -> None:
    for rate, start in itertools.product((5.0, 20.0), (0, 4)):
        cut = [{"name": "window", "start_s": start, "end_s": start + 4}]
        trace = {"num_requests": 160, "rate": rate, "transforms": cut}
        ran(tmp_path / f"{rate}-{start}", trace=trace, report={"replicates": ["trace.transforms"]})
    (axes, _) = plots.throughput_latency(load_sweep(tmp_path))
    assert next(len(line.get_xdata()) for line in axes.lines if line.get_marker() != "None") == 2
    said = report(tmp_path)
    assert "window(start_s=0, end_s=4)" in said


def test_a_setting_given_for_one_arm_alone_is_in_its_name(tmp_path: Path) -> None:
    """Else the change of caching would be told as one of the preemption that came with it."""
    ran(tmp_path / "a", scheduler={"name": "vllm_v1", "preemption": "recompute"}, cache=TIGHT)
    ran(tmp_path / "b", scheduler={"name": "vllm_v1", "queue_order": "sjf"}, cache=TIGHT)
    ran(tmp_path / "c", scheduler={"name": "vllm_v1"}, cache={**TIGHT, "prefix_caching": False})
    names = {arm.name for arm in arms_of(tmp_path)}
    assert names == {
        "preemption recompute, queue order fcfs, prefix caching on",
        "preemption auto, queue order sjf, prefix caching on",
        "preemption auto, queue order fcfs, prefix caching off",
    }
    assert "differ in more than" not in report(tmp_path)


def test_a_null_that_one_arm_lacks_as_older_runs_do_is_no_difference(tmp_path: Path) -> None:
    for order in ("fcfs", "sjf"):
        ran(tmp_path / order, scheduler={"name": "vllm_v1", "queue_order": order}, cache=TIGHT)
    file = tmp_path / "sjf" / "config.yaml"
    file.write_text(file.read_text().replace("  num_cpu_blocks: null\n", ""))
    said = report(tmp_path)
    assert "differ in more than" not in said
    assert "scheduler.queue_order fcfs/sjf |" in said


def test_the_arms_of_an_unnamed_level_are_not_named_by_that_level(tmp_path: Path) -> None:
    for order, oracle in (("fcfs", "none"), ("sjf", "perfect"), ("hrrn", "perfect")):
        ran(tmp_path / order, scheduler={"name": "vllm_v1", "queue_order": order, "oracle": oracle}, cache=TIGHT)
    said = report(tmp_path)
    assert "oracle (none in queue order fcfs; perfect in queue order hrrn and queue order sjf)" in said
