"""Steps padded to a captured shape, over fixed memory, give the logits that they give alone, whatever ran before."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from experiments.configuration.compose import compose_config
from experiments.wiring.costs import build_cost
from real.backend import RealBackend, shapes_to_capture
from real.config import EngineOptions, RealConfig
from real.graphs import Captured, GraphShape, captured_shapes, captured_sizes, captured_token_counts
from real.max_load import capture_steps
from real.staging import Staging
from sim.cost.config import RooflineConfig
from sim.cost.roofline import RooflineCost
from testbed.core.plan import BatchShape, PrefillChunk, ScheduledSequence
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec
from tests.real.engine_helpers import TOLERANCE, row, step_logits, tiny_backend
from tests.real.fake_streams import place

MAX_MODEL_LEN = 64
NUM_STEPS = 12
DECODES = [GraphShape(size, size, True) for size in (1, 2, 4, 8)]
MIXED = [GraphShape(8, 3, False), GraphShape(40, 8, False)]


def graphed(shapes: list[GraphShape], device: str = "cpu", **options: object) -> RealBackend:
    """An engine whose steps are "captured" on a CPU: their work is called again over the same memory."""
    backend = tiny_backend(device=device, max_model_len=MAX_MODEL_LEN, **options)
    if device == "cpu":
        shapes = sorted(shapes, reverse=True)
        backend.runner.graphs = capture_steps(backend.runner, backend.cache, shapes, lambda work: work)
    return backend


def shape_of(backend: RealBackend, rows: list[ScheduledSequence]) -> GraphShape | None:
    """Of the graph that the rows run in; None: in none."""
    prepared = backend.runner.prepare(rows).forward
    return prepared.shape if isinstance(prepared, Captured) else None


@pytest.mark.parametrize("seed", range(3))
def test_random_decodes_equal_those_of_an_engine_without_graphs(seed):
    check_random_steps(seed, [1])  # no window, no prompts: the torch provider reads lengths on the host


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1], [1, 1, 2, 7]], ids=["decodes", "mixed"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("block_size", [16, 256])
def test_captured_steps_equal_eager_ones(window, block_size, lengths):
    check_random_steps(5, lengths, "cuda", sliding_window=window, dtype="bfloat16", block_size=block_size)


def check_random_steps(seed: int, lengths: list[int], device: str = "cpu", **options: object) -> None:
    """Chunks of these lengths of four sequences, in batches of any size and order, with graphs and without."""
    rng = random.Random(seed)
    eager = tiny_backend(device=device, max_model_len=MAX_MODEL_LEN, **options)
    eager.runner.graphs = None
    pair = [graphed([*DECODES, *(MIXED if max(lengths) > 1 else [])], device, **options), eager]
    blocks = rng.sample(range(64), 64)
    known = [[rng.randrange(512) for _ in range(rng.randint(2, 6))] for _ in range(4)]
    tables = [blocks[16 * i : 16 * i + 16] for i in range(4)]
    prompts = [row(i, tokens, tables[i]) for i, tokens in enumerate(known)]
    tolerance = TOLERANCE if device == "cpu" else 0.05

    def check(rows: list[ScheduledSequence]) -> None:
        actual, expected = (step_logits(backend, *rows) for backend in pair)
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)

    check(prompts)
    for _ in range(NUM_STEPS):
        chosen = rng.sample(range(4), rng.randint(1, 4))  # batches of all sizes, in any order
        starts = {i: len(known[i]) for i in chosen}
        for i in chosen:
            known[i] += [rng.randrange(512) for _ in range(rng.choice(lengths))]
        rows = [row(i, known[i], tables[i], start=starts[i]) for i in chosen]
        shape = shape_of(pair[0], rows)
        assert shape is not None
        assert shape.num_tokens >= sum(one.num_tokens for one in rows)
        assert shape.is_decode == all(one.num_tokens == 1 for one in rows)
        check(rows)
    for ours, theirs in zip(pair[0].cache.gpu, pair[1].cache.gpu, strict=True):  # padding wrote to nobody's block
        torch.testing.assert_close(ours[:, :64], theirs[:, :64], atol=tolerance, rtol=0)


def test_a_step_runs_in_the_smallest_graph_that_holds_it_or_in_none():
    backend = graphed([*DECODES[:2], *MIXED])
    one, two, chunk = row(0, [1, 2, 3], [5], start=2), row(1, [1, 2, 3], [6], start=2), row(2, [1, 2, 3], [7])
    for rows, shape in (
        ([one], DECODES[0]),
        ([one, two], DECODES[1]),
        ([one, two, one], None),  # decodes run in no graph of other steps
        ([chunk], MIXED[0]),
        ([chunk, one, chunk], MIXED[0]),
        ([chunk] * 3, MIXED[1]),
        ([chunk] * 14, None),  # of 42 tokens
        ([row(0, [1] * 66, list(range(17)), start=65)], None),  # too long
        ([row(0, [1] * 66, list(range(17)), start=62)], None),
    ):
        assert shape_of(backend, rows) == shape


def test_a_step_of_more_rows_than_a_graph_has_runs_eagerly():
    backend = graphed(MIXED)
    one, chunk = row(0, [1, 2, 3], [5], start=2), row(2, [1, 2, 3], [7])
    assert shape_of(backend, [chunk, one, one]) == MIXED[0]
    assert shape_of(backend, [chunk, one, one, one]) is None


@pytest.mark.parametrize(("num_new", "padding"), [(1, 1), (2, 0)], ids=["decodes", "mixed"])
def test_padding_rows_have_no_context_of_an_earlier_step(num_new, padding):
    """A replay reads the lengths of all rows, and attends to as many positions."""
    backend = graphed([DECODES[2], GraphShape(8, 4, False)])
    rows = [row(i, [1] * 9, [3 * i, 3 * i + 1, 3 * i + 2], start=9 - num_new) for i in range(4)]
    for num_rows in (4, 1):
        captured = backend.runner.prepare(rows[:num_rows]).forward
        lens = captured.metadata(MAX_MODEL_LEN).context_lens_tensor
        assert lens.tolist() == [9] * num_rows + [padding] * (4 - num_rows)


def test_sizes_are_those_that_the_simulator_pads_to():
    assert captured_sizes(1) == [1]
    assert captured_sizes(3) == [1, 2, 3]
    assert captured_sizes(20) == [1, 2, 4, 8, 16, 20]
    cost = RooflineCost(ModelSpec("any"), DeviceSpec("h100"), RooflineConfig(max_captured_size=64))
    sizes = captured_sizes(64)
    for num in range(1, 65):
        assert cost.num_rows(BatchShape(num, 9 * num, (), num)) == min(size for size in sizes if size >= num)


@pytest.mark.parametrize("most", [2, 100, 128, 500, 1000, 2048])
def test_steps_with_prompts_have_the_sizes_that_the_simulator_pads_to(most):
    cost = RooflineCost(ModelSpec("any"), DeviceSpec("h100"), RooflineConfig(max_captured_tokens=most))
    counts = captured_token_counts(most)
    for num in range(2, most + 1):
        rows = cost.num_rows(BatchShape(0, 0, (PrefillChunk(0, num),), 1))
        assert rows == min(count for count in counts if count >= num)


@pytest.mark.parametrize(("budget", "max_num_seqs"), [(100, 20), (24, 64), (4096, 600)])
def test_the_largest_graph_ends_at_the_schedulers_limits_in_engine_and_simulator(budget, max_num_seqs):
    settings = [f"scheduler.max_num_batched_tokens={budget}", f"scheduler.max_num_seqs={max_num_seqs}", "device=h100"]
    cost = build_cost(compose_config(settings))
    shapes = shapes_to_capture(RealConfig(), EngineOptions(16, budget, max_num_seqs, 8192))
    for is_decode in (True, False):
        sizes = sorted(shape.num_tokens for shape in shapes if shape.is_decode == is_decode)
        for num in range(2, min(budget, max_num_seqs) + 1 if is_decode else budget + 1):
            step = BatchShape(num, 9 * num, (), num) if is_decode else BatchShape(0, 0, (PrefillChunk(0, num),), 1)
            assert cost.num_rows(step) == min((size for size in sizes if size >= num), default=num)


def test_an_engine_says_how_far_it_captures():
    assert graphed([*DECODES, *MIXED]).largest_captured == (8, 40)
    assert graphed(MIXED).largest_captured == (0, 40)
    assert tiny_backend().largest_captured == (0, 0)


def test_the_simulator_captures_what_the_engine_does_where_nothing_is_said():
    engine, simulator = RealConfig(), RooflineConfig()
    for name in ("cuda_graphs", "max_captured_size", "max_captured_tokens"):
        assert getattr(engine, name) == getattr(simulator, name)


def test_shapes_of_steps_with_prompts_pad_by_less_than_a_tile_of_rows():
    assert captured_token_counts(2) == [2]
    assert captured_token_counts(100) == [16, 32, 48, 64, 80, 96, 100]
    counts = captured_token_counts(2048)
    assert counts == sorted(set(counts))
    assert len(counts) == 26
    for num in range(2, 2049):
        padded = min(count for count in counts if count >= num)
        assert padded - num < 16 or (padded > 128 and padded - num < 64) or (padded > 512 and padded - num < 128)


def test_shapes_are_captured_from_the_largest_to_the_smallest():
    shapes = captured_shapes(4, 40, 8)
    assert shapes == [
        (40, 8, False), (32, 8, False), (16, 8, False), (4, 4, True), (2, 2, True), (1, 1, True),
    ]  # fmt: skip
    assert captured_shapes(4, 0, 8) == captured_shapes(4, 1, 8) == shapes[3:]


def test_arrays_come_back_from_one_piece_of_memory_as_they_went_in(gpu):
    rng = np.random.default_rng(4)
    staging = Staging(torch.device("cuda", 0), least_bytes=0)
    begins = []
    for _ in range(3):
        arrays = [
            rng.integers(0, 9, 5), rng.integers(0, 9, (3, 7)).astype(np.int32), np.zeros(0, dtype=np.int64),
            rng.random(3).astype(np.float32),
        ]  # fmt: skip
        tensors = staging.send(arrays)
        for array, tensor in zip(arrays, tensors, strict=True):
            assert tensor.inner.storage_offset() * tensor.itemsize % 16 == 0
            assert torch.equal(tensor.cpu(), torch.from_numpy(array))
        begins.append([place(tensor.inner) for tensor in tensors])
    assert begins[1:] == begins[:-1]
