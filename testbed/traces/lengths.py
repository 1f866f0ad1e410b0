"""Lengths of prompts and outputs in tokens: from distributions, or in pairs from a trace."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from testbed.checks import choose, require
from testbed.errors import ConfigError
from testbed.traces.draws import Stream, endless, whole_numbers, zipf_numbers
from testbed.traces.schema import MAX_NUM_TOKENS, TraceSource
from testbed.wording import count

LENGTHS = ("constant", "uniform", "lognormal", "zipf", "empirical")
MAX_ZIPF_SPAN = 2_000_000  # lengths of one Zipf distribution: its table has an entry for each
USUAL_MOST = 8192  # the default max_tokens of uniform, lognormal and zipf


@dataclass(frozen=True, slots=True)
class LengthConfig:
    """A distribution of lengths in tokens. Samples are rounded, then clipped to min_tokens … max_tokens.

    kind: "constant" (value), "uniform" (min_tokens … max_tokens, both included), "lognormal" (its median is value,
    sigma the standard deviation of the logarithm), "zipf" (length n of min_tokens … max_tokens with probability
    proportional to n ** -exponent), "empirical" (pairs of prompt and output lengths from a trace). max_tokens: None:
    no limit for constant and empirical, 8192 for the others.
    """

    kind: str = "lognormal"
    value: float = 256.0
    sigma: float = 0.8
    exponent: float = 1.1
    min_tokens: int = 1
    max_tokens: int | None = None  # absent: 8192, but none for constant and empirical

    def __post_init__(self) -> None:
        choose("lengths.kind", self.kind, LENGTHS)
        require("lengths.value", self.value, 1 <= self.value <= MAX_NUM_TOKENS, f"1 to {MAX_NUM_TOKENS:,}")
        require("lengths.sigma", self.sigma, 0 <= self.sigma <= 10, "0 to 10")
        require("lengths.exponent", self.exponent, 0 <= self.exponent <= 10, "0 to 10")
        low, most = self.min_tokens, self.most
        require("lengths.min_tokens", low, 1 <= low <= MAX_NUM_TOKENS, f"1 to {MAX_NUM_TOKENS:,}")
        expected = f"from min_tokens ({low}) to {MAX_NUM_TOKENS:,}"
        require("lengths.max_tokens", most, low <= most <= MAX_NUM_TOKENS, expected)
        if self.kind == "zipf" and most - low >= MAX_ZIPF_SPAN:
            raise ConfigError(f"lengths.max_tokens is {most}; with kind=zipf below min_tokens + {MAX_ZIPF_SPAN:,}")

    @property
    def most(self) -> int:
        """The longest possible, in tokens."""
        if self.max_tokens is not None:
            return self.max_tokens
        return MAX_NUM_TOKENS if self.kind in ("constant", "empirical") else USUAL_MOST


class Cuts:
    """Cuts lengths at the maximum of their distributions, and counts the cuts for notes.

    num_first_cut: first turns that were cut to trace.max_session_tokens.
    """

    def __init__(self, configs: Mapping[str, LengthConfig]) -> None:
        """configs: by the name of their setting."""
        self.num_first_cut = 0
        self._most = {name: config.most for name, config in configs.items()}
        self._num = dict.fromkeys(configs, 0)
        self._num_cut = dict.fromkeys(configs, 0)

    def at_most(self, name: str, length: int) -> int:
        return min(length, self._most[name])

    def count(self, name: str, length: int) -> int:
        """Like at_most, and counts the length as used."""
        self._num[name] += 1
        most = self._most[name]
        if length <= most:
            return length
        self._num_cut[name] += 1
        return most

    def notes(self) -> Iterator[str]:
        """Yields notes on the cuts so far."""
        for name, num_cut in self._num_cut.items():
            if num_cut:
                num = self._num[name]
                yield f"{num_cut:,} of {num:,} lengths cut at {self._most[name]:,} tokens: trace.{name}.max_tokens"
        if self.num_first_cut:
            yield f"{count(self.num_first_cut, 'first turn')} cut, documents first: trace.max_session_tokens"


def expected_cuts(
    configs: Mapping[str, LengthConfig], num: int, joint: JointLengths | None, *, is_above: bool
) -> Iterator[str]:
    """Yields notes on the lengths that will be cut to the maximum (is_above), or raised to the minimum, before any is
    sampled. num: about how many lengths of each kind."""
    for name, config in configs.items():
        bound = config.most if is_above else config.min_tokens
        share = _share_beyond(config, joint, int(name == "output"), bound, is_above)
        if share * num >= 0.5:
            done, key = ("cut at", "max_tokens") if is_above else ("raised to", "min_tokens")
            percent = f"{100 * share:.0f}" if share >= 0.1 else f"{100 * share:.2g}"
            yield f"{percent}% of lengths are {done} {bound:,} tokens: trace.{name}.{key}"


def _share_beyond(config: LengthConfig, joint: JointLengths | None, side: int, bound: int, is_above: bool) -> float:
    """Returns the expected share of lengths above a maximum, or below a minimum; no sample rounds to less than one."""
    if config.kind == "empirical" and joint is not None:
        return joint.share_beyond(side, bound, is_above)
    if config.kind not in ("constant", "lognormal") or (bound == 1 and not is_above):
        return 0.0
    if config.kind == "constant" or not config.sigma:
        return float(round(config.value) > bound if is_above else round(config.value) < bound)
    excess = config.value / (bound + 0.5) if is_above else (bound - 0.5) / config.value
    return math.erfc(-math.log(excess) / (config.sigma * math.sqrt(2))) / 2


def endless_lengths(config: LengthConfig, rng: np.random.Generator, key: str = "lengths") -> Iterator[int]:
    """Returns endless lengths in tokens, not yet cut at the maximum. Raises ConfigError with the key for "empirical",
    which only `length_stream` has."""
    low, high = config.min_tokens, config.most
    if config.kind == "empirical":
        raise ConfigError(
            f"{key}.kind is 'empirical'; only trace.prompt, trace.turn_prompt and trace.output are drawn from a trace"
        )
    if config.kind == "constant":
        return repeat(max(low, round(config.value)))
    if config.kind == "uniform":
        return whole_numbers(low, high, rng)
    if config.kind == "zipf":
        return zipf_numbers(low, high, config.exponent, rng)

    def draw(num: int) -> NDArray[np.int64]:
        samples = np.rint(config.value * np.exp(config.sigma * rng.standard_normal(num)))
        return np.clip(samples, low, MAX_NUM_TOKENS + 1).astype(np.int64)  # above any maximum: cuts still see them

    return endless(draw)


class JointLengths:
    """(prompt, output) lengths sampled together from the rows of a trace, so that their dependence is kept."""

    def __init__(self, source: TraceSource) -> None:
        """Iterates over the trace once. Raises ConfigError if no row has an output."""
        pairs = [(row.num_prompt_tokens, row.output.num_tokens) for row in source if row.output is not None]
        if not pairs:
            raise ConfigError(f"trace.lengths_from: trace {source.name!r} has no request with an output length")
        self._pairs = np.array(pairs, dtype=np.int64)  # [num_rows, 2]

    def draw(self, rng: Stream, side: int, config: LengthConfig) -> Iterator[int]:
        """Returns endless lengths of one side (0: prompt, 1: output) of the pairs; item k of both sides is one pair.

        They are raised to the minimum, and not yet cut at the maximum.
        """
        source, lengths = rng("empirical"), np.maximum(self._pairs[:, side], config.min_tokens)
        return endless(lambda num: lengths[source.integers(0, len(lengths), num)])

    def share_beyond(self, side: int, bound: int, is_above: bool) -> float:
        """Returns the share of the rows with a length above, or below, `bound`."""
        lengths = self._pairs[:, side]
        return float(((lengths > bound) if is_above else (lengths < bound)).mean())


def length_stream(
    config: LengthConfig, purpose: str, side: int, rng: Stream, joint: JointLengths | None
) -> Iterator[int]:
    """Returns the lengths for one purpose, not yet cut at the maximum; empirical ones come from `joint`. Raises
    ConfigError if that is missing."""
    if config.kind != "empirical":
        return endless_lengths(config, rng(purpose), f"trace.{purpose}")
    if joint is None:
        raise ConfigError(f"trace.{purpose}.kind is 'empirical' without a trace to draw from; set trace.lengths_from")
    return joint.draw(rng, side, config)
