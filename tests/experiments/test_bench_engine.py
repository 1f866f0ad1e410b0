"""The engine's benchmark runs end to end on a CPU; its numbers decide nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

pytest.importorskip("torch")

from experiments.bench import engine, offline
from testbed.errors import TestbedError

TINY = replace(engine.SMALL, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
               num_key_value_heads=1, head_dim=16, vocab_size=128)  # fmt: skip


def test_steps_and_whole_runs_are_shown(say, monkeypatch):
    small = {"SMALL": TINY, "BATCHES": (1, 3), "PROMPTS": (16,), "SAMPLED": 2, "MIXED": (2, 5)}
    for name, value in small.items():
        monkeypatch.setattr(engine, name, value)
    loads = [
        offline.OfflineLoad("3 even", [[1, 2, 3]] * 3, [8] * 3),
        offline.OfflineLoad("2 mixed", [[1, 2], [3]], [4, 6]),
    ]
    monkeypatch.setattr(offline, "cpu_loads", lambda vocab_size: loads)
    monkeypatch.setattr(offline, "CPU_ARMS", ("transformers.generate", "this engine"))
    arguments = ("--device", "cpu", "--repeats", "1", "--threads", "1", "--dtypes", "float32")
    said = say("bench", "engine", *arguments).success()
    lines = said.splitlines()
    for start in (
        "  decode, batch 3, context 256", "  temperature 1, batch 2", "  prefill, 16 tokens", "  mixed, 2 and 5 tokens",
        "  transformers.generate", "  this engine",
    ):  # fmt: skip
        assert any(line.startswith(start) for line in lines), said
    assert "3 of 3 outputs are those of transformers.generate, token for token" in said
    _, _, mixed = said.partition("2 mixed")
    assert "transformers.generate" not in mixed, "one padded batch would hold tokens that nobody asked for"
    assert "this engine" in mixed


def test_the_least_time_of_a_step():
    """Counted by hand: reading what a decode reads, computing what a prompt computes, experts that are chosen."""
    spec = replace(engine.SMALL, tie_word_embeddings=True, dtype="bfloat16")
    hidden, inner, layers, vocab = 512, 1024, 5, 16384
    weights = layers * (hidden * (512 + 2 * 128) + 512 * hidden + 3 * hidden * inner)
    bytes_per_s, flops_per_s = engine.Ceilings(1e9, 1e30), engine.Ceilings(1e30, 1e9)
    read = 2 * (weights + vocab * hidden) + 4 * 100 * 1000
    assert engine.floor_s(spec, bytes_per_s, 1000, 4, 100) == pytest.approx(read / 1e9)
    fp8 = weights + 2 * vocab * hidden + 4 * 100 * 1000
    assert engine.floor_s(replace(spec, dtype="fp8"), bytes_per_s, 1000, 4, 100) == pytest.approx(fp8 / 1e9)
    attention = 4 * layers * 512 * (60 * 61 / 2)
    computed = 2 * weights * 64 + attention + 2 * vocab * hidden * 5
    assert engine.floor_s(spec, flops_per_s, 1000, 4, 100, 60) == pytest.approx(computed / 1e9)
    sparse = replace(spec, architecture="Qwen3MoeForCausalLM", num_experts=8, num_experts_per_tok=2,
                     moe_intermediate_size=inner)  # fmt: skip
    more = 8 * (1 - 0.75**4) - 1  # experts beside one
    router = layers * 8 * hidden
    read += 2 * layers * 3 * hidden * inner * more
    assert engine.floor_s(sparse, bytes_per_s, 1000, 4, 100) == pytest.approx(read / 1e9, rel=2 * router / read)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--dtypes", "fp8"), "--dtypes is 'fp8'; choose one of float32, bfloat16"),
        (("--dtypes", ""), "--dtypes is ''; choose one of float32, bfloat16"),
        (("--kv-dtype", "fp8_e4m3"), "--kv-dtype is for a GPU: on a CPU the cache has the model's format"),
        (("--models", "qwen3_8b"), "--models is for a GPU: on a CPU one small model is measured"),
    ],
)
def test_what_a_cpu_does_not_measure(say, arguments, problem):
    said = say("bench", "engine", "--device", "cpu", *arguments)
    assert said.status == 1
    assert problem in said.err


class _Fake:
    """A contender in this process. Those before it have gone when it is made."""

    alive: ClassVar[list[str]] = []
    fails: ClassVar[set[str]] = set()

    def __init__(self, name: str, setting: offline.Setting) -> None:
        if name in self.fails:
            raise TestbedError(f"{name}: the package 'x' is not here")
        assert not self.alive, "each has the GPU to itself"
        self.name = name
        self.alive.append(name)

    def generate(self, load: offline.OfflineLoad) -> tuple[float, list[list[int]], float | None]:
        return 1.0, [[0] * length for length in load.lengths], 0.1 if self.name.startswith("this") else None

    def close(self) -> None:
        self.alive.remove(self.name)


def test_each_whole_run_has_the_gpu_to_itself_and_who_is_not_here_is_left_out(capsys, monkeypatch):
    monkeypatch.setattr(offline, "Contender", _Fake)
    monkeypatch.setattr(_Fake, "fails", {"vLLM"})
    offline.on_gpu(TINY, 1)
    said = capsys.readouterr().out
    assert "left out: vLLM: the package 'x' is not here" in said
    for name in ("transformers, continuous batching", "this engine, triton", "this engine, flash_attn"):
        assert f"  {name} " in said
    assert "this engine, torch, 64 at a time: the host takes 10.0% of a step" in said


def test_a_contender_that_fails_says_so_in_one_line(tmp_path):
    setting = offline.Setting(tmp_path, "float32", "cpu", 1, 8)
    with pytest.raises(TestbedError, match=r"^this engine: .*config\.json") as caught:
        offline.Contender("this engine", setting)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parts", "x"], "--parts is 'x'; choose one of decode"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--threads", "-1"], "--threads is -1"),
        (["--parts", ""], "--parts is ''; choose one of decode"),
        (["--device", "cpu", "--models", "qwen3_8b"], "--models is for a GPU"),
        (["--device", "cpu", "--parts", "swap"], "--parts swap needs a GPU"),
    ],
)
def test_mistakes_are_one_line(say, arguments, words):
    said = say("bench", "engine", *arguments)
    assert said.status != 0
    assert words in said.err
