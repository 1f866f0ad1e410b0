"""What a replica and its proxy send each other, where a thread is the replica and its engine an echo; and its end."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from real.config import EngineOptions, RealConfig
from real.driver import Computed, Work
from real.parallel import backend, processes, replica, worker
from real.parallel.processes import Channel, end_process, spawn
from testbed.core.outcome import Outcome, Spans
from testbed.core.plan import BatchPlan
from testbed.errors import DeviceError
from tests.real.engine_helpers import plan_of, row, tiny_spec
from tests.real.hung_rank import HungRank, LeftByDriver, SaysWhatItIs
from tests.real.processes import assert_gone

OPTIONS = EngineOptions(4, 64, 8, 256)
NUM_TOKENS = 200_000  # more bytes than a connection holds


class Echo:
    """An engine whose steps are over at once; their outcomes are the tokens of their rows."""

    attention_name = device_description = load_format = "echo"
    num_gpu_blocks = num_cpu_blocks = 0

    def __init__(self, *given: Any, **options: Any) -> None:
        self.attention_reasons: dict[str, str] = {}

    def start(self, plan: BatchPlan) -> Work:
        outcomes = tuple(Outcome(row.seq_id, tuple(row.tokens)) for row in plan.scheduled)
        return Work(lambda: Computed(outcomes, Spans(0, 0, 0, 0, 0)), lambda: True)


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> replica.ReplicaEngine:
    def spawn(timeout_s: float, environment: dict[str, str]) -> tuple[Any, Channel]:
        ours, theirs = socket.socketpair()
        ours.settimeout(timeout_s)
        channel = Channel(theirs)
        threading.Thread(target=lambda: pickle.loads(channel.receive() or b"").work(channel), daemon=True).start()
        return SimpleNamespace(wait=lambda timeout_s: None), Channel(ours)

    monkeypatch.setattr(replica, "spawn", spawn)
    monkeypatch.setattr(backend, "RealBackend", Echo)
    setup = replica.ReplicaSetup(tiny_spec(), RealConfig(rank_timeout_s=2.0), OPTIONS, 1)
    engine = replica.ReplicaEngine(setup, 0, None)
    engine.wait_until_ready()
    return engine


def test_a_long_plan_and_a_long_result_pass_each_other(echo: replica.ReplicaEngine) -> None:
    """As under asynchronous scheduling: the second plan is sent while the result of the first one is."""
    plans = [plan_of(row(number, [number] * NUM_TOKENS, [])) for number in range(3)]
    in_flight = [echo.start(plan) for plan in plans]
    assert echo.has_answer
    for number, work in enumerate(in_flight):
        (outcome,) = work.wait().outcomes or ()
        assert (outcome.seq_id, outcome.tokens) == (number, (number,) * NUM_TOKENS)
    assert not echo.has_answer
    echo.close()


# --- ends ---


def test_a_replica_that_stops_within_a_message_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(0.05)
    monkeypatch.setattr(replica, "spawn", lambda timeout_s, environment: (SimpleNamespace(), Channel(ours)))
    setup = replica.ReplicaSetup(tiny_spec(), RealConfig(rank_timeout_s=0.05), OPTIONS, 1)
    engine = replica.ReplicaEngine(setup, 0, None)
    theirs.sendall((100).to_bytes(8, "little") + b"a part")
    with pytest.raises(DeviceError, match=r"^replica 0 says nothing for 0.05 s; if it was only slow, raise backend\."):
        engine.receive()
    theirs.close()
    ours.close()


@pytest.mark.parametrize("fails", [True, False], ids=["the replica fails", "the driver leaves"])
def test_a_rank_that_hangs_does_not_outlive_its_replica(fails: bool) -> None:
    process, channel = spawn(5.0)
    channel.send(pickle.dumps(HungRank(fails=fails)))
    rank = pickle.loads(channel.receive() or b"")
    if fails:
        assert "a rank does not answer" in pickle.loads(channel.receive() or b"").message
    channel.hang_up()
    end_process(process)
    assert_gone([rank])


def test_a_process_that_was_spawned_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no progress bars; with macOS's way of starting processes, tqdm's lock would outlast it."""
    process, channel = processes.spawn(5.0)
    channel.send(pickle.dumps(SaysWhatItIs()))
    assert pickle.loads(channel.receive() or b"") is True
    assert not processes.is_spawned()
    monkeypatch.delattr(sys.modules["__main__"], "__spec__", raising=False)  # as under pdb
    assert not processes.is_spawned()
    channel.hang_up()
    end_process(process)


def test_a_rank_that_fails_after_its_driver_has_ended_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    Channel(ours).send(pickle.dumps(LeftByDriver()))
    monkeypatch.setattr(sys, "argv", ["", str(theirs.detach())])
    monkeypatch.setattr(processes, "_started", [])
    monkeypatch.setattr(worker, "_end_with_driver", lambda fileno: None)
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    worker.main()
    assert ends[0] == 1
    ours.close()
