"""The context that a policy receives once, when a scheduler is built, if it has a method `bind(context)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from testbed.blocks.chain import CacheEntry
from testbed.blocks.manager import BlockManager
from testbed.composites import with_parts
from testbed.core.interfaces import Estimator
from testbed.core.limits import Limits
from testbed.core.sequence import Sequence


class LengthOracle(Protocol):
    """A predictor of output lengths. A user's own class with this method is configured by `_target_`.

    Optional, looked up once: `bind(context: PolicyContext)`; `is_none = True`, it never has an opinion;
    `left(seq, now_ns)`, called when a sequence has ended for any reason (`seq.finish_reason`).
    """

    def predict(self, seq: Sequence) -> int | None:
        """Returns how many output tokens the sequence will have when it ends, at least 1; None: no prediction."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """blocks: read only (`lookup`, counts). seed: the run's seed."""

    blocks: BlockManager
    limits: Limits
    oracle: LengthOracle
    estimator: Estimator
    seed: int

    def content_key(self, block: int, depth: int) -> int | None:
        """Returns a number for the content of a cached block with `depth` blocks before it, as `EvictionPolicy.add` is
        told; None if nothing is cached there. Whichever block holds it, and whenever: the same number for the same
        tokens after the same prefix (and salt), 64 bits. For policies that remember what they evicted."""
        prefixes = self.blocks.prefixes
        content = prefixes.gpu.cache.content_of[block]
        if content is None or prefixes.source is None:
            return None
        if isinstance(content, CacheEntry):
            return content.key
        content.chain.make_keys(prefixes.source, depth + 1)
        return content.chain.keys[depth]


def bind(policy: Any, context: PolicyContext) -> None:
    """Passes the context to a policy and to its parts, where they have a method `bind`."""
    for one in with_parts([policy]):
        if hasattr(one, "bind"):
            one.bind(context)
