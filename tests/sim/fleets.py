"""Fleets without configuration files: replicas of one setup, what each of them did, and what the router was asked."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from sim.backend import SimBackend
from sim.cost.base import CostModel
from sim.cost.config import ConstantConfig
from sim.cost.constant import ConstantCost
from sim.fleet import Fleet
from testbed.core.interfaces import Inbox
from testbed.core.request import Request
from testbed.core.scheduler import Scheduler
from testbed.core.serve import serve
from testbed.errors import LivelockError
from testbed.routing.routers import Replicas, Router, RouterContext, bind
from tests.properties.setups import EOS, VOCAB_SIZE, Setup
from tests.sim.worlds import STEP_NS, Log, Sessions, price, world
from tests.sim.worlds import drive as drive_one


@dataclass
class Watched:
    """A router that notes what it was shown, and what it answered."""

    router: Router
    seen: list[tuple[object, ...]] = field(default_factory=list)

    def route(self, request: Request, replicas: Replicas) -> int:
        number = self.router.route(request, replicas)
        views = [
            (one.num_requests, one.num_waiting, one.num_running, one.num_tokens, one.num_kv_blocks,
             one.num_cached_tokens(request))
            for one in replicas
        ]  # fmt: skip
        self.seen.append((request.request_id, number, views))
        return number


def drive(
    inbox: Inbox, router: Router, schedulers: Sequence[Scheduler], costs: Sequence[CostModel], *,
    logs: Sequence[Log] | None = None, replicas_per_link: int | None = None, seed: int = 0,
    router_period_ns: int = 0,
) -> list[Log]:  # fmt: skip
    """Runs a fleet to its end; a log for each replica. A livelock is the last event of the first one's."""
    backends = [SimBackend(cost, seed=seed, vocab_size=VOCAB_SIZE, eos_token_id=EOS) for cost in costs]
    fleet = Fleet(inbox, router, backends, replicas_per_link=replicas_per_link, router_period_ns=router_period_ns)
    logs = [Log() for _ in schedulers] if logs is None else list(logs)
    loops = [serve(box, scheduler, log) for box, scheduler, log in zip(fleet.inboxes, schedulers, logs, strict=True)]
    try:
        fleet.run(loops, schedulers)
    except LivelockError as error:
        logs[0].events.append((str(error),))
    for scheduler in schedulers:
        scheduler.check_invariants()
    return logs


def _on_boundaries(
    arrivals: list[Request], aborts: list[tuple[int, str]], turns: dict[str, Request]
) -> tuple[list[Request], list[tuple[int, str]], dict[str, Request]]:
    """The same with all instants at whole and half steps."""

    def near(instant_ns: int) -> int:
        return instant_ns // (STEP_NS // 2) * (STEP_NS // 2)

    return (
        [one.replace(arrival_ns=near(one.arrival_ns)) for one in arrivals],
        [(near(instant_ns), name) for instant_ns, name in aborts],
        {name: one.replace(arrival_ns=near(one.arrival_ns)) for name, one in turns.items()},
    )


def world_of(seed: int) -> tuple[list[Request], list[tuple[int, str]], dict[str, Request]]:
    """The random world of `seed`; in half of them, events fall on boundaries of steps."""
    return _on_boundaries(*world(seed)) if random.Random(seed).random() < 0.5 else world(seed)


def inputs(seed: int) -> tuple[Sessions, CostModel]:
    """That world and its prices."""
    is_even = random.Random(seed).random() < 0.5
    cost = ConstantCost(ConstantConfig(STEP_NS / 1e9)) if is_even else price(random.Random(seed))
    return Sessions(*world_of(seed)), cost


def go_plain(setup: Setup, seed: int) -> Log:
    """The same on the driver of one engine."""
    inbox, cost = inputs(seed)
    return drive_one(setup.scheduler(), inbox, cost, seed)


def go_fleet(
    setup: Setup, seed: int, router: Router, num_replicas: int, *, replicas_per_link: int | None = None
) -> list[Log]:
    """`inputs` on replicas of `setup`."""
    bind(router, RouterContext(seed, num_replicas))
    schedulers = [setup.scheduler() for _ in range(num_replicas)]
    inbox, cost = inputs(seed)
    return drive(inbox, router, schedulers, [cost] * num_replicas, replicas_per_link=replicas_per_link, seed=seed)
