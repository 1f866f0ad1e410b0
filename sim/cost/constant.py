"""Every step takes the same time. For teaching, and for checks against queueing theory."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from sim.cost.config import ConstantConfig
from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape


@mypyc_attr(allow_interpreted_subclasses=True)
class ConstantCost:
    """A step that computes or moves something takes step_s, rounded to ns; any other takes no time."""

    def __init__(self, config: ConstantConfig) -> None:
        self._spans = Spans(forward_ns=round(config.step_s * 1e9))

    def price(self, shape: BatchShape) -> Spans:
        return Spans() if shape.is_empty else self._spans

    def breakdown(self, shape: BatchShape) -> dict[str, int]:
        return {"step": self.price(shape).forward_ns}
