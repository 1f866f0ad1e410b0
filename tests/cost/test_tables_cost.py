"""Prices from operator tables: exact on measured points, monotone between, scaled beyond, filled from the roofline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.tables.columns import rows_of
from sim.cost.config import RooflineConfig
from sim.cost.grid import Grid
from sim.cost.measured import measure
from sim.cost.roofline import RooflineCost
from sim.cost.tables import MEASURED, ROOFLINE, SCALED, TablesCost
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.core.sampling import SamplingParams
from testbed.errors import ConfigError, ProfileError
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec
from testbed.specs.operator_tables import OperatorTables
from tests.cost.shapes import LINK, decode, prefill, shapes

MODEL = ModelSpec(
    "m", architecture="LlamaForCausalLM", num_hidden_layers=3, hidden_size=1024, intermediate_size=2048,
    num_attention_heads=8, num_key_value_heads=2, head_dim=128, vocab_size=4096, tie_word_embeddings=False,
)  # fmt: skip
DEVICE = DeviceSpec("d", num_sms=8, attention_tile_rows=64, gemm_floor_ns=2000, kernel_floor_ns=2000, **LINK)
CONFIG = RooflineConfig()
LABELS = {"engine": "vllm 0", "source": "us 1", "licence": "MIT"}
ROWS = [1, 8, 64, 512, 4096]
PRODUCTS = [(1024, 1536), (1024, 1024), (1024, 4096), (2048, 1024)]  # qkv, o, gate_up, down; no LM head
CONTEXTS, BATCHES = [16, 256, 4096, 32768], [1, 4, 32, 256]


def roofline(model: ModelSpec = MODEL, size: int = 1) -> RooflineCost:
    return RooflineCost(model, DEVICE, CONFIG, tensor_parallel_size=size)


def table(operator: str, columns: dict[str, list[float]], times: list[float], **fixed: object):
    return rows_of(len(times), operator=operator, **columns, **fixed, time_ns=times, **LABELS)


def products(factor: float = 1.5, sizes: list[tuple[int, int]] = PRODUCTS):
    points = [(m, n, k) for k, n in sizes for m in ROWS]
    times = [factor * roofline().product_ns(m, k, n, 2) for m, n, k in points]
    columns = {name: [point[i] for point in points] for i, name in enumerate("mnk")}
    return table("gemm", columns, times, kernel="linear", dtype="bfloat16")


def attention(
    operator: str, points: list[tuple[int, ...]], names: tuple[str, ...], times: list[float], kv_heads: int = 2
):
    columns = {name: [point[i] for point in points] for i, name in enumerate(names)}
    return table(
        operator, columns, times, kernel="flash", dtype="bfloat16", kv_dtype="bfloat16", num_heads=8,
        num_kv_heads=kv_heads, head_dim=128,
    )  # fmt: skip


def decodes(factor: float = 2.0, kv_heads: int = 2):
    points = [(b, c) for b in BATCHES for c in CONTEXTS]
    cost = roofline(replace(MODEL, num_key_value_heads=kv_heads))
    times = [factor * cost.breakdown(decode(b, c))["attention_decode"] / 3 for b, c in points]
    return attention("attention_decode", points, ("batch", "context"), times, kv_heads)


def prompts(factor: float = 3.0):
    points = [(1, c, s) for c in (16, 128, 1024) for s in (0, 512, 8192)]
    times = [factor * roofline().breakdown(prefill(c, start=s))["attention_prefill"] / 3 for _, c, s in points]
    return attention("attention_prefill", points, ("batch", "new_tokens", "context"), times)


def priced(*tables, model: ModelSpec = MODEL, size: int = 1, kv_dtype: str | None = None) -> TablesCost:
    import pyarrow as pa

    found = measure(OperatorTables("d", "ours", pa.concat_tables(tables)), model, size, kv_dtype, None, roofline)
    return TablesCost(model, DEVICE, CONFIG, measured=found, tensor_parallel_size=size)


ALL = priced(products(), decodes(), prompts())


# --- on the points ---


@pytest.mark.parametrize("num_tokens", ROWS)
def test_a_measured_product_costs_what_was_measured(num_tokens):
    parts, plain = (cost.breakdown(prefill(num_tokens)) for cost in (ALL, roofline()))
    for name in ("qkv", "o", "gate_up", "down"):
        assert parts[name] == pytest.approx(1.5 * plain[name], abs=3)
    assert ALL.origins(prefill(num_tokens))["down"] == MEASURED


@pytest.mark.parametrize(
    ("name", "factor", "measured", "rel"),
    [
        ("attention_decode", 2, [decode(batch, context) for batch in BATCHES for context in CONTEXTS], 0),
        ("attention_prefill", 3, [prefill(n, start=start) for n in (16, 128, 1024) for start in (0, 512, 8192)], 1e-6),
    ],
    ids=["decodes", "prompts"],
)
def test_measured_attention_costs_what_was_measured(name, factor, measured, rel):
    for shape in measured:
        expected = factor * roofline().breakdown(shape)[name]
        assert ALL.breakdown(shape)[name] == pytest.approx(expected, rel=rel, abs=3)
        assert ALL.origins(shape)[name] == MEASURED


def test_a_measured_mix_costs_what_was_measured():
    points = [(c, s, n, k) for c in (16, 256) for s in (0, 1024) for n in (1, 16) for k in (64, 2048)]

    def times(c: int, s: int, n: int, k: int) -> int:
        parts = roofline().breakdown(BatchShape(n, n * k, (PrefillChunk(s, c),), 0))
        return (5 if k == 64 else 7) * (parts["attention_prefill"] + parts["attention_decode"])

    names = ("new_tokens", "context", "batch", "decode_context")
    rows = attention("attention_mixed", points, names, [times(*point) / 3 for point in points])
    cost = priced(prompts(), rows)
    for c, s, n, k in points:
        shape = BatchShape(n, n * k, (PrefillChunk(s, c),), 0)
        parts = cost.breakdown(shape)
        assert parts["attention_prefill"] + parts["attention_decode"] == pytest.approx(times(c, s, n, k), abs=6)
        assert cost.origins(shape)["attention_decode"] == MEASURED
    ends = [cost.breakdown(BatchShape(n, n * 64, (PrefillChunk(0, 16),), 0)) for n in (1, 4, 16)]
    assert ends[0]["attention_decode"] < ends[1]["attention_decode"] < ends[2]["attention_decode"]


def test_split_attention_is_looked_up_in_the_tables_of_prompts_and_of_decodes():
    chunk, names = PrefillChunk(512, 128), ("new_tokens", "context", "batch", "decode_context")
    mixed = attention("attention_mixed", [(128, 512, 16, 512)], names, [10**9])
    options = replace(CONFIG, mixed_attention="split")
    found = priced(decodes(), prompts(), mixed).measured
    cost = TablesCost(MODEL, DEVICE, options, measured=found)
    shape = BatchShape(16, 16 * 512, (chunk,), 17)
    for name, alone in (("attention_prefill", prefill(128, start=512)), ("attention_decode", decode(16, 512))):
        assert cost.breakdown(shape)[name] == pytest.approx(ALL.breakdown(alone)[name], abs=2)
        assert cost.origins(shape)[name] == MEASURED


def test_prompts_that_run_together_are_as_measured_as_the_one_with_the_most_attention():
    few, many = PrefillChunk(0, 8), PrefillChunk(512, 128)  # the table has prompts of 16 tokens and more
    assert ALL.origins(BatchShape(0, 0, (few,), 1))["attention_prefill"] == SCALED
    for chunks in ((few, many), (many, few)):
        assert ALL.origins(BatchShape(0, 0, chunks, 2))["attention_prefill"] == MEASURED


# --- between, beyond, without ---


@settings(deadline=None)
@given(st.integers(1, 9000), st.integers(1, 300), st.integers(1, 60_000))
def test_more_work_never_takes_less_time(num_tokens, num_decodes, context):
    for less, more in (
        (prefill(num_tokens), prefill(num_tokens + 1)),
        (decode(num_decodes, context), decode(num_decodes + 1, context)),
        (decode(num_decodes, context), decode(num_decodes, context + 1)),
    ):
        before, after = ALL.breakdown(less), ALL.breakdown(more)
        for name in ("qkv", "down", "attention_prefill", "attention_decode"):
            assert after[name] >= before[name] * (1 - 1e-9) - 3, name


@given(shapes)
def test_the_breakdown_adds_up_to_the_price(shape):
    assert ALL.price(shape).total_ns == sum(ALL.breakdown(shape).values()) >= 1
    assert set(ALL.origins(shape)) <= set(ALL.breakdown(shape))


def test_between_measured_products_the_distance_from_the_roofline_is_interpolated():
    def gate_up(*sizes: tuple[int, int]) -> float:
        """Its time over the roofline's: of 1024 x 4096, which is not measured."""
        points = [(m, n, k, 1.0 + (k > 512) + 2 * (n > 1024)) for k, n in sizes for m in ROWS]
        times = [factor * roofline().product_ns(m, k, n, 2) for m, n, k, factor in points]
        columns = {name: [point[i] for point in points] for i, name in enumerate("mnk")}
        cost = priced(table("gemm", columns, times, kernel="linear", dtype="bfloat16"))
        assert cost.origins(prefill(64))["gate_up"] == SCALED
        return cost.breakdown(prefill(64))["gate_up"] / roofline().breakdown(prefill(64))["gate_up"]

    every = [(k, n) for k in (512, 2048) for n in (1024, 4096)]
    assert gate_up(*every) == pytest.approx((3 * 4) ** 0.5, rel=0.01)  # half way, by the logarithm
    assert gate_up((512, 1024), (2048, 4096)) == pytest.approx(4, rel=0.01), "not all around it: the nearest"


def test_beyond_a_table_its_last_value_grows_as_the_roofline_does():
    for shape, name, factor in (
        (prefill(40_000), "gate_up", 1.5), (decode(1000, 300), "attention_decode", 2.0),
        (decode(4, 100_000), "attention_decode", 2.0),
    ):  # fmt: skip
        assert ALL.breakdown(shape)[name] == pytest.approx(factor * roofline().breakdown(shape)[name], rel=1e-4)
        assert ALL.origins(shape)[name] == SCALED


def test_heads_that_were_not_measured_take_the_nearest_that_were():
    cost = priced(decodes(2.0, kv_heads=4), decodes(5.0, kv_heads=8))
    shape = decode(32, 256)
    assert cost.breakdown(shape)["attention_decode"] == pytest.approx(
        2 * roofline().breakdown(shape)["attention_decode"], rel=1e-4
    )
    assert cost.origins(shape)["attention_decode"] == SCALED


def test_what_a_table_lacks_is_the_rooflines():
    cost, plain, shape = priced(decodes()), roofline(), BatchShape(3, 90, (PrefillChunk(0, 50),), 4)
    parts, origins = cost.breakdown(shape), cost.origins(shape)
    for name, ns in plain.breakdown(shape).items():
        assert parts[name] == ns
        assert origins.get(name, ROOFLINE) == ROOFLINE
    fp8 = priced(decodes(), kv_dtype="fp8")
    assert fp8.breakdown(decode(4, 256)) == plain.breakdown(decode(4, 256))


def with_column(rows, name: str, value: str):
    import pyarrow as pa

    return rows.set_column(rows.column_names.index(name), name, pa.repeat(pa.scalar(value), rows.num_rows))


def test_types_of_16_bits_are_alike_and_others_are_not():
    half = with_column(with_column(decodes(), "kv_dtype", "float16"), "dtype", "float16")
    cost = priced(with_column(products(), "dtype", "float16"), half)
    assert {cost.origins(decode(4, 256))[name] for name in ("qkv", "down", "attention_decode")} == {MEASURED}
    single = priced(products(), decodes(), model=replace(MODEL, dtype="float32"))
    assert set(single.origins(decode(4, 256)).values()) == {ROOFLINE}


def test_the_lm_head_of_an_8_bit_model_has_16_bits():
    sizes = [*PRODUCTS, (1024, 4096)]
    model = replace(MODEL, dtype="fp8", hidden_size=1024)
    eight = priced(with_column(products(1.5, PRODUCTS), "dtype", "fp8"), products(4.0, sizes), model=model)
    plain = roofline(model)
    shape = BatchShape(8, 800, (), 8)
    assert eight.breakdown(shape)["lm_head"] == pytest.approx(4 * plain.breakdown(shape)["lm_head"], rel=1e-4)
    assert eight.breakdown(shape)["attention_decode"] == plain.breakdown(shape)["attention_decode"]


def test_a_spike_among_decodes_is_left_out():
    points = [(b, c) for b in (1, 8) for c in (16, 64, 256, 1024, 4096)]
    times = [2 * roofline().breakdown(decode(b, c))["attention_decode"] / 3 for b, c in points]
    times[2] *= 7
    cost = priced(attention("attention_decode", points, ("batch", "context"), times))
    for b, c in points:
        assert cost.breakdown(decode(b, c))["attention_decode"] == pytest.approx(
            2 * roofline().breakdown(decode(b, c))["attention_decode"], rel=0.01
        )


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_nothing_beside_a_prompt_makes_a_step_cheaper(data):
    points = [(c, s, n, k) for c in (16, 256) for s in (0, 1024) for n in (1, 16) for k in (64, 2048)]
    times = [1e4 * data.draw(st.floats(0.001, 3)) for _ in points]
    names = ("new_tokens", "context", "batch", "decode_context")
    cost = priced(prompts(data.draw(st.floats(0.5, 3))), attention("attention_mixed", points, names, times))
    chunk = PrefillChunk(data.draw(st.integers(0, 2000)), data.draw(st.integers(1, 600)))
    num, context = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3000))
    shape = BatchShape(num, num * context, (chunk,), 0)
    parts = cost.breakdown(shape)
    assert min(parts.values()) >= 0
    assert cost.price(shape).total_ns == sum(parts.values())
    assert parts["attention_prefill"] == cost.breakdown(BatchShape(0, 0, (chunk,), 0))["attention_prefill"]


def test_an_outlier_and_a_fall_do_not_stay():
    times = [1000.0, 1100.0, 9000.0, 1300.0, 1250.0, 1600.0]
    rows = table(
        "gemm", {"m": [1, 2, 4, 8, 16, 32], "n": [1024] * 6, "k": [1024] * 6}, times, kernel="l", dtype="bfloat16"
    )
    grid = priced(rows).measured.gemm[1024, 1024].grid
    assert (grid.at((1,)), grid.at((32,))) == (1000, 1600)
    assert 1100 < grid.at((4,)) < 1300
    assert grid.at((8,)) == pytest.approx(grid.at((16,))) == pytest.approx((1300 * 1250) ** 0.5)


def test_collectives_come_from_tables_of_as_many_ranks():
    sizes = [1024, 2**20, 2**24]
    fast = table("all_reduce", {"num_bytes": sizes}, [5e3, 2e4, 9e5], kernel="graph", dtype="bfloat16", num_ranks=2)
    ring = table("all_reduce", {"num_bytes": sizes}, [9e3, 3e4, 2e5], kernel="NCCL", dtype="bfloat16", num_ranks=2)
    eager = table("all_reduce", {"num_bytes": sizes}, [1e3, 1e3, 1e3], kernel="x_eager", dtype="bfloat16", num_ranks=2)
    other = table("all_reduce", {"num_bytes": sizes}, [1e2, 1e2, 1e2], kernel="NCCL", dtype="bfloat16", num_ranks=4)
    cost = priced(fast, ring, eager, other, size=2)
    assert cost.breakdown(prefill(512))["all_reduce"] == 7 * 20_000  # 1 MiB; after o and MLP of 3 layers, embedding
    assert cost.breakdown(prefill(8192))["all_reduce"] == 7 * 200_000
    beyond = cost.breakdown(prefill(16384))["all_reduce"]
    assert 1.5 < beyond / (7 * 200_000) < 2.1  # as volumes and hops grow
    assert cost.origins(prefill(512))["all_reduce"] == MEASURED
    assert cost.origins(prefill(16384))["all_reduce"] == SCALED
    assert priced(fast, other).breakdown(prefill(512))["all_reduce"] == 0
    found = measure(OperatorTables("d", "", fast), MODEL, 2, None, None, roofline)
    twice = TablesCost(MODEL, replace(DEVICE, interconnect_factor=2.0), CONFIG, measured=found, tensor_parallel_size=2)
    assert twice.breakdown(prefill(512))["all_reduce"] == 7 * 40_000


def test_small_operators_come_from_tables_that_have_them_all():
    kernels = {"layernorm": 1024, "rotary_emb": 1280, "act_fn": 2048}
    rows = [
        table("elementwise", {"m": [1, 96]}, [1000.0, 5000.0], kernel=kernel, dtype="bfloat16", n=width)
        for kernel, width in kernels.items()
    ]
    sampler = table("sampler", {"m": [1, 64]}, [7000.0, 70_000.0], kernel="sampler", dtype="bfloat16", n=4096)
    cost = priced(*rows, sampler)
    assert cost.breakdown(prefill(96))["elementwise"] == 3 * 4 * 5000
    assert cost.breakdown(decode(64))["sampler"] == 70_000
    assert cost.origins(decode(64))["sampler"] == "measured"
    drawn = SamplingParams(temperature=1.0)
    drawing = TablesCost(MODEL, DEVICE, CONFIG, measured=cost.measured, sampling=drawn)
    more = RooflineCost(MODEL, DEVICE, CONFIG, sampling=drawn).breakdown(decode(64))["drawing"]
    assert drawing.breakdown(decode(64)) == cost.breakdown(decode(64)) | {"drawing": more}
    assert (drawing.origins(decode(64))["sampler"], drawing.origins(decode(64))["drawing"]) == ("measured", "roofline")
    qwen = replace(MODEL, architecture="Qwen3ForCausalLM")
    norm = table("elementwise", {"m": [1, 96]}, [500.0, 900.0], kernel="qk_norm", dtype="bfloat16", n=1280)
    assert priced(*rows, norm, model=qwen).breakdown(prefill(96))["elementwise"] == 3 * (4 * 5000 + 900)
    halves = [
        row.set_column(row.column_names.index("n"), "n", [[width] * 2])
        for row, width in zip(rows, (1024, 640, 1024), strict=True)
    ]
    two = priced(*halves, norm, model=qwen, size=2)  # the norm as it was measured on one rank
    assert two.breakdown(prefill(96))["elementwise"] == 3 * (4 * 5000 + 900)
    part = priced(*rows[:2])
    assert part.breakdown(prefill(96))["elementwise"] == roofline().breakdown(prefill(96))["elementwise"]


# --- grids ---


@given(st.data())
def test_a_grid_is_multilinear_and_level_outside(data):
    axes = [sorted(data.draw(st.sets(st.integers(0, 50), min_size=1, max_size=4))) for _ in range(3)]
    weights = np.array([2.0, 3.0, 5.0])
    values = [float(weights @ (x, y, z)) + x * y for x in axes[0] for y in axes[1] for z in axes[2]]
    grid = Grid([list(map(float, axis)) for axis in axes], values)
    point = tuple(data.draw(st.floats(-10, 60)) for _ in axes)
    x, y, z = (min(max(value, axis[0]), axis[-1]) for value, axis in zip(point, axes, strict=True))
    assert grid.clamped(point) == (x, y, z)
    assert grid.at(point) == pytest.approx(float(weights @ (x, y, z)) + x * y, abs=1e-6)


# --- from a configuration ---


def configured(tmp_path, rows, *overrides: str):
    from experiments.configuration.compose import compose_config
    from experiments.wiring.costs import build_cost, unread_settings
    from testbed.specs.operator_tables import write_operator_tables

    file = tmp_path / "tables.parquet"
    write_operator_tables(file, OperatorTables("h100", "ours", rows), "by hand")
    config = compose_config(["model=qwen3_0.6b", "device=h100", "cost=tables", f"cost.path={file}", *overrides])
    return build_cost(config), unread_settings(config)


def message(num_ranks: int):
    sizes = [1024, 2**20, 2**24]
    return table("all_reduce", {"num_bytes": sizes}, [5e3, 2e4, 9e5], kernel="g", dtype="bfloat16", num_ranks=num_ranks)


def test_what_was_measured_does_not_follow_a_changed_device_and_says_so(tmp_path):
    shape, two = decode(8), "device.tensor_parallel_size=2"
    own, notes = configured(tmp_path, message(2), two)
    assert (own.origins(shape)["all_reduce"], notes) == (MEASURED, [])
    over_pcie, notes = configured(tmp_path, message(2), two, "device.interconnect=pcie_host")
    assert over_pcie.origins(shape)["all_reduce"] == ROOFLINE
    assert over_pcie.breakdown(shape)["all_reduce"] > 3 * own.breakdown(shape)["all_reduce"]
    assert [note.split()[0] for note in notes] == ["device.interconnect"]
    _, notes = configured(tmp_path, message(2), "device.flops_per_s=2e15", "device.step_overhead_ns=1")
    assert notes == ["device.flops_per_s changes only what tables lack: the operators of h100 were measured as it is"]


def test_of_several_engines_in_a_file_one_is_taken(tmp_path):
    import pyarrow as pa

    other = with_column(message(2), "engine", "sglang 0.5")
    other = other.set_column(other.column_names.index("time_ns"), "time_ns", pa.array([7e3, 7e4, 7e5], pa.float64()))
    both, ranks = pa.concat_tables([message(2), other]), "device.tensor_parallel_size=2"
    shape = decode(8)
    first, second = (configured(tmp_path, both, ranks, f"cost.engine={name}")[0] for name in ("vllm", "sglang"))
    assert first.breakdown(shape)["all_reduce"] < second.breakdown(shape)["all_reduce"]
    alone, _ = configured(tmp_path, other, ranks)  # there is no other
    assert alone.breakdown(shape)["all_reduce"] == second.breakdown(shape)["all_reduce"]
    with pytest.raises(ProfileError, match=r"tables\.parquet has no engine 'trtllm'; .*sglang 0\.5, vllm 0"):
        configured(tmp_path, both, "cost.engine=trtllm")
    with pytest.raises(ConfigError, match=r"has tables of h100, and the run's device is h200; choose device=h100"):
        configured(tmp_path, both, "device=h200")


def test_a_prompts_distance_from_the_roofline_is_not_that_of_the_decodes_beside_it():
    shape = BatchShape(30, 30 * 900, (PrefillChunk(0, 16),), 30, longest_decode_context=900)
    parts, plain = (cost.breakdown(shape) for cost in (priced(prompts(0.1)), roofline()))
    assert parts["attention_prefill"] == pytest.approx(0.1 * plain["attention_prefill"], abs=2)
    assert parts["attention_decode"] == pytest.approx(plain["attention_decode"], abs=2)


def test_experts_are_the_rooflines_and_a_run_says_so():
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    model = replace(MODEL, architecture="Qwen3MoeForCausalLM", **experts)
    cost, shape = priced(products(), model=model), prefill(64)
    parts, by_roofline = cost.breakdown(shape), roofline(model).breakdown(shape)
    for name in ("router", "experts_gate_up", "experts_down", "elementwise"):
        assert parts[name] == by_roofline[name] > 0
        assert cost.origins(shape)[name] == ROOFLINE
    assert cost.origins(shape)["qkv"] == MEASURED
    assert parts["qkv"] != by_roofline["qkv"]


def test_chunks_behind_a_context_that_no_table_has_take_at_least_their_arithmetic():
    """Prompts that all begin at 0, a short one a hundred times as fast as the roofline says: its floors are wrong."""
    points = [(1, c, 0) for c in (16, 128, 1024)]
    times = [1e-2 * roofline().breakdown(prefill(c))["attention_prefill"] / 3 for _, c, _ in points]
    rows = attention("attention_prefill", points, ("batch", "new_tokens", "context"), times)
    for start in (0, 512, 100_000):
        for num_tokens in (16, 128):
            pairs = sum(start + position + 0.5 for position in range(num_tokens))
            least_ns = 3 * 4 * 8 * 128 * pairs / DEVICE.flops_per_s * 1e9
            found = priced(rows).breakdown(prefill(num_tokens, start=start))["attention_prefill"]
            assert found >= round(least_ns)
            assert start < 100_000 or found == round(least_ns)


def test_times_of_a_file_in_another_unit_are_refused(tmp_path):
    with pytest.raises(ProfileError, match=r"gemm bfloat16: half of 4 large points take less than .* the right unit"):
        configured(tmp_path, products(1e-3, [(4096, 4096)] * 4))
