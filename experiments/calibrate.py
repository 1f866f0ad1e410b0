"""Profiles the real engine and fits the simulator's prices to it: the measuring half of every sim-against-real table.

The profile is a set of steps that the ordinary loop ran, so a measured step holds everything that a step costs:
scheduling, input preparation, forward pass, sampling, host overheads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import build
from experiments.config import RunConfig
from experiments.run import ProgressBar, Recorders
from real.config import RealConfig
from sim.cost.linear import LinearFit, MeasuredStep, fit_linear, save_fit
from testbed.interfaces import StepView
from testbed.plan import Finished
from testbed.records import RunRecorder, decision
from testbed.request import Request
from testbed.serve import serve
from testbed.tape import TapeWriter
from testbed.traces.generators import LengthConfig, SyntheticConfig, generate
from testbed.traces.inbox import TraceInbox
from testbed.traces.schema import Trace

PROFILE_SEED = 1_000_003  # of the profiling traces: not a seed that an experiment would use


def profile(config: RunConfig, *, num_requests: int = 24) -> list[MeasuredStep]:
    """Steps of the real engine of `config` over varied loads, for a cost model to be fitted to.

    Each load is run whole-prompt and chunked, from one running sequence to as many as fit. The traces are generated
    for this purpose only, so what is predicted later was not seen here.
    """
    return profile_steps(config, _loads(num_requests, max_tokens=_longest(config)))


def fit_and_save(steps: Sequence[MeasuredStep], config: RunConfig, path: Path) -> LinearFit:
    """Fits the linear cost model and writes it where `cost=linear cost.path=<path>` reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fit = fit_linear(steps)
    save_fit(fit, path, model=config.model.name, block_size=config.cache.block_size)
    return fit


def profile_steps(config: RunConfig, traces: Sequence[Trace]) -> list[MeasuredStep]:
    """(shape, ns) of every step that the engine needs for the traces, under each way to batch them."""
    assert isinstance(config.backend, RealConfig), "only the real engine is profiled"
    from real.driver import run as drive

    backend: Any = build.build_real_backend(config)
    pools = build.Pools(backend.num_gpu_blocks, backend.num_cpu_blocks)
    options = replace(config.backend, pace="as_fast_as_possible")
    collected: list[MeasuredStep] = []
    bar = ProgressBar(3 * sum(len(trace) for trace in traces), "profile")
    with tempfile.TemporaryDirectory(prefix="testbed-profile-") as scratch, closing(bar):
        for composition, budget in (("prefill_first", None), ("decode_first", None), ("decode_first", 256)):
            changed = replace(config.scheduler, composition=composition, max_num_batched_tokens=budget)
            scheduler_config = replace(config, scheduler=changed)
            for trace in traces:
                scheduler = build.build_scheduler(scheduler_config, pools, record_decisions=True)
                collector = _Collector()
                # as a real run records: its steps pay for that too
                recorder, tape = RunRecorder(Path(scratch)), TapeWriter(Path(scratch, "tape.jsonl"), decision)
                with closing(recorder), closing(tape):
                    recorders = Recorders(recorder, tape, collector, bar)
                    drive(serve(TraceInbox(trace, build.vocab_size(config)), scheduler, recorders), backend, options)
                collected += collector.steps
    return collected


class _Collector:
    """Keeps the shape and the duration of each step. A `Recorder`."""

    def __init__(self) -> None:
        self.steps: list[MeasuredStep] = []

    def committed(self, step: StepView) -> None:
        if step.plan.shape.num_tokens:
            self.steps.append((step.plan.shape, step.commit_ns - step.plan_ns))

    def arrived(self, request: Request, now_ns: int, step: int) -> None: ...
    def aborted(self, request_id: str, now_ns: int, step: int) -> None: ...
    def ended(self, finished: list[Finished], now_ns: int) -> None: ...


def _longest(config: RunConfig) -> int:
    """Tokens of the longest profiled prompt: what the pool and the model can hold, at most 4096."""
    pool_tokens = config.cache.block_size * (config.cache.num_gpu_blocks or 4096)
    return max(16, min(4096, pool_tokens // 2, build.limits(config).max_model_len // 2))


def _loads(num_requests: int, max_tokens: int) -> list[Trace]:
    """Loads that tell the coefficients apart: batch size, context, prompt length and cached prefix vary on their own.

    Many short contexts; as many of mixed length; few long ones; sessions whose turns hit the cache.
    """
    few = max(2, num_requests // 4)
    shapes: list[tuple[int, int, int, dict[str, Any]]] = [
        (num_requests, 8, max(8, max_tokens // 16), {"arrival": "all_at_once"}),
        (num_requests, 8, max(8, max_tokens // 2), {"arrival": "all_at_once"}),
        (few, max_tokens // 2, max_tokens, {"arrival": "all_at_once"}),
        (2 * few, 8, max_tokens // 4, {"rate": 4.0, "min_turns": 3, "max_turns": 3, "think_time_s": 0.05}),
    ]
    return [
        generate(
            SyntheticConfig(
                num_requests=count,
                prompt=LengthConfig("uniform", 1.0, 0.0, shortest, longest),
                output=LengthConfig("uniform", 1.0, 0.0, 8, 96),
                max_session_tokens=max_tokens + 96,
                **options,
            ),
            PROFILE_SEED + index,
        )
        for index, (count, shortest, longest, options) in enumerate(shapes)
    ]
