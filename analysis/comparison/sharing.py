"""How much of their requests replicates have in common.

Replicates that are drawn from one record (by thinning, by bootstraps, by windows that overlap) differ less from each
other than from what another record would give. `correlation` is for intervals that allow for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from analysis.comparison.arms import grouped
from analysis.load import Run, read_frame
from analysis.naming import is_of_trace, is_seed

_DRAWN = ("bootstrap", "jitter", "thin", "sample_sessions", "window")  # transformations that make replicates
# Of two draws with replacement: half of the variance of a draw's mean is that of the record, which both have.
_OF_BOOTSTRAPS = 0.5


def drawn_by(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The transformations of the trace that make these flat configurations replicates."""
    given = grouped(_steps(configs), lambda step: str(step.get("name")))
    return [name for name in _DRAWN if len(set(map(repr, given.get(name, ())))) > (name == "window")]


def _steps(configs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The transformations of all their traces."""
    return [step for config in configs for step in config.get("trace.transforms") or () if isinstance(step, dict)]


def correlation(share: float) -> float:
    """The correlation between replicates with this share of requests in common. 0 if all have the same requests: an
    interval then is of what else differs, such as the arrivals, and says nothing of other traces, which reports tell.
    """
    return share if share < 1 else 0.0


def common_share(runs: Sequence[Run]) -> float:
    """`share_between` the runs' traces."""
    traces = {str(run.fingerprint): run for run in runs}
    configs = [run.flat_config for run in traces.values()]
    return _of_folders(tuple((run.path, name) for name, run in traces.items()), *_drawn(configs))


@lru_cache(maxsize=64)
def _of_folders(traces: tuple[tuple[Path, str], ...], records: tuple[str, ...], known: float | None) -> float:
    """traces: the folder and the trace's fingerprint of each run."""
    files = [folder / "requests.parquet" for folder, _ in traces]
    return _share(records, known, lambda index: read_frame(files[index], ["request_id"])["request_id"])


def share_between(configs: Sequence[Mapping[str, Any]], ids: Callable[[int], Iterable[str]]) -> float:
    """The share of its requests that a trace has in common with another, on average over all pairs. Bootstraps of one
    record count as sharing half, and the same requests at other instants as sharing all. Generated traces of different
    seeds share nothing.

    configs: flat, one for each trace. ids: of the requests of the trace at this index.
    """
    return _share(*_drawn(configs), ids)


def _drawn(configs: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], float | None]:
    """(the record of each trace, the share in common of two of one record; None: their ids tell)."""
    known = 1.0 if _differ_in_arrivals_only(configs) else _OF_BOOTSTRAPS if "bootstrap" in drawn_by(configs) else None
    return tuple(map(_record, configs)), known


def _share(records: Sequence[str], known: float | None, ids: Callable[[int], Iterable[str]]) -> float:
    num, same = len(records), sum(each * (each - 1) for each in Counter(records).values())
    if not same:
        return 0.0
    if known is not None:
        return known * same / (num * (num - 1))
    times = Counter((record, name) for index, record in enumerate(records) for name in ids(index))
    return sum(each * (each - 1) for each in times.values()) / (num - 1) / max(1, times.total())


def _differ_in_arrivals_only(configs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether seeds draw new arrivals and select no requests, and no other setting differs. What then comes after a
    window's end is not in common, but hardly tells other traces."""
    settings = {repr([config[key] for key in config if is_of_trace(key) and not is_seed(key)]) for config in configs}
    steps = {str(step.get("by" if step.get("name") == "set_rate" else "name")) for step in _steps(configs)}
    are_new = any(config.get("trace.name") in ("lengths", "agentic") for config in configs)
    are_new = are_new or not steps.isdisjoint(("jitter", "arrivals"))
    return are_new and len(settings) == 1 and steps.isdisjoint(("thin", "sample_sessions", "bootstrap"))


def _record(config: Mapping[str, Any]) -> str:
    """What the trace is drawn from: a file (of which `lengths` and `agentic` draw only the arrivals), a generator and
    its seed, or a user's class and its arguments."""
    if "trace._target_" in config:
        return repr([(key, value) for key, value in config.items() if is_of_trace(key) and key != "trace.transforms"])
    seed = config.get("trace.seed")
    is_generated = config.get("trace.path") is None or config.get("trace.name") == "servegen"
    seeds = (config.get("seed") if seed is None else seed) if is_generated else None
    return repr((config.get("trace.name"), config.get("trace.path"), seeds))
