"""Decodes in padded batches over fixed memory give the logits that they give alone, whatever ran before in it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from real.backend import RealBackend
from real.device import Placement
from real.graphs import call_again, captured_sizes
from real.max_load import BatchLimits, capture_decodes
from real.staging import layout, views, write
from sim.cost.config import RooflineConfig
from sim.cost.roofline import RooflineCost
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec
from tests.real.engine_helpers import TOLERANCE, row, step_logits, tiny_backend

MAX_MODEL_LEN = 64
NUM_STEPS = 12


def graphed(sizes: list[int], device: str = "cpu", **options: object) -> RealBackend:
    """An engine whose decodes are "captured" on a CPU: their work is called again over the same memory."""
    backend = tiny_backend(device=device, max_model_len=MAX_MODEL_LEN, **options)
    if device == "cpu":
        limits = BatchLimits(options.get("block_size", 4), 64, 8, MAX_MODEL_LEN)
        placement = Placement(torch.device("cpu"), torch.float32)
        backend.runner.graphs = capture_decodes(backend.runner, backend.cache, placement, limits, sizes, call_again)
    return backend


@pytest.mark.parametrize("seed", range(3))
def test_random_decodes_equal_those_of_an_engine_without_graphs(seed):
    check_random_decodes(seed)  # no window: the torch provider reads lengths on the host


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("block_size", [16, 256])
def test_captured_decodes_equal_eager_ones(window, block_size):
    check_random_decodes(5, "cuda", sliding_window=window, dtype="bfloat16", block_size=block_size)


def check_random_decodes(seed: int, device: str = "cpu", **options: object) -> None:
    """Decodes of four sequences in batches of any size and order, with graphs and without."""
    rng = random.Random(seed)
    pair = [
        graphed([1, 2, 4, 8], device, **options),
        tiny_backend(device=device, max_model_len=MAX_MODEL_LEN, **options),
    ]
    pair[1].runner.graphs = None
    blocks = rng.sample(range(64), 64)
    known = [[rng.randrange(512) for _ in range(rng.randint(2, 20))] for _ in range(4)]
    tables = [blocks[16 * i : 16 * i + 16] for i in range(4)]
    prompts = [row(i, tokens, tables[i]) for i, tokens in enumerate(known)]
    for backend in pair:
        step_logits(backend, *prompts)
    tolerance = TOLERANCE if device == "cpu" else 0.05
    for _ in range(NUM_STEPS):
        chosen = rng.sample(range(4), rng.randint(1, 4))  # batches of all sizes, in any order
        for i in chosen:
            known[i].append(rng.randrange(512))
        rows = [row(i, known[i], tables[i], start=len(known[i]) - 1) for i in chosen]
        prepared = pair[0].runner.prepare(rows).forward
        assert isinstance(prepared, int)
        assert prepared >= len(chosen)
        actual, expected = (step_logits(backend, *rows) for backend in pair)
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)
    for ours, theirs in zip(pair[0].cache.gpu, pair[1].cache.gpu, strict=True):  # padding wrote to nobody's block
        torch.testing.assert_close(ours[:, :64], theirs[:, :64], atol=tolerance, rtol=0)


def test_what_is_no_small_batch_of_decodes_runs_eagerly():
    runner = graphed([1, 2]).runner
    one, two = row(0, [1, 2, 3], [5], start=2), row(1, [1, 2, 3], [6], start=2)
    assert runner.prepare([one]).forward == 1
    assert runner.prepare([one, two]).forward == 2
    for rows in ([one, two, one], [row(0, [1, 2, 3], [5])], [one, row(1, [1, 2, 3], [6])]):
        assert not isinstance(runner.prepare(rows).forward, int)
    too_long = row(0, [1] * 66, list(range(17)), start=65)
    assert not isinstance(runner.prepare([too_long]).forward, int)


def test_sizes_are_those_that_the_simulator_pads_to():
    assert captured_sizes(1) == [1]
    assert captured_sizes(3) == [1, 2, 3]
    assert captured_sizes(20) == [1, 2, 4, 8, 16, 20]
    cost = RooflineCost(ModelSpec("any"), DeviceSpec("h100"), RooflineConfig(max_captured_size=64))
    sizes = captured_sizes(64)
    for num in range(1, 65):
        assert cost._padded(num) == min(size for size in sizes if size >= num)


def test_arrays_come_back_from_one_piece_of_memory_as_they_went_in():
    rng = np.random.default_rng(4)
    arrays = [
        rng.integers(0, 9, 5),
        rng.integers(0, 9, (3, 7)).astype(np.int32),
        np.zeros(0, dtype=np.int64),
        rng.random(3).astype(np.float32),
    ]
    offsets, total = layout(arrays)
    assert all(offset % 16 == 0 for offset in offsets)
    memory = torch.zeros(total, dtype=torch.uint8)
    write(arrays, offsets, memory.numpy())
    for array, tensor in zip(arrays, views(arrays, offsets, memory), strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
