"""The engine's logits equal Hugging Face's on the same weights, however the core splits the work."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from real.backend import RealBackend
from testbed.errors import ConfigError
from tests.real.engine_helpers import ARCHITECTURES, TOLERANCE, checkpoint, row, step_logits, tiny_backend, tiny_spec

RNG = random.Random(7)
PROMPT = [RNG.randrange(512) for _ in range(23)]
OTHER = [RNG.randrange(512) for _ in range(14)]
TABLE = [9, 3, 17, 5, 30, 2, 21, 40]  # anything but contiguous
OTHER_TABLE = [12, 50, 4, 33, 8]


@pytest.fixture(scope="module", params=ARCHITECTURES.values(), ids=ARCHITECTURES)
def pair(request, tmp_path_factory):
    spec = checkpoint(tmp_path_factory.mktemp("models"), tiny_spec(**request.param))
    reference = AutoModelForCausalLM.from_pretrained(spec.path, dtype=torch.float32).eval()
    return spec, reference


@pytest.fixture
def spec(pair):
    return pair[0]


@pytest.fixture
def backend(spec) -> RealBackend:
    return tiny_backend(spec, sliding_window=spec.sliding_window)


@pytest.fixture
def expect(pair):
    """Last-position logits of a whole sequence, by the reference."""

    def logits(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return pair[1](torch.tensor([tokens])).logits[0, -1]

    return logits


def assert_close(actual: torch.Tensor, *expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), torch.stack(expected), atol=TOLERANCE, rtol=0)


def test_whole_prefill(backend, expect):
    assert_close(step_logits(backend, row(0, PROMPT, TABLE)), expect(PROMPT))


def test_several_prefills_in_one_flat_batch(backend, expect):
    logits = step_logits(backend, row(0, PROMPT, TABLE), row(1, OTHER, OTHER_TABLE))
    assert_close(logits, expect(PROMPT), expect(OTHER))


@pytest.mark.parametrize("ends", [[8, 16, 23], [1, 2, 9, 22, 23], [22, 23], [5, 6, 7, 23]])
def test_chunked_prefill(backend, expect, ends):
    start = 0
    for end in ends[:-1]:
        assert step_logits(backend, row(0, PROMPT, TABLE, start=start, end=end, samples=False)).shape == (0, 512)
        start = end
    assert_close(step_logits(backend, row(0, PROMPT, TABLE, start=start)), expect(PROMPT))


def test_cached_prefix(backend, expect):
    step_logits(backend, row(0, PROMPT, TABLE))
    shared = PROMPT[:12] + OTHER  # the first three blocks of PROMPT, then something else
    table = [*TABLE[:3], *OTHER_TABLE]
    assert_close(step_logits(backend, row(1, shared, table, start=12)), expect(shared))


def test_decodes_over_several_steps(backend, expect):
    first, second = list(PROMPT), list(OTHER)
    step_logits(backend, row(0, first, TABLE), row(1, second, OTHER_TABLE))
    for step in range(5):  # 23 -> 28 and 14 -> 19 tokens: both cross block borders
        first.append(100 + step)
        second.append(200 + step)
        rows = (row(0, first, TABLE, start=len(first) - 1), row(1, second, OTHER_TABLE, start=len(second) - 1))
        assert_close(step_logits(backend, *rows), expect(first), expect(second))


def test_mixed_prefill_chunk_and_decodes(backend, expect):
    step_logits(backend, row(0, OTHER, OTHER_TABLE))
    step_logits(backend, row(1, PROMPT, TABLE, end=10, samples=False))
    decoding, short = [*OTHER, 3], PROMPT[:5]
    logits = step_logits(
        backend,
        row(0, decoding, OTHER_TABLE, start=len(OTHER)),
        row(1, PROMPT, TABLE, start=10),
        row(2, short, [60, 61]),
    )
    assert_close(logits, expect(decoding), expect(PROMPT), expect(short))


def test_only_rows_that_sample_get_logits_in_their_order(backend, expect):
    logits = step_logits(
        backend, row(0, PROMPT, TABLE, end=8, samples=False), row(1, OTHER, OTHER_TABLE), row(2, PROMPT[:5], [60, 61])
    )
    assert_close(logits, expect(OTHER), expect(PROMPT[:5]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("max_captured_tokens", [64, 0])
@pytest.mark.parametrize("attention", ["torch", "triton", "flash_attn", "varlen", "flash_attn_3"])
def test_logits_on_cuda(pair, expect, attention, max_captured_tokens):
    spec, _ = pair
    is_half = attention not in ("torch", "triton")
    options = {"dtype": "bfloat16", "block_size": 256} if is_half else {"block_size": 4}
    options |= {"attention": attention, "max_captured_tokens": max_captured_tokens, "device": "cuda"}
    try:
        backend = tiny_backend(spec, sliding_window=spec.sliding_window, **options)
    except ConfigError as error:
        if not is_half:  # these two always can
            raise
        pytest.skip(str(error))
    known = [*PROMPT, 9]
    step_logits(backend, row(0, PROMPT, TABLE, end=9, samples=False))
    step_logits(backend, row(0, PROMPT, TABLE, start=9), row(1, OTHER, OTHER_TABLE))
    logits = step_logits(backend, row(0, known, TABLE, start=23), row(1, [*OTHER, 8], OTHER_TABLE, start=14))
    expected = torch.stack([expect(known), expect([*OTHER, 8])])
    tolerance = 0.15 if is_half else 2e-3  # bfloat16; TF32 in a GPU's float32 products
    torch.testing.assert_close(logits.cpu(), expected, atol=tolerance, rtol=0)
