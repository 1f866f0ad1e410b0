"""The calibrated model: found again from its own prices, near the roofline's, honest about what it has not seen."""

import json
import random
from collections import deque
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from sim.cost.calibrated import CalibratedCost, Calibration, Coefficients, Quality, curve_at
from sim.cost.calibration import calibrate
from sim.cost.calibration_file import load_calibration, save_calibration
from sim.cost.config import CalibratedConfig, LinearConfig, RooflineConfig
from sim.cost.linear import LinearCost
from sim.cost.profiled_range import RangeWatch, outside, profiled_ranges
from sim.cost.roofline import RooflineCost
from testbed.core.commands import StepView
from testbed.core.outcome import Spans, StepResult
from testbed.core.plan import BatchPlan, BatchShape, PrefillChunk
from testbed.errors import ConfigError, ProfileError
from testbed.made_rows import MadeRows
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec
from testbed.specs.profiles import MeasuredStep, Profile, number_repeats
from tests.cost.profiling import MODEL, grid, manifest, measured
from tests.cost.shapes import shapes

KNOWN = Calibration(
    manifest(),
    decode_curve=((1, 2e6), (32, 2.1e6), (256, 5e6)),
    prefill_curve=((16, 3e6), (2700, 60e6)),
    coefficients=Coefficients(
        50.0, 7.0, 0.0, 80.0, 9.0, 4e4, 90.0, 1.5, 0.8, 0.0, 2e4, 4e4, 3e4, 1500.0, 9e4, 800.0, 3e5, 4e3, 5e4, 120.0,
        700.0,
    ),
    ranges=profiled_ranges(grid()),
    quality={"all": Quality(1, 1, 0.0, 0.0, 0.0, None)},
    num_folds=5,
    repeated_saving=0.4,
)  # fmt: skip
ROOFLINE = RooflineCost(MODEL, DeviceSpec("h100"))


@given(shapes)
def test_prices_are_positive_integers_and_the_breakdown_adds_up(shape):
    cost = CalibratedCost(KNOWN)
    spans = cost.price(shape)
    assert all(type(part) is int and part >= 0 for part in spans)
    assert spans.total_ns == sum(cost.breakdown(shape).values()) >= 1
    assert cost.price(shape) == spans


def test_the_price_is_the_sum_of_its_parts():
    shape = BatchShape(2, 30, (PrefillChunk(10, 14), PrefillChunk(0, 3)), 4, 1, 2, 3, 21, 5)
    own_pairs = 14 * 15 // 2 + 6
    pairs = 14 * 10 + own_pairs
    dense = 3e6 + (60e6 - 3e6) * (19 - 16) / (2700 - 16)
    assert CalibratedCost(KNOWN).price(shape) == Spans(
        0,
        round(3e5 + 4 * 4e3 + 5e4 + 17 * 120 + 6 * 700),
        round(2 * 2e4 + 1 * 4e4 + 2 * 3e4) + 3 * 1500,
        round(dense)
        + 30 * 80
        + (2 * 21 - 30) * 9
        - round(5 * 0.4 * 80)
        + round(2 * 4e4 + (24 + 3) * 90 + pairs * 1.5 + own_pairs * 0.8 + 0.1),  # a half goes up
        round(9e4 + 4 * 800),
    )
    alone = BatchShape(2, 30, (), 2, longest_decode_context=21, repeated_context_tokens=8)
    assert (
        CalibratedCost(KNOWN).breakdown(alone)["attention_decode"] == 30 * 50 + (2 * 21 - 30) * 7 - 8 * 20
    )  # 0.4 of 50


def test_curves_are_level_before_and_go_on_after_what_was_measured():
    curve = ((4, 10.0), (8, 20.0), (16, 20.0))
    assert [curve_at(curve, n) for n in (1, 4, 6, 8, 12, 16)] == [10, 10, 15, 20, 20, 20]
    assert curve_at(curve, 28) == 20 + 10 * 12 / 12  # as from 4 on, the last place where it rose
    assert curve_at(((4, 10.0),), 99) == 10
    assert curve_at(((4, 10.0), (5, 10.0)), 99) == 10


def test_a_fit_finds_known_prices_again():
    fit = calibrate(Profile(manifest(), measured(CalibratedCost(KNOWN), grid())))
    assert fit.quality["all"].p90 < 0.02
    rows = [shape.num_tokens for shape in grid() if shape.prefills]  # of as many different shapes
    for low, high in pairwise(num for num, _ in fit.prefill_curve):  # a twelfth of the shapes, or twice the rows
        assert (num := sum(low < num <= high for num in rows)) >= 4
        assert 12 * num >= len(rows) or high >= 2 * low
    for shape in grid(seed=11):
        assert CalibratedCost(fit).price(shape).total_ns == pytest.approx(
            CalibratedCost(KNOWN).price(shape).total_ns, rel=0.05
        )


def test_the_curve_of_experts_is_found_though_most_steps_are_small():
    """Of 128 experts 8 are chosen for each token: ever fewer weights that one more row reads. A profile has mostly
    small steps."""
    draw = random.Random(5)
    touched = {num: 128 * (1 - (1 - 8 / 128) ** num) for num in range(1, 257)}
    numbers = [draw.randrange(1, 9) for _ in range(1000)] + [num for num in (16, 32, 64, 128, 256) for _ in range(5)]
    steps = []
    for num in numbers:
        context = num * draw.randrange(10, 3000)
        spans = Spans(0, 300_000, 0, round(2e6 + 1e5 * touched[num] + 25 * context), 20_000)
        steps.append((BatchShape(num, context, (), num), spans, sum(spans)))
    model = CalibratedCost(calibrate(Profile(manifest(), number_repeats(steps))))
    for num in (4, 16, 32, 64, 128, 256):
        wanted = 2e6 + 1e5 * touched[num] + 25 * num * 500
        assert model.price(BatchShape(num, num * 500, (), num)).forward_ns == pytest.approx(wanted, rel=0.02)


def test_a_position_that_several_decodes_read_is_found_to_be_cheaper():
    """From steps that have such positions; without them nothing is saved."""
    shared = [one.replace(repeated_context_tokens=one.decode_context_tokens // 2) for one in grid() if not one.prefills]
    for saving in (0.0, 0.4, 1.0):
        steps = measured(CalibratedCost(replace(KNOWN, repeated_saving=saving)), grid() + shared)
        assert calibrate(Profile(manifest(), steps)).repeated_saving == pytest.approx(saving, abs=0.02)
    found = calibrate(Profile(manifest(), measured(CalibratedCost(KNOWN), grid())))
    assert found.repeated_saving == 0
    assert found.scaled(2.0, 3.0).repeated_saving == 0
    assert KNOWN.scaled(2.0, 3.0).repeated_saving == 0.4  # a share, not a time


def test_what_a_kernel_does_of_the_mask_is_told_apart_from_what_lies_before():
    """Some compute all (query, key) pairs of a prompt's own tokens, and some only those that count."""
    known = replace(KNOWN, coefficients=replace(KNOWN.coefficients, prefill_pair=20.0, prefill_own_pair=40.0))
    found = calibrate(Profile(manifest(), measured(CalibratedCost(known), grid()))).coefficients
    assert found.prefill_pair == pytest.approx(20, rel=0.05)
    assert found.prefill_own_pair == pytest.approx(40, rel=0.1)


def test_what_a_block_copy_costs_is_found_again_whoever_priced_it():
    """Copies are swap_ns, in prices as in profiles: a fit looks for them there."""
    linear = LinearCost(LinearConfig())
    each_ns = ROOFLINE.price(BatchShape(0, 0, (), 0, 0, 0, 1_000_000)).swap_ns / 1e6
    for truth, expected_ns in ((ROOFLINE, each_ns), (linear, 1500.0), (CalibratedCost(KNOWN), 1500.0)):
        fit = calibrate(Profile(manifest(), measured(truth, grid())))
        assert fit.coefficients.copied_block == pytest.approx(expected_ns, rel=0.05)


@pytest.mark.parametrize("max_captured_tokens", [0, 500, 2048])
def test_a_fit_to_a_roofline_predicts_shapes_that_it_has_not_seen(max_captured_tokens):
    """Also where steps are padded: the profile says how far the engine captures them."""
    spec = ModelSpec("8b", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32)
    truth = RooflineCost(spec, DeviceSpec("h100"), RooflineConfig(max_captured_tokens=max_captured_tokens))
    said = manifest(captured_decodes=512, captured_tokens=max_captured_tokens)
    profile = Profile(said, measured(truth, grid()))
    fit = calibrate(profile)
    assert fit.quality["all"].p90 < 0.02
    assert set(fit.quality) == {"all", "decode", "prefill", "mixed"}
    errors = sorted(
        abs(CalibratedCost(fit).price(shape).total_ns / truth.price(shape).total_ns - 1) for shape in grid(seed=8)
    )
    assert errors[len(errors) // 2] < 0.01
    assert errors[int(0.9 * len(errors))] < 0.03
    unsaid = calibrate(Profile(manifest(), profile.steps))
    assert 2 * fit.quality["all"].p90 < unsaid.quality["all"].p90 or not max_captured_tokens


def test_the_error_of_a_noisy_fit_is_that_of_the_noise_and_it_is_not_biased():
    fit = calibrate(Profile(manifest(), measured(ROOFLINE, grid(), noise=0.1, repeats=5)))
    assert fit.quality["all"].median == pytest.approx(0.1 * 0.6745, rel=0.35)
    assert fit.quality["all"].noise == pytest.approx(0.1 * 0.6745, rel=0.3)
    assert abs(fit.quality["all"].bias) < 0.05
    assert fit == calibrate(Profile(manifest(), measured(ROOFLINE, grid(), noise=0.1, repeats=5)))


def test_repeats_do_not_leak_from_the_fit_into_its_error():
    """Each shape has a time of its own that nothing explains: the error must show it, however often it is repeated."""
    odd = [
        MeasuredStep(step.shape, Spans(forward_ns=ns), ns, repeat)
        for index, step in enumerate(measured(ROOFLINE, grid()))
        for repeat in range(8)
        for ns in [step.total_ns * (1 + index % 2)]
    ]
    assert calibrate(Profile(manifest(), odd)).quality["all"].median > 0.2


def test_what_no_span_covers_is_the_hosts_and_overlap_is_taken_from_it():
    steps = [
        MeasuredStep(BatchShape(n, n * each, (), n), Spans(1000, 2000, 50, 10_000, 500), total, 0)
        for n in range(1, 11) for each in (100, 200, 300) for total in (20_000,)
    ]  # fmt: skip
    spans = CalibratedCost(calibrate(Profile(manifest(), steps))).price(BatchShape(5, 1000, (), 5))
    assert spans.values() == pytest.approx((0, 9_500, 0, 10_000, 500), abs=2)
    hidden = [step._replace(total_ns=9_000) for step in steps]
    spans = CalibratedCost(calibrate(Profile(manifest(), hidden))).price(BatchShape(5, 1000, (), 5))
    assert sum(spans) == pytest.approx(9_000, abs=3)
    assert spans.prepare_ns == 1


def test_too_few_shapes_are_refused():
    with pytest.raises(ProfileError, match="steps of 5 different shapes; a fit needs at least 20: profile more"):
        calibrate(Profile(manifest(), measured(ROOFLINE, grid()[:5], repeats=10)))


def test_a_region_that_was_never_profiled_is_priced_by_the_other_curve_and_is_outside():
    only_decodes = [shape for shape in grid() if not shape.prefills]
    fit = calibrate(Profile(manifest(), measured(ROOFLINE, only_decodes)))
    assert fit.prefill_curve == fit.decode_curve
    found = outside(fit.ranges, BatchShape(0, 0, (PrefillChunk(0, 64),), 1))
    assert [str(item) for item in found] == ["prefill steps (never profiled)"]


@pytest.mark.parametrize(("num_steps", "num_outside"), [(1, 0), (5, 0), (6, 1), (9, 4)])
@pytest.mark.parametrize("policy", ["warn", "refuse"])
def test_a_run_of_decodes_may_leave_the_range_on_its_way(num_steps, num_outside, policy):
    """Two decodes whose contexts grow from 40 by 2 a step; the profile reaches to 48, their fifth step."""
    watch = RangeWatch(profiled_ranges([BatchShape(2, 30, (), 2), BatchShape(2, 48, (), 2)]), policy)
    steps = [
        StepView(
            BatchPlan(7 + i, BatchShape(2, 40 + 2 * i, (), 2), MadeRows(())), 10 * i, StepResult(10 * (i + 1)),
            bytes(8), [], 2, 0, 0, 0, 0,
        )
        for i in range(num_steps)
    ]  # fmt: skip
    if num_outside and policy == "refuse":
        with pytest.raises(
            ConfigError, match="step 12 leaves the profiled range: decode decode_context_tokens up to 50"
        ):
            deque(map(watch.committed, steps))
        return
    for step in steps:
        watch.committed(step)
    assert (watch.num_steps, watch.num_outside) == (num_steps, num_outside)
    assert ("x outside) in 1 step;" in "".join(watch.notes())) == (num_outside == 1 and policy == "warn")
    assert bool(watch.notes()) == bool(num_outside)


def test_the_range_is_that_of_each_feature():
    ranges = profiled_ranges(grid())
    assert all(not outside(ranges, shape) for shape in grid())
    far = outside(ranges, BatchShape(512, 600_000, (), 512, 0, 0, 128))
    assert [item.feature for item in far] == ["decode num_decodes", "num_blocks_copied"]
    assert str(far[0]) == "decode num_decodes up to 512 (profiled: 1 to 256; 2 x outside)"
    short = outside(ranges, BatchShape(0, 0, (PrefillChunk(0, 4),), 1))
    assert [item.excess for item in short] == [4.0, 4.0]
    more = outside(profiled_ranges([BatchShape(1, 9, (), 1)]), BatchShape(3, 9, (), 3))
    assert [item.excess for item in more] == [3.0]


def test_a_fit_is_saved_and_loaded_exactly(tmp_path):
    fit = calibrate(Profile(manifest(), measured(ROOFLINE, grid(), noise=0.1, repeats=2)))
    save_calibration(fit, tmp_path / "fit.json")
    assert load_calibration(tmp_path / "fit.json") == fit


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (["format"], "x", "is no calibrated cost: its 'format' is 'x'; expected 'testbed calibrated cost 5'; `testbed"),
        (["format"], "testbed calibrated cost 10", r"is no .* cost 5' \(a fit of a newer testbed: update this one, "),
        (["format"], "testbed calibrated cost 4", r"is no .* cost 5' \(an older fit: `testbed calibrate fit <its prof"),
        (["coefficients_ns", "prefill"], -1,
         "coefficients_ns.prefill is -1; expected a number of ns, from 0 to 1,000,000,000,000,000"),
        (["coefficients_ns", "prefill"], "2", "coefficients_ns.prefill is '2'"),
        (["coefficients_ns"], {}, "coefficients_ns must hold exactly decode_context_token, "),
        (["decode_curve"], [], r"decode_curve is \[\]; expected a list of \(rows, ns\)"),
        (["decode_curve", 1], [1, 5], r"decode_curve\[1\] is \[1, 5\]; expected more rows, and no less ns, than \[1, "),
        (["decode_curve", 1], [9], r"decode_curve\[1\] is \[9\]; expected a pair of numbers"),
        (["decode_curve", 1], "9!", r"decode_curve\[1\] is '9!'; expected a pair of numbers"),
        (["coefficients_ns", "host"], 10**400, r"coefficients_ns.host is 1000\d*\.\.\.0*; expected a number of ns"),
        (["coefficients_ns", "host_row"], 1e300, "coefficients_ns.host_row is 1e\\+300; expected a number of ns"),
        (["decode_curve", 2], [10**400, 1e7], r"decode_curve\[2\]\[0\] is 1000.*; expected a whole number, from 0 to "),
        (["manifest", "block_size"], None, "manifest: 'block_size' is None; expected int"),
        (["manifest", "sliding_window"], -5, "manifest: 'sliding_window' is -5; expected from 1 to "),
        (["manifest", "kv_dtype"], "zz", "manifest: 'kv_dtype' is 'zz'; expected one of null, float32, "),
        (["manifest", "model", "name"], 5, "manifest: model.name is 5; expected str"),
        (["manifest", "model", "hidden_size"], True, "manifest: model.hidden_size is True; expected int"),
        (["manifest", "model", "head_dim"], 0, "manifest: model.head_dim is 0; it must be from 1 to "),
        (["num_folds"], "x", "num_folds is 'x'; expected a whole number, from 2 to "),
        (["num_folds"], -5, "num_folds is -5; expected a whole number, from 2 to "),
        (["ranges", "decode", "num_decodes"], [64, 1], r"num_decodes is \[64, 1\]; expected the lowest before the "),
        (["quality", "all", "median"], "abc", "quality.all.median is 'abc'; expected a number from 0 to "),
        (["quality", "all", "p90"], None, "quality.all.p90 is None; expected a number from 0 to "),
        (["quality", "all", "bias"], float("nan"), "quality.all.bias is nan; expected a number from -1 to "),
        (["quality", "all", "num_steps"], 0, "quality.all.num_steps is 0; expected a whole number, from 1 to "),
        (["quality", "x"], {}, "quality is .*; expected an object with 'all' and others of decode, "),
        (["ranges", "decode"], {}, "ranges.decode must hold exactly num_decodes, decode_context_tokens"),
        (["ranges", "decode", "num_decodes"], [1, 2.5], "ranges.decode.num_decodes is 2.5; expected a whole number"),
        (["quality"], {}, "quality is {}; expected an object with 'all'"),
    ],
)  # fmt: skip
def test_a_bad_fit_is_named_by_file_field_and_value(tmp_path, where, value, message):
    save_calibration(KNOWN, tmp_path / "fit.json")
    document = json.loads((tmp_path / "fit.json").read_text())
    place = document
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    (tmp_path / "fit.json").write_text(json.dumps(document))
    with pytest.raises(ProfileError, match=f"cost.path: .*fit.json:? ?(ranges.decode.)?{message}"):
        load_calibration(tmp_path / "fit.json")


def test_no_fit_and_no_json_are_refused(tmp_path):
    (tmp_path / "x.json").write_text("[5]")
    with pytest.raises(ProfileError, match=r"x.json is not a JSON object, but \[5\]; `testbed calibrate fit"):
        load_calibration(tmp_path / "x.json")
    (tmp_path / "x.json").unlink()
    with pytest.raises(ProfileError, match=r"cost.path: no file at .*x.json; `testbed calibrate fit"):
        load_calibration(tmp_path / "x.json")
    for text, reason in (("{", "Expecting"), ("[" * 100_000, "nested too deeply"), ("9" * 5000, "Exceeds the limit")):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ProfileError, match=rf"x.json is not JSON: {reason}"):
            load_calibration(tmp_path / "x.json")


def test_what_is_done_outside_the_range_is_one_of_three():
    with pytest.raises(ConfigError, match=r"cost\.outside is 'panic'; choose one of warn, refuse, allow"):
        CalibratedConfig(path="b", outside="panic")


def test_how_contexts_are_spread_is_told_from_how_long_they_are():
    """An engine that pads every decode to the longest, as attention in plain torch does."""

    class Padding(CalibratedCost):
        def price(self, shape):
            padded = shape.replace(decode_context_tokens=shape.num_decodes * shape.longest_decode_context)
            return super().price(padded)

    draw = random.Random(5)
    spread = []
    for _ in range(150):
        contexts = [draw.randrange(1, 3000) for _ in range(draw.choice((2, 5, 16, 60)))]
        chunks = (PrefillChunk(0, draw.randrange(1, 900)),) if draw.random() < 0.4 else ()
        shape = BatchShape(len(contexts), sum(contexts), chunks, len(contexts), longest_decode_context=max(contexts))
        spread.append(shape)
    skewless = replace(
        KNOWN, coefficients=replace(KNOWN.coefficients, decode_skew_token=0.0, mixed_decode_skew_token=0.0)
    )
    truth = Padding(skewless)
    found = calibrate(Profile(manifest(), measured(truth, grid() + spread)))
    assert found.coefficients.decode_skew_token == pytest.approx(50, rel=0.05)
    assert found.coefficients.mixed_decode_skew_token == pytest.approx(80, rel=0.05)
    assert found.coefficients.mixed_decode_context_token == pytest.approx(80, rel=0.05)
    assert found.quality["all"].p90 < 0.02


def test_a_window_counts_its_own_pairs():
    windowed = replace(KNOWN, manifest=manifest(sliding_window=100))
    long = BatchShape(0, 0, (PrefillChunk(0, 1000),), 1)
    fewer = CalibratedCost(KNOWN).price(long).forward_ns - CalibratedCost(windowed).price(long).forward_ns
    pairs = 1000 * 1001 // 2 - (100 * 101 // 2 + 900 * 100)
    assert fewer == pytest.approx(pairs * (1.5 + 0.8), abs=1)
