"""The roofline's attention of prompts, and of decodes beside them: counted in tiles, and as measured."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tables.devices import device_spec
from sim.cost.config import RooflineConfig
from sim.cost.roofline import KVLayout, RooflineCost
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.specs.device import MIXED_ATTENTION
from tests.cost.shapes import DEVICE, MODEL, NO_LAUNCH, TILED, decode, parts_of, prefill


def counted_ns(chunks, decodes, device, packs, heads=16, kv_heads=8):
    """Two layers of attention, tile by tile, each of which goes through its keys on one multiprocessor."""
    group = heads // kv_heads if packs else 1
    tokens, copies = 16 // group, heads // group
    of_chunks = [
        [start + min(first + tokens, length) for first in range(0, length, tokens)] for start, length in chunks
    ]
    more = device.attention_tile_keys
    every = [keys + more for keys in (*(keys for tiles in of_chunks for keys in tiles), *decodes)]
    evenly = sum(every) * copies / device.num_sms
    waves = []
    for level in (min(tiles) for tiles in of_chunks):  # all tiles of the chunks that have none shorter
        num = sum(len(tiles) for tiles in of_chunks if min(tiles) >= level)
        waves.append(-(-num * copies // device.num_sms) * (level + more))
    key_ns = 2 * 4 * 16 * MODEL.head_dim * device.num_sms / device.flops_per_s * 1e9
    most = max(evenly, *every, *waves)
    num_busy = max(map(len, of_chunks)) * copies
    if packs and num_busy < 0.8 * device.num_sms:  # idle multiprocessors take parts of the keys
        most = min(most, max(evenly, max(map(max, of_chunks)) * num_busy / device.num_sms + more))
    return most * key_ns


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("keys", [0, 50])
@pytest.mark.parametrize("num_sms", [4, 7, 100])  # all busy until the end; some idle in the last wave; one wave
@pytest.mark.parametrize(
    ("chunks", "decodes"),
    [([(0, 1)], []), ([(0, 100)], []), ([(300, 8)], []), ([(0, 33), (70, 5)], [500] * 7), ([(0, 4)], [9000]),
     ([(3000, 20)], []), ([(3000, 20), (2990, 9)], [2000] * 3)],
)  # fmt: skip
def test_attention_of_prompts_is_counted_in_tiles_and_waves(chunks, decodes, num_sms, keys, packs):
    kind = "packed" if packs else "unpacked"
    device = replace(TILED, num_sms=num_sms, attention_tile_keys=keys, mixed_attention=kind)
    shape = BatchShape(len(decodes), sum(decodes), tuple(PrefillChunk(*chunk) for chunk in chunks), 1)
    parts = parts_of(shape, device=device)
    found = parts["attention_prefill"] + parts["attention_decode"]
    assert found == pytest.approx(counted_ns(chunks, decodes, device, packs), rel=1e-9)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "us"),
    [(1, 1, 4096, 32.1), (1, 1, 8192, 73.7), (1, 1, 6144, 47.2), (1, 1, 16384, 222.5), (4, 1, 2048, 32.4),
     (8, 1, 1536, 34.5), (8, 1, 16384, 859.9), (32, 8, 2048, 89.0)],
)  # fmt: skip
def test_few_tiles_of_one_prompt_split_their_keys_as_measured(heads, kv_heads, length, us):
    """aiconfigurator-core 0.12.0: FlashAttention 3 of vLLM 0.24 on an H100; at 128 tiles of one head it does not."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": 1, "head_dim": 128}
    cost = RooflineCost(replace(MODEL, **shape), device_spec("h100") or DEVICE)
    found = cost.breakdown(BatchShape(0, 0, (PrefillChunk(0, length),), 1))["attention_prefill"] / 1000
    assert found == pytest.approx(us, rel=0.15)


@given(st.data())
def test_nothing_beside_a_prompt_makes_a_step_cheaper(data):
    numbers = {
        "num_sms": (1, 150), "attention_tile_rows": (1, 128), "attention_tile_keys": (0, 600),
        "attention_floor_ns": (0, 9000), "gemm_tile_rows": (1, 128),
    }  # fmt: skip
    values = {name: data.draw(st.integers(*bounds)) for name, bounds in numbers.items()}
    device = replace(DEVICE, **values, mixed_attention=data.draw(st.sampled_from(MIXED_ATTENTION)))
    window = data.draw(st.none() | st.integers(1, 5000))
    cost = RooflineCost(MODEL, device, kv_layout=KVLayout(sliding_window=window))
    most = 20_000 if window is None else window
    chunk = st.tuples(st.integers(0, most - 1), st.integers(1, 3000))
    chunks = data.draw(st.lists(chunk, min_size=1, max_size=5))
    contexts = data.draw(st.lists(st.integers(1, most), max_size=20))

    def price(chunks, contexts):
        prefills = tuple(PrefillChunk(*one) for one in chunks)
        longest = max(contexts, default=0)
        shape = BatchShape(len(contexts), sum(contexts), prefills, 1, longest_decode_context=longest)
        parts = cost.breakdown(shape)
        assert min(parts.values()) >= 0
        return parts["attention_prefill"] + parts["attention_decode"]

    start, length = chunks[0]
    before = price(chunks, contexts)
    assert price(chunks, [*contexts, data.draw(st.integers(1, most))]) >= before
    assert price([*chunks, data.draw(chunk)], contexts) >= before
    assert price([(start, length + 1), *chunks[1:]], contexts) >= before
    assert price([(min(start + 1, most - 1), length), *chunks[1:]], contexts) >= before


@pytest.mark.parametrize(("window", "length"), [(64, 100), (1024, 783), (1024, 2000)])
def test_a_window_never_makes_more_before_a_prompt_cheaper(window, length):
    """Where its last tile sees fewer keys than its first it counts as what it is, and not as none."""
    device = replace(DEVICE, num_sms=16, attention_tile_rows=64, attention_tile_keys=100)
    cost = RooflineCost(MODEL, device, NO_LAUNCH, kv_layout=KVLayout(sliding_window=window))
    beside = PrefillChunk(window // 2, 130)

    def price(*chunks):
        return cost.breakdown(BatchShape(0, 0, chunks, 1))["attention_prefill"]

    alone = [price(PrefillChunk(start, length)) for start in range(window)]
    assert alone == sorted(alone)
    together = [price(PrefillChunk(start, length), beside) for start in range(window)]
    assert together == sorted(together)


def test_a_windows_last_tile_sees_what_its_own_tokens_see():
    device = replace(TILED, attention_tile_rows=32, mixed_attention="unpacked", num_sms=1)
    cost = RooflineCost(MODEL, device, NO_LAUNCH, kv_layout=KVLayout(sliding_window=512))
    for start, length, keys in ((511, 1, 512), (511, 2, 513), (500, 13, 513), (500, 40, 532 + 519), (0, 64, 32 + 64)):
        expected = 2 * 16 * keys * 4 * 32 * MODEL.head_dim  # layers, heads, keys, rows
        assert cost.breakdown(prefill(length, start=start))["attention_prefill"] == expected, (start, length)


def test_a_decode_beside_a_prompt_costs_a_tile_and_heads_that_are_not_packed_read_again():
    device = replace(DEVICE, num_sms=100, attention_tile_rows=64, mixed_attention="unpacked")
    for num_decodes, least, most in ((64, 1.2, 3), (200, 1.9, 3)):
        alone = RooflineCost(MODEL, device).breakdown(decode(num_decodes, 4000))["attention_decode"]
        beside = BatchShape(num_decodes, num_decodes * 4000, (PrefillChunk(0, 16),), num_decodes)
        mixed = RooflineCost(MODEL, device).breakdown(beside)["attention_decode"]
        assert least < mixed / alone < most


@pytest.mark.parametrize("own", MIXED_ATTENTION)
def test_split_attention_costs_its_prompts_and_its_decodes(own):
    device = replace(DEVICE, num_sms=100, attention_tile_rows=64, decode_attention_floor_ns=9000, mixed_attention=own)
    chunks = (PrefillChunk(500, 300), PrefillChunk(0, 16))
    mixed = BatchShape(64, 64 * 4000, chunks, 66, longest_decode_context=5000)
    split, plain = (RooflineCost(MODEL, device, RooflineConfig(mixed_attention=kind)) for kind in ("split", None))
    apart = [BatchShape(0, 0, chunks, 2), decode(64, 4000)]
    alone = plain.breakdown(apart[0])["attention_prefill"] + plain.breakdown(apart[1])["attention_decode"]
    parts = split.breakdown(mixed)
    assert parts["attention_prefill"] + parts["attention_decode"] == alone
    assert (alone == sum(plain.breakdown(mixed)[f"attention_{of}"] for of in ("prefill", "decode"))) == (own == "split")
    assert [split.price(shape) for shape in apart] == [plain.price(shape) for shape in apart]


@pytest.mark.parametrize(("num_sms", "again"), [(3, 1.0), (4, 0.5), (6, 0.0), (60, 0.0)])
def test_heads_that_are_not_packed_read_again_what_their_tiles_pushed_out(num_sms, again):
    """Two heads share K and V. Three tiles come between them: on fewer multiprocessors nothing is left in the cache."""
    ns = []
    for kind in ("packed", "unpacked"):
        device = replace(TILED, flops_per_s=1e30, memory_bytes_per_s=1e9, num_sms=num_sms, mixed_attention=kind)
        ns.append(parts_of(prefill(48, start=1000), device=device)["attention_prefill"])
    assert ns[1] - ns[0] == pytest.approx(again * 1048 * MODEL.kv_bytes_per_token(None, 1), abs=2)
