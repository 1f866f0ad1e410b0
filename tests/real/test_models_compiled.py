"""The fused functions: as they are on the CPU, compiled on a GPU, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from real.layers.activation import silu_and_mul
from real.layers.compiled import can_compile, compiled_on_cuda
from real.layers.norm import add_rms_norm, rms_norm
from real.layers.rotary import rotate

SIZES = [5, 1, 33]  # of batches; 1 is compiled by itself


def arguments(name: str, num_tokens: int, device: str, dtype: torch.dtype) -> list[Any]:
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    heads = random(num_tokens, 8, 16)[:, :6]  # a part of a wider projection
    if name == "rotate":
        return [heads, random(num_tokens, 1, 8), random(num_tokens, 1, 8)]
    if name == "head_norm":
        return [heads, random(16), 1e-6]
    if name == "add_rms_norm":
        return [random(num_tokens, 32), random(num_tokens, 32), random(32), 1e-6]
    return [random(num_tokens, 32), random(32), 1e-6] if name == "rms_norm" else [random(num_tokens, 64)]


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "rotate": rotate, "head_norm": rms_norm, "rms_norm": rms_norm, "add_rms_norm": add_rms_norm,
    "silu_and_mul": silu_and_mul,
}  # fmt: skip


def both(name: str, fn: Callable[..., Tensor], num_tokens: int, device: str, dtype: torch.dtype) -> list[list[Tensor]]:
    """Result and arguments after the call: of the plain function, and of the other."""
    results = []
    for call in (FUNCTIONS[name].__wrapped__, fn):  # type: ignore[attr-defined]
        given = arguments(name, num_tokens, device, dtype)
        with torch.inference_mode():
            results.append([call(*given), *(value for value in given if isinstance(value, Tensor))])
    return results


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_one_graph_for_all_sizes(name):
    """Traced as on a GPU, run by torch's own operators: no break, nothing fixed to the first size, what is overwritten
    is overwritten."""
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    traced = torch.compile(FUNCTIONS[name].__wrapped__, fullgraph=True, dynamic=True, backend=backend)  # type: ignore[attr-defined]
    for num_tokens in SIZES:
        plain, other = both(name, traced, num_tokens, "cpu", torch.float32)
        torch.testing.assert_close(other, plain, atol=0, rtol=0)
    assert len(graphs) == 2


def test_the_cpu_calls_them_as_they_are(monkeypatch):
    monkeypatch.setattr(torch, "compile", None)
    for name in FUNCTIONS:
        plain, wrapped = both(name, FUNCTIONS[name], 3, "cpu", torch.float32)
        torch.testing.assert_close(wrapped, plain, atol=0, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_on_cuda_and_captured(name, dtype):
    assert can_compile()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]  # sums in another order
    for num_tokens in SIZES:
        plain, compiled = both(name, FUNCTIONS[name], num_tokens, "cuda", dtype)
        torch.testing.assert_close(compiled, plain, atol=tolerance, rtol=tolerance)
        given = arguments(name, num_tokens, "cuda", dtype)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            captured = FUNCTIONS[name](*given)
        graph.replay()
        torch.testing.assert_close(captured, plain[0], atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_it_is_compiled_once_for_many_sizes():
    calls = []

    @compiled_on_cuda
    def double(x: Tensor) -> Tensor:
        calls.append(1)  # while it is traced
        return x * 2

    for num_tokens in (3, 4, 50, 7):
        assert torch.equal(double(torch.ones(num_tokens, 2, device="cuda")), torch.full((num_tokens, 2), 2.0).cuda())
    assert len(calls) <= 1
