"""What a hostile referee would strike: ranks that noise makes, replicates that share requests, arms that are one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis import format as fmt
from analysis.comparison.arms import Arm, infer_arms
from analysis.comparison.compare import LATENCY, RATES, SLO_METRICS, Comparison, compare, mean_over_replicates
from analysis.comparison.effects import Compared, main_effects
from analysis.comparison.pairs import Pair
from analysis.comparison.sharing import common_share, correlation
from analysis.comparison.triggered import never_triggered
from analysis.load import load_run, load_sweep
from analysis.measures.slo import SLO
from analysis.measures.statistics import Estimate, Verdict, mean_t
from analysis.reports.cautions import cautions, changed_sources, lost
from analysis.reports.fidelity_findings import not_measured
from analysis.reports.first_screen import answer
from analysis.reports.keeping_up import Judged, who
from analysis.reports.parts import ReportInput
from analysis.reports.report import report_from_folders, write_report
from analysis.reports.trust import trust
from testbed.errors import RunFolderError
from tests.analysis.runs import write_run
from tests.analysis.test_first_screen import chosen
from tests.experiments.report_kit import TIGHT, arms_of, ran, ran_each

pytestmark = pytest.mark.usefixtures("unrendered")  # words alone are looked at

LIGHT = {"num_requests": 40, "rate": 5.0}
CHANGE = Estimate(-0.2, -0.4, -0.1, 3, "paired t", "log_ratio")


def light(arms: list[Arm], about: str, **more: Any) -> tuple[str, str]:
    found = {one.about: one for one in trust([Compared("", arms, (), ())], more.pop("pairs", ()), {}, **more)}
    return found[about].level, found[about].why.replace(fmt.SPACE, " ")


def test_of_shares_that_are_ranked_those_that_noise_may_explain_are_named(tmp_path: Path) -> None:
    trace = {"num_requests": 150, "rate": 40.0}
    ran_each(tmp_path, ("vllm_v1", "sarathi", "prefill_first"), num_seeds=2, trace=trace, cache=TIGHT)
    slo, share = SLO(ttft_s=0.2), SLO_METRICS[0]
    arms = arms_of(tmp_path)
    base, one, other = (arm.name for arm in arms)
    cases: tuple[tuple[Verdict, Verdict, str], ...] = (
        ("lower", "lower", ""),
        ("inside the noise", "equivalent", " (no difference beyond the noise or ±2 %)"),
        ("equivalent", "equivalent", " (no difference beyond ±2 %)"),
        ("lower", "equivalent", f" (inside ±2 % against {base}: {other})"),
        ("lower", "inside the noise", f" (inside the noise against {base}: {other})"),
        ("lower", "unknown", f" (no interval of the difference of {other} is known)"),
        ("unknown", "unknown", " (no interval of the difference is known)"),
    )
    for first, second, words in cases:
        rows = [Comparison(name, share, 0.5, CHANGE, said) for name, said in ((one, first), (other, second))]
        (told, *_) = answer([Compared("", arms, chosen(rows, share.label), ())], slo)
        assert told.endswith(f"{words}.") if words else not told.endswith(")."), told


@pytest.mark.parametrize(
    ("steps", "level", "words"),
    [
        ({"name": "jitter", "within_s": 0.1}, "poor", " replicates, by jitter of the same requests: how the result"),
        ([{"name": "jitter", "within_s": 0.1}, {"name": "window", "end_s": 3.5}], "poor", " replicates, by jitter of"),
        ({"name": "thin", "fraction": 0.98}, "poor", " replicates, by thin: each shares 9"),
        ({"name": "thin", "fraction": 0.5}, "fair", " replicates, by thin: each shares "),
        ({"name": "sample_sessions", "num": 195}, "poor", " replicates, by sample_sessions: each shares 9"),
        ({"name": "sample_sessions", "num": 40}, "fair", " replicates, by sample_sessions: each shares "),
        ({"name": "set_rate", "rate": 9, "by": "thin"}, "fair", " replicates: each shares "),
        ({"name": "bootstrap"}, "fair", " replicates, by bootstrap: all are drawn from the same requests"),
        ([{"name": "bootstrap"}, {"name": "arrivals", "rate": 9}], "fair", " replicates, by bootstrap: all are drawn"),
    ],
)
def test_replicates_that_share_requests_are_worth_less(
    tmp_path: Path, steps: dict[str, Any] | list[dict[str, Any]], level: str, words: str
) -> None:
    rows = [{"arrival_time": 0.02 * i, "prompt_tokens": 50 + i, "output_tokens": 5} for i in range(200)]
    ran(tmp_path / "once", trace=rows)
    file = str(tmp_path / "once" / "trace.jsonl")
    transforms = steps if isinstance(steps, list) else [steps]
    for seed in range(6):
        ran(tmp_path / "runs" / str(seed), trace={"name": "jsonl", "path": file, "transforms": transforms}, seed=seed)
    arms = arms_of(tmp_path / "runs")
    found, why = light(arms, "replicates")
    assert (found, why[1 : 1 + len(words)]) == (level, words)
    assert (", and intervals are widened for that" in why) is (correlation(common_share(arms[0].runs)) > 0)
    assert (", but not for the arrivals, which are the same in all" in why) is (
        [step["name"] for step in transforms] == ["bootstrap"]
    )


def test_new_arrivals_of_a_file_are_no_new_record_and_each_seed_of_ones_own_generator_is_one(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("num_prefill_tokens,num_decode_tokens\n" + "60,5\n" * 50)
    of_lengths = {"name": "lengths", "path": str(file), "rate": 20.0}
    config = {"_target_": "testbed.traces.generators.SyntheticConfig", "num_requests": 30, "rate": 20.0}
    own = {"_target_": "testbed.traces.generators.generate", "config": config}
    generated = {"num_requests": 30, "rate": 20.0}
    merged = {"name": "merge", "path": str(file)}
    labelled = {**merged, "format": "lengths", "label": "b/c"}
    (tmp_path / "chunk-0-dataset.json").write_text('{"0": {"input_tokens": "{9: 1}", "output_tokens": "{5: 1}"}}')
    (tmp_path / "chunk-0-trace.csv").write_text("0,0.05,1,Gamma,1,1\n")
    of_clients = {"name": "merge", "path": str(tmp_path), "format": "servegen"}  # 30 requests
    ran(tmp_path / "once", trace=[{"arrival_time": 0.1 * i, "prompt_tokens": 9, "output_tokens": 5} for i in range(50)])
    recorded = {"name": "jsonl", "path": str(tmp_path / "once" / "trace.jsonl")}
    traces = {
        "arrivals": [of_lengths] * 2,
        "first second": [{**of_lengths, "end_s": 1.0}] * 2,
        "bootstraps": [{**of_lengths, "transforms": [{"name": "bootstrap"}]}] * 2,
        "own": [{**own, "seed": seed} for seed in range(2)],
        "merged": [{**generated, "transforms": [labelled]}] * 2,
        "merged, no label": [{**generated, "transforms": [merged]}] * 2,
        "two merged": [{**generated, "transforms": [merged, labelled]}] * 2,
        "merged with a file": [{**recorded, "transforms": [labelled]}] * 2,
        "generated, merged with a file": [{**recorded, "transforms": [of_clients]}] * 2,
        "merged bootstraps": [{**recorded, "transforms": [{"name": "bootstrap"}, labelled]}] * 2,
        "bootstraps of merged": [{**recorded, "transforms": [labelled, {"name": "bootstrap"}]}] * 2,
    }
    for (name, given), seed in itertools.product(traces.items(), range(2)):
        ran(tmp_path / "runs" / name / str(seed), trace=given[seed], seed=seed, allow_ignored=True)
    shares = {name: common_share(load_sweep(tmp_path / "runs" / name).runs) for name in traces}
    assert shares == {
        "arrivals": 1.0, "first second": 1.0, "bootstraps": 0.5, "own": 0.0, "merged": 50 / 80,
        "merged, no label": 50 / 80, "two merged": 100 / 130, "merged with a file": 1.0,
        "generated, merged with a file": 50 / 80, "merged bootstraps": 0.75, "bootstraps of merged": 0.5,
    }  # fmt: skip


def test_arms_beyond_capacity_hide_none_that_was_not_judged(tmp_path: Path) -> None:
    ran_each(tmp_path, trace=LIGHT)
    one, other = arms = arms_of(tmp_path)
    one.runs[0].summary["steadiness"]["is_outrun"], other.runs[0].summary["steadiness"]["is_outrun"] = True, None
    _, why = light(arms, "load")
    assert why.startswith(f"beyond the capacity of {one.name}; not judged for {other.name}: the trace ends before")
    for name, grows in (
        ("in_system", "ever more requests are in the system, though the queue does not grow"),
        ("waiting", "the queue grows"),
    ):
        other.runs[0].summary["steadiness"][name] = [0.0, 0.0, 50.0]
        assert light(arms, "load")[1].endswith(f"; not judged for {other.name}: the trace ends while {grows}")


def test_of_more_than_three_arms_the_light_says_how_many(tmp_path: Path) -> None:
    for watermark in (0.01, 0.02, 0.03, 0.04, 0.05):
        ran(tmp_path / str(watermark), trace=LIGHT, cache={"watermark": watermark})
    arms = arms_of(tmp_path)
    for arm in arms[1:]:
        arm.runs[0].summary["steadiness"]["is_outrun"] = True
    assert light(arms, "load")[1] == "beyond the capacity of 4 of 5 arms"
    known = [Judged(arm.name, "beyond", tuple(arm.runs), 1 + place % 2, True) for place, arm in enumerate(arms)]
    assert who(known, "beyond", 3) == "every arm (in 5 of 7 runs)"
    assert who(known[::2], "beyond", 3) == "every arm"
    assert who([*known, known[0]._replace(state="kept up")], "beyond", 3) == "5 of 6 arms (in 5 of 7 runs)"


def test_an_arm_is_in_one_state_whatever_its_replicates_are(tmp_path: Path) -> None:
    ran_each(tmp_path, num_seeds=3, trace=LIGHT)
    one, other = arms = arms_of(tmp_path)
    for run, is_outrun in zip(one.runs, (True, None, False), strict=True):
        run.summary["steadiness"]["is_outrun"] = is_outrun
    beyond = f"{one.name} (in 1 of 3 replicates, 1 not judged)"
    assert light(arms, "load")[1] == f"beyond the capacity of {beyond}"
    assert any(text.startswith(f"{beyond} is beyond capacity: in 1 of 3 runs") for text in cautions({"": arms}, 0.02))
    for run in one.runs:
        run.summary["steadiness"]["is_outrun"] = True
    other.runs[0].summary["steadiness"] = None
    told = f"not judged for {other.name} (in 1 of 3 replicates): requests came all at once"
    assert light(arms, "load")[1] == f"beyond the capacity of {one.name}; {told}"


@pytest.mark.parametrize("are_outrun", [(True, None), (None, True)])
def test_an_arm_that_is_run_again_is_judged_once_whichever_run_is_first(
    tmp_path: Path, are_outrun: tuple[bool | None, bool | None]
) -> None:
    for name in ("first", "again"):
        write_run(tmp_path / name, "real", num_requests=30)
    (arm,) = arms = arms_of(tmp_path)
    for run, is_outrun in zip(arm.runs, are_outrun, strict=True):
        run.summary["steadiness"]["is_outrun"] = is_outrun
    told = f"{arm.name} (in 1 of 2 runs, 1 not judged)"
    assert light(arms, "load")[1] == f"beyond the capacity of {told}"
    assert any(text.startswith(f"{told} is beyond capacity: ") for text in cautions({"": arms}, 0.02))


def test_sessions_beyond_capacity_are_shown_by_how_many_there_are_and_by_no_rate(tmp_path: Path) -> None:
    trace = {"num_requests": 100, "rate": 20.0, "min_turns": 2, "max_turns": 2}
    ran(tmp_path, trace=trace, scheduler="vllm_v1")
    (arm,) = arms = arms_of(tmp_path)
    for in_system, words in (
        ([12.0, 30.0, 61.4], "12 requests were in the system early in the trace, 61 late in it, and ever more until"),
        ([12.0, 30.0, 11.0], "more and more were in the system until"),
    ):
        arm.runs[0].summary["steadiness"] = {"in_system": in_system, "is_outrun": True}
        (said,) = [text for text in cautions({"": arms}, 0.02) if "beyond capacity" in text]
        assert said.startswith(f"{arm.name} is beyond capacity: {words}")
        assert "req/s" not in said


@pytest.mark.parametrize("is_overlapping", [False, True])
def test_windows_that_overlap_share_requests(tmp_path: Path, is_overlapping: bool) -> None:
    for start in range(5):
        trace = {**LIGHT, "start_s": start, "end_s": start + 1.5 if is_overlapping else start + 1}
        ran(tmp_path / str(start), trace=trace, report={"replicates": ["trace.start_s", "trace.end_s"]})
    arms = arms_of(tmp_path)
    level, why = light(arms, "replicates")
    assert (level == "fair") is ("each shares " in why) is is_overlapping
    ids = [set(run.requests["request_id"]) for run in arms[0].runs]
    shares = [2 * len(one & other) / (len(one) + len(other)) for one, other in itertools.combinations(ids, 2)]
    assert correlation(common_share(arms[0].runs)) == pytest.approx(np.mean(shares), rel=0.1)


def run_of(arm: Arm, name: str, chunk: int) -> bool:
    config = arm.runs[0].flat_config
    return (config["scheduler.name"], config["scheduler.max_num_batched_tokens"]) == (name, chunk)


def ends(estimate: Estimate) -> tuple[float, float]:
    return estimate.low, estimate.high


def test_a_change_over_draws_from_one_record_has_an_interval_that_allows_for_it(tmp_path: Path) -> None:
    rows = [{"arrival_time": 0.01 * i, "prompt_tokens": 50 + i, "output_tokens": 5 + i % 40} for i in range(200)]
    ran(tmp_path / "once", trace=rows)
    trace = {"name": "jsonl", "path": str(tmp_path / "once" / "trace.jsonl"), "transforms": [{"name": "bootstrap"}]}
    arms, metric, times = ("vllm_v1", "prefill_first"), LATENCY[4], {}
    for name, chunk, seed in itertools.product(arms, (512, 2048), range(4)):
        folder = tmp_path / "runs" / f"{name}-{chunk}-{seed}"
        ran(folder, trace=trace, scheduler={"name": name, "max_num_batched_tokens": chunk}, seed=seed)
        times[name, chunk, seed] = metric.of(load_run(folder))
    change = np.array([[np.log(times[arms[1], n, i] / times[arms[0], n, i]) for i in range(4)] for n in (512, 2048)])
    found = arms_of(tmp_path / "runs")
    baseline, other = (next(arm for arm in found if run_of(arm, name, 2048)) for name in arms)
    (row,) = compare([baseline, other], baseline, [metric])
    (effect, *_) = (one for one in main_effects(found, baseline, [metric]) if one.level == arms[1])
    for estimate, expected in (row.estimate, change[1]), (effect.comparison.estimate, change.mean(axis=0)):
        assert estimate is not None
        alone = mean_t(expected, "log_ratio", correlation=0.5)
        assert (estimate.low, estimate.high) == pytest.approx((alone.low, alone.high))
        assert alone.high - alone.low == pytest.approx(5**0.5 * np.diff(ends(mean_t(expected)))[0])


def test_arms_that_decided_alike_are_named_also_where_none_is_the_baseline(tmp_path: Path) -> None:
    for budget in (64, 2048, 4096, 8192):
        scheduler = {"name": "sarathi", "max_num_batched_tokens": budget}
        trace = {**LIGHT, "prompt": {"kind": "constant", "value": 512}}
        ran(tmp_path / f"{budget}", trace=trace, scheduler=scheduler, cache={"num_gpu_blocks": 5000})
    (said,) = never_triggered(arms_of(tmp_path))
    name = "max num batched tokens"
    assert said.startswith(f"{name} 4096 and {name} 8192 took the same decisions as {name} 2048 at every step")


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ((), "better in mean TPOT (−45%, to 1.00s) and P99 TPOT (−39%, to 1.00s); "
         "worse in mean TTFT (+65%, to 1.00s) and P99 TTFT (+49%, to 1.00s)."),
        (("P99 TTFT",), "worse in P99 TTFT (+49%, to 1.00s) and mean TTFT (+65%, to 1.00s); "
         "better in mean TPOT (−45%, to 1.00s) and P99 TPOT (−39%, to 1.00s)."),
        (("mean E2E", "requests/s", "output tokens/s"),
         "better in mean E2E (−26%, to 1.00s) and mean TPOT (−45%, to 1.00s); worse in mean TTFT (+65%, to 1.00s) "
         "and P99 TTFT (+49%, to 1.00s); no difference beyond the noise in requests/s."),
    ],
)  # fmt: skip
def test_the_answer_begins_with_the_metrics_that_the_user_chose(
    tmp_path: Path, metrics: tuple[str, ...], words: str
) -> None:
    ran_each(tmp_path, num_seeds=2, trace=LIGHT)
    arms = arms_of(tmp_path)
    changes = (0.5, 0.4, -0.6, -0.5, -0.3)  # of LATENCY, as log-ratios
    estimates = [Estimate(size, size, size, 3, "paired t", "log_ratio") for size in changes]
    rows = [
        Comparison(arms[1].name, metric, 1.0, one, "higher" if one.value > 0 else "lower")
        for metric, one in zip(LATENCY, estimates, strict=False)
    ]
    noise = Estimate(0.01, -0.1, 0.1, 3, "t", "log_ratio")
    rows += [Comparison(arms[1].name, RATES[0], 1.0, noise, "inside the noise")]
    rows += [Comparison(arms[1].name, RATES[1], 1.0, noise, "unknown")]
    (said,) = answer([Compared("", arms, chosen(rows, *metrics), ())], None)
    assert said.replace(fmt.SPACE, "").endswith(f": {words}"), said


def test_who_is_best_together_is_named_together(tmp_path: Path) -> None:
    slo, goodput = SLO(ttft_s=0.0045), SLO_METRICS[1]
    ran_each(tmp_path, ("vllm_v1", "sarathi", "prefill_first"), num_seeds=2, trace=LIGHT)
    arms = arms_of(tmp_path)
    rows = [Comparison(arm.name, goodput, 9.0 - place, CHANGE, "higher") for place, arm in enumerate(arms[1:])]
    said = answer([Compared("", arms, chosen(rows, "goodput"), ())], slo)
    best = max(arms, key=lambda arm: mean_over_replicates(arm, goodput, slo) or 0.0)
    first, second = (arm.name for arm in arms if arm is not best)
    assert said[1].startswith(f"{best.name} serves most within the SLO"), "of all, the baseline too"
    assert said[1].endswith(f"; {first} and {second} are not told apart from it.")


def test_a_simulator_that_picks_other_policies_than_the_engine_is_told_first(tmp_path: Path) -> None:
    for backend in ("sim", "real"):
        for chunked in (False, True):
            write_run(tmp_path / f"{backend}-{chunked}", backend, chunked=chunked, num_requests=30)
    arms = infer_arms([load_sweep(tmp_path / f"sim-{chunked}").runs[0] for chunked in (False, True)])
    real = load_sweep(tmp_path / "real-True").runs[0]
    real.manifest["device"] = "AMD EPYC, 2 threads"
    pairs = [Pair("p", arms[0].runs[0], real)]
    assert not any("device" in text for text in not_measured(arms, pairs)), "a CPU is the library's cpu"
    real.manifest.update(device="NVIDIA GB200", machine={"gpu": "NVIDIA GB200"})
    for run in (run for arm in arms for run in arm.runs):
        run.manifest["device"] = "b200"
    said = "The ablation simulates the device b200; the real runs used NVIDIA GB200. The error on the former was "
    assert f"{said}not measured." in [*not_measured(arms, pairs)]
    real.manifest["device"] = "NVIDIA B200"
    assert not any("device" in text for text in not_measured(arms, pairs))
    ranking = pd.DataFrame({"winner_is_clear": [True, True, False], "same_winner": [True, False, False]})
    level, why = light(arms, "fidelity", pairs=pairs, rankings={"": ranking})
    assert level == "poor"
    assert why.endswith("; of the engine's best policies it picks 1 of 2")


def test_a_start_that_is_all_there_is_is_no_report(tmp_path: Path) -> None:
    ran_each(tmp_path, trace=LIGHT, report={"warmup_s": 1000.0})
    says = r"warmup_s=1000 leaves out all requests of .* \(2 of 2 runs\)"
    with pytest.raises(RunFolderError, match=says):
        report_from_folders([tmp_path], tmp_path / "report.html")
    with pytest.raises(RunFolderError, match=says):
        write_report(ReportInput(arms_of(tmp_path)), tmp_path / "report.html")


def test_a_share_is_all_only_where_it_is() -> None:
    told = [fmt.share(value).replace(fmt.SPACE, " ") for value in (1.0, 0.99996, 0.9994, 1.2)]
    assert told == ["100 %", "> 99.9 %", "99.9 %", "120 %"]


def test_changes_are_factors_from_ten_times_on_and_no_longer_than_a_reader_needs() -> None:
    told = [fmt.change(value).replace(fmt.SPACE, " ") for value in (899.0, 900.0, -89.6, -95.0, 6.3e11, -99.9999999)]
    assert told == ["+899 %", "×10", "−90 %", "÷20", "×10,000 or more", "÷10,000 or more"]


def test_what_changed_between_runs_beside_their_settings_is_named(tmp_path: Path) -> None:
    ran_each(tmp_path, trace=LIGHT)
    runs = load_sweep(tmp_path).runs
    assert changed_sources(runs) == []
    runs[0].manifest["identity"] |= {"classes": {"mine": "a", "other": "b"}, "code": "1"}
    runs[1].manifest["identity"] |= {"classes": {"mine": "c", "other": "b"}, "code": "2"}
    (said,) = changed_sources(runs)
    assert said.startswith("Between the runs that are compared mine and the code of the testbed changed, ")


def test_real_runs_of_two_machines_are_told_apart(tmp_path: Path) -> None:
    for number, (backend, chunked) in enumerate(itertools.product(("sim", "real"), (False, True))):
        write_run(tmp_path / backend / str(chunked), backend, chunked=chunked, num_requests=30)
        manifest = tmp_path / backend / str(chunked) / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"device": "cpu"', f'"device": "cpu {number}"'))
    for backend, is_said in (("sim", False), ("real", True)):
        said = cautions({"": arms_of(tmp_path / backend)}, 0.02)
        assert any("device (cpu 2 in " in text for text in said) is is_said, said


def test_requests_that_were_ignored_are_told_of_as_many(tmp_path: Path) -> None:
    rows = [{"arrival_time": 0.1 * i, "prompt_tokens": 900 if i % 5 else 9000, "output_tokens": 5} for i in range(20)]
    ran_each(tmp_path, trace=rows, cache={"num_gpu_blocks": 400}, allow_ignored=True)
    (said,) = lost(arms_of(tmp_path), [], tmp_path)
    assert said.startswith("sarathi and vllm_v1 ignored 4 of 20 requests each (")
    assert said.endswith("so latencies are of the others.")


def test_where_nothing_was_served_nothing_is_answered(tmp_path: Path) -> None:
    for blocks in (1, 2):
        for seed in range(2):
            cache = {"num_gpu_blocks": blocks}
            ran(tmp_path / f"{blocks}-{seed}", trace=LIGHT, seed=seed, cache=cache, allow_ignored=True)
    arms = arms_of(tmp_path)
    assert answer([Compared("", arms, (), ())], None) == [
        "No request was served to its end in any run, so nothing can be compared."
    ]
    assert light(arms, "load") == ("poor", "no request was served to its end")
    (ignored,) = lost(arms, [], tmp_path)
    assert ignored.endswith("these have no latency, so there is none.")
    assert not any("a seed makes no replicate" in text for text in cautions({"": arms}, 0.02)), "the traces differ"
