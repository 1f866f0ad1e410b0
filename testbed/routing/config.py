"""The keys that backends of several engines share. Hydra reads them, so they are not compiled."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """A change of the backend keeps these: engines, and what chooses the one that serves a request."""

    num_replicas: int = 1  # engines, each with its own scheduler and KV blocks
    router: Any = "round_robin"  # chooses the replica of a request: a name, or {_target_: your own class}


FLEET_KEYS = tuple(item.name for item in fields(FleetConfig))
