"""Shapes of steps for tests of prices, by hand and drawn, and what they are priced for."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from sim.cost.config import RooflineConfig
from sim.cost.roofline import RooflineCost
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec

MODEL = ModelSpec("m", num_hidden_layers=2, hidden_size=512, intermediate_size=1024, vocab_size=1000)
LINK: dict[str, Any] = {"interconnect": "nvlink", "interconnect_bytes_per_s": 450e9}
DEVICE = DeviceSpec("d", **LINK)
BARE = DeviceSpec(
    "bare", step_overhead_ns=0, compute_efficiency=1.0, memory_efficiency=1.0, attention_efficiency=1.0, **LINK
)
TILED = replace(BARE, flops_per_s=1e9, memory_bytes_per_s=1e30, num_sms=4, attention_tile_rows=16)
NO_LAUNCH = RooflineConfig(cuda_graphs=False, kernel_launch_ns=0)

chunks = st.builds(PrefillChunk, st.integers(0, 30_000), st.integers(1, 8192))


def with_shared(share: float, shape: BatchShape) -> BatchShape:
    """With this share of the most positions that decodes can read again."""
    most = shape.decode_context_tokens - shape.longest_decode_context
    return shape.replace(repeated_context_tokens=int(share * most))


shapes = st.builds(
    lambda decodes, context, longest, shared, prefills, samples, *blocks: with_shared(shared, BatchShape(
        decodes, context + decodes if decodes else 0, tuple(prefills), samples, *blocks,
        min(context + decodes, -(-(context + decodes) // decodes) + longest) if decodes else 0,
    )),
    st.integers(0, 600), st.integers(0, 10**6), st.integers(0, 1000), st.floats(0, 1), st.lists(chunks, max_size=4),
    st.integers(0, 600), *[st.integers(0, 500)] * 3,
)  # fmt: skip


def decode(num: int, context_each: int = 1000) -> BatchShape:
    return BatchShape(num, num * context_each, (), num, longest_decode_context=context_each)


def prefill(*lengths: int, start: int = 0) -> BatchShape:
    return BatchShape(0, 0, tuple(PrefillChunk(start, n) for n in lengths), len(lengths))


def parts_of(shape: BatchShape, model: ModelSpec = MODEL, device: DeviceSpec = BARE, **options: Any) -> dict[str, int]:
    return RooflineCost(model, device, NO_LAUNCH, **options).breakdown(shape)
