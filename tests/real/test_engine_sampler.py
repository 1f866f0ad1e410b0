"""What is drawn: the right distribution, and the same token whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare, kstest

from real.sampler import log_exponential, mix, sample, sampling_inputs, signed
from testbed.request import SamplingParams
from tests.real.engine_helpers import row


def draws(logits: torch.Tensor, temperature: float, num_draws: int, seed: int | None, seq_id: int = 0) -> torch.Tensor:
    """One draw at each of `num_draws` positions from the same logits [vocab]."""
    sampling = SamplingParams(temperature=temperature, seed=seed)
    rows = [row(seq_id, [0] * (p + 1), [0], start=p, sampling=sampling) for p in range(num_draws)]
    return sample(logits.repeat(num_draws, 1), sampling_inputs(rows, run_seed=5))


@pytest.mark.parametrize(("temperature", "seed"), [(1.0, 0), (0.5, 123), (2.0, None)])
def test_draws_follow_the_softmax_at_the_temperature(temperature, seed):
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 1.5, -0.5, 0.2])
    num_draws = 4000
    counts = torch.bincount(draws(logits, temperature, num_draws, seed), minlength=8)
    expected = torch.softmax(logits.double() / temperature, -1) * num_draws
    assert chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-3


def test_the_noise_is_exponential_over_a_large_vocabulary():
    noise = log_exponential(torch.tensor([signed(mix(1, 2, 3)), 0]), 100_000).exp()
    for values in noise:
        assert kstest(values.numpy(), "expon").pvalue > 1e-3
    assert abs(torch.corrcoef(noise)[0, 1]) < 0.02


def test_draws_of_different_requests_and_neighbouring_seeds_are_independent():
    logits = torch.zeros(16)
    streams = torch.stack([draws(logits, 1.0, 1000, seed) for seed in (0, 1, 2)])
    unseeded = torch.stack([draws(logits, 1.0, 1000, None, seq_id) for seq_id in (0, 1, 2)])
    for one in range(6):
        for other in range(one):
            same = (torch.cat([streams, unseeded])[one] == torch.cat([streams, unseeded])[other]).float().mean()
            assert 0.02 < same < 0.11  # 1/16 would be chance


def test_a_draw_does_not_depend_on_the_rest_of_the_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    sampling = [
        SamplingParams(temperature=t, seed=s) for t, s in [(1, 4), (0, None), (0.7, None), (1, 5), (0, 1), (2, 6)]
    ]
    rows = [row(i, [1] * (5 + i), [0], sampling=params) for i, params in enumerate(sampling)]
    together = sample(logits, sampling_inputs(rows, 9))
    order = [4, 2, 5, 0]
    shuffled = sample(logits[order], sampling_inputs([rows[i] for i in order], 9))
    alone = [sample(logits[i : i + 1], sampling_inputs([rows[i]], 9)).item() for i in range(6)]
    assert together.tolist() == alone
    assert shuffled.tolist() == [alone[i] for i in order]


def test_a_seeded_request_draws_the_same_in_every_run_and_an_unseeded_one_with_the_run_seed():
    logits = torch.zeros(1, 1000)
    seeded = row(3, [1] * 5, [0], sampling=SamplingParams(temperature=1.0, seed=8))
    elsewhere = seeded._replace(seq_id=77)
    unseeded = row(3, [1] * 5, [0], sampling=SamplingParams(temperature=1.0))

    def drawn(line, run_seed):
        return sample(logits, sampling_inputs([line], run_seed)).item()

    assert drawn(seeded, 0) == drawn(elsewhere, 1)
    assert drawn(unseeded, 0) == drawn(unseeded, 0) != drawn(unseeded, 1)


def test_chunking_does_not_change_the_draw():
    logits = torch.zeros(1, 1000)
    sampling = SamplingParams(temperature=1.0, seed=8)
    whole, last = row(0, [1] * 9, [0], sampling=sampling), row(0, [1] * 9, [0], start=6, sampling=sampling)
    assert sample(logits, sampling_inputs([whole], 0)) == sample(logits, sampling_inputs([last], 0))


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 5e-324])
def test_a_vanishing_temperature_is_greedy(temperature):
    logits = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 50
    assert draws(logits, temperature, 20, 0).unique().tolist() == [int(logits.argmax())]


def test_zero_temperature_is_greedy_and_needs_no_noise():
    rows = [row(0, [1, 2], [0])]
    assert sampling_inputs(rows, 0) is None
    assert sample(torch.tensor([[0.1, 3.0, 2.0]]), None).tolist() == [1]
