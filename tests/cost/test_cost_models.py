"""Cost models: integer prices, exact formulas, monotone where physics is, breakdowns that add up."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost.base import CostModel
from sim.cost.collectives import Collectives, collectives_of
from sim.cost.config import ConstantConfig, RooflineConfig
from sim.cost.constant import ConstantCost
from sim.cost.roofline import KVLayout, RooflineCost
from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.errors import ConfigError
from testbed.specs.device import DEVICE_FIELDS, DeviceSpec
from testbed.specs.model import ModelSpec
from testbed.specs.ranges import MAX_PART_NS, MAX_SIZE
from tests.cost.shapes import BARE, DEVICE, MODEL, NO_LAUNCH, TILED, decode, parts_of, prefill, shapes

WIDE = ModelSpec("wide", num_hidden_layers=2, hidden_size=4096, intermediate_size=16384)  # prefills bound by arithmetic


# --- constant ---


def test_every_step_costs_the_same():
    model: CostModel = ConstantCost(ConstantConfig(step_s=1))
    assert model.price(decode(4)) == Spans(forward_ns=10**9)
    assert model.price(prefill(100)).total_ns == 10**9
    assert ConstantCost(ConstantConfig(1e-9)).price(decode(1)).total_ns == 1


@pytest.mark.parametrize("step_s", [0, -1.0, 1e-10, float("nan"), float("inf")])
def test_impossible_steps_are_refused(step_s):
    with pytest.raises(ConfigError, match=r"cost\.step_s is .*; it must be from 1e-9"):
        ConstantConfig(step_s)


# --- roofline ---


@given(shapes, st.sampled_from([1, 2, 4, 16]), st.booleans())
def test_the_breakdown_adds_up_to_the_price(shape, size, on_cpu):
    device = replace(DEVICE, kind="cpu") if on_cpu else DEVICE
    cost = RooflineCost(MODEL, device, tensor_parallel_size=size)
    spans = cost.price(shape)
    assert all(type(part) is int and part >= 0 for part in spans)
    assert spans.total_ns == sum(cost.breakdown(shape).values()) >= 1
    assert cost.price(shape) == spans  # the memory of earlier prices changes nothing


def test_a_decode_reads_weights_and_context_once():
    cost = RooflineCost(MODEL, BARE, NO_LAUNCH)
    parts = cost.breakdown(decode(1, 500))
    bandwidth = BARE.memory_bytes_per_s
    q, kv, h, inner = 2048, 1024, 512, 1024
    qkv = 2 * (h * (q + 2 * kv) + h + q + 2 * kv) * 2
    assert parts["qkv"] == round(qkv / bandwidth * 1e9)
    assert parts["gate_up"] == round(2 * (2 * h * inner + h + 2 * inner) * 2 / bandwidth * 1e9)
    assert parts["down"] == round(2 * (h * inner + h + inner) * 2 / bandwidth * 1e9)
    assert parts["attention_decode"] == round((501 * MODEL.kv_bytes_per_token() + 2 * 2 * q * 2) / bandwidth * 1e9)
    assert parts["lm_head"] == round((h * 1000 + h + 1000) * 2 / bandwidth * 1e9)
    assert parts["launch"] == parts["all_reduce"] == parts["attention_prefill"] == 0


def test_a_long_prefill_is_bound_by_arithmetic():
    parts = parts_of(prefill(8192), WIDE)
    for name, num_matrices in (("gate_up", 2), ("down", 1)):
        assert parts[name] == round(2 * 2 * 8192 * num_matrices * 4096 * 16384 / BARE.flops_per_s * 1e9)
    pairs = 8192 * 8193 // 2
    assert parts["attention_prefill"] == round(2 * 4 * 2048 * pairs / BARE.flops_per_s * 1e9)


def test_chunks_are_priced_by_their_own_context():
    cost = RooflineCost(MODEL, BARE, NO_LAUNCH)
    both = cost.breakdown(BatchShape(0, 0, (PrefillChunk(0, 1024), PrefillChunk(30_000, 1024)), 0))
    one, two = (cost.breakdown(prefill(1024, start=start)) for start in (0, 30_000))
    assert two["attention_prefill"] < both["attention_prefill"] <= one["attention_prefill"] + two["attention_prefill"]
    assert two["attention_prefill"] > 20 * one["attention_prefill"]


def test_shared_heads_read_less():
    full = parts_of(decode(64, 4000), replace(MODEL, num_key_value_heads=16))
    shared = parts_of(decode(64, 4000))
    assert full["attention_decode"] == pytest.approx(2 * shared["attention_decode"], rel=0.01)


def test_a_smaller_kv_cache_reads_less():
    fp8 = parts_of(decode(64, 4000), kv_layout=KVLayout(kv_dtype="fp8"))
    full = parts_of(decode(64, 4000))
    assert full["attention_decode"] == pytest.approx(2 * fp8["attention_decode"], rel=0.01)


def test_a_graph_is_padded_to_a_captured_size():
    cost = RooflineCost(MODEL, DEVICE)
    rows = [cost.num_rows(decode(n)) for n in (1, 2, 3, 4, 5, 8, 9, 505, 512, 513)]
    assert rows == [1, 2, 4, 4, 8, 8, 16, 512, 512, 513]
    small = RooflineCost(MODEL, DEVICE, RooflineConfig(max_captured_size=6))
    assert [small.num_rows(decode(n)) for n in (3, 5, 6, 7)] == [4, 6, 6, 7]
    padded, exact = cost.breakdown(decode(9)), cost.breakdown(decode(16))
    assert padded["gate_up"] == exact["gate_up"]
    assert padded["attention_decode"] < exact["attention_decode"]


def test_a_graph_of_a_step_with_prompts_is_padded_by_its_tokens():
    cost, beside = RooflineCost(MODEL, DEVICE), RooflineCost(MODEL, DEVICE, RooflineConfig(max_captured_tokens=200))
    padded = {2: 16, 16: 16, 17: 32, 113: 128, 129: 192, 449: 512, 513: 640, 1921: 2048, 2048: 2048, 2049: 2049}
    for num_tokens, rows in padded.items():
        assert cost.num_rows(prefill(num_tokens)) == rows
        mixed = BatchShape(1, 50, (PrefillChunk(0, num_tokens - 1),), 2)
        # the engine asks whether each row has one token
        assert cost.num_rows(mixed) == (2 if num_tokens == 2 else rows)
        assert sum(cost.breakdown(mixed).values()) == cost.price(mixed).total_ns
    assert [beside.num_rows(prefill(n)) for n in (100, 193, 200, 201)] == [112, 200, 200, 201]
    assert [beside.num_rows(decode(n)) for n in (201, 512)] == [208, 512]  # decodes alone have bounds of their own


def test_graphs_spare_the_launches():
    graph, eager = RooflineCost(MODEL, DEVICE), RooflineCost(MODEL, DEVICE, RooflineConfig(cuda_graphs=False))
    assert graph.breakdown(decode(8))["launch"] == 20_000
    assert eager.breakdown(decode(8))["launch"] > 20_000
    assert graph.price(decode(600)) == eager.price(decode(600))  # above the captured sizes
    assert graph.breakdown(prefill(64))["launch"] == 20_000
    assert eager.breakdown(prefill(64))["launch"] > 20_000
    assert graph.price(prefill(2049)) == eager.price(prefill(2049))
    alone = RooflineCost(MODEL, DEVICE, RooflineConfig(max_captured_tokens=0))
    assert alone.price(prefill(64)) == eager.price(prefill(64))
    assert alone.price(decode(8)) == graph.price(decode(8))


def test_launches_hide_behind_long_kernels():
    big = ModelSpec("big", hidden_size=8192, intermediate_size=28672, num_hidden_layers=20)
    assert RooflineCost(big, DEVICE).breakdown(prefill(4096))["launch"] == 0


def test_float32_and_cpus():
    wide = parts_of(prefill(8192), replace(WIDE, dtype="float32"))
    half = parts_of(prefill(8192), WIDE)
    assert wide["down"] == pytest.approx(2 * half["down"], rel=1e-6)
    cpu = RooflineCost(replace(WIDE, dtype="float32"), replace(BARE, kind="cpu"))
    assert cpu.breakdown(prefill(8192))["down"] == pytest.approx(half["down"], rel=1e-6)
    assert cpu.breakdown(decode(3))["launch"] == 0


def test_swaps_are_priced_by_the_host_link_and_copies_by_memory():
    cost = RooflineCost(MODEL, BARE, kv_layout=KVLayout(block_size=32))
    block_bytes = 32 * 2 * 2 * 8 * 128 * 2
    only_moves = BatchShape(0, 0, (), 0, 3, 2)
    spans = cost.price(only_moves)
    swapped_ns = 5 * block_bytes / BARE.host_link_bytes_per_s * 1e9
    assert spans.swap_ns == round(swapped_ns) + 2 * BARE.host_link_latency_ns
    copied_ns = round(10 * 2 * block_bytes / BARE.memory_bytes_per_s * 1e9)
    for beside in (only_moves, BatchShape(2, 50, (PrefillChunk(0, 8),), 3, 3)):
        copying = cost.price(beside.replace(num_blocks_copied=10))
        before = cost.price(beside)
        assert copying == before.replace(swap_ns=before.swap_ns + copied_ns)
    for size, share in ((2, 2), (8, 8), (16, 8)):  # eight KV heads: sixteen ranks have one each, twice
        ranks = RooflineCost(MODEL, BARE, kv_layout=KVLayout(block_size=32), tensor_parallel_size=size)
        assert ranks.price(only_moves).swap_ns == round(swapped_ns / share) + 20_000
    half = RooflineCost(MODEL, BARE, kv_layout=KVLayout(32, "fp8_e4m3")).price(only_moves)
    assert half.swap_ns == round(swapped_ns / 2) + 20_000
    assert RooflineCost(MODEL, BARE).price(BatchShape(0, 0, (), 0)) == Spans(prepare_ns=1)


def test_ranks_share_the_work_and_pay_for_talking():
    one, four = (parts_of(prefill(8192), WIDE, tensor_parallel_size=n) for n in (1, 4))
    assert four["down"] == pytest.approx(one["down"] / 4, rel=1e-6)
    assert four["attention_prefill"] == pytest.approx(one["attention_prefill"] / 4, rel=0.01)
    num_bytes = 8192 * 4096 * 2
    each = 2 * 3 / 4 * num_bytes / BARE.interconnect_bytes_per_s * 1e9 + 4 * BARE.interconnect_latency_ns  # in halves
    assert four["all_reduce"] == pytest.approx(5 * each, rel=1e-6)


def test_ranks_beyond_the_kv_heads_copy_them():
    eight, sixteen = (parts_of(decode(64, 4000), tensor_parallel_size=n) for n in (8, 16))
    assert sixteen["attention_decode"] == pytest.approx(eight["attention_decode"], rel=0.01)


def test_collectives_take_the_faster_of_ring_and_tree():
    links = Collectives(8, 5e8, 1000)  # 2 ns for a byte
    assert links.all_reduce_ns(4) == 2 * 8 + 2 * 3 * 1000  # a tree: few hops
    assert links.all_reduce_ns(10**9) == 2 * 7 * 2 * 10**9 / 8 + 14 * 1000  # a ring: little volume
    assert links.all_gather_ns(10**9) == 7 * 2 * 10**9 / 8 + 3000
    assert links.broadcast_ns(4) == 3 * 8 + 3000  # down a tree
    assert links.broadcast_ns(10**9) == 2 * 7 * 2 * 10**9 / 8 + 10_000  # scattered, then gathered
    alone = Collectives(1, 1e9, 1000)
    for collective in (alone.all_reduce_ns, alone.all_gather_ns, alone.broadcast_ns):
        assert collective(8) == 0


def test_through_a_switch_ranks_meet_directly_and_over_pcie_by_turns():
    switched = Collectives(8, 5e8, 1000, is_switched=True)  # 2 ns for a byte
    assert switched.all_reduce_ns(4) == 7 * 8 + 2 * 1000  # each reads what all have
    assert switched.all_reduce_ns(10**6) == 2 * 7 * 2 * 10**6 / 8 + 4 * 1000  # each sums a share, then reads the rest
    one_mb = 1_000_000
    nvlink, host, p2p = (
        collectives_of(2, replace(DEVICE, interconnect=name, host_link_bytes_per_s=60e9)).all_reduce_ns(one_mb)
        for name in ("nvlink", "pcie_host", "pcie_p2p")
    )
    assert nvlink < p2p < host
    assert host == 20_000 + one_mb / 15  # 20 us, and 15 bytes a ns
    twice = replace(DEVICE, interconnect="pcie_host", host_link_bytes_per_s=60e9, interconnect_factor=2.0)
    assert collectives_of(2, twice).all_reduce_ns(one_mb) == pytest.approx(2 * host)
    slow = replace(DEVICE, interconnect="pcie_p2p", host_link_bytes_per_s=12e9)
    assert collectives_of(2, slow).all_reduce_ns(one_mb) == 10_000 + one_mb / 12  # no faster than its slot


@pytest.mark.parametrize(
    ("interconnect", "rates"),  # GB/s of each rank
    [("nvlink", {2: 64, 4: 64, 8: 64}), ("xgmi", {1: 64, 2: 64, 3: 2 * 64, 4: 3 * 64, 8: 7 * 64}),
     ("pcie_host", {1: 15, 2: 15, 3: 5, 4: 5, 5: 2, 8: 2, 16: 2}), ("pcie_p2p", {2: 35, 4: 28, 8: 24})],
)  # fmt: skip
def test_more_ranks_share_what_they_share(interconnect, rates):
    device = replace(DEVICE, interconnect=interconnect, interconnect_bytes_per_s=64e9, host_link_bytes_per_s=60e9)
    for size, rate in rates.items():
        assert collectives_of(size, device).link_bytes_per_s == rate * 1e9


# --- what a device's kernels add ---


def test_rows_of_a_product_are_computed_in_tiles():
    device = replace(TILED, gemm_tile_rows=128)
    downs = [parts_of(prefill(n), device=device)["down"] for n in (1, 128, 129, 256)]
    assert downs[0] == downs[1] == downs[2] / 2 == downs[3] / 2


def test_each_kernel_of_a_chain_has_a_floor():
    floors = {"gemm_floor_ns": 1000, "kernel_floor_ns": 100, "attention_floor_ns": 5000}
    device = replace(BARE, **floors, decode_attention_floor_ns=7000)
    for shape, attention in ((decode(3, 500), 14_000), (prefill(40), 10_000)):
        bare, full = (parts_of(shape, device=one) for one in (BARE, device))
        added = {name: full[name] - bare[name] for name in full}
        products = {"qkv": 2000, "o": 2000, "gate_up": 2000, "down": 2000, "lm_head": 1000}
        small = {"elementwise": 2 * 6 * 100, "embedding": 100, "sampler": 1000}
        name = "attention_prefill" if shape.prefills else "attention_decode"
        wanted = products | small | {name: attention}
        assert {name: ns for name, ns in added.items() if abs(ns) > 1} == pytest.approx(wanted, abs=1)


def test_a_greedy_sampler_passes_twice_over_logits_of_four_bytes():
    device = replace(BARE, memory_bytes_per_s=1e9)
    assert parts_of(decode(64), device=device)["sampler"] == 2 * 64 * MODEL.vocab_size * 4


def test_what_a_kernel_left_in_the_cache_is_not_moved_again():
    cached = replace(BARE, cache_bytes=4 * 2 * 2 * 4096 * 100)  # a quarter: what rotary and store move of 100 tokens
    small, large = (parts_of(prefill(n), device=cached)["elementwise"] for n in (50, 4000))
    plain = parts_of(prefill(4000))["elementwise"]
    assert small == 0
    assert 0.9 * plain < large < plain


@given(st.integers(2, 64), st.integers(1, 10**9))
def test_a_collective_moves_at_least_what_it_must(size, num_bytes):
    links, free = Collectives(size, 1e9, 0), Collectives(size, 1e9, 7)
    share = (size - 1) * num_bytes / size  # what each rank lacks, at 1 ns a byte
    assert links.all_gather_ns(num_bytes) == share
    assert links.all_reduce_ns(num_bytes) >= share  # sums of what the others have come in
    assert num_bytes <= links.broadcast_ns(num_bytes) * (1 + 1e-12)
    for name in ("all_reduce_ns", "all_gather_ns", "broadcast_ns"):
        assert getattr(free, name)(num_bytes) >= getattr(links, name)(num_bytes) + 7 * (size - 1).bit_length() - 1e-6


@given(st.integers(1, 500), st.integers(1, 4000))
def test_more_work_never_takes_less_time(num, context):
    cost = RooflineCost(MODEL, DEVICE)
    assert cost.price(decode(num + 1, context)).total_ns >= cost.price(decode(num, context)).total_ns
    assert cost.price(decode(num, context + 1)).total_ns >= cost.price(decode(num, context)).total_ns


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_captured_size": 0}, r"cost\.max_captured_size is 0; it must be from 1 to "),
        ({"max_captured_tokens": -1}, r"cost\.max_captured_tokens is -1; it must be from 0 to "),
        ({"graph_launch_ns": -1}, r"cost\.graph_launch_ns is -1"),
        ({"kernel_launch_ns": -1}, r"cost\.kernel_launch_ns is -1"),
        ({"logits": "none"}, r"cost\.logits is 'none'; choose one of all_gather, gather"),
    ],
)
def test_impossible_roofline_settings_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        RooflineConfig(**values)


@pytest.mark.parametrize("size", [0, 3, 32])
def test_ranks_that_do_not_divide_the_heads_are_refused(size):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size}; it must divide the 16 attention heads"):
        RooflineCost(MODEL, DEVICE, tensor_parallel_size=size)


@pytest.mark.parametrize(("rate", "share", "ns"), [(1, 1e-6, MAX_PART_NS), (1e30, 1, 0)])
@pytest.mark.parametrize("size", [1, 2, MAX_SIZE])
@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_the_ends_of_every_range_have_prices(rate, share, ns, size, dtype):
    """Each rate, share, latency and dimension at the end of what it may be: the price is a whole number of ns."""
    rates = dict.fromkeys([name for name in DEVICE_FIELDS if name.endswith("_per_s")], rate)
    times = dict.fromkeys([name for name in DEVICE_FIELDS if name.endswith("_ns")], ns)
    shares = {"compute_efficiency": share, "memory_efficiency": share, "fp8_efficiency": share}
    device = DeviceSpec("end", interconnect="nvlink", **rates, **times, **shares)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    largest = dict.fromkeys((*names, "head_dim", "vocab_size"), MAX_SIZE if size != 2 else MAX_SIZE - 1)
    config = RooflineConfig(kernel_launch_ns=ns, graph_launch_ns=ns)
    for model in (ModelSpec("largest", dtype=dtype, **largest), ModelSpec("usual", dtype=dtype)):
        if model.name == "usual" and size > 2:
            continue
        cost = RooflineCost(model, device, config, tensor_parallel_size=size)
        for prefills in ((), (PrefillChunk(MAX_SIZE, MAX_SIZE),)):
            shape = BatchShape(2**31, 2**62, prefills, 2**31, 2**31, 2**31, 2**31)
            assert all(type(part) is int and part >= 0 for part in cost.price(shape))
            assert sum(cost.breakdown(shape).values()) == cost.price(shape).total_ns
