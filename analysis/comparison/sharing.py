"""How much of their requests replicates have in common.

Replicates that are drawn from one record (by thinning, by bootstraps, by windows that overlap) differ less from each
other than from what another record would give. `correlation` is for intervals that allow for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from analysis.comparison.arms import grouped
from analysis.load import Run, read_frame
from analysis.naming import is_of_trace, is_seed

_DRAWN = ("bootstrap", "jitter", "copies", "thin", "sample_sessions", "window")  # transformations that make replicates
# Of two draws with replacement: half of the variance of a draw's mean is that of the record, which both have.
_OF_BOOTSTRAPS = 0.5


def drawn_by(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The transformations of the trace that make these flat configurations replicates."""
    given = grouped(_steps(configs), lambda step: str(step.get("name")))
    return [name for name in _DRAWN if len(set(map(repr, given.get(name, ())))) > (name == "window")]


def has_new_arrivals(configs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether seeds draw when the requests of a record come."""
    are_drawn = any(config.get("trace.name") in ("lengths", "agentic") for config in configs)
    return are_drawn or any(step.get("name") == "arrivals" for step in _steps(configs))


def _steps(configs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The transformations of all their traces."""
    return [step for config in configs for step in config.get("trace.transforms") or () if isinstance(step, dict)]


def correlation(share: float) -> float:
    """The correlation between replicates with this share of requests in common. 0 if all have the same requests: an
    interval then is of what else differs, such as the arrivals, and says nothing of other traces, which reports tell.
    """
    return share if share < 1 else 0.0


class _Part(NamedTuple):
    """What of a trace is drawn from one record. name: by which its ids begin once another trace is merged in; "" for a
    merged trace: not known. known: the share in common of two draws from its record; None: their ids tell."""

    name: str
    record: str
    known: float | None


def common_share(runs: Sequence[Run]) -> float:
    """`share_between` the runs' traces."""
    traces = {str(run.fingerprint): run for run in runs}
    parts = _parts([run.flat_config for run in traces.values()])
    return _of_folders(tuple((run.path, name) for name, run in traces.items()), parts)


@lru_cache(maxsize=64)
def _of_folders(traces: tuple[tuple[Path, str], ...], parts: tuple[tuple[_Part, ...], ...]) -> float:
    """traces: the folder and the trace's fingerprint of each run."""
    files = [folder / "requests.parquet" for folder, _ in traces]
    return _share(parts, lambda index: read_frame(files[index], ["request_id"])["request_id"])


def share_between(configs: Sequence[Mapping[str, Any]], ids: Callable[[int], Iterable[str]]) -> float:
    """The share of its requests that a trace has in common with another, on average over all pairs. Bootstraps of one
    record count as sharing half, and the same requests at other instants as sharing all. Generated traces of different
    seeds share nothing but what is merged from one file.

    configs: flat, one for each trace. ids: of the requests of the trace at this index.
    """
    return _share(_parts(configs), ids)


def _share(traces: Sequence[tuple[_Part, ...]], ids: Callable[[int], Iterable[str]]) -> float:
    num, times = len(traces), Counter(part.record for parts in traces for part in parts)
    if num < 2 or max(times.values()) < 2:
        return 0.0
    if all(len(parts) == 1 and parts[0].known is not None for parts in traces):
        same = sum(each * (each - 1) for each in times.values())
        return (traces[0][0].known or 0.0) * same / (num * (num - 1))
    drawn = [Counter(_drawn_from(parts, name) for name in ids(index)) for index, parts in enumerate(traces)]
    num_traces = Counter(key for each in drawn for key in each)
    common = sum(count * key[2] * (num_traces[key] - 1) for each in drawn for key, count in each.items())
    return common / (num - 1) / max(1, sum(each.total() for each in drawn))


def _drawn_from(parts: tuple[_Part, ...], request_id: str) -> tuple[str, str, float]:
    """(the record of a request, its id there if that tells what is in common, the share in common if it is)."""
    base, *merged = parts
    part = base
    for other in reversed(merged):  # the last one was merged with all before it
        head, _, rest = request_id.partition("/")
        is_other = request_id.startswith(f"{other.name}/") if other.name else head.split("+")[0] != base.name
        request_id = rest
        if is_other:
            part = other
            break
    return (part.record, request_id, 1.0) if part.known is None else (part.record, "", part.known)


def _parts(configs: Sequence[Mapping[str, Any]]) -> tuple[tuple[_Part, ...], ...]:
    """The parts of each trace: what was read or generated, then each that is merged in."""
    only_arrivals, lists = _differ_in_arrivals_only(configs), [_steps([config]) for config in configs]

    def known(position: int) -> float | None:
        """Of what is there before this step."""
        are_bootstraps = any(step.get("name") == "bootstrap" for steps in lists for step in steps[position:])
        return 1.0 if only_arrivals else _OF_BOOTSTRAPS if are_bootstraps else None

    def parts(config: Mapping[str, Any], steps: list[Mapping[str, Any]]) -> Iterator[_Part]:
        yield _Part(str(config.get("trace.name")), _record(config), known(0))
        for position, step in enumerate(steps):
            if step.get("name") == "merge":
                form = step.get("format")
                name = step.get("label") or ("" if form in (None, "auto", "parquet") else form)
                yield _Part(str(name), _drawn_record(config, form, step.get("path")), known(position))

    return tuple(tuple(parts(*each)) for each in zip(configs, lists, strict=True))


def _differ_in_arrivals_only(configs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether seeds draw new arrivals and select no requests, and no other setting differs. What then comes after a
    window's end is not in common, but hardly tells other traces."""
    settings = {repr([config[key] for key in config if is_of_trace(key) and not is_seed(key)]) for config in configs}
    steps = {str(step.get("by" if step.get("name") == "set_rate" else "name")) for step in _steps(configs)}
    are_new = has_new_arrivals(configs) or not steps.isdisjoint(("jitter", "copies"))
    return are_new and len(settings) == 1 and steps.isdisjoint(("thin", "sample_sessions", "bootstrap"))


def _record(config: Mapping[str, Any]) -> str:
    """What the trace is drawn from: a file (of which `lengths` and `agentic` draw only the arrivals), a generator and
    its seed, or a user's class and its arguments."""
    if "trace._target_" in config:
        drawn = [(key, value) for key, value in config.items() if is_of_trace(key) and key != "trace.transforms"]
        return repr([*drawn, config.get("seed")])  # which it gets too
    return _drawn_record(config, config.get("trace.name"), config.get("trace.path"))


def _drawn_record(config: Mapping[str, Any], form: Any, path: Any) -> str:
    """The record of a part of the trace with this format and file."""
    seed = config.get("trace.seed")
    seeds = (config.get("seed") if seed is None else seed) if path is None or form == "servegen" else None
    return repr((form, path, seeds))
