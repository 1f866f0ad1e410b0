"""The providers on a GPU, at shapes of real models, in half precision: against float64, each other, and in graphs."""

from __future__ import annotations

import inspect
import random

import numpy as np
import pytest
import torch

from real.attention.first_step import why_it_fails
from real.attention.interface import AttentionMetadata, AttentionSpec
from real.attention.registry import PROVIDERS, choose_attention
from tests.kernels.paged_batches import Batch, make_spec
from tests.real.engine_helpers import EXPERTS, row, step_logits, tiny_backend, tiny_spec
from tests.real.fake_flash import FakeFlash, FakeFlash3

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}  # of outputs of unit scale
ROWS = [(0, 130), (700, 1), (0, 33), (257, 70), (1500, 1), (0, 1), (64, 5), (31, 1)]
HALF = [torch.bfloat16, torch.float16]


def model_spec(num_kv_heads, group, head_dim, dtype, **options) -> AttentionSpec:
    """On the CPU, where the reference is computed; Batch.to takes it to the GPU."""
    spec = make_spec(num_kv_heads, group, head_dim, options.pop("block_size", 16), dtype, **options)
    return spec._replace(scale=head_dim**-0.5)


def run(name: str, batch: Batch) -> torch.Tensor:
    provider = PROVIDERS[name].create(batch.spec)
    return provider.prepare(batch.metadata)(batch.query, batch.key, batch.value, batch.kv_cache.clone())


def providers(spec: AttentionSpec) -> list[str]:
    """All that can run, a first small step included; the reference and ours must."""
    on_gpu = spec._replace(device=GPU)
    able = [
        name
        for name, entry in PROVIDERS.items()
        if entry.why_not(on_gpu) is None and why_it_fails(entry.create(on_gpu), on_gpu) is None
    ]
    assert {"torch", "triton"} <= set(able)
    return able


def check(spec: AttentionSpec, rows: list[tuple[int, int]]) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    batch = Batch(spec, rows, seed, released=0)
    expected, on_gpu = batch.expected(), batch.to(GPU)
    limit = TOLERANCE[spec.dtype] * max(1.0, float(expected.abs().max()))
    for name in providers(spec):
        error = (run(name, on_gpu).double().cpu() - expected).abs().max().item()
        assert error <= limit, f"{name} is {error} off, seed {seed}"


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (4, 128), (8, 128), (5, 80), (2, 192), (2, 256), (7, 112)])
def test_mixed_batches(group, head_dim, dtype):
    check(model_spec(2, group, head_dim, dtype), ROWS)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize(
    "options", [{"window": 100}, {"window": 1}, {"alibi": True}, {"window": 300, "alibi": True}], ids=str
)
def test_windows_and_alibi(options, block_size, dtype):
    check(model_spec(2, 4, 128, dtype, block_size=block_size, **options), ROWS)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float16, 80), (torch.float32, 64)])
def test_fp8_caches(dtype, head_dim, kv_dtype):
    check(model_spec(2, 4, head_dim, dtype, kv_dtype=kv_dtype, scales=(0.02, 0.7)), ROWS)


@pytest.mark.parametrize("taken_for", [None, (8, 0)])
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_bits_are_read_as_the_gpu_reads_numbers(monkeypatch, kv_dtype, taken_for):
    """What older GPUs and the interpreter do with FP8, on whichever GPU this is."""
    from real.kernels import decode, formats, prefill

    if taken_for is not None and torch.cuda.get_device_capability()[0] not in formats.SETTLING:
        pytest.skip("Triton cannot pipeline here what older GPUs do")
    for module in (decode, prefill):
        monkeypatch.setattr(module, "capability", lambda device: taken_for)
    check(model_spec(2, 4, 128, torch.bfloat16, kv_dtype=kv_dtype, scales=(0.02, 0.7)), ROWS)


@pytest.mark.parametrize("block_size", [16, 256])
def test_auto_settles_on_no_reference(block_size):
    choice = choose_attention("auto", model_spec(8, 4, 128, torch.bfloat16, block_size=block_size, device=GPU))
    assert choice.provider.name != "torch", choice.passed_over


@pytest.mark.parametrize("max_captured_tokens", [256, 0])
@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 300}, {"kv_dtype": "fp8_e4m3"}, {"model": {"dtype": "fp8"}}, {"model": EXPERTS}],
    ids=str,
)
def test_once_an_engine_has_started_no_step_compiles_a_kernel(monkeypatch, options, max_captured_tokens):
    from triton import knobs

    rng = random.Random(7)
    options = options | {"max_model_len": 2048, "num_gpu_blocks": 600, "max_num_batched_tokens": 512}
    options["max_captured_tokens"] = max_captured_tokens
    spec = tiny_spec(
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
        **options.pop("model", {}),
    )  # fmt: skip
    backend = tiny_backend(spec, device="cuda", dtype="bfloat16", attention="triton", block_size=16, **options)
    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **told: compiled.append(told["repr"]))
    tokens = [[rng.randrange(512) for _ in range(1200)] for _ in range(4)]
    blocks = rng.sample(range(600), 4 * 128)
    tables = [blocks[128 * i : 128 * i + 128] for i in range(4)]
    known = [0] * 4
    for _ in range(40):  # prompts, chunks and decodes, in any company
        chosen = rng.sample(range(4), rng.randint(1, 4))
        ends = {i: known[i] + rng.choice([1, 1, 2, 3, 25]) for i in chosen}  # below 1200
        step_logits(backend, *(row(i, tokens[i], tables[i], start=known[i], end=end) for i, end in ends.items()))
        for i, end in ends.items():
            known[i] = end
    assert not compiled


@pytest.mark.parametrize("num_parts", [1, 2, 13, 64, 300])
def test_long_decodes_in_parts(num_parts):
    from real.attention.triton_provider import scoring_of
    from real.kernels.decode import paged_decode
    from real.kernels.parts import plan_parts
    from real.kernels.store import store_kv

    batch = Batch(model_spec(4, 4, 128, torch.bfloat16), [(5000, 1), (40, 1), (0, 1), (8191, 1)], num_parts)
    expected, gpu = batch.expected(), batch.to(GPU)
    store_kv(gpu.key, gpu.value, gpu.kv_cache, gpu.metadata.slot_mapping)
    output = torch.full_like(gpu.query, float("nan"))
    lens, tables = gpu.metadata.context_lens_tensor, gpu.metadata.block_tables
    parts = plan_parts(lens, None, None, programs=4, max_context=8192, num_decodes=4, num_parts=num_parts)
    paged_decode(gpu.query, gpu.kv_cache, tables, lens, output, scoring_of(gpu.spec), parts=parts)
    assert (output.double().cpu() - expected).abs().max() < TOLERANCE[torch.bfloat16]


def captured_providers(spec: AttentionSpec) -> list[str]:
    able = [name for name in providers(spec) if name != "torch"]
    for name in able:
        assert PROVIDERS[name].create(spec._replace(device=GPU)).supports_graphs
    return able


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "fp8_e4m3", "scales": (0.05, 0.5)}, {"window": 100}], ids=str)
@pytest.mark.parametrize("block_size", [16, 256])
def test_a_captured_step_with_prompts_gives_what_an_eager_one_gives(block_size, options):
    """Captured for 512 tokens of 12 rows, replayed with others, whose lengths the device alone knows."""
    num_tokens, num_rows, num_blocks = 512, 12, 1000
    spec = model_spec(2, 4, 128, torch.bfloat16, block_size=block_size, **options)
    on_gpu = spec._replace(device=GPU)
    width = -(-2048 // block_size)
    fixed = AttentionMetadata(
        (num_tokens,) * num_rows, (2048,) * num_rows,
        *(torch.zeros(num_rows + 1, dtype=torch.int32, device=GPU) for _ in range(2)),
        torch.zeros(num_rows, dtype=torch.int32, device=GPU), torch.full((num_tokens,), -1, device=GPU),
        torch.zeros((num_rows, width), dtype=torch.int32, device=GPU), are_bounds=True,
    )  # fmt: skip
    query = torch.randn(num_tokens, 8, 128, device=GPU).bfloat16()
    key, value = torch.randn(2, num_tokens, 2, 128, device=GPU).bfloat16()
    cache = torch.zeros((2, num_blocks, block_size, 2, 128), device=GPU).to(spec.cache_dtype)
    for name in captured_providers(spec):
        made = PROVIDERS[name].create(on_gpu)
        made.prepare(fixed)(query, key, value, cache)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            output = made.prepare(fixed)(query, key, value, cache)
        for seed, rows in enumerate([ROWS, [(0, 512)], [(1500, 1)] * 8 + [(90, 300)], [(0, 2)] * 12]):
            batch = Batch(spec, rows, seed, released=0)
            expected, moved = batch.expected(), batch.to(GPU)
            eager = run(name, moved)
            num, known = len(batch.query), moved.metadata
            cache.view(torch.uint8).zero_()
            cache[:, : moved.kv_cache.shape[1]].view(torch.uint8).copy_(moved.kv_cache.view(torch.uint8))
            for own, new in ((query, moved.query), (key, moved.key), (value, moved.value)):
                own[:num] = new
            for own, new in (
                (fixed.query_starts, known.query_starts), (fixed.context_starts, known.context_starts),
                (fixed.context_lens_tensor, known.context_lens_tensor), (fixed.slot_mapping, known.slot_mapping),
            ):  # fmt: skip
                own.fill_(num if own is fixed.query_starts else -1 if own is fixed.slot_mapping else 0)
                own[: len(new)] = new
            fixed.block_tables.zero_()
            fixed.block_tables[: len(rows), : known.block_tables.shape[1]] = known.block_tables
            graph.replay()
            limit = TOLERANCE[torch.bfloat16] * max(1.0, float(expected.abs().max()))
            for other in (expected, eager.double().cpu()):
                error = (output[:num].double().cpu() - other).abs().max().item()
                assert error <= limit, f"{name} is {error} off"


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("block_size", [16, 256])
def test_a_captured_step_follows_what_its_tensors_say(block_size, kv_dtype):
    """Captured for the longest context there may be, replayed with others, padding rows among them."""
    from dataclasses import replace

    size, longest = 6, 2048
    spec = model_spec(2, 4, 128, torch.bfloat16, block_size=block_size, kv_dtype=kv_dtype, scales=(0.05, 0.5))
    first = Batch(spec, [(longest - 1, 1)] * size, 1).to(GPU)
    fixed = replace(first.metadata, context_lens=(longest,) * size)
    for name in captured_providers(spec):
        made = PROVIDERS[name].create(first.spec)
        made.prepare(fixed)(first.query, first.key, first.value, first.kv_cache)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            output = made.prepare(fixed)(first.query, first.key, first.value, first.kv_cache)
        for seed, lengths in ((2, [1, 300, 17, 2047]), (3, [2000]), (4, [5, 5, 5, 900, 31, 64])):
            batch = Batch(spec, [(length, 1) for length in lengths], seed)
            expected, on_gpu, num = batch.expected(), batch.to(GPU), len(lengths)
            first.kv_cache.view(torch.uint8).zero_()
            first.kv_cache[:, : on_gpu.kv_cache.shape[1]].view(torch.uint8).copy_(on_gpu.kv_cache.view(torch.uint8))
            for own, new in ((first.query, on_gpu.query), (first.key, on_gpu.key), (first.value, on_gpu.value)):
                own[:num] = new
            fixed.context_lens_tensor.zero_()
            fixed.context_lens_tensor[:num] = on_gpu.metadata.context_lens_tensor
            fixed.slot_mapping.fill_(-1)
            fixed.slot_mapping[:num] = on_gpu.metadata.slot_mapping
            fixed.block_tables.zero_()
            fixed.block_tables[:num, : on_gpu.metadata.block_tables.shape[1]] = on_gpu.metadata.block_tables
            graph.replay()
            error = (output[:num].double().cpu() - expected).abs().max().item()
            assert error <= TOLERANCE[torch.bfloat16], f"{name} is {error} off"
            assert output[num:].isfinite().all()


@pytest.mark.parametrize("name", ["flash_attn_varlen_func", "flash_attn_with_kvcache"])
def test_the_stand_in_for_flash_attn_has_its_parameters(name):
    flash_attn = pytest.importorskip("flash_attn")
    real, ours = (list(inspect.signature(getattr(module, name)).parameters) for module in (flash_attn, FakeFlash()))
    assert ours == real[: len(ours)]


def test_the_stand_in_for_flash_attn_3_has_its_parameters():
    real = pytest.importorskip("flash_attn_interface")
    theirs = inspect.signature(real.flash_attn_with_kvcache).parameters
    assert set(theirs) >= set(inspect.signature(FakeFlash3().flash_attn_with_kvcache).parameters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_block_copies(dtype):
    from real.kernels.block_copy import move_blocks

    rng = np.random.default_rng()
    shape = (4, 2, 200, 16, 8, 128)
    cache = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, device=GPU).view(dtype)
    blocks = rng.permutation(200)
    sources, destinations = blocks[:60], blocks[60:120]
    raw = cache.view(torch.uint8)
    expected = raw.clone()
    expected[:, :, destinations] = expected[:, :, sources]
    planes = cache.flatten(0, 1)
    move_blocks(planes, planes, torch.from_numpy(np.stack([sources, destinations], axis=1)).to(GPU))
    assert torch.equal(raw, expected)


def test_blocks_move_to_pinned_memory_of_the_host_and_back():
    from real.kernels.block_copy import move_blocks

    rng = np.random.default_rng()
    gpu = torch.randn((2, 200, 16, 8, 128), device=GPU).to(torch.bfloat16)
    cpu = torch.zeros((2, 90, 16, 8, 128), dtype=torch.bfloat16, pin_memory=True)
    expected, blocks, places = gpu.cpu(), rng.permutation(200)[:60], rng.permutation(90)[:60]
    move_blocks(cpu, gpu, torch.from_numpy(np.stack([blocks, places], axis=1)).to(GPU), 64)
    torch.cuda.synchronize()
    assert torch.equal(cpu[:, places], expected[:, blocks])
    gpu.zero_()
    move_blocks(gpu, cpu, torch.from_numpy(np.stack([places, blocks], axis=1)).to(GPU), 64)
    assert torch.equal(gpu.cpu()[:, blocks], expected[:, blocks])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_what_is_stored_is_what_torch_stores(kv_dtype, dtype):
    from real.attention.interface import as_bytes
    from real.attention.interface import store_kv as by_torch
    from real.kernels.store import store_kv

    spec = make_spec(8, 1, 128, 16, dtype, GPU, kv_dtype=kv_dtype)
    projected = torch.randn(500, 3 * 8 * 128, device=GPU) * torch.logspace(-6, 5, 500, device=GPU)[:, None]
    _, key, value = (part.unflatten(-1, (8, 128)) for part in projected.clamp(-6e4, 6e4).to(dtype).chunk(3, dim=-1))
    slots = torch.randperm(640, device=GPU)[:500]
    ours, theirs = (torch.zeros((2, 40, 16, 8, 128), device=GPU).to(spec.cache_dtype) for _ in range(2))
    store_kv(key, value, ours, slots, 0.3, 1.7)
    by_torch(key, value, theirs, slots, 0.3, 1.7)
    assert torch.equal(as_bytes(ours), as_bytes(theirs))
