"""The whole engine with attention=triton gives the logits that it gives with attention=torch."""

from __future__ import annotations

import random

import pytest
import torch

from tests.real.engine_helpers import TOLERANCE, row, step_logits, tiny_backend, tiny_spec

SPEC = tiny_spec(num_attention_heads=6, num_key_value_heads=2, head_dim=24, num_hidden_layers=2)


FP8_TOLERANCE = 0.02  # a last bit's difference may round a key or value of the next layer the other way


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"block_size": 4, "sliding_window": 11}, TOLERANCE),
        ({"block_size": 16, "kv_dtype": "fp8_e4m3", "k_scale": 0.01, "v_scale": 0.03}, FP8_TOLERANCE),
    ],
    ids=str,
)
def test_steps_of_every_kind(options, tolerance):
    rng = random.Random(5)
    limits = {"max_num_batched_tokens": 3, "max_num_seqs": 3}  # of the steps that warm an engine up
    backends = [tiny_backend(SPEC, attention=name, **limits, **options) for name in ("triton", "torch")]
    assert [backend.attention_name for backend in backends] == ["triton", "torch"]
    tokens = [[rng.randrange(512) for _ in range(60)] for _ in range(3)]
    blocks = rng.sample(range(64), 48)
    tables = [blocks[16 * i : 16 * i + 16] for i in range(3)]
    steps = [
        [(0, 0, 15), (1, 0, 5)],  # prompts: row, first position, behind the last
        [(0, 15, 16), (1, 5, 12), (2, 0, 3)],  # a decode, a chunk, a prompt
        [(1, 12, 13), (2, 3, 4), (0, 16, 17)],  # decodes
        [(2, 4, 20), (0, 17, 18)],
        [(2, 20, 21)],
    ]
    for step in steps:
        rows = [row(i, tokens[i], tables[i], start=start, end=end) for i, start, end in step]
        ours, theirs = (step_logits(backend, *rows) for backend in backends)
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


def test_auto_leaves_the_interpreter_alone():
    backend = tiny_backend(SPEC)
    assert backend.attention_name == "torch"
    assert "interpreter" in backend.attention_reasons["triton"]
