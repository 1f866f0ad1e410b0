"""Named random streams, drawn in chunks: what any purpose draws depends on nothing that another purpose does.

Each purpose has a stream of its own, seeded by (seed, name of the purpose): changing the rate leaves the lengths as
they are, so two arms of a study share their random numbers. Streams are endless and drawn CHUNK numbers at a time:
memory does not grow with the trace. numpy's samplers are used; their values are those of one numpy version, so a
published trace is best frozen to a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from testbed.errors import ConfigError
from testbed.foreign_text import shortened
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
    if seed < 0:
        raise ConfigError(f"seed is {seed}; it must be 0 or above")
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


def choose(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises ConfigError, with the nearest valid name, if `value` is not among the choices."""
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; {nearest(str(value), choices)}choose one of {', '.join(choices)}")


def nearest(name: str, choices: Sequence[str]) -> str:
    """'did you mean …? ', or nothing."""
    from difflib import get_close_matches  # seldom needed

    near = get_close_matches(name, choices, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}? " if near else ""


def check(name: str, value: float, condition: bool, expected: str) -> None:
    """Raises ConfigError unless `condition` holds and `value` is finite."""
    if not condition or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"{name} is {shortened(value)}; it must be {expected}")
