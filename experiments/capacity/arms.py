"""The subjects of a search: the policies (all combinations of the given values), their seeds, and their rate key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from analysis.comparison.arms import settings_apart
from analysis.comparison.sharing import correlation, share_between
from analysis.load import differing_keys, flatten
from analysis.measures.slo import SLO
from analysis.naming import align, labels_of, naming_keys
from experiments.configuration.compose import check_values, compose_raw
from experiments.configuration.config import GROUPS, RunConfig
from experiments.configuration.grammar import parsed
from experiments.configuration.options import Library
from experiments.configuration.overrides import combinations, file_of_swept, library_of, swept_values, with_swept
from experiments.configuration.settings import NO_DEADLINES
from experiments.wiring.engines import num_engines
from experiments.wiring.traces import build_source
from testbed.checks import require_type
from testbed.errors import ConfigError
from testbed.traces.fingerprint import Fingerprint
from testbed.traces.generator_config import TURNS

_NO_RATE = {
    "all_at_once": "all its requests arrive at once",
    "closed_loop": "its users come again when they have been served",
}
_UNRECORDED = dict.fromkeys(("decisions", "explain", "steps", "operators"), False) | {"status_s": None}


@dataclass(frozen=True)
class Arm:
    """One policy. raw: its configuration. A value of `rate_key` times `per_value` is the rate in `unit`.

    num_requests: of its traces at the start value, one number for each seed. correlation: between the seeds' traces,
    which are drawn from one record. replicates: what to give for several. num_gpus: of all replicas; 0 for CPUs.
    """

    name: str
    raw: dict[str, Any]
    slo: SLO
    share: float
    rate_key: str
    start: float
    per_value: float
    is_of_sessions: bool  # the rate is that of sessions, with all their turns
    num_requests: tuple[int, ...]
    correlation: float
    is_simulated: bool
    replicates: str
    num_gpus: int
    naming: tuple[str, ...] = ()  # the keys from which its name is made

    @property
    def unit(self) -> str:
        return "sessions/s" if self.is_of_sessions else "req/s"

    def at(self, value: float, seed: int) -> dict[str, Any]:
        return _at(self.raw, value, seed)


def parse(overrides: Sequence[str]) -> tuple[list[Arm], tuple[int, ...]]:
    """The policies and the seeds that the overrides give. Raises ConfigError with a message of one line."""
    overrides = with_swept(overrides)
    choices = _choices(overrides, library_of(overrides))
    seeds = tuple(_whole(item) for item in choices.pop("seed", ["seed=0"]))
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seed={','.join(map(str, seeds))} has one twice; a seed is simulated once")
    with file_of_swept(overrides):
        keys = check_values(overrides, is_sweep=True)
        points = [(swept, compose_raw(own)) for swept, own in combinations(choices, keys)]
    for key in ("trace.rate", "trace.rate_scale"):
        if len(choices.get(key, [])) > 1:
            raise ConfigError(f"{key} has several values; it is what is searched: give one, to start with")
    if twice := [item for values in choices.values() for item in values if values.count(item) > 1]:
        raise ConfigError(f"{twice[0]} is given twice; name each policy once")
    arms: dict[str, Arm] = {}
    options: dict[str, dict[str, Any]] = {}  # of the groups that are swept, as the words that choose them
    seen: dict[str, _Arrivals] = {}
    shares: dict[tuple[str, ...], float] = {}
    for swept, raw in points:
        said = [item.lstrip("+") for item in swept]
        arm = _arm(" ".join(said).removeprefix("scheduler="), raw, seeds, seen, shares)
        arms[arm.name] = arm
        chosen = (item.partition("=") for item in said)
        options[arm.name] = {f"{group}.name": option for group, _, option in chosen if group in GROUPS}
    return _named([*arms.values()], [*options.values()]), seeds


def _named(arms: Sequence[Arm], options: Sequence[dict[str, Any]]) -> list[Arm]:
    """The arms with names as in reports: the fewest settings that distinguish them."""
    configs = [flatten(arm.raw) | chosen for arm, chosen in zip(arms, options, strict=True)]
    align(configs)
    given, keys = [(config, Path(arm.name)) for config, arm in zip(configs, arms, strict=True)], differing_keys(configs)
    naming = tuple(naming_keys(configs, keys))
    return [replace(arm, name=label, naming=naming) for arm, label in zip(arms, labels_of(given, keys), strict=True)]


def beyond_names(arms: Sequence[Arm]) -> str:
    """The settings in which the arms differ beyond their names, with their values (see `settings_apart`)."""
    configs = [flatten(arm.raw) for arm in arms]
    align(configs)
    return settings_apart(configs, differing_keys(configs), told=arms[0].naming)


def _choices(overrides: Sequence[str], library: Library) -> dict[str, list[str]]:
    """Key -> the overrides that set it; several if Hydra's sweep grammar lists several values. Raises ConfigError."""
    for item in overrides:
        if "=" not in item and not item.startswith("~"):
            raise ConfigError(f"{item!r}: expected key=value pairs, as of `testbed run`")
    choices = {}
    for override in map(parsed, overrides):
        key = override.get_key_element().lstrip("+")
        if key.lstrip("~").startswith("hydra") and key != "hydra.searchpath":
            raise ConfigError(f"{override.input_line!r}: its folder (--out) says where it goes; leave it out")
        if key.lstrip("~") == "overwrite":
            raise ConfigError(f"{override.input_line!r}: a search goes on in its folder; leave it out")
        choices[key] = swept_values(override, library)
    return choices


def _whole(item: str) -> int:
    value = item.partition("=")[2]
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"seed is {value!r}; it must be whole numbers, as seed=0,1,2") from None


def _arm(
    name: str,
    raw: dict[str, Any],
    seeds: tuple[int, ...],
    seen: dict[str, _Arrivals],
    shares: dict[tuple[str, ...], float],
) -> Arm:
    raw = RunConfig.from_container(raw).raw
    raw["record"] |= _UNRECORDED
    config = RunConfig.from_container(raw)
    named = str(raw["trace"].get("_target_", config.trace.name))
    slo = SLO.parse(config.slo.stated)
    if slo is None:
        raise ConfigError(
            "there is no SLO to keep; give the limits of a request in seconds, as slo.ttft_s=1 slo.tpot_s=0.05"
        )
    if config.report.warmup_s:
        raise ConfigError(
            f"report.warmup_s={config.report.warmup_s:g} would leave out more of the trace the higher the rate, and "
            "all of it at a high one; do without, and let a long trace outweigh its start (trace.num_requests, "
            "trace.limit)"
        )
    key, start = _start(raw["trace"], named)
    is_own = "_target_" in raw["trace"]
    is_made = "rate" in raw["trace"] and not is_own
    arrivals = [_arrivals(_at(raw, start, seed), seen) for seed in seeds]
    if is_made:
        _refuse_rateless(raw["trace"])
    if arrivals[0].num_requests < 2:
        raise ConfigError(
            f"trace={named} has {arrivals[0].num_requests} request, which comes at no rate; give more, as "
            "trace.num_requests=1000 (of a recorded trace trace.limit)"
        )
    if "lateness_s" in slo.limited and not arrivals[0].has_deadlines:
        raise ConfigError(NO_DEADLINES)
    for item in slo.classes:
        if not any(item.has(*labels) for labels in arrivals[0].labels):
            raise ConfigError(f"slo.classes names {item.name}, and no request of the trace is of it")
    replicates = _replicates(raw, start, seeds, arrivals, seen)
    slower = _arrivals(_at(raw, start / 2, seeds[0]), seen)
    if not arrivals[0].rate_per_s > 1.1 * slower.rate_per_s > 0:
        why = "they come at once, or trace.transforms sets their arrivals anew; leave that out"
        why = f"mend {named}" if is_own else why
        raise ConfigError(f"{key} does not change how fast requests arrive: {why}")
    own = {key for tenant in raw["trace"].get("tenants", ()) for key in tenant}
    # transformations, and turns of tenants, may change how many requests come, and how fast
    is_nominal = is_made and not raw["trace"]["transforms"] and own.isdisjoint(TURNS)
    offered = sum(one.rate_per_s for one in arrivals) / len(seeds)
    natural = raw["trace"]["rate_scale"] if is_nominal else offered / start
    has_sessions = arrivals[0].has_think_times or (is_nominal and arrivals[0].has_turns)
    return Arm(
        name or config.scheduler.name, raw, slo, config.slo.attainment, key, start, natural * config.speed,
        has_sessions, tuple(one.num_requests for one in arrivals),
        _correlation([_at(raw, start, seed) for seed in seeds], arrivals, shares), config.is_simulated,
        replicates, num_engines(config) * config.tensor_parallel_size * (config.device.kind != "cpu"),
    )  # fmt: skip


def _refuse_rateless(trace: dict[str, Any]) -> None:
    """Raises ConfigError if `trace.rate` is not the rate of all requests of a generated trace."""
    if (arrival := trace.get("arrival")) in _NO_RATE:
        raise ConfigError(
            f"trace.arrival={arrival} has no rate to search: {_NO_RATE[arrival]}; choose another, as "
            "trace.arrival=poisson"
        )
    for position, tenant in enumerate(trace.get("tenants", ())):
        own = "rate" if "rate" in tenant else "arrival"
        if own == "rate" or tenant.get(own) in _NO_RATE:
            raise ConfigError(
                f"trace.tenants[{position}].{own}={tenant[own]} does not follow trace.rate, which is searched: "
                "there is no one rate of all tenants; leave it out, and give the tenant its share"
            )


def _at(raw: dict[str, Any], value: float, seed: int) -> dict[str, Any]:
    made = deepcopy(raw)
    made["seed"] = seed
    key, holder = _searched(made["trace"])
    holder[key.rpartition(".")[2]] = value
    return made


def _searched(trace: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the key that is searched, and the settings that have it."""
    if "rate" in trace:
        return "trace.rate", trace
    for position, step in enumerate(trace.get("transforms") or ()):
        if step["name"] == "copies":
            return f"trace.transforms[{position}].num", step
    return "trace.rate_scale", trace


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """The arrivals of a trace. rate_per_s: of requests (or sessions) with an arrival of their own; 0: all at once."""

    num_requests: int
    rate_per_s: float
    has_think_times: bool
    has_turns: bool
    has_deadlines: bool
    labels: frozenset[tuple[str | None, int]]  # tenant and priority
    fingerprint: str


def _arrivals(raw: dict[str, Any], seen: dict[str, _Arrivals]) -> _Arrivals:
    key = json.dumps([raw["trace"], raw["seed"], raw["model"]], sort_keys=True, default=str)
    if key not in seen:
        digest, num, started, has_turns, has_deadlines = Fingerprint(), 0, 0, False, False
        first_ns, last_ns, labels = 0, 0, set()
        for row in build_source(RunConfig.from_container(raw)):
            digest.update(row)
            num += 1
            labels.add((row.tenant, row.priority))
            has_turns = has_turns or bool(row.turn)
            has_deadlines = has_deadlines or row.deadline_ns is not None
            if row.think_ns is None:
                started += 1
                first_ns, last_ns = row.arrival_ns if started == 1 else first_ns, row.arrival_ns
        rate = (started - 1) / (last_ns - first_ns) * 1e9 if last_ns > first_ns else 0.0
        seen[key] = _Arrivals(num, rate, started < num, has_turns, has_deadlines, frozenset(labels), digest.hexdigest())
    return seen[key]


def _correlation(
    raws: Sequence[dict[str, Any]], arrivals: Sequence[_Arrivals], shares: dict[tuple[str, ...], float]
) -> float:
    """The correlation between the traces of these configurations, by the requests that they share. shares: what is
    known, by the traces' fingerprints: policies have the same traces."""

    def ids(index: int) -> Iterator[str]:
        return (row.request_id for row in build_source(RunConfig.from_container(raws[index])))

    traces = tuple(one.fingerprint for one in arrivals)
    if traces not in shares:
        shares[traces] = share_between(list(map(flatten, raws)), ids)
    return correlation(shares[traces])


def _start(trace: dict[str, Any], named: str) -> tuple[str, float]:
    """Returns the key that is searched, and its value. Raises ConfigError for a user's class that has none."""
    if "_target_" in trace and "rate" not in trace:
        raise ConfigError(
            f"trace={named} has no rate to search: give it a parameter rate, the requests per second, and a value in "
            "its file; or search its file by trace.rate_scale: testbed trace freeze mine.parquet --config-dir=…, then "
            "trace=parquet trace.path=mine.parquet"
        )
    key, holder = _searched(trace)
    value = holder[key.rpartition(".")[2]]
    require_type(key, value, float)  # a class of the user's own may have any
    return key, float(value)


def _replicates(
    raw: dict[str, Any], start: float, seeds: tuple[int, ...], arrivals: list[_Arrivals],
    seen: dict[str, _Arrivals],
) -> str:  # fmt: skip
    """What to give for several replicates of the trace. Raises ConfigError if several seeds give the same trace: there
    is no spread over copies."""
    of_seeds = arrivals if len(seeds) > 1 else [*arrivals, _arrivals(_at(raw, start, seeds[0] ^ 1), seen)]
    several = "seed=0,1,2,3,4"
    if len({one.fingerprint for one in of_seeds}) == len(of_seeds):
        return f"give several seeds, as {several} (docs/capacity.md)"
    trace = raw["trace"]
    named, apart = trace.get("name"), "draw apart: 'trace.transforms=[{name: bootstrap}]' (docs/traces.md)"
    if "_target_" in trace:
        named, apart = trace["_target_"], "give the class a parameter seed to draw by, and no value for it in its file"
    elif trace["seed"] is not None and ("rate" in trace or trace["transforms"]):
        apart = "leave out trace.seed"
    elif trace["transforms"]:
        apart = "draw apart: add {name: bootstrap} to trace.transforms (docs/traces.md)"
    if len(seeds) > 1:
        raise ConfigError(
            f"seed={','.join(map(str, seeds))} are the same requests of trace={named}, and copies are no "
            f"replicates; give one seed, or {apart}"
        )
    return f"other seeds have the same requests of trace={named}: give {several}, and {apart}"
