"""The fused functions: as they are on the CPU, compiled on a GPU, with the same results."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from real.kernels import host_layers
from real.layers import compiled
from real.layers.activation import silu_and_mul
from real.layers.compiled import can_compile, compile_shapes, compiled_on_cuda
from real.layers.matrix import dequantize
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
    if name == "dequantize":
        groups = [torch.arange(size, device=device) // 10 for size in (num_tokens, 32)]
        return [random(num_tokens, 32).to(torch.float8_e4m3fn), random(4, 4).float(), *groups, dtype]
    return [random(num_tokens, 32), random(32), 1e-6] if name == "rms_norm" else [random(num_tokens, 64)]


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "rotate": rotate, "head_norm": rms_norm, "rms_norm": rms_norm, "add_rms_norm": add_rms_norm,
    "silu_and_mul": silu_and_mul, "dequantize": dequantize,
}  # fmt: skip


def both(name: str, fn: Callable[..., Tensor], num_tokens: int, device: str, dtype: torch.dtype) -> list[list[Tensor]]:
    """Result and arguments after the call: of the plain function, and of the other."""
    results = []
    for call in (inspect.unwrap(FUNCTIONS[name]), fn):
        given = arguments(name, num_tokens, device, dtype)
        with torch.inference_mode():
            results.append([call(*given), *(value for value in given if isinstance(value, Tensor))])
    return results


class Graphs:
    """A backend of torch.compile that counts what it is given, and runs it by torch's own operators."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_one_graph_for_all_sizes(name):
    """Traced as on a GPU: no break, nothing fixed to the first size, what is overwritten is overwritten."""
    graphs = Graphs()
    traced = compile_shapes(inspect.unwrap(FUNCTIONS[name]), backend=graphs)
    for num_tokens in SIZES:
        plain, other = both(name, traced, num_tokens, "cpu", torch.float32)
        torch.testing.assert_close(other, plain, atol=0, rtol=0)
    assert graphs.count == 2


@pytest.mark.parametrize("has_own_limit", [True, False])
def test_a_process_may_load_models_of_many_shapes(monkeypatch, has_own_limit):
    if has_own_limit and not compiled.takes_limit():
        pytest.skip("this torch has no limit for each function")
    monkeypatch.setattr(compiled, "takes_limit", lambda: has_own_limit)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        traced = compile_shapes(inspect.unwrap(rms_norm), backend=Graphs())
        for hidden_size in (16, 32, 48, 64):
            weight = torch.nn.Parameter(torch.rand(hidden_size), requires_grad=False)
            for num_tokens, eps in ((3, 1e-6), (1, 1e-6), (5, 1e-5)):
                x = torch.randn(num_tokens, hidden_size)
                with torch.inference_mode():
                    torch.testing.assert_close(traced(x, weight, eps), rms_norm(x, weight, eps))
        assert torch._dynamo.config.recompile_limit == (8 if has_own_limit else compiled.MAX_SHAPES)


def test_a_cpu_without_c_calls_them_as_they_are(monkeypatch):
    monkeypatch.setattr(torch, "compile", None)
    monkeypatch.setattr(host_layers, "why_no_library", lambda: "there is no C compiler")
    for name in FUNCTIONS:
        plain, wrapped = both(name, FUNCTIONS[name], 3, "cpu", torch.float32)
        torch.testing.assert_close(wrapped, plain, atol=0, rtol=0)


@pytest.mark.parametrize(("capability", "is_able"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_they_are_compiled_for_gpus_that_know_bfloat16(monkeypatch, capability, is_able):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("real.kernels.find_spec", lambda name: name)
    monkeypatch.setattr("real.kernels.why_no_launchers", lambda: None)
    assert can_compile.__wrapped__(torch.device("cuda", 0)) == is_able


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_on_cuda_and_captured(name, dtype):
    assert can_compile(torch.device("cuda", 0))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]  # sums in another order
    for num_tokens in SIZES:
        plain, compiled = both(name, FUNCTIONS[name], num_tokens, "cuda", dtype)
        for one, other in zip(compiled, plain, strict=True):
            is_exact = other.dtype.itemsize == 1  # an FP8 argument, as it was; torch compares those bit by bit alone
            close = 0.0 if is_exact else tolerance
            torch.testing.assert_close(one, other, atol=close, rtol=close)
        given = arguments(name, num_tokens, "cuda", dtype)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            captured = FUNCTIONS[name](*given)
        graph.replay()
        torch.testing.assert_close(captured, plain[0], atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_it_is_compiled_once_for_many_sizes(monkeypatch):
    graphs, compile_plainly = Graphs(), torch.compile
    monkeypatch.setattr(compiled, "takes_limit", lambda: False)
    monkeypatch.setattr(torch, "compile", lambda fn, options, **how: compile_plainly(fn, backend=graphs, **how))

    @compiled_on_cuda
    def double(x: Tensor) -> Tensor:
        return x * 2

    with torch._dynamo.config.patch(recompile_limit=8):
        for num_tokens in (3, 4, 50, 7):
            doubled = double(torch.ones(num_tokens, 2, device="cuda"))
            assert torch.equal(doubled, torch.full((num_tokens, 2), 2.0, device="cuda"))
    assert graphs.count == 1
