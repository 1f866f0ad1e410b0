"""How long prompts and outputs are: distributions of lengths in tokens, alone or drawn together from a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from testbed.errors import ConfigError
from testbed.traces.draws import Stream, check, choose, endless
from testbed.traces.schema import MAX_NUM_TOKENS, TraceSource

LENGTHS = ("constant", "uniform", "lognormal", "zipf", "empirical")
MAX_ZIPF_SPAN = 2_000_000  # lengths of one Zipf distribution: its table has as many entries


@dataclass(frozen=True, slots=True)
class LengthConfig:
    """A distribution of lengths in tokens. Samples are rounded, then clipped to min_tokens … max_tokens.

    kind: "constant" (value), "uniform" (min_tokens … max_tokens, both included), "lognormal" (its median is value,
    sigma the standard deviation of the logarithm), "zipf" (length n of min_tokens … max_tokens with probability
    proportional to n ** -exponent), "empirical" (pairs of prompt and output lengths from a trace).
    """

    kind: str = "lognormal"
    value: float = 256.0
    sigma: float = 0.8
    exponent: float = 1.1
    min_tokens: int = 1
    max_tokens: int = 8192

    def __post_init__(self) -> None:
        choose("lengths.kind", self.kind, LENGTHS)
        check("lengths.value", self.value, 1 <= self.value <= MAX_NUM_TOKENS, f"1 to {MAX_NUM_TOKENS:,}")
        check("lengths.sigma", self.sigma, 0 <= self.sigma <= 10, "0 to 10")
        check("lengths.exponent", self.exponent, 0 <= self.exponent <= 10, "0 to 10")
        check("lengths.min_tokens", self.min_tokens, self.min_tokens >= 1, "at least 1")
        expected = f"from min_tokens ({self.min_tokens}) to {MAX_NUM_TOKENS:,}"
        check("lengths.max_tokens", self.max_tokens, self.min_tokens <= self.max_tokens <= MAX_NUM_TOKENS, expected)
        if self.kind == "zipf" and self.max_tokens - self.min_tokens >= MAX_ZIPF_SPAN:
            raise ConfigError(
                f"lengths.max_tokens is {self.max_tokens}; with kind=zipf below min_tokens + {MAX_ZIPF_SPAN:,}"
            )


def lengths(config: LengthConfig, num: int, rng: np.random.Generator) -> list[int]:
    """`num` lengths in tokens. Raises ConfigError for "empirical", which needs a trace."""
    return _sampler(config, rng)(num)


def endless_lengths(config: LengthConfig, rng: np.random.Generator) -> Iterator[int]:
    """Lengths in tokens, without end. Raises ConfigError for "empirical", which needs a trace."""
    return endless(_sampler(config, rng))


def _sampler(config: LengthConfig, rng: np.random.Generator) -> Callable[[int], list[int]]:
    """num -> so many lengths, the next of the stream."""
    low, high = config.min_tokens, config.max_tokens
    if config.kind == "empirical":
        raise ConfigError("lengths.kind is 'empirical' without a trace to draw from; set trace.lengths_from")
    if config.kind == "constant":
        return lambda num: _whole(np.full(num, config.value), low, high)
    if config.kind == "uniform":
        return lambda num: rng.integers(low, high, num, endpoint=True).tolist()
    if config.kind == "lognormal":
        return lambda num: _whole(config.value * np.exp(config.sigma * rng.standard_normal(num)), low, high)
    weights = np.arange(low, high + 1, dtype=np.float64) ** -config.exponent
    cumulated = np.cumsum(weights) / weights.sum()
    return lambda num: _whole(low + np.searchsorted(cumulated, rng.random(num), side="right"), low, high)


def _whole(samples: NDArray[np.generic], low: int, high: int) -> list[int]:
    lengths: list[int] = np.clip(np.rint(samples), low, high).astype(np.int64).tolist()
    return lengths


class JointLengths:
    """(prompt, output) lengths drawn together from the rows of a trace: long prompts keep the outputs they had."""

    def __init__(self, source: TraceSource) -> None:
        """Goes through the trace once. Raises ConfigError if no row has an output."""
        pairs = [(row.num_prompt_tokens, row.output.num_tokens) for row in source if row.output is not None]
        if not pairs:
            raise ConfigError(f"trace.lengths_from: trace {source.name!r} has no request with an output length")
        self._pairs = np.array(pairs, dtype=np.int64)  # [num_rows, 2]

    def draw(self, rng: Stream, side: int, config: LengthConfig) -> Iterator[int]:
        """One side (0: prompt, 1: output) of the pairs, clipped; both sides of one stream belong together."""
        source = rng("empirical")
        num = len(self._pairs)

        def sample(size: int) -> list[int]:
            found = self._pairs[source.integers(0, num, size), side]
            clipped: list[int] = np.clip(found, config.min_tokens, config.max_tokens).tolist()
            return clipped

        return endless(sample)


def length_stream(
    config: LengthConfig, purpose: str, side: int, rng: Stream, joint: JointLengths | None
) -> Iterator[int]:
    """The lengths for one purpose; empirical ones come from `joint`."""
    if config.kind == "empirical" and joint is not None:
        return joint.draw(rng, side, config)
    return endless_lengths(config, rng(purpose))


def table_of_lengths(config: LengthConfig, purpose: str, num: int, rng: Stream) -> list[int]:
    """`num` lengths that belong to things (documents, examples), drawn once."""
    return list(islice(endless_lengths(config, rng(purpose)), num))
