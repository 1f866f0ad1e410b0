"""Batch compositions: one class each, owning the algorithm of a step. What they call is `testbed.core.step.Step`."""

from __future__ import annotations

from typing import Protocol

from testbed.core.step import Step


class Composition(Protocol):
    """A user's own class with this method plugs in by `_target_`.

    A class may list the limits that it does not read in `unused_limits`, and in `own_rules` those of the KV rules
    `budget` and `chunks_fill_blocks` that it reads: a run that changes one without effect says so. With
    `is_time_dependent = False` it declares that it keeps no state of its own that a step of decodes would change, goes
    by the clock in nothing, asks about waiting sequences by `can_admit`, and admits nobody once the token budget is
    spent: then runs of decodes, and equal chunks of one prompt, are fast forwarded.
    """

    def compose(self, step: Step) -> None:
        """Decides one step by calling the step's operations: schedule, reserve, admit, ignore, blocked."""
        ...
