"""Named random streams: the numbers of one purpose do not depend on those of another purpose.

Each purpose has its own stream, seeded by (seed, name of the purpose). Changing the rate leaves the lengths as they
are, so two variants of a comparison share their random numbers. Streams are endless, and CHUNK numbers are drawn at a
time: memory does not grow with the trace. The values of numpy's samplers are those of one numpy version, so a trace
that is published should be frozen to a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from testbed.checks import require
from testbed.traces.synthesis import content_key

CHUNK = 4096
T = TypeVar("T")
Stream = Callable[[str], "np.random.Generator"]  # purpose -> its random stream; numpy.random is loaded lazily


def stream(seed: int, purpose: str) -> np.random.Generator:
    """Returns the random stream of one purpose: independent of those of all other purposes and seeds."""
    key = content_key("stream", purpose)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(key >> 32, key & 0xFFFFFFFF))))


def streams(seed: int, label: str = "") -> Stream:
    """Returns the streams of a seed. label: of a part of a trace (a tenant). Raises ConfigError for a negative seed."""
    require("seed", seed, seed >= 0, "0 or above")
    return lambda purpose: stream(seed, f"{label}/{purpose}" if label else purpose)


def endless(draw: Callable[[int], list[T]]) -> Iterator[T]:
    """Yields the values of draw(CHUNK), draw(CHUNK), … one by one."""
    while True:
        yield from draw(CHUNK)


def zipf_ranks(num: int, skew: float, rng: np.random.Generator) -> Iterator[int]:
    """Returns endless ranks 0 … num - 1, rank k with probability proportional to (k + 1) ** -skew (0: all equal)."""
    popularity = np.arange(1, num + 1, dtype=np.float64) ** -skew
    cumulated = np.cumsum(popularity) / popularity.sum()

    def draw(size: int) -> list[int]:
        ranks = np.searchsorted(cumulated, rng.random(size), side="right")
        drawn: list[int] = np.minimum(ranks, num - 1).tolist()
        return drawn

    return endless(draw)
