"""What KV memory asks of a policy of a user's own."""

from __future__ import annotations

from typing import Protocol


class EvictionPolicy(Protocol):
    """Holds the cached blocks that nothing references. A user's own class with these methods plugs in by `_target_`.

    It may have `bind(context: testbed.policies.context.PolicyContext)`.
    """

    def add(self, block: int, depth: int, last_step: int) -> None:
        """The block lost its last reference just now. Blocks of one sequence come deepest first.

        depth: how many blocks of the same prefix stand before it. last_step: the step that last scheduled its sequence.
        """
        ...

    def hit(self, block: int) -> None:
        """A new sequence found the block's content; called whether or not something references it already."""
        ...

    def remove(self, block: int) -> None:
        """The block is referenced again."""
        ...

    def pop(self) -> int:
        """Removes and returns the victim."""
        ...

    def __len__(self) -> int: ...
