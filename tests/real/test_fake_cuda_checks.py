"""The GPU that is not there finds what it is for: each check of fake_cuda.py fails where it must."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from real import cache_engine
from real.cache_engine import LayerCaches
from real.graphs import CudaCapture
from real.max_load import _small_cache
from real.staging import Staging, send_array
from tests.real.engine_helpers import plan_of, row, tiny_spec
from tests.real.fake_cuda import CONTEXT_BYTES, GRAPH_BYTES
from tests.real.fake_engine import Watched, on_gpu
from tests.real.fake_streams import TroubleError


def two_prompts(engine: Watched) -> None:
    engine.step(row(0, [1, 2, 3, 4, 5], [1, 2]), row(1, [6, 7, 8], [3]))


@pytest.mark.parametrize(("num_layers", "layers_of_a_launch"), [(2, 1), (5, 2)])
def test_a_layer_that_does_not_wait_for_its_blocks_is_found(gpu, monkeypatch, num_layers, layers_of_a_launch):
    monkeypatch.setattr(cache_engine, "SWAP_LAYERS", layers_of_a_launch)
    engine = on_gpu(gpu, tiny_spec(num_hidden_layers=num_layers), max_captured_tokens=0)
    two_prompts(engine)
    engine.step(row(1, [6, 7, 8, 9], [3], start=3), swap_out=((7, 3),))  # each layer waits for its own
    launch = engine.backend.cache._swaps.launch

    def one_layer_early(*arguments: Any) -> Any:
        events, elapsed_ns = launch(*arguments)
        return [events[0]] * num_layers, elapsed_ns

    monkeypatch.setattr(engine.backend.cache._swaps, "launch", one_layer_early)
    with pytest.raises(TroubleError, match=r"does not wait for move_kernel"):
        engine.step(row(1, [6, 7, 8, 9, 10], [3, 4], start=4), swap_out=((1, 1),))
    monkeypatch.setattr(LayerCaches, "will_be_moved", lambda self, events: None)
    with pytest.raises(TroubleError, match=r"does not wait for move_kernel"):
        engine.step(row(1, [6, 7, 8, 9, 10], [3, 4], start=3), swap_in=((1, 1),))


@pytest.mark.parametrize("num_new", [1, 2], ids=["decodes", "mixed"])
def test_a_graph_that_does_not_wait_for_its_blocks_is_found(gpu, monkeypatch, num_new):
    engine = on_gpu(gpu)
    two_prompts(engine)
    monkeypatch.setattr(LayerCaches, "wait", lambda self: None)
    with pytest.raises(TroubleError, match=r"does not wait for move_kernel"):
        engine.step(row(1, [6, 7, 8, 9], [3], start=4 - num_new), swap_out=((1, 1),))


@pytest.mark.parametrize(
    ("num_new", "max_captured_tokens"), [(1, 0), (3, 64), (3, 0)], ids=["captured decodes", "captured", "eager"]
)
def test_inputs_that_are_overwritten_on_their_way_are_found(gpu, num_new, max_captured_tokens):
    """The inputs of two steps may be on their way, not those of three."""
    engine = on_gpu(gpu, max_captured_tokens=max_captured_tokens)
    first = engine.backend.start(plan_of(row(0, [1, 2, 3, 4][:num_new], [1])))
    second = engine.backend.start(plan_of(row(1, [6, 7, 8, 9][:num_new], [3])))
    first.wait()
    engine.backend.start(plan_of(row(2, [6, 7, 8, 9][:num_new], [2])))
    engine.backend.start(plan_of(row(3, [6, 7, 8, 9][:num_new], [1])))
    with pytest.raises(TroubleError, match="pinned memory was written again"):
        second.wait()


def test_a_copy_that_waits_is_counted(gpu, monkeypatch):
    monkeypatch.setattr(
        "real.attention.torch_provider.send_array", lambda array, device: torch.tensor(array.tolist(), device=device)
    )
    engine = on_gpu(gpu, attention="torch")
    with pytest.raises(AssertionError, match="launching a step waits for nothing"):
        engine.step(row(0, [1, 2, 3], [1]), row(1, [4], [2]))


def test_results_are_garbage_until_they_were_waited_for(gpu):
    there = torch.full((3,), 5, device="cuda")
    here = there.to("cpu", non_blocking=True)
    assert here.tolist() == [77, 77, 77]
    gpu.synchronize()
    assert here.tolist() == [5, 5, 5]
    assert there.cpu().tolist() == [5, 5, 5]
    assert len(gpu.syncs) == 2


def test_devices_do_not_mix(gpu):
    there = torch.ones(3, device="cuda")
    for mixed in (
        lambda: there + torch.ones(3),
        lambda: there[torch.tensor([0])],
        lambda: there.copy_(there) @ torch.ones(3),
    ):
        with pytest.raises(TroubleError, match="on the GPU and on the host"):
            mixed()
    assert (there + torch.tensor(1.0)).inner.tolist() == [2, 2, 2]  # a number is a number


def test_what_a_capture_must_not_do_is_found(gpu):
    there = torch.ones(2, device="cuda")
    staging = Staging(torch.device("cuda", 0))
    for work, trouble in {
        lambda: torch.ones(2).to("cuda:0"): "between the host and the GPU",
        lambda: send_array(np.ones(2), there.device): "pinned memory is allocated",
        lambda: staging.send([np.ones(2)])[0]: "between the host and the GPU",
        lambda: there * there.sum().item(): "a wait for aten._local_scalar_dense",
        lambda: there[there > 0]: "a wait for aten.index",
    }.items():
        with pytest.raises(TroubleError, match=trouble):
            CudaCapture()(work)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with (
        pytest.raises(TroubleError, match="nothing ran on the capture's stream before"),
        torch.cuda.graph(graph, stream=stream),
    ):
        there * 2
    with torch.cuda.stream(stream):
        there * 2
    with pytest.raises(TroubleError, match="a collection may free"), torch.cuda.graph(graph, stream=stream):
        there * 2
    assert gc.isenabled()


def test_a_graph_reads_what_lies_in_its_memory_at_the_replay(gpu):
    there, kept = torch.ones(2, device="cuda"), [torch.ones(2, device="cuda")]
    replay = CudaCapture()(lambda: (there + kept[0]) * 3)
    there.fill_(2)
    result = replay()
    assert result.inner.tolist() == [9, 9]
    kept.clear()
    with pytest.raises(TroubleError, match="memory that was let go of"):
        replay()


def test_memory_of_graphs_is_what_the_largest_takes_and_the_drivers_of_each(gpu):
    free = gpu.memory_info()[0]
    assert free == gpu.total_bytes - CONTEXT_BYTES
    capture = CudaCapture()
    replays = [capture(lambda size=size: torch.ones(size, dtype=torch.uint8, device="cuda")) for size in (4096, 1024)]
    gpu.synchronize()
    assert free - gpu.memory_info()[0] == 4096 + 2 * GRAPH_BYTES
    del replays
    assert gpu.memory_info()[0] == free


def test_the_small_cache_of_a_measurement_has_all_layers(gpu):
    cache = _small_cache(on_gpu(gpu).backend.runner, torch.float32)
    assert cache.gpu.whole.shape == (2, 2, 2, 4, 2, 16)
