"""How many KV blocks fit: measured at the maximum load on a GPU, from a configured budget on the CPU. Also other steps
that serve no request: the warm-up, captures, a probe of the machine's speed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from real.attention.interface import metadata_of
from real.cache_engine import CacheEngine, block_bytes
from real.config import EngineOptions
from real.device import memory_named
from real.graphs import Capture, Computation, CudaCapture, GraphShape, StepGraphs
from real.layers.packed import make_code
from real.runner import EagerInputs, ModelRunner, StepInputs
from real.sampling.inputs import Source, heaviest_rows, sample_inputs, sent
from testbed.specs.memory import num_blocks_of_budget, num_kv_blocks
from testbed.specs.model import ExpertsShape

WARM_UP_CONTEXT = 1024  # enough for several parts of a split decode
WARM_UP_TOKENS = 256  # enough for the kernels of measured prefills; the maximum would take seconds on a CPU
WARM_UP_TILES = (17, 33)  # tokens, or samples of the LM head, with which our GEMMs begin to have tiles of another size


def fitting_num_blocks(
    runner: ModelRunner,
    cache_dtype: torch.dtype,
    gpu_memory_utilization: float,
    cpu_kv_bytes: int,
    captured: tuple[list[GraphShape], CudaCapture] | None = None,
) -> int:
    """Returns how many KV blocks fit on the device. Raises DeviceError if not even one fits.

    captured: the shapes of the steps that will be captured, which need memory as well, and how they are captured.
    """
    block_size, device = runner.options.block_size, runner.placement.device
    size = block_bytes(runner.spec, block_size, cache_dtype, runner.placement.group.size)
    if device.type == "cpu":
        return num_blocks_of_budget(cpu_kv_bytes, size, block_size)
    weights, temporaries = _measure(runner, cache_dtype)
    graphs = 0
    if captured is not None:
        with memory_named(
            "captured steps do not fit: lower backend.max_captured_tokens or backend.max_captured_size, or set "
            "cuda_graphs=false"
        ):
            graphs = _measure_graphs(runner, cache_dtype, *captured)
    return num_kv_blocks(
        memory_bytes=torch.cuda.mem_get_info(device)[1],
        utilization=gpu_memory_utilization,
        weight_bytes=weights,
        activation_bytes=temporaries,
        graph_bytes=graphs,
        block_bytes=size,
    )


@torch.inference_mode()
def _measure(runner: ModelRunner, cache_dtype: torch.dtype) -> tuple[int, int]:
    """Returns the bytes of the weights, and the bytes of everything else: the peak of two steps at the maximum load
    (with their two KV blocks) plus the memory of the GPU that others hold."""
    options, device = runner.options, runner.placement.device
    max_num_batched_tokens, max_num_seqs = options.max_num_batched_tokens, options.max_num_seqs
    max_model_len = options.max_model_len
    torch.cuda.synchronize(device)
    weights = torch.cuda.memory_allocated(device)
    cache = _small_cache(runner, cache_dtype)
    torch.cuda.reset_peak_memory_stats(device)
    most = min(max_num_batched_tokens, max_num_seqs * max_model_len)
    loads = [
        [(num, max_model_len) for num in _prompts(most, max_model_len)],  # prefills at the end of long prompts
        [(1, max_model_len)] * min(max_num_seqs, max_num_batched_tokens),  # decodes of the longest sequences
    ]
    with memory_named(
        f"a step of {max_num_batched_tokens} tokens of {max_num_seqs} sequences does not fit: lower "
        "scheduler.max_num_batched_tokens or scheduler.max_num_seqs"
    ):
        for load in loads:
            run_load(runner, synthetic_load(runner, load, max_num_seqs), cache)
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - weights
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = max(0, total - free - torch.cuda.memory_reserved(device))  # the CUDA context, other processes
    return weights, activations + others


def _small_cache(runner: ModelRunner, dtype: torch.dtype) -> CacheEngine:
    """Returns a cache of two blocks: one that all rows of a synthetic load share, and a scratch block."""
    return CacheEngine(
        runner.spec, runner.placement, block_size=runner.options.block_size, num_gpu_blocks=1, num_cpu_blocks=0,
        dtype=dtype,
    )  # fmt: skip


def _free_bytes(device: torch.device) -> int:
    """Returns the free bytes of the GPU, after torch has released unused memory."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _measure_graphs(
    runner: ModelRunner, cache_dtype: torch.dtype, shapes: list[GraphShape], capture: CudaCapture
) -> int:
    """Returns the bytes that captured steps of these shapes will hold: tensors, and the driver's memory for each graph.

    It is measured on three of them, whose graphs are released again. The largest allocates the memory that all share;
    two more show what each further graph adds.
    """
    probes = sorted({shapes[0], shapes[len(shapes) // 2], shapes[-1]}, reverse=True)
    cache, device = _small_cache(runner, cache_dtype), runner.placement.device
    free = [_free_bytes(device)]  # before the first capture, and after each

    def metered(work: Computation) -> Computation:
        replay = capture(work)
        free.append(_free_bytes(device))
        return replay

    capture_steps(runner, cache, probes, metered)
    capture.begin_anew()
    first, *others = (max(0, before - after) for before, after in pairwise(free))
    per_graph = min(others, default=0)  # the larger may include loaded kernels or another process's memory
    return first + per_graph * (len(shapes) - 1)


@torch.inference_mode()
def warm_up(runner: ModelRunner, cache: CacheEngine) -> None:
    """Runs steps of each kind and touches the device's KV memory, so that no measured step includes first calls."""
    is_cuda = runner.placement.device.type == "cuda"
    if is_cuda:
        cache.warm_up()
    for load in warm_up_loads(runner.options, is_cuda, runner.spec.experts):
        num_tokens = sum(num for num, _ in load)
        num_samples = num_tokens if is_cuda and num_tokens in WARM_UP_TILES else 2
        run_load(runner, synthetic_load(runner, load, num_samples), cache)
    if not is_cuda:
        make_code(runner.model, runner.options.max_num_batched_tokens)
    for layer in cache.gpu:
        layer.zero_()


def warm_up_loads(
    options: EngineOptions, is_cuda: bool, experts: ExpertsShape | None = None
) -> list[list[tuple[int, int]]]:
    """Returns rows (query length, context length) for steps of each kind. On a GPU a kind is a set of kernels: long and
    short prefills, with and without decodes, few long decodes and many short ones, and numbers of tokens."""
    num_tokens = min(WARM_UP_TOKENS, options.max_num_batched_tokens, options.max_model_len)
    decodes = [(1, 1)] * min(options.max_num_seqs, options.max_num_batched_tokens)
    prefill = (num_tokens, num_tokens)
    loads = [[prefill], decodes]
    if is_cuda:
        short, long = (min(2, num_tokens),) * 2, (1, min(WARM_UP_CONTEXT, options.max_model_len))
        loads += [[prefill, long], [short], [short, *decodes], [long]]
        sizes = {*WARM_UP_TILES, *(() if experts is None else tokens_of_larger_tiles(experts))}
        most = min(options.max_num_batched_tokens, options.max_num_seqs * options.max_model_len)
        for num in sorted(size for size in sizes if size <= most):
            loads.append([(part, part) for part in _prompts(num, options.max_model_len)])
    return loads


def _prompts(num_tokens: int, max_model_len: int) -> list[int]:
    """Returns the lengths of as few prompts as possible that have `num_tokens` together."""
    return [min(max_model_len, num_tokens - first) for first in range(0, num_tokens, max_model_len)]


def tokens_of_larger_tiles(experts: ExpertsShape) -> list[int]:
    """Returns the numbers of tokens with which tiles of an expert's tokens become larger on a GPU."""
    from real.kernels.routing import TILES  # not at the top: needs Triton

    return [tile * experts.num // experts.per_token + 1 for tile in TILES[:-1]]


def make_probe(runner: ModelRunner, cache: CacheEngine) -> Callable[[], None] | None:
    """Returns a probe: the forward pass of one decode in the scratch block, whose duration shows how fast the machine
    is at the moment. None on a GPU, which is not shared, and for ranks, which would have to run it together."""
    if runner.placement.device.type != "cpu" or runner.placement.group.size > 1:
        return None
    inputs = synthetic_load(runner, [(1, runner.options.block_size)], 1, block=cache.scratch_block)

    @torch.inference_mode()
    def probe() -> None:  # samples nothing: a step in flight may still need the tokens that were sampled last
        runner.token_logits(runner.hidden_states(inputs, cache.gpu), inputs.sample_tokens)

    return probe


@torch.inference_mode()
def capture_steps(runner: ModelRunner, cache: CacheEngine, shapes: list[GraphShape], capture: Capture) -> StepGraphs:
    """Captures steps of these shapes over the cache; the KV memory is zero again afterwards."""
    graphs = StepGraphs(runner.model, runner.attention, cache, runner.options, shapes, capture)
    cache.gpu.whole[:, :, cache.scratch_block].zero_()
    return graphs


def run_load(runner: ModelRunner, inputs: StepInputs, cache: CacheEngine) -> None:
    hidden = runner.hidden_states(inputs, cache.gpu)
    runner.draw(hidden, runner.token_logits(hidden, inputs.sample_tokens), inputs)


def synthetic_load(runner: ModelRunner, load: list[tuple[int, int]], num_samples: int, block: int = 0) -> StepInputs:
    """Returns the inputs of (query length, context length) rows that all read and write one block: full work, little
    memory. The rows that sample use all features of the sampler."""
    block_size, device = runner.options.block_size, runner.placement.device
    num_tokens = sum(num for num, _ in load)
    max_blocks = max(-(-context // block_size) for _, context in load)
    slots = torch.full((num_tokens,), block * block_size, dtype=torch.int64, device=device)
    tables = torch.full((len(load), max_blocks), block, dtype=torch.int32, device=device)
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    sample_tokens = torch.arange(num_samples, device=device) % num_tokens
    sampling = sent(
        sample_inputs(heaviest_rows(num_samples), Source(runner.spec.vocab_size)),
        lambda arrays: [torch.from_numpy(array).to(device) for array in arrays],
    )
    return StepInputs(EagerInputs(zeros, zeros, metadata_of(load, slots, tables)), sample_tokens, sampling, (), ())
