"""Generates traces: arrivals, lengths, shared system prompts, growing sessions. Owns the named random streams.

Each purpose draws from a stream of its own, seeded by (seed, name of the purpose): changing the rate leaves the lengths
as they are, so two arms of a study share their random numbers. numpy's samplers are used; their values are those of
one numpy version, so a published trace is best frozen to a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from testbed.errors import ConfigError
from testbed.traces.arrange import arrange
from testbed.traces.schema import MAX_NS, Part, Span, Trace, TraceRequest
from testbed.traces.synthesis import content_key

ARRIVALS = ("poisson", "gamma", "deterministic", "all_at_once")
LENGTHS = ("constant", "uniform", "lognormal", "empirical")
THINK_TIMES = ("constant", "exponential")
_MAX_TOKENS = 100_000_000


@dataclass(frozen=True, slots=True)
class LengthConfig:
    """A distribution of lengths in tokens. Samples are rounded, then clipped to min_tokens … max_tokens.

    kind: "constant" (value), "uniform" (min_tokens … max_tokens, both included), "lognormal" (its median is value,
    sigma the standard deviation of the logarithm), "empirical" (pairs of prompt and output lengths from a trace).
    """

    kind: str = "lognormal"
    value: float = 256.0
    sigma: float = 0.8
    min_tokens: int = 1
    max_tokens: int = 8192

    def __post_init__(self) -> None:
        _choose("lengths.kind", self.kind, LENGTHS)
        _check("lengths.value", self.value, 1 <= self.value <= _MAX_TOKENS, f"1 to {_MAX_TOKENS:,}")
        _check("lengths.sigma", self.sigma, 0 <= self.sigma <= 10, "0 to 10")
        _check("lengths.min_tokens", self.min_tokens, self.min_tokens >= 1, "at least 1")
        expected = f"from min_tokens ({self.min_tokens}) to {_MAX_TOKENS:,}"
        _check("lengths.max_tokens", self.max_tokens, self.min_tokens <= self.max_tokens <= _MAX_TOKENS, expected)


@dataclass(frozen=True, slots=True)
class SyntheticConfig:
    """What to generate. A session is a chain of turns; with turns of 1 every request stands alone."""

    name: str = "synthetic"
    num_requests: int = 200  # rows in all; the last session may be cut short
    arrival: str = "poisson"  # of sessions: poisson, gamma, deterministic, all_at_once
    rate: float = 4.0  # sessions started per second, on average (requests per second where turns are 1)
    cv: float = 1.0  # coefficient of variation of gamma's gaps: 1 is Poisson, above is bursty
    prompt: LengthConfig = field(default_factory=LengthConfig)  # of the first turn, without the system prompt
    output: LengthConfig = field(default_factory=LengthConfig)
    turn_prompt: LengthConfig | None = None  # new text of later turns; absent: as prompt
    min_turns: int = 1  # turns of a session, uniform from min_turns to max_turns
    max_turns: int = 1
    closed_loop: bool = True  # a later turn comes think_time_s after the turn before finished; else after it arrived
    think_time_s: float = 5.0  # mean
    think: str = "exponential"  # exponential, constant
    max_session_tokens: int | None = None  # a session ends before a turn that would exceed it; a first turn is cut
    num_system_prompts: int = 0  # each session begins with one of these; 0: none
    system_prompt_tokens: int = 512
    system_prompt_skew: float = 0.0  # Zipf exponent of their popularity; 0: all equal
    num_tenants: int = 0  # sessions belong to tenant-0, tenant-1, ... at random; 0: no tenants

    def __post_init__(self) -> None:
        _choose("trace.arrival", self.arrival, ARRIVALS)
        _choose("trace.think", self.think, THINK_TIMES)
        _check("trace.num_requests", self.num_requests, self.num_requests >= 1, "at least 1")
        _check("trace.rate", self.rate, 0 < self.rate <= 1e9, "above 0, up to 1e9 per second")
        _check("trace.cv", self.cv, 0 < self.cv <= 100, "above 0, up to 100 (0: arrival=deterministic)")
        _check("trace.min_turns", self.min_turns, self.min_turns >= 1, "at least 1")
        turns = f"at least min_turns ({self.min_turns})"
        _check("trace.max_turns", self.max_turns, self.max_turns >= self.min_turns, turns)
        _check("trace.think_time_s", self.think_time_s, 0 <= self.think_time_s <= 1e9, "0 or above")
        for name in ("num_system_prompts", "num_tenants"):
            _check(f"trace.{name}", getattr(self, name), getattr(self, name) >= 0, "0 or above")
        size = self.system_prompt_tokens
        _check("trace.system_prompt_tokens", size, 1 <= size <= _MAX_TOKENS, f"1 to {_MAX_TOKENS:,}")
        _check("trace.system_prompt_skew", self.system_prompt_skew, 0 <= self.system_prompt_skew <= 100, "0 to 100")
        limit = self.max_session_tokens
        if limit is not None:
            least = 2 + (size if self.num_system_prompts else 0)
            _check("trace.max_session_tokens", limit, limit >= least, f"at least {least}, or absent")


@dataclass(frozen=True, slots=True)
class _Draws:
    """All random numbers of a trace, drawn before anything depends on them. Per session, then per row."""

    starts_ns: list[int]
    num_turns: list[int]
    system: list[int]
    tenants: list[int]
    prompts: list[int]
    turn_prompts: list[int]
    outputs: list[int]
    think_ns: list[int]


def stream(seed: int, purpose: str) -> np.random.Generator:
    """The random stream of one purpose: independent of those of all other purposes and seeds."""
    key = content_key("stream", purpose)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(key >> 32, key & 0xFFFFFFFF))))


def generate(config: SyntheticConfig, seed: int = 0, lengths_from: Trace | None = None) -> Trace:
    """The trace of (config, seed). Closed-loop sessions have think_ns on all turns but the first.

    lengths_from: the trace whose (prompt, output) lengths "empirical" draws, as pairs where both are empirical.
    Raises ConfigError for a negative seed, or if "empirical" has no trace.
    """
    if seed < 0:
        raise ConfigError(f"seed is {seed}; it must be 0 or above")
    draws = _draw(config, seed, lengths_from)
    rows: list[TraceRequest] = []
    session = 0
    while len(rows) < config.num_requests:  # every session has a first turn
        rows.extend(_session(config, seed, draws, session, len(rows)))
        session += 1
    return arrange(config.name, rows)


def arrivals(kind: str, rate: float, num: int, rng: np.random.Generator, cv: float = 1.0) -> list[int]:
    """`num` arrival instants in ns, the first at 0 (Poisson and gamma: after its own gap)."""
    _choose("trace.arrival", kind, ARRIVALS)
    if kind == "all_at_once":
        return [0] * num
    if kind == "deterministic":
        return _whole_ns([i * 1e9 / rate for i in range(num)], rate)
    shape = 1.0 if kind == "poisson" else 1.0 / cv**2
    gaps = rng.standard_exponential(num) if kind == "poisson" else rng.standard_gamma(shape, num) / shape
    with np.errstate(over="ignore", invalid="ignore"):  # refused below
        instants = (np.cumsum(gaps) * (1e9 / rate)).tolist()
    return _whole_ns(instants, rate)


def _whole_ns(instants: list[float], rate: float) -> list[int]:
    """Instants that rise, rounded. Raises ConfigError if the last is beyond any clock."""
    if not instants[-1] <= MAX_NS:
        raise ConfigError(
            f"trace.rate is {rate}; the last of {len(instants)} arrivals would come after {MAX_NS / 1e9:.1e} s: "
            "raise it, or lower trace.num_requests"
        )
    return [round(instant) for instant in instants]


def lengths(config: LengthConfig, num: int, rng: np.random.Generator) -> list[int]:
    """`num` lengths in tokens. Raises ConfigError for "empirical", which needs a trace."""
    low, high = config.min_tokens, config.max_tokens
    samples: NDArray[np.float64]
    if config.kind == "constant":
        samples = np.full(num, config.value)
    elif config.kind == "uniform":
        return [int(length) for length in rng.integers(low, high, num, endpoint=True).tolist()]
    elif config.kind == "lognormal":
        samples = config.value * np.exp(config.sigma * rng.standard_normal(num))
    else:
        raise ConfigError("lengths.kind is 'empirical' without a trace to draw from; set trace.lengths_from")
    return [int(length) for length in np.clip(np.rint(samples), low, high).tolist()]


def _draw(config: SyntheticConfig, seed: int, lengths_from: Trace | None) -> _Draws:
    num = config.num_requests  # as many sessions as rows, at most

    def rng(purpose: str) -> np.random.Generator:
        return stream(seed, purpose)

    pairs = _pairs(lengths_from, num, rng("empirical"))
    prompts = _clipped(pairs, 0, config.prompt) or lengths(config.prompt, num, rng("prompt"))
    outputs = _clipped(pairs, 1, config.output) or lengths(config.output, num, rng("output"))
    later = config.turn_prompt or config.prompt
    turn_prompts = _clipped(pairs, 0, later) or lengths(later, num, rng("turn_prompt"))
    mean_ns = config.think_time_s * 1e9
    thinks = rng("think").standard_exponential(num) if config.think == "exponential" else np.ones(num)
    num_systems = max(1, config.num_system_prompts)
    popularity = np.arange(1, num_systems + 1, dtype=np.float64) ** -config.system_prompt_skew
    ranks = np.searchsorted(np.cumsum(popularity) / popularity.sum(), rng("system_prompt").random(num), side="right")
    return _Draws(
        starts_ns=arrivals(config.arrival, config.rate, num, rng("arrival"), config.cv),
        num_turns=rng("turns").integers(config.min_turns, config.max_turns, num, endpoint=True).tolist(),
        system=np.minimum(ranks, num_systems - 1).tolist(),
        tenants=rng("tenant").integers(0, max(1, config.num_tenants), num).tolist(),
        prompts=prompts,
        turn_prompts=turn_prompts,
        outputs=outputs,
        think_ns=[round(think * mean_ns) for think in thinks.tolist()],
    )


def _pairs(trace: Trace | None, num: int, rng: np.random.Generator) -> list[tuple[int, int]] | None:
    """`num` (prompt, output) lengths drawn together from the rows of `trace` that have an output."""
    if trace is None:
        return None
    known = [(row.num_prompt_tokens, row.output.num_tokens) for row in trace.rows if row.output is not None]
    if not known:
        raise ConfigError(f"trace.lengths_from: trace {trace.name!r} has no request with an output length")
    return [known[i] for i in rng.integers(0, len(known), num).tolist()]


def _clipped(pairs: Sequence[tuple[int, int]] | None, side: int, config: LengthConfig) -> list[int] | None:
    """One side of the pairs where the configuration asks for it."""
    if pairs is None or config.kind != "empirical":
        return None
    return [min(max(pair[side], config.min_tokens), config.max_tokens) for pair in pairs]


def _session(config: SyntheticConfig, seed: int, draws: _Draws, session: int, first: int) -> list[TraceRequest]:
    """The turns of one session. Its text is one content: each turn's prompt is the session so far, and new text."""
    key = content_key("synthetic", seed, session)
    head: tuple[Part, ...] = ()
    if config.num_system_prompts:
        system_key = content_key("synthetic-system", seed, draws.system[session])
        head = (Span(system_key, 0, config.system_prompt_tokens),)
    num_head = config.system_prompt_tokens if head else 0
    in_session = config.max_turns > 1
    rows: list[TraceRequest] = []
    arrival_ns, text = draws.starts_ns[session], 0
    for turn in range(draws.num_turns[session]):
        row = first + turn
        if row >= config.num_requests:
            break
        text += draws.turn_prompts[row] if turn else draws.prompts[row]
        output = draws.outputs[row]
        if config.max_session_tokens is not None:
            room = config.max_session_tokens - num_head
            if turn and text + output > room:
                break
            output = min(output, room - 1)
            text = min(text, room - output)
        if turn and not config.closed_loop:
            arrival_ns += draws.think_ns[row]
        rows.append(
            TraceRequest(
                request_id=f"s{session}-t{turn}" if in_session else f"r{session}",
                arrival_ns=arrival_ns,
                prompt=(*head, Span(key, 0, text)),
                output=Span(key, text, output),
                tenant=f"tenant-{draws.tenants[session]}" if config.num_tenants else None,
                session_id=f"s{session}" if in_session else None,
                turn=turn if in_session else None,
                think_ns=draws.think_ns[row] if turn and config.closed_loop else None,
            )
        )
        text += output
    return rows


def _choose(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(choices)}")


def _check(name: str, value: float, condition: bool, expected: str) -> None:
    if not condition or not math.isfinite(value):
        raise ConfigError(f"{name} is {value}; it must be {expected}")
