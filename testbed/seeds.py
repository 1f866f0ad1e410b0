"""A seed of its own for each request that draws and brings none: of the run's seed and the request's id.

Without it a backend would tell requests apart by what the core numbered them, which differs between policies: a
session's next turn comes earlier under one than under another. So each request draws the same under every policy
(common random numbers), on either backend.
"""

from __future__ import annotations

from dataclasses import replace

from testbed.core.request import Request, SamplingParams
from testbed.streams import draw


def request_seed(run_seed: int, request_id: str) -> int:
    """The seed of a request's draws, of 64 bits: stream "sampling"."""
    return draw(run_seed, "sampling", request_id)


def needs_seed(sampling: SamplingParams) -> bool:
    """Whether requests with these parameters draw, from nothing of their own."""
    return sampling.seed is None and (sampling.temperature > 0 or sampling.beam_width > 1)


def seeded(request: Request, run_seed: int) -> Request:
    """The request with all that it needs to draw."""
    if not needs_seed(request.sampling):
        return request
    return request.replace(sampling=replace(request.sampling, seed=request_seed(run_seed, request.request_id)))
