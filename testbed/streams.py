"""Named random streams for the core, without state: a draw is a hash of the run's seed, its purpose and what it is for.

Nobody holds a generator, so no draw depends on how many others were made before it, in which order, or whether at all:
two policies under one seed draw the same for the same request (common random numbers). What a draw is *for* must be
named by what no policy changes, which is the request's id: numbers that are dealt out as things happen (sequence ids,
steps) differ between policies. Traces draw from numpy's streams of the same names (testbed/traces/draws.py).
"""

from __future__ import annotations

from xxhash import xxh64_intdigest


def draw(seed: int, purpose: str, *key: int | str) -> int:
    """64 random bits of the stream `purpose`: the same for the same key. Keys of one purpose are of one shape."""
    return xxh64_intdigest("/".join(map(str, (purpose, seed, *key))).encode())
