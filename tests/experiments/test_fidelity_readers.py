"""Readers of measured files: each reads what its tool writes, and says in one line what is wrong with a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.load import Run
from experiments.cli import main
from experiments.fidelity.formats import read_files, recognise
from experiments.fidelity.measured import MeasuredRun
from testbed.foreign_text import shown
from tests.analysis.runs import change_manifest
from tests.experiments.fidelity_kit import FILE, compared, copied, error_line, fidelity, ran
from tests.experiments.measured_files import EPOCH_S, WRITERS, rows_of, write

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return ran(tmp_path_factory.mktemp("truth") / "run")


@pytest.fixture(scope="module")
def rows(run) -> Rows:
    return rows_of(run)


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("name", WRITERS)
def test_each_format_is_recognised_and_read_to_the_microsecond(rows, tmp_path, name):
    """The run was simulated under the very configuration that it is now simulated under again."""
    file = write(tmp_path, name, rows)
    assert recognise(file.read_text()) == name.removesuffix("-jsonl")
    (load,) = compared(tmp_path, file, *FILE)["loads"]
    assert load["num_requests"] == len(rows)
    errors = {row["metric"]: row["error"] for row in load["errors"]}
    has_gaps = name not in ("guidellm", "llmservingsim-bench", "request-log")
    for metric, error in errors.items():
        if metric.startswith("itl") and not has_gaps:
            assert error is None
        else:
            assert error == pytest.approx(0.0, abs=2e-3), metric


def change(rows: Rows, **values: Any) -> Rows:
    """The rows, with other values in the third."""
    return [{**row, **values} if i == 2 else row for i, row in enumerate(rows)]


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "vllm-bench"])
@pytest.mark.parametrize(
    ("values", "said"),
    [({"ttft_s": -0.5}, "latency of 0 or more"), ({"output": 0}, "output"), ({"prompt": 0}, "input|prompt"),
     ({"ttft_s": 9.0}, "end-to-end latency")],
)  # fmt: skip
def test_rows_that_cannot_be_are_refused_with_their_place(rows, tmp_path, say, name, values, said):
    if name == "llmservingsim-bench" and values == {"output": 0}:
        pytest.skip("a request without output counts as failed there")
    file = write(tmp_path, name, change(rows, **values))
    message = error_line(say, file, *FILE)
    assert str(file) in message
    assert any(word in message for word in said.split("|"))
    assert any(place in message for place in (":3", ":4", "request 3")), message


def bench(rows: Rows, tmp_path: Path, **fields: Any) -> Path:
    """A result of vllm bench serve; fields: other values, None: absent."""
    file = write(tmp_path, "vllm-bench", rows)
    values = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return file


def test_vllm_results_that_cannot_be_rebuilt_say_how_to_measure(rows, tmp_path, say):
    assert "'start_times' is absent" in error_line(say, bench(rows, tmp_path, start_times=None), *FILE)
    plain = bench(rows, tmp_path, ttfts=None, itls=None, input_lens=None, start_times=None)
    assert "run vllm bench serve with --save-detailed" in error_line(say, plain, *FILE)
    short = bench(rows, tmp_path, ttfts=[0.1])
    assert f"field 'ttfts' has 1 entries; expected {len(rows)}" in error_line(say, short, *FILE)
    negative = bench(rows, tmp_path, ttfts=[-1.0] * len(rows))
    assert "request 0: field 'ttfts' is -1.0" in error_line(say, negative, *FILE)
    empty = bench(rows, tmp_path, output_lens=[0] * len(rows))
    assert "request 0: field 'output_lens' is 0" in error_line(say, empty, *FILE)


def test_failed_requests_are_left_out_and_counted(rows, tmp_path, capsys, say):
    file = bench(rows, tmp_path, errors=["", "timed out", *[""] * (len(rows) - 2)], max_concurrency=8)
    assert fidelity(file, *FILE) == 0
    said = capsys.readouterr().out
    assert f"1 of {len(rows)} requests failed in the measured run and were left out" in said
    assert "by at most 8 at once" in said
    everything = bench(rows, tmp_path, errors=["x"] * len(rows))
    assert f"all {len(rows)} failed" in error_line(say, everything, *FILE)


@pytest.mark.usefixtures("unrendered")
def test_appended_results_are_loads_of_their_own_and_repeats_are_found(rows, tmp_path):
    line = bench(rows, tmp_path).read_text()
    later = bench([{**row, "ttft_s": 1.1 * row["ttft_s"]} for row in rows], tmp_path).read_text()
    other = bench(rows[:30], tmp_path).read_text()
    file = tmp_path / "appended.json"
    file.write_text("\n".join([line, later, other]))
    loads = compared(tmp_path, file, *FILE)["loads"]
    assert [(load["name"], load["repeats"]) for load in loads] == [("appended-1", ["appended-2"]), ("appended-3", [])]
    assert loads[0]["noise"]["ttft_s.mean"] == pytest.approx(0.1, abs=1e-3)


def test_what_the_file_does_not_say_must_be_given(rows, tmp_path, say):
    file = write(tmp_path, "guidellm", rows)
    assert "the model is not said by the file" in error_line(say, file, "device=h100")
    assert "the device is not said by the file" in error_line(say, file, "model=qwen3_0.6b")
    assert "the model is not said by the file" in error_line(say, bench(rows, tmp_path, model_id=""), "device=h100")
    unknown = bench(rows, tmp_path, model_id="acme/none")
    assert "the model is 'acme/none'" in error_line(say, unknown, "device=h100")


def test_files_that_are_no_measurement_say_so(rows, tmp_path, say):
    file = tmp_path / "file.json"
    for text, said in (
        ("hello", "not recognised; say with --format"), ("{}", "not recognised"), ("", "not recognised"),
        ("[1]", "field 'run' is 1; expected an object"), ("{", "not recognised"), ("[", "not JSON"),
    ):  # fmt: skip
        file.write_text(text)
        assert said in error_line(say, file, *FILE), text
    file.write_bytes(b"\xff\xfe\xff")
    assert "UTF-8" in error_line(say, file, *FILE)
    file.write_text("{}")
    assert "no values of single requests" in error_line(say, file, *FILE, "--format", "vllm-bench")
    log = write(tmp_path, "request-log", rows)
    log.write_text(log.read_text().replace("ttft_s", "ttft"))
    assert "no row has 'ttft_s' or 'ttft_ms'; did you mean 'ttft'? found" in error_line(say, log, *FILE)
    late = write(tmp_path, "request-log", change(rows, e2e_s=0.001))
    assert "s; expected at most the request's end-to-end latency, 0.001 s: " in error_line(say, late, *FILE)
    doubled = write(tmp_path, "request-log", [*rows, rows[0]])
    assert "expected an id not used before" in error_line(say, doubled, *FILE)
    times = write(tmp_path, "request-log-jsonl", change(rows, gaps_s=[-0.1]))
    assert "token_times_s" in error_line(say, times, *FILE)


def test_sampled_reports_of_guidellm_are_refused(rows, tmp_path, say):
    file = write(tmp_path, "guidellm", rows)
    report = json.loads(file.read_text())
    report["benchmarks"][0]["run_stats"] = {"requests_made": {"successful": len(rows) + 5}}
    file.write_text(json.dumps(report))
    assert f"holds {len(rows)} of {len(rows) + 5} requests" in error_line(say, file, *FILE)


def test_two_files_of_one_name_are_refused(rows, tmp_path, say):
    files = [write(tmp_path / name, "request-log", rows) for name in ("a", "b")]
    assert "two measured files are called 'log'" in error_line(say, *files, *FILE)


def test_the_usage_names_the_command(capsys):
    assert main([]) == 0
    assert "fidelity <measured> ..." in capsys.readouterr().out


def test_a_field_may_be_as_long_as_many_tokens_make_it(rows, tmp_path, say):
    num = 20_000
    long = {**rows[2], "output": num, "gaps_s": [0.001] * (num - 1), "e2e_s": rows[2]["ttft_s"] + 0.001 * (num - 1)}
    few = [{**long, "arrival_s": 0.0}, rows[0], rows[1]]
    text = WRITERS["llmservingsim"][1](few)
    assert max(len(line) for line in text.splitlines()) > 131_072
    file = tmp_path / "sim.csv"
    file.write_text(text)
    assert read_files([file], FILE).measured[0].requests[0].num_output_tokens == num
    times = json.loads(WRITERS["request-log-jsonl"][1](few).splitlines()[0])["token_times_s"]
    log = tmp_path / "log.csv"
    header = "request_id,arrival_s,num_prompt_tokens,num_output_tokens,ttft_s,e2e_s,token_times_s\n"
    log.write_text(header + f'a,0,5,{num},{long["ttft_s"]},{long["e2e_s"]},"{times}"\n')
    assert len(read_files([log], FILE).measured[0].requests[0].gaps_s or ()) == num - 1
    file.write_text(text.replace('"[', '"[\0', 1).replace("\n", "\r\r\n", 1))
    assert "sim.csv" in error_line(say, file, *FILE)


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ([0.1, 0.2], "has 2 instants; expected 3, as output_tokens says"),
        ([0.1, 0.3, 0.2], "is 0.2; expected an instant not before the one before it, 0.3"),
        ([0.11, 0.2, 0.3], "is 0.11; expected its first instant within 0.001 s of ttft_s, 0.1"),
        ([0.1, 0.2, 0.4], "is 0.4; expected its last instant within 0.001 s of e2e_s, 0.3"),
    ],
)
def test_instants_of_tokens_are_those_of_the_row(tmp_path, say, times, said):
    file = tmp_path / "log.jsonl"
    row = {"arrival_s": 0, "num_prompt_tokens": 5, "num_output_tokens": 3, "ttft_s": 0.1, "e2e_s": 0.3}
    file.write_text(json.dumps({**row, "token_times_s": [0.1, 0.2, 0.3005]}))
    assert len(read_files([file], FILE).measured[0].requests) == 1
    file.write_text(json.dumps({**row, "token_times_s": times}))
    assert f"log.jsonl:1: field 'token_times_s' {said}" in error_line(say, file, *FILE)


def test_values_of_another_kind_are_refused_where_they_stand(rows, tmp_path, say):
    log = write(tmp_path, "request-log-jsonl", rows[:3])
    lines = log.read_text().splitlines()
    for change, said in (
        ({"failed": "maybe"}, "log.jsonl:3: field 'failed' is 'maybe'; expected true, false, 1, 0 or nothing"),
        ({"request_id": {"a": 1}}, "log.jsonl:3: field 'request_id' is {'a': 1}; expected a name"),
    ):
        log.write_text("\n".join([*lines[:2], json.dumps({**json.loads(lines[2]), **change})]))
        assert said in error_line(say, log, *FILE)
    log.write_text("\n".join([*lines[:2], json.dumps({**json.loads(lines[2]), "failed": True})]))
    assert len(read_files([log], FILE).measured[0].requests) == 2
    report = write(tmp_path, "guidellm", rows)
    report.write_text(report.read_text().replace('"errored": [{}]', '"errored": 5'))
    assert "benchmark 1: field 'requests.errored' is 5; expected a list" in error_line(say, report, *FILE)
    records = write(tmp_path, "aiperf", rows)
    records.write_text(records.read_text().replace('"unit": "ms"', '"unit": ["ms"]', 1))
    said = error_line(say, records, *FILE)
    assert "profile_export.jsonl:1: field 'metrics.time_to_first_token.unit' is ['ms']; expected one of ns" in said


def test_times_of_0_have_nothing_to_fit(rows, tmp_path, say):
    no_time = [{**row, "ttft_s": 0.0, "e2e_s": 0.0, "gaps_s": [0.0] * len(row["gaps_s"])} for row in rows]
    file = bench(no_time, tmp_path)
    assert "bench has no TPOT and no E2E above 0" in error_line(say, file, *FILE, "--fit", "host")


def log_file(tmp_path: Path, **values: Any) -> Path:
    """A log of one request; values: its fields, None: absent."""
    row = {"arrival_s": 0, "num_prompt_tokens": 5, "num_output_tokens": 101, "ttft_s": 0.1, "e2e_s": 0.33, **values}
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps({name: value for name, value in row.items() if value is not None}))
    return file


def test_a_stated_tpot_is_that_of_ttft_and_e2e_or_gives_e2e(tmp_path, say):
    for wrong in (0.5, 0.0005):
        said = error_line(say, log_file(tmp_path, tpot_s=wrong), *FILE)
        assert f"log.jsonl:1: TPOT is {wrong:g} s; expected (E2E - TTFT) / (tokens - 1), 0.0023 s" in said
    assert read_files([log_file(tmp_path, tpot_s=0.0024)], FILE).measured[0].requests[0].tpot_s == 0.0024
    assert read_files([log_file(tmp_path, tpot_s=9, num_output_tokens=1)], FILE).measured
    (row,) = read_files([log_file(tmp_path, tpot_s=0.0025, e2e_s=None)], FILE).measured[0].requests
    assert row.e2e_s == pytest.approx(0.35)
    assert "'e2e_s' is absent" in error_line(say, log_file(tmp_path, e2e_s=None), *FILE)


def changed_lines(file: Path, change: Callable[[list[dict[str, Any]]], object]) -> MeasuredRun:
    """What is read of a file of JSON lines after a change of its records."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    change(records)
    file.write_text("\n".join(map(json.dumps, records)))
    (run,) = read_files([file], FILE).measured
    return run


def test_what_aiperf_warmed_up_with_and_what_failed_is_left_out_and_counted(rows, tmp_path):
    def change(records: list[dict[str, Any]]) -> None:
        records[0]["metadata"]["benchmark_phase"] = "warmup"
        records[1]["error"] = {"code": 500}
        records[2]["metadata"]["was_cancelled"] = True

    run = changed_lines(write(tmp_path, "aiperf", rows), change)
    assert {row.request_id for row in run.requests} == {row["id"] for row in rows[3:]}
    failed = f"2 of {len(rows) - 1} requests failed in the measured run and were left out"
    assert run.notes[1:] == ("1 request of the warm-up left out", failed)


def test_where_the_engine_goes_by_the_wall_clock_no_offset_is_taken_from_arrivals(rows, tmp_path):
    def change(records: list[dict[str, Any]]) -> None:
        del records[0]  # all others are queued 10 ms after they came
        for record in records:
            record["arrival_time"] += 777.0 - EPOCH_S

    run = changed_lines(write(tmp_path, "llmservingsim-bench", rows), change)
    ttfts = {row["id"]: pytest.approx(row["ttft_s"], abs=1e-6) for row in rows[1:]}
    assert {row.request_id: row.ttft_s for row in run.requests} == ttfts


def test_the_stream_of_guidellm_may_end_after_the_last_token_and_not_before(rows, tmp_path, say):
    file = write(tmp_path, "guidellm", rows)
    report = json.loads(file.read_text())
    request = report["benchmarks"][0]["requests"]["successful"][2]
    stated_ms = request["inter_token_latency_ms"]
    request["inter_token_latency_ms"] = stated_ms / 2
    file.write_text(json.dumps(report))
    assert len(read_files([file], FILE).measured[0].requests) == len(rows)
    request["inter_token_latency_ms"] = stated_ms * 2
    file.write_text(json.dumps(report))
    assert "benchmarks.json: benchmark 1: request 3: TPOT is " in error_line(say, file, *FILE)


def test_aiperfs_latency_between_tokens_is_that_of_its_other_latencies(rows, tmp_path, say):
    file = write(tmp_path, "aiperf", rows)
    first, *others = file.read_text().splitlines()
    record = json.loads(first)
    record["metrics"]["inter_token_latency"] = {"value": 50.0, "unit": "ms"}
    file.write_text("\n".join([json.dumps(record), *others]))
    assert "profile_export.jsonl:1: TPOT is 0.05 s; expected " in error_line(say, file, *FILE)


def test_a_value_that_is_no_number_is_called_so(tmp_path, say):
    for value, said in (
        ("nan", "a number, a latency of 0 or more"),
        ("1_0", "a number, a latency of 0 or more"),
        (10**70, "a number, a latency of 0 or more"),
        (-1, "a latency of 0 or more: the clock ran back"),
    ):
        assert f"'ttft_s' is {shown(value)}; expected {said}" in error_line(
            say, log_file(tmp_path, ttft_s=value), *FILE
        )
    assert "'ttft_s' is 1000" in error_line(say, log_file(tmp_path, ttft_s=10**400), *FILE)


def test_times_in_another_unit_are_suspected(rows, tmp_path, capsys):
    for scale, is_long, is_short in ((1, False, False), (1000, True, False), (1e-3, False, True)):
        times = [{**row, **{name: scale * row[name] for name in ("ttft_s", "e2e_s")}} for row in rows]
        assert fidelity(write(tmp_path, "request-log", times), *FILE) == 0
        said = capsys.readouterr().out
        assert ("if the file's times are in ms, divide them by 1,000" in said) == is_long
        assert ("1,000 times as short as simulated: if the file's times are in s, name them so" in said) == is_short


def test_a_request_that_cannot_fit_is_to_be_left_out_as_the_trace_is_the_files(tmp_path, say):
    said = error_line(say, log_file(tmp_path, num_prompt_tokens=300_000), *FILE)
    assert "exceeds max_model_len (40960)). Leave them out, raise the limit, or accept it with allow_ignored=" in said


@pytest.mark.usefixtures("unrendered")
def test_a_busy_machine_is_told_of_a_run_folder_and_of_its_repeats(run, tmp_path):
    waited = {"first": 1, "second": 1, "third": 2, "fourth": 2}
    for name, num in waited.items():
        busy = f"BUSY MACHINE: waited for {num} cores"
        change_manifest(copied(run, tmp_path / name), backend="real", replay={"notes": [busy]})
    (load,) = compared(tmp_path, *(tmp_path / name for name in waited))["loads"]
    said = [note for note in load["notes"] if "BUSY" in note]
    assert said == ["BUSY MACHINE: waited for 1 cores", "third and fourth: BUSY MACHINE: waited for 2 cores"]
