"""Before a run: engines made ready to be driven, simulated, real or vLLM's, with the inboxes that feed them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.configuration.config import RunConfig
from experiments.configuration.forcing import check_simulated_output, forcing
from experiments.configuration.settings import SimConfig
from experiments.runs.environment import versions_in_vllm
from experiments.runs.replay_log import ReplayLog, at_speed, traced
from experiments.wiring import build, engines
from experiments.wiring.build_engine import (
    build_real_backend,
    build_replicas,
    build_vllm_backend,
    check_prompts,
    check_token_ids,
    computes_beside,
)
from real.config import RealConfig
from real.late_records import LateRecords
from real.vllm.config import VllmConfig
from sim.cost.base import CostModel
from sim.front_end import FrontEnd
from testbed.core.interfaces import Inbox, Recorder
from testbed.core.scheduler import Scheduler
from testbed.core.serve import Loop
from testbed.seeds import needs_seed, seeded
from testbed.traces.inbox import ChangedInbox, TraceInbox
from testbed.traces.schema import Trace
from testbed.traces.stream import CountedTrace, whole

TraceLike = Trace | CountedTrace  # whole, or gone through once as the run goes on
NO_ENGINE: dict[str, Any] = {"attention": None, "attention_reasons": None, "weights": None}


@dataclass(frozen=True, slots=True)
class Prepared:
    """Engines that are ready to be driven: their loops, in order, and the schedulers of these."""

    pools: build.Pools  # of each engine
    drive: Callable[[list[Loop], list[Scheduler]], object]
    inboxes: Sequence[Inbox]  # one for each engine
    description: dict[str, Any]  # of the manifest
    checker: Recorder | None = None  # of a replay: raises at the first step that decides otherwise
    cost: CostModel | None = None  # what prices the steps
    replay: ReplayLog | None = None  # of a real run
    late: Sequence[LateRecords] = ()  # for each engine, if steps run elsewhere than here: what is recorded meanwhile
    close: Callable[[], None] = lambda: None  # ends what the engines have started


def prepare_sim(config: RunConfig, trace: TraceLike) -> Prepared:
    from sim.driver import run as drive

    cost = config.raw["cost"]
    description = {**NO_ENGINE, "cost": cost.get("name") or cost.get("_target_"), "device": config.device.name}
    recorded = build.recorded_run(config)
    if recorded is not None:
        engines.refuse_fleet(config)
        from experiments.runs.parity import num_tapes, recorded_inputs

        engines.refuse_tapes(Path(recorded), num_tapes(Path(recorded)))
        inputs = recorded_inputs(Path(recorded), config, whole(trace))
        return Prepared(
            inputs.pools, lambda loops, _: inputs.drive(loops[0]), [inputs.inbox], description, inputs.checker,
        )  # fmt: skip
    check_simulated_output(config.trace.forced)
    priced = build.build_sim_backend(config, trace)
    inbox = trace_inbox(config, trace)
    fleet = engines.build_fleet(config, inbox, priced)
    return Prepared(
        build.simulated_pools(config),
        (lambda loops, _: drive(loops[0], priced)) if fleet is None else fleet.run,
        [inbox] if fleet is None else fleet.inboxes,
        description,
        cost=priced.cost,
    )


def prepare_engine(config: RunConfig, trace: Trace, folder: Path) -> Prepared:
    """This testbed's engine, or several of them, or vLLM's."""
    check_token_ids(config, trace)
    if engines.num_engines(config) > 1:
        return _prepare_replicas(config, trace)
    if config.is_vllm:
        check_prompts(config, trace)
    backend = build_vllm_backend(config) if config.is_vllm else build_real_backend(config)
    from real.clocks import make_clock
    from real.driver import run as drive

    assert isinstance(config.backend, RealConfig | VllmConfig)
    options = config.backend
    clock = make_clock(options, backend)
    inbox = trace_inbox(config, at_speed(trace, options.speed))
    inboxes = [backend.inbox(inbox) if config.is_vllm else inbox]
    log = ReplayLog(options, clock=clock)
    driven, close = traced(config, backend, folder)
    late = LateRecords() if computes_beside(config) else None
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
    backends, said = build_replicas(config)
    inbox, clock = trace_inbox(config, at_speed(trace, options.speed)), make_clock(options)
    log = ReplayLog(options, len(backends), clock=clock)
    fleet = Fleet(inbox, router, backends, clock, log.host)
    late = [LateRecords() for _ in backends]
    return Prepared(
        build.Pools(said.num_gpu_blocks, said.num_cpu_blocks),
        partial(fleet.run, catch_ups=[one.catch_up for one in late]), fleet.inboxes, _described(said), replay=log,
        late=late, close=partial(close_all, backends),
    )  # fmt: skip


def _described(engine: Any) -> dict[str, Any]:
    """What the manifest says of an engine."""
    return {
        "cost": None, "attention": engine.attention_name, "attention_reasons": engine.attention_reasons,
        "weights": engine.load_format, "device": engine.device_description,
    }  # fmt: skip


def trace_inbox(config: RunConfig, trace: TraceLike) -> Inbox:
    sampling = build.sampling_params(config)
    inbox: Inbox = TraceInbox(trace, build.vocab_size(config), sampling)
    if needs_seed(sampling):
        inbox = ChangedInbox(inbox, partial(seeded, run_seed=config.seed))
    if isinstance(config.backend, SimConfig) and config.backend.frontend_ns:
        inbox = FrontEnd(inbox, config.backend.frontend_ns)
    return inbox if config.is_simulated else ChangedInbox(inbox, partial(forcing, forced=config.forced))
