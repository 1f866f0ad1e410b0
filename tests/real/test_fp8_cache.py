"""A KV cache of FP8: half the bytes of a block, nearly the same logits, whatever moves its blocks."""

from __future__ import annotations

import random

import pytest
import torch

from real.cache_engine import block_bytes
from tests.real.engine_helpers import plan_of, row, step_logits, tiny_backend, tiny_spec

RNG = random.Random(8)
PROMPT = [RNG.randrange(512) for _ in range(23)]
TABLE = [9, 3, 17, 5, 30, 2, 21, 40]
FORMATS = {"fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3}  # half a unit in the last place of 3 and of 2 bits of mantissa


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_logits_are_off_by_the_rounding_of_the_format(kv_dtype):
    exact = step_logits(tiny_backend(), row(0, PROMPT, TABLE))
    backend = tiny_backend(kv_dtype=kv_dtype)
    error = relative_error(step_logits(backend, row(0, PROMPT, TABLE)), exact)
    assert 1e-4 < error < FORMATS[kv_dtype]


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_chunks_and_decodes_see_what_a_whole_prefill_saw(kv_dtype):
    whole = step_logits(tiny_backend(kv_dtype=kv_dtype), row(0, PROMPT, TABLE))
    backend = tiny_backend(kv_dtype=kv_dtype)
    for start, end in ((0, 9), (9, 21), (21, 22), (22, 23)):
        logits = step_logits(backend, row(0, PROMPT, TABLE, start=start, end=end))
    torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)


def test_scales_bring_large_values_into_range():
    """Values a thousand times too large are clamped at 448, and are not once they are divided by their scale."""
    exact, plain, scaled = (
        tiny_backend(**options) for options in ({}, {"kv_dtype": "fp8_e4m3"}, {"kv_dtype": "fp8_e4m3", "v_scale": 16.0})
    )
    with torch.no_grad():
        for layer in exact.runner.model.model.layers:
            layer.self_attn.qkv_proj.weight[-32:] *= 1000.0  # the rows of the values: 2 heads of 16
    for backend in (plain, scaled):
        backend.runner.model.load_state_dict(exact.runner.model.state_dict())
    expected = step_logits(exact, row(0, PROMPT, TABLE))
    errors = [relative_error(step_logits(backend, row(0, PROMPT, TABLE)), expected) for backend in (plain, scaled)]
    assert errors[1] < 2**-4 < errors[0]


def test_blocks_are_half_the_size_and_survive_swaps_and_copies():
    size = block_bytes(tiny_spec(), 4, torch.float8_e4m3fn)
    assert size * 4 == block_bytes(tiny_spec(), 4, torch.float32)
    backend = tiny_backend(kv_dtype="fp8_e4m3", num_gpu_blocks=None, cpu_kv_bytes=64 * size)
    assert backend.num_gpu_blocks == 64
    step_logits(backend, row(0, PROMPT, TABLE))
    known = [*PROMPT, 7]
    expected = step_logits(backend, row(0, known, TABLE, start=23))
    pairs = list(zip(TABLE, (5, 0, 9, 2, 14, 1), strict=False))
    backend.start(plan_of(swap_out=tuple(pairs))).wait()
    for layer in backend.cache.gpu:
        layer.view(torch.uint8).fill_(56)  # ones: what is not moved is lost
    moved = [50, 51, 52, 53, 54, 55]
    back = tuple((cpu, gpu) for (_, cpu), gpu in zip(pairs, moved, strict=True))
    copies = ((55, 60),)
    table = [*moved[:5], 60]
    assert torch.equal(step_logits(backend, row(0, known, table, start=23), swap_in=back, copies=copies), expected)
