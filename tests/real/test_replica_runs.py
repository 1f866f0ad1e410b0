"""Whole runs on two engines behind a router: each replays its own tape, says what one engine says, and may die."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.compute as pc
import pytest

from experiments.commands.app import config_from
from experiments.configuration.config import RunConfig
from experiments.runs.parity import check_parity
from experiments.runs.run import RunResult, execute
from real.config import EngineOptions, RealConfig
from real.parallel import processes, replica
from sim.config import SimConfig
from testbed.errors import ConfigError, DeviceError
from tests.experiments.kit import REAL, SHORT, SMALL, TINY, manifest_of, say, table_of
from tests.parity.kit import CLOSED, real_config, real_run, replay_config
from tests.real.engine_helpers import tiny_spec
from tests.real.processes import assert_gone, check_end, check_interrupt, losing_a_rank, ranks_of, stepping

SAMPLED = {"trace__forced": "nothing", "sampling__temperature": 0.8, "sampling__max_tokens": 16}
TWO = {"backend__num_replicas": 2, "backend__num_threads": 1}
KINDS = {  # plain vllm_v1: test_replicas_of_two_ranks_each
    "vllm_v1_async": {"scheduler__max_num_batched_tokens": 32},
    "prefill_first": {"scheduler__preemption": "swap", "cache__num_cpu_blocks": 64},
}


@pytest.fixture(scope="module", params=KINDS)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, RunResult]:
    """A run of two replicas that draw what they say; their processes take seconds to start."""
    config = real_config(
        request.param,
        **{"cache__num_gpu_blocks": 30, "backend__router": "least_loaded", **CLOSED, **TWO, **SAMPLED},
        **KINDS[request.param],
    )
    result = real_run(tmp_path_factory.mktemp("fleet"), config)
    assert not ranks_of(os.getpid()), "no engine outlives its run"
    return config, result


def test_every_replica_replays_its_own_tape_decision_by_decision(
    fleet: tuple[RunConfig, RunResult], capsys: pytest.CaptureFixture[str]
) -> None:
    _, result = fleet
    assert (result.status, result.exit_status) == ("complete", 0), result.message
    folder, manifest, requests = result.folder, manifest_of(result.folder), table_of(result.folder)
    assert (manifest["num_replicas"], manifest["router"]) == (2, "least_loaded")
    assert result.summary["checks"]
    assert all(check["holds"] is not False for check in result.summary["checks"].values()), result.summary["checks"]
    for number, one in enumerate(manifest["replicas"]):
        report = check_parity(folder, replica=number)
        assert report.divergence is None
        assert report.num_steps == one["num_steps"] > 5
        assert f"{report.digest:016x}" == one["digest"]
        assert requests.filter(pc.field("replica") == number).num_rows == one["num_sent"] > 0
    said = say(capsys, "explain", str(folder))
    assert said.status == 0, said.err
    assert "the run's tape was replayed: the same decision digest" in said.out


def drawn_of(folder: Path) -> dict[str, list[int]]:
    """By request, the tokens that the engine drew; requests are known by their numbers on each tape."""
    drawn: dict[str, list[int]] = {}
    for tape in sorted(folder.glob("tape*.jsonl")):
        names: list[str] = []
        for line in tape.read_text().splitlines():
            item = json.loads(line)
            if item["kind"] == "arrive":
                names.append(item["id"])
            for outcome in item.get("outcomes") or ():
                drawn.setdefault(names[outcome[0]], []).extend(outcome[1])
    return drawn


def test_a_request_says_the_same_whichever_replica_serves_it(
    fleet: tuple[RunConfig, RunResult], tmp_path: Path
) -> None:
    config, result = fleet
    backend = {**config.raw["backend"], "num_replicas": 1}
    alone = real_run(tmp_path, RunConfig.from_container({**config.raw, "backend": backend}))
    assert alone.status == "complete", alone.message
    said = drawn_of(result.folder)
    assert said == drawn_of(tmp_path)
    assert len(said) == table_of(result.folder).num_rows >= 10
    assert len({tuple(tokens) for tokens in said.values()}) > 5, "they do not all say the same"


def test_replicas_of_two_ranks_each(tmp_path: Path) -> None:
    config = real_config("vllm_v1", **{**TWO, "device__tensor_parallel_size": 2, "trace__num_requests": 6})
    result = real_run(tmp_path, config)
    assert result.status == "complete", result.message
    assert all(check_parity(tmp_path, replica=number).divergence is None for number in (0, 1))


# --- ends ---

TAPES = ["tape-0.jsonl", "tape-1.jsonl"]
FLEET = ("backend.num_replicas=2", "backend.num_threads=1", "backend.rank_timeout_s=3", "record.decisions=true")


def check_kept(folder: Path) -> None:
    for number, one in enumerate(manifest_of(folder)["replicas"]):
        report = check_parity(folder, replica=number)
        assert report.divergence is None
        assert (report.is_cut, report.num_steps) == (True, one["num_steps"])


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        (signal.SIGSTOP, "says nothing for 3 s; if it was only slow, raise backend.rank_timeout_s"),
    ],
)
def test_a_fleet_that_loses_a_replica_keeps_what_its_replicas_committed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int, told: str
) -> None:
    """The other replica soon has served its part of 600 requests; one that is stopped has a second to end."""
    monkeypatch.setattr(processes, "END_S", 1.0)
    folder = tmp_path / "run"
    status, error, engines = losing_a_rank(capsys, number, folder, TAPES, *FLEET, "trace.num_requests=600")
    assert len(engines) == 2
    check_end(status, error, folder, 1, told, "replica 1")
    assert_gone(engines)
    check_kept(folder)


def test_a_fleet_that_is_interrupted_keeps_what_its_replicas_committed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    driver = stepping(folder, TAPES, *FLEET)
    engines = ranks_of(driver.pid)
    assert len(engines) == 2
    check_interrupt(driver, folder, "replica 1")
    assert_gone(engines)
    check_kept(folder)


# --- mistakes ---


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("backend.num_replicas=0", "backend.num_replicas is 0; it must be from 1 to 256"),
        ("backend.num_replicas=2 backend.pace=probe_scaled", "backend.pace=probe_scaled is the time of one process"),
        ("backend.num_replicas=2 backend.router=leastloaded", "did you mean 'least_loaded'"),
        ("backend.num_replicas=2 model.path=/nowhere", "/nowhere"),
        ("backend.num_replicas=2 cache.num_gpu_blocks=100000000", "bytes are available for each of 2 replicas; lower"),
        ("backend.num_replicas=2 backend.load_format=safetensors", "replica 0 failed: "),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, told: str
) -> None:
    base = SMALL if "model.path" in option else TINY
    said = say(capsys, "run", *base, *SHORT, *REAL, *option.split(), f"hydra.run.dir={tmp_path / 'run'}")
    assert said.status == 1
    assert told in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not ranks_of(os.getpid())


def test_the_simulation_of_a_fleet_is_of_a_fleet(fleet: tuple[RunConfig, RunResult]) -> None:
    _, result = fleet
    simulated = config_from(result.folder, ["backend=sim"]).backend
    assert isinstance(simulated, SimConfig)
    assert (simulated.num_replicas, simulated.router) == (2, "least_loaded")
    alone = config_from(result.folder, ["backend=sim", "backend.num_replicas=1"]).backend
    assert isinstance(alone, SimConfig)
    assert alone.num_replicas == 1


def test_a_tape_of_one_replica_is_no_price_list(tmp_path: Path, fleet: tuple[RunConfig, RunResult]) -> None:
    config, result = fleet
    with pytest.raises(ConfigError, match="is a run of 2 replicas, and cost=recorded replays one engine"):
        execute(replay_config(config, result.folder), tmp_path)


def test_each_replica_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert replica.gpus_of_each(2, 2) == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    assert replica.gpus_of_each(4, 1) == ["7", "5", "3", "1"]
    with pytest.raises(DeviceError, match=r"backend.num_replicas is 3, of 2 GPUs each, but torch finds 4"):
        replica.gpus_of_each(3, 2)


@pytest.mark.parametrize(("num_threads", "num_replicas", "each"), [(8, 2, 4), (3, 2, 1), (1, 4, 1)])
def test_replicas_on_the_cpu_share_its_threads(
    monkeypatch: pytest.MonkeyPatch, num_threads: int, num_replicas: int, each: int
) -> None:
    given: list[int | None] = []

    def start(setup: replica.ReplicaSetup, number: int, visible: str | None) -> Any:
        given.append(setup.config.num_threads)
        return SimpleNamespace(wait_until_ready=lambda: SimpleNamespace(num_gpu_blocks=64))

    monkeypatch.setattr(replica, "ReplicaEngine", start)
    monkeypatch.setattr("real.host_memory.available_bytes", lambda: None)
    config = RealConfig(device="cpu", num_threads=num_threads)
    setup = replica.ReplicaSetup(tiny_spec(), config, EngineOptions(4, 64, 8, 256, num_gpu_blocks=64), 1)
    replica.start_replicas(setup, num_replicas)
    assert given == [each] * num_replicas


def test_a_replica_that_cannot_start_leaves_none_before_it_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[replica.ReplicaEngine] = []
    closed: list[replica.ReplicaEngine] = []
    make, close = replica.ReplicaEngine.__init__, replica.ReplicaEngine.close

    def make_one(self: replica.ReplicaEngine, *given: Any) -> None:
        if made:
            raise DeviceError("no process may be started any more")
        make(self, *given)
        made.append(self)

    def close_one(self: replica.ReplicaEngine) -> None:
        close(self)
        closed.append(self)

    monkeypatch.setattr(replica.ReplicaEngine, "__init__", make_one)
    monkeypatch.setattr(replica.ReplicaEngine, "close", close_one)
    with pytest.raises(DeviceError, match="no process may be started"):
        real_run(tmp_path, real_config("vllm_v1", **TWO))
    assert closed == made
    assert len(made) == 1
