"""The protocol of eviction policies, built-in or a user's own."""

from __future__ import annotations

from typing import Protocol


class EvictionPolicy(Protocol):
    """Holds the cached, unreferenced blocks. A user's own class with these methods is configured by `_target_`.

    Optional: `bind(context: testbed.policies.context.PolicyContext)`, whose `content_key` tells contents apart.
    """

    def add(self, block: int, depth: int, last_step: int) -> None:
        """Adds a block that has just lost its last reference. Blocks of one sequence are added deepest first.

        depth: number of blocks before it. last_step: the step that last scheduled its sequence, if `lru_by=last_step`.
        """
        ...

    def hit(self, block: int) -> None:
        """Reports that a sequence which is admitted found the block's content, whether or not the block was referenced
        already; if it was not, `remove` came just before. One that was preempted finds its own blocks, too."""
        ...

    def remove(self, block: int) -> None:
        """Removes a block that is referenced again."""
        ...

    def pop(self) -> int:
        """Removes and returns the victim."""
        ...

    def __len__(self) -> int: ...
