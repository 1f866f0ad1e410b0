"""A sweep runs every point, survives a failing one, and is resumed by the same command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from analysis.load import load_sweep
from experiments.configuration.options import options
from experiments.configuration.overrides import with_swept
from tests.analysis.runs import change_manifest
from tests.experiments.kit import SHORT, TINY, Said, Say, manifest_of, option, write_rows

POINTS = "seed=0,1,2"


def sweep(say: Say, folder: Path, *more: str) -> Said:
    return say("run", "-m", *TINY, *SHORT, f"hydra.sweep.dir={folder}", *more)


def point(folder: Path, seed: int) -> Path:
    """The folder of the point with this seed."""
    (found,) = [run.path for run in load_sweep(folder).runs if run.manifest["seed"] == seed]
    return found


def stamps(folder: Path) -> dict[str, int]:
    return {str(file.relative_to(folder)): file.stat().st_mtime_ns for file in folder.rglob("done")}


def test_every_point_is_run_with_its_own_configuration(tmp_path: Path, say: Say) -> None:
    place = f"hydra.sweep.dir={tmp_path / 's'}"
    say("run", *TINY, *SHORT, POINTS, "--multirun", "scheduler=unified,decode_first", place).success()
    runs = load_sweep(tmp_path / "s").runs
    assert sorted((run.manifest["scheduler"], run.manifest["seed"]) for run in runs) == [
        (scheduler, seed) for scheduler in ("decode_first", "unified") for seed in range(3)
    ]


def test_neither_the_mode_nor_a_job_is_found_out_by_composing_all_again(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("hydra._internal.hydra.Hydra.get_mode")
    monkeypatch.delattr("hydra._internal.config_loader_impl.ConfigLoaderImpl.load_sweep_config")
    sweep(say, tmp_path / "s", "seed=0,1").success()
    say("run", *TINY, *SHORT, "hydra.verbose=false", f"hydra.run.dir={tmp_path / 'r'}").success()


def test_the_same_command_again_runs_nothing_twice(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(say, tmp_path / "s", POINTS)
    before = stamps(tmp_path / "s")
    said = sweep(say, tmp_path / "s", POINTS).success()
    assert "done before  3 of 3 points: " in said
    monkeypatch.chdir(tmp_path)
    again = sweep(say, tmp_path / "s", POINTS)
    for seed in range(3):
        place = point(tmp_path / "s", seed)
        assert str(place) in said
        assert f" {place.relative_to(tmp_path)}" in again.out, "as one would type it there"
    assert stamps(tmp_path / "s") == before


def test_an_extended_sweep_runs_what_is_new_in_whatever_order(tmp_path: Path, say: Say) -> None:
    sweep(say, tmp_path / "s", "seed=0,1")
    before = stamps(tmp_path / "s")
    said = sweep(say, tmp_path / "s", "seed=2,1,0", "cache.block_size=8,4")
    assert "done before  2 of 6 points" in said.out
    after = stamps(tmp_path / "s")
    assert len(after) == 6
    assert {name: after[name] for name in before} == before


def test_points_with_fitted_step_times_say_how_far_the_fit_is_off(tmp_path: Path, say: Say) -> None:
    words = ["model=qwen3_8b", "device=h100,h200", "seed=0,1", "cost=calibrated", "trace.num_requests=16"]
    said = say("run", "-m", *words, "trace.rate=1000", f"hydra.sweep.dir={tmp_path / 's'}")
    for device, error in (("h100", "1.9% off, P90 4.8%"), ("h200", "2.7% off, P90 5.6%")):
        line = f"note         2 points: qwen3_8b on {device}, cost=calibrated: left-out steps are {error}"
        assert line in said.out.splitlines()
    runs = [run.manifest for run in load_sweep(tmp_path / "s").runs]
    worst = max(runs, key=lambda manifest: manifest["num_extrapolated_steps"] / manifest["num_steps"])
    label = f"device={worst['device']} seed={worst['seed']}"
    (line,) = [line for line in said.out.splitlines() if "EXTRAPOLATED STEP TIMES" in line]
    assert line == f"note         4 points, the worst {label}: {worst['cost_notes'][0]}"


def test_points_are_read_in_the_order_of_the_sweep(tmp_path: Path, say: Say) -> None:
    for seeds in ("seed=3,1,4", "seed=0,1"):
        sweep(say, tmp_path / "s", seeds)
    assert [run.manifest["seed"] for run in load_sweep(tmp_path / "s").runs] == [3, 1, 4, 0]


def test_what_only_judges_a_run_runs_nothing_again(tmp_path: Path, say: Say) -> None:
    sweep(say, tmp_path / "s", POINTS)
    before = stamps(tmp_path / "s")
    said = sweep(say, tmp_path / "s", POINTS, "slo.ttft_s=0.5", "report.question=Why?")
    assert "restated     3 of them" in said.out
    assert stamps(tmp_path / "s") == before
    for run in load_sweep(tmp_path / "s").runs:
        assert (run.config["report"]["question"], run.config["slo"]["ttft_s"]) == ("Why?", 0.5)
        assert run.summary["slo"]["attainment"] is not None
    assert "restated" not in sweep(say, tmp_path / "s", POINTS, "slo.ttft_s=0.5", "report.question=Why?").out
    error = sweep(say, tmp_path / "s", "slo.ttft_s=1,2").error()
    assert "slo.ttft_s decides nothing of a run, so its values are not swept: give one, and repeat the command" in error


@pytest.mark.parametrize("question", ["Does it, or not?", "[is it] (P99), {c}: what's better", '"a, b"'])
def test_a_question_s_commas_and_brackets_are_punctuation(tmp_path: Path, say: Say, question: str) -> None:
    key = "++report.question" if question[0] == "[" else "report.question"
    sweep(say, tmp_path / "s", POINTS, f"{key}={question}")
    said = {run.config["report"]["question"] for run in load_sweep(tmp_path / "s").runs}
    assert said == {question.strip('"')}


def test_what_is_restated_from_elsewhere_keeps_its_files_as_they_were_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        write_rows(tmp_path / place / "rows.jsonl", [{"arrival_time": 0, "prompt_tokens": 9, "output_tokens": 4}])
    trace = (*TINY, "trace=jsonl", "trace.path=rows.jsonl", "seed=0,1", f"hydra.sweep.dir={tmp_path / 's'}")
    for place, more in (("here", ()), ("there", ("slo.ttft_s=0.5",)), ("here", ("slo.ttft_s=0.25",))):
        monkeypatch.chdir(tmp_path / place)
        said = say("run", "-m", *trace, *more)
        assert ("restated     2 of them" in said.out) == bool(more), said.err
        assert {run.config["trace"]["path"] for run in load_sweep(tmp_path / "s").runs} == {"rows.jsonl"}


def test_a_warm_up_is_cut_off_afterwards_and_the_report_says_so(tmp_path: Path, say: Say) -> None:
    sweep(say, tmp_path / "s", POINTS)
    before, whole = stamps(tmp_path / "s"), [run.summary for run in load_sweep(tmp_path / "s").runs]
    cut_s = whole[0]["duration_s"] / 2
    said = sweep(say, tmp_path / "s", POINTS, f"report.warmup_s={cut_s}")
    assert "restated     3 of them" in said.out
    assert stamps(tmp_path / "s") == before
    for run, uncut in zip(load_sweep(tmp_path / "s").runs, whole, strict=True):
        assert run.summary["num_in_warmup"] > 0
        assert run.summary["num_requests"] == uncut["num_requests"] - run.summary["num_in_warmup"]
        assert run.summary["duration_s"] == pytest.approx(uncut["duration_s"] - cut_s)
        assert f"without the first {cut_s:g} s" in run.summary["time_base"]
    assert "report.warmup_s is -1" in sweep(say, tmp_path / "s", POINTS, "report.warmup_s=-1").error()


def test_a_partial_point_is_set_aside_and_run_again(tmp_path: Path, say: Say) -> None:
    sweep(say, tmp_path / "s", POINTS)
    cut = point(tmp_path / "s", 1)
    digest = manifest_of(cut)["digest"]
    (cut / "done").unlink()
    change_manifest(cut, status="partial")
    before = stamps(tmp_path / "s")
    sweep(say, tmp_path / "s", POINTS).success()
    assert (tmp_path / "s" / f"{cut.name}.partial-1" / "requests.parquet").is_file(), "nothing is lost"
    assert manifest_of(cut)["digest"] == digest
    after = stamps(tmp_path / "s")
    assert {name: after[name] for name in before} == before
    found = load_sweep(tmp_path / "s")
    assert (len(found.runs), found.incomplete) == (3, ()), "what was made again is not missing"


def test_a_point_that_was_killed_before_its_manifest_is_run_again(tmp_path: Path, say: Say) -> None:
    sweep(say, tmp_path / "s", POINTS)
    cut = point(tmp_path / "s", 2)
    for name in ("done", "manifest.json", "summary.json"):
        (cut / name).unlink()
    sweep(say, tmp_path / "s", POINTS).success()
    assert (cut / "done").is_file()


def test_a_value_out_of_range_is_said_once_and_before_any_point_runs(tmp_path: Path, say: Say) -> None:
    said = sweep(say, tmp_path / "s", "cache.block_size=4,600,700", "seed=0,1")
    assert said.status == 1
    assert said.err.splitlines() == [
        "error: cache.block_size=600 seed=0: cache.block_size is 600; it must be from 1 to 512 tokens",
        "error: cache.block_size=700 seed=0: cache.block_size is 700; it must be from 1 to 512 tokens "
        "(4 of 6 points are refused, and none was run)",
    ]
    assert said.out == ""
    assert not (tmp_path / "s").exists()


def test_points_that_fail_as_they_run_are_all_named(tmp_path: Path, say: Say) -> None:
    memories = "device.memory_bytes=1000,80000000000,2000"
    said = say("run", "-m", "model=tiny", *SHORT, f"hydra.sweep.dir={tmp_path / 's'}", memories)
    failed = [line for line in said.out.splitlines() if line.startswith("failed ")]
    assert [line.split(": ")[0].split()[-1][-5:] for line in failed] == ["=1000", "=2000"]
    assert "no room for one KV block of" in said.error()
    found = load_sweep(tmp_path / "s")
    assert (len(found.runs), len(found.incomplete)) == (1, 2)
    assert {manifest_of(folder)["status"] for folder, _ in found.incomplete} == {"failed"}


def test_a_point_whose_trace_is_empty_is_missed(tmp_path: Path, say: Say) -> None:
    said = sweep(say, tmp_path / "s", "trace.start_s=0,1000")
    assert "has no requests" in said.error()
    ((folder, _),) = load_sweep(tmp_path / "s").incomplete
    assert manifest_of(folder)["failure"] in said.error()
    assert manifest_of(folder)["swept"] == {"trace.start_s": "1000"}
    assert "done before  1 of 2" in sweep(say, tmp_path / "s", "trace.start_s=0,1000").out
    assert [path.name for path, _ in load_sweep(tmp_path / "s").incomplete] == [folder.name], "in the same place"


def test_a_point_with_ignored_requests_fails_the_sweep_and_keeps_its_results(tmp_path: Path, say: Say) -> None:
    said = sweep(say, tmp_path / "s", "scheduler.max_model_len=16,128")
    assert "could never fit" in said.error()
    assert len(load_sweep(tmp_path / "s").runs) == 2
    again = sweep(say, tmp_path / "s", "scheduler.max_model_len=16,128")
    assert "done before  2 of 2" in again.out
    assert again.error() == said.error()
    sweep(say, tmp_path / "s", "scheduler.max_model_len=16,128", "allow_ignored=true").success()


def test_one_s_own_options_are_swept(tmp_path: Path, say: Say) -> None:
    option(tmp_path / "conf", "record/thin", "token_times: false\n")
    sweep(say, tmp_path / "s", "record=default,thin", "--config-dir", str(tmp_path / "conf")).success()
    assert len(load_sweep(tmp_path / "s").runs) == 2


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("hydra/sweeper=basic", "hydra/sweeper has no option 'basic'; valid: testbed"),
        ("hydra.run.dir=one", "this is a sweep: name its folder with hydra.sweep.dir instead of hydra.run.dir"),
        ("++hydra.run.dir=one", "this is a sweep: name its folder with hydra.sweep.dir instead of hydra.run.dir"),
        ("hydra.run={dir: one}", "this is a sweep: name its folder with hydra.sweep.dir instead of hydra.run.dir"),
        ("hydra.job.chdir=true", "act on jobs, which run many points each: leave them out"),
    ],
)
def test_what_acts_on_each_point_by_itself_is_refused(tmp_path: Path, say: Say, more: str, told: str) -> None:
    assert told in sweep(say, tmp_path / "s", POINTS, more).error()
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize("plus", ["", "++"])
def test_hydras_keys_may_come_as_one(tmp_path: Path, say: Say, plus: str) -> None:
    say("run", "-m", *TINY, *SHORT, "seed=0,1", f"{plus}hydra={{sweep: {{dir: {tmp_path / 's'}}}}}").success()
    assert len(load_sweep(tmp_path / "s").runs) == 2


@pytest.mark.parametrize("group", ["cache={watermark: 0.07}", "++cache={watermark: 0.07}"])
def test_a_swept_key_that_is_set_elsewhere_makes_no_points_that_are_one_run(
    tmp_path: Path, say: Say, group: str
) -> None:
    told = sweep(say, tmp_path / "s", "cache.watermark=0.01,0.02", group).error()
    assert told == "cache.watermark is given 2 times, and only the last would count; give it once"
    told = sweep(say, tmp_path / "s", "experiment=watermark", group, *SHORT).error()
    assert "are one run: equal, or another setting has the last word; leave it out" in told
    assert not (tmp_path / "s").exists()


STUDIES = {  # what each overlay sweeps beside the seed
    "admission": 4, "batch_composition": 5, "chunk_budget": 5, "preemption": 3, "prefix_caching": 4, "queue_order": 6,
    "watermark": 5,
}  # fmt: skip


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize(("study", "num_arms"), STUDIES.items())
def test_a_classic_study_is_one_command_and_its_report_another(
    tmp_path: Path, say: Say, study: str, num_arms: int
) -> None:
    short = (f"experiment={study}", "trace.num_requests=12", "seed=0", f"hydra.sweep.dir={tmp_path / 's'}")
    say("run", *short).success()
    runs = load_sweep(tmp_path / "s").runs
    assert len(runs) == num_arms
    (question,) = {run.config["report"]["question"] for run in runs}
    say("report", str(tmp_path / "s"), "--out", str(tmp_path / "r.html")).success()
    assert question in (tmp_path / "r.md").read_text()


@pytest.mark.usefixtures("unrendered")
def test_a_classic_study_as_shipped_is_long_enough_to_answer(tmp_path: Path, say: Say) -> None:
    say("run", "experiment=preemption", "scheduler.preemption=recompute,swap", f"hydra.sweep.dir={tmp_path}").success()
    say("report", str(tmp_path), "--out", str(tmp_path / "r.html")).success()
    answer = (tmp_path / "r.md").read_text().partition("## Answer")[2].partition("##")[0]
    assert "preemption swap against preemption recompute: better in mean TTFT (−19" in answer


@pytest.mark.parametrize("load", ["backend.speed=1,2", "trace=azure,mooncake", "+trace.rate=8,9", "seed=3,4"])
def test_another_load_leaves_a_study_its_question(load: str) -> None:
    assert not [item for item in with_swept(["experiment=watermark", load]) if item.startswith("report.")]


@pytest.mark.parametrize(
    ("study", "own", "question", "baseline"),
    [
        ("watermark", "trace.rate=8,9", "How many KV blocks", "watermark 0"),
        ("watermark", "cache.watermark=0.1,0.05", "How many KV blocks", None),
        ("preemption scheduler.preemption=recompute", "scheduler.queue_order=fcfs,sjf", "", None),
        ("preemption report.question=Why?", "scheduler.queue_order=fcfs,sjf", "Why?", None),
        ("preemption report.baseline=sjf", "scheduler.queue_order=fcfs,sjf", "", "sjf"),
    ],
)
def test_a_studys_question_and_baseline_are_of_what_it_sweeps(
    tmp_path: Path, say: Say, study: str, own: str, question: str, baseline: str | None
) -> None:
    short = ("trace.num_requests=3", "seed=0", f"hydra.sweep.dir={tmp_path / 's'}")
    said = say("run", "-m", *f"experiment={study}".split(), own, *short)
    said.success()
    for run in load_sweep(tmp_path / "s").runs:
        assert run.config["report"]["question"].startswith(question)
        assert bool(run.config["report"]["question"]) == bool(question)
        assert run.config["report"]["baseline"] == baseline


def test_studies_that_sweep_are_run_one_at_a_time(tmp_path: Path, say: Say) -> None:
    root = f"hydra.sweep.dir={tmp_path / 's'}"
    assert "run one experiment at a time" in say("run", "experiment=watermark,preemption", root).error()


def test_every_study_that_is_shipped_is_tried() -> None:
    assert set(options("experiment")) == {*STUDIES, "demo", "demo_real"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=range(0,0)", "seed=range(0,0) has no values"),
        ("seed=range(0,4,0)", "seed=range(0,4,0): range() arg 3 must not be zero"),
        ("experiment=admission,watermark", "run one experiment at a time"),
        ("hydra.sweep.subdir=${seed}", "hydra.sweep.subdir: a point's folder is named by what the point is"),
        ("scheduler.queue_order={_target_: nowhere.Order}", "nowhere.Order cannot be imported (there is no module "),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_before_anything_runs(
    tmp_path: Path, say: Say, override: str, said: str
) -> None:
    seeds = () if override.startswith("seed=") else ("seed=0,1",)
    error = sweep(say, tmp_path / "s", override, *seeds).err
    assert said in error
    assert "Traceback" not in error
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trace.num_requests=5,0", "trace.num_requests is 0; it must be at least 1"),
        ("trace.rate_scale=1,inf", "trace.rate_scale is inf; it must be a finite number above 0"),
        ("trace.vocab_size=512,513", "trace.vocab_size is 513, but model tiny has 512 tokens"),
        ("trace.forced=tokens,nothing", "the simulator has no model"),
        ("trace.lengths_from=null,missing.csv", "missing.csv: does not exist"),
        ("trace.path=null,some.csv", "trace=synthetic reads no file"),
        ("trace.prompt={kind: uniform},{kind: uniform, min_tokens: 0}", "trace.prompt.min_tokens is 0"),
        ("trace.transforms=[],[{name: merge, path: missing.csv}]", "missing.csv: does not exist"),
        ("trace.transforms=[],[{name: thin, fraction: 2}]", "trace.transforms[0] (thin): fraction is 2; it must be"),
        ("trace.transforms=[],[{name: jitter, within_s: 0}]", "trace.transforms[0] (jitter): within_s is 0"),
        ("trace.transforms=[],[{name: arrivals, rate: 0}]", "trace.transforms[0] (arrivals): rate is 0"),
        ("scheduler.victim=most_blocks,nope", "scheduler.victim is 'nope'; valid: auto, "),
        ("cache.eviction=lru,[mru]", "cache.eviction is ['mru']"),
        ("backend.router=round_robin,{_target_: builtins.dict, 1: 2}", "backend.router: "),
        ("scheduler.admission=watermark,{_target_: decimal.Decimal, value: x}", "scheduler.admission: cannot make"),
        (
            "scheduler.oracle=none,{_target_: testbed.policies.oracle.Noisy, sd: 3}",
            "cannot make 'testbed.policies.oracle.Noisy'",
        ),
        ("scheduler.max_model_len=64,100000", "scheduler.max_model_len is 100000, but the model has "),
        ("scheduler=sarathi,vllm_v0 & model.sliding_window=8", "cache.sliding_window or model.sliding_window, 8, "),
        ("scheduler=vllm_v0 & model.sliding_window=null,8", "cache.sliding_window or model.sliding_window, 8, "),
        ("scheduler=vllm_v0 & scheduler.lookahead_slots=0,2", "scheduler.lookahead_slots is 2, which"),
        (
            "scheduler.queue_order=fcfs,{_target_: testbed.policies.orders.KeyedQueue, key: 0, goes_by: size}",
            "scheduler.queue_order: goes_by of KeyedQueue is 'size'; choose one of priority, tenant, deadline",
        ),
        ("scheduler.queue_order=fcfs,srpt", "scheduler.queue_order goes by remaining tokens, which no one knows with"),
        ("scheduler.preemption=swap & cache.num_cpu_blocks=9,0", "scheduler.preemption=swap needs CPU blocks"),
        (
            "cache.watermark=0.01,0.999 & scheduler.kv_rules.watermark_when_idle=true",
            "a watermark of 0.999 leaves 64 of",
        ),
    ],
)
def test_what_cannot_be_made_is_said_before_any_point_runs(tmp_path: Path, say: Say, override: str, said: str) -> None:
    error = sweep(say, tmp_path / "s", *override.split(" & "), "seed=0,1").error()
    assert said in error
    assert error.endswith("(2 of 4 points are refused, and none was run)")
    assert not (tmp_path / "s").exists()


def test_files_of_traces_are_looked_for_before_any_point_runs(tmp_path: Path, say: Say) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"arrival_time": 0, "prompt_tokens": 9, "output_tokens": 4}])
    of_file = ("run", "-m", *TINY, "trace=jsonl", f"hydra.sweep.dir={tmp_path / 's'}")
    files = f"trace.path={tmp_path / 'rows.jsonl'},{tmp_path / 'missing.jsonl'},{tmp_path}"
    missing, folder = say(*of_file, files).err.splitlines()
    assert "missing.jsonl: does not exist" in missing
    assert folder.endswith("is a folder; expected a file (2 of 3 points are refused, and none was run)")
    assert "trace=jsonl needs trace.path=<file>" in say(*of_file, "trace.path=null", "seed=0,1").error()
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "a.json").write_text('{"id": "a", "requests": [{"t": 0, "in": 9, "out": 4, "hash_ids":[]}]}')
    merge = f"trace.transforms=[{{name: merge, path: {tmp_path / 'agents'}, format: agentic}}]"
    merged = say(*of_file, files.partition(",")[0], merge, "seed=0,1", f"hydra.sweep.dir={tmp_path / 'merged'}")
    assert merged.status == 0, merged.err
    (tmp_path / "talks.json").write_text("[]")
    talks = ("trace=sharegpt", f"trace.path={tmp_path / 'talks.json'}", f"trace.tokenizer={tmp_path / 'none'}")
    assert "trace.tokenizer" in (error := say(*of_file, *talks, "seed=0,1").error())
    assert "(2 of 2 points are refused, and none was run)" in error
    steps = "trace.transforms=[{name: set_rate, rate: 2, by: thin}, {name: bootstrap}]"
    assert "no rate to change" in say(*of_file, files.partition(",")[0], steps, "seed=0,1").error()
    assert (tmp_path / "s").exists(), "what its rows decide is said of the rows"


def test_a_baseline_that_no_arm_has_for_a_name_is_said_before_any_point_runs(tmp_path: Path, say: Say) -> None:
    arms = ("scheduler=unified,decode_first", "seed=0,1")
    first, *others = sweep(say, tmp_path / "s", *arms, "report.baseline=unifed").out.splitlines()
    assert first == "note         report.baseline is 'unifed', and no arm of these points is: unified; decode_first"
    assert len(others) > 3, "the points are run all the same"
    assert "report.baseline" not in sweep(say, tmp_path / "s", *arms, "report.baseline=unified").out
    first, *_ = sweep(say, tmp_path / "s", *arms, "report.baseline=fi").out.splitlines()
    assert first == "note         report.baseline is 'fi', and 2 arms of these points are: unified; decode_first"
    assert "report.baseline" not in sweep(say, tmp_path / "s", "report.baseline=fi").out, "an arm alone has no name"


def test_a_class_file_that_breaks_sets_no_finished_point_aside(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "breaking_order.py"
    file.write_text("from testbed.policies.queue_order import FCFS\nclass Order(FCFS): pass\n")
    own = "scheduler.queue_order={_target_: breaking_order.Order}"
    sweep(say, tmp_path / "s", own, "seed=0,1").success()
    before = stamps(tmp_path / "s")
    file.write_text("class Order(\n")
    monkeypatch.delitem(sys.modules, "breaking_order")
    said = sweep(say, tmp_path / "s", own, "seed=0,1")
    assert "breaking_order.Order cannot be imported (SyntaxError" in said.err
    assert stamps(tmp_path / "s") == before


def test_a_study_by_an_overlay_goes_to_a_sweeps_folder(tmp_path: Path, say: Say) -> None:
    said = say("run", "experiment=watermark", f"hydra.run.dir={tmp_path / 'run'}")
    assert "name its folder with hydra.sweep.dir" in said.error()
