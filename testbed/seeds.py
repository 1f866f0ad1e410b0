"""A seed for each request that needs random numbers and has none: a hash of the run's seed and the request's id.

Without it a backend would have to key random numbers by sequence ids, which differ between policies: a session's next
turn comes earlier under one policy than under another. With it each request has the same random numbers under every
policy (common random numbers), on either backend.
"""

from __future__ import annotations

from dataclasses import replace

from testbed.core.request import Request, SamplingParams
from testbed.streams import draw


def request_seed(run_seed: int, request_id: str) -> int:
    """Returns the 64-bit seed of a request's random numbers, from the stream "sampling"."""
    return draw(run_seed, "sampling", request_id)


def needs_seed(sampling: SamplingParams) -> bool:
    """Whether requests with these parameters need random numbers, and have no seed."""
    return sampling.seed is None and (sampling.temperature > 0 or sampling.beam_width > 1)


def seeded(request: Request, run_seed: int) -> Request:
    """Returns the request, with a seed if it needs one."""
    if not needs_seed(request.sampling):
        return request
    return request.replace(sampling=replace(request.sampling, seed=request_seed(run_seed, request.request_id)))
