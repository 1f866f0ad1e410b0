"""All of our kernels on a GPU that is not there: what each writes, and what computes it."""

from __future__ import annotations

import pytest
import torch

from tests.real import fake_launches as launches
from tests.real import fake_layers as layers
from tests.real.fake_cuda import FakeGPU


def fake_kernels(monkeypatch: pytest.MonkeyPatch, gpu: FakeGPU) -> None:
    """Every kernel of real/kernels runs on this GPU."""
    from real.kernels import block_copy, chain, experts, few_tokens, formats, gpu_layers, parts, routing, weights
    from real.kernels import decode as decoding
    from real.kernels import heads as turning
    from real.kernels import prefill as prefilling
    from real.kernels import race as racing
    from real.kernels import store as storing

    for module, name, writes, compute in (
        (storing, "store_kernel", ("key_cache", "value_cache"), launches.store),
        (turning, "heads_kernel", ("query", "key", "key_cache", "value_cache"), launches.heads),
        (parts, "plan_kernel", ("items", "starts"), launches.plan),
        (decoding, "decode_kernel", ("output", "partial"), launches.decode),
        (decoding, "reduce_kernel", ("output",), launches.reduce),
        (prefilling, "tiles_kernel", ("tiles",), launches.lay_out),
        (prefilling, "prefill_kernel", ("output",), launches.prefill),
        (routing, "choose_kernel", ("shares", "experts"), layers.choose),
        (routing, "routes_kernel", ("order", "tiles"), layers.route),
        (experts, "gate_up_kernel", ("output",), layers.gate_up),
        (experts, "down_kernel", ("output",), layers.down),
        (experts, "sum_kernel", ("output",), layers.add_experts),
        (weights, "dequantize_kernel", ("output",), layers.dequantize),
        (few_tokens, "multiply_kernel", ("output", "sums"), layers.multiply),
        (gpu_layers, "norm_kernel", ("output", "x"), layers.norm),
        (gpu_layers, "silu_kernel", ("output",), layers.silu),
        (block_copy, "move_kernel", ("target",), launches.move),
        (racing, "largest_kernel", ("largest",), launches.largest_logits),
        (racing, "least_kernel", ("least",), launches.least_logits),
        (racing, "race_kernel", ("scores", "winners"), launches.race),
        (racing, "pick_kernel", ("token_ids",), launches.pick),
    ):
        monkeypatch.setattr(module, name, launches.Launcher(gpu, getattr(module, name), writes, compute))
    # remembered by device, which another test may have seen otherwise
    for module in (chain, decoding, few_tokens, prefilling, formats, weights):
        monkeypatch.setattr(module, "capability", torch.cuda.get_device_capability)
    for module in (parts, few_tokens):
        monkeypatch.setattr(module, "num_processors", lambda device: 132)
