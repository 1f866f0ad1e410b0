"""Prepares a run: builds engines (simulated, real, vLLM's) and the inboxes that feed them, and measures the clock and
host of a real run for its manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from xxhash import xxh64_hexdigest

from experiments.configuration.config import RunConfig
from experiments.configuration.saved import saved_config
from experiments.configuration.settings import PROFILED
from experiments.runs.environment import versions_in_vllm
from experiments.wiring import build, build_engine, engines
from experiments.wiring.costs import fit_file, kernels_of
from experiments.wiring.traces import check_simulated_output, end_token_ids, forcing, vocab_size, with_ends
from real.clocks import RealTimeClock
from real.config import RealConfig
from real.late_records import LateRecords
from real.replay import CoreWait, HostTimes, ReplayLag, core_wait_notes
from real.vllm.config import VllmConfig
from sim.config import SimConfig
from sim.cost.base import CostModel
from sim.cost.calibrated import CalibratedCost
from sim.cost.config import CalibratedConfig
from sim.front_end import FrontEnd
from testbed.core.commands import Recorder
from testbed.core.interfaces import Inbox
from testbed.core.request import Request
from testbed.core.scheduler import Scheduler
from testbed.core.serve import Loop
from testbed.errors import ConfigError
from testbed.records.sender import Sender
from testbed.seeds import needs_seed, seeded
from testbed.traces.inbox import TraceInbox
from testbed.traces.schema import Trace
from testbed.traces.stream import CountedTrace, whole
from testbed.traces.transforms import speed_up

TraceLike = Trace | CountedTrace  # whole in memory, or read once during the run


def at_speed(trace: Trace, speed: float) -> Trace:
    """Returns the trace at the replay's speed; a run folder keeps the original. Raises ConfigError."""
    if speed == 1:
        return trace
    try:
        return speed_up(trace, speed)
    except ConfigError as error:
        raise ConfigError(str(error).replace("factor", "backend.speed", 1)) from None


def replay_speed(config: RunConfig) -> float:
    """Returns how many times as fast as its clock the trace is sent; of a replayed tape as it was recorded."""
    if config.recorded_run is None:
        return config.speed
    return float(saved_config(Path(config.recorded_run))["backend"].get("speed", 1.0))


def check_profile(config: RunConfig) -> None:
    """Raises ConfigError if record.profile is set, and other than a single engine of this testbed runs. A simulation
    notes that it has no effect."""
    if config.record.profile is None or config.is_simulated:
        return
    if not isinstance(config.backend, RealConfig):
        raise ConfigError(
            f"record.profile is {config.record.profile!r}, but only backend=real has steps to trace; set it to null"
        )
    if config.backend.num_replicas > 1:
        raise ConfigError(
            "record.profile traces the engine of this process, and each of backend.num_replicas has its own; set it to "
            "null, or run one engine"
        )


def traced(config: RunConfig, backend: Any, folder: Path) -> tuple[Any, Callable[[], None]]:
    """Returns the backend, wrapped by the profiler if record.profile names steps, and a function that closes both."""
    steps = config.record.profiled_steps
    if steps is None:
        return backend, backend.close
    from real.step_trace import StepTrace

    trace = StepTrace(backend, folder, *steps)

    def close() -> None:
        trace.close()
        backend.close()

    return trace, close


class ReplayLog:
    """Measurements of a real run besides its records. lags: a `Recorder` for each engine; host: the driver's log."""

    def __init__(self, config: RunConfig, num_engines: int = 1, *, clock: RealTimeClock) -> None:
        assert isinstance(config.backend, RealConfig | VllmConfig)
        self._options, self._profiled, self._clock = config.backend, config.record.profiled_steps, clock
        self.lags = [ReplayLag() for _ in range(num_engines)]
        self.host = HostTimes()
        self._core_wait = CoreWait()

    def describe(self, num_steps: int) -> dict[str, Any]:
        """Returns the entries `replay` and `host` of the manifest of a run of that many steps."""
        pace = {"pace": self._options.pace, "speed": self._options.speed, "probe": self._clock.describe()}
        lag, waited = ReplayLag.of_all(self.lags), self._core_wait.share()
        notes = [*lag.notes(), *core_wait_notes(waited)]
        if self._profiled is not None and self._profiled[0] < num_steps:
            notes.append(
                f"{PROFILED}: those of record.profile, and requests meanwhile, took longer than without the "
                "profiler; take times from a run without it"
            )
        return {
            "replay": pace | lag.describe() | {"notes": notes},
            "host": self.host.describe() | {"core_wait_share": waited},
        }


# --- engines and inboxes ---


@dataclass(frozen=True, slots=True)
class Prepared:
    """Engines that are ready to run. drive: runs the loops of all engines, given in order with their schedulers."""

    pools: build.Pools  # of each engine
    drive: Callable[[list[Loop], list[Scheduler]], object]
    inboxes: Sequence[Inbox]  # one for each engine
    description: dict[str, Any]  # entries of the manifest
    checker: Recorder | None = None  # in a replay of a tape: raises at the first step that differs
    cost: CostModel | None = None  # the cost model of a simulation
    sender: Sender | None = None  # token delivery of a simulated front end, if it takes time per token
    replay: ReplayLog | None = None  # in a real run
    late: Sequence[LateRecords] = ()  # for each engine, if records are written while a device computes
    close: Callable[[], None] = lambda: None  # closes the engines


def prepare_sim(config: RunConfig, trace: TraceLike) -> Prepared:
    from sim.driver import run as drive

    description: dict[str, Any] = {"cost": config.cost_name, "device": config.device.name}
    if config.recorded_run is not None:
        engines.refuse_fleet(config)
        from experiments.runs.parity import num_tapes, recorded_inputs

        folder = Path(config.recorded_run)
        if (num := num_tapes(folder)) > 1:
            raise ConfigError(
                f"{folder} is a run of {num} replicas, and cost=recorded replays one engine; `testbed parity` "
                "replays each of them"
            )
        checker, taped, pools = recorded_inputs(folder, config, whole(trace))
        return Prepared(pools, lambda loops, _: checker.drive(loops[0]), [taped], description, checker)
    check_simulated_output(config.trace.forced)
    priced = build.build_sim_backend(config, trace)
    assert isinstance(config.backend, SimConfig)
    takes_ns, per_token_ns = config.backend.frontend_ns, config.backend.frontend_ns_per_token
    sender = Sender(per_token_ns) if per_token_ns else None
    inbox = trace_inbox(config, trace)
    if takes_ns or sender is not None:
        inbox = FrontEnd(inbox, takes_ns, sender)
    fleet, file = engines.build_fleet(config, inbox, priced), fit_file(config)
    fit = None if file is None else {"file": file.name, "digest": xxh64_hexdigest(file.read_bytes())}
    return Prepared(
        build.simulated_pools(config),
        (lambda loops, _: drive(loops[0], priced)) if fleet is None else fleet.run,
        [inbox] if fleet is None else fleet.inboxes,
        description
        | {"cost_fit": fit, "cost_error": _error_of(config, priced.cost), "cost_kernels": kernels_of(config)},
        cost=priced.cost,
        sender=sender,
    )


def _error_of(config: RunConfig, cost: CostModel) -> dict[str, float] | None:
    """The errors of a fit on the steps that were left out of it; None for other cost models, and for a fit that is
    adapted to another machine, on which its errors were not measured."""
    if isinstance(config.cost, CalibratedConfig) and set(config.cost.factors.values()) != {1.0}:
        return None
    if isinstance(cost, CalibratedCost):
        quality = cost.calibration.quality["all"]
        return {"median": quality.median, "p90": quality.p90}
    return None


def prepare_engine(config: RunConfig, trace: Trace, folder: Path) -> Prepared:
    """Prepares this testbed's engine, several replicas of it, or vLLM."""
    build_engine.check_token_ids(config, trace)
    if engines.num_engines(config) > 1:
        return _prepare_replicas(config, trace)
    if config.is_vllm:
        build_engine.check_prompts(config, trace)
    backend = build_engine.build_vllm_backend(config) if config.is_vllm else build_engine.build_real_backend(config)
    from real.clocks import make_clock
    from real.driver import run as drive

    assert isinstance(config.backend, RealConfig | VllmConfig)
    options = config.backend
    clock = make_clock(options, backend)
    inbox = trace_inbox(config, at_speed(trace, options.speed))
    inboxes = [backend.inbox(inbox) if config.is_vllm else inbox]
    log = ReplayLog(config, clock=clock)
    driven, close = traced(config, backend, folder)
    late = LateRecords() if build_engine.computes_beside(config) else None
    return Prepared(
        build.Pools(backend.num_gpu_blocks, backend.num_cpu_blocks),
        lambda loops, _: drive(loops[0], driven, clock, log=log.host, catch_up=late.catch_up if late else None),
        inboxes,
        _described(backend) | (versions_in_vllm(backend.version) if config.is_vllm else {}),
        replay=log, late=[late] if late else [], close=close,
    )  # fmt: skip


def _prepare_replicas(config: RunConfig, trace: Trace) -> Prepared:
    from real.clocks import make_clock
    from real.fleet import Fleet
    from real.parallel.replica import close_all

    assert isinstance(config.backend, RealConfig)
    options = config.backend
    router = engines.build_router(config, options)
    backends, said = build_engine.build_replicas(config)
    inbox, clock = trace_inbox(config, at_speed(trace, options.speed)), make_clock(options)
    log = ReplayLog(config, len(backends), clock=clock)
    fleet = Fleet(inbox, router, backends, clock, log.host)
    late = [LateRecords() for _ in backends]
    return Prepared(
        build.Pools(said.num_gpu_blocks, said.num_cpu_blocks),
        partial(fleet.run, catch_ups=[one.catch_up for one in late]), fleet.inboxes, _described(said), replay=log,
        late=late, close=partial(close_all, backends),
    )  # fmt: skip


def _described(engine: Any) -> dict[str, Any]:
    return {
        "attention": engine.attention_name, "attention_reasons": engine.attention_reasons,
        "weights": engine.load_format, "device": engine.device_description,
    }  # fmt: skip


def trace_inbox(config: RunConfig, trace: TraceLike) -> Inbox:
    sampling = with_ends(config.sampling, end_token_ids(config))

    def changed(request: Request) -> Request:
        request = seeded(request, config.seed)
        return request if config.is_simulated else forcing(request, config.forced)

    is_changed = needs_seed(sampling) or not config.is_simulated
    return TraceInbox(trace, vocab_size(config), sampling, changed if is_changed else None)
