"""Named random streams: the numbers of one purpose do not depend on those of another purpose.

Each purpose has its own stream, seeded by (seed, name of the purpose). Changing the rate leaves the lengths as they
are, so two variants of a comparison share their random numbers. Streams are endless, and CHUNK numbers are drawn at a
time: memory does not grow with the trace. The values of numpy's samplers are those of one numpy version, so a trace
that is published should be frozen to a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from testbed.checks import require
from testbed.traces.synthesis import content_key

CHUNK = 4096
Stream = Callable[[str], "np.random.Generator"]  # purpose -> its random stream; numpy.random is loaded lazily


def stream(seed: int, purpose: str) -> np.random.Generator:
    """Returns the random stream of one purpose: independent of those of all other purposes and seeds."""
    key = content_key("stream", purpose)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(key >> 32, key & 0xFFFFFFFF))))


def streams(seed: int, label: str = "") -> Stream:
    """Returns the streams of a seed. label: of a part of a trace (a tenant). Raises ConfigError for a negative seed."""
    require("seed", seed, seed >= 0, "0 or above")
    return lambda purpose: stream(seed, f"{label}/{purpose}" if label else purpose)


def endless(draw: Callable[[int], NDArray[np.int64]]) -> Iterator[int]:
    """Yields the numbers of draw(CHUNK), draw(CHUNK), … one by one."""
    while True:
        yield from draw(CHUNK).tolist()


def whole_numbers(low: int, high: int, rng: np.random.Generator) -> Iterator[int]:
    """Returns endless whole numbers from `low` to `high`, all equally likely."""
    return endless(lambda num: rng.integers(low, high, num, endpoint=True))


def zipf_numbers(low: int, high: int, exponent: float, rng: np.random.Generator, *, shift: int = 0) -> Iterator[int]:
    """Returns endless whole numbers from `low` to `high`, n with probability proportional to n ** -exponent (0: all
    equal). shift: is added to each number."""
    shares = np.arange(low, high + 1, dtype=np.float64) ** -exponent
    cumulated, first, last = np.cumsum(shares) / shares.sum(), low + shift, high + shift
    return endless(lambda num: np.minimum(first + np.searchsorted(cumulated, rng.random(num), side="right"), last))


def zipf_ranks(num: int, skew: float, rng: np.random.Generator) -> Iterator[int]:
    """Returns endless ranks 0 … num - 1, rank k with probability proportional to (k + 1) ** -skew (0: all equal)."""
    return zipf_numbers(1, num, skew, rng, shift=-1)
