"""How far a report can be trusted: one indicator each for fidelity, step times, replicates, load and records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import pandas as pd

from analysis import format as fmt
from analysis.comparison.arms import Arm, grouped, num_replicates, on_one_replicate, was_busy
from analysis.comparison.compare import engine_noise, metric_of
from analysis.comparison.effects import Compared
from analysis.comparison.fidelity import worst_errors
from analysis.comparison.pairs import Pair
from analysis.comparison.sharing import common_share, drawn_by, has_new_arrivals
from analysis.load import Run
from analysis.measures.checks import failures
from analysis.measures.steadiness import ends_growing
from analysis.reports.cautions import num_ignored
from analysis.reports.fidelity_findings import not_measured_on, num_picked
from analysis.reports.keeping_up import State, is_closed_loop, judged, serves_nothing, who
from testbed.records.schema import GOOD_FIT, POOR_FIT

_FEW = 5  # replicates; with fewer, intervals are wide
_HARDLY = 0.05  # share of common requests up to which replicates are good
_MOSTLY = 0.75  # and above which they are poor
_NEAR, _FAR = 0.05, 0.15  # relative errors up to which fidelity is good, and fair
_ERRORS = ("ttft_s.mean", "tpot_s.mean", "e2e_s.mean", "throughput.output_tokens_per_s")

Level = Literal["good", "fair", "poor"]
_LEVELS = get_args(Level)


def _worst(levels: Iterable[Level]) -> Level:
    return max(levels, key=_LEVELS.index)


class Trust(NamedTuple):
    """One trust indicator: its subject, its level, and the reason."""

    about: str
    level: Level
    why: str


def trust(
    groups: Sequence[Compared],
    pairs: Sequence[Pair],
    errors: Mapping[str, pd.DataFrame],
    rankings: Mapping[str, pd.DataFrame] = {},
    num_left_out: int = 0,
) -> list[Trust]:
    """The indicators: fidelity, step times (only for simulated runs), replicates, load, records. errors:
    `fidelity.error_table` by pair label; rankings: `fidelity.ranking_agreement` by load. num_left_out: runs that failed
    or did not end."""
    arms = [arm for group in groups for arm in group.arms]
    runs = [run for arm in arms for run in arm.runs]
    is_simulated = any(run.is_simulated for run in runs)
    fidelity = _fidelity(arms, pairs, errors, rankings) if is_simulated else _measured(arms)
    sources = [Source.of(run.manifest, run.flat_config) for run in runs if run.is_simulated]
    priced = [step_times(sources)] if sources else []
    return [fidelity, *priced, _replicates(groups, runs), _load(groups), _records(arms, num_left_out)]


def _replicates(groups: Sequence[Compared], runs: Sequence[Run]) -> Trust:
    num = min(num_replicates(group.arms) for group in groups)
    if num < 2:
        few = [on_one_replicate(group.arms) for group in groups if num_replicates(group.arms) < 2]
        names = list(dict.fromkeys(name for one in few for name in one)) if all(few) else []
        of = f" of {fmt.names(names, _MAX_NAMED)}" if names else ""
        return Trust("replicates", "poor", f"one replicate{of}: nothing says how the result varies between traces")
    drawn = drawn_by([run.flat_config for run in runs])
    stated = [name for run in runs for name in run.flat_config.get("report.replicates") or ()]
    others = [f"other {name}" for name in dict.fromkeys(stated) if name != "trace.transforms" or not drawn]
    how = f", by {fmt.listing([*drawn, *others])}" if drawn or others else ""
    found = [shared([run for arm in group.arms for run in arm.runs]) for group in groups]
    level, why = max(found, key=lambda one: _LEVELS.index(one[0]))
    return Trust("replicates", level if num >= _FEW else _worst([level, "fair"]), f"{num} replicates{how}{why}")


def shared(runs: Sequence[Run]) -> tuple[Level, str]:
    """The best level that replicates of one load can have, given the requests that they share, and the reason."""
    share = common_share(runs)
    if share == 1:
        return "poor", " of the same requests: how the result hangs on exact arrivals, and nothing of other traces"
    if share <= _HARDLY:
        return "good", ""
    configs = [run.flat_config for run in runs]
    which, but = f"each shares {fmt.share(share)} of another's requests", ""
    if "bootstrap" in drawn_by(configs):
        which = "all are drawn from the same requests"
        but = "" if has_new_arrivals(configs) else ", but not for the arrivals, which are the same in all"
    return "poor" if share > _MOSTLY else "fair", f": {which}, and intervals are widened for that{but}"


def _ignoring(arms: Sequence[Arm]) -> str:
    """The names of the arms that ignored requests; "" for none."""
    return fmt.names(list(dict.fromkeys(arm.name for arm in arms if num_ignored(arm))))


_MAX_NAMED = 3  # arms
_OUTCOME = "the offered rate is an outcome, as later turns wait for earlier ones"


def _load(groups: Sequence[Compared]) -> Trust:
    arms = [arm for group in groups for arm in group.arms]
    if serves_nothing(arms):
        return Trust("load", "poor", "no request was served to its end")
    beyond = _where(groups, "beyond")
    said = [f"beyond the capacity of {beyond}"] if beyond else []
    states: tuple[State, ...] = ("untold", "at once")
    for state in states:
        if names := _where(groups, state):
            those = [run for group in groups for one in judged(group.arms) if one.state == state for run in one.runs]
            why = _why_untold(those) if state == "untold" else _came_at_once(those)
            said.append(f"not judged{'' if names == 'every arm' else f' for {names}'}: {why}")
    outcome = [_OUTCOME] if any(is_closed_loop(run) for arm in arms for run in arm.runs) else []
    if said:
        level: Level = "poor" if beyond == "every arm" else "fair"  # then latencies tell how long the trace is
        return Trust("load", level, "; ".join([*said, *outcome]))
    if ignored := _ignoring(arms):
        return Trust("load", "fair", "; ".join([f"{ignored} ignored requests: less was served than came", *outcome]))
    return Trust("load", "good", "; ".join(["every arm kept up with what came", *outcome]))


def _why_untold(runs: Sequence[Run]) -> str:
    """What keeps these runs from being judged: what grows in all of them, else that their traces are short."""
    growing = {ends_growing(run.summary) for run in runs}
    if "" in growing:
        return "the trace ends before it shows whether the engine keeps up"
    ends = "the last sessions begin" if all(map(is_closed_loop, runs)) else "the trace ends"
    if growing == {"waiting"}:
        return f"{ends} while the queue grows"
    but = ", though the queue does not grow" if growing == {"in_system"} else ""
    return f"{ends} while ever more requests are in the system{but}"


def _came_at_once(runs: Sequence[Run]) -> str:
    if all(map(is_closed_loop, runs)):
        return "all sessions began at once, so their number bounds the queue"
    return "requests came all at once"


def _where(groups: Sequence[Compared], state: State) -> str:
    """The arms in a state, with their loads; "every arm" if that is so at all loads."""
    told = {group.load: who(judged(group.arms), state, _MAX_NAMED) for group in groups}
    by_load = {load: names for load, names in told.items() if names}
    by_name = grouped(by_load, lambda load: by_load[load])
    if list(by_name) == ["every arm"] and len(by_load) == len(groups):
        return "every arm"
    return "; ".join(f"{names}{f' at {fmt.listing(at)}' if any(at) else ''}" for names, at in by_name.items())


def _records(arms: Sequence[Arm], num_left_out: int) -> Trust:
    runs = [run for arm in arms for run in arm.runs]
    failed = [text for run in runs for text in failures(run.summary["checks"])]
    if failed:
        return Trust("records", "poor", failed[0])
    known = [check["holds"] for run in runs for check in run.summary["checks"].values()]
    if not all(known):
        return Trust("records", "fair", "not all checks could be made; the setup says which")
    if num_left_out:
        return Trust("records", "fair", f"{num_left_out} of the runs failed or did not end, and say nothing here")
    if ignored := _ignoring(arms):
        return Trust("records", "fair", f"requests of {ignored} were ignored, and have no latency")
    return Trust("records", "good", "all checks hold")


def _measured(arms: Sequence[Arm]) -> Trust:
    """The indicator for fidelity if nothing is simulated: whether the engine's noise is known and small, and whether
    other processes used the machine."""
    known = [most for path in _ERRORS if (most := engine_noise(arms, metric_of(path))) is not None]
    if any(was_busy(run) for arm in arms for run in arm.runs):
        return Trust("fidelity", "poor", f"{_MEASURED}, but others used its machine too")
    if not known:
        return not_repeated(num_replicates(arms))
    level: Level = "good" if max(known) <= _FAR else "fair"
    return Trust("fidelity", level, f"{_MEASURED}; equal runs differ by up to {fmt.percent(max(known))}")


NOT_COMPARED = Trust("fidelity", "poor", "simulated; how far from a real engine was not measured")
_MEASURED = "measured on a real engine, nothing is simulated"


def not_repeated(num: int) -> Trust:
    """The indicator for fidelity if an engine was not compared with itself. num: of replicates."""
    level: Level = "poor" if num == 1 else "fair"  # over several traces the spread includes the engine's noise
    return Trust("fidelity", level, f"{_MEASURED}; how far the engine differs from itself was not measured")


_SOURCES: dict[str, tuple[Level, str]] = {
    "calibrated": ("fair", "fitted to measured steps; how far they are off is not recorded"),
    "recorded": ("good", "a real run's own"),
    "tables": ("fair", "looked up in tables of measured operators"),
    "roofline": ("fair", "from a data sheet"),
    **dict.fromkeys(("constant", "linear"), ("poor", "made up: they show a mechanism")),
}


_MOSTLY_OF_SHEET = 0.5  # share of the time that tables lack, above which step times are not those of tables
_MANY = 0.1  # share of steps outside of the profile above which step times are poor


class Source(NamedTuple):
    """Where the step times of a simulated run are from. level: how good they are. said: their source, the error of a
    fit, the steps outside its range."""

    cost: str
    device: str
    level: Level
    said: str

    @classmethod
    def of(cls, manifest: Mapping[str, Any], config: Mapping[str, Any]) -> Source:
        """config: flat."""
        cost, error = str(manifest.get("cost")), manifest.get("cost_error")
        level, said = _SOURCES.get(
            cost, ("poor", f"of {cost}, a cost model of one's own; nothing says how far it is off")
        )
        if manifest.get("cost_kernels") == "estimated":
            level, said = "poor", f"{said}; its efficiencies and floors are estimates, nobody timed its kernels"
        if (of_sheet := (manifest.get("cost_shares") or {}).get("roofline", 0.0)) > _MOSTLY_OF_SHEET:
            level, said = "poor", f"{said}, which lack {fmt.share(of_sheet)} of the time: that is from a data sheet"
        if {config.get(f"cost.{name}_factor", 1.0) for name in ("host", "device")} != {1.0}:
            level, said = (
                "poor",
                "fitted to measured steps of another machine, and adapted: how far they are off is not known",
            )
        if cost == "roofline" and manifest.get("device") == "cpu":
            level, said = "poor", "made up: no data sheet gives a CPU's; testbed calibrate measures them"
        if error is not None:
            median, p90 = error["median"], error["p90"]
            level = "good" if median <= GOOD_FIT else "fair" if median <= POOR_FIT else "poor"
            said = f"fitted to measured steps; those left out of the fit are {fmt.percent(median)} off in the median, "
            said += f"P90 {fmt.percent(p90)}"
        if (saving := config.get("cost.repeated_saving")) is not None:
            said += f"; that shared reads save {fmt.share(saving)} is given, not fitted"
        num_outside, num_steps = (manifest.get(name) or 0 for name in ("num_extrapolated_steps", "num_steps"))
        if num_outside:
            share = num_outside / max(1, num_steps)
            notes = manifest.get("cost_notes") or [f"{share:.1%} of the steps leave the profiled range"]
            level, said = _worst([level, "poor" if share > _MANY else "fair"]), f"{said}; {notes[0]}"
        return cls(cost, str(manifest.get("device")), level, said)


def step_times(sources: Iterable[Source]) -> Trust:
    """The worst of the simulated runs decides the level; of each cost model and device the worst run is described."""
    worst: dict[tuple[str, str], Source] = {}
    for one in sources:
        key = one.cost, one.device
        if key not in worst or _LEVELS.index(one.level) > _LEVELS.index(worst[key].level):
            worst[key] = one
    differs = [len(set(parts)) > 1 for parts in zip(*worst, strict=True)]
    names = {key: " on ".join(part for part, told in zip(key, differs, strict=True) if told) for key in worst}
    said = grouped(worst, lambda key: worst[key].said)
    texts = [
        text if len(said) == 1 else f"{fmt.listing([names[key] for key in keys])}: {text}"
        for text, keys in said.items()
    ]
    return Trust("step times", _worst([one.level for one in worst.values()]), "; ".join(texts))


def _fidelity(
    arms: Sequence[Arm], pairs: Sequence[Pair], errors: Mapping[str, pd.DataFrame], rankings: Mapping[str, pd.DataFrame]
) -> Trust:
    if not pairs:
        return NOT_COMPARED
    found = worst_errors(errors.values())
    shown = [path for path in (*_ERRORS, "ttft_s.p99", "tpot_s.p99") if path in found]
    errors_up_to = fmt.listing([f"{metric_of(path).label} {fmt.percent(found[path])}" for path in shown])
    told = f"errors up to {errors_up_to}" if shown else "no error is known, as no latency or rate is in both"
    most = max((found[path] for path in _ERRORS if path in found), default=1.0)
    level: Level = "good" if most <= _NEAR else "fair" if most <= _FAR else "poor"
    num_same, num_clear = num_picked(rankings)
    if num_same < num_clear:
        level = _worst([level, "poor" if 2 * num_same <= num_clear else "fair"])
        told += f"; of the engine's best policies it picks {num_same} of {num_clear}"
    other = [word for word, names in not_measured_on(arms, pairs).items() if names]
    if other:
        return Trust("fidelity", _worst([level, "fair"]), f"of another {fmt.listing(other)}: {told}")
    return Trust("fidelity", level, f"measured on this model and device: {told}")
