"""`testbed fidelity`: what the simulator measures of itself is matched exactly, and a planted error is found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.comparison.arms import by_load, infer_arms
from analysis.load import Run, load_run
from analysis.plots import style
from analysis.reading.files import read_yaml
from experiments.cli import main
from experiments.fidelity.loads import Load, file_loads, folder_load
from experiments.fidelity.measured import MeasuredRequest, measured
from experiments.fidelity.outputs import renewed
from experiments.fidelity.simulating import simulate
from testbed.traces.readers.own import read_jsonl
from tests.analysis.runs import change_columns, change_manifest
from tests.experiments.documented_files import check_keys
from tests.experiments.fidelity_kit import (
    FEW,
    FILE,
    GIVEN_NS,
    PLANTED_NS,
    TRACE,
    compared,
    copied,
    error_line,
    fidelity,
    ran,
    result,
)  # fmt: skip
from tests.experiments.kit import write_rows
from tests.experiments.measured_files import rows_of, study, study_file, write


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Run:
    return ran(tmp_path_factory.mktemp("base") / "run")


def test_what_the_simulator_measured_itself_has_no_error(base, tmp_path, capsys):
    out = tmp_path / "out"
    assert fidelity(base.path, "--out", out) == 0
    (load,) = result(out)["loads"]
    assert load["num_requests"] == 60
    assert [row["error"] for row in load["errors"]] == [0.0] * 18
    assert all(row["median_error"] == 0 and row["abs_error_p99"] == 0 for row in load["requests"])
    steps = load["steps"]
    assert steps["num_compared"] == steps["num_steps"] > 100
    assert {row["group"] for row in steps["by_region"]} >= {"decode", "mixed"}
    assert all(row["error"] == 0 for part in ("by_region", "by_decodes") for row in steps[part])
    assert (out / "fidelity.png").stat().st_size > 10_000
    assert (out / "fidelity.svg").exists()
    text = (out / "fidelity.md").read_text()
    assert "device.step_overhead_ns=500000" in text
    assert "cache.num_gpu_blocks=3000" in text
    said = capsys.readouterr().out
    assert "60 requests matched one to one" in said
    assert "was simulated itself: what stands under 'measured' says nothing of a real engine" in said


@pytest.mark.usefixtures("unrendered")
def test_closed_loops_are_replayed_as_they_came_and_again_from_the_measured_copy(tmp_path):
    """Whose trace was rewritten."""
    trace = {**TRACE, "num_requests": 40, "min_turns": 2, "max_turns": 3, "think_time_s": 0.05}
    (load,) = compared(tmp_path, ran(tmp_path / "turns", trace=trace).path)["loads"]
    assert {row["error"] for row in load["errors"]} == {0.0}
    assert fidelity(tmp_path / "out" / "runs" / "turns" / "measured") == 0


@pytest.mark.usefixtures("unrendered")
def test_a_measured_copy_has_no_trace_to_run_again_and_its_simulation_has(base, tmp_path, say):
    assert fidelity(base.path, "--out", tmp_path / "out") == 0
    copy, simulated = (tmp_path / "out" / "runs" / "run" / name for name in ("measured", "simulated"))
    said = f"{copy} has a measured run's records, and no trace: repeat its simulation, which has both: testbed run "
    for given in ([], ["backend=sim"], ["trace.rate_scale=2"]):
        assert say("run", f"from={copy}", *given).error() == f"{said}from={simulated}"
    run = say("run", f"from={simulated}", f"hydra.run.dir={tmp_path / 'again'}").success()
    assert f"repeated     {simulated}: the same decisions" in run
    trace = ("trace=jsonl", f"trace.path={simulated / 'trace.jsonl'}", f"hydra.run.dir={tmp_path / 'given'}")
    say("run", f"from={copy}", *trace).success()
    assert load_run(tmp_path / "given").fingerprint == load_run(copy).fingerprint


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("given", ["report.warmup_s=2", "report={warmup_s: 2}"])
def test_a_warm_up_is_left_out_of_the_measured_run_too(base, tmp_path, given):
    (load,) = compared(tmp_path, base.path, given)["loads"]
    assert {row["error"] for row in load["errors"]} == {0.0}
    late = base.requests[base.requests.arrival_ns >= base.requests.arrival_ns.min() + 2 * 10**9]
    assert 0 < len(late) < 60
    real = {row["metric"]: row["real"] for row in load["errors"]}
    assert real["ttft_s.mean"] == pytest.approx(late.ttft_s.mean())
    assert {row["num"] for row in load["requests"]} == {load["num_requests"]} == {len(late)}


@pytest.mark.usefixtures("unrendered")
def test_a_warm_up_that_leaves_no_request_is_said(base, tmp_path):
    (load,) = compared(tmp_path, base.path, "report.warmup_s=900")["loads"]
    left = "report.warmup_s=900 leaves out all 60 requests, so there are no numbers: lower it, or take a longer trace"
    assert left in load["notes"]


@pytest.mark.usefixtures("unrendered")
def test_requests_that_did_not_end_well_are_left_out_and_counted(base, tmp_path):
    folder = copied(base, tmp_path / "cut")
    change_columns(folder / "requests.parquet", finish_reason=["abort", "ignored", *base.requests.finish_reason[2:]])
    (load,) = compared(tmp_path, folder)["loads"]
    assert load["num_requests"] == 58
    assert load["notes"][1:] == ["2 of 60 requests did not end well and were left out"]


@pytest.mark.usefixtures("unrendered")
def test_another_scheduler_than_the_run_s_is_said(base, tmp_path):
    for chosen in ("vllm_v1", "sarathi"):
        assert fidelity(base.path, f"scheduler={chosen}", "--out", tmp_path / chosen) == 0
    said = {chosen: result(tmp_path / chosen)["loads"][0]["notes"][1:] for chosen in ("vllm_v1", "sarathi")}
    note = "ran under scheduler=vllm_v1, and is simulated under scheduler=sarathi within the run's limits, unless they"
    assert said == {"vllm_v1": [], "sarathi": [f"{note} are given"]}


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("given", ["scheduler={max_num_seqs: 4}", "scheduler={name: sarathi, max_num_seqs: 4}"])
def test_keys_given_whole_win_over_the_run_s_limits(given, base, tmp_path):
    (load,) = compared(tmp_path, base.path, given)["loads"]
    assert f"scheduler={'sarathi' if 'sarathi' in given else 'vllm_v1'} " in load["used"]
    assert " scheduler.max_num_seqs=4 " in load["used"]


@pytest.mark.usefixtures("unrendered")
def test_repeats_say_how_much_the_engine_varies_and_policies_are_ranked(base, tmp_path, capsys):
    runs = tmp_path / "runs"
    repeat = ran(runs / "again", overhead_ns=GIVEN_NS)
    slower_ttft(repeat.path, 1.25)
    copied(base, runs / "first")
    ran(runs / "late", scheduler="vllm_v0")
    found = compared(tmp_path, runs / "first", runs / "again", runs / "late")
    assert [load["name"] for load in found["loads"]] == ["first", "late"]
    assert found["loads"][0]["repeats"] == ["again"]
    check_keys("fidelity.md", "### `fidelity.json`", found, besides=("fit", "loads.second_half"))
    assert found["loads"][0]["noise"]["ttft_s.mean"] == pytest.approx(0.25, abs=0.01)
    errors = {row["metric"]: row["real"] for row in found["loads"][0]["errors"]}
    means = [
        load_run(tmp_path / "out" / "runs" / name / "measured").summary["ttft_s"]["mean"] for name in ("first", "again")
    ]
    assert errors["ttft_s.mean"] == pytest.approx(sum(means) / 2), "the mean of both counts"
    (ranking,) = found["rankings"]
    row = next(row for row in ranking["metrics"] if row["metric"] == "ttft_s.p99")
    assert row["num_policies"] == 2
    assert (row["num_told_apart"], row["winner_is_clear"]) == (0, False), "they are less apart than equal runs are"
    said = capsys.readouterr().out
    assert "spread %" in said
    assert f"\nwrote {tmp_path / 'out' / 'fidelity.md'}, fidelity.json, fidelity.png; the runs: " in said


def slower_ttft(folder: Path, factor: float) -> None:
    """The run as if every first token had come so many times later."""
    requests = load_run(folder).requests
    later = requests.arrival_ns + (factor * (requests.first_token_ns - requests.arrival_ns)).astype("int64")
    change_columns(folder / "requests.parquet", first_token_ns=later)


# --- fitting ---


@pytest.mark.usefixtures("unrendered")
def test_a_run_counts_once_and_a_simulated_one_repeats_no_measured_one(base, tmp_path, capsys):
    real = copied(base, tmp_path / "both" / "real")
    change_manifest(real, backend="real")
    copied(base, tmp_path / "both" / "sim")
    found = compared(tmp_path, tmp_path / "both", real, real, "cost=roofline")
    loads = {load["name"]: load for load in found["loads"]}
    assert set(loads) == {"both-real", "both-sim"}
    assert not any(load["repeats"] or load["noise"] for load in loads.values())
    assert "was simulated itself" in loads["both-sim"]["notes"][0]
    assert "spread %" not in capsys.readouterr().out


@pytest.mark.usefixtures("unrendered")
def test_what_has_one_name_is_all_compared(base, tmp_path):
    folders = [copied(base, tmp_path / there / "run~1") for there in "abc"]
    (load,) = compared(tmp_path, *folders)["loads"]
    assert (load["name"], load["repeats"]) == ("run~1", ["run~1~2", "run~1~3"])
    columns = ["arrival_s", "num_prompt_tokens", "num_output_tokens", "ttft_s", "e2e_s"]
    write_rows(log := tmp_path / "run~1.jsonl", [dict(zip(columns, (0, 9, 3, 0.1, 0.2), strict=True))])
    said = compared(tmp_path, log, folders[0], "model=qwen3_0.6b", "device=h100", "--overwrite")["loads"]
    assert [(load["name"], load["num_requests"]) for load in said] == [("run~1", 1), ("run~1~2", 60)]


@pytest.mark.usefixtures("unrendered")
def test_pools_that_a_sweep_varies_are_policies_and_no_repeats(tmp_path):
    words = ["cache.num_gpu_blocks=100,400", "trace.num_requests=10", "cost=constant"]
    assert main(["run", "-m", *words, f"hydra.sweep.dir={tmp_path / 'pools'}"]) == 0
    shutil.copytree(next((tmp_path / "pools").glob("*-*")), tmp_path / "num gpu blocks 100")
    loads = compared(tmp_path, tmp_path / "pools")["loads"]
    assert [load["name"] for load in loads] == ["num gpu blocks 100", "num gpu blocks 400"]
    assert not any(load["repeats"] for load in loads)


@pytest.mark.usefixtures("unrendered")
def test_overwriting_removes_no_fitted_run_that_is_compared(base, tmp_path, say):
    out = tmp_path / "out"
    assert fidelity(base.path, "--fit", "kernels", "--out", out) == 0
    run = next((out / "fitted").glob("*/fitted"))
    assert "which --overwrite renews" in error_line(say, run, "--out", out, "--overwrite")
    assert (run / "done").exists()


@pytest.mark.usefixtures("unrendered")
def test_points_of_a_sweep_are_called_by_what_it_varies(tmp_path, capsys):
    folder = tmp_path / "sweep"
    words = ["scheduler.watermark=0,0.1", "scheduler.queue_order=fcfs,sjf", "trace.num_requests=20", "cost=constant"]
    assert main(["run", "-m", *words, "cache.num_gpu_blocks=400", f"hydra.sweep.dir={folder}"]) == 0
    found = compared(tmp_path, folder)
    said = {load["name"] for load in found["loads"]}
    assert said == {f"queue order {order}, watermark {mark}" for order in ("fcfs", "sjf") for mark in ("0", "0.1")}
    points = {f"sweep-{path.parent.name}" for path in folder.glob("*/manifest.json")}
    assert {load["folder"] for load in found["loads"]} == points
    (ranking,) = found["rankings"]
    assert set(ranking["policies"]) == said
    assert "- queue order fcfs" in capsys.readouterr().out


@pytest.mark.usefixtures("unrendered")
def test_what_cannot_be_fitted_is_refused(base, tmp_path, say):
    assert "did you mean 'host'" in error_line(say, base.path, "--fit", "hots")
    assert "name each of host, kernels, link, frontend once" in error_line(say, base.path, "--fit", "host,host")
    assert "at most 2" in error_line(say, base.path, "--fit", "host,link,kernels")
    assert "--fit has 'cost'" in error_line(say, base.path, "--fit", "host,link,cost")
    assert "ran on one device, which has no collectives" in error_line(say, base.path, "--fit", "link")
    said = error_line(say, base.path, "--fit", "host", "cost=constant")
    assert "cost=constant does not depend on it" in said
    short = ran(tmp_path / "short", trace={**TRACE, "num_requests": 4})
    assert "it takes 8, as half of them are kept" in error_line(say, short.path, "--fit", "host")
    assert "--beside goes with a study" in error_line(say, base.path, "--beside", "cost=constant")


# --- the command line ---


@pytest.mark.usefixtures("unrendered")
def test_the_command_line_is_checked(base, tmp_path, say):
    assert "at least one measured run" in error_line(say)
    assert "does not exist; expected a measured run" in error_line(say, tmp_path / "none")
    assert "no complete run folder" in error_line(say, tmp_path)
    (tmp_path / "out").mkdir()
    assert "choose another --out or pass --overwrite" in error_line(say, base.path, "--out", tmp_path / "out")
    assert "which is compared; choose a folder beside" in error_line(say, base.path, "--out", base.path / "out")
    table = base.path / "requests.parquet"
    assert f"give the run's folder: {base.path}" in error_line(say, table)
    assert "--fit has ''" in error_line(say, base.path, "--fit", "")
    assert fidelity(base.path, "--out", tmp_path / "out", "--overwrite") == 0
    assert fidelity(base.path, "--out", tmp_path / "out", "--overwrite") == 0
    assert "the measured run is the trace" in error_line(say, base.path, "trace=azure")
    assert "the simulator runs it" in error_line(say, base.path, "backend=real")
    assert "did you mean 'request-log'" in error_line(say, base.path, "--format", "request-logs")
    assert "nothing" in error_line(say, base.path, "nothing.here=1")
    file = write(tmp_path, "request-log", rows_of(base))
    assert "--format run-folder is of folders" in error_line(say, file, "--format", "run-folder")
    assert "compare it by itself" in error_line(say, study_file(tmp_path, study()), file, *FILE)


@pytest.mark.usefixtures("unrendered")
def test_runs_kept_with_out_are_run_folders(base, tmp_path):
    file = write(tmp_path, "vllm-bench", rows_of(base))
    assert fidelity(file, *FILE, "--out", tmp_path / "out") == 0
    measured = load_run(tmp_path / "out" / "runs" / "bench" / "measured")
    simulated = load_run(tmp_path / "out" / "runs" / "bench" / "simulated")
    assert measured.fingerprint == simulated.fingerprint
    assert len(measured.requests) == 60
    assert main(["report", str(tmp_path / "out" / "runs"), "--out", str(tmp_path / "report.html")]) == 0


@pytest.mark.usefixtures("unrendered")
def test_a_report_takes_measured_closed_loops_whose_arms_share_no_trace(tmp_path):
    """And their repeats, although these have other instants, too."""
    for name, overhead_ns in (("vllm_v0", GIVEN_NS), ("vllm_v1", GIVEN_NS), ("again", PLANTED_NS)):
        trace, scheduler = {**FEW, "max_turns": 3}, name.replace("again", "vllm_v1")
        folder = copied(ran(tmp_path / name, overhead_ns, trace=trace, scheduler=scheduler), tmp_path / "real" / name)
        change_manifest(folder, backend="real")
        config = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(config.replace(f"_ns: {overhead_ns}", f"_ns: {GIVEN_NS}"))
    page, reals = tmp_path / "report.html", [tmp_path / "real" / name for name in ("vllm_v0", "vllm_v1", "again")]
    assert fidelity(*reals, "--out", tmp_path / "out") == 0
    assert main(["report", str(tmp_path / "out" / "runs"), "--out", str(page)]) == 0
    said = page.with_suffix(".md").read_text().replace("\\", "")
    assert "How does vllm_v0 serve this trace?" in said
    assert "No other arm ran on its trace, so nothing is compared." in said
    assert "not compared, because on other traces or seeds than vllm_v0: vllm_v1." in said
    assert all(f"{name}: the simulator's signed error is" in said for name in ("vllm_v0", "vllm_v1"))
    assert "The real engine itself, run again on one trace under one policy (1 repeat), differed by up to" in said


@pytest.mark.parametrize(("is_own", "said"), [
    (False, ["rate = 4 requests/s", "rate = 8 requests/s"]),
    (True, ["trace = slow", "trace = fast"]),
])  # fmt: skip
def test_simulations_of_measured_loads_are_as_many_loads(tmp_path, is_own, said):
    """A trace that only the measured run's folder has, as that of a log, is called as the first such folder."""
    loads: list[Load] = []
    for name, rate, scheduler in (("slow", 4, "vllm_v1"), ("fast", 8, "vllm_v1"), ("late", 8, "vllm_v0")):
        trace = {**FEW, "num_requests": 8, "rate": rate}
        folder = copied(ran(tmp_path / name, trace=trace, scheduler=scheduler, cost="constant"), tmp_path / "in" / name)
        if is_own:
            config = read_yaml(folder / "config.yaml") | {"trace": {"name": "jsonl", "path": f"{folder}/trace.jsonl"}}
            (folder / "config.yaml").write_text(json.dumps(config))
        loads.append(folder_load(load_run(folder), name, name, tmp_path / "out", loads, []))
    sims = [simulate(one.config([]), one.trace, tmp_path / "sims" / one.name, "", one.measured) for one in loads]
    found = by_load(infer_arms(sims), [])
    assert [(load.partition(" (")[0], len(arms)) for load, arms in found.items()] == list(
        zip(said, (1, 2), strict=True)
    )


def test_files_repeat_one_load_only_under_one_model(tmp_path):
    """And a repeat has the trace of the first, by which a report finds the simulation of both."""
    sent = [MeasuredRequest(f"{i}", i + 0.01, 8, 2, 0.1, 0.2, None, None, "row") for i in range(3)]
    again = [row._replace(sent_s=row.sent_s + 0.003 * i) for i, row in enumerate(sent)]
    models = {"first": "Qwen/Qwen3-0.6B", "other": "meta-llama/Llama-3.1-8B", "again": "Qwen/Qwen3-0.6B"}
    runs = [measured(name, "", tmp_path, again if name == "again" else sent, model) for name, model in models.items()]
    loads = file_loads(runs, ["device=h100"], tmp_path / "runs")
    assert [load.key for load in loads] == ["file first", "file other", "file first"]
    assert loads[2].measured.fingerprint == loads[0].measured.fingerprint
    assert [load.measured.flat_config["trace.name"] for load in loads] == ["first", "other", "first"]


@pytest.mark.parametrize(("late_s", "load"), [(0.09, "file first"), (0.11, "file again")])
def test_files_repeat_one_load_only_if_each_request_is_sent_within_a_tenth_of_a_second(tmp_path, late_s, load):
    sent = [MeasuredRequest(f"{i}", i + 0.01, 8, 2, 0.1, 0.2, None, None, "row") for i in range(3)]
    again = [*sent[:2], sent[2]._replace(sent_s=sent[2].sent_s + late_s)]
    runs = [measured(name, "", tmp_path, rows) for name, rows in (("first", sent), ("again", again))]
    assert [one.key for one in file_loads(runs, FILE, tmp_path / "runs")] == ["file first", load]


def test_outputs_are_as_long_as_the_engine_made_them(base, tmp_path):
    """The model may have ended them itself. A record of a group counts the tokens of all its sequences, so there the
    trace says how long each is."""
    folder = copied(base, tmp_path / "run")
    table = pq.read_table(folder / "requests.parquet")
    ended, group, *others = table.to_pylist()
    given = {row.request_id: row.num_output_tokens for row in read_jsonl(folder / "trace.jsonl")}
    ended |= {"num_output_tokens": 3, "num_token_steps": 3}
    group["num_output_tokens"] *= 2
    pq.write_table(pa.Table.from_pylist([ended, group, *others], table.schema), folder / "requests.parquet")
    load = folder_load(load_run(folder), "run", "run", tmp_path / "out", [], [])
    assert given[ended["request_id"]] > 3
    assert {row.request_id: row.num_output_tokens for row in load.trace} == given | {ended["request_id"]: 3}


@pytest.mark.usefixtures("unrendered")
def test_overwriting_removes_the_runs_of_before_and_no_others(base, tmp_path, say):
    file, out = write(tmp_path, "vllm-bench", rows_of(base)), tmp_path / "out"
    runs = out / "runs"
    assert fidelity(file, *FILE, "--out", out) == 0
    (runs / "bench" / "notes.txt").write_text("mine")
    ran(runs / "mine")
    shutil.copytree(base.path, runs / "other" / "simulated")
    file = file.rename(tmp_path / "later.json")
    assert fidelity(file, *FILE, "--out", out, "--overwrite") == 0
    left = {path.relative_to(runs).as_posix() for path in runs.glob("*/*") if path.is_dir()}
    assert left == {"later/measured", "later/simulated", "other/simulated"}
    assert (runs / "bench" / "notes.txt").exists()
    assert load_run(runs / "mine").summary
    said = error_line(say, runs / "later" / "measured", "--out", out, "--overwrite")
    assert "which --overwrite renews; choose another --out" in said
    assert fidelity(study_file(tmp_path, study()), "--out", out, "--overwrite") == 0
    assert not (runs / "later").exists()


def test_a_command_that_is_interrupted_leaves_nothing_of_its_own(base, tmp_path, monkeypatch):
    def press(drawn: object, stem: object) -> None:
        assert (out / "runs" / "run" / "simulated" / "done").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(style, "save", press)
    out = tmp_path / "out"
    assert fidelity(base.path, "--out", out) == 130
    assert not out.exists()
    (out / "runs" / "run").mkdir(parents=True)
    (out / "runs" / "run" / "notes.txt").write_text("mine")
    assert fidelity(base.path, "--out", out, "--overwrite") == 130
    assert [path.name for path in out.rglob("*")] == ["runs", "run", "notes.txt"]


def test_a_trace_that_has_changed_since_the_run_is_refused(tmp_path, say):
    rows = [{"arrival_time": n / 10, "prompt_tokens": 20, "output_tokens": 4} for n in range(20)]
    file = write_rows(tmp_path / "trace.jsonl", rows)
    run = ran(tmp_path / "run", trace={"name": "jsonl", "path": str(file)})
    assert fidelity(run.path, "--out", tmp_path / "out") == 0
    copy = tmp_path / "out" / "runs" / "run" / "measured"
    assert fidelity(copy) == 0
    file.write_text(file.read_text().replace('"prompt_tokens": 20', '"prompt_tokens": 200'))
    for folder in (run.path, copy):
        said = error_line(say, folder)
        assert f"{folder}: {file} no longer gives the trace of the run (fingerprint " in said
    file.unlink()
    gone = f"{run.path} cannot be run again: {file}: does not exist; expected the path of a trace file"
    assert gone in error_line(say, run.path)
    again = ("run", f"from={run.path}", f"hydra.run.dir={tmp_path / 'again'}")
    for words in (again, ("explain", str(run.path))):
        assert f"{gone}; bring the file back, or say where it is: testbed run from={run.path} " in say(*words).error()
    assert say(*again, "trace.path=nowhere").error().startswith("nowhere: does not exist"), "it is not the run's"


def test_while_one_command_writes_its_outputs_another_is_refused(base, tmp_path, say):
    out = tmp_path / "new" / "out"
    with renewed(out, overwrite=False):
        (tmp_path / "link").symlink_to(out)
        for spelled in (out, tmp_path / "new" / "x" / ".." / "out", tmp_path / "link"):
            said = error_line(say, base.path, "--out", spelled, "--overwrite")
            assert f"another process is writing to {out}; wait for its end, or choose another --out" in said
    assert not list((tmp_path / "new").iterdir())


def test_a_link_to_itself_is_one_line(base, tmp_path, say):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for out in (tmp_path / "loop", tmp_path / "loop" / "out"):
        for more in ((), ("--overwrite",)):
            said = error_line(say, base.path, "--out", out, *more)
            assert f"{out}: Too many levels of symbolic links; choose another folder" in said


@pytest.mark.usefixtures("unrendered")
def test_an_empty_folder_that_was_there_stays(base, tmp_path, say):
    (out := tmp_path / "out").mkdir()
    assert "scheduler.nope" in error_line(say, base.path, "scheduler.nope=3", "--out", out, "--overwrite")
    assert "scheduler.nope" in error_line(say, base.path, "scheduler.nope=3", "--out", tmp_path / "new" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "and no other is left"


@pytest.mark.usefixtures("unrendered")
def test_a_command_that_fails_leaves_the_result_of_before(base, tmp_path, say):
    out = tmp_path / "out"
    assert fidelity(base.path, "--out", out) == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert "scheduler.nope" in error_line(say, base.path, "scheduler.nope=3", "--out", out, "--overwrite")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
