"""The range of shapes in a profile, and the steps of a run that lie outside of it. Knows shapes, but no step times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from testbed.core.commands import Recorder, StepView
from testbed.core.plan import BatchShape
from testbed.errors import ConfigError
from testbed.wording import count

REGIONS = ("decode", "prefill", "mixed", "moves")  # the values of BatchShape.kind

Ranges = dict[str, dict[str, tuple[int, int]]]  # region -> feature -> (lowest, highest) that was profiled


class Outside(NamedTuple):
    """A feature of a step that is outside its range. bounds: None if no step of that region was profiled."""

    feature: str
    value: int
    bounds: tuple[int, int] | None

    @property
    def excess(self) -> float:
        """How far outside the value is, as a ratio above 1 to the nearer bound."""
        if self.bounds is None:
            return float("inf")
        low, high = self.bounds
        return self.value / max(1, high) if self.value > high else low / max(1, self.value)

    def __str__(self) -> str:
        if self.bounds is None:
            return f"{self.feature} (never profiled)"
        side = "up to" if self.value > self.bounds[1] else "down to"
        low, high = self.bounds
        return f"{self.feature} {side} {self.value:,} (profiled: {low:,} to {high:,}; {self.excess:.3g} x outside)"


def features_of(shape: BatchShape) -> dict[str, int]:
    """Returns the features of a shape that have a range in its region; `moves_of` gives those of its blocks."""
    features = {}
    if shape.num_decodes:
        features = {
            "num_decodes": shape.num_decodes, "decode_context_tokens": shape.decode_context_tokens,
            "longest_decode_context": shape.longest_decode_context,
        }  # fmt: skip
    if shape.prefills:
        features["num_tokens"] = shape.num_tokens
        features["num_prefills"] = len(shape.prefills)
        features["prefill_end"] = max(chunk.start + chunk.num_tokens for chunk in shape.prefills)
    return features


def moves_of(shape: BatchShape) -> dict[str, int]:
    """Returns the blocks that a shape moves. Their ranges begin at 0 and hold for all regions together."""
    return {
        "num_blocks_swapped_out": shape.num_blocks_swapped_out,
        "num_blocks_swapped_in": shape.num_blocks_swapped_in,
        "num_blocks_copied": shape.num_blocks_copied,
    }


def profiled_ranges(shapes: Iterable[BatchShape]) -> Ranges:
    """Returns the ranges of a profile's shapes. A region without steps is absent, except `moves`."""
    ranges: Ranges = {"moves": dict.fromkeys(moves_of(BatchShape(0, 0, (), 0)), (0, 0))}
    for shape in shapes:
        region = ranges.setdefault(shape.kind, {})
        for name, value in features_of(shape).items():
            low, high = region.get(name, (value, value))
            region[name] = min(low, value), max(high, value)
        for name, value in moves_of(shape).items():
            low, high = ranges["moves"][name]
            ranges["moves"][name] = low, max(high, value)
    return ranges


def outside(ranges: Ranges, shape: BatchShape) -> list[Outside]:
    """Returns the features of a shape that are outside the profiled range."""
    found = []
    region = shape.kind
    bounds = ranges.get(region)
    if bounds is None:
        found.append(Outside(f"{region} steps", shape.num_tokens, None))
    else:
        for name, value in features_of(shape).items():
            low, high = bounds[name]
            if not low <= value <= high:
                found.append(Outside(f"{region} {name}", value, (low, high)))
    if shape.num_blocks_moved:
        for name, value in moves_of(shape).items():
            low, high = ranges["moves"][name]
            if value > high:
                found.append(Outside(name, value, (low, high)))
    return found


class RangeWatch(Recorder):
    """Counts the steps of a run whose time is extrapolated. policy: one of sim.cost.config.OUTSIDE. saves_shared:
    whether the fit knows what is saved on positions that several decodes read; if not, steps with such are counted."""

    def __init__(self, ranges: Ranges, policy: str, saves_shared: bool = True) -> None:
        self._ranges = ranges
        self._policy = policy
        self._saves_shared = saves_shared
        self.num_steps = 0
        self.num_outside = 0
        self.num_shared = 0
        self._worst: dict[str, tuple[Outside, int]] = {}  # feature -> (the farthest value, number of steps)

    def committed(self, step: StepView) -> None:
        """Counts a step. With the policy `refuse` raises ConfigError at the first step outside."""
        self.num_steps += 1
        shape = step.plan.shape
        if shape.is_empty:  # a step that only preempts
            return
        self.num_shared += shape.repeated_context_tokens > 0 and not self._saves_shared
        found = outside(self._ranges, shape)
        if found and self._policy == "refuse":
            raise ConfigError(
                f"step {step.plan.step} leaves the profiled range: {found[0]}; profile such steps, or accept "
                "extrapolated step times with cost.outside=warn"
            )
        self.num_outside += bool(found)
        for item in found:
            worst, num = self._worst.get(item.feature, (item, 0))
            self._worst[item.feature] = max(worst, item, key=lambda one: one.excess), num + 1

    def notes(self) -> list[str]:
        """Returns a line with the features that left the range, how far, and in how many steps; and one on steps with
        positions that several decodes read, if the fit does not know their saving."""
        notes: list[str] = []
        if self.num_outside and self._policy != "allow":
            parts = [f"{item} in {count(num, 'step')}" for item, num in self._worst.values()]
            notes.append(
                f"EXTRAPOLATED STEP TIMES: {self.num_outside:,} of {self.num_steps:,} steps leave the profiled range: "
                f"{'; '.join(parts)}; profile such steps before trusting this run"
            )
        if self.num_shared:
            notes.append(
                f"SHARED READS: in {self.num_shared:,} of {self.num_steps:,} steps decodes read the same K and V, and "
                "this fit has no saving for that: they may be too long; cost.repeated_saving gives one "
                "(docs/cost-models.md)"
            )
        return notes
