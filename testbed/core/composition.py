"""The seam of batch compositions, which decide steps."""

from __future__ import annotations

from typing import Protocol

from testbed.core.step import Step


class Composition(Protocol):
    """Decides steps. A user's own class with this method plugs in by `_target_`.

    A class may list the limits that it does not read in `unused_limits`, and in `own_rules` those of the KV rules
    `budget` and `chunks_fill_blocks` that it reads: a run that changes one without effect says so.
    `splits_prompts = False`: it computes every prompt in one step.
    """

    def compose(self, step: Step) -> None:
        """Decides one step by calling the step's operations: schedule, reserve, admit, ignore, blocked."""
        ...
