"""What was compared and never came into play: arms that decided alike, and why."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

from analysis import format as fmt
from analysis.arms import (
    Arm,
    comparable,
    decided_alike,
    grouped,
    is_policy,
    level_groups,
    paired_replicates,
    replicates,
)
from analysis.load import Run, swept_keys
from analysis.naming import factor_name

# (parts of a key, whether a run surely never used it, what never happened)
_UNUSED: tuple[tuple[tuple[str, ...], Callable[[Run], bool], str], ...] = (
    (("preemption", "victim"), lambda run: run.summary["preemptions"]["total"] == 0, "nothing was preempted"),
    (("watermark",), lambda run: _never_blocked(run), "no step lacked KV blocks"),
    (("admission",), lambda run: _never_blocked(run), "no request was held back"),
    (("prefix_caching", "eviction"), lambda run: run.summary["prefix_hit_rate"] == 0, "no prefix was hit"),
    (("queue_order",), lambda run: _hardly_waited(run), "requests hardly ever waited together"),
    (("vtc",), lambda run: _is_one(run, "tenant"), "the trace has one tenant"),
    (("queue_order priority", "lowest_priority"), lambda run: _is_one(run, "priority"), "all have one priority"),
)


def _is_one(run: Run, column: str) -> bool:
    return int(run.requests[column].nunique(dropna=False)) < 2


def _never_blocked(run: Run) -> bool:
    return len(run.steps) > 0 and not run.steps["blocked_by"].notna().any()


def _hardly_waited(run: Run) -> bool:
    mean = run.summary["mean_waiting"]
    return mean is not None and mean < 0.01


def never_triggered(arms: Sequence[Arm]) -> list[str]:
    """Arms that decided as another at every step, at the same prices: what they differ in was never exercised."""
    groups: list[list[Arm]] = []
    for arm in arms:
        same = next((group for group in groups if _took_same(group[0], arm)), None)
        if same is None:
            groups.append([arm])
        else:
            same.append(arm)
    return [
        f"{fmt.listing([arm.name for arm in others])} took the same decisions as {first.name} at every step; what sets "
        f"them apart was never triggered{_why_not([first, *others])}."
        for first, *others in groups
        if others
    ]


def _took_same(one: Arm, other: Arm) -> bool:
    keys = [key for key in swept_keys([*one.runs, *other.runs]) if is_policy(key)]
    is_policys = all(key.split(".")[0] in ("scheduler", "cache") for key in keys)
    if not is_policys or len(comparable([one, other], one)) < 2:
        return False
    return all(_is_same(*runs) for runs in paired_replicates(one, other))


def _why_not(arms: Sequence[Arm]) -> str:
    """What never happened, as far as that is known; ": …" or nothing."""
    runs = [run for arm in arms for run in replicates(arm).values()]
    said = [f"{key} {value}" for arm in arms for key, value in arm.levels.items() if key in swept_keys(runs)]
    why = [
        text
        for parts, unused, text in _UNUSED
        if any(part in words for part in parts for words in said) and all(unused(run) for run in runs)
    ]
    return f": {fmt.listing(why)}" if why else ""


def hardly_triggered(arms: Sequence[Arm]) -> list[str]:
    """Of a factorial design: levels of a factor under which arms decided as at the baseline's level, the other factors
    being equal. Averages over the other factors hold these."""
    factors, said = level_groups(arms), []
    for factor in factors if len(factors) > 1 else ():
        name, base = factor_name(factor[0]), arms[0].levels.get(factor[0])
        by_level: dict[str, list[bool]] = {}
        for cell in grouped(arms, partial(_but, factor)).values():
            ones = [arm for arm in cell if arm.levels.get(factor[0]) == base]
            for one, other in itertools.product(ones, [arm for arm in cell if arm not in ones]):
                level = fmt.plain(other.levels.get(factor[0]))
                same = all(_is_same(*runs) for runs in paired_replicates(one, other))
                by_level.setdefault(level, []).append(same)
        said += [
            f"{name} {level} took the same decisions as {name} {fmt.plain(base)} in {sum(same)} of {len(same)} pairs "
            "of arms that differ in nothing else: averages over the other factors hold these."
            for level, same in by_level.items()
            if any(same)
        ]
    return said


def _but(factor: Sequence[str], arm: Arm) -> str:
    """The arm's levels of all other factors."""
    return repr({key: level for key, level in arm.levels.items() if key not in factor})


def _is_same(one: Run, other: Run) -> bool:
    same = [run.summary["e2e_s"]["mean"] for run in (one, other)]
    return decided_alike(one) == decided_alike(other) and same[0] == same[1]
