"""Results of queueing theory that the simulator is checked against: exact recursions, and formulas for means.

Units are seconds and requests per second; Lindley's recursion is in whole ns. This module knows no runs or records.

Sources: D. V. Lindley, "The theory of queues with a single server" (1952); the mean wait of M/G/1 is Pollaczek's (1930)
and Khinchine's (1932); of M/G/1 with priorities, Cobham's, "Priority assignment in waiting line problems" (1954). All
are in L. Kleinrock, "Queueing Systems", volumes 1 (1975) and 2 (1976).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Service:
    """A distribution of service times in whole steps of one length; moments in seconds. weights[k - 1]: P(k steps)."""

    name: str
    weights: tuple[float, ...]
    step_ns: int

    @classmethod
    def constant(cls, num_steps: int, step_ns: int) -> Service:
        return cls(f"constant {num_steps}", (*[0.0] * (num_steps - 1), 1.0), step_ns)

    @classmethod
    def uniform(cls, low: int, high: int, step_ns: int) -> Service:
        share = 1.0 / (high - low + 1)
        return cls(f"uniform {low} to {high}", (*[0.0] * (low - 1), *[share] * (high - low + 1)), step_ns)

    @classmethod
    def geometric(cls, mean: float, step_ns: int) -> Service:
        """1, 2, … steps; values above 40 times the mean (a share below 1e-17) are left out."""
        stop = 1.0 / mean
        weights = tuple(stop * (1 - stop) ** k for k in range(math.ceil(40 * mean)))
        return cls(f"geometric, mean {mean:g}", weights, step_ns)

    @classmethod
    def lognormal(cls, median: float, sigma: float, most: int, step_ns: int) -> Service:
        """A lognormal, rounded and clipped to 1 … most, like the lengths of generated traces."""
        normal = NormalDist(math.log(median), sigma)
        borders = [0.0, *[normal.cdf(math.log(k + 0.5)) for k in range(1, most)], 1.0]
        weights = tuple(after - before for before, after in pairwise(borders))
        return cls(f"lognormal, median {median:g}, sigma {sigma:g}, at most {most}", weights, step_ns)

    @property
    def mean_s(self) -> float:
        return self._moment(1)

    @property
    def second_moment_s2(self) -> float:
        return self._moment(2)

    def _moment(self, power: int) -> float:
        step_s = self.step_ns / 1e9
        terms = (weight * (k * step_s) ** power for k, weight in enumerate(self.weights, start=1))
        return math.fsum(terms) / math.fsum(self.weights)

    def draw(self, num: int, rng: np.random.Generator) -> list[int]:
        """`num` random service times in steps, by inversion of the distribution function."""
        cumulated: NDArray[np.float64] = np.cumsum(self.weights) / math.fsum(self.weights)
        steps = np.searchsorted(cumulated, rng.random(num), side="right") + 1
        return [int(k) for k in np.minimum(steps, len(self.weights)).tolist()]


def lindley_waits(arrivals_ns: Sequence[int], services_ns: Sequence[int]) -> list[int]:
    """Waits of one server that serves in order of arrival: W' = max(0, W + S - gap). All in ns, exact."""
    waits, free_ns = [], 0
    for arrival, service in zip(arrivals_ns, services_ns, strict=True):
        start = max(arrival, free_ns)
        waits.append(start - arrival)
        free_ns = start + service
    return waits


def pollaczek_khinchine_wait(rate: float, mean_s: float, second_moment_s2: float) -> float:
    """Mean wait of M/G/1: lambda E[S^2] / (2 (1 - rho)). Raises ValueError unless the utilisation rho is below 1."""
    return rate * second_moment_s2 / (2 * (1 - _utilisation(rate * mean_s)))


def cobham_waits(rates: Sequence[float], mean_s: float, second_moment_s2: float) -> list[float]:
    """Mean waits of M/G/1 by priority class, most urgent first, without interruption and with the same service times.

    W_p = W_0 / ((1 - sigma_(p-1)) (1 - sigma_p)): W_0 = lambda E[S^2] / 2 is the mean remaining service that an arrival
    finds, sigma_p the utilisation by class p and those before it. Raises ValueError unless each is below 1.
    """
    rest = sum(rates) * second_moment_s2 / 2
    used = [_utilisation(sum(rates[:p]) * mean_s) for p in range(len(rates) + 1)]
    return [rest / ((1 - before) * (1 - own)) for before, own in pairwise(used)]


def _utilisation(value: float) -> float:
    if not 0 <= value < 1:
        raise ValueError(f"the utilisation is {value:g}; a queue has a mean wait only below 1")
    return value
