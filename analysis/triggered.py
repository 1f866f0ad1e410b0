"""What was compared and never came into play: arms that decided alike, and why."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

from analysis import format as fmt
from analysis.arms import Arm, decided_alike, grouped, is_policy, level_groups, paired_replicates
from analysis.load import Run, swept_keys
from analysis.naming import factor_name

# (parts of a key, whether a run surely never used it, what never happened)
_UNUSED: tuple[tuple[tuple[str, ...], Callable[[Run], bool], str], ...] = (
    (("preemption", "victim"), lambda run: run.summary["preemptions"]["total"] == 0, "nothing was preempted"),
    (("watermark",), lambda run: _never_blocked(run), "no step lacked KV blocks"),
    (("admission",), lambda run: _never_blocked(run), "no request was held back"),
    (("prefix_caching", "eviction"), lambda run: run.summary["prefix_hit_rate"] == 0, "no prefix was hit"),
    (("queue_order",), lambda run: _hardly_waited(run), "requests hardly ever waited together"),
)


def _never_blocked(run: Run) -> bool:
    return len(run.steps) > 0 and not run.steps["blocked_by"].notna().any()


def _hardly_waited(run: Run) -> bool:
    mean = run.summary["mean_waiting"]
    return mean is not None and mean < 0.01


def never_triggered(arms: Sequence[Arm]) -> list[str]:
    """Arms that decided as the baseline at every step, at the same prices: what they differ in was never exercised."""
    baseline, said = arms[0], []
    for arm in arms[1:]:
        pairs = paired_replicates(baseline, arm)
        keys = [key for key in swept_keys([*baseline.runs, *arm.runs]) if is_policy(key)]
        is_policys = all(key.split(".")[0] in ("scheduler", "cache") for key in keys)
        if is_policys and all(_is_same(one, other) for one, other in pairs):
            runs = [run for pair in pairs for run in pair]
            why = [
                text
                for parts, unused, text in _UNUSED
                if any(part in key for part in parts for key in keys) and all(unused(run) for run in runs)
            ]
            if _is_about_tenants(arm) and all(_num_tenants(run) < 2 for run in runs):
                why.append("the trace has one tenant")
            reason = f": {fmt.listing(why)}" if why else ""
            said.append(
                f"{arm.name} took the same decisions as {baseline.name} at every step; what sets them apart was never "
                f"triggered{reason}."
            )
    return said


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


def _is_about_tenants(arm: Arm) -> bool:
    return any("vtc" in str(value) for value in arm.levels.values())


def _num_tenants(run: Run) -> int:
    return int(run.requests["tenant"].nunique(dropna=False))
