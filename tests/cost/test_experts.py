"""What a mixture of experts costs, held against routers that are drawn at random, token by token."""

import random
from dataclasses import replace
from statistics import mean

import pytest

from sim.cost.config import RooflineConfig
from sim.cost.experts import computed_rows, power, touched_experts
from sim.cost.roofline import RooflineCost
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.specs.device import DeviceSpec
from testbed.specs.memory import activation_bytes
from testbed.specs.model import ModelSpec
from tests.cost.test_roofline_sums import ARITHMETIC, BARE, FREE, MEMORY, QWEN, kernels_of

MODEL = ModelSpec("m", architecture="Qwen3MoeForCausalLM", hidden_size=48, intermediate_size=999, num_hidden_layers=3,
                  num_attention_heads=8, num_key_value_heads=2, head_dim=16, vocab_size=1000, num_experts=16,
                  num_experts_per_tok=4, moe_intermediate_size=24)  # fmt: skip
DRAWS = 400


def routings(num_tokens: int, seed: int, num_experts: int = 16, per_token: int = 4) -> list[list[int]]:
    """By draw, the tokens of each expert."""
    rng, draws = random.Random(seed), []
    for _ in range(DRAWS):
        counts = [0] * num_experts
        for _ in range(num_tokens):
            for expert in rng.sample(range(num_experts), per_token):
                counts[expert] += 1
        draws.append(counts)
    return draws


def prompt(num_tokens: int) -> BatchShape:
    return BatchShape(0, 0, (PrefillChunk(0, num_tokens),), 1)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 20])
def test_as_many_experts_are_touched_as_random_routers_touch_on_average(num_tokens):
    drawn = mean(sum(count > 0 for count in counts) for counts in routings(num_tokens, num_tokens))
    assert touched_experts(16, 4, num_tokens) == pytest.approx(drawn, rel=0.02)


def test_one_token_touches_its_own_and_many_touch_all():
    assert touched_experts(128, 8, 1) == pytest.approx(8)
    assert touched_experts(128, 8, 4096) == pytest.approx(128)
    assert touched_experts(8, 8, 1) == 8
    assert touched_experts(128, 8, 0) == 0


def test_a_power_is_made_of_products():
    assert power(0.9375, 0) == 1
    assert power(0.5, 7) == 2**-7
    assert power(0.9375, 1000) == pytest.approx(0.9375**1000)


@pytest.mark.parametrize("most", [16, 64])
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 60, 250, 1000])
def test_tiles_waste_what_they_waste_of_random_routers(most, num_tokens):
    """The mean over routers, within a tenth: what the two cases of the formula leave out where they meet."""
    pairs, touched = 4 * num_tokens, touched_experts(16, 4, num_tokens)
    rows = computed_rows(touched, pairs, most)
    tile = next(size for size in (16, 32, 64) if size == most or size >= pairs / touched)
    draws = routings(num_tokens, num_tokens)[:100]
    drawn = mean(sum(-(-count // tile) * tile for count in counts) for counts in draws)
    assert rows == pytest.approx(drawn, rel=0.1)
    assert rows >= pairs


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_flops_are_those_of_every_pair_where_nothing_is_counted_in_tiles(num_tokens, size):
    parts = RooflineCost(MODEL, ARITHMETIC, BARE, tensor_parallel_size=size).breakdown(prompt(num_tokens))
    expected = {"router": 0, "experts_gate_up": 0, "experts_down": 0}
    for _ in range(MODEL.num_hidden_layers):
        for _ in range(num_tokens):
            expected["router"] += 2 * 48 * 16
            for _ in range(4):
                expected["experts_gate_up"] += 2 * 48 * 2 * 24 // size
                expected["experts_down"] += 2 * 24 // size * 48
    assert {name: parts[name] for name in expected} == expected
    assert "gate_up" not in parts
    assert "down" not in parts


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("fp8", 1)])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 3, 30])
def test_bytes_are_those_of_the_experts_that_random_routers_touch(num_tokens, size, dtype, width):
    model, inner = replace(MODEL, dtype=dtype), 24 // size
    parts = RooflineCost(model, MEMORY, BARE, tensor_parallel_size=size).breakdown(prompt(num_tokens))
    touched = [sum(count > 0 for count in counts) for counts in routings(num_tokens, num_tokens)]
    pairs = 4 * num_tokens
    gate_up = mean(num * 48 * 2 * inner * width + pairs * (48 + 2 * inner) * 2 for num in touched)
    down = mean(num * inner * 48 * width + pairs * (inner + 48) * 2 for num in touched)
    assert parts["experts_gate_up"] == pytest.approx(3 * gate_up, rel=0.03)
    assert parts["experts_down"] == pytest.approx(3 * down, rel=0.03)
    assert parts["router"] == 3 * (48 * 16 * 2 + num_tokens * (48 + 16) * 2)  # on every rank, at 2 bytes


def test_what_is_no_product_has_the_rows_of_every_expert_and_their_sum():
    parts = RooflineCost(MODEL, MEMORY, BARE).breakdown(prompt(10))
    norms, store = 2 * 4 * 48, 2 * (2 + 2) * 16
    of_heads = 2 * 2 * (8 + 2) * 16  # norm of q and k, rotary
    activation, total = 4 * 3 * 24, (4 + 1) * 48
    assert parts["elementwise"] == 3 * 10 * 2 * (norms + store + of_heads + activation + total)


@pytest.mark.parametrize("shape", [prompt(17), BatchShape(5, 400, (), 5), BatchShape(3, 90, (PrefillChunk(8, 9),), 4)])
def test_the_parts_add_up_to_the_price(shape):
    for config in (RooflineConfig(), BARE):
        cost = RooflineCost(MODEL, DeviceSpec("d", gemm_tile_rows=64, gemm_floor_ns=900), config)
        assert sum(cost.breakdown(shape).values()) == cost.price(shape).total_ns


@pytest.mark.parametrize(
    ("shape", "num_tokens", "num_padded"), [(BatchShape(5, 50, (), 5), 5, 8), (prompt(20), 20, 32)]
)
def test_rows_that_pad_a_graph_are_one_more_token_to_the_router(shape, num_tokens, num_padded):
    """They are alike: five decodes are padded to eight rows, and touch the experts of six tokens."""
    padded = RooflineCost(MODEL, MEMORY, RooflineConfig()).breakdown(shape)
    weights, rows = touched_experts(16, 4, num_tokens + 1) * 48 * 48 * 2, num_padded * 4 * (48 + 48) * 2
    assert padded["experts_gate_up"] == pytest.approx(3 * (weights + rows), abs=1)


def test_every_kernel_of_a_layer_with_experts_is_launched():
    at_once = replace(FREE, interconnect_bytes_per_s=1e30)
    config = RooflineConfig(cuda_graphs=False, kernel_launch_ns=1000)
    own = ("router", "choice", "sorting", "sum of a token's experts")
    num = 3 * (len(kernels_of(QWEN)) + len(own)) + len(("embedding", "norm", "LM head", "sampler"))
    assert RooflineCost(MODEL, at_once, config).breakdown(prompt(9))["launch"] == 1000 * num


def test_weights_and_activations_are_those_of_all_experts():
    attention, router, expert = 48 * 16 * (8 + 2 + 2) + 8 * 16 * 48, 48 * 16, 3 * 48 * 24
    layer, embedding = attention + router + 16 * expert, 1000 * 48
    assert MODEL.num_parameters == 3 * layer + embedding
    assert MODEL.weight_bytes() == 2 * MODEL.num_parameters
    assert MODEL.num_active_mlp_parameters == router + 4 * expert
    assert MODEL.weight_bytes(2) == 2 * (3 * (attention // 2 + router + 8 * expert) + embedding // 2)
    dense = replace(MODEL, num_experts=None, num_experts_per_tok=None, moe_intermediate_size=None, intermediate_size=96)
    assert activation_bytes(MODEL, 10, 0) - activation_bytes(dense, 10, 0) == 10 * 2 * 4 * 48


def test_a_model_without_experts_costs_what_it_did():
    assert not {"router", "experts_gate_up", "experts_down"} & RooflineCost(QWEN, MEMORY).breakdown(prompt(9)).keys()
