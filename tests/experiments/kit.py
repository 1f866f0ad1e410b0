"""Runs of a few requests on a model of a few thousand weights, from Python and through the command line's `main`."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments.cli import main
from experiments.configuration.compose import compose_config
from experiments.configuration.config import RunConfig
from testbed.traces.readers.own import read_jsonl
from testbed.traces.schema import Trace

# One argument a key, as a user would type it. The model is small enough for a step to take about a millisecond.
SMALL = (  # what TINY sets beside its model, for a model from a folder
    "cache.block_size=4",
    "cache.num_gpu_blocks=64",
    "cache.num_cpu_blocks=0",
    "scheduler.max_num_seqs=8",
    "scheduler.max_num_batched_tokens=64",
)
TINY = (
    "model=tiny",
    "model.hidden_size=64",
    "model.intermediate_size=96",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.head_dim=16",
    "model.vocab_size=512",
    "model.max_position_embeddings=256",
    *SMALL,
)
SHORT = (
    "trace.num_requests=6",
    "trace.rate=400",
    "trace.prompt={kind: uniform, min_tokens: 4, max_tokens: 24}",
    "trace.output={kind: uniform, min_tokens: 2, max_tokens: 8}",
)
REAL = ("backend=real", "backend.device=cpu", "backend.num_threads=1", "backend.pace=as_fast_as_possible")
needs_engine = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
BACKENDS = [pytest.param((), id="sim"), pytest.param(REAL, id="real", marks=needs_engine)]
TIGHT = {  # hits and preemptions: group__key=value
    "trace__num_requests": 14, "trace__num_system_prompts": 2, "trace__system_prompt_tokens": 14,
    "trace__output": {"kind": "uniform", "min_tokens": 8, "max_tokens": 30},
    "trace__prompt": {"kind": "uniform", "min_tokens": 2, "max_tokens": 30},
    "trace__rate": 4000.0, "cache__num_gpu_blocks": 22, "cache__watermark": 0.0,
}  # fmt: skip


@cache
def _composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    return compose_config(list(overrides)).raw


def config_of(overrides: Sequence[str] = (*TINY, *SHORT), **dotted: Any) -> RunConfig:
    """The configuration of these overrides, composed once; `dotted`: group__key=value, set without Hydra."""
    raw = copy.deepcopy(_composed(tuple(overrides)))
    for key, value in dotted.items():
        *groups, last = key.split("__")
        node = raw
        for group in groups:
            node = node[group]
        node[last] = value
    return RunConfig.from_container(raw)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def option(folder: Path, name: str, text: str) -> Path:
    """An option of the user's own in this folder of them, by group/name."""
    file = folder / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def trace_of(folder: Path, rows: Sequence[dict[str, Any]]) -> Trace:
    """A trace of our own schema, read as a user's file is read."""
    return read_jsonl(write_rows(folder / "rows.jsonl", rows))


def manifest_of(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return manifest


def table_of(folder: Path, name: str = "requests") -> pa.Table:
    return pq.read_table(folder / f"{name}.parquet")


def decisions_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "decisions.jsonl").read_text().splitlines()]


class Said:
    """What a command answered. lines: those of standard error that are not empty."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err
        self.lines = [line for line in err.splitlines() if line.strip()]

    def success(self) -> str:
        """What it printed."""
        assert self.status == 0, self.err
        return self.out

    def error(self) -> str:
        """The one line of a failure: it begins with `error:`, it is alone, and the exit status is 1, 2 of arguments
        that cannot be read, or 130 of an interrupt."""
        assert self.status in (1, 2, 130), f"it ended with {self.status} and said {self.out!r}"
        assert len(self.lines) == 1, f"not one line: {self.err!r}"
        assert self.lines[0].startswith("error: "), self.lines[0]
        assert "Traceback" not in self.out + self.err
        return self.lines[0].removeprefix("error: ")


Say = Callable[..., Said]  # the fixture `say`: `testbed <arguments>` in this process


def latest(*arguments: str) -> list[str]:
    """The arguments of a command; a key's last one alone, where a test changes what it shares with others."""
    last = {item.partition("=")[0]: place for place, item in enumerate(arguments) if "=" in item}
    return [
        item
        for place, item in enumerate(arguments)
        if item.startswith("-") or "=" not in item or last[item.partition("=")[0]] == place
    ]


def say(capsys: pytest.CaptureFixture[str], *arguments: str) -> Said:
    """`testbed <arguments>` in this process."""
    capsys.readouterr()
    status = main(latest(*arguments))
    captured = capsys.readouterr()
    return Said(status, captured.out, captured.err)
