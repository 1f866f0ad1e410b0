"""The files of a run: exactly the schema, every request that came, every step that ran."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from testbed.core.commands import StepView
from testbed.core.outcome import Spans, StepResult
from testbed.core.plan import Admission, BatchPlan, Preemption, PreemptionMode
from testbed.core.request import Request
from testbed.core.scheduler import Scheduler
from testbed.core.sequence import Sequence
from testbed.records.recorder import OpenRequest, RunRecorder
from testbed.records.schema import REQUEST_COLUMNS, STEP_COLUMNS
from tests.testbed.core_kit import make_limits, make_request, make_scheduler

ROW_BYTES = 8 * len(STEP_COLUMNS)
ARROW = {
    "string": pa.string(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint64": pa.uint64(),
    "double": pa.float64(),
    "list<int64>": pa.list_(pa.int64()),
}


def run_steps(
    recorder: RunRecorder, scheduler: Scheduler, requests: list[Request], max_steps: int = 1000, step_ns: int = 10
) -> None:
    """As the loop does, all requests seen at instant 0."""
    for request in requests:
        recorder.arrived(request, 0, 0)
        scheduler.add(request)
    now_ns = 0
    while scheduler.has_work and max_steps:
        max_steps -= 1
        plan = scheduler.plan(now_ns)
        counts = scheduler.num_running, scheduler.num_waiting, scheduler.num_swapped
        result = StepResult(now_ns + step_ns, None, Spans(1, 2, 3, 4, 5))
        free = scheduler.free_gpu_blocks, scheduler.free_cpu_blocks
        step = StepView(plan, now_ns, result, bytes(8), [], *counts, *free)
        recorder.launched(step)
        finished = scheduler.commit(result, now_ns + step_ns)
        step.digest_bytes, step.emitters = scheduler.digest_bytes, scheduler.emitters
        recorder.committed(step)
        now_ns += step_ns
        recorder.ended(finished, now_ns)


def recorded(
    folder: Path, scheduler: Scheduler, *requests: Request, max_steps: int = 1000, step_ns: int = 10, **options: bool
) -> RunRecorder:
    """A run whose recorder, of these options, is closed."""
    recorder = RunRecorder(folder, **options)
    run_steps(recorder, scheduler, [*requests], max_steps, step_ns)
    recorder.close()
    return recorder


def rows(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def test_both_files_have_exactly_the_schema(tmp_path: Path) -> None:
    recorded(tmp_path, make_scheduler(), make_request("a", 4, 3))
    for name, columns in (("requests", REQUEST_COLUMNS), ("steps", STEP_COLUMNS)):
        schema = pq.read_schema(tmp_path / f"{name}.parquet")
        assert {field.name: field.type for field in schema} == {key: ARROW[kind] for key, kind in columns.items()}
        assert schema.names == list(columns)


def test_a_run_without_a_request_leaves_empty_tables_of_the_schema(tmp_path: Path) -> None:
    RunRecorder(tmp_path).close()
    assert pq.read_table(tmp_path / "requests.parquet").num_rows == 0
    assert pq.read_schema(tmp_path / "steps.parquet").names == list(STEP_COLUMNS)


def test_a_request_is_recorded_with_all_its_instants(tmp_path: Path) -> None:
    request = make_request("a", 6, 3, tenant="t", session_id="s", turn=2, priority=4, deadline_ns=35)
    recorded(tmp_path, make_scheduler(limits=make_limits(budget=4)), request, make_request("b", 3, 1))
    b, a = sorted(rows(tmp_path / "requests.parquet"), key=lambda row: row["finish_ns"])
    # steps end at 10, 20, 30, 40: a computes 4 and 2 prompt tokens, then decodes twice; b starts in the second step
    assert a == {
        "request_id": "a", "session_id": "s", "turn": 2, "tenant": "t", "priority": 4, "deadline_ns": 35,
        "replica": 0, "num_prompt_tokens": 6, "num_output_tokens": 3, "num_token_steps": 3,
        "num_cached_tokens": 0, "num_preemptions": 0,
        "num_recomputed_tokens": 0, "finish_reason": "length", "finish_message": None,
        "arrival_ns": 0, "queued_ns": 0, "first_scheduled_ns": 0, "first_token_ns": 20, "finish_ns": 40,
        "token_ns": [20, 30, 40], "first_sent_ns": None, "last_sent_ns": None,
        "ttft_s": 20e-9, "tpot_s": 10e-9, "e2e_s": 40e-9,
    }  # fmt: skip
    assert (b["first_scheduled_ns"], b["token_ns"], b["tpot_s"], b["finish_ns"]) == (10, [30], None, 30)
    assert (b["session_id"], b["turn"], b["tenant"], b["deadline_ns"]) == (None, None, None, None)


def test_a_step_is_recorded_as_it_was_decided(tmp_path: Path) -> None:
    scheduler = make_scheduler(num_blocks=8, limits=make_limits(budget=8))
    recorded(tmp_path, scheduler, make_request("a", 4, 2), make_request("b", 7, 1))
    first, second = rows(tmp_path / "steps.parquet")
    assert first == {
        "replica": 0, "step": 0, "start_ns": 0, "end_ns": 10, "num_decodes": 0, "num_prefills": 2,
        "num_decode_tokens": 0,
        "num_prefill_tokens": 8, "decode_context_tokens": 0, "num_emitted": 1, "num_running": 2, "num_waiting": 0,
        "num_swapped": 0, "free_gpu_blocks": 5, "free_cpu_blocks": 0, "num_admitted": 2, "num_cached_tokens": 0,
        "num_preempted": 0, "num_swapped_out": 0, "num_swapped_in": 0, "num_ignored": 0, "blocked_by": None,
        "schedule_ns": 1, "prepare_ns": 2, "swap_ns": 3, "forward_ns": 4, "sample_ns": 5, "digest": first["digest"],
    }  # fmt: skip
    assert (second["num_decodes"], second["decode_context_tokens"], second["num_prefill_tokens"]) == (1, 5, 3)
    assert second["digest"] == scheduler.digest


@pytest.mark.parametrize(("caching", "num_recomputed"), [(False, 4), (True, 0)])  # the cache gives both blocks back
def test_preemptions_are_counted_with_what_they_cost(tmp_path: Path, caching: bool, num_recomputed: int) -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=2, caching=caching)
    recorded(tmp_path, scheduler, make_request("a", 4, 3), make_request("b", 4, 3))
    found = {row["request_id"]: row for row in rows(tmp_path / "requests.parquet")}
    assert (found["a"]["num_preemptions"], found["a"]["num_recomputed_tokens"]) == (0, 0)
    assert (found["b"]["num_preemptions"], found["b"]["num_recomputed_tokens"]) == (1, num_recomputed)
    assert found["b"]["num_cached_tokens"] == 0, "what it hit when it came back is not a hit of its prompt"
    assert sum(row["num_preempted"] for row in rows(tmp_path / "steps.parquet")) == 1


def test_unfinished_requests_are_recorded_and_have_no_end(tmp_path: Path) -> None:
    requests = [make_request("done", 4, 1), make_request("half", 4, 9), make_request("never seen", 4, 9)]
    recorder = recorded(tmp_path, make_scheduler(limits=make_limits(seqs=2)), *requests, max_steps=1)
    found = {row["request_id"]: row for row in rows(tmp_path / "requests.parquet")}
    assert list(found) == ["done", "half", "never seen"]
    assert found["done"]["finish_reason"] == "length"
    half, unseen = found["half"], found["never seen"]
    assert (half["finish_reason"], half["finish_ns"], half["e2e_s"]) == (None, None, None)
    assert (half["num_output_tokens"], half["token_ns"], half["ttft_s"]) == (1, [10], 10e-9)
    assert (unseen["first_scheduled_ns"], unseen["num_cached_tokens"], unseen["token_ns"]) == (None, None, [])
    assert (recorder.num_sent, recorder.num_finished) == (3, 1)


def test_ignored_and_aborted_requests_are_recorded_with_their_reason(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    scheduler = make_scheduler(limits=make_limits(model_len=8))
    run_steps(recorder, scheduler, [make_request("long", 9, 1), make_request("a", 4, 9)], max_steps=2)
    finished = scheduler.abort("a", 25)
    assert finished is not None
    recorder.ended([finished], 25)
    recorder.close()
    found = {row["request_id"]: row for row in rows(tmp_path / "requests.parquet")}
    assert found["long"]["finish_reason"] == "ignored"
    assert found["long"]["finish_message"] == "prompt of 9 tokens exceeds max_model_len (8)"
    assert recorder.ignored == [("long", "prompt of 9 tokens exceeds max_model_len (8)")]
    assert (found["a"]["finish_reason"], found["a"]["finish_ns"], found["a"]["num_output_tokens"]) == ("abort", 25, 2)


def test_without_token_times_only_the_list_is_missing(tmp_path: Path) -> None:
    recorded(tmp_path, make_scheduler(), make_request("a", 4, 3), token_times=False)
    (row,) = rows(tmp_path / "requests.parquet")
    assert (row["token_ns"], row["num_output_tokens"], row["first_token_ns"], row["tpot_s"]) == (None, 3, 10, 10e-9)


def test_rows_are_flushed_in_groups_so_that_memory_does_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunRecorder, "FLUSH_ROWS", 4)
    monkeypatch.setattr(RunRecorder, "FLUSH_REQUESTS", 4)
    recorder = RunRecorder(tmp_path)
    scheduler = make_scheduler()
    for number in range(10):
        run_steps(recorder, scheduler, [make_request(f"r{number}", 4, 1)])
        assert len(recorder._requests._rows) < 4
        assert len(recorder._steps._rows) < 4 * ROW_BYTES
        assert not recorder._open
    recorder.close()
    file = pq.ParquetFile(tmp_path / "requests.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [4, 4, 2]
    assert [row["request_id"] for row in rows(tmp_path / "requests.parquet")] == [f"r{number}" for number in range(10)]


def test_after_many_groups_they_are_larger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both tables: their metadata stays in memory."""
    monkeypatch.setattr(RunRecorder, "FLUSH_ROWS", 1)
    monkeypatch.setattr(RunRecorder, "FLUSH_REQUESTS", 1)
    recorder = RunRecorder(tmp_path)
    scheduler = make_scheduler()
    for number in range(64 + 17):
        run_steps(recorder, scheduler, [make_request(f"r{number}", 4, 1)])
    recorder.close()
    for name in ("requests", "steps"):
        groups = pq.ParquetFile(tmp_path / f"{name}.parquet").metadata
        assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [1] * 64 + [8, 8, 1]


def test_instants_and_digests_keep_all_their_bits(tmp_path: Path) -> None:
    scheduler = make_scheduler()
    recorded(tmp_path, scheduler, make_request("a", 4, 2), step_ns=2**61 + 1)
    assert [row["end_ns"] for row in rows(tmp_path / "steps.parquet")] == [2**61 + 1, 2**62 + 2]
    assert rows(tmp_path / "steps.parquet")[-1]["digest"] == scheduler.digest


def test_a_decision_line_has_the_published_fields(tmp_path: Path) -> None:
    scheduler = make_scheduler("unified", num_blocks=5, block_size=2, limits=make_limits(model_len=12))
    requests = [make_request("b", 4, 3), make_request("a", 4, 3), make_request("long", 13, 1)]
    recorded(tmp_path, scheduler, *requests, step_ns=500_000_000, decisions=True)
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "step": 0, "time_s": 0.0, "scheduled": {"b": 4, "a": 4}, "preempted": [], "swapped_out": [], "swapped_in": [],
        "ignored": ["long"], "cached_tokens": {"b": 0, "a": 0}, "free_blocks": 1, "free_cpu_blocks": 0,
    }  # fmt: skip
    assert list(lines[0]["scheduled"]) == ["b", "a"], "in the order scheduled"
    assert lines[1] == {
        "step": 1, "time_s": 0.5, "scheduled": {"b": 1}, "preempted": ["a"], "swapped_out": [], "swapped_in": [],
        "ignored": [], "cached_tokens": {}, "free_blocks": 2, "free_cpu_blocks": 0,
    }  # fmt: skip
    # b ends; a comes back with its 4 prompt tokens and the one it emitted, and finds its first two blocks
    assert [line["scheduled"] for line in lines[2:]] == [{"b": 1}, {"a": 1}, {"a": 1}]
    assert [line["cached_tokens"] for line in lines[2:]] == [{}, {"a": 4}, {}]
    assert [line["time_s"] for line in lines] == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_no_decisions_are_written_unless_asked(tmp_path: Path) -> None:
    RunRecorder(tmp_path).close()
    assert not (tmp_path / "decisions.jsonl").exists()


@pytest.mark.parametrize("caching", [False, True])
def test_recomputed_tokens_are_those_computed_more_than_once(tmp_path: Path, caching: bool) -> None:
    """What all requests computed, less what each had to compute once, whatever the cache gave back in between."""
    scheduler = make_scheduler("unified", num_blocks=8, block_size=2, caching=caching, limits=make_limits(budget=5))
    recorded(tmp_path, scheduler, *(make_request(name, 4, 9) for name in ("a", "b", "c")))
    requests, steps = rows(tmp_path / "requests.parquet"), rows(tmp_path / "steps.parquet")
    assert sum(row["num_preemptions"] for row in requests) > 1
    computed = sum(row["num_prefill_tokens"] + row["num_decode_tokens"] for row in steps)
    once = sum(row["num_prompt_tokens"] - row["num_cached_tokens"] + row["num_output_tokens"] - 1 for row in requests)
    assert sum(row["num_recomputed_tokens"] for row in requests) == computed - once
    assert all(row["num_recomputed_tokens"] >= 0 for row in requests)


def test_only_a_request_that_was_served_has_an_end_to_end_latency(tmp_path: Path) -> None:
    scheduler = make_scheduler(num_blocks=2, block_size=2)
    recorded(tmp_path, scheduler, make_request("long", 40, 3), make_request("a", 2, 1))
    latency = {row["request_id"]: row["e2e_s"] for row in rows(tmp_path / "requests.parquet")}
    assert latency["long"] is None
    assert latency["a"] > 0


def test_recorders_of_several_replicas_write_into_the_same_files(tmp_path: Path) -> None:
    first = RunRecorder(tmp_path, decisions=True, replica=0)
    second = RunRecorder(tmp_path, decisions=True, replica=1, beside=first)
    run_steps(first, make_scheduler(), [make_request("a", 4, 2)])
    run_steps(second, make_scheduler(), [make_request("b", 4, 3)])
    second.arrived(make_request("c", 4, 1), 0, 0)
    second.close()
    first.close()
    assert [(row["request_id"], row["replica"]) for row in rows(tmp_path / "requests.parquet")] == [
        ("a", 0), ("b", 1), ("c", 1),
    ]  # fmt: skip
    assert [(row["replica"], row["step"]) for row in rows(tmp_path / "steps.parquet")] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    lines = (tmp_path / "decisions.jsonl").read_text().splitlines()
    assert [json.loads(line)["replica"] for line in lines] == [0, 0, 1, 1, 1]


def test_without_steps_only_their_rows_are_missing(tmp_path: Path) -> None:
    tables = {}
    for name, steps in (("with", True), ("without", False)):
        (tmp_path / name).mkdir()
        recorded(tmp_path / name, make_scheduler(), make_request("a", 4, 3), make_request("b", 4, 5), steps=steps)
        tables[name] = rows(tmp_path / name / "requests.parquet")
    assert rows(tmp_path / "without" / "steps.parquet") == []
    assert tables["with"] == tables["without"]


def step_of(plan: BatchPlan, end_ns: int, spans: Spans, emitters: Seq[Sequence] = ()) -> StepView:
    digest = (2**64 - end_ns).to_bytes(8, "big")
    return StepView(plan, 0, StepResult(end_ns, None, spans), digest, [*emitters], 1, 0, 0, 7, 0)


def test_a_step_cut_short_is_not_there(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4, 8))
    plan = scheduler.plan(0)
    for end_ns, forward_ns in ((10, 4), (20, 6)):
        recorder.arrived(make_request("a", 4, 8), 0, 0)
        recorder.committed(step_of(plan, end_ns, Spans(1, 2, 0, forward_ns, 5)))
    with pytest.raises((OverflowError, ValueError)):  # as a second Ctrl-C may, while it takes the step's numbers
        recorder.committed(step_of(plan, 30, Spans(1, 2, 0, 2**64, 5)))
    recorder.close()
    found = rows(tmp_path / "steps.parquet")
    assert [(row["end_ns"], row["forward_ns"], row["digest"]) for row in found] == [
        (10, 4, 2**64 - 10), (20, 6, 2**64 - 20),
    ]  # fmt: skip


def test_tokens_of_one_step_have_one_instant(tmp_path: Path) -> None:
    for keeps in (True, False):
        recorder = RunRecorder(tmp_path, token_times=keeps)
        scheduler = make_scheduler()
        scheduler.add(make_request("a", 4, 8))
        plan = scheduler.plan(0)
        recorder.arrived(make_request("a", 4, 8), 0, 0)
        seq = scheduler.unfinished()[0]
        for end_ns, num in ((10, 1), (20, 3), (30, 2), (40, 0), (50, 1)):
            recorder.committed(step_of(plan, end_ns, Spans(), [seq] * num))
        recorder.close()
        (row,) = rows(tmp_path / "requests.parquet")
        assert (row["num_output_tokens"], row["num_token_steps"]) == (7, 4)
        assert (row["first_token_ns"], row["tpot_s"]) == (10, 40 / 3 / 1e9)
        assert row["token_ns"] == ([10, 20, 30, 50] if keeps else None)


def test_what_is_swapped_out_is_not_computed_again() -> None:
    request = OpenRequest(make_request("a", 200, 9), 0, keeps_instants=False)
    found = []
    for mode, num_computed in ((PreemptionMode.RECOMPUTE, 100), (PreemptionMode.SWAP, 60), (PreemptionMode.SWAP, 150)):
        request.preempted(Preemption(0, "a", mode, num_computed), is_first=True)
        if mode is PreemptionMode.RECOMPUTE:
            request.admitted(Admission(0, "a", 32, True))
        found.append((request.num_preemptions, request.num_recomputed_tokens))
    assert found == [(1, 68), (2, 68), (3, 68)], "of 100 tokens the cache gave 32 back"
