"""8-bit weights on a device with FP8 arithmetic: activations are quantised before each GEMM of a layer."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from sim.cost.config import RooflineConfig
from sim.cost.measured import measure
from sim.cost.roofline import RooflineCost
from sim.cost.tables import MEASURED, ROOFLINE, TablesCost
from testbed.core.plan import BatchShape
from testbed.errors import ConfigError
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec
from testbed.specs.operator_tables import OperatorTables
from tests.cost.shapes import prefill
from tests.cost.test_experts import MODEL as EXPERTS
from tests.cost.test_roofline_sums import ARITHMETIC, BARE, EXACT, FP8, MEMORY
from tests.cost.test_tables_cost import table

W8A16 = replace(BARE, fp8_gemms="w8a16")
LAYERS, HIDDEN, INNER, Q, KV = 3, 48, 80, 8 * 16, 2 * 16
SIZES = {"qkv": (HIDDEN, Q + 2 * KV), "o": (Q, HIDDEN), "gate_up": (HIDDEN, 2 * INNER), "down": (INNER, HIDDEN)}


def parts(device: DeviceSpec, shape: BatchShape, model: ModelSpec = FP8, config: RooflineConfig = BARE):
    return RooflineCost(model, device, config).breakdown(shape)


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_arithmetic_is_at_twice_the_rate_times_the_efficiency_in_layers_only(num_tokens):
    shape = prefill(num_tokens)
    full = parts(replace(ARITHMETIC, fp8_efficiency=1.0), shape)
    half = parts(replace(ARITHMETIC, fp8_efficiency=0.5), shape)
    for name, (num_in, num_out) in SIZES.items():
        assert full[name] == pytest.approx(LAYERS * num_tokens * num_in * num_out, abs=1)  # two operations in 1 ns
        assert half[name] == pytest.approx(2 * full[name], abs=1)
    for name in ("lm_head", "attention_prefill"):
        assert full[name] == half[name] == parts(ARITHMETIC, shape)[name] > 0


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_inputs_are_read_twice_and_written_once_then_read_at_a_byte_each(num_tokens):
    found = parts(replace(MEMORY, fp8_efficiency=1.0), prefill(num_tokens))
    for name, (num_in, num_out) in SIZES.items():
        quantising = num_tokens * num_in * (2 + 2 + 1)
        product = num_in * num_out + num_tokens * num_in + 2 * num_tokens * num_out
        assert found[name] == pytest.approx(LAYERS * (quantising + product), abs=1), name


def test_each_gemm_of_a_layer_waits_for_one_more_kernel():
    device = DeviceSpec(
        "x", flops_per_s=1e30, memory_bytes_per_s=1e30, gemm_floor_ns=7000, kernel_floor_ns=300, fp8_efficiency=1.0,
        **EXACT,
    )  # fmt: skip
    found = parts(device, prefill(5))
    assert {name: found[name] for name in SIZES} == dict.fromkeys(SIZES, LAYERS * 7300)
    assert found["lm_head"] == 7000
    eager = RooflineConfig(cuda_graphs=False, kernel_launch_ns=10**6)
    launches = [parts(replace(device, fp8_efficiency=share), prefill(5), config=eager) for share in (0.0, 1.0)]
    idle, idle_fp8 = (sum(of.values()) for of in launches)
    assert idle_fp8 - idle == 4 * LAYERS * 10**6


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_experts_multiply_in_fp8_too_and_the_router_does_not(num_tokens):
    model, shape = replace(EXPERTS, dtype="fp8"), prefill(num_tokens)
    at_16_bits, found = (parts(replace(ARITHMETIC, fp8_efficiency=share), shape, model) for share in (0.0, 1.0))
    for name in ("experts_gate_up", "experts_down"):
        assert found[name] == pytest.approx(at_16_bits[name] / 2, abs=1)
    assert found["router"] == at_16_bits["router"]
    moved, moved_fp8 = (parts(replace(MEMORY, fp8_efficiency=share), shape, model) for share in (0.0, 1.0))
    inner = EXPERTS.moe_intermediate_size or 0
    for name, num_inputs in (("experts_gate_up", EXPERTS.hidden_size), ("experts_down", 4 * inner)):
        more = (5 - 1) * num_tokens * num_inputs  # converted, less the byte that the GEMM does not read
        assert moved_fp8[name] - moved[name] == pytest.approx(3 * more, abs=1)


def test_the_parts_add_up_to_the_price():
    device = DeviceSpec("d", gemm_tile_rows=64, gemm_floor_ns=900, kernel_floor_ns=70, fp8_efficiency=0.6)
    for model in (FP8, replace(EXPERTS, dtype="fp8")):
        for shape in (prefill(17), BatchShape(5, 400, (), 5)):
            cost = RooflineCost(model, device)
            assert sum(cost.breakdown(shape).values()) == cost.price(shape).total_ns


def test_without_it_weights_are_multiplied_at_16_bits():
    shape = prefill(100)
    has = replace(ARITHMETIC, fp8_efficiency=0.7)
    assert parts(has, shape, config=W8A16) == parts(ARITHMETIC, shape)
    assert parts(has, shape, replace(FP8, dtype="bfloat16")) == parts(ARITHMETIC, shape, replace(FP8, dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"cost\.fp8_gemms is w8a8, and device flops has no FP8 arithmetic"):
        parts(ARITHMETIC, shape, config=replace(BARE, fp8_gemms="w8a8"))
    with pytest.raises(ConfigError, match=r"cost\.fp8_gemms is 'fp8'; choose one of w8a8, w8a16"):
        RooflineConfig(fp8_gemms="fp8")


def test_tables_of_fp8_gemms_are_not_used_for_weights_that_are_multiplied_at_16_bits():
    model = ModelSpec(
        "m", architecture="LlamaForCausalLM", num_hidden_layers=3, hidden_size=1024, intermediate_size=2048,
        num_attention_heads=8, num_key_value_heads=2, head_dim=128, vocab_size=4096, dtype="fp8",
    )  # fmt: skip
    device = DeviceSpec("d", fp8_efficiency=0.6)
    points = [(m, n, 1024) for n in (1536, 4096) for m in (1, 512)]
    columns = {name: [point[i] for point in points] for i, name in enumerate("mnk")}
    rows = pa.concat_tables(
        [table("gemm", columns, [5e5] * 4, kernel="k", dtype=dtype) for dtype in ("fp8", "bfloat16")]
    )
    found = measure(OperatorTables("d", "ours", rows), model, 1, None, None, lambda of, size: RooflineCost(of, device))
    for config, origin, costs in ((None, MEASURED, 15e5), (RooflineConfig(fp8_gemms="w8a16"), ROOFLINE, None)):
        cost = TablesCost(model, device, config, measured=found)
        shape = prefill(512)
        assert cost.origins(shape)["qkv"] == origin
        assert cost.origins(shape)["lm_head"] == MEASURED
        plain = RooflineCost(model, device, config).breakdown(shape)["qkv"]
        assert cost.breakdown(shape)["qkv"] == (costs or plain)
