"""Every step costs the same. For teaching, and for checks against queueing theory."""

from __future__ import annotations

from dataclasses import dataclass

from mypy_extensions import mypyc_attr

from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape
from testbed.errors import ConfigError


@mypyc_attr(native_class=False)
@dataclass(frozen=True, slots=True)
class ConstantConfig:
    """Every step takes as long."""

    step_s: float = 0.01  # length of every step, seconds; there is no host overhead beside it

    def __post_init__(self) -> None:
        if not 1e-9 <= self.step_s <= 1e6:
            raise ConfigError(f"cost.step_s is {self.step_s}; it must be from 1e-9 (1 ns) to 1e6 seconds")


@mypyc_attr(allow_interpreted_subclasses=True)
class ConstantCost:
    """Prices any step at step_s, rounded to ns."""

    def __init__(self, config: ConstantConfig) -> None:
        self.config = config
        self._spans = Spans(forward_ns=round(config.step_s * 1e9))

    def price(self, shape: BatchShape) -> Spans:
        return self._spans

    def breakdown(self, shape: BatchShape) -> dict[str, int]:
        return {"step": self._spans.forward_ns}
