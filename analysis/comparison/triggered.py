"""What was compared and never came into play: arms that decided alike, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from analysis import format as fmt
from analysis.comparison.arms import (
    Arm,
    comparable,
    decided_alike,
    is_policy,
    paired_replicates,
    replicates,
)
from analysis.comparison.effects import is_full_design
from analysis.load import Run, swept_keys

# (parts of a key, or a value of it, whether a run surely never used it, what never happened)
_UNUSED: tuple[tuple[tuple[str, ...], Callable[[Run], bool], str], ...] = (
    (("preemption", "victim"), lambda run: run.summary["preemptions"]["total"] == 0, "nothing was preempted"),
    (("watermark",), lambda run: _never_blocked(run), "no step lacked KV blocks"),
    (("admission",), lambda run: _never_blocked(run), "no request was held back"),
    (("prefix_caching", "eviction"), lambda run: run.summary["prefix_hit_rate"] == 0, "no prefix was hit"),
    (("queue_order",), lambda run: _hardly_waited(run), "requests hardly ever waited together"),
    (("vtc",), lambda run: _is_one(run, "tenant"), "the trace has one tenant"),
    (("priority", "lowest_priority"), lambda run: _is_one(run, "priority"), "all have one priority"),
)
_MAX_GROUPS = 4  # that are named


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
    also = " Averages over the other factors hold this." if is_full_design(arms) else ""
    said = [
        f"{fmt.listing([arm.name for arm in others])} took the same decisions as {first.name} at every step; what sets "
        f"them apart was never triggered{_why_not([first, *others])}.{also}"
        for first, *others in groups
        if others
    ]
    more = [f"So did {len(said) - _MAX_GROUPS} more groups of arms."] if len(said) > _MAX_GROUPS else []
    return [*said[:_MAX_GROUPS], *more]


def _took_same(one: Arm, other: Arm) -> bool:
    if len(comparable([one, other], one)) < 2 or not all(
        _is_same(*ours, *theirs) for ours, theirs in paired_replicates(one, other)
    ):
        return False
    keys = [key for key in swept_keys([*one.runs, *other.runs]) if is_policy(key)]
    return all(key.split(".")[0] in ("scheduler", "cache") for key in keys)


def _why_not(arms: Sequence[Arm]) -> str:
    """What never happened, as far as that is known; ": …" or nothing."""
    runs = [run for arm in arms for run in replicates(arm).values()]
    levels = [(key, str(value)) for arm in arms for key, value in arm.levels.items() if key in swept_keys(runs)]
    why = [
        text
        for parts, unused, text in _UNUSED
        if any(part in key or part == value for part in parts for key, value in levels) and all(map(unused, runs))
    ]
    return f": {fmt.listing(why)}" if why else ""


def _is_same(*runs: Run) -> bool:
    return len({(decided_alike(run), run.summary["e2e_s"]["mean"]) for run in runs}) == 1
