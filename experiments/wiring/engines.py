"""The engines of a run, one or a fleet of replicas: router, links, recorders, status lines and manifest entries."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh64_hexdigest

from experiments.configuration.config import RunConfig
from experiments.configuration.policies import make_policy
from experiments.configuration.settings import RecordConfig
from experiments.wiring.foreign import PolicyError, own_classes
from sim.config import SimConfig
from testbed.core.commands import Recorder, StepView
from testbed.core.interfaces import Inbox
from testbed.core.limits import Limits
from testbed.core.plan import BatchPlan
from testbed.core.scheduler import Scheduler
from testbed.errors import ConfigError
from testbed.records.recorder import RunRecorder
from testbed.records.sender import Sender
from testbed.routing.config import FleetConfig
from testbed.routing.routers import Router, RouterContext
from testbed.routing.routers import bind as bind_router

if TYPE_CHECKING:
    from real.text.status import StatusLine
    from sim.backend import SimBackend
    from sim.fleet import Fleet


def build_router(config: RunConfig, settings: FleetConfig) -> Router:
    """Makes the configured router and binds it to the run."""
    router: Router = make_policy("backend.router", settings.router)
    bind_router(router, RouterContext(config.seed, num_engines(config)))
    return router


def build_fleet(config: RunConfig, source: Inbox, backend: SimBackend) -> Fleet | None:
    """Makes the replicas with their router and links; None for a single engine without a simulated link, which needs
    only the plain driver.

    backend: simulates the steps of all replicas.
    """
    from sim.fleet import Fleet  # not at the top: an engine in vLLM's process needs no SimPy

    settings = config.backend
    assert isinstance(settings, SimConfig)
    router = build_router(config, settings)
    if settings.num_replicas == 1 and not settings.swap_overlap:
        return None
    return Fleet(
        source,
        router,
        [backend.of_replica(number) for number in range(settings.num_replicas)],
        replicas_per_link=settings.replicas_per_link if settings.swap_overlap else None,
        router_period_ns=settings.router_period_ns,
    )


def num_engines(config: RunConfig) -> int:
    return config.backend.num_replicas if isinstance(config.backend, FleetConfig) else 1


def refuse_fleet(config: RunConfig) -> None:
    """Raises ConfigError for settings of a simulation that contradict the replay of a tape."""
    for item in fields(SimConfig):
        value = getattr(config.backend, item.name)
        if value != item.default and item.name != "router":  # the router is not used with one engine
            raise ConfigError(
                f"backend.{item.name} is {value}, but cost=recorded replays what one real engine did; leave it at "
                f"{item.default}, or choose another cost model"
            )


class RunRecords:
    """The recorders of a run, one for each engine; all write to the files of the first. record: what to keep. sender:
    simulated token delivery, shared by all engines; None: not simulated."""

    def __init__(self, record: RecordConfig, folder: Path, num_engines: int, sender: Sender | None = None) -> None:
        make = partial(
            RunRecorder, folder, token_times=record.token_times, decisions=record.decisions or record.explain,
            explains=record.explain, steps=record.steps, sender=sender,
        )  # fmt: skip
        first = make(replica=0 if num_engines > 1 else None)
        self.recorders = [first, *(make(replica=number, beside=first) for number in range(1, num_engines))]

    @property
    def num_finished(self) -> int:
        return sum(recorder.num_finished for recorder in self.recorders)

    @property
    def num_sent(self) -> int:
        return sum(recorder.num_sent for recorder in self.recorders)

    @property
    def ignored(self) -> list[tuple[str, str]]:
        """(request id, reason) of ignored requests, replica by replica."""
        return [item for recorder in self.recorders for item in recorder.ignored]

    def close(self) -> None:
        """Closes the recorders; the first one, which owns the files, last."""
        for recorder in reversed(self.recorders):
            recorder.close()


def describe_router(config: RunConfig) -> dict[str, Any]:
    """Returns the manifest's entries about replicas and router, which are known before the run."""
    num = num_engines(config)
    if num == 1:
        return {"num_replicas": 1, "router": None}
    router = config.raw["backend"]["router"]
    return {"num_replicas": num, "router": router if isinstance(router, str) else router.get("_target_")}


def describe_engines(schedulers: Sequence[Scheduler], records: RunRecords) -> dict[str, Any]:
    """Returns the manifest's entries about the engines after a run: sums, and if there are several, each engine."""
    each = [
        describe_engine(scheduler, one.num_sent) for scheduler, one in zip(schedulers, records.recorders, strict=True)
    ]
    caches = [one["prefix_cache"] for one in each]
    return {
        "num_steps": sum(one["num_steps"] for one in each),
        "num_sent": records.num_sent,
        "prefix_cache": {key: sum(cache[key] for cache in caches) for key in ("queried_tokens", "hit_tokens")},
        "digest": fleet_digest([scheduler.digest for scheduler in schedulers]),
        "replicas": each if len(each) > 1 else None,
    }


def describe_engine(scheduler: Scheduler, num_sent: int) -> dict[str, Any]:
    blocks = scheduler.blocks
    return {
        "num_steps": scheduler.num_steps,
        "num_sent": num_sent,
        "prefix_cache": {
            "queried_tokens": blocks.prefixes.num_queried_tokens,
            "hit_tokens": blocks.prefixes.num_hit_tokens,
        },
        "digest": f"{scheduler.digest:016x}",
    }


def fleet_digest(digests: Sequence[int]) -> str:
    """Returns one digest for all replicas: xxh64 over theirs in order, 8 bytes each, little-endian. For one engine, its
    own digest."""
    if len(digests) == 1:
        return f"{digests[0]:016x}"
    return xxh64_hexdigest(b"".join(digest.to_bytes(8, "little") for digest in digests))


class BatchLimits(Recorder):
    """Checks that a user's batch composition respects the limits of a step; our own compositions need no check.

    As in ours, a step of only one prompt or of only decodes may exceed the token budget.
    """

    def __init__(self, limits: Limits, name: str) -> None:
        self._limits, self._name = limits, name

    def committed(self, step: StepView) -> None:
        self.check(step.plan)

    def check(self, plan: BatchPlan) -> None:
        """Raises PolicyError, with the composition's name, for a step that exceeds a limit."""
        shape, limits = plan.shape, self._limits
        for what, num, key in (
            ("sequences", shape.num_decodes + len(shape.prefills), "max_num_seqs"),
            ("tokens", shape.num_tokens, "max_num_batched_tokens"),
        ):
            most = getattr(limits, key)
            is_alone = key == "max_num_batched_tokens" and (
                not shape.prefills or len(shape.prefills) + shape.num_decodes == 1
            )
            if num > most and not is_alone:
                raise PolicyError(
                    f"{self._name} computes {num} {what} in step {plan.step}, and scheduler.{key} is {most}; "
                    "look at step.token_budget and step.num_running before you admit"
                )


def batch_limits(config: RunConfig) -> list[BatchLimits]:
    """Returns a check if the composition is a user's class, else nothing."""
    named = [name for name in own_classes(config) if name.startswith("scheduler.composition=")]
    return [BatchLimits(config.limits, name) for name in named]


class Checks(Recorder):
    """Checks a scheduler's invariants after the commit of each step, and says after which one they do not hold."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._num_steps = scheduler, 0

    def committed(self, step: StepView) -> None:
        try:
            self._scheduler.check_invariants()
        except AssertionError as error:
            said = f"after step {self._num_steps}: {error}"
            raise AssertionError(said).with_traceback(error.__traceback__) from None
        self._num_steps += 1


def status_lines(interval_s: float | None, schedulers: Sequence[Scheduler]) -> list[list[StatusLine]]:
    """Returns the status lines of each engine, on standard error and in the log; none if no interval is set."""
    if interval_s is None:
        return [[] for _ in schedulers]
    labels = [f"engine {number}: " if len(schedulers) > 1 else "" for number in range(len(schedulers))]
    return [[_status_line(interval_s, *each)] for each in zip(schedulers, labels, strict=True)]


def _status_line(interval_s: float, scheduler: Scheduler, label: str) -> StatusLine:
    from tqdm import tqdm  # not at the top, as above

    from real.text.status import StatusLine

    log = logging.getLogger("testbed")

    def say(line: str) -> None:
        log.info("status: %s%s", label, line)
        tqdm.write(label + line, file=sys.stderr)

    return StatusLine(interval_s, scheduler.blocks, say)
