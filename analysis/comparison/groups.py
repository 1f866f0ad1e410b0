"""Groups runs into experiments: if a folder mixes several, the largest one is reported and the others are named.

An experiment has one model, device, cost model and backend, and one trace except for its load and seed. If exactly the
same policies ran on each of several platforms or traces, this is a crossed design and stays one experiment. Routers are
arms of one experiment; so are, in vLLM, this testbed's scheduler and vLLM's own. The runs may state the question,
baseline and margin (`report.*`) and the SLO (`slo.*`) of their experiment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.comparison.arms import grouped, infer_arms, is_policy, stated_replicates
from analysis.format import count
from analysis.load import Run, differing_keys, relative, swept_keys
from analysis.measures.slo import SLO
from analysis.naming import DECIDES, SPEED, VERSION, is_of_router, is_of_trace
from testbed.errors import RunFolderError
from testbed.foreign_text import some

_PLATFORM = ("model", "device", "cost", "backend")
_NO_RUN = ("slo", "report", "overwrite", "allow_ignored", "points_per_job")  # they decide nothing of a run
LOAD_KEYS = ("trace.rate", "trace.rate_scale", SPEED)
_MADE = ("classes", "code")  # of a run's identity
MAX_KEYS = 4  # differing settings that are listed
Experiment = list[Run]


def experiments(runs: Sequence[Run]) -> list[Experiment]:
    """The runs by experiment. The first is the one to report: experiments with several arms, then those with more runs,
    come first."""
    keys = swept_keys(runs)
    platform = [key for key in keys if _is_platform(key) and key.split(".")[-1] != "seed"]
    replicated = stated_replicates(runs)
    trace = [key for key in keys if is_of_trace(key) and key not in (*LOAD_KEYS, *replicated, "trace.seed")]
    chosen = [key for key in keys if _is_chosen(key)]
    policy = [key for key in keys if is_policy(key) and key not in (*platform, *chosen)]

    def settings(run: Run, of: Sequence[str]) -> str:
        return repr([run.flat_config.get(key) for key in of])

    def policies(members: Experiment, of: Sequence[str] = policy) -> str:
        return repr(sorted({settings(run, of) for run in members}))

    groups = list(grouped(runs, lambda run: settings(run, [*platform, *trace])).values())
    groups = _merged(groups, lambda members: policies(members, [*policy, *chosen]) + settings(members[0], platform))
    groups = _merged(groups, lambda members: policies(members) + repr(sorted({str(m.fingerprint) for m in members})))
    return sorted(groups, key=lambda members: (len(infer_arms(members)) < 2, -len(members)))


def _is_platform(key: str) -> bool:
    return key.split(".")[0] in _PLATFORM and key != SPEED and not _is_chosen(key)


def _is_chosen(key: str) -> bool:
    """Whether a setting of the backend is a choice that is compared: the router, and who decides in vLLM."""
    return key == DECIDES or is_of_router(key)


def _merged(groups: Sequence[Experiment], key: Callable[[Experiment], str]) -> list[Experiment]:
    return [[run for members in alike for run in members] for alike in grouped(groups, key).values()]


def tell_versions_apart(runs: Sequence[Run], folders: Iterable[str | os.PathLike[str]]) -> None:
    """Gives each run the level `VERSION`, the given folder that it lies in (of a given run: the one above it), if runs
    of one configuration in different ones were made from other classes or code: they are versions of one arm."""
    given = [Path(folder) for folder in folders]
    place_of: dict[Path, Path] = {}
    made: dict[str, dict[Path, str]] = {}  # by configuration: what its runs were made from, by place
    for run in runs:
        inside = next(folder for folder in given if run.path.is_relative_to(folder))
        place_of[run.path] = place = run.path.parent if inside == run.path else inside
        identity = run.manifest.get("identity") or {}
        made.setdefault(str(identity.get("config")), {})[place] = repr([identity.get(key) for key in _MADE])
    if any(len({*by_place.values()}) > 1 for by_place in made.values()):
        places = {*place_of.values()}
        is_short = len({place.name for place in places}) == len(places)
        for run in runs:
            place = place_of[run.path]
            run.flat_config[VERSION] = place.name if is_short else str(place)


def settings_given(manifest: Mapping[str, Any]) -> frozenset[tuple[str, str]] | None:
    """The settings that the run's command gave, without those that decide nothing of a run; None: not known."""
    given = manifest.get("given")
    if not isinstance(given, dict):
        return None
    return frozenset((key, str(value)) for key, value in given.items() if key.partition(".")[0] not in _NO_RUN)


def of_newest(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The runs without those of which the same sweep has newer ones of the same settings, made from something else; and
    a sentence on those that are left out."""
    points = [run for run in runs if run.manifest.get("sweep") and settings_given(run.manifest) is not None]
    newest: dict[Path, Run] = {}  # by the folder of an older run
    for members in grouped(points, lambda run: (run.path.parent, settings_given(run.manifest))).values():
        last = max(members, key=lambda run: str(run.manifest.get("created")))
        newest |= {run.path: last for run in members if run is not last}
    older = [(run, newest[run.path]) for run in runs if run.path in newest]
    apart = [key for both in older for key in differing_keys([run.flat_config for run in both])]
    keys = list(dict.fromkeys(key for key in apart if key.partition(".")[0] not in _NO_RUN))
    said = f"{count(len(older), 'run')} left out: the same sweep has newer ones of the same settings"
    said += f", of other defaults ({some(keys)})." if keys else ", made from something else."
    return [run for run in runs if run.path not in newest], [said] if older else []


def left_out(chosen: Sequence[Run], other: Sequence[Run], start: os.PathLike[str]) -> str:
    """A sentence that names the runs of another experiment and states how they differ."""
    folder = os.path.commonpath([run.path.resolve() for run in other])
    where = relative(Path(folder), Path(start))
    return (
        f"{count(len(other), 'run')} at or below {where} {'is' if len(other) == 1 else 'are'} another experiment "
        f"({differing(chosen, other)}) and left out; report on that folder separately."
    )


def refuse_unused(compared: Sequence[Run], runs: Sequence[Run], folders: Iterable[str | os.PathLike[str]]) -> None:
    """Raises RunFolderError if none of the `runs` in one of the given folders is in `compared`."""
    known = {run.path for run in compared}
    for folder in folders:
        inside = [run for run in runs if run.path.resolve().is_relative_to(Path(folder).resolve())]
        if not any(run.path in known for run in inside):
            raise RunFolderError(
                f"{folder} is another experiment than the other folders ({differing(compared, inside)}), and nothing "
                f"in it can be compared with them; report it by itself: testbed report {folder}"
            )


def differing(some: Sequence[Run], others: Sequence[Run]) -> str:
    """The settings in which no run of `some` equals one of `others`: model, device, cost, backend and the trace's; if
    there are none of these and a trace is shared, all such settings."""
    apart = []
    for key in swept_keys([*some, *others]):
        sides = [{repr(run.flat_config.get(key)) for run in runs} for runs in (some, others)]
        if not sides[0] & sides[1]:
            apart.append(key)
    of_load = [key for key in apart if _is_platform(key) or is_of_trace(key) or key.split(".")[0] == "seed"]
    found = list(dict.fromkeys(key.split(".")[0] if _is_platform(key) else key for key in of_load))
    if not found:
        if not {run.fingerprint for run in some} & {run.fingerprint for run in others}:
            return "other traces"
        found = apart or ["policies"]
    more = f" and {len(found) - MAX_KEYS} more" if len(found) > MAX_KEYS else ""
    return f"other {', '.join(found[:MAX_KEYS])}{more}"


# --- what the runs state ---


def stated(runs: Sequence[Run], name: str) -> Any:
    """The value of `report.<name>` in the runs that have it; None if none does. RunFolderError if the values differ."""
    found: dict[str, Any] = {}
    for run in runs:
        value = run.flat_config.get(f"report.{name}")
        if value not in (None, "", []):
            found.setdefault(repr(value), value)
    if len(found) > 1:
        cure = f"choose one with --{name.removesuffix('s')}"
        if name == "replicates":
            cure = "run their sweeps' commands again with one of them, which simulates nothing anew"
        raise RunFolderError(f"the runs state several report.{name}: {', '.join(found)}; {cure}")
    return next(iter(found.values()), None)


def check_warm_up(runs: Sequence[Run]) -> None:
    """Raises RunFolderError if compared runs have different warm-ups, or a warm-up leaves out all requests of one."""
    found = sorted({run.warmup_s for run in runs})
    again = "give every command of the sweep"
    if len(found) > 1:
        raise RunFolderError(
            f"the runs leave out different starts (report.warmup_s: {', '.join(f'{value:g}' for value in found)}); "
            f"{again} the same: what is done is not run again"
        )
    if empty := [run for run in runs if run.summary["num_in_warmup"] and not run.summary["num_requests"]]:
        raise RunFolderError(
            f"report.warmup_s={found[0]:g} leaves out all requests of {empty[0].path} ({len(empty)} of {len(runs)} "
            f"runs); {again} a smaller one: what is done is not run again"
        )


def stated_slo(runs: Sequence[Run]) -> SLO | None:
    """The SLO that the runs state; None if none does. Raises RunFolderError if they differ."""
    found = list(dict.fromkeys(run.slo for run in runs if run.slo is not None))
    if len(found) > 1:
        some = f"{len(found)} different SLOs ({found[0]}, {found[1]})"
        raise RunFolderError(f"the runs state {some}; choose one with --slo")
    return found[0] if found else None
