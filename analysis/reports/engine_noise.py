"""What is known of how far the real engine differs from itself, which a change between measured arms may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from analysis import format as fmt
from analysis.comparison.arms import Arm, is_measured, repeats, replicates
from analysis.comparison.compare import LATENCY, RATES, engine_noise

UNMEASURED = (
    "How far the real engine differs from itself was not measured, so a difference may be its own noise: run an arm "
    "again on the same trace, and give both folders."
)


def engine_noise_said(loads: Mapping[str, Sequence[Arm]]) -> list[str]:
    """A sentence where measured arms are compared: how far repeats are apart, at most over loads, or that none is."""
    measured = [arms for arms in loads.values() if len(arms) > 1 and any(is_measured(arm.runs[0]) for arm in arms)]
    if not measured:
        return []
    groups = [repeats(arm, run) for arms in measured for arm in arms for run in replicates(arm).values()]
    num = sum(len(runs) for runs in groups if len(runs) > 1)
    if not num:
        return [UNMEASURED]
    noise = {metric.label: max(engine_noise(arms, metric) or 0.0 for arms in measured) for metric in (*LATENCY, *RATES)}
    told = [f"{label} {fmt.significant(100 * most, 2)} %" for label, most in noise.items()]
    return [
        f"{num} runs are repeats on the real engine: their mean counts, as one run. They differ by up to "
        f"{fmt.listing(told)} (largest over smallest, minus 1); of a change within that no claim is made."
    ]
