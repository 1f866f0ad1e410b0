"""The driver turns commands into waits and steps, on a clock that the test turns."""

from __future__ import annotations

import pytest

from real.clocks import RealTimeClock, SkippingClock, make_clock
from real.config import RealConfig
from real.driver import Computed, StepLog, run
from real.late_records import LateRecords
from testbed.core.commands import Execute, Recorder, Resume, WaitUntil
from testbed.core.outcome import Outcome, Spans, StepResult
from testbed.core.serve import Loop
from testbed.errors import LivelockError
from tests.real.engine_helpers import plan_of, row, tiny_backend

PLAN = plan_of()


class FakeClock:
    def __init__(self) -> None:
        self.time = 999
        self.waits: list[int] = []

    def start(self) -> None:
        self.time = 0

    def before_step(self) -> float:
        return 1.0

    def now_ns(self) -> int:
        return self.time

    def wait_until(self, until_ns: int) -> None:
        self.waits.append(until_ns)
        self.time = max(self.time, until_ns)


class FakeBackend:
    """Each step takes `step_ns` of the fake clock, and its launch `launch_ns`."""

    def __init__(self, clock: FakeClock, step_ns: int, launch_ns: int = 0) -> None:
        self.clock, self.step_ns, self.launch_ns = clock, step_ns, launch_ns

    def start(self, plan):
        assert plan is PLAN
        self.clock.time += self.launch_ns
        return self

    def wait(self):
        self.clock.time += self.step_ns
        return Computed((Outcome(1, (5,)),), Spans(prepare_ns=1, forward_ns=2))


def drive(
    commands: list, step_ns: int = 10, schedule_ns: int = 0, launch_ns: int = 0, log: StepLog | None = None
) -> tuple[list[Resume], FakeClock]:
    clock = FakeClock()
    answers: list[Resume] = []

    def loop() -> Loop:
        for command in commands:
            answers.append((yield command))
            clock.time += schedule_ns

    run(loop(), FakeBackend(clock, step_ns, launch_ns), clock, log)
    assert len(answers) == len(commands)
    return answers, clock


def test_the_clock_starts_at_zero_with_the_first_command():
    answers, _ = drive([WaitUntil(0), Execute(PLAN)])
    assert [answer.now_ns for answer in answers] == [0, 10]


def test_waits_are_waited_and_steps_are_stamped_with_their_end():
    answers, clock = drive([WaitUntil(100), Execute(PLAN), WaitUntil(50), WaitUntil(200), Execute(PLAN)])
    assert [answer.now_ns for answer in answers] == [100, 110, 110, 200, 210]
    assert clock.waits == [100, 50, 200]
    assert answers[0].result is None
    assert answers[1].result == StepResult(110, (Outcome(1, (5,)),), Spans(0, 1, 0, 2, 0))


def test_time_inside_the_loop_is_the_step_s_schedule_time():
    answers, _ = drive([Execute(PLAN), Execute(PLAN)], schedule_ns=7)
    assert [answer.now_ns for answer in answers] == [10, 27]
    assert [answer.result.spans.schedule_ns for answer in answers] == [0, 7]


def test_every_step_lasts_at_least_a_nanosecond():
    answers, _ = drive([Execute(PLAN), Execute(PLAN), WaitUntil(1), Execute(PLAN)], step_ns=0)
    assert [answer.now_ns for answer in answers] == [1, 2, 2, 3]


@pytest.mark.parametrize(
    ("launch_ns", "instants", "logged"),
    [
        (3, [100, 103, 116, 126, 500, 513], [(2, 16), (2, 10), (2, 13)]),
        (0, [100, 101, 110, 120, 500, 510], [(0, 10)] * 3),  # shorter than preparing, as another process measures it
    ],
)
def test_a_step_planned_ahead_is_as_long_as_it_ends_after_the_one_before_it(launch_ns, instants, logged):
    class Log:
        def stepped(self, launch_ns, length_ns, spans):
            found.append((launch_ns, length_ns))

    found = []
    commands = [WaitUntil(100), Execute(PLAN, True), Execute(PLAN), Execute(None), WaitUntil(500), Execute(PLAN)]
    answers, _ = drive(commands, launch_ns=launch_ns, log=Log())
    assert [answer.now_ns for answer in answers] == instants
    assert found == logged


def test_waiting_for_a_wake_is_a_livelock():
    with pytest.raises(LivelockError, match="nobody"):
        drive([Execute(PLAN), WaitUntil(None)])


def test_what_the_backend_raises_passes_through():
    class Broken:
        def start(self, plan):
            raise StopIteration("not the loop's end")

    def loop():
        yield Execute(PLAN)

    with pytest.raises(StopIteration):
        run(loop(), Broken(), FakeClock())


def test_an_interrupt_passes_through():
    clock = FakeClock()
    clock.wait_until = lambda until_ns: (_ for _ in ()).throw(KeyboardInterrupt)

    def loop():
        yield WaitUntil(5)

    with pytest.raises(KeyboardInterrupt):
        run(loop(), FakeBackend(clock, 1), clock)


def test_an_empty_loop_ends_at_once():
    assert drive([])[0] == []


def test_the_real_clock_waits_and_never_returns_early():
    clock = RealTimeClock()
    clock.start()
    clock.wait_until(3_000_000)
    assert clock.now_ns() >= 3_000_000


def test_the_skipping_clock_reaches_any_instant_at_once_and_runs_on():
    clock = SkippingClock()
    clock.start()
    hour = 3600 * 10**9
    clock.wait_until(hour)
    clock.wait_until(5)  # already past: time never goes back
    assert hour <= clock.now_ns() < hour + 10**9


@pytest.mark.parametrize("pace", ["real_time", "as_fast_as_possible", "probe_scaled"])
def test_the_engine_runs_under_the_driver(pace):
    backend = tiny_backend()
    tokens = [3, 1, 4, 1, 5]
    until = 10**6 if pace == "real_time" else 10**12

    def loop() -> Loop:
        yield WaitUntil(until)
        for _ in range(3):
            start = 0 if len(tokens) == 5 else len(tokens) - 1
            resume = yield Execute(plan_of(row(0, tokens, [0, 1], start=start)))
            assert resume.result.end_ns == resume.now_ns
            assert resume.now_ns > until
            tokens.extend(resume.result.outcomes[0].tokens)

    run(loop(), backend, make_clock(RealConfig(pace=pace), backend))
    assert len(tokens) == 8


# --- what is recorded while the device computes ---


class Seen(Recorder):
    """A recorder that notes, beside what it is shown, what the driver had done by then."""

    def __init__(self, notes: list) -> None:
        self.notes = notes

    def arrived(self, request, now_ns, step):
        self.notes.append(("arrived", request, now_ns, step))

    def aborted(self, request_id, now_ns, step):
        self.notes.append(("aborted", request_id, now_ns, step))

    def committed(self, step):
        self.notes.append(("committed", step))

    def ended(self, finished, now_ns):
        self.notes.append(("ended", finished, now_ns))


class NotingBackend(FakeBackend):
    def __init__(self, clock: FakeClock, notes: list) -> None:
        super().__init__(clock, 10)
        self.notes = notes

    def start(self, plan):
        self.notes.append("launched")
        return super().start(plan)

    def wait(self):
        self.notes.append("waited")
        return super().wait()


def test_a_step_is_recorded_when_the_next_one_is_launched_and_everything_in_its_order():
    notes: list = []
    late, clock = LateRecords().of(Seen(notes)), FakeClock()

    def loop():
        yield WaitUntil(0)
        late.arrived("r", 0, 0)
        yield Execute(PLAN)
        late.committed("first")
        late.aborted("r", 10, 1)
        yield Execute(PLAN)
        late.committed("second")
        late.ended(["r"], 20)
        yield WaitUntil(50)
        late.committed("third")

    run(loop(), NotingBackend(clock, notes), clock, catch_up=late.catch_up)
    assert notes == [
        "launched", ("arrived", "r", 0, 0), "waited",
        "launched", ("committed", "first"), ("aborted", "r", 10, 1), "waited",
        ("committed", "second"), ("ended", ["r"], 20),
    ]  # fmt: skip
    late.close()
    assert notes[-1] == ("committed", "third")


class Full(Seen):
    """Has room for nothing of these steps, and says so each time."""

    def committed(self, step):
        if step in ("first", "third"):
            raise OSError(f"no space left for the {step}")
        super().committed(step)


def test_what_a_late_recorder_raises_ends_the_run_when_the_step_is_done():
    notes: list = []
    late, clock = LateRecords().of(Full(notes)), FakeClock()

    def loop():
        yield Execute(PLAN)
        late.committed("first")
        late.ended(["r"], 10)
        yield Execute(PLAN)

    with pytest.raises(OSError, match="no space left for the first"):
        run(loop(), NotingBackend(clock, notes), clock, catch_up=late.catch_up)
    assert notes == ["launched", "waited", "launched", "waited"]
    late.close()
    assert notes[4:] == [("ended", ["r"], 10)]


def test_all_late_records_are_seen_when_they_are_closed_also_after_failures():
    notes: list = []
    late = LateRecords().of(Full(notes))
    for step in ("first", "second", "third"):
        late.committed(step)
    late.arrived("r", 0, 3)
    with pytest.raises(OSError, match="the first"):
        late.close()
    assert notes == [("committed", "second"), ("arrived", "r", 0, 3)]
