"""A vLLM that others start and ask over HTTP: its engine core is a process of its own, which makes the scheduler.

Without `--shutdown-timeout` the server kills that process as soon as it is asked to stop: then there is a tape alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("vllm", reason="vLLM is not in this environment: make test-vllm")

from analysis.load import load_run
from experiments.cli import main
from experiments.runs.parity import check_parity

pytestmark = pytest.mark.vllm
NUM_TOKENS = 8


class Server:
    """Of the model, on a port of its own, until the block ends; then it is asked to stop, as Ctrl-C does."""

    def __init__(
        self, model: Path, folder: Path, scheduler: str, more: dict[str, Any], variables: dict[str, str]
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
            "--port", self.url.rsplit(":", 1)[1], "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32",
            "--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--block-size", "32",
            "--num-gpu-blocks-override", "41", "--scheduler-cls", scheduler, "--additional-config", json.dumps(more),
            "--no-async-scheduling", "--served-model-name", "model", "--shutdown-timeout", "30",
        ]  # fmt: skip
        variables = {
            name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"
        } | variables
        self._said = (folder / "said").open("w+")
        self._process = subprocess.Popen(command, env=variables, stdout=self._said, stderr=self._said)

    def __enter__(self) -> Server:
        deadline = time.monotonic() + 120
        while True:
            try:
                with urlopen(f"{self.url}/health", timeout=5):
                    return self
            except (URLError, OSError):
                assert self._process.poll() is None, self.said()
                assert time.monotonic() < deadline, self.said()
                time.sleep(0.2)

    def __exit__(self, *given: object) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)
        self._said.close()

    def said(self) -> str:
        self._said.seek(0)
        return self._said.read()[-4000:]

    def complete(self, prompt: list[int]) -> int:
        """How many tokens come back."""
        asked = {"model": "model", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        request = Request(
            f"{self.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=60) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])


def test_our_scheduler_decides_in_a_server(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "run"
    more = {"testbed": {"scheduler": "sarathi", "device": "cpu", "out": str(folder)}}
    with Server(model, tmp_path, "real.vllm.TestbedScheduler", more, {}) as server:
        assert [server.complete([7] * 70 + [i]) for i in range(3)] == [NUM_TOKENS] * 3
    report = check_parity(folder)
    assert report.divergence is None, report.divergence
    run = load_run(folder)
    assert run.requests["num_output_tokens"].tolist() == [NUM_TOKENS] * 3
    assert run.requests["num_cached_tokens"].tolist() == [0, 64, 64]


def test_a_server_is_observed(tmp_path: Path, model: Path) -> None:
    log, folder = tmp_path / "log.jsonl", tmp_path / "run"
    with Server(model, tmp_path, "real.vllm.ObservedScheduler", {}, {"TESTBED_OBSERVE": str(log)}) as server:
        assert [server.complete([7] * 70 + [i]) for i in range(3)] == [NUM_TOKENS] * 3
    assert main(["observe", "import", str(log), "--out", str(folder)]) == 0
    assert main(["conform", str(folder / "case.jsonl")]) == 0
    assert load_run(folder).requests["num_output_tokens"].tolist() == [NUM_TOKENS] * 3
