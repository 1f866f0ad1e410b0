"""The protocol of batch compositions: the algorithms that decide a step."""

from __future__ import annotations

from typing import Protocol

from testbed.core.step import Step


class Composition(Protocol):
    """Decides steps. A user's own class with this method is configured by `_target_`.

    Optional: `bind(context: PolicyContext)`; `unused_limits`, the limits that the class does not read, and `own_rules`,
    those of the KV rules `budget` and `chunks_fill_blocks` that it reads, so that a run notes settings without effect;
    `splits_prompts = False`: the class computes every prompt in one step.
    """

    def compose(self, step: Step) -> None:
        """Decides one step by calling the step's operations: schedule, reserve, admit, ignore, blocked."""
        ...
