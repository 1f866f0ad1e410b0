"""The probe-scaled clock: what is recorded on a machine that slows down is what a steady one would have recorded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from real.clocks import NUM_FOR_REFERENCE, PROBE_EVERY_NS, ProbeScaledClock, make_clock, scaled
from real.config import RealConfig
from testbed.core.outcome import Spans
from testbed.errors import ConfigError
from tests.real.engine_helpers import tiny_backend

MS = 1_000_000
PROBE_NS = 2 * MS


class Machine:
    """Works `slowness` times as long as it should, whatever it does; a probe after other work takes twice as long, as
    it finds nothing in the caches."""

    def __init__(self) -> None:
        self.ns, self.slowness, self.num_probes = 0, 1.0, 0
        self.is_warm = False

    def read_ns(self) -> int:
        return self.ns

    def work(self, steady_ns: float) -> None:
        self.ns += round(steady_ns * self.slowness)
        self.is_warm = False

    def probe(self) -> None:
        self.num_probes += 1
        self.work(PROBE_NS if self.is_warm else 2 * PROBE_NS)
        self.is_warm = True


def clock_on(machine: Machine, probe_ns: int | None = PROBE_NS) -> ProbeScaledClock:
    clock = ProbeScaledClock(machine.probe, probe_ns, machine.read_ns)
    clock.start()
    return clock


@given(st.lists(st.tuples(st.floats(0.5, 4.0), st.integers(1, 30)), min_size=1, max_size=8))
def test_steps_take_what_they_would_on_a_steady_machine(stretches):
    """But for the few steps after each change, until the probe is run again, twice."""
    machine = Machine()
    clock = clock_on(machine)
    for slowness, num_steps in stretches:
        machine.slowness = slowness
        for _ in range(3):  # the median follows once most of the last probes have seen the change
            clock.before_step()
            machine.work(500 * MS)
        for _ in range(num_steps):
            rate = clock.before_step()
            began_ns = clock.now_ns()
            machine.work(5 * MS)
            assert clock.now_ns() - began_ns == pytest.approx(5 * MS, rel=1e-6)
            assert rate == pytest.approx(1 / slowness, rel=1e-6)


def test_the_clock_starts_at_zero_stands_while_it_probes_and_skips_idle_time():
    machine = Machine()
    clock = clock_on(machine)
    assert clock.now_ns() == 0
    machine.work(PROBE_EVERY_NS)
    before_ns, before = clock.now_ns(), machine.num_probes
    clock.before_step()
    assert (machine.num_probes, clock.now_ns()) == (before + 2, before_ns), "once for nothing, and once timed"
    clock.before_step()
    assert machine.num_probes == before + 2, "not before every step"
    clock.wait_until(before_ns + 3600 * 1000 * MS)
    assert clock.now_ns() == before_ns + 3600 * 1000 * MS
    clock.wait_until(5)
    assert clock.now_ns() == before_ns + 3600 * 1000 * MS, "time never goes back"


def test_one_slow_probe_among_others_changes_nothing():
    machine = Machine()
    clock = clock_on(machine)
    machine.work(PROBE_EVERY_NS)
    machine.slowness = 10.0
    assert clock.before_step() == 1.0


def test_the_reference_is_measured_once_and_told():
    machine = Machine()
    machine.slowness = 1.5
    clock = clock_on(machine, None)
    assert clock.probe_ns == PROBE_NS * 1.5
    num = machine.num_probes
    assert num > 2 * NUM_FOR_REFERENCE[0]
    machine.slowness = 3.0
    clock.start()
    assert (machine.num_probes, clock.now_ns()) == (num, 0), "to start again costs nothing"
    for _ in range(3):
        machine.work(PROBE_EVERY_NS)
        rate = clock.before_step()
    assert rate == pytest.approx(0.5)
    said = clock.describe()
    assert said is not None
    assert said["probe_ns"] == PROBE_NS * 1.5
    assert said["slowness"] == {"p10": 1.0, "p50": 2.0, "p90": 2.0, "max": 2.0}


def test_a_probe_that_takes_long_is_not_asked_often_for_the_reference():
    machine = Machine()
    machine.slowness = 1000.0
    clock_on(machine, None)
    assert machine.num_probes == 2 * (NUM_FOR_REFERENCE[0] + 3)


def test_spans_are_scaled_as_the_clock_is():
    assert scaled(Spans(1, 2, 3, 4, 5), 1.0) == Spans(1, 2, 3, 4, 5)
    assert scaled(Spans(10, 11, 0, 101, 9), 0.5) == Spans(5, 5, 0, 50, 4)


def test_the_engine_s_probe_leaves_every_block_as_it_was():
    backend = tiny_backend()
    assert backend.probe is not None
    kept = backend.cache.gpu.whole[:, :, : backend.num_gpu_blocks]
    kept.normal_()
    before = kept.clone()
    backend.probe()
    assert torch.equal(kept, before)


def test_who_has_no_probe_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"backend.pace=probe_scaled needs one engine"):
        make_clock(RealConfig(pace="probe_scaled"), SimpleNamespace(probe=None))
    with pytest.raises(ConfigError, match=r"backend.pace=probe_scaled is the time of one process"):
        RealConfig(pace="probe_scaled", num_replicas=2)
    with pytest.raises(ConfigError, match=r"backend.probe_ns is of backend.pace=probe_scaled"):
        RealConfig(probe_ns=1000)
    with pytest.raises(ConfigError, match=r"backend.probe_ns is 0"):
        RealConfig(pace="probe_scaled", probe_ns=0)
