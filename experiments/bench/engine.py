"""Speed of the real engine: step times against the device's measured ceilings, and whole runs against other engines.

On a CPU: a model of about 20 million parameters against `transformers.generate`, transformers' continuous batching and,
if installed, vLLM's CPU build. All use the same checkpoint, prompts and threads, in turns. On a GPU: steps of published
model shapes with random weights, and 256 requests of 100 to 1,024 tokens in and out against vLLM and transformers'
continuous batching, with every attention provider that can run; swaps against the measured link to the host.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.bench import offline
from experiments.console import Parser
from experiments.tables.devices import model_spec
from experiments.wiring.build_engine import real_packages
from real.config import MAX_NUM_THREADS
from sim.cost.experts import touched_experts
from testbed.checks import choose, require_whole, require_whole_or_null
from testbed.core.plan import BatchPlan, BatchShape, PrefillChunk, ScheduledSequence
from testbed.core.request import GREEDY, SamplingParams
from testbed.errors import ConfigError
from testbed.made_rows import MadeRows
from testbed.specs.model import ModelSpec

if TYPE_CHECKING:
    import torch

    from real.backend import RealBackend


BLOCK_SIZE = 16
WARM_UP_STEPS = 3
SMALL = ModelSpec(
    name="20m", hidden_size=512, intermediate_size=1024, num_hidden_layers=5, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, vocab_size=16384, max_position_embeddings=4096, rope_theta=10_000.0,
    dtype="float32",
)  # fmt: skip
SHAPES = ("qwen3_0.6b", "qwen3_8b")
BATCHES, CONTEXT = (1, 8, 64, 256), 1024
PROMPTS = (512, 2048, 8192)
MIXED = (64, 512)  # decodes, and tokens of the prompt beside them
SAMPLED = 64  # rows of the steps that sample in other ways than greedily
SAMPLINGS = {"temperature 1": SamplingParams(temperature=1.0), "top-k, top-p": SamplingParams(top_k=20, top_p=0.9)}
SWAPPED = (34, 512)  # blocks
GPU_DTYPES = ("bfloat16", "float16", "fp8")
PARTS = ("decode", "sampling", "prefill", "mixed", "swap", "offline")


class Ceilings(NamedTuple):
    """The device's best rates, measured in the same run as the steps: bytes read plus bytes written by a large copy,
    operations of a large GEMM (bfloat16 on a GPU, float32 on a CPU)."""

    bytes_per_s: float
    flops_per_s: float


class StepTime(NamedTuple):
    """Medians over the steps of one shape, in s: from the plan to the tokens, and on the device only."""

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


def build_engine(
    spec: ModelSpec, device: str, num_blocks: int, max_num_batched_tokens: int, kv_dtype: str | None = None
) -> RealBackend:
    """Builds an engine with random weights and `num_blocks` KV blocks. Frees the memory of earlier engines first."""
    import torch

    from real.backend import RealBackend
    from real.config import EngineOptions, RealConfig

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return RealBackend(
        spec,
        RealConfig(device=device, load_format="dummy", max_captured_size=256),
        EngineOptions(
            BLOCK_SIZE, max_num_batched_tokens, max_num_seqs=256, num_gpu_blocks=num_blocks, kv_dtype=kv_dtype,
            max_model_len=min(8192, spec.max_position_embeddings),
            num_cpu_blocks=max(SWAPPED) if torch.cuda.is_available() and device != "cpu" else None,
        ),
    )  # fmt: skip


def batch_time(
    backend: RealBackend, spec: ModelSpec, batch: int, context: int, num_steps: int,
    sampling: SamplingParams = GREEDY, num_beside: int = 0,
) -> StepTime:  # fmt: skip
    """Times decode steps of `batch` sequences that each attend to `context` positions. num_beside: tokens of a prompt
    that each step computes, too (batch 0: alone, and all of its `context`)."""
    *blocks, table = _tables(backend, batch + 1, max(context, num_beside))
    rng = random.Random(batch)
    rows = tuple(
        ScheduledSequence(i, context - 1, 1, [rng.randrange(spec.vocab_size)], True, False, blocks[i], sampling)
        for i in range(batch)
    )
    prefills: tuple[PrefillChunk, ...] = ()
    if num_beside:
        tokens = [rng.randrange(spec.vocab_size) for _ in range(num_beside)]
        rows += (ScheduledSequence(batch, 0, num_beside, tokens, True, False, table, GREEDY),)
        prefills = (PrefillChunk(0, num_beside),)
    return _time(backend, rows, BatchShape(batch, batch * context, prefills, len(rows)), num_steps)


def link_bytes_per_s(device: torch.device, to_host: bool) -> float:
    """The rate of one large copy between the device and pinned memory of the host."""
    import torch

    pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True).random_()
    there = pinned.to(device)
    source, target = (there, pinned) if to_host else (pinned, there)
    return len(pinned) / _median_s(lambda: target.copy_(source, non_blocking=True), device)


def swap_time(backend: RealBackend, num_blocks: int, to_host: bool, num_steps: int) -> StepTime:
    """Times steps that only move blocks, from random places to random places."""
    draw = random.Random(num_blocks)
    gpu, cpu = (draw.sample(range(pool), num_blocks) for pool in (backend.num_gpu_blocks, backend.num_cpu_blocks))
    pairs = tuple(zip(gpu, cpu, strict=True)) if to_host else tuple(zip(cpu, gpu, strict=True))
    kind = "out" if to_host else "in"
    shape = BatchShape(0, 0, (), 0, **{f"num_blocks_swapped_{kind}": num_blocks})
    return _time(backend, (), shape, num_steps, **{f"swap_{kind}": pairs})


def floor_s(
    spec: ModelSpec, ceilings: Ceilings, kv_bytes_per_token: int, num_decodes: int, context: int, num_beside: int = 0
) -> float:
    """The least time of a step of decodes and of a prompt of `num_beside` tokens: to read once its weights and the KV
    of every decode, or for its GEMMs and the prompt's causal attention, whichever is longer. Counts the experts that
    random routers would choose, and logits for each decode and the prompt's last token."""
    num_tokens, num_samples, experts = num_decodes + num_beside, num_decodes + bool(num_beside), spec.experts
    head = spec.vocab_size * spec.embedding_size
    rest: float = spec.num_mlp_parameters - spec.num_router_parameters
    if experts is not None:
        rest *= touched_experts(experts.num, experts.per_token, num_tokens) / experts.num
    weights = spec.num_hidden_layers * (spec.num_attention_parameters + rest) * spec.dtype_bytes
    num_bytes = weights + head * spec.activation_dtype_bytes + num_decodes * context * kv_bytes_per_token
    layers = spec.num_hidden_layers * (spec.num_attention_parameters + spec.num_active_mlp_parameters)
    pairs = num_beside * (num_beside + 1) / 2
    attention = 4 * spec.num_hidden_layers * spec.num_attention_heads * spec.head_dim * pairs
    flops = 2 * layers * num_tokens + attention + 2 * head * num_samples
    return max(num_bytes / ceilings.bytes_per_s, flops / ceilings.flops_per_s)


def _tables(backend: RealBackend, num_rows: int, context: int) -> list[list[int]]:
    """Returns the block table of each row: distinct blocks in random order."""
    per_row = -(-context // BLOCK_SIZE)
    blocks = random.Random(7).sample(range(backend.num_gpu_blocks), num_rows * per_row)
    return [blocks[i * per_row : (i + 1) * per_row] for i in range(num_rows)]


def _time(
    backend: RealBackend, rows: tuple[ScheduledSequence, ...], shape: BatchShape, num_steps: int, **moved: Any
) -> StepTime:
    totals, device = [], []
    for step in range(WARM_UP_STEPS + num_steps):
        plan = BatchPlan(step, shape, MadeRows(rows), **moved)
        began = time.perf_counter()
        spans = backend.start(plan).wait().spans
        totals.append(time.perf_counter() - began)
        device.append((spans.swap_ns + spans.forward_ns + spans.sample_ns) / 1e9)
    return StepTime(statistics.median(totals[WARM_UP_STEPS:]), statistics.median(device[WARM_UP_STEPS:]))


# --- the command ---


def main(arguments: list[str]) -> int:
    parser = Parser("testbed bench engine", description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--parts", help=f"comma-separated, of {', '.join(PARTS)} (all; swap only on a GPU)")
    parser.add_argument("--models", default=None, help="on a GPU: names of the model group (qwen3_0.6b,qwen3_8b)")
    parser.add_argument(
        "--dtypes", help="comma-separated, of weights: on a CPU of float32, bfloat16 (both); on a GPU of bfloat16, "
        "float16, fp8 (the model's)",
    )  # fmt: skip
    parser.add_argument("--kv-dtype", choices=("fp8_e4m3", "fp8_e5m2"), help="on a GPU: of the KV cache, of all steps")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the whole runs, in turns (3)")
    parser.add_argument("--threads", type=int, default=None, help="of torch on the CPU; left out: torch's choice")
    options = parser.parse_args(arguments)
    parts = (",".join(PARTS) if options.parts is None else options.parts).split(",")
    for part in parts:
        choose("--parts", part, PARTS)
    require_whole("--repeats", options.repeats, 1)
    require_whole_or_null("--threads", options.threads, 1, MAX_NUM_THREADS)
    with real_packages("this benchmark"):
        import torch

        from real.device import describe_device, resolve_device
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = resolve_device(options.device)
    print(f"engine: {describe_device(device)}, torch {torch.__version__}", flush=True)
    on_cpu = device.type == "cpu"
    dtypes: list[Any] = [*offline.CPU_DTYPES] if on_cpu else [None]
    if options.dtypes is not None:
        dtypes = options.dtypes.split(",")
        for dtype in dtypes:
            choose("--dtypes", dtype, offline.CPU_DTYPES if on_cpu else GPU_DTYPES)
    if on_cpu and options.models is not None:
        raise ConfigError("--models is for a GPU: on a CPU one small model is measured")
    if on_cpu and options.kv_dtype is not None:
        raise ConfigError("--kv-dtype is for a GPU: on a CPU the cache has the model's format")
    if on_cpu and options.parts and "swap" in parts:
        raise ConfigError("--parts swap needs a GPU: on a CPU both pools lie in the same memory")
    models = [] if on_cpu else [model_spec(name) for name in (options.models or ",".join(SHAPES)).split(",")]
    specs = [replace(spec, dtype=dtype or spec.dtype) for spec in models for dtype in dtypes] or [SMALL]
    if set(parts) - {"offline"}:
        _step_tables(specs, device, parts, options.kv_dtype)
    if "offline" in parts and on_cpu:
        offline.on_cpu(SMALL, options.repeats, options.threads or torch.get_num_threads(), dtypes)
    elif "offline" in parts:
        offline.on_gpu(specs[0], options.repeats)
    return 0


def _step_tables(specs: list[ModelSpec], device: Any, parts: list[str], kv_dtype: str | None) -> None:
    import torch

    from real.cache_engine import block_bytes

    is_cuda = device.type == "cuda"
    ceilings = measure_ceilings(device, torch.bfloat16 if is_cuda else torch.float32)
    rates = f"{ceilings.bytes_per_s / 1e9:,.0f} GB/s copied, {ceilings.flops_per_s / 1e12:,.2f} TFLOP/s"
    links = {to_host: link_bytes_per_s(device, to_host) for to_host in (True, False)} if is_cuda else {}
    if links:
        rates += f", {links[True] / 1e9:.1f} GB/s to the host, {links[False] / 1e9:.1f} GB/s from it"
    print(f"  ceilings, measured: {rates}")
    context = CONTEXT if is_cuda else 256
    num_steps = 30 if is_cuda else 5
    prompts = [length for length in PROMPTS if is_cuda or length <= 2048]
    for spec in specs:
        num_blocks = (
            max((max(*BATCHES, SAMPLED, MIXED[0]) + 1) * -(-context // BLOCK_SIZE), -(-max(prompts) // BLOCK_SIZE)) + 1
        )
        backend = build_engine(spec, device.type, num_blocks, max(max(BATCHES), *prompts), kv_dtype)
        size = f"{spec.num_parameters / 1e9:.2f} B parameters, {spec.dtype}"
        print(f"\n  {spec.name}, {size}, KV cache {kv_dtype or 'as computed'}, attention {backend.attention_name}")
        print(f"  {'step':<38}{'ms':>9}{'device ms':>11}{'floor ms':>10}{'of floor':>10}{'host':>7}")
        least = partial(floor_s, spec, ceilings, spec.kv_bytes_per_token(kv_dtype))
        if "decode" in parts:
            for batch in BATCHES:
                taken = batch_time(backend, spec, batch, context, num_steps)
                _show_step(f"decode, batch {batch}, context {context}", taken, least(batch, context))
        if "sampling" in parts:
            for name, sampling in SAMPLINGS.items():
                taken = batch_time(backend, spec, SAMPLED, context, num_steps, sampling)
                _show_step(f"{name}, batch {SAMPLED}, context {context}", taken, least(SAMPLED, context))
        if "prefill" in parts:
            for length in prompts:
                taken = batch_time(backend, spec, 0, length, max(3, num_steps // 3), num_beside=length)
                _show_step(f"prefill, {length} tokens", taken, least(0, 0, length))
        if "mixed" in parts:
            batch, num_beside = MIXED
            taken = batch_time(backend, spec, batch, context, num_steps, num_beside=num_beside)
            _show_step(f"mixed, {batch} and {num_beside} tokens", taken, least(batch, context, num_beside))
        if "swap" in parts and is_cuda:
            for num_swapped, to_host in itertools.product(SWAPPED, (True, False)):
                num_bytes = num_swapped * block_bytes(spec, BLOCK_SIZE, backend.cache.gpu.whole.dtype)
                taken = swap_time(backend, num_swapped, to_host, num_steps)
                name = f"swap, {num_swapped} blocks {'out' if to_host else 'in'}"
                _show_step(name, taken, num_bytes / links[to_host])
        backend.close()
        del backend
        if is_cuda:
            gc.collect()
            torch.cuda.empty_cache()


def _show_step(name: str, taken: StepTime, least_s: float) -> None:
    print(
        f"  {name:<38}{taken.total_s * 1e3:>9.3f}{taken.device_s * 1e3:>11.3f}{least_s * 1e3:>10.3f}"
        f"{least_s / taken.total_s:>10.0%}{taken.host_share:>7.1%}",
        flush=True,
    )
