"""The noise of random draws: a hash of (request seed, position, member of the group, token id), equal on all devices.

So a sampled token depends neither on the rest of the batch nor on how often a row was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from testbed.core.plan import ScheduledSequence

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # the increments and multipliers of splitmix64 (Steele et al. 2014)
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SEEDED, UNSEEDED = 1, 2  # separate the streams of given seeds from those of derived seeds


def mix(*values: int) -> int:
    """Hashes integers, in this order, into 64 bits."""
    state = 0
    for value in values:
        state = ((state ^ (value & MASK)) + GOLDEN) & MASK
        state = ((state ^ (state >> 30)) * MULTIPLIERS[0]) & MASK
        state = ((state ^ (state >> 27)) * MULTIPLIERS[1]) & MASK
        state ^= state >> 31
    return state


class Streams(NamedTuple):
    """The part of the hash keys that does not depend on positions, and so is the same from step to step."""

    states: np.ndarray  # uint64 [n], the hash of everything that is mixed in before the position
    members: np.ndarray  # uint64 [n], mixed in after the position unless 0


def streams_of(rows: Sequence[ScheduledSequence], indices: Sequence[int], run_seed: int) -> Streams:
    """Returns the streams of many draws. indices: for each draw, which of its row's draws it is.

    A seeded request gives the same tokens in every run, whatever the ids of its sequences. So its samples differ by
    their member number, counted from the group's first sequence (whose id is the group's). The sequence that starts
    with draw j is member j, provided that the core gives a group's sequences consecutive ids.
    """
    begin_unseeded, begin_seeded = mix(UNSEEDED, run_seed), mix(SEEDED)
    columns = np.array(
        [_words(row, index, begin_unseeded, begin_seeded) for row, index in zip(rows, indices, strict=True)],
        dtype=np.uint64,
    )
    state, first, member = columns.T
    return Streams(_mixed(state, first), member)


def draw_keys(streams: Streams, positions: np.ndarray) -> np.ndarray:
    """Returns the hash key of each draw, int64 [n]. positions: those of the tokens to sample, int64 [n]."""
    states = _mixed(streams.states, positions.view(np.uint64))
    keys: np.ndarray = np.where(streams.members > 0, _mixed(states, streams.members), states)
    return keys.view(np.int64)


def _words(row: ScheduledSequence, index: int, begin_unseeded: int, begin_seeded: int) -> tuple[int, int, int]:
    """Returns for a draw: the initial state, what is mixed in before the position, what is mixed in after it."""
    sampling = row.sampling
    if sampling.seed is None:
        return begin_unseeded, row.seq_id, index
    member = index + (row.seq_id - row.group_id if sampling.num_seqs > 1 else 0)
    return begin_seeded, sampling.seed & MASK, member


def _mixed(state: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Does one round of `mix`, uint64 [n]; sums and products wrap around."""
    state = (state ^ value) + np.uint64(GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(MULTIPLIERS[0])
    state = (state ^ (state >> np.uint64(27))) * np.uint64(MULTIPLIERS[1])
    state ^= state >> np.uint64(31)
    return state


def log_exponential(keys: Tensor, vocab_size: int) -> Tensor:
    """Returns log E with E ~ Exp(1), a function of (key, token id) only: float32 [n, vocab]."""
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
    """Returns the signed integer with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Shifts logically; torch's own shift of int64 keeps the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
