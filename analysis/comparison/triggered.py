"""Differences between arms that had no effect: arms that took the same decisions, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from analysis import format as fmt
from analysis.comparison.arms import Arm, alike, grouped, level_groups, replicates
from analysis.comparison.effects import is_full_design
from analysis.load import Run
from analysis.naming import factor_name, level_names

_PREEMPTS = ("preemption", "victim")
_MAX_GROUPS = 4  # groups that are named


def _preemptions(run: Run) -> int:
    return int(run.summary["preemptions"]["total"])


def _is_one(run: Run, column: str) -> bool:
    return int(run.requests[column].nunique(dropna=False)) < 2


def _is_alike(run: Run, field: str) -> bool:
    """Whether the requests are known not to differ in a field, by what the manifest says of the trace."""
    differ_in = run.manifest["trace"].get("differ_in")
    return differ_in is not None and field not in differ_in


def _never_blocked(run: Run) -> bool:
    return len(run.steps) > 0 and not run.steps["blocked_by"].notna().any()


def _never_hit(run: Run) -> bool:
    """Whether no token was found in the prefix cache, by new requests or by preempted ones that came back."""
    at_first = run.summary["prefix_hit_rate"] != 0
    return not at_first and not (run.steps["num_cached_tokens"].any() if len(run.steps) else _preemptions(run))


def _hardly_waited(run: Run) -> bool:
    mean = run.summary["mean_waiting"]
    return mean is not None and mean < 0.01


# (parts of a key or of its value, whether a run certainly never used the setting, what never happened)
_UNUSED: tuple[tuple[tuple[str, ...], Callable[[Run], bool], str], ...] = (
    (_PREEMPTS, lambda run: _preemptions(run) == 0, "nothing was preempted"),
    (("watermark",), lambda run: _never_blocked(run) and not _preemptions(run), "no step lacked KV blocks"),
    (("admission",), _never_blocked, "no request was held back"),
    (("prefix_caching", "eviction"), _never_hit, "no prefix was hit"),
    (("queue_order",), _hardly_waited, "requests hardly ever waited together"),
    (("vtc",), lambda run: _is_one(run, "tenant"), "the trace has one tenant"),
    (("router",), lambda run: run.summary["replicas"] is None, "there is one replica"),
    (("priority", "lowest_priority"), lambda run: _is_one(run, "priority"), "all have one priority"),
    (("edf",), lambda run: _is_alike(run, "deadline"), "all have one deadline after arrival, or none"),
)


def never_triggered(arms: Sequence[Arm]) -> list[str]:
    """Sentences on arms that took the same decisions at every step, and on whether the settings in which they differ
    were ever used."""
    same = alike(arms)
    groups = grouped(arms, lambda arm: same[arm.name]).values()
    said = [f"{same_arms(group)}.{_diluted(group, arms, same)}" for group in groups if len(group) > 1]
    if (left := len(said) - _MAX_GROUPS) > 0:
        said[_MAX_GROUPS - 1] += f" So did {fmt.count(left, 'more group')} of arms."
    return said[:_MAX_GROUPS]


def _diluted(group: Sequence[Arm], arms: Sequence[Arm], same: Mapping[str, str]) -> str:
    """A sentence on the factors whose average effect includes that of none between these arms; "" if no other arms of a
    full design differ by them. same: as of `alike`."""

    def is_diluted(factor: Sequence[str]) -> bool:
        here, every = (
            grouped(of, lambda arm: repr([level for key, level in arm.levels.items() if key not in factor])).values()
            for of in (group, arms)
        )  # arms that differ in the factor alone
        return any(len(each) > 1 for each in here) and any(len({same[arm.name] for arm in each}) > 1 for each in every)

    factors = [factor_name(factor[0]) for factor in level_groups(arms) if is_diluted(factor)]
    if not factors or not is_full_design(arms):
        return ""
    effects = f"average effect{'s' * (len(factors) > 1)} of {fmt.listing(factors)}"
    return f" This dilutes the {effects} over the other factors: between these arms there is none."


def same_arms(arms: Sequence[Arm]) -> str:
    """The sentence of `same_decisions` for arms that are `alike`."""
    first, *others = arms
    keys = [key for factor in level_groups(arms) for key in factor]
    return same_decisions([arm.name for arm in others], first.name, arms, keys)


def same_decisions(names: Sequence[str], first: str, arms: Sequence[Arm], keys: Sequence[str]) -> str:
    """The sentence "b took the same decisions as a at every step". It gives the reasons if every key in which the arms
    differ is known never to have been used."""
    runs = [run for arm in arms for run in replicates(arm)]
    why = {key: _never_used(key, {str(arm.levels.get(key)) for arm in arms}, runs) for key in keys}
    reasons = fmt.listing(list(dict.fromkeys(text for texts in why.values() for text in texts)))
    told = f"; what sets them apart was never triggered: {reasons}" if why and all(why.values()) else ""
    timed = ", in the same time" if any(key.startswith("cost.") for key in keys) else ""
    return f"{fmt.names(names)} took the same decisions as {fmt.names([first])} at every step{timed}{told}"


def _never_used(key: str, values: set[str], runs: Sequence[Run]) -> list[str]:
    """The known reasons for which a setting made no difference: of the setting, or of all its values that have one."""
    of_key = [text for parts, unused, text in _UNUSED if any(part in key for part in parts) and all(map(unused, runs))]
    of_values = {text: all(map(unused, runs)) for parts, unused, text in _UNUSED if values & set(parts)}
    return [*of_key, *(of_values if all(of_values.values()) else ())]


def idle_settings(arms: Sequence[Arm]) -> list[str]:
    """A sentence on settings that differ together with others, as a preset's own do, and that no run used: what they
    were chosen for is no reason of a difference. Arms that are `alike` are left to `never_triggered`."""
    same = alike(arms)
    apart = [arm for arm in arms if same[arm.name] == arm.name]
    runs = [run for arm in apart for run in replicates(arm)]
    keys = [key for factor in level_groups(apart) if len(factor) > 1 for key in factor if key.split(".")[-1] != "name"]
    told = []
    for parts, unused, text in _UNUSED:
        of_key = {key: [factor_name(key)] for key in keys if any(part in key for part in parts)}
        of_level = {
            key: [level_names({key: arm.levels[key]}) for arm in apart if arm.levels.get(key) in parts] for key in keys
        }
        named = {key: names for key, names in (of_level | of_key).items() if names}
        if named and all(map(unused, runs)):
            words = dict.fromkeys(name for names in named.values() for name in names)
            told.append(f"{fmt.listing(list(words))} ({text})")
            keys = [key for key in keys if key not in named]
    return [f"Part of what sets the arms apart was never triggered: {'; '.join(told)}."] if told else []


def is_of_preemption(keys: Sequence[str]) -> bool:
    """Whether one of these settings decides about preemptions."""
    return any(part in key for key in keys for part in _PREEMPTS)


def num_preempted(arms: Sequence[Arm]) -> str:
    """The preemptions of all arms, as "3 preemptions in 220 requests"."""
    runs = {run.path: run for arm in arms for run in replicates(arm)}.values()
    num, sent = sum(map(_preemptions, runs)), sum(run.summary["num_requests"] for run in runs)
    return f"{fmt.count(num, 'preemption')} in {fmt.number(sent)} requests"
