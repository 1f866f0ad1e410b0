"""The roofline's work counted again, independently: token by token and row by row, from what a transformer computes."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost.base import pairs_doubled
from sim.cost.config import RooflineConfig
from sim.cost.roofline import KVLayout, RooflineCost
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec

EXACT = {"step_overhead_ns": 0, "compute_efficiency": 1.0, "memory_efficiency": 1.0, "attention_efficiency": 1.0,
         "interconnect": "nvlink", "interconnect_bytes_per_s": 450e9, "interconnect_latency_ns": 0}  # fmt: skip
ARITHMETIC = DeviceSpec("flops", flops_per_s=1e9, memory_bytes_per_s=1e30, **EXACT)  # 1 ns a FLOP, memory is free
MEMORY = DeviceSpec("bytes", flops_per_s=1e30, memory_bytes_per_s=1e9, **EXACT)  # 1 ns a byte, arithmetic is free
FREE = DeviceSpec("x", flops_per_s=1e30, memory_bytes_per_s=1e30, **EXACT)  # but for talking
BARE = RooflineConfig(cuda_graphs=False, kernel_launch_ns=0)

QWEN = ModelSpec("q", hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=8,
                 num_key_value_heads=2, head_dim=16, vocab_size=1000)  # fmt: skip
OPT = ModelSpec("o", architecture="OPTForCausalLM", hidden_size=64, intermediate_size=256, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=4, head_dim=16, vocab_size=500)  # fmt: skip
FP8 = ModelSpec("f", hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=8,
                num_key_value_heads=2, head_dim=16, vocab_size=1000, dtype="fp8")  # fmt: skip

FLOAT32 = replace(QWEN, dtype="float32")
LLAMA = replace(QWEN, architecture="LlamaForCausalLM")


def rows_of(seed: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Prefill chunks (start, length) and decode contexts."""
    draw = random.Random(seed)
    chunks = [(draw.choice((0, draw.randrange(400))), draw.randrange(1, 60)) for _ in range(draw.randrange(4))]
    return chunks, [draw.randrange(1, 500) for _ in range(draw.randrange(1, 30))]


def planned(chunks: list[tuple[int, int]], contexts: list[int], window: int | None) -> BatchShape:
    """As testbed.core.planning: contexts and starts are cut to what the window reaches back to."""
    cut = [min(context, window or context) for context in contexts]
    prefills = tuple(PrefillChunk(min(start, (window or start + 1) - 1), length) for start, length in chunks)
    return BatchShape(len(cut), sum(cut), prefills, len(contexts))


def attended(chunks: list[tuple[int, int]], contexts: list[int], window: int | None) -> tuple[list[set[int]], ...]:
    """Positions that each query looks at: of prefill tokens, of decode tokens."""

    def seen(position: int) -> set[int]:
        return set(range(max(0, position + 1 - (window or position + 1)), position + 1))

    return (
        [seen(start + i) for start, length in chunks for i in range(length)],
        [seen(context - 1) for context in contexts],
    )


def flops(model: ModelSpec, num_tokens: int, num_pairs: int, num_samples: int, size: int) -> dict[str, float]:
    """Multiply-adds count twice; on one of `size` ranks."""
    total = {"qkv": 0.0, "o": 0.0, "gate_up": 0.0, "down": 0.0, "attention": 0.0, "lm_head": 0.0}
    heads = model.num_attention_heads // size
    kv_heads = max(1, model.num_key_value_heads // size)
    matrices = 1 if model.architecture == "OPTForCausalLM" else 2
    for _ in range(model.num_hidden_layers):
        for _ in range(num_tokens):
            total["qkv"] += 2.0 * model.hidden_size * (heads + 2 * kv_heads) * model.head_dim
            total["o"] += 2.0 * heads * model.head_dim * model.hidden_size
            total["gate_up"] += 2.0 * model.hidden_size * matrices * model.intermediate_size / size
            total["down"] += 2.0 * model.intermediate_size / size * model.hidden_size
        total["attention"] += num_pairs * heads * (2.0 * model.head_dim + 2.0 * model.head_dim)  # q k, then p v
    total["lm_head"] = num_samples * 2.0 * model.hidden_size * model.vocab_size / size
    return total


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize(("model", "size"), [(QWEN, 1), (QWEN, 2), (QWEN, 4), (OPT, 1), (OPT, 2)])
def test_flops_are_those_of_every_row(seed, window, model, size):
    chunks, contexts = rows_of(seed)
    of_prefills, of_decodes = attended(chunks, contexts, window)
    cost = RooflineCost(
        model, ARITHMETIC, BARE, tensor_parallel_size=size, kv_layout=KVLayout(16, None, window)
    ).breakdown(planned(chunks, contexts, window))
    num_tokens = len(contexts) + sum(length for _, length in chunks)
    num_pairs = sum(map(len, of_prefills)) + sum(map(len, of_decodes))
    expected = flops(model, num_tokens, num_pairs, len(contexts), size)
    found = {name: cost[name] for name in ("qkv", "o", "gate_up", "down", "lm_head")}
    found["attention"] = cost["attention_prefill"] + cost["attention_decode"]
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=len(chunks) + 1), name


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("kv_dtype", [None, "fp8", "float32"])
@pytest.mark.parametrize(("model", "size"), [(QWEN, 1), (QWEN, 4), (OPT, 2), (FP8, 1)])
def test_bytes_are_those_of_every_row(seed, window, kv_dtype, model, size):
    chunks, contexts = rows_of(seed)
    cost = RooflineCost(
        model, MEMORY, BARE, tensor_parallel_size=size, kv_layout=KVLayout(16, kv_dtype, window)
    ).breakdown(planned(chunks, contexts, window))
    width = {None: 2, "fp8": 1, "float32": 4}[kv_dtype]
    heads, kv_heads = model.num_attention_heads // size, max(1, model.num_key_value_heads // size)
    token_kv = 2 * kv_heads * model.head_dim * width
    decode = prefill = 0.0
    for _ in range(model.num_hidden_layers):
        for context in contexts:  # reads what it attends to, writes its own, reads q and writes o
            decode += token_kv * (min(context, window or context) + 1) + 2 * heads * model.head_dim * 2
        for start, length in chunks:  # its tokens share what they read
            _, (last,) = attended([], [start + length], None)
            first = max(0, start + 1 - (window or start + 1))
            prefill += (
                token_kv * (len([p for p in last if p >= first]) + length) + 2 * heads * model.head_dim * 2 * length
            )
    assert cost["attention_decode"] == pytest.approx(decode, abs=1)
    assert cost["attention_prefill"] == pytest.approx(prefill, abs=len(chunks) + 1)
    num_tokens, weight = len(contexts) + sum(length for _, length in chunks), 1 if model is FP8 else 2
    q, kv, h = heads * model.head_dim, kv_heads * model.head_dim, model.hidden_size
    qkv = sum(h * out * weight + num_tokens * 2 * out for out in (q, kv, kv)) + num_tokens * 2 * h
    assert cost["qkv"] == pytest.approx(model.num_hidden_layers * qkv, abs=1)
    assert cost["o"] == pytest.approx(model.num_hidden_layers * (q * h * weight + num_tokens * 2 * (q + h)), abs=1)


def elementwise_and_embedding(model: ModelSpec, num_tokens: int, size: int, width: int) -> tuple[int, int]:
    """Bytes of what is no product, on one of `size` ranks; width: bytes of an activation."""
    q, kv = (
        model.num_attention_heads // size * model.head_dim,
        max(1, model.num_key_value_heads // size) * model.head_dim,
    )
    inner, is_opt = model.intermediate_size // size, model.architecture == "OPTForCausalLM"
    elementwise = embedding = 0
    for _ in range(num_tokens):
        embedding += (1 + 1) * model.hidden_size * width  # reads its row of the table, writes it
        for _ in range(model.num_hidden_layers):
            for _ in range(2):  # norms: read the stream and what is added to it, write the stream and its norm
                elementwise += (2 + 2) * model.hidden_size * width
            elementwise += (1 + 1) * (kv + kv) * width  # the store of K and V: reads and writes them
            if not is_opt:
                elementwise += (1 + 1) * (q + kv) * width  # rotary: reads and writes q and k
            if model.architecture == "Qwen3ForCausalLM":
                elementwise += (1 + 1) * (q + kv) * width  # norm of each head of q and k
            elementwise += ((1 if is_opt else 2) + 1) * inner * width  # activation: reads up (and gate), writes one
    return elementwise, embedding


@pytest.mark.parametrize("num_tokens", [1, 7, 40, 333])
@pytest.mark.parametrize(
    ("model", "size", "width"), [(QWEN, 1, 2), (QWEN, 4, 2), (LLAMA, 2, 2), (OPT, 2, 2), (FP8, 1, 2), (FLOAT32, 2, 4)]
)
def test_bytes_of_what_is_no_product_are_those_of_every_token(num_tokens, model, size, width):
    cost = RooflineCost(model, MEMORY, BARE, tensor_parallel_size=size)
    elementwise, embedding = elementwise_and_embedding(model, num_tokens, size, width)
    as_prompt, as_decodes = BatchShape(0, 0, (PrefillChunk(0, num_tokens),), 1), BatchShape(num_tokens, 999, (), 1)
    for shape in (as_prompt, as_decodes):
        parts = cost.breakdown(shape)
        assert (parts["elementwise"], parts["embedding"]) == (elementwise, embedding)


def kernels_of(model: ModelSpec) -> list[str]:
    """One layer's, in order."""
    heads = {"Qwen3ForCausalLM": ["norm of q and k", "rotary"], "LlamaForCausalLM": ["rotary"], "OPTForCausalLM": []}
    attention = ["norm", "qkv", *heads[model.architecture], "store K and V", "attention", "o"]
    return [*attention, "norm", "gate and up", "activation", "down"]


@pytest.mark.parametrize(("model", "size"), [(QWEN, 1), (QWEN, 2), (LLAMA, 1), (OPT, 1), (OPT, 4)])
def test_an_eager_step_waits_for_the_launch_of_every_kernel(model, size):
    """Where the device computes in no time, a step lasts as long as the host takes to launch its kernels."""
    launches = ["embedding", *(["all-reduce"] if size > 1 else [])]
    for _ in range(model.num_hidden_layers):
        launches += kernels_of(model)
        launches += ["all-reduce"] * 2 if size > 1 else []  # after o, after the MLP
    launches += ["norm", "LM head", *(["gather"] if size > 1 else []), "sampler"]
    at_once = replace(FREE, interconnect_bytes_per_s=1e30)
    config = RooflineConfig(cuda_graphs=False, kernel_launch_ns=1000)
    cost = RooflineCost(model, at_once, config, tensor_parallel_size=size)
    for shape in (BatchShape(3, 30, (), 3), BatchShape(0, 0, (PrefillChunk(0, 9),), 1)):
        assert cost.breakdown(shape)["launch"] == 1000 * len(launches)
        assert cost.price(shape).forward_ns == 1000 * len(launches)


def test_a_captured_step_with_prompts_computes_the_tokens_that_pad_it_and_attends_from_its_own():
    """Three decodes and a chunk of 20: 23 tokens, 32 rows in the products, one logit for each sequence."""
    shape = BatchShape(3, 90, (PrefillChunk(8, 20),), 4)
    found = RooflineCost(QWEN, ARITHMETIC, RooflineConfig(graph_launch_ns=7)).breakdown(shape)
    sizes = {"qkv": (48, 128 + 2 * 32), "o": (128, 48), "gate_up": (48, 2 * 80), "down": (80, 48)}
    for name, (num_in, num_out) in sizes.items():
        assert found[name] == 3 * 2 * 32 * num_in * num_out
    assert found["lm_head"] == 2 * 4 * 48 * 1000
    assert found["launch"] == 7
    eager = RooflineCost(QWEN, ARITHMETIC, BARE).breakdown(shape)
    for name in ("attention_prefill", "attention_decode", "lm_head", "sampler"):
        assert found[name] == eager[name]
    moved = RooflineCost(QWEN, MEMORY, RooflineConfig()).breakdown(shape)
    assert moved["qkv"] == 3 * 2 * (48 * 192 + 32 * (48 + 192))
    assert moved["embedding"] == 2 * 32 * 2 * 48


@pytest.mark.parametrize("num_samples", [1, 5, 64])
@pytest.mark.parametrize("size", [2, 4])
def test_rank_0_tells_the_others_each_sampled_token(num_samples, size):
    """Links of 1 ns a byte, or of 1000 ns a hop: a token is 8 bytes; the faster of a binomial tree and of a ring."""
    depth = {2: 1, 4: 2}[size]
    free = replace(FREE, interconnect_bytes_per_s=1e9)
    far = replace(FREE, interconnect_bytes_per_s=1e30, interconnect_latency_ns=1000)
    num_bytes = sum(8 for _ in range(num_samples))
    expected = {
        ("gather", free): min(depth * num_bytes, 2 * (size - 1) * num_bytes / size),
        ("gather", far): depth * 1000,
        ("all_gather", free): 0,  # each rank has all logits, and samples
        ("all_gather", far): 0,
    }
    for (logits, device), value in expected.items():
        config = replace(BARE, logits=logits)
        cost = RooflineCost(QWEN, device, config, tensor_parallel_size=size)
        shape = BatchShape(num_samples, 10 * num_samples, (), num_samples)
        assert cost.breakdown(shape)["sampler"] == cost.price(shape).sample_ns == value, (logits, device)


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float16", 2), ("float32", 4), ("fp8", 2)])
def test_ranks_gather_logits_in_the_format_of_the_activations(dtype, width):
    """As the engine's LMHead does, and vLLM's: they become float32 afterwards. Links of 1 ns a byte."""
    near = replace(FREE, interconnect_bytes_per_s=1e9)
    model = replace(QWEN, dtype=dtype)
    for size, logits in itertools.product((2, 4), ("all_gather", "gather")):
        cost = RooflineCost(model, near, replace(BARE, logits=logits), tensor_parallel_size=size)
        whole = 7 * QWEN.vocab_size * width
        assert cost.breakdown(BatchShape(7, 70, (), 7))["gather"] == whole * (size - 1) // size


@given(st.integers(0, 300), st.integers(1, 300), st.one_of(st.none(), st.integers(1, 400)))
def test_pairs_are_counted_exactly(start, num_tokens, window):
    cut = start if window is None else min(start, window - 1)
    by_token = sum(min(start + i + 1, window or start + i + 1) for i in range(num_tokens))
    assert pairs_doubled(cut, num_tokens, window) == 2 * by_token


@pytest.mark.parametrize("flops_per_s", [1e9, 3e10, 1e11, 1e12, 1e15])
@pytest.mark.parametrize("seed", range(8))
def test_the_maximum_of_sums_is_near_the_sum_of_maxima(flops_per_s, seed):
    """Decode rows in one kernel or one by one: they differ by one K/V row and one Q/O row of each at most."""
    device = DeviceSpec("d", flops_per_s=flops_per_s, memory_bytes_per_s=1e11, **EXACT)
    cost = RooflineCost(QWEN, device, BARE)
    _, contexts = rows_of(seed)
    together = cost.breakdown(BatchShape(len(contexts), sum(contexts), (), 0))["attention_decode"]
    alone = [cost.breakdown(BatchShape(1, context, (), 0))["attention_decode"] for context in contexts]
    row = cost._kv_ns_per_token + cost._qo_ns_per_token
    assert together - 1 - len(contexts) <= sum(alone) <= together + len(contexts) * (row + 1) + 1


def test_attention_is_priced_by_exact_contexts_and_not_by_their_mean():
    """One long prompt beside many short ones: a mean context times their number would be far too little work."""
    chunks = [(0, 4096), *[(0, 16)] * 31]
    cost = RooflineCost(QWEN, ARITHMETIC, BARE)
    exact = cost.breakdown(BatchShape(0, 0, tuple(PrefillChunk(*chunk) for chunk in chunks), 0))["attention_prefill"]
    mean = sum(length for _, length in chunks) // 32
    by_mean = cost.breakdown(BatchShape(0, 0, (PrefillChunk(0, mean),) * 32, 0))["attention_prefill"]
    assert exact > 20 * by_mean
