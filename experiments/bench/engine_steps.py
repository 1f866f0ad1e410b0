"""Step times of the real engine against what the device could do: decodes by memory, prefills by its matrix units.

The ceilings are measured beside the steps: bytes read plus bytes written by a large copy, operations of a large matrix
product in the model's own number format. Weights are random, prompts are random, KV blocks lie in any order.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from testbed.core.plan import BatchPlan, BatchShape, PrefillChunk, ScheduledSequence
from testbed.core.request import GREEDY
from testbed.made_rows import MadeRows
from testbed.specs.model import ModelSpec

if TYPE_CHECKING:
    import torch

    from real.backend import RealBackend

BLOCK_SIZE = 16
WARM_UP_STEPS = 3


class Ceilings(NamedTuple):
    """What the device reaches at best."""

    bytes_per_s: float
    flops_per_s: float


class StepTime(NamedTuple):
    """Medians over the steps of one shape, in s: from the plan to the tokens, and of the device alone."""

    total_s: float
    device_s: float

    @property
    def host_share(self) -> float:
        """Share of a step in which the device waits for the host."""
        return max(0.0, 1.0 - self.device_s / self.total_s)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    import torch

    is_cuda = device.type == "cuda"
    num_bytes, width = (4 << 30, 8192) if is_cuda else (256 << 20, 1024)
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    product_s = _median_s(lambda: left @ right, device)
    source, target = torch.empty(2, num_bytes // 4, dtype=torch.int32, device=device).random_()
    copy_s = _median_s(lambda: target.copy_(source), device)
    return Ceilings(2 * num_bytes / copy_s, 2 * width**3 / product_s)


def _median_s(work: Callable[[], object], device: torch.device) -> float:
    from real.device import stopwatch

    times = []
    for _ in range(8):
        clock = stopwatch(device)
        clock.mark()
        work()
        clock.mark()
        times.append(clock.finish()[0] / 1e9)
    return statistics.median(times[2:])


def build_engine(spec: ModelSpec, device: str, num_blocks: int, max_num_batched_tokens: int) -> RealBackend:
    """An engine with random weights and room for `num_blocks` KV blocks. Frees what engines before it held."""
    import torch

    from real.backend import RealBackend
    from real.config import RealConfig

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return RealBackend(
        spec,
        RealConfig(device=device, load_format="dummy", max_captured_size=256),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=256,
        max_model_len=min(8192, spec.max_position_embeddings),
        num_gpu_blocks=num_blocks,
    )


def decode_time(backend: RealBackend, spec: ModelSpec, batch: int, context: int, num_steps: int) -> StepTime:
    """Steps of `batch` sequences that each attend to `context` positions."""
    blocks = _tables(backend, batch, context)
    rng = random.Random(batch)
    rows = tuple(
        ScheduledSequence(i, context - 1, 1, [rng.randrange(spec.vocab_size)], True, False, blocks[i], GREEDY)
        for i in range(batch)
    )
    return _time(backend, rows, BatchShape(batch, batch * context, (), batch), num_steps)


def prefill_time(backend: RealBackend, spec: ModelSpec, num_tokens: int, num_steps: int) -> StepTime:
    """Steps of one prompt of so many tokens."""
    rng = random.Random(num_tokens)
    tokens = [rng.randrange(spec.vocab_size) for _ in range(num_tokens)]
    (table,) = _tables(backend, 1, num_tokens)
    row = ScheduledSequence(0, 0, num_tokens, tokens, True, False, table, GREEDY)
    return _time(backend, (row,), BatchShape(0, 0, (PrefillChunk(0, num_tokens),), 1), num_steps)


def decode_floor_s(spec: ModelSpec, batch: int, context: int, bytes_per_s: float) -> float:
    """The time to read once every weight that a decode uses, and the KV of every row; of experts all are counted."""
    layers = spec.num_hidden_layers * (spec.num_attention_parameters + spec.num_mlp_parameters)
    weights = (layers + spec.vocab_size * spec.embedding_size) * spec.dtype_bytes
    return (weights + batch * context * spec.kv_bytes_per_token()) / bytes_per_s


def prefill_floor_s(spec: ModelSpec, num_tokens: int, flops_per_s: float) -> float:
    """The time of its matrix products; attention is causal, and only the last token has logits."""
    layers = spec.num_hidden_layers * (spec.num_attention_parameters + spec.num_active_mlp_parameters)
    pairs = num_tokens * (num_tokens + 1) / 2
    attention = 4 * spec.num_hidden_layers * spec.num_attention_heads * spec.head_dim * pairs
    return (2 * layers * num_tokens + attention + 2 * spec.vocab_size * spec.embedding_size) / flops_per_s


def _tables(backend: RealBackend, num_rows: int, context: int) -> list[list[int]]:
    """Blocks for each row, all different, in no order."""
    per_row = -(-context // BLOCK_SIZE)
    blocks = random.Random(7).sample(range(backend.num_gpu_blocks), num_rows * per_row)
    return [blocks[i * per_row : (i + 1) * per_row] for i in range(num_rows)]


def _time(backend: RealBackend, rows: tuple[ScheduledSequence, ...], shape: BatchShape, num_steps: int) -> StepTime:
    totals, device = [], []
    for step in range(WARM_UP_STEPS + num_steps):
        plan = BatchPlan(step, shape, MadeRows(rows))
        began = time.perf_counter()
        spans = backend.start(plan).wait().spans
        totals.append(time.perf_counter() - began)
        device.append((spans.forward_ns + spans.sample_ns) / 1e9)
    return StepTime(statistics.median(totals[WARM_UP_STEPS:]), statistics.median(device[WARM_UP_STEPS:]))
