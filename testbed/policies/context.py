"""What a policy is given once, when a scheduler is built, if it asks for it by having a method `bind(context)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from testbed.blocks.manager import BlockManager
from testbed.core.interfaces import Estimator
from testbed.core.limits import Limits
from testbed.core.sequence import Sequence


class LengthOracle(Protocol):
    """An opinion about output lengths. A user's own class with this method plugs in by `_target_`."""

    def predict(self, seq: Sequence) -> int | None:
        """Output tokens that the sequence will have emitted when it ends, at least 1; None: no opinion."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """blocks: to ask (`lookup`, counts), never to change. seed: the run's. estimator: None without a cost model."""

    blocks: BlockManager
    limits: Limits
    oracle: LengthOracle
    estimator: Estimator | None
    seed: int


def bind(policy: Any, context: PolicyContext) -> None:
    """Gives a policy the context if it asks for it."""
    if hasattr(policy, "bind"):
        policy.bind(context)
