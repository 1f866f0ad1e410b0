"""What a report compares at one load, as its sentences are made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from analysis.comparison.arms import Arm
from analysis.comparison.compare import Comparison
from analysis.comparison.effects import Effect


class Compared(NamedTuple):
    """What is known at one load; the first arm is the baseline."""

    load: str
    arms: Sequence[Arm]
    rows: Sequence[Comparison]
    effects: Sequence[Effect]  # main effects, of a replicated full design

    @property
    def with_factors(self) -> list[Comparison]:
        """Of arms, and of the main effects of factors."""
        return [*self.rows, *(effect.comparison for effect in self.effects)]
