"""The real engine behind the core's Backend protocol: one plan in, sampled tokens and measured times out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import cycle
from typing import NamedTuple

import torch

from real.attention.interface import AttentionSpec, cache_format
from real.attention.registry import Choice, choose_together
from real.cache_engine import CacheEngine, block_bytes
from real.config import EngineOptions, RealConfig
from real.device import (
    Placement,
    Stopwatch,
    describe_device,
    is_out_of_memory,
    memory_named,
    resolve_device,
    resolve_dtype,
    stopwatch,
    weight_bytes,
)
from real.driver import Computed, Work
from real.graphs import CudaCapture, GraphShape, captured_shapes
from real.host_memory import check_fits, check_tables_fit
from real.loader import load_weights
from real.max_load import capture_steps, fitting_num_blocks, make_probe, warm_up
from real.models.interface import CausalLM
from real.models.registry import build_model, check_supported
from real.parallel.group import SINGLE, TensorGroup
from real.runner import ModelRunner, StepInputs
from real.sampling.inputs import SampleInputs
from real.sampling.sampler import Drawn, outcomes, prompt_logprobs
from testbed.checks import require_whole
from testbed.core.outcome import Spans
from testbed.core.plan import BatchPlan, ScheduledSequence
from testbed.errors import DeviceError
from testbed.specs.model import ModelSpec

LESS_MEMORY = (
    "lower cache.num_gpu_blocks or cache.gpu_memory_utilization, scheduler.max_num_batched_tokens or "
    "scheduler.max_num_seqs"
)


class _Launched(NamedTuple):
    """A launched step. swap_ns: the time of its swaps on their own stream. drawn: None if nothing was computed."""

    clock: Stopwatch
    swap_ns: Callable[[], int]
    drawn: tuple[SampleInputs, Drawn] | None


class RealBackend:
    """Loads a model, allocates its KV memory, executes plans. Implements testbed.core.interfaces.Backend.

    group: the ranks that share the model, of which this is one. Raises ModelError, DeviceError, ConfigError.
    """

    def __init__(
        self, spec: ModelSpec, config: RealConfig, options: EngineOptions, group: TensorGroup = SINGLE
    ) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        placement = Placement(resolve_device(config.device), resolve_dtype(config.dtype, spec), group)
        check_supported(spec, options.sliding_window, group.size, options.max_model_len)
        attention = _attention_spec(spec, config, options, placement)
        choice = _choose_attention(config.attention, attention, placement)
        self.attention_name, self.attention_reasons = choice.provider.name, choice.reasons
        self.device_description = describe_device(placement.device)
        if placement.device.type == "cpu" and group.size == 1:  # several ranks are checked together, before they start
            check_host_memory(spec, config, options)
        check_tables_fit(options.max_num_seqs, -(-options.max_model_len // options.block_size))
        model, self.load_format = _load_model(spec, placement, config.load_format, options.seed)
        self.runner = ModelRunner(model, choice.provider, placement, spec, options)
        captured = None  # the shapes of the steps to capture as graphs, and the capture that they share
        if config.cuda_graphs and placement.device.type == "cuda" and choice.provider.supports_graphs:
            captured = shapes_to_capture(config, options), CudaCapture()
        num_gpu_blocks = options.num_gpu_blocks
        if num_gpu_blocks is None:
            num_gpu_blocks = fitting_num_blocks(
                self.runner, attention.cache_dtype, options.gpu_memory_utilization, config.cpu_kv_bytes, captured
            )
            num_gpu_blocks = int(_of_ranks(num_gpu_blocks, placement).min())  # all ranks have the same blocks
        self.num_gpu_blocks = num_gpu_blocks
        self.num_cpu_blocks = options.num_cpu_blocks or 0
        require_whole("num_gpu_blocks", self.num_gpu_blocks, 1)
        require_whole("num_cpu_blocks", self.num_cpu_blocks, 0)
        self.cache = CacheEngine(
            spec, placement, block_size=options.block_size, num_gpu_blocks=self.num_gpu_blocks,
            num_cpu_blocks=self.num_cpu_blocks if options.swaps else 0, dtype=attention.cache_dtype,
        )  # fmt: skip
        self.name_parts()
        self._stopwatches = cycle([stopwatch(placement.device) for _ in range(2)])  # at most two steps are in flight
        self.probe = make_probe(self.runner, self.cache)
        with memory_named(f"{LESS_MEMORY}, or set backend.cuda_graphs=false"):
            if captured is not None:  # first: a capture would release the pinned memory that warm_up allocates
                self.runner.graphs = capture_steps(self.runner, self.cache, *captured)
            warm_up(self.runner, self.cache)

    def start(self, plan: BatchPlan) -> Work:
        """Launches one step: block moves, forward pass, sampling. On a GPU it returns before they are done. On a CPU it
        only prepares their inputs, and `wait` computes: so a step in flight is computed before the next one.
        """
        rows, began_ns = plan.scheduled, time.perf_counter_ns()
        with memory_named(LESS_MEMORY), torch.inference_mode(), self._part("prepare"):
            inputs = self.runner.prepare(rows) if rows else None
        sampled = [row for row in rows if row.samples]
        finish = partial(self._finish, sampled, time.perf_counter_ns() - began_ns)
        if self.runner.placement.device.type == "cpu":
            return Work(lambda: finish(self._launch(plan, inputs)), lambda: True)
        launched = self._launch(plan, inputs)
        return Work(partial(finish, launched), launched.clock.is_done)

    def _launch(self, plan: BatchPlan, inputs: StepInputs | None) -> _Launched:
        clock = next(self._stopwatches)
        with memory_named(LESS_MEMORY), torch.inference_mode():
            clock.restart()
            clock.mark()
            with self._part("swap"):
                swap_ns = self.cache.execute(plan)
            clock.mark()
            drawn = None
            if inputs is not None:
                with self._part("forward"):
                    hidden = self.runner.hidden_states(inputs, self.cache.gpu)
                    logits = self.runner.token_logits(hidden, inputs.sample_tokens)
                clock.mark()
                with self._part("sample"):
                    drawn = inputs.sampling, self.runner.draw(hidden, logits, inputs)
            else:
                clock.mark()
            clock.mark()
        return _Launched(clock, swap_ns, drawn)

    def _finish(self, sampled: Sequence[ScheduledSequence], prepare_ns: int, launched: _Launched) -> Computed:
        """Waits for a launched step. sampled: its rows that sample."""
        clock, swap_ns, drawn = launched
        on_stream_ns, forward_ns, sample_ns = clock.finish()  # waits, also for swaps on their own stream
        moved_ns = max(on_stream_ns, swap_ns())  # the current stream can be idle while the host launches swaps
        spans = Spans(0, prepare_ns, moved_ns, forward_ns, sample_ns)
        if drawn is None:
            return Computed(None, spans)
        are_forced = all(row.forced for row in sampled)
        ends = self.runner.spec.eos_token_id, self.runner.options.max_model_len
        chosen = None if are_forced else outcomes(sampled, *drawn, *ends)
        return Computed(chosen, spans, prompt_logprobs(*drawn))

    def name_parts(self, ranges: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        """Runs the parts of steps in named ranges, for a profiler. ranges: name -> context; by default, none."""
        self._part = ranges

    @property
    def largest_captured(self) -> tuple[int, int]:
        """The largest captured steps: rows of a step of decodes only, and tokens of any other step; 0: none."""
        graphs = self.runner.graphs
        return (0, 0) if graphs is None else graphs.largest

    def close(self) -> None:
        """Releases captured steps, whose collectives belong to the group. The engine cannot be used afterwards."""
        self.runner.graphs = None


def check_host_memory(
    spec: ModelSpec, config: RealConfig, options: EngineOptions, num_ranks: int = 1, num_replicas: int = 1
) -> None:
    """Raises DeviceError if the ranks of all replicas together need more memory than this host has available."""
    dtype = resolve_dtype(config.dtype, spec)
    size = block_bytes(spec, options.block_size, cache_format(options.kv_dtype, dtype), num_ranks)
    num_blocks = config.cpu_kv_bytes // size if options.num_gpu_blocks is None else options.num_gpu_blocks
    check_fits(spec.name, weight_bytes(spec, dtype), num_blocks, size * num_ranks, num_replicas)


def shapes_to_capture(config: RealConfig, options: EngineOptions) -> list[GraphShape]:
    """Returns the shapes of steps to capture, bounded by the scheduler's limits, as in the simulator."""
    most_tokens, most_rows = options.max_num_batched_tokens, options.max_num_seqs
    max_decodes = min(config.max_captured_size, most_rows, most_tokens)
    return captured_shapes(max_decodes, min(config.max_captured_tokens, most_tokens), most_rows)


def _of_ranks(number: int, placement: Placement) -> torch.Tensor:
    """Gathers a number from each rank: int64 [num_ranks]."""
    return placement.group.all_gather(torch.tensor([number], device=placement.device))


def _load_model(spec: ModelSpec, placement: Placement, load_format: str, seed: int) -> tuple[CausalLM, str]:
    """Returns the model with its weights, and the load format that was used."""
    try:
        model = build_model(spec, placement)
    except RuntimeError as error:
        if not is_out_of_memory(error):  # for example, a driver that is too old for this torch
            raise
        raise DeviceError(
            f"the weights of {spec.name} ({weight_bytes(spec, placement.dtype):,} bytes) do not fit on "
            f"{describe_device(placement.device)}; choose a smaller model"
        ) from None
    return model, load_weights(model, spec, load_format, seed)


def _choose_attention(wanted: str, attention: AttentionSpec, placement: Placement) -> Choice:
    """Returns the provider that all ranks can run. On a GPU the first rank logs once which ones `auto` passed over."""
    with memory_named("others hold it, as nvidia-smi shows: not even a first small step fits"):
        choice = choose_together(wanted, attention, lambda index: int(_of_ranks(index, placement).max()))
    if wanted == "auto" and placement.device.type == "cuda" and placement.group.rank == 0 and choice.passed_over:
        _warn_once(choice.passed_over)
    return choice


@cache
def _warn_once(message: str) -> None:
    logging.getLogger("testbed").warning("%s", message)


def _attention_spec(spec: ModelSpec, config: RealConfig, options: EngineOptions, placement: Placement) -> AttentionSpec:
    return AttentionSpec(
        num_heads=spec.num_attention_heads // placement.group.size,
        num_kv_heads=spec.num_kv_heads_per_rank(placement.group.size),
        head_dim=spec.head_dim,
        scale=spec.head_dim**-0.5,
        block_size=options.block_size,
        device=placement.device,
        dtype=placement.dtype,
        sliding_window=options.sliding_window,
        kv_dtype=options.kv_dtype or "auto",
        k_scale=config.k_scale,
        v_scale=config.v_scale,
    )
