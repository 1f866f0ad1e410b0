"""`testbed fidelity`: what the simulator measures of itself is matched exactly, and a planted error is found."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from analysis.load import Run, load_run
from experiments import simulate
from experiments.cli import main
from experiments.fidelity.page import BEGIN, END
from experiments.fidelity.study import OURS
from experiments.fidelity.study_report import Score
from experiments.fidelity.study_text import lowest_lines
from testbed.traces.readers.own import read_jsonl
from tests.experiments.measured_files import rows_of, study, write

TRACE = {"name": "synthetic", "num_requests": 60, "rate": 10, "seed": 5,
         "prompt": {"kind": "uniform", "min_tokens": 50, "max_tokens": 600},
         "output": {"kind": "uniform", "min_tokens": 5, "max_tokens": 80}}  # fmt: skip
ENGINE = {"model": "qwen3_0.6b", "scheduler": "vllm_v1", "cache": {"num_gpu_blocks": 3000}}
GIVEN_NS, PLANTED_NS = 500_000, 550_000
FILE = ["model=qwen3_0.6b", "device=h100", "scheduler=vllm_v1", "cache.num_gpu_blocks=3000"]


def ran(folder: Path, overhead_ns: int = GIVEN_NS, **settings) -> Run:
    device = {"name": "h100", "step_overhead_ns": overhead_ns}
    return simulate(settings.pop("trace", TRACE), folder=folder, device=device, **{**ENGINE, **settings})


def fidelity(*arguments: object) -> int:
    return main(["fidelity", *(str(argument) for argument in arguments)])


def result(folder: Path) -> dict:
    return json.loads((folder / "fidelity.json").read_text())


def error_line(capsys, *arguments: object) -> str:
    capsys.readouterr()
    assert fidelity(*arguments) != 0
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert "Traceback" not in said
    return said


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
    assert "60 requests matched one to one" in capsys.readouterr().out


def test_closed_loops_and_aborted_requests_are_replayed_as_they_came(tmp_path):
    trace = {**TRACE, "num_requests": 40, "max_turns": 3}
    run = ran(tmp_path / "turns", trace=trace)
    assert fidelity(run.path, "--out", tmp_path / "out") == 0
    assert {row["error"] for row in result(tmp_path / "out")["loads"][0]["errors"]} == {0.0}


def test_requests_that_did_not_end_well_are_left_out_and_counted(base, tmp_path):
    folder = copied(base, tmp_path / "cut")
    table = pq.read_table(folder / "requests.parquet")
    reasons = pa.array(["abort", "ignored", *table["finish_reason"].to_pylist()[2:]])
    place = table.schema.get_field_index("finish_reason")
    pq.write_table(table.set_column(place, "finish_reason", reasons), folder / "requests.parquet")
    assert fidelity(folder, "--out", tmp_path / "out") == 0
    (load,) = result(tmp_path / "out")["loads"]
    assert load["num_requests"] == 58
    assert load["notes"] == ["2 of 60 requests did not end well and were left out"]


def copied(run: Run, folder: Path) -> Path:
    """The run's folder with the trace in it, as a real run has it."""
    from experiments.compose import compose_from
    from experiments.traces import build_trace
    from testbed.traces.serialize import write_jsonl

    shutil.copytree(run.path, folder)
    write_jsonl(build_trace(compose_from(run.config, [])), folder / "trace.jsonl")
    return folder


def test_repeats_say_how_much_the_engine_varies_and_policies_are_ranked(base, tmp_path, capsys):
    runs = tmp_path / "runs"
    repeat = ran(runs / "again", overhead_ns=GIVEN_NS)
    slower_ttft(repeat.path, 1.25)
    copied(base, runs / "first")
    ran(runs / "late", scheduler="decode_first")
    assert fidelity(runs / "first", runs / "again", runs / "late", "--out", tmp_path / "out") == 0
    found = result(tmp_path / "out")
    assert [load["name"] for load in found["loads"]] == ["first", "late"]
    assert found["loads"][0]["repeats"] == ["again"]
    assert found["loads"][0]["noise"]["ttft_s.mean"] == pytest.approx(0.25, abs=0.01)
    (ranking,) = found["rankings"]
    row = next(row for row in ranking["metrics"] if row["metric"] == "ttft_s.p99")
    assert row["num_policies"] == 2
    assert row["same_winner"] is True
    assert "spread %" in capsys.readouterr().out


def slower_ttft(folder: Path, factor: float) -> None:
    """The run as if every first token had come so many times later."""
    table = pq.read_table(folder / "requests.parquet")
    arrival = table["arrival_ns"]
    later = pc.add(
        arrival, pc.cast(pc.multiply(pc.subtract(table["first_token_ns"], arrival), factor), "int64", safe=False)
    )
    table = table.set_column(table.schema.get_field_index("first_token_ns"), "first_token_ns", later)
    pq.write_table(table, folder / "requests.parquet")


# --- fitting ---


def fitted(folder: Path, *arguments: object) -> dict:
    out = folder.with_name(folder.name + "-out")
    assert fidelity(folder, f"device.step_overhead_ns={GIVEN_NS}", "--fit", "host", "--out", out, *arguments) == 0
    return result(out)


def test_a_planted_overhead_is_recovered_and_the_second_half_judges_it(tmp_path):
    found = fitted(ran(tmp_path / "planted", PLANTED_NS).path)
    assert found["fit"]["given"] == {"host": GIVEN_NS}
    assert found["fit"]["fitted"]["host"] == pytest.approx(PLANTED_NS, rel=0.02)
    halves = found["loads"][0]["second_half"]
    for given, after in zip(halves["as_given"], halves["fitted"], strict=True):
        if given["metric"] in ("tpot_s.mean", "e2e_s.mean"):
            assert given["error"] < -0.005
            assert abs(after["error"]) < 0.002


def test_the_second_half_has_no_part_in_the_fit(tmp_path):
    """Other arrivals, lengths and latencies there: the fitted scalar is the very same number."""
    one = ran(tmp_path / "one", PLANTED_NS)
    rows = list(read_jsonl(copied(one, tmp_path / "kept") / "trace.jsonl").rows)
    half = len(rows) // 2
    changed = [
        row if i < half else row._replace(arrival_ns=row.arrival_ns * 2, prompt=rows[0].prompt, output=rows[1].output)
        for i, row in enumerate(rows)
    ]
    from testbed.traces.arrange import arrange

    other = ran(tmp_path / "other", PLANTED_NS, trace=arrange("changed", changed))
    slower_ttft_of_second_half(other.path, {row.request_id for row in rows[half:]})
    fits = [fitted(folder)["fit"] for folder in (one.path, other.path)]
    assert fits[0]["fitted"] == fits[1]["fitted"]
    assert list(fits[0]["num_scored"].values()) == list(fits[1]["num_scored"].values())


def test_in_an_overload_what_was_measured_in_the_second_half_has_no_part_either(tmp_path, capsys):
    trace = {**TRACE, "num_requests": 40, "rate": 400}
    runs = [ran(tmp_path / name, PLANTED_NS, trace=trace).path for name in ("one", "other")]
    slower_ttft_of_second_half(runs[1], {f"r{i}" for i in range(20, 40)})
    fits = [fitted(folder)["fit"] for folder in runs]
    assert fits[0]["fitted"] == fits[1]["fitted"]
    assert fits[0]["fitted"]["host"] == pytest.approx(PLANTED_NS, rel=0.02)
    assert fits[0]["not_apart"] == ["one"]
    assert "too few of one had ended by then" in capsys.readouterr().out


def slower_ttft_of_second_half(folder: Path, ids: set[str]) -> None:
    table = pq.read_table(folder / "requests.parquet")
    for name in ("first_token_ns", "finish_ns"):
        values = [
            value + 10**9 if request_id in ids else value
            for value, request_id in zip(table[name].to_pylist(), table["request_id"].to_pylist(), strict=True)
        ]
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(values, pa.int64()))
    pq.write_table(table, folder / "requests.parquet")


def test_a_planted_factor_is_recovered_over_pcie_too(tmp_path, capsys):
    trace = {**TRACE, "num_requests": 12, "output": {"kind": "uniform", "min_tokens": 2, "max_tokens": 6}}
    device = {"name": "l40s", "tensor_parallel_size": 2, "interconnect_factor": 2.5}
    run = simulate(trace, folder=tmp_path / "pcie", device=device, **ENGINE)
    assert fidelity(run.path, "device.interconnect_factor=1", "--fit", "link", "--out", tmp_path / "out") == 0
    assert result(tmp_path / "out")["fit"]["given"] == {"link": 1.0}
    assert result(tmp_path / "out")["fit"]["fitted"]["link"] == pytest.approx(2.5, rel=0.02)
    assert "| link: device.interconnect_factor |" in capsys.readouterr().out


@pytest.mark.slow
def test_link_is_fitted_beside_host(tmp_path):
    output = {"kind": "uniform", "min_tokens": 5, "max_tokens": 20}
    settings = {"model": "llama3.1_8b", "trace": {**TRACE, "num_requests": 16, "output": output}}
    device = {"name": "h100", "tensor_parallel_size": 4, "step_overhead_ns": PLANTED_NS, "interconnect_factor": 3}
    trace = settings.pop("trace")
    run = simulate(trace, folder=tmp_path / "two", device=device, **{**ENGINE, **settings})
    given = [f"device.step_overhead_ns={GIVEN_NS}", "device.interconnect_factor=1"]
    assert fidelity(run.path, *given, "--fit", "host,link", "--out", tmp_path / "out") == 0
    found = result(tmp_path / "out")
    assert found["fit"]["losses"][1] < 1e-4 * found["fit"]["losses"][0]
    for row in found["loads"][0]["second_half"]["fitted"]:
        if row["metric"] in ("tpot_s.mean", "e2e_s.mean"):
            assert abs(row["error"]) < 0.02  # on one small load each stands in for the other; as given it is 0.2


def test_what_cannot_be_fitted_is_refused(base, tmp_path, capsys):
    assert "did you mean 'host'" in error_line(capsys, base.path, "--fit", "hots")
    assert "name each of host, link once" in error_line(capsys, base.path, "--fit", "host,host")
    assert "--fit has 'cost'" in error_line(capsys, base.path, "--fit", "host,link,cost")
    assert "ran on one device, which has no collectives" in error_line(capsys, base.path, "--fit", "link")
    said = error_line(capsys, base.path, "--fit", "host", "cost=constant")
    assert "cost=constant does not depend on it" in said
    short = ran(tmp_path / "short", trace={**TRACE, "num_requests": 4})
    assert "it takes 8, as half of them are kept" in error_line(capsys, short.path, "--fit", "host")
    file = tmp_path / "study.json"
    file.write_text(json.dumps(study()))
    assert "--fit needs measured requests" in error_line(capsys, file, "--fit", "host")
    assert "--beside goes with a study" in error_line(capsys, base.path, "--beside", "cost=constant")


# --- studies of aggregates ---


def test_a_study_is_simulated_beside_what_others_predicted(tmp_path, capsys):
    file = tmp_path / "study.json"
    file.write_text(json.dumps(study(2)))
    assert fidelity(file, "scheduler=vllm_v1", "--out", tmp_path / "out") == 0
    found = result(tmp_path / "out")
    assert found["kind"] == "study"
    assert "scheduler=vllm_v1 " in found["runs"][0]["used"]
    assert "scheduler.max_num_seqs=64" in found["runs"][0]["used"]
    ours = found["runs"][0]["simulated_ms"]
    assert set(ours) == {"all", "stage0", "stage1"}
    scores = {score["who"]: score for score in found["mape"]["all"]}
    assert scores["other"]["num_runs"] == 1
    assert scores["other"]["errors"]["ttft_mean"] == pytest.approx(1.0)
    assert scores["other"]["errors"]["e2e_mean"] == pytest.approx(0.5)
    assert scores["this simulator"]["num_runs"] == 2
    expected = abs(ours["all"]["ttft_mean"] - 12.0) / 12.0
    assert scores["this simulator"]["errors"]["ttft_mean"] == pytest.approx(expected)
    assert "Lowest, of those that predict all 2 runs: E2E mean this simulator" in capsys.readouterr().out
    assert (tmp_path / "out" / "fidelity.png").exists()


def test_a_study_is_simulated_under_other_settings_beside(tmp_path, capsys):
    file = tmp_path / "study.json"
    file.write_text(json.dumps(study()))
    slow = "scheduler=vllm_v1 device.step_overhead_ns=9000000"
    assert fidelity(file, "scheduler=vllm_v1", "--beside", slow, "--out", tmp_path / "out") == 0
    found = result(tmp_path / "out")
    ours, row = (found["runs"][0][key] for key in ("simulated_ms", "predicted_ms"))
    assert row[f"this simulator, {slow}"]["all"]["e2e_mean"] > ours["all"]["e2e_mean"] + 8
    assert [score["who"] for score in found["mape"]["all"]][:2] == ["this simulator", f"this simulator, {slow}"]
    assert "scheduller" in error_line(capsys, file, "--beside", "scheduller=vllm_v1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ('cost="tables', "--beside 'cost=\"tables': No closing quotation; quote it as"),
        ("", "--beside '' has no override; expected one or more"),
        ("trace.limit=3", "'trace.limit=3': the measured run is the trace"),
        ("backend=vllm", "'backend=vllm': the measured run is the trace, and the simulator runs it"),
        ("hydra.run.dir=x", "'hydra.run.dir=x': runs are kept where --out says"),
    ],
)
def test_what_cannot_be_laid_over_a_measured_run_is_refused(base, tmp_path, capsys, words, said):
    file = tmp_path / "study.json"
    file.write_text(json.dumps(study()))
    assert said in error_line(capsys, file, "--beside", words)
    if words and '"' not in words:
        assert said in error_line(capsys, file, words)
        assert said in error_line(capsys, base.path, words)
    assert fidelity(file, "--beside", "backend.frontend_ns=1000000") == 0


def test_a_study_of_no_runs_is_refused(tmp_path, capsys):
    file = tmp_path / "study.json"
    file.write_text("[]")
    assert f"{file}: an empty list; expected at least one run" in error_line(capsys, file)


def test_every_column_says_who_is_lowest():
    full = {"e2e_mean": 0.1, "ttft_mean": 0.3, "ttft_p99": 0.4}
    few = {"e2e_mean": 0.2, "ttft_p90": 0.05, "ttft_p99": 0.1}
    rows = [
        Score(OURS, 3, full, full),
        Score(f"{OURS}, cost=tables", 3, dict.fromkeys(full, 0.01), full),
        Score("whole", 3, {"e2e_mean": 0.2, "ttft_mean": 0.2, "ttft_p99": 0.1}, full),
        Score("part", 1, few, {"e2e_mean": 0.3, "ttft_p90": 0.1, "ttft_p99": 0.05}),
    ]
    (said,) = lowest_lines(rows)
    assert said == (
        "Lowest, of those that predict all 3 runs: E2E mean this simulator (10.0), TTFT mean whole (20.0), "
        "TTFT P99 whole (10.0). Lower than this simulator on its own 1 runs: part (E2E mean, TTFT P90)."
    )


def test_outputs_of_one_token_have_no_gaps(tmp_path, capsys):
    runs = study(2)
    for run, itl_ms in zip(runs, (0.0, 3.2), strict=True):
        run["workload"]["output_len"] = 1
        run["measured_ms"] = {
            part: {**known, "itl_mean": itl_ms, "e2e_mean": 12.0} for part, known in run["measured_ms"].items()
        }
    file = tmp_path / "study.json"
    file.write_text(json.dumps(runs))
    assert fidelity(file, "--out", tmp_path / "out") == 0
    assert "Notes" not in capsys.readouterr().out
    (ours, _) = result(tmp_path / "out")["mape"]["all"]
    assert {"e2e_mean", "ttft_mean"} <= ours["errors"].keys()
    assert not {"itl_mean", "tpot_mean"} & ours["errors"].keys()


def test_a_study_plans_ahead_where_its_engine_does(tmp_path, capsys):
    file = tmp_path / "study.json"
    file.write_text(json.dumps(study()))
    assert fidelity(file) == 0
    assert "scheduler=vllm_v1_async " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda run: run["workload"].update(output_len=0),
            "field 'output_len' is 0; expected a whole number of tokens",
        ),
        (lambda run: run["workload"].update(stages=[]), "field 'workload.stages' is empty"),
        (
            lambda run: run["workload"]["stages"][1].update(duration=0),
            "field 'workload.stages[1]' sends no request (0 s at 20 a second)",
        ),
        (
            lambda run: run["workload"]["stages"][0].update(rate=1e7),
            "field 'workload.stages' sends 20,000,000 requests; expected at most 2,000,000 a run",
        ),
        (
            lambda run: run["measured_ms"]["stage1"].update(e2e_mean=8),
            "field 'measured_ms.stage1.e2e_mean' is 8.0; expected at least ttft_mean, 12",
        ),
        (lambda run: run.update(name="run-0"), "field 'name' is 'run-0'; expected a name not used before (first at"),
        (lambda run: run.update(name=["a"]), "field 'name' is ['a']; expected a name"),
        (
            lambda run: run.update(predicted_ms={"this simulator, x": {}}),
            "field 'predicted_ms' is 'this simulator, x'; expected another name",
        ),
        (lambda run: run.pop("model"), "field 'model' is absent"),
        (lambda run: run.update(model="acme/none"), "the model is 'acme/none', which the library does not have"),
        (lambda run: run.update(device="Abacus"), "the device is 'Abacus'"),
        (lambda run: run["measured_ms"].pop("stage1"), "field 'measured_ms' has no 'stage1'"),
        (lambda run: run["measured_ms"]["all"].update(ttft_mean=-1), "field 'measured_ms.all.ttft_mean' is -1"),
        (
            lambda run: run["measured_ms"]["stage0"].update(itl_mean=0),
            "field 'measured_ms.stage0.itl_mean' is 0, between 16 tokens; expected a mean above 0",
        ),
    ],
)
def test_a_study_that_is_wrong_says_where(tmp_path, capsys, change, said):
    runs = study(2)
    runs[1] = json.loads(json.dumps(runs[1]))
    change(runs[1])
    file = tmp_path / "study.json"
    file.write_text(json.dumps(runs))
    message = error_line(capsys, file)
    assert f"{file}: run 2" in message
    assert said in message


def test_the_published_study_is_read_whole(capsys):
    file = Path(os.environ.get("TESTBED_TRACES", "")) / "measured" / "h100_vllm_0.15" / "runs.json"
    if "TESTBED_TRACES" not in os.environ or not file.is_file():
        pytest.skip("set TESTBED_TRACES to a folder with measured/h100_vllm_0.15/runs.json")
    assert fidelity(file) == 0
    assert "Lowest, of those that predict all 9 runs" in capsys.readouterr().out


# --- the command line ---


def test_the_command_line_is_checked(base, tmp_path, capsys):
    assert "at least one measured run" in error_line(capsys)
    assert "does not exist; expected a measured run" in error_line(capsys, tmp_path / "none")
    assert "no complete run folder" in error_line(capsys, tmp_path)
    (tmp_path / "out").mkdir()
    assert "choose another --out or pass --overwrite" in error_line(capsys, base.path, "--out", tmp_path / "out")
    assert fidelity(base.path, "--out", tmp_path / "out", "--overwrite") == 0
    assert fidelity(base.path, "--out", tmp_path / "out", "--overwrite") == 0
    assert "the measured run is the trace" in error_line(capsys, base.path, "trace=azure")
    assert "the simulator runs it" in error_line(capsys, base.path, "backend=real")
    assert "did you mean 'request-log'" in error_line(capsys, base.path, "--format", "request-logs")
    assert "nothing" in error_line(capsys, base.path, "nothing.here=1")
    file = write(tmp_path, "request-log", rows_of(base))
    assert "--format run-folder is of folders" in error_line(capsys, file, "--format", "run-folder")
    (tmp_path / "study.json").write_text(json.dumps(study()))
    assert "compare it by itself" in error_line(capsys, tmp_path / "study.json", file, *FILE)


def test_runs_kept_with_out_are_run_folders(base, tmp_path):
    file = write(tmp_path, "vllm-bench", rows_of(base))
    assert fidelity(file, *FILE, "--out", tmp_path / "out") == 0
    measured = load_run(tmp_path / "out" / "runs" / "bench" / "measured")
    simulated = load_run(tmp_path / "out" / "runs" / "bench" / "simulated")
    assert measured.fingerprint == simulated.fingerprint
    assert len(measured.requests) == 60
    assert main(["report", str(tmp_path / "out" / "runs"), "--out", str(tmp_path / "report.html")]) == 0


def test_overwriting_removes_the_runs_of_before_and_no_others(base, tmp_path, capsys):
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
    said = error_line(capsys, runs / "later" / "measured", "--out", out, "--overwrite")
    assert "which --overwrite renews; choose another --out" in said
    (tmp_path / "study.json").write_text(json.dumps(study()))
    assert fidelity(tmp_path / "study.json", "--out", out, "--overwrite") == 0
    assert not (runs / "later").exists()


def test_a_page_gets_the_table_between_its_marks_and_no_folders(tmp_path, capsys):
    file, page = tmp_path / "study.json", tmp_path / "page.md"
    file.write_text(json.dumps(study()))
    assert "no such file" in error_line(capsys, file, "--page", page)
    page.write_text("before\n")
    assert "once each, in this order" in error_line(capsys, file, "--page", page)
    page.write_text(f"before\n{BEGIN}old{END}\nafter\n")
    words = "cost=roofline device.step_overhead_ns=600000"
    for _ in range(2):
        assert fidelity(file, "--beside", words, "--page", page) == 0
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    command = text.partition("`")[2].partition("`")[0]
    assert shlex.split(command) == ["testbed", "fidelity", "study.json", "--beside", words, "--page", str(page)]
    assert f"fidelity {tmp_path}/study.json" not in text
    assert text.count("Mean absolute percentage errors, whole runs") == 1
