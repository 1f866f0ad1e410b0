"""What is drawn: the right distribution, and the same token whatever else is in the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare, kstest

from real.sampling.inputs import Source, sample_inputs
from real.sampling.noise import GOLDEN, MASK, SEEDED, UNSEEDED, draw_keys, log_exponential, mix, signed, streams_of
from real.sampling.sampler import choose
from testbed.core.request import SamplingParams
from tests.real.engine_helpers import drawn_by_row, row


def sample(logits: torch.Tensor, rows, run_seed: int = 5) -> torch.Tensor:
    """What the rows draw from their logits [num_rows, vocab]: ids, the first ones and behind them the further ones."""
    return choose(logits, sample_inputs(rows, Source(logits.shape[-1], run_seed)))


def draws(logits: torch.Tensor, temperature: float, num_draws: int, seed: int | None, seq_id: int = 0) -> torch.Tensor:
    """One draw at each of `num_draws` positions from the same logits [vocab]."""
    sampling = SamplingParams(temperature=temperature, seed=seed)
    rows = [row(seq_id, [0] * (p + 1), [0], start=p, sampling=sampling) for p in range(num_draws)]
    return sample(logits.repeat(num_draws, 1), rows)


def test_the_noise_is_exponential_over_a_large_vocabulary():
    noise = log_exponential(torch.tensor([signed(mix(1, 2, 3)), 0]), 100_000).exp()
    for values in noise:
        assert kstest(values.numpy(), "expon").pvalue > 1e-3
    assert abs(torch.corrcoef(noise)[0, 1]) < 0.02


def test_the_noise_is_a_hash_of_key_and_token():
    keys, vocab_size = [mix(1, 2, 3), 0, MASK], 50
    noise = log_exponential(torch.tensor([signed(key) for key in keys]), vocab_size)
    for key, found in zip(keys, noise.tolist(), strict=True):
        for token, value in enumerate(found):
            state = mix((key + token * GOLDEN) & MASK)  # splitmix64 from the key on: its output number token + 1
            uniform = ((state >> 24) + 1) / 2**40
            assert value == pytest.approx(math.log(-math.log1p(-uniform)), abs=1e-4)


def test_draws_of_different_requests_and_neighbouring_seeds_are_independent():
    logits = torch.zeros(16)
    streams = torch.stack([draws(logits, 1.0, 1000, seed) for seed in (0, 1, 2)])
    unseeded = torch.stack([draws(logits, 1.0, 1000, None, seq_id) for seq_id in (0, 1, 2)])
    for one in range(6):
        for other in range(one):
            same = (torch.cat([streams, unseeded])[one] == torch.cat([streams, unseeded])[other]).float().mean()
            assert 0.02 < same < 0.11  # 1/16 would be chance


def test_a_seeded_request_draws_the_same_in_every_run_and_an_unseeded_one_with_the_run_seed():
    logits = torch.zeros(1, 1000)
    seeded = row(3, [1] * 5, [0], sampling=SamplingParams(temperature=1.0, seed=8))
    elsewhere = seeded.replace(seq_id=77)
    unseeded = row(3, [1] * 5, [0], sampling=SamplingParams(temperature=1.0))

    def drawn(line, run_seed):
        return sample(logits, [line], run_seed).item()

    assert drawn(seeded, 0) == drawn(elsewhere, 1)
    assert drawn(unseeded, 0) == drawn(unseeded, 0) != drawn(unseeded, 1)


def test_chunking_does_not_change_the_draw():
    logits = torch.zeros(1, 1000)
    sampling = SamplingParams(temperature=1.0, seed=8)
    whole, last = row(0, [1] * 9, [0], sampling=sampling), row(0, [1] * 9, [0], start=6, sampling=sampling)
    assert sample(logits, [whole], 0) == sample(logits, [last], 0)


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 5e-324])
def test_a_vanishing_temperature_is_greedy(temperature):
    logits = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 50
    assert draws(logits, temperature, 20, 0).unique().tolist() == [int(logits.argmax())]


def test_zero_temperature_is_greedy_and_needs_no_noise():
    rows = [row(0, [1, 2], [0]), row(1, [1, 2], [0], sampling=SamplingParams(top_p=0.5, top_k=2, min_p=0.3))]
    assert sample_inputs(rows, Source(3)).groups == ()
    assert sample(torch.tensor([[0.1, 3.0, 2.0]] * 2), rows).tolist() == [1, 1]


# --- several draws from one row ---


def group_row(seq_id: int, position: int, sampling: SamplingParams, num_samples: int = 1, group_id: int = 0):
    """A row whose next token stands at `position`."""
    line = row(seq_id, [0] * position, [0], start=position - 1, sampling=sampling)
    return line.replace(num_samples=num_samples, group_id=group_id)


def all_draws(logits: torch.Tensor, rows, run_seed: int = 5) -> list[tuple[int, ...]]:
    """The draws of each row, from logits [num_rows, vocab], as the engine makes them."""
    return drawn_by_row(logits, sample_inputs(rows, Source(logits.shape[-1], run_seed)))


@pytest.mark.parametrize(("temperature", "seed"), [(1.0, 0), (0.5, 123), (2.0, None)])
def test_each_of_several_draws_follows_the_softmax_and_no_other_draw(temperature, seed):
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 1.5, -0.5, 0.2])
    num_rows, num_samples = 4000, 4
    sampling = SamplingParams(temperature=temperature, seed=seed, n=num_samples)
    rows = [group_row(0, position, sampling, num_samples) for position in range(1, num_rows + 1)]
    drawn = torch.tensor(all_draws(logits.repeat(num_rows, 1), rows))  # [num_rows, num_samples]
    expected = torch.softmax(logits.double() / temperature, -1) * num_rows
    for index in range(num_samples):
        assert chisquare(torch.bincount(drawn[:, index], minlength=8).numpy(), expected.numpy()).pvalue > 1e-3
        for other in range(index):
            pairs = torch.bincount(drawn[:, index] * 8 + drawn[:, other], minlength=64).reshape(8, 8)
            assert chi2_contingency(pairs.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("seed", [8, None])
def test_a_draw_does_not_depend_on_how_many_there_are(seed):
    logits = torch.zeros(1, 1000)
    by_number = {
        number: all_draws(logits, [group_row(0, 7, SamplingParams(temperature=1.0, seed=seed, n=number), number)])[0]
        for number in (1, 2, 5)
    }
    assert by_number[1] == tuple(draws_at(logits, seed))
    assert by_number[2][:1] == by_number[1]
    assert by_number[5][:2] == by_number[2]
    assert len(set(by_number[5])) == 5


def draws_at(logits: torch.Tensor, seed: int | None) -> list[int]:
    """What a sequence that is no group draws there."""
    return sample(logits, [group_row(0, 7, SamplingParams(temperature=1.0, seed=seed))]).tolist()


def draw_key(line, run_seed: int, index: int = 0) -> int:
    """The key of one draw, written from what it is to depend on."""
    sampling, position = line.sampling, line.start + line.num_tokens
    if sampling.seed is None:
        return signed(mix(UNSEEDED, run_seed, line.seq_id, position, *([index] if index else [])))
    member = index + (line.seq_id - line.group_id if sampling.num_seqs > 1 else 0)
    return signed(mix(SEEDED, sampling.seed, position, *([member] if member else [])))


def test_the_keys_of_first_draws_are_a_contract():
    """Tapes and seeds of earlier versions stay good."""
    unseeded, seeded = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, seed=8, n=2)
    rows = [group_row(3, 7, unseeded), group_row(3, 7, seeded, 2, group_id=3)]
    keys = draw_keys(streams_of(rows, [0, 0], 5), np.array([7, 7]))
    assert keys.tolist() == [signed(mix(UNSEEDED, 5, 3, 7)), signed(mix(SEEDED, 8, 7))]


def test_keys_made_together_are_those_of_each_draw_by_itself():
    rows, indices = [], []
    for number in range(60):
        seed = (None, 0, 7, -3, 2**63, 2**70 + 5)[number % 6]
        sampling = SamplingParams(temperature=1.0, seed=seed, n=1 + number % 3)
        rows.append(group_row(number, 1 + 97 * number, sampling, group_id=number - number % 3))
        indices.append(number % 4)
    keys = [draw_key(line, 5, index) for line, index in zip(rows, indices, strict=True)]
    positions = np.array([line.start + line.num_tokens for line in rows])
    assert draw_keys(streams_of(rows, indices, 5), positions).tolist() == keys
    assert len(set(keys)) > 50


def test_a_batch_may_mix_all_kinds():
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    rows = [
        group_row(0, 4, SamplingParams(temperature=1.0, n=3), 3),
        group_row(1, 4, SamplingParams(n=2), 2),  # greedy
        group_row(2, 4, SamplingParams(temperature=0.7, seed=1)),
        group_row(3, 4, SamplingParams(temperature=1.0, n=4), 4).replace(forced=True),
        group_row(4, 4, SamplingParams(beam_width=6), 6),
    ]
    together = all_draws(logits, rows)
    assert [len(tokens) for tokens in together] == [3, 2, 1, 4, 1]  # a beam's tokens are searched for elsewhere
    assert together[1] == (int(logits[1].argmax()),) * 2
    for number, line in enumerate(rows):
        assert all_draws(logits[number : number + 1], [line]) == [together[number]]


@pytest.mark.parametrize("seed", [8, None])
def test_members_of_a_group_draw_independently_also_after_they_forked(seed):
    """The same logits at the same position: only the member tells them apart."""
    sampling = SamplingParams(temperature=1.0, seed=seed, n=3)
    logits = torch.zeros(1000, 16)
    streams = [
        torch.tensor(all_draws(logits, [group_row(10 + member, p, sampling, group_id=10) for p in range(1, 1001)]))
        for member in range(3)
    ]
    for one in range(3):
        for other in range(one):
            assert 0.02 < (streams[one] == streams[other]).float().mean() < 0.11  # 1/16 would be chance


def test_a_seeded_group_draws_the_same_wherever_its_ids_begin():
    sampling = SamplingParams(temperature=1.0, seed=8, n=3)
    logits = torch.zeros(4, 1000)

    def drawn(group_id: int, run_seed: int):
        rows = [group_row(group_id, 5, sampling, 3, group_id)]
        rows += [group_row(group_id + member, 6, sampling, group_id=group_id) for member in range(3)]
        return all_draws(logits, rows, run_seed)

    assert drawn(0, 1) == drawn(70, 2)
