"""What a reader must know before the findings: each sentence names what would make them mislead."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from analysis import format as fmt
from analysis.arms import Arm, decided_alike, grouped, is_policy, paired_replicates, replicates, unsaid_keys
from analysis.compare import ignored
from analysis.files import read_json, read_yaml
from analysis.load import Run, flatten, relative, swept_keys
from analysis.naming import NAMING_KEYS, factor_name, level_names, naming_keys
from analysis.statistics import mser5
from testbed.errors import RunFolderError

_RESOLVED = {"num_gpu_blocks": "GPU KV blocks", "num_cpu_blocks": "CPU KV blocks"}  # of a manifest: follow from memory
_MAX_KEYS = 6  # that are spelt out


def cautions(loads: Mapping[str, Sequence[Arm]], margin: float, replicated: Sequence[str] = ()) -> list[str]:
    """All of them. loads: the arms that are compared at each load, the baseline first. replicated: as of `by_load`."""
    arms = list({arm.name: arm for group in loads.values() for arm in group}.values())
    said = [*_extrapolated(arms), *_copies(loads), *_unnamed(arms)]
    if unsaid := unsaid_keys([run for group in loads.values() for arm in group for run in arm.runs], replicated):
        what = fmt.listing([key.removeprefix("trace.") for key in unsaid[:_MAX_KEYS]])
        said.append(f"The loads are different traces, each to be read by itself: they differ in {what}, too.")
    for load, group in loads.items():
        at_load = f"At {load}: " if load else ""
        found = [*_outrun(group), *_warm_up(group, margin), *_never_triggered(group)]
        said += [at_load + (text[0].lower() + text[1:] if at_load else text) for text in found]
    return said


def lost(arms: Sequence[Arm], incomplete: Sequence[tuple[Path, str]], start: Path) -> list[str]:
    """Which arms lack a run, or requests of one: a sentence for each arm. start: where folders are told from."""
    said = []
    for name, entries in grouped(incomplete, lambda entry: _arm_of(entry[0], arms)).items():
        runs = "1 run" if len(entries) == 1 else f"{len(entries)} runs"
        first, reason = entries[0]
        of = f" of {name}" if name else ""
        said.append(f"{runs}{of} failed or did not end, and {'is' if len(entries) == 1 else 'are'} left out")
        said[-1] += f" ({relative(first, start)}: {reason})."
    return said + [
        f"{arm.name} ignored {fmt.number(num)} requests that can never fit: they have no latency, so its latencies are "
        "of the others, and are not compared with those of arms that served them."
        for arm in arms
        if (num := num_ignored(arm))
    ]


def num_ignored(arm: Arm) -> int:
    return sum(map(ignored, arm.runs))


def _arm_of(folder: Path, arms: Sequence[Arm]) -> str:
    """What a run that did not end would be called among the arms; where it left no configuration, what its sweep gave
    it, and where it left nothing, ""."""
    try:
        config = flatten(read_yaml(folder / "config.yaml"))
    except RunFolderError:
        try:
            swept = read_json(folder / "manifest.json").get("swept") or {}
        except RunFolderError:
            return ""
        return level_names({key: value for key, value in swept.items() if is_policy(key)})
    configs = [*(run.flat_config for arm in arms for run in arm.runs), config]
    policies = [key for key in config if is_policy(key) and len({repr(one.get(key)) for one in configs}) > 1]
    kept = [key for key in policies if not key.startswith("hydra.")]
    return level_names({key: config[key] for key in naming_keys(configs, kept)}) or fmt.listing([a.name for a in arms])


def _extrapolated(arms: Sequence[Arm]) -> list[str]:
    """What cost models said of their prices: shares outside of a profile, or filled in."""
    found: dict[str, list[str]] = {}
    for arm in arms:
        for run in arm.runs:
            for note in run.manifest.get("cost_notes") or []:
                found.setdefault(re.sub(r"[\d.,]+ ?%", "… %", note), []).append(f"{arm.name}: {note}")
    return [
        f"Prices, {texts[0]}" + (f" ({len(texts) - 1} more runs say the like, with other shares)" if texts[1:] else "")
        for texts in found.values()
    ]


def _copies(loads: Mapping[str, Sequence[Arm]]) -> list[str]:
    """Runs that are no replicates: of a trace that their arm had already, or on which it decided the same."""
    arms = [arm for group in loads.values() for arm in group]
    num = sum(len(arm.runs) for arm in arms)
    left = num - sum(len(replicates(arm)) for arm in arms)
    copies = num - sum(len({decided_alike(run) for run in arm.runs}) for arm in arms)
    said = []
    if copies:
        said.append(
            f"{copies} of {num} runs repeat another one, decision for decision, and count once: a seed makes no "
            "replicate of a recorded trace (docs/traces.md says what does)."
        )
    if left > copies:
        said.append(
            f"{left - copies} of {num} runs are on a trace that their arm had already. How a random policy or a real "
            "machine varies on one trace says nothing of other traces: the first run on each counts."
        )
    return said


def _unnamed(arms: Sequence[Arm]) -> list[str]:
    """Settings in which arms differ beside those that name them: what a preset brings along is its own."""
    runs = [run for arm in arms for run in arm.runs]
    named = {key for arm in arms for key in arm.naming}
    if not named:
        return []  # one arm, or arms that somebody named
    bundles = {key.rpartition(".")[0] for key in named if key.split(".")[-1] in NAMING_KEYS}
    given = {key for run in runs for key in run.manifest.get("given") or ()}  # of older runs it is not known
    found = [
        key
        for key in swept_keys(runs)
        if is_policy(key) and key not in named and (key in given or not any(key.startswith(f"{b}.") for b in bundles))
    ]
    said = [f"{factor_name(key)} ({_values(arms, key)})" for key in found[:_MAX_KEYS]]
    said += [f"{len(found) - _MAX_KEYS} more"] if len(found) > _MAX_KEYS else []
    for name, words in _RESOLVED.items():
        per_arm = {arm.name: _span([run.manifest.get(name) for run in arm.runs]) for arm in arms}
        if len(set(per_arm.values())) > 1 and not any(key.endswith(name) for key in (*named, *found)):
            said.append(f"{words} ({_listed(per_arm)})")
    return [f"The arms differ in more than their names say: {fmt.listing(said)}."] if said else []


def _values(arms: Sequence[Arm], key: str) -> str:
    return _listed({arm.name: _span([run.flat_config.get(key) for run in arm.runs]) for arm in arms})


def _listed(per_arm: Mapping[str, str]) -> str:
    shown = [f"{value} in {arm}" for arm, value in list(per_arm.items())[:_MAX_KEYS]]
    return "; ".join(shown) + ("; …" if len(per_arm) > _MAX_KEYS else "")


def _span(values: Sequence[object]) -> str:
    distinct = list(dict.fromkeys(fmt.plain(value) for value in values))
    return distinct[0] if len(distinct) == 1 else f"{distinct[0]} and others"


def _outrun(arms: Sequence[Arm]) -> list[str]:
    """Loads beyond the capacity of some arms."""
    beyond = {arm.name: [run for run in replicates(arm).values() if is_outrun(run)] for arm in arms}
    named = [name for name, runs in beyond.items() if runs]
    if not named:
        return []
    rates = [run.summary["throughput"] for runs in beyond.values() for run in runs]
    offered = float(np.mean([rate["offered_per_s"] or 0.0 for rate in rates]))
    reached = float(np.mean([rate["requests_per_s"] or 0.0 for rate in rates]))
    who = "Every arm" if len(named) == len(arms) else fmt.listing(named)
    return [
        f"{who} {'is' if len(named) == 1 or who == 'Every arm' else 'are'} beyond capacity: {offered:.3g} requests/s "
        f"came, {reached:.3g} were served, and more and more were in the system until the last one came. Such "
        "latencies depend on how long the trace is; compare throughputs there, or lower the rate."
    ]


def _warm_up(arms: Sequence[Arm], margin: float) -> list[str]:
    """Where the start, as MSER-5 finds it in TTFT, moves the mean by more than the margin: in most replicates."""
    changes: dict[str, float] = {}
    for arm in arms:
        runs = [run for run in replicates(arm).values() if not is_outrun(run)]  # others come to no steady state
        changes[arm.name] = float(np.median([_change_by_warm_up(run) for run in runs])) if runs else 0.0
    worst = max(changes, key=lambda name: abs(changes[name]))
    if abs(changes[worst]) <= margin:
        return []
    return [
        f"The start, when the system is still empty, is part of all numbers: without it (MSER-5's cut) mean TTFT "
        f"of {worst} would be {fmt.change(100 * changes[worst])} off what is shown. A longer trace helps, or "
        "report.warmup_s."
    ]


def is_outrun(run: Run) -> bool:
    return bool((run.summary.get("steadiness") or {}).get("is_outrun"))


def _change_by_warm_up(run: Run) -> float:
    ttft = run.requests.sort_values("arrival_ns", kind="stable")["ttft_s"].dropna().to_numpy(dtype=np.float64)
    cut = mser5(ttft)
    return float(ttft[cut:].mean() / ttft.mean() - 1.0) if cut and ttft.mean() > 0 else 0.0


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


def _never_triggered(arms: Sequence[Arm]) -> list[str]:
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


def _is_same(one: Run, other: Run) -> bool:
    same = [run.summary["e2e_s"]["mean"] for run in (one, other)]
    return decided_alike(one) == decided_alike(other) and same[0] == same[1]


def _is_about_tenants(arm: Arm) -> bool:
    return any("vtc" in str(value) for value in arm.levels.values())


def _num_tenants(run: Run) -> int:
    return int(run.requests["tenant"].nunique(dropna=False))
