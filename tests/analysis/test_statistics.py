"""Statistics against closed forms, published examples and simulated coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from analysis.measures.statistics import (
    ALIKE,
    block_length,
    circular_blocks,
    differences,
    effect_size,
    false_discovery,
    holm,
    mean_t,
    mser5,
    verdict,
    wilson,
)


def paired_t(base, other):
    return mean_t(*differences(np.asarray(base), np.asarray(other)))


def test_paired_t_is_scipys():
    rng = np.random.default_rng(1)
    base = rng.normal(10, 2, 9)
    other = base + rng.normal(0.5, 0.3, 9)
    mine, theirs = mean_t(other - base), stats.ttest_rel(other, base)
    assert mine.p_value == pytest.approx(theirs.pvalue)
    assert (mine.low, mine.high) == pytest.approx(tuple(theirs.confidence_interval()))


def test_no_interval_leaves_what_differences_can_be():
    free, bounded = (mean_t(np.array([0.1, 0.9]), limit=limit) for limit in (np.inf, 1.0))
    assert free.low < -1 < 1 < free.high
    assert (bounded.low, bounded.high, bounded.p_value) == (-1, 1, free.p_value)
    inside = np.array([0.1, 0.2, 0.15])
    assert mean_t(inside, limit=1.0) == mean_t(inside)
    assert verdict(mean_t(np.array([0.5]), limit=1.0)) == "unknown", "one replicate has no interval"


def test_log_ratio_says_percent():
    estimate = paired_t([1.0, 2.0, 4.0], [1.1, 2.2, 4.4])
    assert estimate.percent()[0] == pytest.approx(10.0)
    with pytest.raises(ValueError, match="log_ratio"):
        paired_t([1.0, 2.0], [0.0, 3.0]).percent()


def test_what_falls_to_zero_is_a_difference():
    estimate = paired_t([3.0, 3.2, 3.4], [0.0, 0.1, 0.0])
    assert estimate.scale == "difference"
    assert estimate.value == pytest.approx(-9.5 / 3)
    assert verdict(estimate) == "lower"
    assert verdict(paired_t([0.0, 0.0], [0.0, 0.0])) == "identical"


@pytest.mark.parametrize("num", range(2, 9))
def test_a_difference_without_spread_counts_from_as_many_replicates_on_as_chance_makes_rare(num):
    """All of `num` signs alike by chance: 2^(1 - num), below 5 % from six on."""
    estimate = mean_t(np.full(num, 0.1), "log_ratio")
    assert estimate.method == ALIKE
    is_rare = 2.0 ** (1 - num) < 0.05
    assert verdict(estimate, 0.02, estimate.p_value) == ("higher" if is_rare else "unknown")
    assert verdict(estimate, 0.02, 0.0625) == "unknown", "corrected; there is no noise that it is inside of"
    assert estimate.p_value == (2.0 ** (1 - num) if is_rare else None)
    assert is_rare == (num >= 6)


@pytest.mark.parametrize("num", [4, 16])
@pytest.mark.parametrize("kept", [None, 0.3, 0.8])
def test_intervals_over_draws_from_one_record_hold_what_other_records_give(num, kept):
    """Of means of normal variables whose mean is 0. kept: the share of a record in a draw; None: with replacement."""
    rng, size, correlation = np.random.default_rng(3), 300, 0.5 if kept is None else kept
    held = {0.0: 0, correlation: 0}
    for _ in range(500):
        record = rng.normal(size=size)
        draws = [
            rng.choice(record, size if kept is None else round(kept * size), replace=kept is None) for _ in range(num)
        ]
        for each in held:
            estimate = mean_t(np.array([draw.mean() for draw in draws]), correlation=each)
            held[each] += estimate.low <= 0 <= estimate.high
    assert held[correlation] / 500 == pytest.approx(0.95, abs=0.03)
    assert held[0.0] / 500 < 0.9


def test_equal_differences_of_draws_from_one_record_are_no_sign_test():
    assert mean_t(np.full(8, 0.1), correlation=0.5).p_value is None
    assert verdict(mean_t(np.zeros(8), correlation=0.5)) == "identical"


def test_a_bootstrap_is_deterministic_in_its_seed():
    series = np.sin(np.arange(200.0))
    assert circular_blocks(series, seed=1) == circular_blocks(series, seed=1)


def test_a_bootstrap_of_independent_values_has_the_normal_interval_to_both_sides():
    series = np.random.default_rng(3).normal(size=400)
    estimate = circular_blocks(series, num_resamples=4000)
    half = 1.96 * series.std() / math.sqrt(400)
    assert (estimate.value - estimate.low, estimate.high - estimate.value) == pytest.approx((half, half), rel=0.07)


def test_circular_blocks_are_wider_than_naive_under_autocorrelation():
    rng, hits, num = np.random.default_rng(7), 0, 400
    for trial in range(60):
        noise = rng.normal(size=num)
        series = np.empty(num)
        series[0] = noise[0] / 0.8
        for i in range(1, num):
            series[i] = 0.6 * series[i - 1] + noise[i]
        estimate = circular_blocks(series, num_resamples=200, seed=trial)
        hits += estimate.low <= 0 <= estimate.high
        assert estimate.high - estimate.low > 2 * 1.96 * series.std() / math.sqrt(num)
    assert hits / 60 >= 0.85
    assert block_length(np.zeros(50)) == 1
    assert (
        block_length([*[1] * 4, *[-1] * 4] * 25) == 9
    )  # rho = 101 / 200: (sqrt(6) 0.505 / 0.745)^(2/3) 200^(1/3) = 8.2
    assert block_length(np.arange(40)) == 10, "at most a quarter"


def test_the_end_of_a_series_is_drawn_as_often_as_its_middle():
    """Of blocks that end with the series the end is drawn least, where a queue is: intervals were too low."""
    growing = np.linspace(0.1, 10.0, 200) ** 8
    at_the_end, in_the_middle = circular_blocks(growing), circular_blocks(np.roll(growing, 100))
    assert at_the_end.low < at_the_end.value < at_the_end.high
    assert at_the_end.high == pytest.approx(in_the_middle.high, rel=0.1)


def test_circular_blocks_keep_pairs_together():
    base = np.random.default_rng(0).exponential(1.0, 100)
    pairs = np.column_stack((base, base + 0.5))
    estimate = circular_blocks(pairs, lambda rows: float(rows[:, 1].mean() - rows[:, 0].mean()))
    assert (estimate.low, estimate.high) == pytest.approx((0.5, 0.5))


def test_one_replicate_or_too_few_requests_give_no_interval():
    for estimate in (paired_t([1.0], [2.0]), circular_blocks([1.0, 2.0])):
        assert math.isinf(estimate.low)
        assert math.isinf(estimate.high)
        assert verdict(estimate) == "unknown"


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_false_discovery_by_hand():
    assert false_discovery([0.01, 0.04, 0.03, 0.9]) == pytest.approx([0.04, 0.16 / 3, 0.16 / 3, 0.9])
    assert false_discovery([0.04, 0.03]) == pytest.approx([0.04, 0.04]), "both or none"
    assert (false_discovery([0.03]), false_discovery([])) == ([0.03], [])


def test_wilson_by_hand_and_at_the_ends():
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe (1998), table I
    assert wilson(0, 10)[0] == 0
    assert wilson(10, 10)[1] == 1
    with pytest.raises(ValueError, match="successes"):
        wilson(3, 2)


def test_mser_finds_the_end_of_a_transient():
    rng = np.random.default_rng(0)
    series = np.concatenate((np.linspace(20, 0, 100), np.zeros(600))) + rng.normal(0, 1, 700)
    assert 70 <= mser5(series) <= 130
    assert mser5(rng.normal(size=10)) == 0
    for offset in (0.0, 100.0):  # the squared standard error of what is kept, over means of five
        noise = rng.normal(offset, 1, 60)
        means = noise.reshape(-1, 5).mean(axis=1)
        assert mser5(noise) == 5 * min(range(7), key=lambda cut: float(means[cut:].var() / (12 - cut)))


def test_effect_sizes():
    assert effect_size(np.ones(2)) is None  # no spread
    diff = np.array([1.0, 2.0, 3.0, 4.0])
    assert effect_size(diff) == pytest.approx((1 - 3 / 11) * 2.5 / diff.std(ddof=1))


def test_verdicts():
    noisy, clear = mean_t(np.array([0.5, -0.6, 0.1])), mean_t(np.array([1.0, 1.1, 1.0]))
    assert verdict(noisy) == "inside the noise"
    assert verdict(noisy, margin=5.0) == "equivalent"
    assert verdict(clear) == "higher"
    assert verdict(clear, p_value=0.2) == "undecided"
    assert verdict(paired_t([1.0, 2.0], [1.0, 2.0])) == "identical"
