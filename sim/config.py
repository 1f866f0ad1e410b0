"""The keys of the `backend=sim` group. Hydra reads them, so they are not compiled."""

from __future__ import annotations

from dataclasses import dataclass

from sim.backend import SchedulerTime
from testbed.checks import require, require_whole
from testbed.errors import ConfigError
from testbed.routing.config import FleetConfig


@dataclass(frozen=True, slots=True)
class SimConfig(FleetConfig):
    """The `backend=sim` group. Step times come from the `cost` group."""

    router_period_ns: int = 0  # the router sees counts as of the last multiple of it, as scraped; 0: as they are
    swap_overlap: bool = False  # swaps on the PCIe link overlap with computation; false: they are part of the step
    replicas_per_link: int = 1  # replicas that share one PCIe link, with swap_overlap
    schedule_ns: int = 0  # CPU time of the scheduler in each step, before the device starts
    schedule_ns_per_seq: int = 0  # the same, for each sequence in the step
    schedule_ns_per_1k_tokens: int = 0  # the same, for each 1,024 tokens of their contexts
    frontend_ns: int = 0  # time from a request's arrival until the engine receives it: HTTP, tokenizing
    frontend_ns_per_token: int = 0  # time to send a token to its client, one token at a time: detokenizing, HTTP

    def __post_init__(self) -> None:
        for name, least, most in (
            ("num_replicas", 1, 10_000),
            ("replicas_per_link", 1, 10_000),
            ("schedule_ns", 0, 10**15),
            ("schedule_ns_per_seq", 0, 10**12),
            ("schedule_ns_per_1k_tokens", 0, 10**12),
            ("frontend_ns", 0, 10**15),
            ("frontend_ns_per_token", 0, 10**9),
        ):
            require_whole(f"backend.{name}", getattr(self, name), least, most)
        period = require_whole("backend.router_period_ns", self.router_period_ns, 0, 10**15)
        require("backend.router_period_ns", period, period == 0 or period >= 10**6, "0, or from 1,000,000 (1 ms)")
        if self.replicas_per_link > self.num_replicas:
            raise ConfigError(
                f"backend.replicas_per_link is {self.replicas_per_link}, more than backend.num_replicas="
                f"{self.num_replicas}; raise backend.num_replicas, or lower it"
            )

    @property
    def scheduler_time(self) -> SchedulerTime:
        return SchedulerTime(self.schedule_ns, self.schedule_ns_per_seq, self.schedule_ns_per_1k_tokens)
