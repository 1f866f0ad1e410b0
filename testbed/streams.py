"""Named random streams without state: a random number is a hash of the run's seed, its purpose and a key.

There is no generator, so a random number does not depend on which others were drawn before it: two policies with one
seed get the same numbers for the same request (common random numbers). The key must be something that no policy
changes, such as the request's id. Numbers that are assigned during a run (sequence ids, steps) differ between policies.
Traces use numpy's generators instead, one for each purpose (testbed/traces/draws.py).
"""

from __future__ import annotations

import math
from statistics import NormalDist

from xxhash import xxh64_intdigest

_STANDARD_NORMAL = NormalDist()


def log_normal(bits: int, sigma: float) -> float:
    """Returns a factor of median 1, made of 64 random bits. sigma: standard deviation of its logarithm."""
    uniform = ((bits >> 12) + 0.5) / 2**52  # 52 bits and a half: exact, and never 0 or 1
    return math.exp(sigma * _STANDARD_NORMAL.inv_cdf(uniform))


def draw(seed: int, purpose: str, *key: int | str) -> int:
    """Returns 64 random bits of the stream `purpose`, the same for the same key. All keys of one purpose must have the
    same form."""
    return xxh64_intdigest("/".join(map(str, (purpose, seed, *key))).encode())
