"""`testbed run backend.decides=vllm` that does not get to its end, over what stands for vLLM."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
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
from tests.experiments.kit import latest
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


def start(monkeypatch: pytest.MonkeyPatch, on_step: Callable[[int], object], kind: type[Vllm] = Vllm) -> None:
    monkeypatch.setattr(stock, "build_vllm_backend", lambda config, observe, told: kind(observe, on_step))


def settings(folder: Path) -> list[str]:
    return [
        "backend=vllm", "backend.decides=vllm", "backend.pace=as_fast_as_possible", "device=cpu",
        f"model.path={folder.parent}", f"trace.num_requests={NUM_REQUESTS}", "trace.rate=0.001",
        "trace.prompt={kind:constant,value:20}", "trace.output={kind:constant,value:4}", "trace.forced=lengths",
        "scheduler=vllm_v1", "scheduler.max_model_len=512", "cache.num_gpu_blocks=30", "cache.num_cpu_blocks=0",
    ]  # fmt: skip


def run(folder: Path, *more: str) -> int:
    """The exit status."""
    (folder.parent / "config.json").write_text(json.dumps(lines_of("sync")[0]["model"]["hf_config"]))
    return main(["run", *latest(*settings(folder), f"hydra.run.dir={folder}", *more)])


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


def said_by(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    return line


def test_a_whole_run_replaces_an_earlier_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start(monkeypatch, lambda number: None)
    for more in ((), ("overwrite=true",)):
        assert run(tmp_path / "run", *more) == 0
        found = load_run(tmp_path / "run")
        assert (len(found.requests), len(found.steps)) == (NUM_REQUESTS, 4 * NUM_REQUESTS)
        assert (found.manifest["status"], found.manifest["num_unsent"]) == ("complete", 0)
    assert [file.name for file in (tmp_path / "run").glob("observed*")] == ["observed.jsonl"]


def test_it_says_who_decided_what_was_done_to_the_trace_and_where_it_ran(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(monkeypatch, lambda number: None)
    assert run(tmp_path / "run", "trace.max_prompt_tokens=10") == 0
    said = capsys.readouterr().out
    assert "in vLLM, scheduler=vllm_v1 (vLLM's own), trace synthetic" in said
    assert f"note         lengths clipped to max_prompt_tokens=10: those of {NUM_REQUESTS} requests" in said
    manifest = load_run(tmp_path / "run").manifest
    assert manifest["versions"]["vllm"] == "0.32.0"
    assert (manifest["machine"], manifest["started_in"]) == (describe_machine(), os.getcwd())


def test_arrivals_that_outran_the_engine_are_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_s: list[float] = []

    def becomes_slow(number: int) -> None:
        """From 0.15 s after the first step on: what came in the first 0.1 s has ended by then."""
        first_s.append(time.monotonic())
        time.sleep(1e-3 if first_s[-1] < first_s[0] + 0.15 else 60e-3)

    start(monkeypatch, becomes_slow)
    pace = ["backend.pace=real_time", "trace.num_requests=400", "trace.rate=1000"]
    assert run(tmp_path / "run", *pace, "trace.output={kind:constant,value:10}") == 0
    assert "note         arrivals outran the engine" in capsys.readouterr().out


def test_records_that_are_made_from_the_log_as_it_is_are_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(monkeypatch, lambda number: None)
    assert run(tmp_path / "run", "record.status_s=0.1", "record.operators=true") == 0
    said = capsys.readouterr().out
    for name in ("status_s", "operators"):
        assert f"note         record.{name} has no effect with backend.decides=vllm" in said
    assert "record.steps has" not in said


def test_a_machine_that_did_not_keep_pace_is_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for runs that this testbed's scheduler decides, with which these are compared."""

    def oversleep(self: RealTimeClock, until_ns: int) -> None:
        while self.now_ns() < until_ns + 20_000_000:
            time.sleep(1e-3)

    start(monkeypatch, lambda number: None)
    monkeypatch.setattr(RealTimeClock, "wait_until", oversleep)
    monkeypatch.setattr(CoreWait, "share", lambda self: 0.5)
    assert run(tmp_path / "run", "backend.pace=real_time", "trace.rate=20") == 0
    said, manifest = capsys.readouterr().out, load_run(tmp_path / "run").manifest
    assert "note         REPLAY LAG: " in said
    assert "note         BUSY MACHINE: for 50 % of the time" in said
    assert manifest["replay"]["num_arrivals"] == NUM_REQUESTS
    assert manifest["replay"]["lag_s"]["max"] >= 0.02
    assert [note.size for note in replay_notes(manifest)][1] == manifest["host"]["core_wait_share"] == 0.5


@pytest.mark.parametrize(("version", "ends_round"), [("0.32.0", True), ("0.33.0", False)])
def test_a_run_is_simulated_by_the_rules_of_the_version_that_ran(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, ends_round: bool
) -> None:
    """And it is the run that was asked for, to whoever asks again."""
    monkeypatch.setattr(Vllm, "version", version)
    start(monkeypatch, lambda number: None)
    assert run(tmp_path / "run") == 0
    found = load_run(tmp_path / "run").config["scheduler"]
    said = found["composition"]
    assert (said.get("own_victim_ends_round", False) if isinstance(said, dict) else False) == ends_round
    assert found["name"] == "vllm_v1"
    sim = tmp_path / "sim"
    assert main(["run", f"from={tmp_path / 'run'}", "backend=sim", "cost=constant", f"hydra.run.dir={sim}"]) == 0
    assert load_run(sim).config["scheduler"] == found
    asked = compose_config(settings(tmp_path / "run"))
    assert load_run(tmp_path / "run").manifest["identity"]["config"] == identity_of(asked).config


def test_a_profile_is_of_what_vllm_computed_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """backend.dtype, whatever the weights are in; the configuration's model stays that of the run's neighbours."""
    monkeypatch.setattr(Vllm, "dtype", "float16")
    start(monkeypatch, lambda number: None)
    assert run(tmp_path / "run", "backend.dtype=float16") == 0
    profile = read_profile(tmp_path / "run" / "profile.parquet").manifest
    assert (profile.dtype, profile.model["dtype"]) == ("float16", "float16")
    assert load_run(tmp_path / "run").config["model"]["dtype"] == "bfloat16"


def test_a_model_without_a_price_is_told_of_as_in_an_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start(monkeypatch, lambda number: None)
    shape = lines_of("sync")[0]["model"]["hf_config"] | {"architectures": ["GemmaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert main(["run", *settings(tmp_path / "run"), f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    manifest = load_run(tmp_path / "run").manifest
    assert "has no price here: GemmaForCausalLM is none of" in manifest["unpriced"]
    assert manifest["no_profile"] == manifest["unpriced"]
    assert not (tmp_path / "run" / "profile.parquet").exists()


def test_a_log_of_which_no_run_was_made_is_set_aside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process was killed."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "observed.jsonl").write_text("what was served")
    start(monkeypatch, lambda number: None)
    assert run(tmp_path / "run") == 0
    assert (tmp_path / "run" / "observed.jsonl-1").read_text() == "what was served"


def test_where_vllm_does_not_start_the_run_that_was_there_is_as_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start(monkeypatch, lambda number: None)
    assert run(tmp_path / "run") == 0
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}

    start(monkeypatch, lambda number: None, Unstarted)
    assert run(tmp_path / "run", "overwrite=true") == 1
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}


def test_where_vllm_does_not_start_no_folder_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start(monkeypatch, lambda number: None, Unstarted)
    assert run(tmp_path / "run") == 1
    assert not (tmp_path / "run").exists()


def test_while_one_runs_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[bool] = []
    start(monkeypatch, lambda number: seen.append(is_locked(tmp_path / "run")))
    assert run(tmp_path / "run") == 0
    assert set(seen) == {True}
    kept = (tmp_path / "run" / "observed.jsonl").read_text()
    with locked(tmp_path / "run"):
        assert run(tmp_path / "run", "overwrite=true") == 1
    assert "another process is writing to" in said_by(capsys)
    assert (tmp_path / "run" / "observed.jsonl").read_text() == kept


def test_interrupted_before_its_first_step_a_run_says_just_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(number: int) -> None:
        raise KeyboardInterrupt

    start(monkeypatch, press)
    assert run(tmp_path / "run") == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", [Vllm, Dead])
def test_when_vllm_dies_what_was_finished_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: type[Vllm]
) -> None:
    start(monkeypatch, dies, kind)
    assert run(tmp_path / "run") == 1
    said = said_by(capsys)
    assert f"failed after 1 of {NUM_REQUESTS} requests: vLLM raised RuntimeError: CUDA error: out of luck" in said
    assert f"partial results kept in {tmp_path / 'run'}" in said
    found = load_run(tmp_path / "run")
    assert (found.manifest["status"], len(found.steps)) == ("partial", 6)
    assert (found.manifest["num_sent"], found.manifest["num_unsent"]) == (2, NUM_REQUESTS - 2)
    assert not (tmp_path / "run" / "done").exists()


def test_of_an_overwritten_run_nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start(monkeypatch, lambda number: None)
    assert run(tmp_path / "run") == 0
    assert (tmp_path / "run" / "case.jsonl").exists()
    start(monkeypatch, dies)
    assert run(tmp_path / "run", "overwrite=true") == 1
    assert len(load_run(tmp_path / "run").steps) == 6
    assert not (tmp_path / "run" / "case.jsonl").exists()


def test_of_a_run_that_is_not_replaced_by_a_whole_one_records_and_log_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start(monkeypatch, lambda number: None)
    assert run(tmp_path / "run") == 0
    before, log = load_run(tmp_path / "run"), (tmp_path / "run" / "observed.jsonl").read_text()
    for num_steps in (0, 2, 6):  # no run could be made; of no finished request; of one
        start(monkeypatch, lambda number, num_steps=num_steps: dies(number, num_steps))
        assert run(tmp_path / "run", "overwrite=true") == 1
        place = tmp_path / "run" / (".replaced" if num_steps else "")
        assert load_run(place).requests.equals(before.requests)
        assert load_run(place).manifest == before.manifest
        assert (tmp_path / "run" / "observed.jsonl-1").read_text() == log
        assert len(load_run(tmp_path / "run").steps) == (num_steps or len(before.steps))


def test_an_interrupted_run_says_what_was_not_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(monkeypatch, is_interrupted)
    assert run(tmp_path / "run") == 130
    kept = f"partial results kept in {tmp_path / 'run'}"
    assert said_by(capsys) == f"error: interrupted after 1 of {NUM_REQUESTS} requests; {kept}"
    assert load_run(tmp_path / "run").manifest["num_unsent"] == NUM_REQUESTS - 2


def test_where_no_run_can_be_made_the_log_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(monkeypatch, lambda number: dies(number, 0))
    assert run(tmp_path / "run") == 1
    said, log = said_by(capsys), tmp_path / "run" / "observed.jsonl"
    assert "vLLM raised RuntimeError: CUDA error: out of luck; no run could be made of the log" in said
    assert said.endswith(f"it is kept: testbed observe import {log}")
    assert log.exists()
