"""Named random streams, drawn in chunks: what any purpose draws depends on nothing that another purpose does.

Each purpose has a stream of its own, seeded by (seed, name of the purpose): changing the rate leaves the lengths as
they are, so two arms of a study share their random numbers. Streams are endless and drawn CHUNK numbers at a time:
memory does not grow with the trace. numpy's samplers are used; their values are those of one numpy version, so a
published trace is best frozen to a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from testbed.checks import require
from testbed.traces.synthesis import content_key

CHUNK = 4096
T = TypeVar("T")
Stream = Callable[[str], "np.random.Generator"]  # purpose -> its random stream; numpy.random is loaded at the first


def stream(seed: int, purpose: str) -> np.random.Generator:
    """The random stream of one purpose: independent of those of all other purposes and seeds."""
    key = content_key("stream", purpose)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(key >> 32, key & 0xFFFFFFFF))))


def streams(seed: int, label: str = "") -> Stream:
    """The streams of a seed; of one part of a trace (a tenant) by its label. Raises ConfigError for a negative seed."""
    require("seed", seed, seed >= 0, "0 or above")
    return lambda purpose: stream(seed, f"{label}/{purpose}" if label else purpose)


def endless(draw: Callable[[int], list[T]]) -> Iterator[T]:
    """The values of draw(CHUNK), draw(CHUNK), … one by one."""
    while True:
        yield from draw(CHUNK)


def zipf_ranks(num: int, skew: float, rng: np.random.Generator) -> Iterator[int]:
    """Ranks 0 … num - 1, rank k with probability proportional to (k + 1) ** -skew (0: all equal)."""
    popularity = np.arange(1, num + 1, dtype=np.float64) ** -skew
    cumulated = np.cumsum(popularity) / popularity.sum()

    def draw(size: int) -> list[int]:
        ranks = np.searchsorted(cumulated, rng.random(size), side="right")
        drawn: list[int] = np.minimum(ranks, num - 1).tolist()
        return drawn

    return endless(draw)
