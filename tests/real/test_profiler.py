"""The grid of a profile: it fits, it comes about as designed, and it tells every term of a price apart."""

from __future__ import annotations

from array import array
from contextlib import contextmanager
from dataclasses import asdict, fields
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from real.clocks import SkippingClock
from real.driver import Computed
from real.profiler.grid import Episode, Moves, Room, anywhere, design, ladder, rungs
from real.profiler.measure import Bench, Profiled, Unit, measure, run_episode
from sim.cost.calibrated import CalibratedCost, Calibration, Coefficients, Quality
from sim.cost.calibration import calibrate
from sim.cost.profiled_range import profiled_ranges
from testbed.core.outcome import Spans
from testbed.core.plan import BatchPlan, BatchShape, PrefillChunk
from testbed.core.request import GREEDY
from testbed.specs.profiles import MeasuredStep, Profile
from tests.cost.profiling import manifest
from tests.testbed.core_kit import make_limits, make_scheduler

ROOM = Room(
    block_size=4, num_gpu_blocks=160, num_cpu_blocks=24, max_num_seqs=12, max_num_batched_tokens=96, max_model_len=200
)
rooms = st.builds(
    Room, block_size=st.sampled_from((1, 4, 16)), num_gpu_blocks=st.integers(1, 300), num_cpu_blocks=st.integers(0, 40),
    max_num_seqs=st.integers(1, 40), max_num_batched_tokens=st.integers(1, 300), max_model_len=st.integers(2, 400),
)  # fmt: skip


class Device:
    """Executes nothing, and keeps the plans that it was given with their rows."""

    def __init__(self) -> None:
        self.plans: list[tuple[BatchPlan, list[tuple[int, ...]]]] = []

    def start(self, plan: BatchPlan) -> Device:
        self.plans.append((plan, [tuple(row.block_table) for row in plan.scheduled]))
        return self

    def wait(self):
        return Computed(None, Spans(prepare_ns=1, forward_ns=2))


@contextmanager
def alone(recorder):
    yield recorder, None


def bench_of(room: Room, device: Device) -> Bench:
    def scheduler(*, budget: int, caching: bool | None, decodes_wait: bool):
        return make_scheduler(
            "prefill_first" if decodes_wait else "unified", num_blocks=room.num_gpu_blocks,
            num_cpu_blocks=room.num_cpu_blocks, block_size=room.block_size, caching=bool(caching),
            limits=make_limits(seqs=room.max_num_seqs, budget=budget, model_len=room.max_model_len),
        )  # fmt: skip

    return Bench(device, SkippingClock(), room, scheduler, alone, 512, GREEDY)


def shapes_of(room: Room, episode: Episode) -> list[BatchShape]:
    return [shape for shape, _, _ in run_episode(bench_of(room, Device()), episode, 1)]


def designed(episode: Episode) -> list[tuple[int, list[tuple[int, ...]], Moves]]:
    """Decodes, prompts and moves of each step that an episode without a budget is to have."""
    num = len(episode.contexts)
    steps = [(num, [], moves) for moves in (*[Moves()] * episode.num_alone, *episode.moves)]
    if episode.decodes_wait:
        return steps + [
            step for batch in episode.batches for step in ((0, sorted(map(tuple, batch)), Moves()), (num, [], Moves()))
        ]
    return steps + [(num, sorted(map(tuple, batch)), Moves()) for batch in episode.batches]


@settings(max_examples=25)
@given(room=rooms, is_quick=st.booleans(), seed=st.integers(0, 9), data=st.data())
def test_every_episode_comes_about_as_designed(room, is_quick, seed, data):
    episodes = design(room, is_quick=is_quick, seed=seed)
    assert list(dict.fromkeys(episodes)) == episodes == design(room, is_quick=is_quick, seed=seed)
    if not episodes:
        return
    for episode in data.draw(st.lists(st.sampled_from(episodes), min_size=1, max_size=6)):
        shapes = shapes_of(room, episode)
        assert shapes
        if episode.budget is None:
            found = [(one.num_decodes, sorted(map(tuple, one.prefills)), Moves(*one.values()[4:7])) for one in shapes]
            assert found == designed(episode)
        else:
            assert all(one.num_tokens <= episode.budget for one in shapes)
            assert len({one.num_decodes for one in shapes}) == 1
            assert sum(one.num_prefill_tokens for one in shapes) == sum(
                chunk.num_tokens for batch in episode.batches for chunk in batch
            )
        start = sum(episode.contexts)
        contexts = [one.decode_context_tokens for one in shapes if one.num_decodes or not episode.contexts]
        grown = [after - before for before, after in pairwise(contexts)]
        assert grown == [len(episode.contexts)] * len(grown)
        if episode.contexts and episode.budget is None:
            assert contexts[0] == start + 2 * len(episode.contexts)  # the first tokens, and a step for nothing
        repeated = {
            one.repeated_context_tokens for one in shapes if one.kind == "decode" and not any(one.values()[4:7])
        }
        if repeated and not episode.batches:
            assert repeated == {episode.num_common * (len(episode.contexts) - 1)}


def test_no_prompt_is_empty_however_small_the_engine():
    for numbers in product((1, 4), (1, 2, 5), (1, 4, 40), (1, 2, 3, 7), (2, 3, 5)):
        size, num_blocks, *limits = numbers
        for episode in design(Room(size, num_blocks, 0, *limits)):
            assert all(chunk.num_tokens > 0 for batch in episode.batches for chunk in batch), numbers


def test_what_is_measured_is_executed_and_what_leads_to_it_is_not():
    device = Device()
    episode = Episode((20, 30), 2, batches=((PrefillChunk(16, 5), PrefillChunk(0, 7)),))
    steps = run_episode(bench_of(ROOM, device), episode, 1)
    assert [plan.shape for plan, _ in device.plans[1:]] == [shape for shape, _, _ in steps]
    assert all(total_ns >= 1 for *_, total_ns in steps)
    assert sum(plan.shape.num_prefill_tokens for plan, _ in device.plans) == 12, "contexts and prefixes cost nothing"
    tables = device.plans[-1][1]
    assert [len(table) for table in tables] == [6, 9, 6, 2]
    assert len({block for table in tables for block in table}) == 23, "every sequence has blocks of its own"


def test_prompts_and_decodes_that_come_in_turn():
    waiting = [episode for episode in design(ROOM) if episode.decodes_wait]
    assert {len(batch) for episode in waiting for batch in episode.batches} == {1, 2, 4}
    kinds = [[shape.kind for shape in shapes_of(ROOM, episode)] for episode in waiting]
    assert all(one == ["prefill", "decode"] * (len(one) // 2) for one in kinds)
    assert max(shape.num_tokens for episode in waiting for shape in shapes_of(ROOM, episode)) == 96


def test_moved_blocks_are_scattered_and_are_none_of_one_another():
    device = Device()
    run_episode(bench_of(ROOM, device), Episode((8,), moves=(Moves(3, 4, 5),)), 3)
    plan = device.plans[-1][0]
    assert plan.shape.values()[4:7] == (3, 4, 5) == (len(plan.swap_out), len(plan.swap_in), len(plan.copies))
    gpu = [a for a, _ in plan.swap_out] + [b for _, b in plan.swap_in] + [one for pair in plan.copies for one in pair]
    cpu = [b for _, b in plan.swap_out] + [a for a, _ in plan.swap_in]
    assert (len(set(gpu)), len(set(cpu))) == (17, 7)
    assert max(gpu) < ROOM.num_gpu_blocks
    assert max(cpu) < ROOM.num_cpu_blocks


@pytest.mark.parametrize("is_quick", [True, False])
def test_the_grid_reaches_the_limits(is_quick):
    """What a run under these limits can do lies inside the profiled range, or nearly so."""
    shapes = [shape for episode in design(ROOM, is_quick=is_quick) for shape in shapes_of(ROOM, episode)]
    ranges = profiled_ranges(shapes)
    assert ranges["decode"]["num_decodes"] == (1, 12)
    assert ranges["decode"]["decode_context_tokens"][1] > 0.8 * 160 * 4
    assert ranges["prefill"]["num_tokens"] == (1, 96)
    assert ranges["prefill"]["prefill_end"][1] >= 195
    assert ranges["mixed"]["num_decodes"] == (1, 11)
    assert ranges["mixed"]["num_tokens"][1] == 96
    assert ranges["moves"] == {
        "num_blocks_swapped_out": (0, 24), "num_blocks_swapped_in": (0, 24), "num_blocks_copied": (0, 12)
    }  # fmt: skip
    assert any(shape.prefills and not shape.num_samples for shape in shapes), "chunks without logits"
    assert any(len(set(episode.contexts)) > 2 for episode in design(ROOM)), "ragged batches"


@pytest.mark.parametrize("is_quick", [True, False])
def test_the_grid_tells_every_coefficient_apart(is_quick):
    """Steps that cost what known coefficients say give these coefficients back."""
    draw = Random(4)
    known = Coefficients(**{item.name: draw.uniform(1e3, 9e3) for item in fields(Coefficients)})
    truth = Calibration(
        manifest(block_size=4), decode_curve=((1, 2e6), (12, 2.5e6)), prefill_curve=((1, 3e6), (96, 9e6)),
        coefficients=known, ranges={}, quality={"all": Quality(1, 1, 0.0, 0.0, 0.0, None)}, num_folds=5,
        repeated_saving=0.6,
    )  # fmt: skip
    shapes = [shape for episode in design(ROOM, is_quick=is_quick) for shape in shapes_of(ROOM, episode)]
    prices = [CalibratedCost(truth).price(shape) for shape in shapes]
    steps = [MeasuredStep(shape, spans, sum(spans), 0) for shape, spans in zip(shapes, prices, strict=True)]
    found = calibrate(Profile(manifest(block_size=4), steps))
    for name, value in asdict(found.coefficients).items():
        assert value == pytest.approx(getattr(known, name), rel=0.05), name
    assert found.repeated_saving == pytest.approx(0.6, abs=0.02)
    assert {shape.kind for shape in shapes} == {"decode", "prefill", "mixed"}


def test_a_noisy_profile_prices_ordinary_mixed_batches():
    """Dozens of ragged decodes beside a chunk: no hole in the grid there, and no term that is fitted to noise alone."""
    draw = Random(7)
    room = Room(16, 2048, 0, 256, 2048, 4096)
    known = Coefficients(decode_context_token=250, mixed_decode_context_token=340, prefill_pair=43, host=4e5)
    truth = Calibration(
        manifest(), ((1, 1.2e6), (256, 1e7)), ((1, 1.4e6), (2048, 6.6e7)), known, {},
        {"all": Quality(1, 1, 0.0, 0.0, 0.0, None)}, 5,
    )  # fmt: skip
    steps = []
    for episode in draw.sample(design(room), 300):
        for shape in shapes_of(room, episode):
            spans = Spans(*(round(ns * draw.lognormvariate(0, 0.05)) for ns in CalibratedCost(truth).price(shape)))
            steps.append(MeasuredStep(shape, spans, sum(spans), 0))
    found = CalibratedCost(calibrate(Profile(manifest(), steps)))
    for _ in range(20):
        contexts = [round(draw.lognormvariate(5, 0.7)) + 1 for _ in range(draw.randint(16, 80))]
        chunk = PrefillChunk(0, draw.randint(30, 500))
        shape = BatchShape(
            len(contexts), sum(contexts), (chunk,), len(contexts) + 1, longest_decode_context=max(contexts)
        )
        right, price = sum(CalibratedCost(truth).price(shape)), sum(found.price(shape))
        assert price == pytest.approx(right, rel=0.08), shape


def test_mixed_batches_have_no_hole():
    """Of each octave of decodes a number beside prompts, with equal contexts and with ragged ones, to what fits."""
    room = Room(16, 2048, 0, 256, 2048, 4096)
    beside = [one for one in design(room) if one.contexts and one.batches]
    mixed = [one.contexts for one in beside if not one.decodes_wait and one.budget is None]
    for low in (1, 2, 4, 8, 16, 32, 64, 128):
        ragged = [contexts for contexts in mixed if low <= len(contexts) < 2 * low and len(set(contexts)) > 1]
        equal = [contexts for contexts in mixed if low <= len(contexts) < 2 * low and len(set(contexts)) == 1]
        assert equal, low
        assert ragged or low == 1, low
        assert max(map(sum, equal)) > 0.8 * min(low * room.max_model_len, (2048 - 260) * 16), low


def test_a_ladder_has_both_ends_and_a_size_between_any_two():
    assert ladder(1, 100, 4) == [1, 4, 16, 64, 100]
    assert ladder(5, 5, 2) == [5]
    assert ladder(6, 5, 2) == []
    finer = ladder(1, 100, 4, Random(1))
    assert set(finer) > {1, 4, 16, 64, 100}
    assert len(finer) == 9


def test_rungs_are_one_a_step_and_both_ends():
    assert rungs(5, 5, 2, Random(0)) == [5]
    assert rungs(6, 5, 2, Random(0)) == []
    for seed in range(50):
        sizes = rungs(2, 500, 4, Random(seed))
        assert (sizes[0], sizes[-1]) == (2, 500)
        for low, high in ((8, 32), (32, 128), (128, 500)):
            assert sum(low <= size < high for size in sizes) == 1


def test_blocks_that_lie_anywhere_are_all_blocks():
    order = anywhere(500, 3)
    assert sorted(order) == list(range(500))
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 20
    assert order == anywhere(500, 3) != anywhere(500, 4)


# --- order and endings ---


def units_of(names: str, seen: list[str]) -> list[Unit]:
    def run(name: str):
        seen.append(name)
        return [(BatchShape(ord(name), ord(name), (), 1), Spans(), len(seen))]

    return [Unit(lambda name=name: run(name), is_repeated=name.islower()) for name in names]


def measured(names: str, seen: list[str], **options) -> Profiled:
    settings = {"repeats": 3, "max_s": 1e9, "seed": 0, "progress": lambda: None} | options
    return measure(units_of(names, seen), **settings)


def test_every_repeat_has_its_own_order_and_the_first_run_of_a_unit_is_for_nothing():
    seen: list[str] = []
    profiled = measured("abcdefX", seen)
    assert (profiled.num_units, profiled.num_wanted, profiled.ended_by) == (19, 19, None)
    names = [chr(shape.num_decodes) for shape, _, _ in profiled.steps]
    passes = names[:7], names[7:13], names[13:]
    assert [sorted(one) for one in passes] == [sorted("abcdefX"), list("abcdef"), list("abcdef")]
    assert len({tuple(name for name in one if name != "X") for one in passes}) == 3
    assert len(seen) == 19 + 6
    first = seen[: 7 + 6]
    assert [name for index, name in enumerate(first) if name != "X" and name in first[:index]] == [
        name for name in names[:7] if name != "X"
    ]


def test_an_interrupt_and_the_time_end_it_with_what_there_is():
    def interrupt():
        if len(seen) > 5:
            raise KeyboardInterrupt

    seen: list[str] = []
    profiled = measured("abcdef", seen, progress=interrupt)
    assert (len(profiled.steps), profiled.num_units) == (3, 3)
    assert profiled.is_interrupted
    assert profiled.ended_by == "it was interrupted"
    profiled = measured("abcdef", [], max_s=-1.0)
    assert (profiled.steps, profiled.is_interrupted, profiled.ended_by) == ([], False, "its -1 s were over")


def test_a_request_of_the_grid_has_tokens_of_the_vocabulary():
    device = Device()
    bench = bench_of(ROOM, device)._replace(vocab_size=3)
    seen: list[array[int]] = []
    kept = bench.backend.start
    device.start = lambda plan: (seen.extend(row.tokens for row in plan.scheduled), kept(plan))[1]  # type: ignore[method-assign]
    run_episode(bench, Episode((9, 9), 2, batches=((PrefillChunk(0, 40),),)), 1)
    assert {token for tokens in seen for token in tokens} == {0, 1, 2}


def test_an_episode_that_does_not_fit_is_left_out():
    assert Episode((100,) * 6).fits(ROOM)
    assert not Episode((100,) * 6).fits(ROOM._replace(num_gpu_blocks=150))
    assert not Episode((197,)).fits(ROOM)
    assert not Episode((8,) * 10, batches=((PrefillChunk(0, 4),) * 3,)).fits(ROOM)
    assert Episode((5,)).fits(ROOM)
