"""How much of their requests replicates have in common.

Replicates that are drawn from one record (by thinning, by bootstraps, by windows that overlap) differ less from each
other than from what another record would give. `correlation` is for intervals that allow for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from analysis.comparison.arms import grouped
from analysis.load import Run, read_frame
from analysis.naming import is_of_trace, is_seed

_DRAWN = ("bootstrap", "jitter", "thin", "sample_sessions", "window")  # transformations that make replicates
# Of two draws with replacement: half of the variance of a draw's mean is that of the record, which both have.
_OF_BOOTSTRAPS = 0.5


def drawn_by(runs: Sequence[Run]) -> list[str]:
    """The transformations of the trace that make the runs replicates."""
    given = grouped(_steps(runs), lambda step: str(step.get("name")))
    return [name for name in _DRAWN if len(set(map(repr, given.get(name, ())))) > (name == "window")]


def _steps(runs: Sequence[Run]) -> list[Mapping[str, Any]]:
    """The transformations of all their traces."""
    return [step for run in runs for step in run.flat_config.get("trace.transforms") or () if isinstance(step, dict)]


def _differ_in_arrivals_only(runs: Sequence[Run]) -> bool:
    """Whether seeds draw new arrivals and select no requests, and no other setting differs. What then comes after a
    window's end is not in common, but hardly tells other traces."""
    configs = [run.flat_config for run in runs]
    settings = {repr([config[key] for key in config if is_of_trace(key) and not is_seed(key)]) for config in configs}
    steps = {str(step.get("by" if step.get("name") == "set_rate" else "name")) for step in _steps(runs)}
    are_new = configs[0].get("trace.name") in ("lengths", "agentic") or not steps.isdisjoint(("jitter", "arrivals"))
    return are_new and len(settings) == 1 and steps.isdisjoint(("thin", "sample_sessions", "bootstrap"))


def correlation(runs: Sequence[Run]) -> float:
    """The correlation between replicates, as their `common_share`. 0 if all have the same requests: an interval then
    is of what else differs, such as the arrivals, and says nothing of other traces, which reports tell."""
    share = common_share(runs)
    return share if share < 1 else 0.0


def common_share(runs: Sequence[Run]) -> float:
    """The share of its requests that a trace has in common with another, on average over all pairs. Bootstraps of one
    record count as sharing half, and the same requests at other instants as sharing all. Generated traces of different
    seeds share nothing."""
    traces = {str(run.fingerprint): (run.path, str(run.fingerprint), _record(run)) for run in runs}
    num, records = len(traces), Counter(record for _, _, record in traces.values())
    same = sum(each * (each - 1) for each in records.values())
    if not same:
        return 0.0
    if _differ_in_arrivals_only(runs):
        return same / (num * (num - 1))
    if "bootstrap" in drawn_by(runs):
        return _OF_BOOTSTRAPS * same / (num * (num - 1))
    return _share_of_ids(tuple(sorted(traces.values())))


@lru_cache(maxsize=64)
def _share_of_ids(traces: tuple[tuple[Path, str, str], ...]) -> float:
    """`common_share` by the requests' ids. traces: (a run's folder, fingerprint, record) of each."""
    times: Counter[tuple[str, str]] = Counter()
    for folder, _, record in traces:
        ids = read_frame(folder / "requests.parquet", ["request_id"])["request_id"]
        times.update((record, name) for name in ids)
    in_common = sum(num * (num - 1) for num in times.values()) / (len(traces) - 1)
    return in_common / max(1, sum(times.values()))


def _record(run: Run) -> str:
    """What the trace is drawn from: a file (of which `lengths` and `agentic` draw only the arrivals), a generator and
    its seed, or a user's class and its arguments."""
    config = run.flat_config
    if "trace._target_" in config:
        return repr([(key, value) for key, value in config.items() if is_of_trace(key) and key != "trace.transforms"])
    seed = config.get("trace.seed")
    is_generated = config.get("trace.name") in ("synthetic", "servegen")
    seeds = (config.get("seed") if seed is None else seed) if is_generated else None
    return repr((config.get("trace.name"), config.get("trace.path"), seeds))
