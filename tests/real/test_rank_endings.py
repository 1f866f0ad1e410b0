"""How ranks on GPUs part, played by stand-ins that wait as NCCL and CUDA do; and with two GPUs, by themselves."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from real.parallel import backend as parallel
from real.parallel import distributed, processes
from real.parallel.backend import Ending
from tests.real.processes import assert_gone, ranks_of
from tests.real.test_tensor_parallel import PLAN, ranked

SETTINGS = {
    "cuda": ("ProcessGroupNCCL", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
    "cpu": ("ProcessGroupGloo", "GLOO_SOCKET_IFNAME", distributed.LOOPBACK),
}


class Machine:
    """A group, a stream, an engine with captured graphs, other ranks. What would wait for ever fails after a second."""

    def __init__(self, *, is_stuck: bool, is_broken: bool = False) -> None:
        self.is_broken = is_broken
        self.events: list[str] = []
        self._is_idle, self._has_no_graphs = threading.Event(), threading.Event()
        if not is_stuck:
            self._is_idle.set()

    def abort(self) -> None:
        """Of the group: ends its kernels, then waits for the end of the graphs that hold it."""
        self.events.append("abort")
        time.sleep(0.05)
        self._is_idle.set()
        assert self._has_no_graphs.wait(1.0)
        self.events.append("aborted")

    def query(self) -> bool:
        """Of the stream."""
        if self.is_broken:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self._is_idle.is_set()

    def forget_graphs(self) -> None:
        """Of the engine: waits for the stream, and lets no other thread run meanwhile."""
        assert self.is_broken or self._is_idle.is_set()
        self.events.append("graphs")
        self._has_no_graphs.set()

    def hang_up(self) -> None:
        """Of the other ranks."""
        self.events.append("ranks")

    def ending(self, *, is_in_step: bool, has_group: bool = True) -> Ending:
        made = Ending(SimpleNamespace(close=self.hang_up))
        made.local, made.is_in_step = SimpleNamespace(close=self.forget_graphs), is_in_step
        if has_group:
            made.group, made.stream = self, self
        return made


def test_a_rank_that_cannot_be_started_ends_those_that_were(monkeypatch):
    started, spawn = [], processes.spawn

    def spawn_one(timeout_s):
        if started:
            raise OSError("no process is left")
        started.append(spawn(timeout_s))
        return started[0]

    monkeypatch.setattr(processes, "spawn", spawn_one)
    with pytest.raises(OSError, match="no process is left"):
        processes.Ranks([None, None], 1.0)
    assert started[0][0].poll() is not None


def test_between_steps_the_graphs_go_first():
    machine = Machine(is_stuck=False)
    machine.ending(is_in_step=False)()
    assert machine.events == ["graphs", "ranks", "abort", "aborted"]


@pytest.mark.parametrize("is_broken", [False, True])
def test_in_a_step_the_abort_begins_before_the_graphs_go_and_ends_after(is_broken):
    machine = Machine(is_stuck=True, is_broken=is_broken)
    machine.ending(is_in_step=True)()
    assert machine.events[:2] == ["abort", "graphs"]
    assert sorted(machine.events[2:]) == ["aborted", "ranks"]


def test_a_gpu_that_no_abort_frees_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(parallel, "ABORT_S", 0.01)
    machine = Machine(is_stuck=True)
    ending = machine.ending(is_in_step=True)
    machine.query = lambda: False
    ending.local.close = machine._has_no_graphs.set
    ending()
    assert "ranks" in machine.events


def test_cpus_have_nothing_to_abort():
    machine = Machine(is_stuck=False)
    machine.ending(is_in_step=True, has_group=False)()
    assert machine.events == ["graphs", "ranks"]


@pytest.mark.parametrize("before", [None, "3"])
@pytest.mark.parametrize("error", [None, RuntimeError("no GPU")])
@pytest.mark.parametrize("device_type", SETTINGS)
def test_the_environment_is_as_it_was_after_a_group_was_made(monkeypatch, before, error, device_type):
    seen = []
    made, variable, value = SETTINGS[device_type]

    def make(store, rank, size, timeout):
        seen.append(os.environ[variable])
        if error is not None:
            raise error
        return "a group"

    monkeypatch.setattr(distributed, "dist", SimpleNamespace(**{made: make}))
    if before is None:
        monkeypatch.delenv(variable, raising=False)
    else:
        monkeypatch.setenv(variable, before)
    if error is None:
        assert distributed._backend(device_type, None, 0, 2, timedelta(seconds=1)) == "a group"
    else:
        with pytest.raises(RuntimeError, match="no GPU"):
            distributed._backend(device_type, None, 0, 2, timedelta(seconds=1))
    assert seen == [value]
    assert os.environ.get(variable) == before


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_are_closed_in_the_middle_of_a_step_that_waits_for_a_rank():
    backend = ranked(device="cuda")
    ranks = ranks_of(os.getpid())
    backend.start(PLAN).wait()
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    backend.start(PLAN)
    began = time.monotonic()
    backend.close()
    assert time.monotonic() - began < 30.0  # of 60, after which NCCL itself would give up
    assert_gone(ranks)
