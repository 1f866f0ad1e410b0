"""The engine's benchmark runs end to end on a CPU; its numbers decide nothing."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from experiments.bench import engine
from tests.experiments.kit import say

TINY = replace(engine.SMALL, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
               num_key_value_heads=1, head_dim=16, vocab_size=128)  # fmt: skip


def test_steps_and_whole_runs_are_shown(capsys, monkeypatch):
    for name, value in {"SMALL": TINY, "BATCHES": (1, 3), "PROMPTS": (16,), "CPU_LOAD": (3, 8)}.items():
        monkeypatch.setattr(engine, name, value)
    said = say(capsys, "bench", "engine", "--device", "cpu", "--repeats", "1", "--threads", "1")
    assert said.status == 0, said.err
    lines = said.out.splitlines()
    for start in ("  decode, batch 3, context 256", "  prefill, 16 tokens", "  transformers.generate", "  this engine"):
        assert any(line.startswith(start) for line in lines), said.out
    assert "3 of 3 outputs are the same token for token" in said.out


def test_each_whole_run_has_the_gpu_to_itself(capsys, monkeypatch):
    """What transformers held is nobody's when this engine measures its room."""
    held: list[weakref.ref[object]] = []

    class Theirs:
        def __init__(self, *_: object) -> None:
            held.append(weakref.ref(self))

        def __enter__(self) -> Theirs:
            return self

        def __exit__(self, *_: object) -> None: ...

        def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
            return [[0] * length for length in lengths]

    class Ours(Theirs):
        def __init__(self, *_: object) -> None:
            assert [one() for one in held] == [None] * len(held)
            super().__init__()

        def show_host(self, name: str) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr(engine, "Transformers", Theirs)
    monkeypatch.setattr(engine, "Offline", Ours)
    engine._against_continuous_batching(TINY, 1)
    assert len(held) == 4
    said = capsys.readouterr().out
    assert "transformers, continuous batching" in said
    assert "this engine, triton" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--parts", "x"], "--parts names 'x'"), (["--repeats", "0"], "--repeats is 0")],
)
def test_mistakes_are_one_line(capsys, arguments, words):
    said = say(capsys, "bench", "engine", *arguments)
    assert said.status != 0
    assert words in said.err
