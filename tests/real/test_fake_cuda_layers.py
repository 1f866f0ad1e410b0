"""What the layers launch on a GPU that is not there: which kernels, and in which kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from real.kernels import few_tokens
from real.layers.activation import silu_and_mul
from real.layers.norm import rms_norm
from tests.real.engine_helpers import EXPERTS, row, tiny_spec
from tests.real.fake_engine import on_cpu, on_gpu
from tests.real.test_fake_cuda import check_a_few_steps


@pytest.mark.parametrize(
    ("changes", "feed_forward"),
    [({}, "multiply silu multiply"), (EXPERTS, "multiply choose routes gate_up down sum")],
    ids=["one feed-forward", "experts"],
)
def test_launches_of_a_layer(gpu, monkeypatch, changes, feed_forward):
    """As docs/models.md has them."""
    spec = tiny_spec(num_hidden_layers=1, **changes)
    engine = on_gpu(gpu, spec, attention="triton", dtype="float16", cuda_graphs=False)
    launched: list[str] = []
    launch = gpu.launch
    monkeypatch.setattr(gpu, "launch", lambda work: (launched.append(work.what), launch(work)))
    engine.step(row(0, [1], [1]))
    names = [name.removesuffix("_kernel") for name in launched if "empty" not in name]
    expected = ["norm", "multiply", "heads", "decode", "multiply", "norm", *feed_forward.split(), "norm"]
    assert names[names.index("norm") :][: len(expected)] == expected


def test_plain_weights_in_half_precision_are_multiplied_by_our_kernel_too(gpu, monkeypatch):
    """By a few tokens, with biases; and after the warm-up no number of samples needs another kernel."""
    spec = tiny_spec(architecture="Qwen2ForCausalLM", tie_word_embeddings=False)
    kernel: Any = few_tokens.multiply_kernel
    kinds: set[tuple[int, int]] = set()
    compute = kernel._compute

    def told(values: dict[str, Any]) -> None:
        kinds.add((values["NUM_OUT"], values["BLOCK_M"]))
        compute(values)

    monkeypatch.setattr(kernel, "_compute", told)
    engine = on_gpu(gpu, spec, attention="triton", dtype="float16")
    known = set(kinds)
    assert known == {(size, block_m) for size in (128, 64, 192, 512) for block_m in (16, 32)}
    check_a_few_steps(engine, on_cpu(spec, dtype="float16"))
    hidden = torch.zeros(64, 64, dtype=torch.float16, device="cuda")
    for num_samples in (1, 16, 17, 32, 33):
        engine.backend.runner.token_logits(hidden, torch.arange(num_samples, device="cuda"))
    assert kinds == known


def test_norms_and_swiglu_of_any_rows(gpu):
    """Of more than the second dimension of a grid has programs, as prompts that are not split; and of views."""
    x, view = torch.zeros(70_000, 4, device="cuda"), torch.zeros(3, 8, device="cuda")[:, :4]
    for rows in (x, view):
        assert silu_and_mul(rows).shape == (len(rows), 2)
        assert rms_norm(rows, x[0], 1e-6).shape == rows.shape
