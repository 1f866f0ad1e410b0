"""How exactly a replay keeps its trace's time, and what it says of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import real.replay
from real.clocks import SLEEP_SLICE_S, SPIN_NS, RealTimeClock, SkippingClock
from real.replay import MAX_LAG_NS, CoreWait, HostTimes, ReplayLag, core_wait_notes
from testbed.core.commands import StepView
from testbed.core.outcome import Spans, StepResult
from testbed.core.plan import BatchPlan, BatchShape
from testbed.core.request import Request
from testbed.made_rows import MadeRows

MS = 1_000_000


class Machine:
    """A machine's clock: each look at it takes `look_ns`, each sleep lasts `oversleep_ns` longer than asked for."""

    def __init__(self, look_ns: int, oversleep_ns: int) -> None:
        self.time = 123_456
        self.sleeps: list[float] = []
        self._look_ns, self._oversleep_ns = look_ns, oversleep_ns

    def read_ns(self) -> int:
        self.time += self._look_ns
        return self.time

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.time += round(seconds * 1e9) + self._oversleep_ns


@given(
    waits=st.lists(st.integers(0, 300 * MS), min_size=1, max_size=5),
    look_ns=st.integers(50, 2_000),
    oversleep_ns=st.integers(0, 3 * SPIN_NS),
)
def test_a_wait_never_ends_early_and_late_only_by_what_the_sleep_exceeds_the_spin(waits, look_ns, oversleep_ns):
    machine = Machine(look_ns, oversleep_ns)
    clock = RealTimeClock(machine.read_ns, machine.sleep)
    clock.start()
    for wait_ns in waits:
        due_ns = clock.now_ns() + wait_ns
        clock.wait_until(due_ns)
        late_ns = machine.time - clock._origin_ns - due_ns
        assert 0 <= late_ns <= max(0, oversleep_ns - SPIN_NS) + 3 * look_ns
    assert all(0 < seconds <= SLEEP_SLICE_S for seconds in machine.sleeps)


def test_the_skipping_clock_never_sleeps():
    machine = Machine(100, 0)
    clock = SkippingClock(machine.read_ns, machine.sleep)
    clock.start()
    clock.wait_until(3_600_000 * MS)
    assert clock.now_ns() == pytest.approx(3_600_000 * MS, abs=1_000)
    assert not machine.sleeps


def arrive(lag: ReplayLag, due_ns: int, seen_ns: int) -> None:
    lag.arrived(Request("r", [1], arrival_ns=due_ns), seen_ns, 0)


def step_until(lag: ReplayLag, plan_ns: int, end_ns: int) -> None:
    plan = BatchPlan(0, BatchShape(1, 1, (), 1), MadeRows(()))
    lag.committed(StepView(plan, plan_ns, StepResult(end_ns), bytes(8), [], 0, 0, 0, 0, 0))


def test_waiting_for_a_step_s_end_is_no_lag():
    lag = ReplayLag()
    arrive(lag, 0, 2 * MS)  # nothing ran: 2 ms of lag
    step_until(lag, 2 * MS, 50 * MS)
    arrive(lag, 10 * MS, 50 * MS)  # came during the step
    arrive(lag, 49 * MS, 51 * MS)  # and this one was overlooked for 1 ms
    arrive(lag, 80 * MS, 80 * MS)
    told = ReplayLag.of_all([ReplayLag(), lag]).describe()
    assert (told["num_arrivals"], told["num_late"], told["max_lag_s"]) == (4, 0, 0.01)
    assert told["lag_s"] == pytest.approx({"mean": 0.00075, "p99": 0.002, "max": 0.002})
    assert told["boundary_wait_s"] == pytest.approx({"mean": 0.041 / 4, "p99": 0.040, "max": 0.040})
    assert lag.notes() == []


def test_before_anything_arrives_there_are_no_numbers():
    assert ReplayLag().describe()["lag_s"] == {"mean": None, "p99": None, "max": None}
    assert ReplayLag().notes() == []
    assert HostTimes().describe()["exposed_share"] is None


@pytest.mark.parametrize(("num_late", "is_said"), [(1, False), (2, True)])
def test_a_replay_that_does_not_keep_pace_says_so(num_late, is_said):
    """Of 100 arrivals one may be late."""
    lag = ReplayLag()
    for number in range(100):
        arrive(lag, number * MS, number * MS + (MAX_LAG_NS + 1 if number < num_late else MAX_LAG_NS))
    assert lag.describe()["num_late"] == num_late
    notes = lag.notes()
    assert bool(notes) is is_said
    if is_said:
        assert notes[0].startswith("REPLAY LAG: 2 of 100 arrivals were seen more than 10 ms after they were due")
        assert "at most 10.0 ms" in notes[0]


def test_host_times_are_means_of_steps_and_what_the_device_hides_is_not_exposed():
    host = HostTimes()
    host.stepped(launch_ns=500, length_ns=10_000, spans=Spans(100, 200, 300, 8_000, 400))
    host.stepped(launch_ns=700, length_ns=10_000, spans=Spans(100, 400, 5_000, 9_000, 400))  # swaps beside the forward
    told = host.describe()
    assert told == {
        "num_steps": 2, "schedule_s": 1e-7, "prepare_s": 3e-7, "launch_s": 6e-7, "exposed_s": pytest.approx(6.5e-7),
        "step_s": 1e-5, "exposed_share": pytest.approx(1_300 / 20_000),
    }  # fmt: skip


def test_time_without_a_core_is_a_share_of_the_time_in_which_a_run_could_have_run(monkeypatch, tmp_path):
    counted = tmp_path / "schedstat"
    monkeypatch.setattr(real.replay, "_SCHEDULED", counted)
    assert CoreWait().share() is None, "no kernel that counts"
    counted.write_text("1000 500 7\n")
    wait = CoreWait()
    assert wait.share() is None, "nothing ran since"
    counted.write_text("1700 800 9\n")
    assert wait.share() == pytest.approx(0.3)


def test_a_run_on_a_busy_machine_says_so():
    assert [core_wait_notes(share) for share in (None, 0.0, 0.2)] == [[], [], []]
    (note,) = core_wait_notes(0.44)
    assert note.startswith("BUSY MACHINE: for 44 % of the time in which it could have run, this run waited for a core")


@pytest.mark.gpu
def test_a_stopwatch_makes_its_events_once():
    import torch

    from real.device import CudaStopwatch

    watch = CudaStopwatch()
    work = torch.ones(512, 512, device="cuda")
    seen = []
    for _ in range(3):
        watch.restart()
        for _ in range(3):
            watch.mark()
            work = work @ work / 512
        watch.mark()
        spans = watch.finish()
        assert len(spans) == 3
        assert all(ns > 0 for ns in spans)
        seen.append([id(event) for event in watch._events])
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 4


def test_a_stopwatch_is_used_again():
    from real.device import CpuStopwatch

    watch = CpuStopwatch()
    for num in (2, 4, 3):
        watch.restart()
        for _ in range(num):
            watch.mark()
        spans = watch.finish()
        assert len(spans) == num - 1
        assert all(ns >= 0 for ns in spans)
