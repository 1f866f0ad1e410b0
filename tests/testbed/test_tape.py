"""What is written to a tape comes back, and a killed run's tape is read to its last whole line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.core.commands import Abort, Arrive, Recorder, ResetPrefixes, StepView
from testbed.core.outcome import FinishReason, Outcome, Spans, StepResult
from testbed.core.request import Request, SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.errors import RunFolderError
from testbed.records.recorders import Recorders
from testbed.records.schema import decision
from testbed.records.tape import Tape, TapeEvent, TapeInbox, TapeWriter, read_tape
from tests.testbed.core_kit import make_request, make_scheduler
from tests.testbed.stepping import add


def view(scheduler: Scheduler, plan_ns: int, end_ns: int, outcomes: tuple[Outcome, ...] | None) -> StepView:
    plan = scheduler.plan(plan_ns)
    result = StepResult(end_ns, outcomes, Spans(1, 2, 3, 4, 5))
    scheduler.commit(result, end_ns)
    return StepView(plan, plan_ns, result, scheduler.digest_bytes, scheduler.emitters, 1, 0, 0, 60, 0)


def write_tape(path: Path) -> list[StepView]:
    """Two steps, one of them sampled and stopped by the backend, a reset and an abort."""
    scheduler, writer = make_scheduler(), TapeWriter(path)
    request = make_request("a", 4, None, arrival_ns=3)
    writer.arrived(request, 7, 0)
    add(scheduler, request)
    views = [
        view(scheduler, 7, 2**60, (Outcome(0, (5,)),)),
        view(scheduler, 2**60, 2**60 + 1, (Outcome(0, (6,), FinishReason.STOP),)),
    ]
    writer.committed(views[0])
    writer.prefixes_reset(2**60, 1)
    writer.aborted("a", 2**60, 1)
    writer.committed(views[1])
    writer.ended([], 0)
    writer.close()
    return views


def test_a_tape_comes_back_as_it_was_written(tmp_path: Path) -> None:
    views = write_tape(tmp_path / "tape.jsonl")
    tape = read_tape(tmp_path / "tape.jsonl")
    assert tape.events == (
        TapeEvent("arrive", "a", 0, 7, 3),
        TapeEvent("reset_prefixes", "", 1, 2**60, 2**60),
        TapeEvent("abort", "a", 1, 2**60, 2**60),
    )
    for step, seen in zip(tape.steps, views, strict=True):
        assert (step.plan_ns, step.commit_ns) == (seen.plan_ns, seen.end_ns)
        assert step.outcomes == seen.result.outcomes
        assert step.spans == seen.result.spans
        assert step.digest == seen.digest
        assert step.decision == decision(seen)


class FullDisk(Recorder):
    def committed(self, step: StepView) -> None:
        raise OSError(f"no space left for step {step.plan.step}")


def test_a_step_that_the_records_have_no_room_for_is_on_the_tape(tmp_path: Path) -> None:
    """Without it, no later step could be replayed."""
    scheduler, writer = make_scheduler(), TapeWriter(tmp_path / "tape.jsonl")
    both = Recorders(FullDisk(), writer)
    add(scheduler, make_request("a", 4, 2))
    for step in range(2):
        with pytest.raises(OSError, match=f"for step {step}"):
            both.committed(view(scheduler, step, step + 1, None))
    writer.close()
    assert len(read_tape(tmp_path / "tape.jsonl").steps) == 2


def test_which_members_stop_with_their_first_token_is_kept(tmp_path: Path) -> None:
    scheduler, writer = make_scheduler(), TapeWriter(tmp_path / "tape.jsonl")
    add(scheduler, make_request("a", 4, None, sampling=SamplingParams(n=3)))
    outcomes = (Outcome(0, (5,), forks=(6, 7), fork_stops=(None, FinishReason.STOP)),)
    writer.committed(view(scheduler, 0, 1, outcomes))
    writer.close()
    assert read_tape(tmp_path / "tape.jsonl").steps[0].outcomes == outcomes


def test_every_tear_of_the_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    write_tape(path)
    text = path.read_text()
    whole = read_tape(path)
    start = text.rstrip("\n").rindex("\n") + 1
    for cut in range(start, len(text) - 1):
        path.write_text(text[:cut])
        torn = read_tape(path)
        assert torn.events == whole.events
        assert torn.steps == whole.steps[:-1], f"cut at {cut}"
    path.write_text(text[:-1])
    assert read_tape(path) == whole, "only the line's end is missing"


def test_what_was_written_is_there_after_each_step_without_outcomes_where_rows_were_all_forced(tmp_path: Path) -> None:
    scheduler, writer = make_scheduler(), TapeWriter(tmp_path / "tape.jsonl")
    add(scheduler, make_request("a", 4, 1))
    writer.committed(view(scheduler, 0, 1, None))
    (there,) = read_tape(tmp_path / "tape.jsonl").steps  # flushed
    assert there.outcomes is None
    writer.close()


STEP = {"kind": "step", "plan_ns": 5, "commit_ns": 9, "outcomes": None, "spans": [0] * 5, "digest": "0", "decision": {}}
ARRIVAL = {"kind": "arrive", "id": "a", "step": 0, "ns": 5, "arrival_ns": 4}
BAD_NUMBERS = [
    STEP | {"commit_ns": "x"}, STEP | {"commit_ns": 4}, STEP | {"plan_ns": -1}, STEP | {"commit_ns": 10**400},
    STEP | {"spans": [0, 0, "a", 0, 0]}, STEP | {"spans": [1, 2, 3]}, ARRIVAL | {"ns": "x"}, ARRIVAL | {"step": 1.5},
    ARRIVAL | {"arrival_ns": -5},
]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    ["garbage", "[]", "7", '{"kind": "step"}', '{"no": "kind"}', '{"kind": "arrive"}', "[" * 100_000,
     *map(json.dumps, BAD_NUMBERS)],
)  # fmt: skip
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tape.jsonl"
    write_tape(path)
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:2], json.dumps(STEP), json.dumps(ARRIVAL), *lines[2:]]))
    assert read_tape(path)
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]))
    with pytest.raises(RunFolderError, match=r"tape\.jsonl:3: not a line of a tape"):
        read_tape(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"kind": "tape", "version": 99}\n', "version 99; this code reads 1"),
        (b"", "is not a tape"),
        (b"garbage", "is not a tape"),
        (b'{"request_id": "a"}', "is not a tape"),
        (b"\x93NUMPY\xff\x00", r"is not a tape: not UTF-8 text \(at byte 0\)"),
    ],
    ids=["of another version", "empty", "no JSON", "of something else", "binary"],
)
def test_a_file_that_is_no_tape_that_can_be_read_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "tape.jsonl"
    path.write_bytes(text)
    with pytest.raises(RunFolderError, match=message):
        read_tape(path)


def test_a_folder_without_tape_says_which_runs_have_one(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="only runs with backend=real or backend=vllm have one"):
        read_tape(tmp_path / "tape.jsonl")


def test_the_events_of_a_tape_come_at_the_boundaries_that_first_saw_them() -> None:
    events = (
        TapeEvent("arrive", "a", 0, 5, 2),
        TapeEvent("arrive", "b", 0, 5, 4),
        TapeEvent("abort", "a", 1, 9, 9),
        TapeEvent("reset_prefixes", "", 1, 9, 9),
        TapeEvent("arrive", "c", 1, 9, 8),
    )

    def make(request_id: str, arrival_ns: int) -> Request:
        return make_request(request_id, 3, arrival_ns=arrival_ns)

    inbox = TapeInbox(Tape((), events), make)
    assert inbox.next_ns() == 5
    assert inbox.due(4) == []
    assert inbox.due(5) == [Arrive(make("a", 2)), Arrive(make("b", 4))]
    assert inbox.next_ns() == 9
    assert inbox.due(100) == [Abort("a"), ResetPrefixes(), Arrive(make("c", 8))]
    assert inbox.next_ns() is None
    assert not inbox.is_open
