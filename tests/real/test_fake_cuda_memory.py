"""Memory of a GPU that is not there: how many blocks an engine takes, and what it says where there is too little."""

from __future__ import annotations

import pytest
import torch

from real.max_load import run_load, synthetic_load
from testbed.errors import DeviceError
from tests.real.engine_helpers import tiny_spec
from tests.real.fake_cuda import CONTEXT_BYTES
from tests.real.fake_engine import on_gpu

PROVIDERS = ["triton", "torch"]


@pytest.mark.parametrize("utilization", [0.5, 0.9])
@pytest.mark.parametrize("attention", PROVIDERS)
def test_blocks_leave_room_for_the_largest_steps_and_for_captured_decodes(gpu, attention, utilization):
    options = {"num_gpu_blocks": None, "num_cpu_blocks": 0, "gpu_memory_utilization": utilization, "max_num_seqs": 40}
    engine = on_gpu(gpu, attention=attention, **options).backend
    assert len(gpu.graphs) == (8 + 4 if attention == "triton" else 0)
    free, total = gpu.memory_info()
    reserve = round(total * (1 - utilization))
    gpu.reset_peak()
    with torch.inference_mode():
        for load in ([(64, 64)], [(1, 64)] * 40):
            run_load(engine.runner, synthetic_load(engine.runner, load, 40), engine.cache)
    least = free - (gpu.peak - gpu.allocated)
    assert least >= reserve - 2**16, "the largest step goes beyond its share"
    assert least <= reserve + 2**20, "memory is left unused"


def test_what_others_hold_of_the_gpu_is_left_to_them(gpu):
    held = torch.zeros(2**24, dtype=torch.uint8, device="cuda")
    options = {"num_gpu_blocks": None, "num_cpu_blocks": 0, "attention": "torch"}
    with_others = on_gpu(gpu, **options).backend.num_gpu_blocks
    held_bytes = held.nbytes
    del held
    alone_there = on_gpu(gpu, **options).backend.num_gpu_blocks
    size = 4 * tiny_spec().kv_bytes_per_token()
    assert (alone_there - with_others) * size == pytest.approx(held_bytes, abs=size)


def test_an_engine_that_is_gone_leaves_nothing(gpu):
    before = gpu.memory_info()[0]
    engine = on_gpu(gpu, num_gpu_blocks=None)
    assert gpu.memory_info()[0] < before / 2
    engine.backend.close()
    assert not gpu.graphs
    del engine
    assert gpu.memory_info()[0] == before


NO_BLOCKS = "no memory for 64 KV blocks on cuda:0 and 16 in host memory, 2,048 bytes each (CUDA out of memory.)"


@pytest.mark.parametrize(
    ("room", "num_blocks", "told"),
    [
        (2 << 20, None, "out of GPU memory; captured steps do not fit: lower backend.max_captured_tokens or "),
        (1 << 19, None, "out of GPU memory; a step of 64 tokens of 4 sequences does not fit: lower scheduler."),
        (2 << 20, 64, "out of GPU memory; lower cache.num_gpu_blocks or "),
        (450_000, 64, NO_BLOCKS),
        (1 << 13, 64, "out of GPU memory; others hold it, as nvidia-smi shows: not even a first small step fits"),
    ],
)
def test_a_gpu_that_is_too_small_is_one_line(gpu, room, num_blocks, told):
    gpu.total_bytes = CONTEXT_BYTES + room
    with pytest.raises(DeviceError) as error:
        on_gpu(gpu, num_gpu_blocks=num_blocks)
    assert str(error.value).startswith(told)
    assert "\n" not in str(error.value)


def test_a_gpu_without_room_for_the_weights_is_one_line(gpu):
    gpu.total_bytes = CONTEXT_BYTES + (1 << 18)
    with pytest.raises(
        DeviceError, match=r"^the weights of tiny-test \(376,832 bytes\) do not fit on Fake H100; choose"
    ):
        on_gpu(gpu, attention="torch")


def test_what_is_no_lack_of_memory_is_not_called_so(gpu, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr("real.backend.build_model", broken)
    with pytest.raises(RuntimeError, match="too old"):
        on_gpu(gpu)


def test_memory_that_ends_a_capture_is_one_line(gpu, monkeypatch):
    def full(*_: object) -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr("real.backend.capture_steps", full)
    with pytest.raises(DeviceError, match=r"^out of GPU memory; .*backend\.cuda_graphs=false$"):
        on_gpu(gpu)
