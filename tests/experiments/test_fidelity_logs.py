"""`testbed fidelity` of a log of one's own: read as a trace, with its sessions, and with what was measured."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from analysis.load import Run, load_run
from experiments import simulate
from experiments.fidelity.formats import read_files
from tests.experiments.fidelity_kit import FILE, compared, error_line

NAMES = "{arrival_time: created, prompt_tokens: usage_in, output_tokens: usage_out, session_id: chat, e2e_s: latency}"
LOG = (f"trace.columns={NAMES}", "trace.where={model: mine, status: 200}")
START_MS = 1_774_742_405_000


@pytest.fixture(scope="module")
def chats() -> Run:
    """Turns that share prefixes, simulated as FILE says."""
    rows = [
        {"request_id": f"{chat}-{turn}", "arrival_time": 0.004 * chat + 2 * turn, "session_id": f"c{chat}",
         "turn": turn, "prompt_tokens": 300 + 1500 * turn, "output_tokens": 20 + chat}
        for turn in range(3) for chat in range(10)
    ]  # fmt: skip
    return simulate(rows, cache={"num_gpu_blocks": 3000})


def gateway_row(row: Any, number: int, **values: Any) -> dict[str, Any]:
    return {
        "request_id": row.request_id, "created": START_MS + round(row.arrival_ns / 1e6), "model": "mine",
        "usage_in": row.num_prompt_tokens, "usage_out": row.num_output_tokens, "chat": row.session_id,
        "turn": row.turn, "ttft_ms": row.ttft_s * 1e3, "latency": row.e2e_s, "status": 200, "user": number, **values,
    }  # fmt: skip


def gateway_log(file: Path, chats: Run, *, unstreamed: int = 0, **others: Any) -> Path:
    """The requests as a gateway logs them, with one of another model and a failed one between."""
    rows = list(chats.requests.sort_values("arrival_ns").itertuples())
    log = [gateway_row(row, i, **({"ttft_ms": ""} if i < unstreamed else {}), **others) for i, row in enumerate(rows)]
    log.insert(1, gateway_row(rows[0], 7, request_id="other", model="theirs"))
    log.insert(2, gateway_row(rows[0], 7, request_id="bad", status=500, usage_out="", ttft_ms="", latency=""))
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, log[0])
        writer.writeheader()
        writer.writerows(log)
    return file


@pytest.mark.usefixtures("unrendered")
def test_sessions_of_a_log_hit_the_cache_again(chats, tmp_path):
    (load,) = compared(tmp_path, gateway_log(tmp_path / "log.csv", chats), *FILE, *LOG)["loads"]
    errors = {row["metric"]: row["error"] for row in load["errors"]}
    for name in ("ttft_s.mean", "ttft_s.p99", "tpot_s.mean", "e2e_s.p99", "throughput.requests_per_s"):
        assert errors[name] == pytest.approx(0.0, abs=2e-3), name
    assert load["num_requests"] == 30
    left_out = '2 of 32 rows left out (1 by model, 1 by status): trace.where={model: "mine", status: 200}'
    assert load["notes"] == ["ignored fields: user", left_out]
    (file,) = tmp_path.rglob("simulated/requests.parquet")
    simulated = load_run(file.parent).requests
    assert simulated["num_cached_tokens"].sum() == chats.requests["num_cached_tokens"].sum() > 0
    (told,) = compared(tmp_path / "again", gateway_log(tmp_path / "alone.csv", chats, chat="", turn=""), *FILE, *LOG)[
        "loads"
    ]
    assert (
        told["notes"][-1] == "no row has a session_id: prefixes that prompts shared do not hit in the simulated cache"
    )
    assert next(row["error"] for row in told["errors"] if row["metric"] == "ttft_s.mean") > 0.1


@pytest.mark.usefixtures("unrendered")
def test_answers_that_were_not_streamed_are_load(chats, tmp_path):
    (load,) = compared(tmp_path, gateway_log(tmp_path / "log.csv", chats, unstreamed=10), *FILE, *LOG)["loads"]
    assert "10 of 30 requests have no TTFT: they are load, and latencies are the others'" in load["notes"]
    errors = {row["metric"]: row for row in load["errors"]}
    assert errors["ttft_s.mean"]["real"] == pytest.approx(chats.requests.nlargest(20, "arrival_ns")["ttft_s"].mean())
    assert errors["ttft_s.mean"]["error"] == pytest.approx(0.0, abs=2e-3)
    assert errors["e2e_s.p99"]["error"] == pytest.approx(0.0, abs=2e-3)
    assert errors["throughput.requests_per_s"]["error"] == pytest.approx(0.0, abs=2e-3)
    assert errors["throughput.output_tokens_per_s"]["real"] is None
    assert {row["metric"]: row["num"] for row in load["requests"]} == {"ttft_s": 20, "tpot_s": 20, "e2e_s": 30}


def test_instants_of_any_clock_are_those_of_traces(chats, tmp_path, say):
    rows = "request_id,arrival_s,num_prompt_tokens,num_output_tokens,ttft_s,e2e_s\n"
    for first, second in (
        ("0", "1.5"),
        (START_MS, START_MS + 1500),
        ("2026-03-29 00:00:00Z", "2026-03-29 00:00:01.5Z"),
    ):
        (file := tmp_path / "log.csv").write_text(f"{rows}a,{first},9,2,0.1,0.2\nb,{second},9,2,0.1,0.2\n")
        (run,) = read_files([file], []).measured
        assert run.requests[1].sent_s - run.requests[0].sent_s == 1.5
    file.write_text(f"{rows}a,{START_MS},9,2,0.1,0.2\nb,3,9,2,0.1,0.2\n")
    assert "log.csv:3: field 'arrival_time' is in seconds of the run" in error_line(say, file, *FILE)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("trace.columns={ttft_s: ttft}",), "trace.columns names 'ttft', which it has not; did you mean 'ttft_ms'?"),
        (("trace.columns={tt: ttft_ms}",), "trace.columns has 'tt', which is no field of ours"),
        (("trace.columns=5",), "trace.columns is 5; it must be {<our field>: "),
        (("trace.where={model: none}",), "log.csv: no requests; expected at least one row by trace.where={model: "),
        (("trace.columns={ttft: ttft_ms}",), "has 'ttft', which is no field of ours; did you mean 'ttft_s'?"),
        (("trace.where={modell: a}",), "trace.where names 'modell', which it has not; did you mean 'model'?"),
        ((LOG[0].replace("usage_out, session_id: chat", "none"), LOG[1]), "names 'none', which it has not"),
        ((LOG[0].replace("latency}", "nothing}"), LOG[1]), "names 'nothing', which it has not"),
        ((LOG[0].replace(", e2e_s: latency", ""), LOG[1]), "log.csv:2: field 'e2e_s' is absent; expected it, or"),
        ((LOG[0].replace("e2e_s", "e2e_ms"), LOG[1]), "log.csv:2: TTFT is "),
        ((LOG[0].replace("e2e_s: latency", "e2e_s: latency, ttft_s: user"), LOG[1]), "both 'ttft_s' and 'ttft_ms' are"),
    ],
)  # fmt: skip
def test_a_wrong_name_is_told_as_of_traces(chats, tmp_path, say, overrides, said):
    assert said in error_line(say, gateway_log(tmp_path / "log.csv", chats), *FILE, *overrides)


def test_rows_and_columns_are_chosen_of_logs_of_ones_own_alone(chats, tmp_path, say):
    said = "trace.where is for logs of your own (--format request-log); leave it out"
    assert said in error_line(say, chats.path, *FILE, "trace.where={a: 1}")
    served = gateway_log(tmp_path / "log.csv", chats, usage_out="", chat="", turn="")
    assert "log.csv:2: field 'output_tokens' is absent; expected it" in error_line(say, served, *FILE, *LOG)


@pytest.mark.usefixtures("unrendered")
def test_repeats_are_averaged_over_what_all_of_them_streamed(tmp_path):
    head = "request_id,arrival_time,prompt_tokens,output_tokens,ttft_s,e2e_s\n"
    (tmp_path / "one.csv").write_text(head + "a,0,9,5,0.05,0.2\nb,1,9,5,,0.4\nc,2,9,5,0.05,0.2\n")
    (tmp_path / "two.csv").write_text(head + "a,0,9,5,0.15,0.6\nb,1,9,5,0.3,0.4\nc,2,9,5,0.15,0.6\n")
    for first, second in (("one", "two"), ("two", "one")):
        files = [tmp_path / f"{name}.csv" for name in (first, second)]
        (load,) = compared(tmp_path / first, *files, *FILE)["loads"]
        errors = {row["metric"]: row["real"] for row in load["errors"]}
        assert errors["ttft_s.mean"] == pytest.approx(0.1)
        assert errors["e2e_s.mean"] == pytest.approx(0.4)


def test_rows_left_out_are_counted_and_leave_sessions_whole(tmp_path):
    head = "created,prompt_tokens,output_tokens,session_id,turn,ttft_s,e2e_s,failed\n"
    rows = "0,,,,,,,true\n0,9,5,a,0,0.1,0.2,\n1,20,0,a,1,0.1,0.2,\n2,40,5,a,2,0.1,0.2,\n"
    (file := tmp_path / "log.csv").write_text(head + rows)
    (run,) = read_files([file], [], of_logs={"columns": {"arrival_time": "created"}}).measured
    assert [row.row.turn for row in run.requests if row.row is not None] == [0, 1]
    assert run.notes == (
        "1 request without output left out: output_tokens is 0",
        "1 of 3 requests failed in the measured run and were left out",
    )
    old = head.replace("created", "arrival_s").replace("prompt_t", "num_prompt_t").replace("output_t", "num_output_t")
    file.write_text(old + rows.replace("1,20,0,a,1,0.1,0.2,\n", "").replace(",a,2", ",a,1"))
    assert len(read_files([file], []).measured[0].requests) == 2
