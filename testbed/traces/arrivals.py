"""Arrival processes of sessions: endless streams of instants in ns, never decreasing.

All random processes except gamma turn standard exponential draws into instants by inverting the cumulated rate. So two
settings (other rates, other bursts) share their random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, repeat
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from testbed.checks import choose, require
from testbed.errors import ConfigError
from testbed.traces.draws import CHUNK, Stream
from testbed.traces.schema import MAX_NS

ARRIVALS = ("poisson", "gamma", "deterministic", "mmpp", "diurnal", "all_at_once")  # the last has no rate
_OF_KIND = {  # setting -> the processes that use it
    "cv": ("gamma",), "burst_factor": ("mmpp",), "burst_s": ("mmpp",), "calm_s": ("mmpp",),
    "amplitude": ("diurnal",), "period_s": ("diurnal",), "peak_s": ("diurnal",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArrivalConfig:
    """An arrival process. rate is its mean over all time, in arrivals per second."""

    KINDS: ClassVar[tuple[str, ...]] = ARRIVALS
    arrival: str = "poisson"  # poisson, gamma, deterministic, mmpp, diurnal, all_at_once
    rate: float = 4.0  # arrivals per second, on average
    cv: float = 1.0  # gamma: coefficient of variation of the gaps; 1 is Poisson, above is bursty
    burst_factor: float = 5.0  # mmpp: ratio of the rate within bursts to the rate between them
    burst_s: float = 20.0  # mmpp: mean length of a burst
    calm_s: float = 80.0  # mmpp: mean time between bursts
    amplitude: float = 0.5  # diurnal: the rate swings between (1 - amplitude) and (1 + amplitude) times its mean
    period_s: float = 86_400.0  # diurnal: length of a day
    peak_s: float = 43_200.0  # diurnal: when in the first period the rate is highest

    def __post_init__(self) -> None:
        choose("trace.arrival", self.arrival, self.KINDS)
        require("trace.rate", self.rate, 0 < self.rate <= 1e9, "above 0, up to 1e9 per second")
        require("trace.cv", self.cv, 0 < self.cv <= 100, "above 0, up to 100 (0: arrival=deterministic)")
        require("trace.burst_factor", self.burst_factor, 1 <= self.burst_factor <= 1e6, "1 to 1e6")
        for name in ("burst_s", "calm_s", "period_s"):
            require(f"trace.{name}", getattr(self, name), 0 < getattr(self, name) <= 1e9, "above 0, up to 1e9 s")
        require("trace.amplitude", self.amplitude, 0 <= self.amplitude <= 1, "0 to 1")
        require("trace.peak_s", self.peak_s, 0 <= self.peak_s <= 1e9, "0 to 1e9 s")

    def says(self) -> str:
        """Returns the process in words, with all settings that it uses."""
        told = [self.arrival] if self.arrival == "all_at_once" else [self.arrival, f"{self.rate:g} per second"]
        told += [f"{name} {getattr(self, name):g}" for name, kinds in _OF_KIND.items() if self.arrival in kinds]
        return ", ".join(told)


def idle_notes(config: ArrivalConfig, prefix: str = "trace.", default: ArrivalConfig | None = None) -> tuple[str, ...]:
    """Returns a note for each setting that differs from `default` although the process does not use it.

    prefix: of the settings' names.
    """
    usual = default or ArrivalConfig()
    return tuple(
        f"{prefix}{name} has no effect with {prefix}arrival={config.arrival}"
        for name in without_effect(config)
        if getattr(config, name) != getattr(usual, name)
    )


def without_effect(config: ArrivalConfig) -> list[str]:
    """Returns the settings that the process does not use."""
    used = {"rate": ARRIVALS[:-1], **_OF_KIND}
    return [name for name, kinds in used.items() if config.arrival not in kinds]


def instants(config: ArrivalConfig, rng: Stream, num: int | None = None) -> Iterator[int]:
    """Returns endless arrival instants in ns. num: how many are wanted, for the message.

    The iterator raises ConfigError at an instant after MAX_NS.
    """
    if config.arrival == "all_at_once":
        return repeat(0)
    makers = {"deterministic": _regular, "mmpp": _modulated, "diurnal": _diurnal}
    return _whole_ns(makers.get(config.arrival, _renewals)(config, rng), config.rate, num)


def _renewals(config: ArrivalConfig, rng: Stream) -> Iterator[NDArray[np.float64]]:
    """Yields chunks of instants in ns with independent gaps, exponential or gamma distributed."""
    source, shape = rng("arrival"), 1.0 / config.cv**2
    last = np.zeros(1)
    while True:
        if config.arrival == "gamma":
            gaps = source.standard_gamma(shape, CHUNK) / shape
        else:
            gaps = source.standard_exponential(CHUNK)
        with np.errstate(over="ignore", invalid="ignore"):  # rejected by _whole_ns
            sums = np.cumsum(np.concatenate((last, gaps)))[1:]
            last = sums[-1:]
            yield sums * (1e9 / config.rate)


def _regular(config: ArrivalConfig, rng: Stream) -> Iterator[NDArray[np.float64]]:
    for start in count(0, CHUNK):
        with np.errstate(over="ignore"):  # rejected by _whole_ns
            yield np.arange(start, start + CHUNK, dtype=np.float64) * 1e9 / config.rate


def _modulated(config: ArrivalConfig, rng: Stream) -> Iterator[NDArray[np.float64]]:
    """A Poisson process whose rate jumps between two values after exponential times (MMPP of two states)."""
    share = config.burst_s / (config.burst_s + config.calm_s)
    calm_rate = config.rate / (1 - share + share * config.burst_factor)
    rates = (calm_rate, calm_rate * config.burst_factor)
    lengths_s = (config.calm_s, config.burst_s)
    states, units = rng("arrival_state"), rng("arrival")
    state = int(states.random() < share)
    start_s = expected = 0.0  # start of the present state, and the cumulated rate at that time
    stay_s = lengths_s[state] * states.standard_exponential()
    last = 0.0
    while True:
        found = []
        for gap in units.standard_exponential(CHUNK).tolist():
            last += gap
            while last > expected + stay_s * rates[state]:
                expected += stay_s * rates[state]
                start_s += stay_s
                state = 1 - state
                stay_s = lengths_s[state] * states.standard_exponential()
            found.append(start_s + (last - expected) / rates[state])
        yield np.array(found) * 1e9


def _diurnal(config: ArrivalConfig, rng: Stream) -> Iterator[NDArray[np.float64]]:
    """A Poisson process whose rate follows a cosine over the day, by bisection on the cumulated rate."""
    source, omega = rng("arrival"), 2 * math.pi / config.period_s
    swing_s = config.amplitude / omega  # amplitude of the sine in: cumulated rate / mean rate
    phase = omega * config.peak_s
    last = 0.0
    while True:
        wanted_s = (last + np.cumsum(source.standard_exponential(CHUNK))) / config.rate
        last = float(wanted_s[-1]) * config.rate
        low, high = wanted_s - 2 * swing_s, wanted_s + 2 * swing_s
        for _ in range(60):
            middle = (low + high) / 2
            is_early = middle + swing_s * (np.sin(omega * middle - phase) + math.sin(phase)) < wanted_s
            low, high = np.where(is_early, middle, low), np.where(is_early, high, middle)
        yield np.maximum.accumulate(np.maximum(high, 0.0)) * 1e9


def _whole_ns(chunks: Iterator[NDArray[np.float64]], rate: float, num: int | None) -> Iterator[int]:
    """Yields the instants, rounded to whole ns. Raises ConfigError at an instant after MAX_NS."""
    for chunk in chunks:
        possible = chunk[chunk <= MAX_NS]
        yield from np.rint(possible).astype(np.int64).tolist()
        if len(possible) < len(chunk):
            which = "the arrivals" if num is None else f"the last of {num} arrivals"
            raise ConfigError(
                f"trace.rate is {rate}; {which} would come after {MAX_NS / 1e9:.1e} s: "
                "raise it, or lower trace.num_requests"
            )
