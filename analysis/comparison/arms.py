"""Groups runs into arms: what was varied, and which runs are replicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from analysis.format import plain, significant
from analysis.load import Run, Sweep, swept_keys
from analysis.measures.notes import BUSY, replay_notes
from analysis.naming import is_of_trace, is_seed, labels_of, level_names, level_text, naming_keys, naming_rank
from testbed.errors import RunFolderError


class Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T")
K = TypeVar("K")
N = TypeVar("N", bound=Named)
Several = Sweep | Sequence[Run] | Mapping[str, Run]
Runs = Run | Several
_NO_POLICY = ("overwrite", "allow_ignored", "experiment", "trace", "record", "slo", "report")  # top-level keys


@dataclass(frozen=True)
class Arm:
    """One policy (a variant of the comparison): the levels of its factors, and its runs over seeds (replicates) and
    loads. naming: the keys from which its name is made."""

    name: str
    levels: Mapping[str, Any]
    runs: tuple[Run, ...]
    naming: tuple[str, ...] = ()


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by key; keys and items keep the order of first occurrence."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def is_policy(key: str) -> bool:
    """Whether a setting distinguishes arms: seeds, the trace, SLO, report, recording and permissions do not."""
    return not is_seed(key) and not is_of_trace(key) and key.split(".")[0] not in _NO_POLICY


def settings_apart(configs: Sequence[Mapping[str, Any]], keys: Iterable[str], told: Container[str] = ()) -> str:
    """Those of the keys that differ between policies, as a preset's own do, with their values in the flat
    configurations: "cache.watermark 0/0.01". Those of models, devices, backends and cost models that differ in their
    names are left to these, and so are the keys that are told."""
    of_policy = [key for key in keys if is_policy(key)]
    named = {room for room in ("model", "device", "backend", "cost") if f"{room}.name" in of_policy}
    left = [key for key in of_policy if key.partition(".")[0] not in named and key not in told]
    levels = {
        key: {"null" if (one := own.get(key)) is None else level_text(key, one): None for own in configs}
        for key in left
    }
    return "; ".join(f"{key} {'/'.join(of_key)}" for key, of_key in levels.items() if [*of_key] != ["null"])


def infer_arms(runs: Sequence[Run]) -> list[Arm]:
    """Arms by the swept policy keys, in the order of the runs.

    An arm is named by the fewest keys that distinguish all arms, component names first, and by those that a command
    gave and whose level follows from none of these: else a change would be told as another's that came with it.
    """
    swept = sorted((key for key in swept_keys(runs) if is_policy(key)), key=naming_rank)
    naming = naming_keys([run.flat_config for run in runs], swept)
    given = {key for run in runs for key in run.manifest.get("given") or ()}
    of_runs = {key: [repr(run.flat_config.get(key)) for run in runs] for key in swept}
    naming += [key for key in swept if key in given and not any(_follows(of_runs[key], of_runs[one]) for one in naming)]
    arms = []
    for members in grouped(runs, lambda run: repr([run.flat_config.get(key) for key in swept])).values():
        levels = {key: members[0].flat_config.get(key) for key in swept}
        name = level_names({key: levels[key] for key in naming}) or members[0].manifest.get("scheduler", "all runs")
        arms.append(Arm(str(name), levels, tuple(members), tuple(naming)))
    num_of = Counter(arm.name for arm in arms)
    return [replace(arm, name=f"{arm.name} ({_exactly(arm)})") if num_of[arm.name] > 1 else arm for arm in arms]


def _exactly(arm: Arm) -> str:
    """The levels in an arm's name with their modules and all their digits, where names are shorter."""
    return "; ".join(str(arm.levels[key]).replace(", ", ",") for key in arm.naming)


def named(runs: Runs) -> dict[str, Run]:
    """Label -> run. Labels are as given, or the fewest swept keys that distinguish the runs, or the folder names."""
    if isinstance(runs, Mapping):
        return dict(runs)
    members = [runs] if isinstance(runs, Run) else list(runs.runs if isinstance(runs, Sweep) else runs)
    labels = labels_of([(run.flat_config, run.path) for run in members], swept_keys(members))
    return dict(zip(labels, members, strict=True))


def level_groups(arms: Sequence[Arm]) -> list[tuple[str, ...]]:
    """The factors, as tuples of keys whose levels differ between arms, the key that names a factor first. Keys that
    always change together are one factor, and so are a key and those whose levels follow from it (a preset's own)."""
    groups: dict[tuple[int, ...], list[str]] = {}  # by the first arm that has the same level, for each arm
    for key in dict.fromkeys(key for arm in arms for key in arm.levels):
        values = [repr(arm.levels.get(key)) for arm in arms]
        if len(set(values)) > 1:
            groups.setdefault(tuple(map(values.index, values)), []).append(key)
    leading = {one: [other for other in groups if other != one and _follows(one, other)] for one in groups}
    factors = {one: keys for one, keys in groups.items() if not leading[one]}
    for one, keys in groups.items():
        if leading[one]:
            factors[next(other for other in leading[one] if other in factors)].extend(keys)
    return [tuple(keys) for keys in factors.values()]


def _follows(levels: Sequence[object], other: Sequence[object]) -> bool:
    """Whether arms with one level of the other key have one level of this key, too."""
    return len(set(zip(levels, other, strict=True))) == len(set(other))


def same_prices(one: Arm, other: Arm) -> bool:
    """Whether both arms take their step times from the same cost model."""
    keys = [key for key in (*one.levels, *other.levels) if key.startswith("cost.")]
    return all(one.levels.get(key) == other.levels.get(key) for key in keys)


def arms_called(arms: Sequence[N], name: str) -> list[N]:
    """The arms with this name, or else all whose name contains it."""
    return [arm for arm in arms if arm.name == name] or [arm for arm in arms if name in arm.name]


def find_arm(arms: Sequence[N], name: str | None) -> N:
    """The arm with this name, or else the only one whose name contains it; the first arm for None. Raises
    RunFolderError if there is none, or several."""
    if name is None:
        return arms[0]
    near = arms_called(arms, name)
    if len(near) != 1:
        what = f"{len(near)} arms have it in their names" if near else "no arm is called so"
        names = "; ".join(arm.name for arm in arms)
        raise RunFolderError(
            f"baseline {name!r}: {what}; the arms are: {names}. Name one with --baseline or report.baseline"
        )
    return near[0]


_TRACE = ("trace.name", "trace._target_")
_SAME_RATE = 1.1  # the rates of short traces differ by a few percent between seeds


def stated_replicates(runs: Iterable[Run]) -> list[str]:
    """The keys of the trace whose values the runs declare as replicates (`report.replicates`)."""
    return sorted({name for run in runs for name in run.flat_config.get("report.replicates") or ()})


def load_keys(runs: Sequence[Run], replicated: Sequence[str]) -> list[str]:
    """The swept settings of the trace and its replay that distinguish loads (conditions): all except seeds and the
    `replicated` keys, whose values are replicates."""
    keys = [key for key in swept_keys(runs) if is_of_trace(key) and not is_seed(key)]
    return [key for key in keys if not any(key == name or key.startswith(f"{name}.") for name in replicated)]


def unsaid_keys(runs: Sequence[Run], replicated: Sequence[str]) -> list[str]:
    """The `load_keys` that `by_load` leaves out of its labels: loads that differ in them have different traces."""
    keys = load_keys(runs, replicated)
    told = naming_keys([run.flat_config for run in runs], keys)
    return [key for key in keys if key not in told]


def _load_values(runs: Sequence[Run], key: str) -> list[str]:
    """The setting of each run as text. Of lists, such as transformations, without what all begin and all end with, but
    at least one entry of each."""
    values: list[Any] = [run.flat_config.get(key) for run in runs]
    for end in (0, -1):
        while all(isinstance(value, list) and len(value) > 1 and value[end] == values[0][end] for value in values):
            values = [value[1:] if end == 0 else value[:-1] for value in values]
    return [_load_value(run, key, value) for run, value in zip(runs, values, strict=True)]


def _load_value(run: Run, key: str, value: Any) -> str:
    config = run.flat_config
    if key != "trace.rate" or value is None or config.get("trace.name") != "synthetic":
        return plain(value)
    return f"{plain(value)} {'sessions' if (config.get('trace.max_turns') or 1) > 1 else 'requests'}/s"


def by_load(arms: Sequence[Arm], replicated: Sequence[str]) -> dict[str, list[Arm]]:
    """Load -> the arms with their runs at that load, the lowest offered rate first. The label has the fewest settings
    that distinguish the loads ("" for a single load), and the offered rate if it differs and no setting states it.
    replicated: keys of the trace whose values are replicates, not loads."""
    runs = [run for arm in arms for run in arm.runs]
    keys = load_keys(runs, replicated)
    groups = grouped(runs, lambda run: repr([run.flat_config.get(key) for key in keys]))
    offered = {  # mean requests/s
        name: sum(run.summary["throughput"]["offered_per_s"] or 0.0 for run in members) / len(members)
        for name, members in groups.items()
    }
    telling = naming_keys([run.flat_config for run in runs], keys)
    rates = sorted(rate for rate in offered.values() if rate > 0)
    says_rates = "trace.rate" not in telling and rates[-1:] > [_SAME_RATE * rate for rate in rates[:1]]
    firsts = [members[0] for members in groups.values()]
    told = {key: dict(zip(groups, _load_values(firsts, key), strict=True)) for key in telling}
    result = {}
    for name in sorted(groups, key=lambda name: offered[name]):
        label = ", ".join(
            f"{'trace' if key in _TRACE else key.removeprefix('trace.')} = {texts[name]}" for key, texts in told.items()
        )
        if label and says_rates and offered[name] > 0:
            label += f" ({significant(offered[name])} requests/s)"
        if label in result:
            label += f" ({', '.join(str(groups[name][0].flat_config.get(key)) for key in telling)})"
        mine = {id(run) for run in groups[name]}
        parts = [replace(arm, runs=tuple(run for run in arm.runs if id(run) in mine)) for arm in arms]
        result[label] = [arm for arm in parts if arm.runs]
    return result


def joined(arms: Iterable[Arm]) -> list[Arm]:
    """The arms, each once: those of one name, as at several loads, with the runs of all."""
    by_name = grouped(arms, lambda arm: arm.name)
    runs = {name: {run.path: run for arm in same for run in arm.runs} for name, same in by_name.items()}
    return [replace(same[0], runs=tuple(runs[name].values())) for name, same in by_name.items()]


Pairing = tuple[tuple[Run, ...], tuple[Run, ...]]


def on_shared_traces(arms: Sequence[Arm]) -> list[Arm]:
    """The arms with their runs on the traces that all of them have, including repeats; as they are if there is none."""
    traces = set.intersection(*({run.fingerprint for run in arm.runs} for arm in arms)) - {None}
    shared = [replace(arm, runs=tuple(run for run in arm.runs if run.fingerprint in traces)) for arm in arms]
    return shared if traces else list(arms)


def decided_alike(run: Run) -> str:
    """A key that is equal for simulated runs with the same decisions; for real runs it is unique (the folder)."""
    is_known = run.is_simulated and run.manifest.get("digest")
    return str(run.manifest["digest"]) if is_known else str(run.path)


def repeats(arm: Arm, run: Run) -> tuple[Run, ...]:
    """The arm's runs that form one observation with `run`, of which the mean is taken: measured runs of one trace, in
    any order (only the machine makes them differ). A simulated run has no repeats."""
    if run.fingerprint is None or run.is_simulated:
        return (run,)
    return tuple(one for one in arm.runs if not one.is_simulated and one.fingerprint == run.fingerprint)


def num_repeats(groups: Iterable[Sequence[Run]]) -> int:
    """The number of runs that repeat the first of their group."""
    return sum(len(runs) - 1 for runs in groups if runs)


def was_busy(run: Run) -> bool:
    """Whether a note in the manifest states that the run waited for cores used by other processes."""
    return any(note.kind == BUSY for note in replay_notes(run.manifest))


def replicates(arm: Arm) -> list[Run]:
    """An arm's first run on each trace; it represents its `repeats`. Runs on one trace are not replicates: a seed does
    not change a recorded trace, and the variation on one trace (a random policy, a real machine) says nothing about
    others. Traces with the same decisions count once, too."""
    found: list[Run] = []
    traces: set[str | None] = set()
    digests: set[str] = set()
    for run in arm.runs:
        if (run.fingerprint is None or run.fingerprint not in traces) and decided_alike(run) not in digests:
            found.append(run)
        traces.add(run.fingerprint)
        digests.add(decided_alike(run))
    return found


def counted(arm: Arm) -> list[Run]:
    """The arm's runs that count: the repeats of every replicate."""
    return [one for run in replicates(arm) for one in repeats(arm, run)]


def paired_replicates(baseline: Arm, arm: Arm) -> list[Pairing]:
    """(baseline's run, arm's run), each with its `repeats`, for each trace that both have; of one seed if possible.
    Raises RunFolderError if they share no trace."""
    ours, theirs = (grouped(one.runs, lambda run: run.fingerprint) for one in (arm, baseline))
    found: dict[tuple[str, str], Pairing] = {}  # by the decisions of both: equal ones count once
    for trace in theirs:
        if trace is not None and trace in ours:
            both = [(base, run) for base in theirs[trace] for run in ours[trace]]
            base, run = min(both, key=lambda pair: pair[0].manifest.get("seed") != pair[1].manifest.get("seed"))
            found.setdefault((decided_alike(base), decided_alike(run)), (repeats(baseline, base), repeats(arm, run)))
    if not found:
        raise RunFolderError(f"the arms '{arm.name}' and '{baseline.name}' share no run of one trace")
    return [*found.values()]


def alike(arms: Sequence[Arm]) -> dict[str, str]:
    """Arm -> the first arm that took the same decisions at every step, with the same step times (often the arm itself):
    what sets them apart, be it in their cost models, had no effect."""
    firsts: list[tuple[Arm, set[str]]] = []
    found = {}
    for arm in arms:
        decisions = {decided_alike(run) for run in arm.runs}
        first = next((one for one, known in firsts if known & decisions and _took_same(one, arm)), arm)
        if first is arm:
            firsts.append((arm, decisions))
        found[arm.name] = first.name
    return found


def _took_same(one: Arm, other: Arm) -> bool:
    if len(comparable([one, other], one)) < 2:
        return False
    for ours, theirs in paired_replicates(one, other):
        if len({(decided_alike(run), repr(run.summary["e2e_s"])) for run in (*ours, *theirs)}) > 1:
            return False
    return True


def num_replicates(arms: Sequence[Arm]) -> int:
    """The smallest number of replicates that an arm shares with the first (the baseline); for one arm, its number."""
    if len(arms) < 2:
        return len(replicates(arms[0]))
    return min(len(paired_replicates(arms[0], arm)) for arm in arms[1:])


def on_one_replicate(arms: Sequence[Arm]) -> list[str]:
    """The names of the arms that share one replicate with the first, if others share more; else none."""
    shared = {arm.name: len(paired_replicates(arms[0], arm)) for arm in arms[1:]}
    single = [name for name, num in shared.items() if num == 1]
    return single if len(single) < len(shared) else []


def comparable(arms: Sequence[Arm], baseline: Arm) -> list[Arm]:
    """The arms that share a trace with `baseline`, which is one of them."""
    known = {run.fingerprint for run in baseline.runs} - {None}
    return [arm for arm in arms if arm.name == baseline.name or known & {run.fingerprint for run in arm.runs}]
