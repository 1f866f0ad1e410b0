"""What the tests of `testbed capacity` share."""

from __future__ import annotations

from experiments.capacity.found import Found
from tests.experiments.kit import TINY

BUSY = (  # preemptions, swaps, queues
    *TINY, "cache.num_gpu_blocks=24", "cache.num_cpu_blocks=40", "scheduler=vllm_v0", "scheduler.preemption=swap",
    "cost=constant", "cost.step_s=0.01", "trace.num_requests=70", "trace.output={kind: uniform, min_tokens: 1, "
    "max_tokens: 30}", "trace.prompt={kind: uniform, min_tokens: 4, max_tokens: 40}",
)  # fmt: skip


def ends(found: Found) -> tuple[float, float]:
    failed = found.rate(found.bracket.failed)
    assert failed is not None
    return found.capacity, failed
