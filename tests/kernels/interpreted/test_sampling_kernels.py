"""Draws by kernels, in the interpreter: against a float64 reference, and what the engine draws without them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from real.kernels import race
from real.kernels.race import draw_tokens
from real.sampling import noise
from real.sampling.inputs import Source, sample_inputs
from real.sampling.sampler import _draw_by_kernels, choose
from testbed.core.plan import ScheduledSequence
from testbed.core.request import SamplingParams

SEEDS = st.integers(0, 2**31)
ALL = 2.0  # a top-p that keeps all


@pytest.fixture(autouse=True, scope="module")
def small_parts():
    """So that a small vocabulary has several, and the last is not whole."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PART": 32, "BLOCK": 16, "FILTER_BLOCK": 64}.items():
            patch.setattr(race, name, value)
        yield


def exponentials(key: int, vocab_size: int) -> np.ndarray:
    """E of each token, float64: splitmix64 in Python's integers."""
    found = []
    for token in range(vocab_size):
        state = (key + (token + 1) * noise.GOLDEN) & noise.MASK
        state = ((state ^ (state >> 30)) * noise.MULTIPLIERS[0]) & noise.MASK
        state = ((state ^ (state >> 27)) * noise.MULTIPLIERS[1]) & noise.MASK
        state ^= state >> 31
        uniform = float(np.float32((state >> 24) + 1)) * 2.0**-40  # a number of 24 bits
        found.append(-math.log1p(-min(uniform, 1 - 2.0**-24)))
    return np.array(found)


def kept(logits: np.ndarray, temperature: float, min_p: float, top_k: int, top_p: float) -> tuple[np.ndarray, float]:
    """Scaled logits, -inf for what a filter leaves out, float64; and how near the nearest was to the other side."""
    x = (logits - logits.max()) / temperature
    margin = math.inf
    if min_p > 0:
        margin = float(np.abs(x - math.log(min_p)).min())
        x = np.where(x >= math.log(min_p), x, -np.inf)
    if top_k < len(x):
        x = np.where(x >= np.sort(x)[-top_k], x, -np.inf)
    if top_p < 1:
        weights = np.exp(x)
        for value in np.unique(x[x > -np.inf]):
            share = weights[x > value].sum() / weights.sum()
            margin = min(margin, abs(share - top_p))
            if share >= top_p:
                x = np.where(x == value, -np.inf, x)
    return x, margin


@triton.jit
def noise_kernel(out, keys, tokens):
    index = tl.arange(0, 128)
    tl.store(out + index, race.log_exponential(tl.load(keys + index), tl.load(tokens + index)))


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_noise_is_right_to_its_last_digits_where_races_are_won(seed):
    """Of the smallest, the largest and some more of many E."""
    key = int(np.random.default_rng(seed).integers(-(2**63), 2**63))
    expected = exponentials(key, 5000)
    order = np.argsort(expected)
    tokens = np.concatenate([order[:96], order[-32:]]).astype(np.int32)
    out = torch.zeros(128)
    noise_kernel[(1,)](out, torch.full((128,), key), torch.from_numpy(tokens))
    np.testing.assert_allclose(out.double(), np.log(expected[tokens]), atol=5e-7, rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    vocab_size=st.sampled_from([1, 2, 15, 64, 100, 257]), temperature=st.sampled_from([0.25, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]), top_k=st.sampled_from([1, 2, 7, 50, 1000]),
    top_p=st.sampled_from([ALL, 0.99, 0.7, 0.2, 1e-6]), grid=st.sampled_from([0.0, 0.5, 2.0]),
    forbidden=st.sampled_from([0.0, 0.3]), seed=SEEDS,
)  # fmt: skip
def test_what_filters_keep(vocab_size, temperature, min_p, top_k, top_p, grid, forbidden, seed):
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, (3, vocab_size), grid, forbidden)
    top_k = min(top_k, vocab_size)
    rows, temperatures = torch.tensor([0, 2]), torch.full((2,), temperature)
    least = race.least_logits(
        torch.from_numpy(logits), rows, temperatures, limits_of(2, min_p, top_k, top_p),
        race.largest_logits(torch.from_numpy(logits), rows),
    )  # fmt: skip
    for row, found in zip(logits[[0, 2]], least.tolist(), strict=True):
        x, margin = kept(row.astype(np.float64), temperature, min_p, top_k, top_p)
        if margin > 1e-5:
            scaled = (row - row.max()) / np.float32(temperature)
            assert ((scaled >= found) & np.isfinite(scaled)).tolist() == np.isfinite(x).tolist()


def random_logits(rng: np.random.Generator, shape: tuple[int, int], grid: float, forbidden: float) -> np.ndarray:
    """Equal ones among them where there is a grid, and a share of -inf."""
    logits = (rng.standard_normal(shape) * 3).astype(np.float32)
    if grid:
        logits = np.round(logits / grid) * np.float32(grid)
    logits[:, 1:][rng.random((shape[0], shape[1] - 1)) < forbidden] = -np.inf
    return logits


def limits_of(num: int, min_p: float, top_k: int, top_p: float) -> tuple[torch.Tensor, ...]:
    log_min_p = math.log(min_p) if min_p else -math.inf
    values = ((log_min_p, torch.float32), (top_k, torch.int64), (top_p, torch.float32))
    return tuple(torch.full((num,), value, dtype=dtype) for value, dtype in values)


@settings(max_examples=20, deadline=None)
@given(
    num_draws=st.integers(1, 4), vocab_size=st.sampled_from([1, 2, 15, 32, 33, 100, 257]),
    temperature=st.sampled_from([1e-35, 0.2, 1.0, 3.0]), min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    top_k=st.sampled_from([1, 2, 7, 50, 1000]), top_p=st.sampled_from([ALL, 0.99, 0.7, 0.2, 1e-6]),
    grid=st.sampled_from([0.0, 0.5]), forbidden=st.sampled_from([0.0, 0.3]), seed=SEEDS,
)  # fmt: skip
def test_draws(num_draws, vocab_size, temperature, min_p, top_k, top_p, grid, forbidden, seed):
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, (num_draws + 1, vocab_size), grid, forbidden)
    rows = rng.integers(0, num_draws + 1, num_draws)
    keys = rng.integers(-(2**63), 2**63, num_draws)
    targets = rng.permutation(num_draws + 2)[:num_draws]
    token_ids = torch.full((num_draws + 2,), -5)
    top_k = min(top_k, vocab_size)
    limits = limits_of(num_draws, min_p, top_k, top_p)
    is_filtered = min_p > 0 or top_k < vocab_size or top_p < 1
    draw_tokens(
        token_ids, torch.from_numpy(targets), torch.from_numpy(logits), torch.from_numpy(rows),
        torch.full((num_draws,), temperature), torch.from_numpy(keys), limits if is_filtered else None,
    )  # fmt: skip
    for draw in range(num_draws):
        x, margin = kept(logits[rows[draw]].astype(np.float64), max(temperature, 1e-30), min_p, top_k, top_p)
        with np.errstate(divide="ignore"):
            scores = x - np.log(exponentials(int(keys[draw]), vocab_size))
        found = int(token_ids[targets[draw]])
        if margin > 1e-5 * max(1.0, 1 / temperature if min_p == 1.0 else 1.0):
            assert np.isfinite(x[found]), "a token that is left out was drawn"
            assert scores[found] >= scores.max() - 1e-4 * max(1.0, abs(scores.max()))
    others = np.setdiff1d(np.arange(num_draws + 2), targets)
    assert token_ids[others].tolist() == [-5, -5]


def test_groups_of_all_kinds_draw_what_they_draw_without_kernels():
    rng = torch.Generator().manual_seed(5)
    params = [
        SamplingParams(temperature=0.9, n=3, seed=3), SamplingParams(temperature=1.1, top_k=5, top_p=0.8, min_p=0.01),
        SamplingParams(temperature=0.7, top_p=0.5, repetition_penalty=1.3, presence_penalty=0.2),
        SamplingParams(temperature=1.0, logit_bias=((7, 30.0), (9, 31.0))), SamplingParams(temperature=1.0),
        SamplingParams(), SamplingParams(frequency_penalty=1.0),
    ]  # fmt: skip
    logits = torch.randn(21, 90, generator=rng) * 2
    known = [1, 2, 3, 3, 3]
    rows = [
        ScheduledSequence(i, 4, 1, [3], True, False, [0], params[i % 7], 3 if i % 7 == 0 else 1, i, 2, known)
        for i in range(21)
    ]
    inputs = sample_inputs(rows, Source(90, 5))
    expected = choose(logits, inputs)
    found = expected.clone()
    for group in inputs.groups:
        found[group.targets] = -1
        _draw_by_kernels(found, logits, group)
    assert found.tolist() == expected.tolist()
