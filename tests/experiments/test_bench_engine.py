"""The engine's benchmark runs end to end on a CPU; its numbers decide nothing."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--parts", "x"], "--parts names 'x'"), (["--repeats", "0"], "--repeats is 0")],
)
def test_mistakes_are_one_line(capsys, arguments, words):
    said = say(capsys, "bench", "engine", *arguments)
    assert said.status != 0
    assert words in said.err
