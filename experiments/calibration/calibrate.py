"""Profiles the real engine and fits `cost=calibrated` to the profile.

The profile is a set of steps that the ordinary serving loop ran, so a measured step includes all of a step's costs:
scheduling, input preparation, forward pass, sampling, host overheads. `real.profiler` makes the steps of the grid.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.progress import progress
from experiments.configuration.config import RunConfig
from experiments.configuration.names import device_named
from experiments.runs.collector import fewer_collections
from experiments.runs.environment import describe_driver, describe_versions
from experiments.wiring import build
from experiments.wiring.build_engine import build_real_backend, computes_beside
from experiments.wiring.traces import vocab_size
from real.config import RealConfig
from sim.cost.calibrated import Calibration
from sim.cost.calibration import calibrate
from sim.cost.calibration_file import save_calibration
from testbed.core.commands import Recorder, StepView
from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape
from testbed.core.scheduler import Scheduler
from testbed.core.serve import serve
from testbed.policies.config import SchedulerConfig
from testbed.records.recorder import RunRecorder
from testbed.records.recorders import Recorders
from testbed.records.tape import TapeWriter
from testbed.specs.profiles import Profile, ProfileManifest, number_repeats, write_profile
from testbed.traces.generators import LengthConfig, SyntheticConfig, generate
from testbed.traces.inbox import TraceInbox
from testbed.traces.schema import Trace

if TYPE_CHECKING:  # needs numpy, and is only used with the torch engine
    from real.clocks import Clock
    from real.profiler.measure import Profiled, Recorded, Unit

PROFILE_FILE, FIT_FILE = "profile.parquet", "calibrated-cost.json"  # in the folder of a calibration
PROFILE_SEED = 1_000_003  # of the profiling traces; experiments are unlikely to use this seed


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured. is_quick: a coarse grid. repeats: of each step of the grid. num_requests: of the largest
    ordinary load; 0: no loads. max_s: time limit, after which the profile is incomplete."""

    is_quick: bool = False
    repeats: int = 3
    num_requests: int = 24
    max_s: float = 540.0


QUICK = Extent(is_quick=True, repeats=2, num_requests=10)


def profile(config: RunConfig, extent: Extent) -> Profile:
    """The profile of `measure_profile`. Raises KeyboardInterrupt if it was interrupted."""
    measurement = measure_profile(config, extent)
    if measurement.profiled.is_interrupted:
        raise KeyboardInterrupt
    return measurement.profile


class Measurement(NamedTuple):
    """A measured profile. profiled: how much of the plan was measured. num_gpu_blocks: of the engine. clock: its
    `describe()`."""

    profile: Profile
    profiled: Profiled
    num_gpu_blocks: int
    clock: dict[str, Any] | None


def measure_profile(
    config: RunConfig, extent: Extent, *, command: str = "", say: Callable[[str], object] = str
) -> Measurement:
    """Measures steps of the real engine of `config`, to which a cost model can be fitted: a grid and ordinary loads.

    The grid shows the cost of each size separately. The loads have batches as in runs: whole prompts and chunks, from
    one running sequence to as many as fit. Traces are generated only for this purpose, so that later predictions are of
    unseen steps. say: is given a line when the weights are there, which may take long. Raises ConfigError if the engine
    has no room for steps.
    """
    backend: Any = build_real_backend(config, swaps=True)  # swaps are measured too
    from real.clocks import make_clock
    from real.profiler.measure import measure

    assert isinstance(config.backend, RealConfig), "only the real engine is profiled"
    pace = "probe_scaled" if config.backend.pace == "probe_scaled" else "as_fast_as_possible"
    clock = make_clock(replace(config.backend, pace=pace), backend)
    with tempfile.TemporaryDirectory(prefix="testbed-profile-") as scratch, closing(backend):
        measured = (config, backend, clock, extent, Path(scratch))
        units = [*_grid(*measured), *_loads(*measured)]
        num = sum(extent.repeats if unit.is_repeated else 1 for unit in units)
        say(f"profile      the engine is ready: {num:,} episodes to measure")
        with progress("profile", "episode", num) as bar, fewer_collections():  # as in runs
            profiled = measure(
                units, repeats=extent.repeats, max_s=extent.max_s, seed=PROFILE_SEED, progress=bar.update
            )
        described = _manifest(config, backend, command)  # a closed engine has no captured steps
    manifest = replace(described, probe_ns=getattr(clock, "probe_ns", None))
    profile = Profile(manifest, number_repeats(profiled.steps))
    return Measurement(profile, profiled, backend.num_gpu_blocks, clock.describe())


def together(*profiles: Profile) -> Profile:
    """Joins profiles of the same engine, measured by the same clock, under the manifest of the first."""
    assert len({one.manifest.probe_ns for one in profiles}) == 1, "times of different probes do not go together"
    steps = [(step.shape, step.spans, step.total_ns) for one in profiles for step in one.steps]
    return Profile(profiles[0].manifest, number_repeats(steps))


def _is_cpu(backend: RealConfig) -> bool:
    from real.device import resolve_device

    return resolve_device(backend.device).type == "cpu"


def _manifest(config: RunConfig, backend: Any, command: str) -> ProfileManifest:
    assert isinstance(config.backend, RealConfig)
    is_cpu = _is_cpu(config.backend)
    captured_decodes, captured_tokens = backend.largest_captured
    return ProfileManifest(
        device="cpu" if is_cpu else device_named(backend.device_description) or config.device.name,
        device_description=backend.device_description,
        driver="" if is_cpu else describe_driver(),
        versions=describe_versions(),
        attention=backend.attention_name,
        captured_decodes=captured_decodes,
        captured_tokens=captured_tokens,
        model={name: value for name, value in asdict(config.model).items() if name != "path"},
        block_size=config.cache.block_size,
        dtype="fp8" if config.model.dtype == "fp8" else config.backend.dtype or config.model.dtype,
        kv_dtype=config.cache.kv_dtype,
        sliding_window=config.sliding_window,
        tensor_parallel_size=config.tensor_parallel_size,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=command,
    )


@dataclass(frozen=True, slots=True)
class Fitted:
    """A calibration, the overrides that select it, and its error on left-out steps, in words."""

    overrides: list[str]
    description: str
    calibration: Calibration


def fit_and_save(measured: Profile, folder: Path) -> Fitted:
    """Writes profile.parquet and the fit to it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_profile(folder / PROFILE_FILE, *measured)
    calibration, file = calibrate(measured), folder / FIT_FILE
    save_calibration(calibration, file)
    best = calibration.quality["all"]
    description = (
        f"calibrated cost fitted to {len(measured.steps)} other steps, cross-validated error {best.median:.1%} "
        f"(median), {best.p90:.1%} (P90)"
    )
    overrides = ["cost=calibrated", f"cost.path={file}", f"device={measured.manifest.device}"]
    return Fitted(overrides, description, calibration)


def describe(calibration: Calibration) -> str:
    """The fit as text: errors by region, coefficients, curves, profiled range."""
    manifest = calibration.manifest
    lines = [
        f"{manifest.model['name']} ({manifest.dtype}) on {manifest.device} ({manifest.device_description}), "
        f"attention {manifest.attention or '-'}, block size {manifest.block_size}",
        f"relative error of shapes that were left out ({calibration.num_folds} folds)",
        f"  {'region':<8} {'steps':>7} {'shapes':>7} {'median':>8} {'P90':>8} {'bias':>8}   repeats differ by",
    ]
    for region, quality in calibration.quality.items():
        noise = "-" if quality.noise is None else f"{quality.noise:.1%}"
        errors = f"{quality.median:>8.1%} {quality.p90:>8.1%} {quality.bias:>+8.1%}"
        lines.append(f"  {region:<8} {quality.num_steps:>7,} {quality.num_shapes:>7,} {errors}   {noise}")
    lines.append("coefficients, ns")
    lines += [f"  {name:<26} {value:>10,.4g}" for name, value in asdict(calibration.coefficients).items()]
    lines.append(f"  {'repeated_saving':<26} {calibration.repeated_saving:>10,.4g}  (a share, of shared positions)")
    for name, curve in (("decode", calibration.decode_curve), ("prefill", calibration.prefill_curve)):
        lines.append(f"{name} curve: " + ", ".join(f"{tokens} -> {ns / 1e6:.3g} ms" for tokens, ns in curve))
    lines.append("profiled range")
    for region, features in calibration.ranges.items():
        spans = ", ".join(f"{name} {low:,} to {high:,}" for name, (low, high) in features.items())
        lines.append(f"  {region:<8} {spans}")
    return "\n".join(lines)


# --- what is measured ---


def _grid(config: RunConfig, backend: Any, clock: Clock, extent: Extent, scratch: Path) -> list[Unit]:
    """The episodes of the grid, under a plain scheduler with a watermark of 0."""
    assert isinstance(config.backend, RealConfig)
    from real.profiler.grid import Room, anywhere, design
    from real.profiler.measure import Bench, Unit, fill_with_noise, run_episode

    fill_with_noise(backend.cache.gpu.whole)
    bounds = config.limits
    room = Room(
        config.cache.block_size, backend.num_gpu_blocks, backend.num_cpu_blocks,
        bounds.max_num_seqs, bounds.max_num_batched_tokens, bounds.max_model_len,
    )  # fmt: skip
    pools = build.Pools(backend.num_gpu_blocks, backend.num_cpu_blocks)
    # a CPU reads scattered blocks more slowly than adjacent ones
    scattered = anywhere(pools.num_gpu_blocks, PROFILE_SEED) if _is_cpu(config.backend) else []

    def make_scheduler(*, budget: int, caching: bool | None, decodes_wait: bool) -> Scheduler:
        plain = SchedulerConfig(
            "profiler", composition="prefill_first" if decodes_wait else "unified", max_num_seqs=bounds.max_num_seqs,
            max_num_batched_tokens=budget, max_model_len=bounds.max_model_len, watermark=0.0,
        )  # fmt: skip
        cache = replace(config.cache, watermark=None, eviction="lru")
        if caching is not None:
            cache = replace(cache, prefix_caching=caching)
        scheduler = build.build_scheduler(replace(config, scheduler=plain, cache=cache), pools)
        if scattered:
            scheduler.blocks.hand_out_in(scattered)
        return scheduler

    sampling = replace(config.sampling, n=1, best_of=None, beam_width=0)
    bench = Bench(
        backend, clock, room, make_scheduler, partial(_recorded, config, scratch), vocab_size(config), sampling
    )
    return [
        Unit(partial(run_episode, bench, episode, number))
        for number, episode in enumerate(design(room, is_quick=extent.is_quick, seed=PROFILE_SEED))
    ]


@contextmanager
def _recorded(config: RunConfig, scratch: Path, recorder: Recorder) -> Iterator[Recorded]:
    """The recorder together with those of a real run, so that steps have the same recording cost. On a GPU, as in a
    real run, these write late."""
    from real.late_records import LateRecords

    records, tape = RunRecorder(scratch), TapeWriter(scratch / "tape.jsonl")
    with closing(records), closing(tape):
        if not computes_beside(config):
            yield Recorders(records, tape, recorder), None
            return
        with closing(LateRecords().of(Recorders(records, tape))) as late:
            yield Recorders(late, recorder), late.catch_up


_COMPOSITIONS = (("prefill_first", None), ("decode_first", None), ("decode_first", 256))  # (composition, budget)


def _loads(config: RunConfig, backend: Any, clock: Clock, extent: Extent, scratch: Path) -> list[Unit]:
    """Ordinary loads, each under each of `_COMPOSITIONS`."""
    from real.driver import run as drive
    from real.profiler.measure import Unit

    if not extent.num_requests:
        return []
    pools, own = build.Pools(backend.num_gpu_blocks, backend.num_cpu_blocks), config.scheduler
    longest = max(16, min(4096, config.cache.block_size * pools.num_gpu_blocks // 2, config.limits.max_model_len // 2))

    def served_steps(composition: str, budget: int | None, trace: Trace) -> list[tuple[BatchShape, Spans, int]]:
        """Every step that the engine needs for a trace; without asynchronous scheduling, as host time must show."""
        changed = replace(own, composition=composition, max_num_batched_tokens=budget, async_scheduling=False)
        scheduler = build.build_scheduler(replace(config, scheduler=changed), pools)
        collector = _Collector()
        with _recorded(config, scratch, collector) as (recorder, catch_up):
            loop = serve(TraceInbox(trace, vocab_size(config)), scheduler, recorder)
            drive(loop, backend, clock, catch_up=catch_up)
        return collector.steps

    return [
        Unit(partial(served_steps, composition, budget, trace), is_repeated=False)
        for composition, budget in _COMPOSITIONS
        for trace in _traces(extent.num_requests, longest)
    ]


class _Collector(Recorder):
    """Keeps shape, spans and duration of each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[BatchShape, Spans, int]] = []

    def committed(self, step: StepView) -> None:
        if not step.plan.shape.is_empty:
            self.steps.append((step.plan.shape, step.result.spans, step.end_ns - step.plan_ns))


def _traces(num_requests: int, max_tokens: int) -> list[Trace]:
    """Traces that separate the coefficients: batch size, context, prompt length and cached prefix vary independently.

    They have many short contexts, many of mixed lengths, few long ones, and sessions of three or eight turns without
    think times. Later turns hit the cache, and there are only a few decodes of different contexts between their
    prompts, as in real traffic.
    """
    few = max(2, num_requests // 4)
    users = {"arrival": "all_at_once", "think_time_s": 0.0}
    shapes: list[tuple[int, int, int, dict[str, Any]]] = [
        (num_requests, 8, max(8, max_tokens // 16), {"arrival": "all_at_once"}),
        (num_requests, 8, max(8, max_tokens // 2), {"arrival": "all_at_once"}),
        (few, max_tokens // 2, max_tokens, {"arrival": "all_at_once"}),
        (num_requests, 8, max(8, max_tokens // 4), {**users, "min_turns": 3, "max_turns": 3}),
        (num_requests, 8, max(8, max_tokens // 8), {**users, "min_turns": 8, "max_turns": 8}),
    ]
    return [
        generate(
            SyntheticConfig(
                num_requests=count,
                prompt=LengthConfig("uniform", min_tokens=shortest, max_tokens=longest),
                output=LengthConfig("uniform", min_tokens=8, max_tokens=96),
                max_session_tokens=max_tokens + 96,
                **options,
            ),
            PROFILE_SEED + index,
        )
        for index, (count, shortest, longest, options) in enumerate(shapes)
    ]
