"""`testbed run backend.decides=vllm` that does not get to its end, over what stands for vLLM."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from analysis.load import load_run
from analysis.measures.notes import replay_notes
from experiments.cli import main
from experiments.configuration.compose import compose_config
from experiments.observe import stock
from experiments.runs.environment import describe_machine
from experiments.runs.identity import identity_of
from experiments.runs.run_folder import is_locked, locked
from real.clocks import RealTimeClock
from real.replay import CoreWait
from testbed.core.request import Request
from testbed.errors import ConfigError
from testbed.specs.profiles import read_profile
from tests.experiments.kit import Said, Say
from tests.experiments.test_observe import lines_of

NUM_REQUESTS = 6


class Vllm:
    """What real.vllm.backend has of vLLM, and its observer's log: each step computes a whole prompt, or a token, of
    every request. on_step: called with the number of each before it is made."""

    version = "0.32.0"
    dtype = "float32"

    def __init__(self, log: Path, on_step: Callable[[int], object]) -> None:
        self._file = log.open("x")
        self._on_step = on_step
        self._live: dict[str, list[int]] = {}  # tokens of the next step, tokens left
        self._num_steps = 0
        head = lines_of("sync")[0]
        self._write(head | {"vllm": self.version, "model": head["model"] | {"dtype": self.dtype}})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def log_by(self, now_ns: Callable[[], int]) -> int:
        self._now_ns = now_ns
        return 0

    def add(self, request: Request) -> None:
        name, prompt = request.request_id, list(request.prompt_token_ids)
        place = {"plans": self._num_steps, "commits": self._num_steps}
        self._write(
            {
                "kind": "add", "id": name, "ns": self._now_ns(), "arrival_unix_ns": 0, **place, "prompt": prompt,
                "max_tokens": request.sampling.max_tokens, "priority": 0, "salt": "",
            }
        )  # fmt: skip
        assert request.sampling.max_tokens is not None
        self._live[name] = [len(prompt), request.sampling.max_tokens]

    def step_alone(self) -> list[str]:
        self._on_step(self._num_steps)
        instants = {"began_ns": self._now_ns(), "ns": self._now_ns()}
        step = {"step": self._num_steps, **instants, "free_blocks": 8}
        self._write(
            {
                "kind": "plan", **step, "committed": self._num_steps, "preempted": [], "num_waiting": 0,
                "scheduled": {name: num for name, (num, _) in self._live.items()},
                "admitted": {name: 0 for name, (num, _) in self._live.items() if num > 1},
                "num_running": len(self._live),
            }
        )  # fmt: skip
        for counts in self._live.values():
            counts[:] = 1, counts[1] - 1
        ended = [name for name, (_, left) in self._live.items() if not left]
        emitted = {name: [5] for name in self._live}
        self._write({"kind": "commit", **step, "emitted": emitted, "ended": dict.fromkeys(ended, "length")})
        for name in ended:
            del self._live[name]
        self._num_steps += 1
        return ended

    def close(self) -> None:
        self._file.close()


def settings(folder: Path) -> list[str]:
    return [
        "backend=vllm", "backend.decides=vllm", "backend.pace=as_fast_as_possible", "device=cpu",
        f"model.path={folder.parent}", f"trace.num_requests={NUM_REQUESTS}", "trace.rate=0.001",
        "trace.prompt={kind:constant,value:20}", "trace.output={kind:constant,value:4}", "trace.forced=lengths",
        "scheduler=vllm_v1", "scheduler.max_model_len=512", "cache.num_gpu_blocks=30", "cache.num_cpu_blocks=0",
    ]  # fmt: skip


Run = Callable[..., Said]


def does_nothing(number: int) -> None:
    pass


@pytest.fixture
def run(say: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs in `run` with what stands for vLLM, whose steps are told to on_step; model: other facts of its shape."""

    def run(
        *more: str, on_step: Callable[[int], object] = does_nothing, kind: type[Vllm] = Vllm, **model: object
    ) -> Said:
        monkeypatch.setattr(stock, "build_vllm_backend", lambda config, observe, told: kind(observe, on_step))
        (tmp_path / "config.json").write_text(json.dumps(lines_of("sync")[0]["model"]["hf_config"] | model))
        return say("run", *settings(tmp_path / "run"), f"hydra.run.dir={tmp_path / 'run'}", *more)

    return run


def dies(number: int, at: int = 6) -> None:
    if number == at:
        raise RuntimeError("CUDA error:\nout of luck")


def is_interrupted(number: int) -> None:
    if number == 6:
        raise KeyboardInterrupt


class Dead(Vllm):
    """One that cannot be shut down either."""

    def close(self) -> None:
        raise OSError("nobody answers")


class Unstarted(Vllm):
    """One that ends as it starts."""

    def __init__(self, log: Path, on_step: Callable[[int], object]) -> None:
        log.write_text("a header")
        raise ConfigError("vLLM did not start")


def test_a_whole_run_replaces_an_earlier_one(run: Run, tmp_path: Path) -> None:
    for more in ((), ("overwrite=true",)):
        run(*more).success()
        found = load_run(tmp_path / "run")
        assert (len(found.requests), len(found.steps)) == (NUM_REQUESTS, 4 * NUM_REQUESTS)
        assert (found.manifest["status"], found.manifest["num_unsent"]) == ("complete", 0)
    assert [file.name for file in (tmp_path / "run").glob("observed*")] == ["observed.jsonl"]


def test_it_says_who_decided_what_was_done_to_the_trace_and_where_it_ran(run: Run, tmp_path: Path) -> None:
    said = run("trace.max_prompt_tokens=10").success()
    assert "in vLLM, scheduler=vllm_v1 (vLLM's own), trace synthetic" in said
    assert f"note         lengths clipped to max_prompt_tokens=10: those of {NUM_REQUESTS} requests" in said
    manifest = load_run(tmp_path / "run").manifest
    assert manifest["versions"]["vllm"] == "0.32.0"
    assert (manifest["machine"], manifest["started_in"]) == (describe_machine(), os.getcwd())


def test_arrivals_that_outran_the_engine_are_told_of(run: Run, tmp_path: Path) -> None:
    first_s: list[float] = []

    def becomes_slow(number: int) -> None:
        """From 0.15 s after the first step on: what came in the first 0.1 s has ended by then."""
        first_s.append(time.monotonic())
        time.sleep(1e-3 if first_s[-1] < first_s[0] + 0.15 else 60e-3)

    pace = ["backend.pace=real_time", "trace.num_requests=400", "trace.rate=1000"]
    said = run(*pace, "trace.output={kind:constant,value:10}", on_step=becomes_slow).success()
    assert "note         arrivals outran the engine" in said


def test_records_that_are_made_from_the_log_as_it_is_are_told_of(run: Run, tmp_path: Path) -> None:
    said = run("record.status_s=0.1", "record.operators=true").success()
    for name in ("status_s", "operators"):
        assert f"note         record.{name} has no effect with backend.decides=vllm" in said
    assert "record.steps has" not in said


def test_a_machine_that_did_not_keep_pace_is_told_of(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As for runs that this testbed's scheduler decides, with which these are compared."""

    def oversleep(self: RealTimeClock, until_ns: int) -> None:
        while self.now_ns() < until_ns + 20_000_000:
            time.sleep(1e-3)

    monkeypatch.setattr(RealTimeClock, "wait_until", oversleep)
    monkeypatch.setattr(CoreWait, "share", lambda self: 0.5)
    said = run("backend.pace=real_time", "trace.rate=20").success()
    manifest = load_run(tmp_path / "run").manifest
    assert "note         REPLAY LAG: " in said
    assert "note         BUSY MACHINE: for 50 % of the time" in said
    assert [f"note         {note}" in said for note in load_run(tmp_path / "run").notes] == [True] * 2
    assert manifest["replay"]["num_arrivals"] == NUM_REQUESTS
    assert manifest["replay"]["lag_s"]["max"] >= 0.02
    assert [note.size for note in replay_notes(manifest)][1] == manifest["host"]["core_wait_share"] == 0.5


@pytest.mark.parametrize(("version", "ends_round"), [("0.32.0", True), ("0.33.0", False)])
def test_a_run_is_simulated_by_the_rules_of_the_version_that_ran(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, ends_round: bool
) -> None:
    """And it is the run that was asked for, to whoever asks again."""
    monkeypatch.setattr(Vllm, "version", version)
    run().success()
    found = load_run(tmp_path / "run").config["scheduler"]
    said = found["composition"]
    assert (said.get("own_victim_ends_round", False) if isinstance(said, dict) else False) == ends_round
    assert found["name"] == "vllm_v1"
    sim = tmp_path / "sim"
    assert main(["run", f"from={tmp_path / 'run'}", "backend=sim", "cost=constant", f"hydra.run.dir={sim}"]) == 0
    assert load_run(sim).config["scheduler"] == found
    asked = compose_config(settings(tmp_path / "run"))
    assert load_run(tmp_path / "run").manifest["identity"]["config"] == identity_of(asked).config


def test_a_profile_is_of_what_vllm_computed_in(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """backend.dtype, whatever the weights are in; the configuration's model stays that of the run's neighbours."""
    monkeypatch.setattr(Vllm, "dtype", "float16")
    run("backend.dtype=float16").success()
    profile = read_profile(tmp_path / "run" / "profile.parquet").manifest
    assert (profile.dtype, profile.model["dtype"]) == ("float16", "float16")
    assert load_run(tmp_path / "run").config["model"]["dtype"] == "bfloat16"


def test_a_model_without_a_price_is_told_of_as_in_an_import(run: Run, tmp_path: Path) -> None:
    run(architectures=["FalconForCausalLM"]).success()
    manifest = load_run(tmp_path / "run").manifest
    assert "has no price here: FalconForCausalLM is none of" in manifest["unpriced"]
    assert manifest["no_profile"] == manifest["unpriced"]
    assert not (tmp_path / "run" / "profile.parquet").exists()


def test_a_log_of_which_no_run_was_made_is_set_aside(run: Run, tmp_path: Path) -> None:
    """The process was killed."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "observed.jsonl").write_text("what was served")
    run().success()
    assert (tmp_path / "run" / "observed.jsonl-1").read_text() == "what was served"


def test_where_vllm_does_not_start_the_run_that_was_there_is_as_before(run: Run, tmp_path: Path) -> None:
    run().success()
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}

    assert run("overwrite=true", kind=Unstarted).status == 1
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}


def test_where_vllm_does_not_start_no_folder_is_left(run: Run, tmp_path: Path) -> None:
    assert run(kind=Unstarted).status == 1
    assert not (tmp_path / "run").exists()


def test_while_one_runs_there_is_no_other(run: Run, tmp_path: Path) -> None:
    seen: list[bool] = []
    run(on_step=lambda number: seen.append(is_locked(tmp_path / "run"))).success()
    assert set(seen) == {True}
    kept = (tmp_path / "run" / "observed.jsonl").read_text()
    with locked(tmp_path / "run"):
        assert "another process is writing to" in run("overwrite=true").error()
    assert (tmp_path / "run" / "observed.jsonl").read_text() == kept


def test_interrupted_before_its_first_step_a_run_says_just_that(run: Run, tmp_path: Path) -> None:
    def press(number: int) -> None:
        raise KeyboardInterrupt

    said = run(on_step=press)
    assert said.status == 130
    assert "Traceback" not in said.err


@pytest.mark.parametrize("kind", [Vllm, Dead])
def test_when_vllm_dies_what_was_finished_is_kept(run: Run, tmp_path: Path, kind: type[Vllm]) -> None:
    said = run(on_step=dies, kind=kind).error()
    assert f"failed after 1 of {NUM_REQUESTS} requests: vLLM raised RuntimeError: CUDA error: out of luck" in said
    assert f"partial results kept in {tmp_path / 'run'}" in said
    found = load_run(tmp_path / "run")
    assert (found.manifest["status"], len(found.steps)) == ("partial", 6)
    assert (found.manifest["num_sent"], found.manifest["num_unsent"]) == (2, NUM_REQUESTS - 2)
    assert not (tmp_path / "run" / "done").exists()


def test_of_an_overwritten_run_nothing_is_left(run: Run, tmp_path: Path) -> None:
    run().success()
    assert (tmp_path / "run" / "case.jsonl").exists()
    assert run("overwrite=true", on_step=dies).status == 1
    assert len(load_run(tmp_path / "run").steps) == 6
    assert not (tmp_path / "run" / "case.jsonl").exists()


def test_of_a_run_that_is_not_replaced_by_a_whole_one_records_and_log_stay(run: Run, tmp_path: Path) -> None:
    run().success()
    before, log = load_run(tmp_path / "run"), (tmp_path / "run" / "observed.jsonl").read_text()
    for num_steps in (0, 2, 6):  # no run could be made; of no finished request; of one
        assert run("overwrite=true", on_step=partial(dies, at=num_steps)).status == 1
        place = tmp_path / "run" / (".replaced" if num_steps else "")
        assert load_run(place).requests.equals(before.requests)
        assert load_run(place).manifest == before.manifest
        assert (tmp_path / "run" / "observed.jsonl-1").read_text() == log
        assert len(load_run(tmp_path / "run").steps) == (num_steps or len(before.steps))


def test_an_interrupted_run_says_what_was_not_sent(run: Run, tmp_path: Path) -> None:
    said = run(on_step=is_interrupted)
    kept = f"partial results kept in {tmp_path / 'run'}"
    assert (said.status, said.error()) == (130, f"interrupted after 1 of {NUM_REQUESTS} requests; {kept}")
    assert load_run(tmp_path / "run").manifest["num_unsent"] == NUM_REQUESTS - 2


def test_where_no_run_can_be_made_the_log_is_named(run: Run, tmp_path: Path) -> None:
    said, log = run(on_step=partial(dies, at=0)).error(), tmp_path / "run" / "observed.jsonl"
    assert "vLLM raised RuntimeError: CUDA error: out of luck; no run could be made of the log" in said
    assert said.endswith(f"it is kept: testbed observe import {log}")
    assert log.exists()
