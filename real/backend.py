"""The real engine behind the core's Backend protocol: one plan in, sampled tokens and measured times out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from real.attention.interface import AttentionSpec
from real.attention.registry import choose_attention
from real.batch import Layout
from real.beams import BeamSearch, Candidates, best_continuations, is_beam
from real.cache_engine import CacheEngine, block_bytes
from real.config import RealConfig
from real.device import Placement, Stopwatch, describe_device, resolve_device, resolve_dtype, stopwatch
from real.graphs import CudaCapture, captured_sizes
from real.host_memory import check_fits
from real.loader import load_weights
from real.models.interface import CausalLM
from real.models.registry import build_model, check_supported
from real.parallel.group import SINGLE, TensorGroup
from real.profiling import Limits, capture_decodes, fitting_num_blocks, warm_up
from real.runner import ModelRunner, StepInputs
from real.sampler import draw, draws_of, sample
from testbed.errors import ConfigError, DeviceError
from testbed.plan import BatchPlan, Outcome, ScheduledSequence, Spans
from testbed.specs import ModelSpec


class Drawn(NamedTuple):
    """What a step's logits gave, on the device."""

    token_ids: Tensor  # int64 [num_samples + further draws]: the first token of each row that samples, then the others
    beams: Candidates | None


class RealWork:
    """A plan that was launched. `wait` may be called once."""

    def __init__(
        self,
        sampled: list[ScheduledSequence],
        drawn: Drawn | None,
        beam_search: BeamSearch,
        clock: Stopwatch,
        prepare_ns: int,
        swap_ns: Callable[[], int],
    ) -> None:
        self._sampled = sampled
        self._drawn = drawn
        self._beam_search = beam_search
        self._clock = clock
        self._prepare_ns = prepare_ns
        self._swap_ns = swap_ns  # of swaps beside the stream of the clock, once that has finished

    def wait(self) -> tuple[tuple[Outcome, ...] | None, Spans]:
        """Blocks until the device is done: outcomes of the rows that were not forced (None: there are none), times."""
        swap_ns, forward_ns, sample_ns = self._clock.finish()
        swap_ns += self._swap_ns()
        spans = Spans(prepare_ns=self._prepare_ns, swap_ns=swap_ns, forward_ns=forward_ns, sample_ns=sample_ns)
        if self._drawn is None or all(row.forced for row in self._sampled):
            return None, spans
        return self._outcomes(self._drawn), spans

    def _outcomes(self, drawn: Drawn) -> tuple[Outcome, ...]:
        """One for each row that samples and is not forced, in the order of the rows."""
        draws = draws_of(self._sampled, drawn.token_ids.tolist())
        beams = [row for row in self._sampled if is_beam(row)]
        found = iter(self._beam_search.advance(beams, drawn.beams) if drawn.beams is not None else [])
        return tuple(
            next(found) if is_beam(row) else Outcome(row.seq_id, tokens[:1], forks=tokens[1:])
            for row, tokens in zip(self._sampled, draws, strict=True)
            if not row.forced
        )


class RealBackend:
    """Loads a model, allocates its KV memory, executes plans. Implements testbed.interfaces.Backend.

    num_gpu_blocks: None measures what fits (CUDA) or takes the stated budget (CPU). num_cpu_blocks: None is no swap
    space. max_model_len: the longest sequence to leave room for; None takes the model's. sliding_window: tokens that
    attention looks back at, the core's (None: all); a model that was trained with a window wants the same one, others
    take any. seed: of dummy weights and of requests that bring no seed. group: the ranks that share the model, of which
    this is one. Raises ModelError, DeviceError, ConfigError.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: RealConfig,
        *,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        gpu_memory_utilization: float = 0.9,
        num_gpu_blocks: int | None = None,
        num_cpu_blocks: int | None = None,
        max_model_len: int | None = None,
        sliding_window: int | None = None,
        seed: int = 0,
        group: TensorGroup = SINGLE,
    ) -> None:
        _check_at_least(
            1, block_size=block_size, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs
        )
        if sliding_window is not None:
            _check_at_least(1, sliding_window=sliding_window)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        placement = Placement(resolve_device(config.device), resolve_dtype(config.dtype, spec), group)
        check_supported(spec, sliding_window, group.size)
        choice = choose_attention(config.attention, _attention_spec(spec, block_size, placement, sliding_window))
        self.attention_name = choice.provider.name
        self.attention_reasons = choice.reasons
        self.device_description = describe_device(placement.device)
        if placement.device.type == "cpu":
            size = block_bytes(spec, block_size, placement.dtype, group.size)
            num_blocks = config.cpu_kv_bytes // size if num_gpu_blocks is None else num_gpu_blocks
            check_fits(spec.name, spec.num_parameters * placement.dtype.itemsize // group.size, num_blocks, size)
        model, self.load_format = _load_model(spec, placement, config.load_format, seed)
        self.runner = ModelRunner(
            model,
            choice.provider,
            placement,
            layout=Layout(block_size, spec.vocab_size, sliding_window),
            seed=seed,
        )
        limits = Limits(block_size, max_num_batched_tokens, max_num_seqs, max_model_len or spec.max_position_embeddings)
        if num_gpu_blocks is None:
            num_gpu_blocks = fitting_num_blocks(
                self.runner, spec, placement, limits, gpu_memory_utilization, config.cpu_kv_bytes
            )
        self.num_gpu_blocks = num_gpu_blocks
        self.num_cpu_blocks = num_cpu_blocks or 0
        _check_at_least(1, num_gpu_blocks=self.num_gpu_blocks)
        _check_at_least(0, num_cpu_blocks=self.num_cpu_blocks)
        self.cache = CacheEngine(
            spec,
            placement,
            block_size=block_size,
            num_gpu_blocks=self.num_gpu_blocks,
            num_cpu_blocks=self.num_cpu_blocks,
        )
        self._device = placement.device
        self._stopwatch = stopwatch(placement.device)
        self._beam_search = BeamSearch(spec.eos_token_id)
        warm_up(self.runner, self.cache, placement, limits)
        if config.cuda_graphs and self._device.type == "cuda" and choice.provider.supports_graphs:
            sizes = captured_sizes(min(config.max_captured_size, max_num_seqs, max_num_batched_tokens))
            self.runner.graphs = capture_decodes(self.runner, self.cache, placement, limits, sizes, CudaCapture())

    @torch.inference_mode()
    def start(self, plan: BatchPlan) -> RealWork:
        """Launches one step: block moves, forward pass, sampling. On a GPU it returns before they are done."""
        assert plan.num_steps == 1, "the real engine takes its plans one step at a time"
        began_ns = time.perf_counter_ns()
        rows = plan.scheduled
        inputs = self.runner.prepare(rows) if rows else None
        prepare_ns = time.perf_counter_ns() - began_ns
        clock = self._stopwatch
        clock.restart()
        clock.mark()
        self.cache.execute(plan)
        clock.mark()
        logits = self.runner.logits(inputs, self.cache.gpu) if inputs is not None else None
        clock.mark()
        sampled = [row for row in rows if row.samples]
        drawn = _draw(logits, inputs) if sampled and inputs is not None and logits is not None else None
        clock.mark()
        return RealWork(sampled, drawn, self._beam_search, clock, prepare_ns, self.cache.swap_ns)


def _draw(logits: Tensor, inputs: StepInputs) -> Drawn:
    """Launches all that chooses tokens. logits: float32 [num_samples, vocab]."""
    token_ids = sample(logits, inputs.sampling)
    if inputs.further is not None:
        token_ids = torch.cat([token_ids, draw(logits, inputs.further)])
    return Drawn(token_ids, None if inputs.beams is None else best_continuations(logits, inputs.beams))


def _load_model(spec: ModelSpec, placement: Placement, load_format: str, seed: int) -> tuple[CausalLM, str]:
    """The model with its weights, and where they came from."""
    try:
        model = build_model(spec, placement)
    except RuntimeError:  # torch has no narrower one for host memory
        raise DeviceError(
            f"the weights of {spec.name} ({spec.num_parameters * placement.dtype.itemsize:,} bytes) do not fit on "
            f"{describe_device(placement.device)}; choose a smaller model"
        ) from None
    return model, load_weights(model, spec, load_format, seed)


def _attention_spec(
    spec: ModelSpec, block_size: int, placement: Placement, sliding_window: int | None
) -> AttentionSpec:
    return AttentionSpec(
        num_heads=spec.num_attention_heads // placement.group.size,
        num_kv_heads=spec.num_kv_heads_per_rank(placement.group.size),
        head_dim=spec.head_dim,
        scale=spec.head_dim**-0.5,
        block_size=block_size,
        device=placement.device,
        dtype=placement.dtype,
        sliding_window=sliding_window,
    )


def _check_at_least(minimum: int, **counts: int) -> None:
    for name, count in counts.items():
        if count < minimum:
            raise ConfigError(f"{name} is {count}; it must be at least {minimum}")
