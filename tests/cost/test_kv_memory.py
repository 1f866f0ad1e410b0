"""How many KV blocks fit: one formula and one setting, for the cache and for the prices, on any number of ranks."""

import json
from typing import cast

import pytest

from experiments.configuration.compose import compose_config
from experiments.wiring import build, costs
from experiments.wiring.build_engine import build_real_backend
from experiments.wiring.unused import unused_settings
from sim.cost.base import CostModel, Itemised
from sim.cost.roofline import RooflineCost
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.errors import ConfigError
from testbed.specs.memory import num_kv_blocks
from testbed.specs.model import ModelSpec

LLAMA = ["model=llama3.1_8b", "device=h100"]
MEMORY = 85029158912  # of an H100: what CUDA reports
TOKEN = 2 * 32 * 8 * 128 * 2  # K and V, layers, KV heads, head size, bfloat16
LAYER = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336
EMBEDDINGS = 2 * 128256 * 4096
ACTIVATIONS = 2 * 2048 * (4 * 4096 + 3 * 14336) + 4 * 256 * 128256
GRAPHS = 2 * 2048 * (5 * 4096 + 3 * 14336)  # captured steps of up to 2048 tokens
INNER_ROWS = 2 * (2048 + 2048) * 3 * 14336  # of both: what the ranks share out


def blocks(*overrides: str) -> build.Pools:
    return build.simulated_pools(compose_config([*LLAMA, *overrides]))


def price(*overrides: str) -> CostModel:
    return costs.build_cost(compose_config([*LLAMA, *overrides]))


def test_the_blocks_are_what_weights_activations_and_captured_steps_leave():
    usable = int(MEMORY * 0.9) - 2 * (32 * LAYER + EMBEDDINGS) - ACTIVATIONS - GRAPHS
    assert blocks() == build.Pools(usable // (16 * TOKEN), 4 * 2**30 // (16 * TOKEN))


def test_an_fp8_cache_has_twice_the_blocks_and_moves_half_the_bytes():
    full, half = blocks(), blocks("cache.kv_dtype=fp8")
    assert 2 * full.num_gpu_blocks <= half.num_gpu_blocks <= 2 * full.num_gpu_blocks + 1
    assert half.num_cpu_blocks == 2 * full.num_cpu_blocks
    swaps, copies, decode = (
        BatchShape(0, 0, (), 0, 1000),
        BatchShape(0, 0, (), 0, 0, 0, 1000),
        BatchShape(256, 256 * 8000, (), 256),
    )
    two, one = price(), price("cache.kv_dtype=fp8")
    assert isinstance(two, RooflineCost)
    assert isinstance(one, RooflineCost)
    latency_ns = 10_000
    assert two.price(swaps).swap_ns - latency_ns == pytest.approx(2 * (one.price(swaps).swap_ns - latency_ns), rel=1e-6)
    assert two.price(copies).swap_ns == pytest.approx(2 * one.price(copies).swap_ns, rel=1e-6)
    reads = [cost.breakdown(decode)["attention_decode"] for cost in (two, one)]
    assert reads[0] == pytest.approx(2 * reads[1], rel=0.01)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def test_a_checkpoint_of_fp8_weights_has_the_price_and_the_blocks_of_a_byte_a_weight(tmp_path):
    """By its config.json alone: its dtype is that of what was not quantised."""
    for name, change in (("wide", {}), ("narrow", {"quantization_config": FP8})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA_CONFIG | change))
    wide, narrow = (f"model.path={tmp_path / name}" for name in ("wide", "narrow"))
    assert compose_config([narrow]).model.dtype == "fp8"
    usable = int(MEMORY * 0.9) - (32 * LAYER + 2 * EMBEDDINGS) - ACTIVATIONS - GRAPHS
    assert blocks(narrow).num_gpu_blocks == usable // (16 * TOKEN) > blocks(wide).num_gpu_blocks
    step, costs_of = BatchShape(1, 100, (), 1), [price(wide), price(narrow, "cost.fp8_gemms=w8a16")]
    two, one = (cost.breakdown(step) for cost in costs_of if isinstance(cost, RooflineCost))
    floor = 32 * 1_000  # of a product, at least
    for product in ("qkv", "o", "gate_up", "down"):
        assert floor < one[product] < 0.75 * two[product]
    assert one["lm_head"] == two["lm_head"]
    assert one["attention_decode"] == two["attention_decode"]


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_ranks_beyond_the_kv_heads_keep_copies(size):
    """Eight KV heads: sixteen ranks have one each, twice over, and K, V and their weights are not spared any more."""
    kv_heads = max(1, 8 // size)
    layer = 4096 * (2 * 4096 // size + 2 * kv_heads * 128) + 3 * 4096 * 14336 // size
    temporaries = ACTIVATIONS + GRAPHS - INNER_ROWS + INNER_ROWS // size
    usable = int(MEMORY * 0.9) - 2 * (32 * layer + EMBEDDINGS // size) - temporaries
    block = 16 * 2 * 32 * kv_heads * 128 * 2
    found = blocks(f"device.tensor_parallel_size={size}")
    assert found == build.Pools(usable // block, 4 * 2**30 // block)
    moves = BatchShape(0, 0, (), 0, 0, 1)
    cost = price(f"device.tensor_parallel_size={size}", "device.interconnect_max_ranks=null")
    assert cost.price(moves).swap_ns == round(block / 55e9 * 1e9) + 10_000


def test_fp8_weights_leave_room_and_keep_two_byte_activations():
    spec = ModelSpec("m", dtype="fp8", tie_word_embeddings=False)
    layers = spec.num_hidden_layers * (spec.num_attention_parameters + spec.num_mlp_parameters)
    assert spec.weight_bytes() == layers + 2 * 2 * spec.vocab_size * spec.hidden_size
    assert spec.kv_bytes_per_token() == ModelSpec("m").kv_bytes_per_token()
    assert blocks("model.dtype=fp8").num_gpu_blocks > blocks().num_gpu_blocks


@pytest.mark.parametrize(
    ("settings", "largest"),
    [
        (["cost.cuda_graphs=false"], 0),
        (["cost.max_captured_tokens=0"], 256),
        (["cost.max_captured_tokens=0", "cost.max_captured_size=64"], 64),
        (["cost.max_captured_tokens=0", "scheduler.max_num_seqs=16"], 16),
        (["cost.max_captured_tokens=1000"], 1000),
        (["cost.max_captured_tokens=100"], 256),  # decodes alone are the larger ones
        (["cost.max_captured_tokens=4096"], 2048),  # the budget
        (["cost=linear"], 2048),
    ],
)
def test_captured_steps_are_those_that_an_engine_would_have(settings, largest):
    activations = ACTIVATIONS - 4 * (256 - 16) * 128256 if largest == 16 else ACTIVATIONS
    usable = int(MEMORY * 0.9) - 2 * (32 * LAYER + EMBEDDINGS) - activations - GRAPHS // 2048 * largest
    assert blocks(*settings).num_gpu_blocks == usable // (16 * TOKEN)


def test_what_is_given_is_taken():
    assert blocks("cache.num_gpu_blocks=77", "cache.num_cpu_blocks=5") == build.Pools(77, 5)


def test_ranks_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(ConfigError, match="tensor_parallel_size is 5; it must divide the 32 attention heads"):
        blocks("device.tensor_parallel_size=5")
    odd = ["model.num_attention_heads=24", "model.num_key_value_heads=4", "device.tensor_parallel_size=6"]
    with pytest.raises(
        ConfigError, match=r"is 6; it must divide the 4 KV heads of model llama3.1.8b, or be a multiple"
    ):
        blocks(*odd)


def test_an_unknown_kv_type_is_refused():
    with pytest.raises(ConfigError, match=r"cache\.kv_dtype is 'int4'; choose one of float32, bfloat16, float16, fp8,"):
        compose_config(["cache.kv_dtype=int4"])


def test_the_real_engine_says_of_which_types_its_kv_can_be():
    pytest.importorskip("torch")
    config = compose_config(["backend=real", "model=tiny", "cache.kv_dtype=float16"])
    with pytest.raises(
        ConfigError, match=r"cache\.kv_dtype is 'float16', and the real engine computes in float32; .*fp8_e4m3"
    ):
        build_real_backend(config)


def test_a_models_own_window_holds_unless_the_cache_says_otherwise():
    own = ["model.sliding_window=4096"]
    assert compose_config([]).sliding_window is None
    assert compose_config(own).sliding_window == 4096
    assert compose_config([*own, "cache.sliding_window=128"]).sliding_window == 128
    assert compose_config(["model.sliding_window=null", "cache.sliding_window=128"]).sliding_window == 128


def test_not_one_block_is_one_clear_line():
    with pytest.raises(Exception, match="no room for one KV block of 10 bytes: 100 bytes x"):
        num_kv_blocks(memory_bytes=100, utilization=0.9, weight_bytes=85, activation_bytes=0, block_bytes=10)


def attention_of_a_prompt(cost: str, *overrides: str) -> int:
    model = price(f"cost={cost}", *overrides)
    parts = cast(Itemised, model).breakdown(BatchShape(0, 0, (PrefillChunk(0, 8192),), 1))
    return parts["prefill_attention" if cost == "linear" else "attention_prefill"]


def test_every_model_that_counts_pairs_is_told_the_window():
    """A prompt far longer than the window: its attention grows with its length, not with the square of it."""
    window = "cache.sliding_window=64"
    for cost in ("roofline", "linear"):
        assert attention_of_a_prompt(cost, window) < attention_of_a_prompt(cost) / 5
    assert attention_of_a_prompt("linear", window) == pytest.approx(64 * 65 // 2 + (8192 - 64) * 64, abs=1)  # 1 ns each


def test_on_a_cpu_the_simulator_has_the_blocks_of_the_engine_s_default_budget():
    """Weights and memory play no part: 256 MiB, as the engine takes; a run of it is simulated with what it had."""
    config = compose_config(["model=tiny", "device=cpu", "cache.gpu_memory_utilization=0.5"])
    assert build.simulated_pools(config).num_gpu_blocks == 256 * 2**20 // costs.block_bytes(config)
    assert "cache.gpu_memory_utilization has no effect on a CPU; set cache.num_gpu_blocks" in unused_settings(config)


def test_memory_from_which_no_pool_is_made_is_noted() -> None:
    """Arms that differ in it are the same."""
    memory = ["cache.gpu_memory_utilization=0.5", "cache.swap_space_gib=8"]
    counts = ["cache.num_gpu_blocks=50", "cache.num_cpu_blocks=50"]
    assert unused_settings(compose_config([*memory, *counts])) == [
        "cache.swap_space_gib has no effect with cache.num_cpu_blocks",
        "cache.gpu_memory_utilization has no effect with cache.num_gpu_blocks",
    ]
    assert unused_settings(compose_config(memory)) == unused_settings(compose_config(counts)) == []


@pytest.mark.parametrize(
    ("model", "num_ranks", "max_num_batched_tokens", "num_gpu_blocks"),
    [("llama2_7b", 1, 2048, 7463), ("llama3.1_70b", 4, 8192, 30425), ("llama3.1_70b", 4, 2048, 30425),
     ("mistral_nemo_12b", 2, 1024, 48009), ("mistral_nemo_12b", 1, 2048, 19251), ("qwen2.5_7b", 1, 2048, 65368),
     ("qwen2.5_7b", 1, 1024, 65368), ("yi_34b", 2, 2048, 20793)],
)  # fmt: skip
def test_the_pool_of_an_h100_is_that_of_vllm(model, num_ranks, max_num_batched_tokens, num_gpu_blocks):
    """Nine public runs of vLLM 0.15.1, two of which are of the same settings, with max_num_seqs=128."""
    chosen = (f"model={model}", "device=h100", f"device.tensor_parallel_size={num_ranks}", "scheduler=vllm_v1_async")
    limits = ("scheduler.max_num_seqs=128", f"scheduler.max_num_batched_tokens={max_num_batched_tokens}")
    found = build.simulated_pools(compose_config([*chosen, *limits])).num_gpu_blocks
    assert found == pytest.approx(num_gpu_blocks, rel=0 if model == "llama2_7b" else 0.025)


def test_a_pool_that_no_such_gpu_could_hold_is_noted() -> None:
    own = build.simulated_pools(compose_config(["model=llama3.1_8b"])).num_gpu_blocks
    assert build.pool_notes(compose_config(["model=llama3.1_8b", f"cache.num_gpu_blocks={own}"])) == []
    asked = ["model=llama3.1_8b", "cache.num_gpu_blocks=1000000"]
    (note,) = build.pool_notes(compose_config(asked))
    assert note == "cache.num_gpu_blocks=1000000 and the weights take 1,969 GiB: more than h100 has (79 GiB)"
    assert build.pool_notes(compose_config([*asked, "device=cpu"])) == []
    (close,) = build.pool_notes(compose_config(["model=llama3.1_8b", "cache.num_gpu_blocks=32900"]))  # 79.2 GiB
    assert close.endswith("and the weights take 80 GiB: more than h100 has (79 GiB)")
