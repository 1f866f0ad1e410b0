"""The results of a search: what was found under each seed, for the policy, and from one policy to another.

The seeds are the replicates. Each is searched by itself, so capacities have a spread over seeds, and policies are
compared seed by seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import geometric_mean

import pandas as pd

from analysis import format as fmt
from analysis.comparison.compare import Comparison, Metric, judge
from analysis.measures.capacity import Edge, Load, edge_change, mean_edge, pooled
from analysis.reports.trust import NOT_COMPARED, Source, Trust, not_repeated, step_times
from experiments.capacity.arms import Arm
from experiments.capacity.search import Bracket, rounded

DOES_NOT_FIT = "does not fit"
MEETING = 0.1  # requests hardly meet if this many, or fewer, are in the system on average


@dataclass(frozen=True)
class Replicate:
    """The result under one seed. tried: its rates, ascending, as values of the arm's rate key."""

    seed: int
    bracket: Bracket
    tried: tuple[tuple[float, Load], ...]

    def at(self, value: float | None) -> Load | None:
        return next((load for tried, load in self.tried if tried == value), None)

    @property
    def at_failed(self) -> Load | None:
        return self.at(self.bracket.failed)

    def extreme(self, share: float, *, kept: bool) -> float | None:
        """Of all rates tried, the highest that keeps the SLO, or the lowest that fails; None if there is none."""
        values = [value for value, load in self.tried if bool(load.keeps(share)) is kept]
        return values[-1 if kept else 0] if values else None

    def edge(self, share: float) -> Edge | None:
        """Where the SLO is lost; None unless the bracket has both ends."""
        at_kept, at_failed, (kept, failed) = self.at(self.bracket.kept), self.at_failed, self.bracket
        if kept is None or failed is None or at_kept is None or at_failed is None:
            return None
        return Edge.between(kept, failed, at_kept, at_failed, share)


@dataclass(frozen=True)
class Found:
    arm: Arm
    replicates: tuple[Replicate, ...]
    notes: tuple[str, ...] = ()  # on its cost model and its KV pool
    sources: tuple[Source, ...] = ()  # of its step times, if it is simulated

    def rate(self, value: float | None) -> float | None:
        return None if value is None else value * self.arm.per_value

    @property
    def bracket(self) -> Bracket:
        return mean_bracket([one.bracket for one in self.replicates])

    @property
    def capacity(self) -> float:
        """The highest rate that keeps the SLO, in the arm's unit: the mean over the seeds; 0 if a seed has none."""
        return self.rate(self.bracket.kept) or 0.0

    def is_crowded(self, one: Replicate) -> bool:
        """Whether a seed fails at all rates tried, and requests still meet at the lowest: a lower one may be kept."""
        at, lowest = one.at_failed, self.rate(one.bracket.failed)
        if one.bracket.kept is not None or at is None or lowest is None:
            return False
        return not at.is_whole or lowest * (at.stay_s or 0.0) > MEETING  # the mean number in the system (Little, 1961)

    @property
    def is_below(self) -> bool:
        """Whether the capacity is below all rates that were tried, under some seed."""
        return self.bracket.failed is not None and any(map(self.is_crowded, self.replicates))

    def capacity_text(self, among: int = 1) -> str:
        """The capacity with its unit: "≥ 12 req/s" if a seed fails at no rate, "< 3 req/s" if it is below all tried.
        among: the number of GPUs that each have an equal part of it."""
        is_open = any(one.bracket.failed is None for one in self.replicates)
        sign, rate = ("< ", self.rate(self.bracket.failed)) if self.is_below else ("≥ " * is_open, self.capacity)
        return f"{sign}{(rate or 0.0) / among:.4g} {self.arm.unit}"

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the capacity over the seeds; None for one seed, or if a seed has no capacity."""
        if len(self.replicates) < 2 or (edges := self.edges) is None:
            return None
        found = mean_edge(edges, self.arm.correlation)
        low, high = (math.exp(min(end, 700.0)) * self.arm.per_value for end in (found.low, found.high))
        return (low, high) if math.isfinite(found.high) else None

    @property
    def edges(self) -> list[Edge] | None:
        """Of all seeds; None if one has no capacity."""
        known = [edge for one in self.replicates if (edge := one.edge(self.arm.share)) is not None]
        return known if len(known) == len(self.replicates) else None

    @property
    def tried(self) -> tuple[tuple[float, Load], ...]:
        """The rates that all seeds tried, ascending, with the counts pooled."""
        found = {value: [one.at(value) for one in self.replicates] for value, _ in self.replicates[0].tried}
        known = {value: [load for load in loads if load is not None] for value, loads in found.items()}
        return tuple((value, pooled(loads)) for value, loads in known.items() if len(loads) == len(self.replicates))

    @property
    def at_kept(self) -> Load | None:
        """At the capacity, pooled over the seeds."""
        return next((load for value, load in self.tried if value == self.bracket.kept), None)

    @property
    def attainments(self) -> list[float]:
        """At the capacity, under each seed."""
        loads = [one.at(self.bracket.kept) for one in self.replicates]
        return [load.attainment for load in loads if load is not None]

    @property
    def at_failed(self) -> Load | None:
        """At each seed's own failing rate, pooled; None if a seed has none."""
        loads = [load for one in self.replicates if (load := one.at_failed) is not None]
        return pooled(loads) if len(loads) == len(self.replicates) else None

    @property
    def fails_first(self) -> str | None:
        """What most seeds fail by, see `Load.first_failed`; None if a seed fails at no rate."""
        loads = [load for one in self.replicates if (load := one.at_failed) is not None]
        reasons = Counter(load.first_failed(self.arm.share) for load in loads)
        return reasons.most_common(1)[0][0] if len(loads) == len(self.replicates) else None


def mean_bracket(brackets: Sequence[Bracket]) -> Bracket:
    """The geometric means of both ends; None for an end that one of them lacks."""
    return Bracket(*(_mean(ends) for ends in zip(*brackets, strict=True)))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return known[0] if len(known) == 1 else rounded(geometric_mean(known))


@dataclass(frozen=True, repr=False)
class Capacity:
    """The results of all policies. points: one row per policy, rate and seed. tolerance: of the coarsest search.
    changes: of the other policies from the `baseline`, paired by seed; empty for one policy or one seed. unfit: why a
    policy was not searched, by name: its device has no memory for the model and one KV block."""

    found: tuple[Found, ...]
    points: pd.DataFrame
    folder: Path
    tolerance: float
    seeds: tuple[int, ...]
    baseline: str
    margin: float  # a relative change up to this counts as none
    unfit: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        """A line for each policy: its capacity, and the interval over the seeds."""
        return "\n".join([*map(_line, self.found), *(f"{name}: {DOES_NOT_FIT}" for name in self.unfit)])

    @property
    def trust(self) -> list[Trust]:
        """How far the capacities can be trusted, as in reports: fidelity, unless an engine was searched beside the
        simulation, and step times if any are simulated."""
        kinds = {one.arm.is_simulated for one in self.found}
        fidelity = [NOT_COMPARED if kind else not_repeated(len(self.seeds)) for kind in kinds if len(kinds) == 1]
        sources = [source for one in self.found for source in one.sources]
        return [*fidelity, *([step_times(sources)] if sources else [])]

    @property
    def changes(self) -> list[Comparison]:
        if len(self.seeds) < 2:
            return []
        base = next(one for one in self.found if one.arm.name == self.baseline)
        rows = [_change(base, one) for one in self.found if one is not base]
        return judge(rows, self.margin, [row.arm for row in rows])


def _line(one: Found) -> str:
    over = "" if one.interval is None else " [{:.4g}, {:.4g}]".format(*one.interval)
    return f"{one.arm.name}: {one.capacity_text()}{over}"


def _change(base: Found, other: Found) -> Comparison:
    metric = Metric("capacity", "capacity", 1, partial(fmt.number, unit=other.arm.unit))
    estimate = None
    if base.arm.unit == other.arm.unit and base.edges is not None and other.edges is not None:
        scale = other.arm.per_value / base.arm.per_value
        estimate = edge_change(base.edges, [edge.times(scale) for edge in other.edges], base.arm.correlation)
    return Comparison(
        other.arm.name, metric, other.capacity, estimate, "unknown", base=base.capacity,
        is_of_prices=base.arm.raw["cost"] != other.arm.raw["cost"],
    )  # fmt: skip
