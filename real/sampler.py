"""Draws tokens for each row that samples: greedy, or from the softmax at a temperature.

Random rows use the exponential race: with E_i ~ Exp(1), argmin E_i / p_i is distributed as p. Taken in logarithms it is
argmax (logit_i / temperature - log E_i): no normalisation, no cumulative sum, no wait for the device. The noise is a
hash of (request seed, position, member of the group, token id), so a row's draw depends neither on the rest of the
batch nor on how often the row was computed, and is the same on every device.

Where the samples of one prompt part, a row draws several times from the same logits. The first draws are made together
with those of all other rows; the further ones are a batch of their own, which most steps do not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from testbed.plan import ScheduledSequence

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # the increments and multipliers of splitmix64 (Steele et al. 2014)
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MAX_NOISE_ELEMENTS = 2**22  # rows x vocabulary that are drawn at a time: bounds the memory of their 64-bit hashes
SEEDED, UNSEEDED = 1, 2  # keep the streams of given seeds and of derived ones apart


class SamplingInputs(NamedTuple):
    """Random draws."""

    rows: Tensor  # int64 [n], the row of each, as an index into the rows that sample
    temperatures: Tensor  # float32 [n]
    keys: Tensor  # int64 [n], one hash key for each draw


def mix(*values: int) -> int:
    """Hashes integers, in order, into 64 bits."""
    state = 0
    for value in values:
        state = ((state ^ (value & MASK)) + GOLDEN) & MASK
        state = ((state ^ (state >> 30)) * MULTIPLIERS[0]) & MASK
        state = ((state ^ (state >> 27)) * MULTIPLIERS[1]) & MASK
        state ^= state >> 31
    return state


def draw_key(row: ScheduledSequence, run_seed: int, index: int = 0) -> int:
    """The key of a row's draw, as a signed 64-bit integer. The position drawn is the one after the row's last token.

    index: which of the row's `num_samples` draws. A seeded request draws the same in every run, whatever the ids of its
    sequences; so what tells its samples apart is the member, counted from the group's first sequence (whose id is
    the group's). The sequence that starts with draw j is member j if the core numbers a group's sequences in a row.
    """
    sampling = row.sampling
    position = row.start + row.num_tokens
    if sampling.seed is None:
        return signed(mix(UNSEEDED, run_seed, row.seq_id, position, *([index] if index else [])))
    member = index + (row.seq_id - row.group_id if sampling.num_seqs > 1 else 0)
    return signed(mix(SEEDED, sampling.seed, position, *([member] if member else [])))


def is_random(row: ScheduledSequence) -> bool:
    return row.sampling.temperature > 0.0 and not row.sampling.beam_width


def sampling_inputs(rows: Sequence[ScheduledSequence], run_seed: int) -> SamplingInputs | None:
    """The first draw of each row that samples, on the host, in their order; None when all are greedy."""
    return _inputs([(number, row, 0) for number, row in enumerate(rows) if is_random(row)], run_seed)


def further_inputs(rows: Sequence[ScheduledSequence], run_seed: int) -> SamplingInputs | None:
    """The draws after the first of rows that draw several times, row after row; None when there are none."""
    return _inputs(
        [
            (number, row, index)
            for number, row in enumerate(rows)
            if row.num_samples > 1 and is_random(row)
            for index in range(1, row.num_samples)
        ],
        run_seed,
    )


def _inputs(draws: list[tuple[int, ScheduledSequence, int]], run_seed: int) -> SamplingInputs | None:
    if not draws:
        return None
    return SamplingInputs(
        torch.tensor([number for number, _, _ in draws]),
        torch.tensor([row.sampling.temperature for _, row, _ in draws], dtype=torch.float32),
        torch.tensor([draw_key(row, run_seed, index) for _, row, index in draws]),
    )


def sample(logits: Tensor, inputs: SamplingInputs | None) -> Tensor:
    """Logits float32 [num_rows, vocab] -> the first token of each row, ids int64 [num_rows]."""
    token_ids = logits.argmax(dim=-1)
    if inputs is not None:
        token_ids[inputs.rows] = draw(logits, inputs)
    return token_ids


def draw(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Logits float32 [num_rows, vocab] -> the token of each random draw, ids int64 [n]."""
    size = max(1, MAX_NOISE_ELEMENTS // logits.shape[-1])
    token_ids = []
    for rows, temperatures, keys in zip(*(torch.split(tensor, size) for tensor in inputs), strict=True):
        chosen = logits[rows]  # [at most size, vocab]
        chosen -= chosen.amax(dim=-1, keepdim=True)  # a tiny temperature then gives 0 and -inf, never inf
        chosen /= temperatures.clamp(min=1e-30)[:, None]
        chosen -= log_exponential(keys, logits.shape[-1])
        token_ids.append(chosen.argmax(dim=-1))
    return torch.cat(token_ids)


def draws_of(rows: Sequence[ScheduledSequence], token_ids: Sequence[int]) -> list[tuple[int, ...]]:
    """The `num_samples` tokens of each row, from what `sample` and then, behind it, `draw` gave."""
    drawn: list[tuple[int, ...]] = []
    taken = len(rows)
    for row, first in zip(rows, token_ids, strict=False):
        num_further = row.num_samples - 1
        if not num_further or row.sampling.beam_width:
            drawn.append((first,))
        elif is_random(row):
            drawn.append((first, *token_ids[taken : taken + num_further]))
            taken += num_further
        else:
            drawn.append((first,) * row.num_samples)
    assert taken == len(token_ids), "every draw belongs to a row"
    return drawn


def log_exponential(keys: Tensor, vocab_size: int) -> Tensor:
    """Log E with E ~ Exp(1), a function of (key, token id) alone: float32 [n, vocab]."""
    counters = torch.arange(1, vocab_size + 1, device=keys.device) * signed(GOLDEN)  # wraps around, as wanted
    state = keys[:, None] + counters
    state ^= _shift_right(state, 30)
    state *= signed(MULTIPLIERS[0])
    state ^= _shift_right(state, 27)
    state *= signed(MULTIPLIERS[1])
    state ^= _shift_right(state, 31)
    # 40 bits, never 0; small values keep their relative precision, which decides who wins the race
    uniform = (_shift_right(state, 24) + 1).to(torch.float32) * 2.0**-40
    uniform.clamp_(max=1.0 - 2.0**-24)
    return torch.log_(torch.log1p_(uniform.neg_()).neg_())  # E = -log(1 - u)


def signed(value: int) -> int:
    """The signed integer of the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """A logical shift: torch's keeps the sign of int64."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
