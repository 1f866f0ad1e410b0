"""The loop: what it takes from the inbox, when it waits, when it refuses to wait for ever."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from testbed.core.commands import Abort, Arrive, Event, Execute, Recorder, ResetPrefixes, Resume, StepView, WaitUntil
from testbed.core.outcome import Finished, StepResult
from testbed.core.request import Request
from testbed.core.scheduler import Scheduler
from testbed.core.sequence import Sequence
from testbed.core.serve import serve
from testbed.core.step import Step
from testbed.errors import LivelockError
from testbed.policies.admission import Watermark
from testbed.policies.compositions.unified import Unified
from testbed.policies.preemption import Auto
from testbed.policies.queue_order import FCFS
from testbed.policies.victim import MostRecentlyAdmitted
from tests.testbed.core_kit import make_limits, make_request, make_scheduler
from tests.testbed.stepping import scheduled


class Timed(NamedTuple):
    at_ns: int
    event: Event


class ListInbox:
    """Events at known instants; `after` gives further ones when a request ends."""

    def __init__(self, *events: Timed, is_open: bool = False, after: dict[str, Timed] | None = None) -> None:
        self.events = list(events)
        self.is_open = is_open
        self.after = after or {}
        self.ended: list[tuple[str, int]] = []

    def due(self, now_ns: int) -> list[Event]:
        due = [timed.event for timed in self.events if timed.at_ns <= now_ns]
        self.events = [timed for timed in self.events if timed.at_ns > now_ns]
        return due

    def next_ns(self) -> int | None:
        return min((timed.at_ns for timed in self.events), default=None)

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        for item in requests:
            self.ended.append((item.request.request_id, now_ns))
            if item.request.request_id in self.after:
                self.events.append(self.after[item.request.request_id])


class Log(Recorder):
    """A recorder that keeps everything."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []
        self.steps: list[StepView] = []

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        self.seen.append(("arrived", request.request_id, now_ns, step))

    def aborted(self, request_id: str, now_ns: int, step: int) -> None:
        self.seen.append(("aborted", request_id, now_ns, step))

    def prefixes_reset(self, now_ns: int, step: int) -> None:
        self.seen.append(("prefixes reset", now_ns, step))

    def committed(self, step: StepView) -> None:
        self.seen.append(("committed", step.plan.step, step.end_ns))
        self.steps.append(step)

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        self.seen.append(("ended", [item.request.request_id for item in finished], now_ns))


def arrive(name: str, at_ns: int, prompt: int = 4, output: int = 2) -> Timed:
    return Timed(at_ns, Arrive(make_request(name, prompt, output, arrival_ns=at_ns)))


def abort(name: str, at_ns: int) -> Timed:
    return Timed(at_ns, Abort(name))


def drive(inbox: ListInbox, scheduler: Scheduler, step_ns: int = 10) -> tuple[Log, list[tuple[str, int | None]]]:
    """Every step takes `step_ns`; returns the record, and the commands with their instants."""
    log, commands, now_ns = Log(), [], 0
    loop = serve(inbox, scheduler, log)
    try:
        command = next(loop)
        while True:
            if isinstance(command, Execute):
                commands.append(("execute", now_ns))
                now_ns += step_ns
                command = loop.send(Resume(now_ns, StepResult(now_ns)))
            else:
                assert isinstance(command, WaitUntil)
                commands.append(("wait", command.until_ns))
                assert command.until_ns is not None
                now_ns = max(now_ns, command.until_ns)
                command = loop.send(Resume(now_ns))
    except StopIteration:
        return log, commands


def test_an_empty_inbox_ends_at_once() -> None:
    log, commands = drive(ListInbox(), make_scheduler())
    assert (log.seen, commands) == ([], [])


def test_an_idle_loop_waits_for_the_next_arrival_and_for_nothing_while_busy() -> None:
    log, commands = drive(ListInbox(arrive("a", 5), arrive("b", 7), arrive("c", 100)), make_scheduler())
    # a alone; b, due in its first step, joins at the boundary; then idle until c
    assert commands == [
        ("wait", 5), ("execute", 5), ("execute", 15), ("execute", 25),
        ("wait", 100), ("execute", 100), ("execute", 110),
    ]  # fmt: skip
    assert [scheduled(view.plan) for view in log.steps[:3]] == [{"a": 4}, {"a": 1, "b": 4}, {"b": 1}]
    assert [(view.plan_ns, view.end_ns) for view in log.steps[:2]] == [(5, 15), (15, 25)]


def test_a_request_is_seen_at_the_boundary_at_or_after_its_arrival() -> None:
    log, _ = drive(ListInbox(arrive("a", 0, output=5), arrive("b", 10), arrive("c", 11)), make_scheduler())
    assert [item for item in log.seen if item[0] == "arrived"] == [
        ("arrived", "a", 0, 0),
        ("arrived", "b", 10, 1),  # exactly at the boundary: in time
        ("arrived", "c", 20, 2),  # one ns late: the next one
    ]


def test_arrivals_of_one_instant_keep_their_order() -> None:
    log, _ = drive(ListInbox(*(arrive(name, 3) for name in ("z", "b", "a"))), make_scheduler())
    assert list(scheduled(log.steps[0].plan)) == ["z", "b", "a"]


def test_an_abort_takes_effect_at_the_next_boundary_and_is_told_to_all() -> None:
    inbox = ListInbox(arrive("a", 0, output=9), arrive("b", 0, output=2), abort("a", 5))
    log, _ = drive(inbox, make_scheduler())
    assert ("aborted", "a", 10, 1) in log.seen
    assert inbox.ended == [("a", 10), ("b", 20)]
    assert [scheduled(view.plan) for view in log.steps] == [{"a": 4, "b": 4}, {"b": 1}]


POLICIES = {"queue": FCFS, "composition": Unified, "victims": MostRecentlyAdmitted, "admission": Watermark,
            "preemption": Auto}  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_told_what_each_sequence_got_and_when_it_ended_or_was_aborted(name: str) -> None:
    got: list[tuple[str, int, int, int]] = []
    gone: list[tuple[str, int]] = []

    class Told(POLICIES[name]):
        def served(self, seq: Sequence, num_tokens: int, num_emitted: int, now_ns: int) -> None:
            got.append((seq.request_id, num_tokens, num_emitted, now_ns))

        def left(self, seq: Sequence, now_ns: int) -> None:
            gone.append((seq.request_id, now_ns))

    inbox = ListInbox(arrive("a", 0, output=9), arrive("b", 0, output=3), arrive("late", 7), abort("a", 5))
    drive(inbox, make_scheduler(**{name: Told()}))
    assert gone == [("a", 10), ("b", 30), ("late", 30)]
    assert got == [
        ("a", 4, 1, 10),
        ("b", 4, 1, 10),
        ("b", 1, 1, 20),
        ("late", 4, 1, 20),
        ("b", 1, 1, 30),
        ("late", 1, 1, 30),
    ]


def test_a_reset_takes_effect_at_the_next_boundary_and_is_told_to_all() -> None:
    log, _ = drive(
        ListInbox(arrive("a", 0, output=3), Timed(3, ResetPrefixes()), Timed(99, ResetPrefixes())), make_scheduler()
    )
    assert [item for item in log.seen if item[0] != "committed"] == [
        ("arrived", "a", 0, 0),
        ("prefixes reset", 10, 1),
        ("ended", ["a"], 30),
        ("prefixes reset", 99, 3),
    ]
    assert [[item.request_id for item in step.plan.preempted] for step in log.steps] == [[], ["a"], []]
    assert [step.plan.num_scheduled for step in log.steps] == [[("a", 4)], [("a", 5)], [("a", 1)]]


def test_an_abort_of_a_finished_request_is_nothing() -> None:
    inbox = ListInbox(arrive("a", 0, output=1), abort("a", 10), arrive("b", 10))
    log, _ = drive(inbox, make_scheduler())
    assert not [item for item in log.seen if item[0] == "aborted"]


def test_an_abort_before_the_first_step_of_a_request_leaves_nothing_to_do() -> None:
    inbox = ListInbox(arrive("a", 5), abort("a", 5))
    _, commands = drive(inbox, make_scheduler())
    assert commands == [("wait", 5)]
    assert inbox.ended == [("a", 5)]


def test_a_finish_may_bring_the_next_turn() -> None:
    inbox = ListInbox(arrive("turn 1", 0, output=1), after={"turn 1": arrive("turn 2", 50)})
    _, commands = drive(inbox, make_scheduler())
    assert commands == [("wait", 0), ("execute", 0), ("wait", 50), ("execute", 50), ("execute", 60)]
    assert inbox.ended == [("turn 1", 10), ("turn 2", 70)]


def test_an_ignored_request_is_a_step_of_its_own_and_ends() -> None:
    inbox = ListInbox(arrive("long", 0, prompt=9))
    _, commands = drive(inbox, make_scheduler(limits=make_limits(model_len=8)))
    assert commands == [("wait", 0), ("execute", 0)]
    assert inbox.ended == [("long", 10)]


def test_a_committed_step_shows_the_state_after_its_plan() -> None:
    log, _ = drive(ListInbox(arrive("a", 0), arrive("b", 0)), make_scheduler(limits=make_limits(seqs=1), num_blocks=9))
    first = log.steps[0]
    assert (first.num_running, first.num_waiting, first.num_swapped) == (1, 1, 0)
    assert (first.free_gpu_blocks, first.free_cpu_blocks) == (8, 0)
    assert [seq.request_id for seq in first.emitters] == ["a"]
    assert log.steps[1].free_gpu_blocks == 7  # the last token's position is in a second block, freed by the commit


class Refuses:
    """A composition of a user's that forgets a request."""

    def compose(self, step: Step) -> None:
        pass


def stuck_scheduler() -> Scheduler:
    return make_scheduler(Refuses())


def test_work_that_nothing_will_move_is_a_livelock_once_the_inbox_is_closed() -> None:
    with pytest.raises(LivelockError, match=r"nothing will arrive, but 2 left: a \(waiting\), b"):
        drive(ListInbox(arrive("a", 0), arrive("b", 3)), stuck_scheduler())


def test_an_open_inbox_is_waited_for() -> None:
    loop = serve(ListInbox(arrive("a", 0), is_open=True), stuck_scheduler(), Log())
    assert next(loop) == WaitUntil(0)
    assert loop.send(Resume(0)) == WaitUntil(None)
    empty = serve(ListInbox(is_open=True), make_scheduler(), Log())
    assert next(empty) == WaitUntil(None)
