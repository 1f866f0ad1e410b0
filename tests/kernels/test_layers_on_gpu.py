"""The kernels of layers on a GPU, at shapes of real models: GEMMs, experts, norms, heads, against float64 and torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from real.layers.experts import choose_experts, run_experts_one_by_one
from real.layers.fp8 import STORED, Fp8Layout, column_run
from real.layers.linear import Kept, Part, whole_part
from real.layers.matrix import Matrix, Scales, dequantize
from testbed.specs.quantization import PER_BLOCK, PER_CHANNEL, PER_TENSOR, Fp8Scheme
from tests.kernels.paged_batches import make_spec
from tests.kernels.test_on_gpu import GPU, HALF, TOLERANCE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("scheme", "start"),  # the first column that a rank keeps
    [(None, 0), (PER_BLOCK, 0), (PER_BLOCK, 32), (PER_TENSOR, 0)],
    ids=["bf16", "fp8 blocks", "fp8 parts of blocks", "fp8"],
)
@pytest.mark.parametrize("num_tokens", [1, 16, 100, 300])
def test_experts_give_what_each_gives_by_itself(num_tokens, scheme, start):
    """At Qwen3-30B-A3B's hidden and inner sizes, 16 of its experts, in tiles of all sizes; also replayed."""
    from real.kernels.experts import run_experts

    generator = torch.Generator().manual_seed(num_tokens)
    gate_up, down = (matrix(shape, scheme, start, generator) for shape in ((16, 2 * 768, 2048), (16, 2048, 768)))
    x = torch.randn(num_tokens, 2048, generator=generator).bfloat16()
    shares, experts = choose_experts(torch.randn(num_tokens, 16, generator=generator), 8, normalizes=True)
    shares = shares.bfloat16()
    wide = [Matrix(torch.stack([one.one(i).dense(x.dtype) for i in range(16)]).double()) for one in (gate_up, down)]
    expected = run_experts_one_by_one(x.double(), shares.double(), experts, *wide)
    given = (x.to(GPU), shares.to(GPU), experts.to(GPU), matrix_on_gpu(gate_up), matrix_on_gpu(down))
    output = check_replayed(lambda: run_experts(*given))
    torch.testing.assert_close(output.cpu().double(), expected, atol=TOLERANCE[x.dtype], rtol=0)


def matrix(shape: tuple[int, ...], scheme: Fp8Scheme | None, start: int, generator: torch.Generator) -> Matrix:
    """A random weight. start: the first column that a rank keeps."""
    *leading, num_out, num_in = shape
    weight = torch.randn(*shape, generator=generator) * num_in**-0.5
    if scheme is None:
        return Matrix(weight.bfloat16())
    columns = Part(start + num_in, start, num_in)
    layout = Fp8Layout(scheme, Kept({"a": whole_part(num_out)}, columns))
    scales = (1 + torch.rand(*leading, *layout.shape, generator=generator)) / 64
    groups = layout.groups(torch.device("cpu"))
    return Matrix((weight * 32).to(STORED), Scales(scales, *groups, column_run(scheme, columns)))


def matrix_on_gpu(one: Matrix) -> Matrix:
    scales = one.scales and Scales(*(part.to(GPU) for part in one.scales[:3]), one.scales.run)
    return Matrix(one.weight.to(GPU), scales)


def check_replayed(work: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Returns what is computed, which a captured graph must compute too."""
    output = work()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        replayed = work()
    with torch.inference_mode():
        replayed.zero_()
    graph.replay()
    assert torch.equal(replayed, output)
    return output


@pytest.mark.parametrize("scheme", [PER_BLOCK, PER_CHANNEL, PER_TENSOR], ids=["blocks", "channels", "a tensor"])
@pytest.mark.parametrize(
    ("num_out", "num_in", "start"), [(6144, 4096, 0), (4096, 12288, 0), (24576, 1024, 0), (1000, 1160, 64)]
)
@pytest.mark.parametrize("num_tokens", [1, 16, 24, 64, 200])
def test_fp8_weights_give_what_they_stand_for(num_tokens, num_out, num_in, start, scheme):
    """A few tokens by weights as they are stored, in parts or whole, more by dequantised ones; at sizes of Qwen3-8B and
    at odd ones."""
    from real.kernels.few_tokens import multiply_fp8
    from real.kernels.weights import dequantized

    generator = torch.Generator().manual_seed(num_tokens)
    weight = matrix((num_out, num_in), scheme, start, generator)
    x, bias = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((num_tokens, num_in), (num_out,)))
    assert weight.scales is not None
    exact = dequantize(weight.weight, *weight.scales[:3], torch.float64)
    expected, on_gpu = x.double() @ exact.T + bias.double(), matrix_on_gpu(weight)
    given = (x.to(GPU), on_gpu, bias.to(GPU))  # a capture takes nothing from the host
    output = check_replayed(lambda: multiply_fp8(*given))
    torch.testing.assert_close(output.cpu().double(), expected, atol=TOLERANCE[x.dtype] * 2, rtol=0)
    rounded = dequantize(weight.weight, *weight.scales[:3], x.dtype)
    assert torch.equal(dequantized(on_gpu, x.dtype).cpu(), rounded)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("num_out", "num_in"), [(6144, 4096), (4096, 12288), (24576, 1024), (1000, 1160), (151936, 1024)]
)
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 32])
def test_a_few_tokens_are_multiplied_by_a_plain_weight(num_tokens, num_out, num_in, dtype):
    """In parts and whole, at sizes of Qwen3 and at odd ones; again and again, as parts that come late would show."""
    from real.kernels.few_tokens import all_tickets, multiply_few

    generator = torch.Generator(GPU).manual_seed(num_tokens)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, device=GPU, dtype=dtype)
        for shape in ((num_tokens, num_in), (num_out, num_in), (num_out,))
    )
    expected = (x.double() @ weight.double().T + bias.double()) / num_in**0.5
    output = check_replayed(lambda: multiply_few(x, Matrix(weight), bias))
    torch.testing.assert_close(output.double() / num_in**0.5, expected, atol=TOLERANCE[dtype] * 2, rtol=0)
    for _ in range(200):
        assert torch.equal(multiply_few(x, Matrix(weight), bias), output)
    assert not all_tickets(x.device).any()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("size", [4096, 1000])
@pytest.mark.parametrize("num_tokens", [1, 7, 3000])
def test_norms_and_swiglu_are_those_of_torch(num_tokens, size, dtype):
    """At the size of Qwen3-8B and at an odd one."""
    from real.kernels.gpu_layers import rms_norm, silu_and_mul

    generator, close = torch.Generator(GPU).manual_seed(num_tokens), {torch.float32: 1e-5}.get(dtype, 0.02)
    x, residual, weight = (
        torch.randn(*shape, generator=generator, device=GPU, dtype=dtype)
        for shape in ((num_tokens, size), (num_tokens, size), (size,))
    )
    added, kept = x + residual, x.clone()
    for found, wanted in (
        (check_replayed(lambda: rms_norm(x, weight, 1e-6)), functional.rms_norm(x, (size,), weight, 1e-6)),
        (check_replayed(lambda: silu_and_mul(x)), functional.silu(x[:, : size // 2]) * x[:, size // 2 :]),
        (rms_norm(kept, weight, 1e-6, residual), functional.rms_norm(added, (size,), weight, 1e-6)),
    ):
        torch.testing.assert_close(found, wanted, atol=close, rtol=close)
    assert torch.equal(kept, added)


@pytest.mark.parametrize("num_tokens", [1, 64, 3000])
@pytest.mark.parametrize(("num", "per_token"), [(128, 8), (1, 1), (60, 4), (160, 6), (512, 10)])
def test_routes_are_those_of_a_cpu(num, per_token, num_tokens):
    from real.kernels.routing import routes

    scores = torch.stack([torch.randperm(num, generator=torch.Generator().manual_seed(i)) for i in range(num_tokens)])
    given = choose_experts(scores.float(), per_token, normalizes=True)
    shares, experts = choose_experts(scores.float().to(GPU), per_token, normalizes=True)
    assert torch.equal(experts.cpu(), given[1])
    torch.testing.assert_close(shares.cpu(), given[0], atol=1e-6, rtol=0)
    order, tiles, block_m = routes(experts, num)
    flat = given[1].flatten()
    assert order.tolist() == flat.argsort(stable=True).tolist()
    sizes = [last - first for _, first, last in tiles.tolist() if last > first]
    assert sum(sizes) == flat.numel()
    assert max(sizes) <= block_m
    assert all(int(flat[order[first]]) == expert for expert, first, last in tiles.tolist() if last > first)


def test_scores_that_are_no_numbers_choose_experts_that_exist():
    """As the tokens that pad a captured step may; experts that do not exist would lie beyond the weights."""
    scores = torch.full((3, 33), float("nan"), device=GPU)
    scores[1] = float("-inf")
    scores[2, 4:] = 0.0
    experts = choose_experts(scores, 8, normalizes=True)[1]
    assert int(experts.min()) >= 0
    assert int(experts.max()) < 33


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_heads_are_turned_and_stored_as_by_the_layers_one_by_one(head_dim, kv_dtype, dtype):
    """Against the norms and the rotation of float32, rounded once more than they; what is stored, to the last bit."""
    from real.attention.interface import HeadNorm, as_bytes
    from real.kernels.heads import turn_and_store
    from real.kernels.store import store_kv

    spec = make_spec(8, 1, head_dim, 16, dtype, GPU, kv_dtype=kv_dtype)
    query, key, value = torch.randn(300, 48, head_dim, device=GPU).to(dtype).split([32, 8, 8], dim=1)
    norm = HeadNorm(*(torch.randn(2, head_dim, device=GPU).to(dtype)), 1e-6)
    angles = torch.rand(300, 1, head_dim // 2, device=GPU) * 6.3
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = []
    for x, weight in ((query, norm.query_weight), (key, norm.key_weight)):
        first, second = torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), 1e-6).chunk(2, dim=-1)
        expected.append(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    slots = torch.randperm(640, device=GPU)[:300]
    ours, theirs = (torch.zeros((2, 40, 16, 8, head_dim), device=GPU).to(spec.cache_dtype) for _ in range(2))
    turn_and_store(query, key, value, norm, (cos, sin), ours, slots, 0.3, 1.7)
    for found, wanted in zip((query, key), expected, strict=True):
        torch.testing.assert_close(found.float(), wanted, atol=0.02 * float(wanted.abs().max()), rtol=0.02)
    store_kv(key, value, theirs, slots, 0.3, 1.7)
    assert torch.equal(as_bytes(ours), as_bytes(theirs))
