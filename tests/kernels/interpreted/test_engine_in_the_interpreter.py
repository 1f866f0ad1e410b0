"""The whole engine with attention=triton gives the logits that it gives with attention=torch."""

from __future__ import annotations

import random

import pytest
import torch

from real.graphs import call_again
from tests.real.engine_helpers import TOLERANCE, row, step_logits, tiny_backend, tiny_spec

SPEC = tiny_spec(num_attention_heads=6, num_key_value_heads=2, head_dim=24, num_hidden_layers=2)


@pytest.mark.parametrize(("block_size", "window"), [(16, None), (4, 11)])
def test_steps_of_every_kind(block_size, window):
    rng = random.Random(block_size)
    backends = [
        tiny_backend(SPEC, attention=name, block_size=block_size, sliding_window=window) for name in ("triton", "torch")
    ]
    assert [backend.attention_name for backend in backends] == ["triton", "torch"]
    tokens = [[rng.randrange(512) for _ in range(60)] for _ in range(3)]
    blocks = rng.sample(range(64), 48)
    tables = [blocks[16 * i : 16 * i + 16] for i in range(3)]
    steps = [
        [(0, 0, 21), (1, 0, 5)],  # prompts: row, first position, behind the last
        [(0, 21, 22), (1, 5, 17), (2, 0, 3)],  # a decode, a chunk, a prompt
        [(1, 17, 18), (2, 3, 4), (0, 22, 23)],  # decodes
        [(2, 4, 40), (0, 23, 24)],
        [(2, 40, 41)],
    ]
    for step in steps:
        rows = [row(i, tokens[i], tables[i], start=start, end=end) for i, start, end in step]
        ours, theirs = (step_logits(backend, *rows) for backend in backends)
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def test_auto_leaves_the_interpreter_alone():
    backend = tiny_backend(SPEC)
    assert backend.attention_name == "torch"
    assert "interpreter" in backend.attention_reasons["triton"]


def test_decodes_in_padded_batches_over_fixed_memory():
    """What a CUDA graph would replay, called again: lengths, tables and slots are read from the memory alone."""
    from real.device import Placement
    from real.profiling import Limits, capture_decodes

    rng = random.Random(5)
    options = {"attention": "triton", "block_size": 16, "max_model_len": 64}
    padded, plain = (tiny_backend(SPEC, **options) for _ in range(2))
    placement = Placement(torch.device("cpu"), torch.float32)
    limits = Limits(16, 64, 8, 64)
    padded.runner.graphs = capture_decodes(padded.runner, padded.cache, placement, limits, [1, 4], call_again)
    plain.runner.graphs = None
    tokens = [[rng.randrange(512) for _ in range(40)] for _ in range(3)]
    tables = [[7, 3, 12], [5, 30, 2], [11, 9, 40]]
    starts = [9, 15, 30]
    prompts = [row(i, tokens[i], tables[i], end=start) for i, start in enumerate(starts)]
    for backend in (padded, plain):
        step_logits(backend, *prompts)
    for chosen in ([0, 1, 2], [1], [2, 0], [1, 0, 2]):
        rows = [row(i, tokens[i], tables[i], start=starts[i], end=starts[i] + 1) for i in chosen]
        for i in chosen:
            starts[i] += 1
        assert isinstance(padded.runner.prepare(rows).forward, int)
        ours, theirs = (step_logits(backend, *rows) for backend in (padded, plain))
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
