"""Draws one token for each row that samples: greedy, or from the softmax at a temperature.

Random rows use the exponential race: with E_i ~ Exp(1), argmin E_i / p_i is distributed as p. Taken in logarithms it is
argmax (logit_i / temperature - log E_i): no normalisation, no cumulative sum, no wait for the device. The noise is a
hash of (request seed, position, token id), so a row's draw depends neither on the rest of the batch nor on how often
the row was computed, and is the same on every device.
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
    """The random rows among those that sample; None when all are greedy."""

    rows: Tensor  # int64 [n], indices into the rows that sample
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


def draw_key(row: ScheduledSequence, run_seed: int) -> int:
    """The key of a row's draw, as a signed 64-bit integer. The position drawn is the one after the row's last token."""
    seed = row.sampling.seed
    position = row.start + row.num_tokens
    key = mix(UNSEEDED, run_seed, row.seq_id, position) if seed is None else mix(SEEDED, seed, position)
    return signed(key)


def sampling_inputs(rows: Sequence[ScheduledSequence], run_seed: int) -> SamplingInputs | None:
    """Host tensors for the rows that sample, in their order; None when all are greedy."""
    drawn = [(index, row) for index, row in enumerate(rows) if row.sampling.temperature > 0.0]
    if not drawn:
        return None
    return SamplingInputs(
        torch.tensor([index for index, _ in drawn]),
        torch.tensor([row.sampling.temperature for _, row in drawn], dtype=torch.float32),
        torch.tensor([draw_key(row, run_seed) for _, row in drawn]),
    )


def sample(logits: Tensor, inputs: SamplingInputs | None) -> Tensor:
    """Logits float32 [num_rows, vocab] -> token ids int64 [num_rows]."""
    token_ids = logits.argmax(dim=-1)
    if inputs is None:
        return token_ids
    size = max(1, MAX_NOISE_ELEMENTS // logits.shape[-1])
    for rows, temperatures, keys in zip(*(torch.split(tensor, size) for tensor in inputs), strict=True):
        chosen = logits[rows]  # [at most size, vocab]
        chosen -= chosen.amax(dim=-1, keepdim=True)  # a tiny temperature then gives 0 and -inf, never inf
        chosen /= temperatures.clamp(min=1e-30)[:, None]
        chosen -= log_exponential(keys, logits.shape[-1])
        token_ids[rows] = chosen.argmax(dim=-1)
    return token_ids


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
