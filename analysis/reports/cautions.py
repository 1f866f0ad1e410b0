"""Warnings that a reader needs before the findings: each sentence names a reason why these could mislead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from analysis import format as fmt
from analysis.comparison.arms import Arm, counted, decided_alike, grouped, is_policy, replicates, unsaid_keys
from analysis.comparison.compare import ignored
from analysis.comparison.effects import is_full_design, meanings
from analysis.comparison.triggered import never_triggered
from analysis.comparison.wording import told_at
from analysis.load import Run, relative, swept_keys
from analysis.measures.notes import Note, price_notes, replay_notes, told
from analysis.measures.replicas import routing_notes
from analysis.measures.statistics import mser5
from analysis.naming import NAMING_KEYS, factor_name, level_names, naming_keys
from analysis.reading.files import read_manifest, read_yaml
from analysis.reports.fidelity_findings import engine_noise_said
from analysis.reports.keeping_up import began_within_s, is_closed_loop, judged, state_of, who
from analysis.reports.tables import replicate_name
from testbed.errors import RunFolderError

_RESOLVED = {"num_gpu_blocks": "GPU KV blocks", "num_cpu_blocks": "CPU KV blocks"}  # in manifests; depend on memory
_MAX_KEYS = 6  # items that are listed


def cautions(loads: Mapping[str, Sequence[Arm]], margin: float, replicated: Sequence[str] = ()) -> list[str]:
    """All warnings. loads: the arms compared at each load, the baseline first. replicated: as for `by_load`."""
    arms = list({arm.name: arm for group in loads.values() for arm in group}.values())
    said = [*_doubted(arms), *_copies(loads), *engine_noise_said(loads), *_unnamed(arms), *_ambiguous(arms)]
    said += [*_left_out_start(arms), *_few_requests(arms)]
    if unsaid := unsaid_keys([run for group in loads.values() for arm in group for run in arm.runs], replicated):
        what = fmt.listing([key.removeprefix("trace.") for key in unsaid[:_MAX_KEYS]])
        said.append(f"The loads are different traces, each to be read by itself: they differ in {what}, too.")
    for load, group in loads.items():
        found = [*_outrun(group), *_draining(group), *_uneven(group), *_warm_up(group, margin), *never_triggered(group)]
        said += [told_at(load, text) for text in found]
    return said


def lost(arms: Sequence[Arm], incomplete: Sequence[tuple[Path, str]], start: Path) -> Iterator[str]:
    """Sentences on the arms that lack a run, or requests of a run. start: the folder that paths are relative to."""
    for name, entries in grouped(incomplete, lambda entry: _arm_of(entry[0], arms)).items():
        first, reason = entries[0]
        runs = fmt.count(len(entries), "run") + (f" of {name} failed" if name else " failed")
        are = "is" if len(entries) == 1 else "are"
        yield f"{runs} or did not end, and {are} left out ({relative(first, start)}: {reason})."
    yield from _ignoring(arms)
    yield from _cut(arms)
    for arm in arms:
        if num_aborted := sum(run.summary["finish_reasons"]["abort"] for run in arm.runs):
            yield (
                f"{fmt.share(num_aborted / _num_sent(arm))} of the requests of {arm.name} were aborted: they have no "
                "E2E, and their TTFT and TPOT are of what came before."
            )


def _ignoring(arms: Sequence[Arm]) -> Iterator[str]:
    """Sentences on ignored requests, which have no latency: one for all arms with the same counts."""
    counts = grouped(arms, lambda arm: (num_ignored(arm), _num_sent(arm)))
    apart = ", and are not compared with those of arms that ignored fewer or more" if len(counts) > 1 else ""
    for (num, sent), members in counts.items():
        if num:
            names, each = _named(members)
            yield (
                f"{names} ignored {fmt.number(num)} of {fmt.number(sent)} requests{each} (they can never fit, or "
                "nothing admits them): these have no latency, so "
                f"{'latencies are of the others' if num < sent else 'there is none'}{apart}."
            )


def _cut(arms: Sequence[Arm]) -> Iterator[str]:
    """Sentences on outputs that were cut at the model's maximum length: one for all arms with the same counts."""

    def cut(arm: Arm) -> tuple[int, int, int]:
        runs = [run.manifest for run in arm.runs]  # older manifests lack these
        num, tokens = (sum(run.get(f"num_cut_output{what}") or 0 for run in runs) for what in ("s", "_tokens"))
        return num, _num_sent(arm), tokens

    for (num, sent, tokens), members in grouped(arms, cut).items():
        if num:
            names, each = _named(members)
            yield (
                f"{fmt.number(num)} of {fmt.number(sent)} outputs of {names}{each} "
                f"were cut at scheduler.max_model_len, by {fmt.number(tokens)} tokens in all: less was served than the "
                "trace asks for."
            )


def _named(arms: Sequence[Arm]) -> tuple[str, str]:
    """The arms' names, and what follows a number that each of them has."""
    return fmt.listing([arm.name for arm in arms]), " each" if len(arms) > 1 else ""


def _num_sent(arm: Arm) -> int:
    return sum(run.summary["num_requests"] for run in arm.runs)


def num_ignored(arm: Arm) -> int:
    return sum(map(ignored, arm.runs))


def _arm_of(folder: Path, arms: Sequence[Arm]) -> str:
    """The name that an unfinished run would have among the arms. Without a configuration file it is made of the values
    that its sweep set, or "" if there are none."""
    try:
        config = Run(folder, read_yaml(folder / "config.yaml"), {}).flat_config
    except RunFolderError:
        swept = read_manifest(folder).get("swept") or {}
        return level_names({key: value for key, value in swept.items() if is_policy(key)})
    configs = [*(run.flat_config for arm in arms for run in arm.runs), config]
    policies = [key for key in config if is_policy(key) and len({repr(one.get(key)) for one in configs}) > 1]
    kept = [key for key in policies if not key.startswith("hydra.")]
    return level_names({key: config[key] for key in naming_keys(configs, kept)}) or fmt.listing([a.name for a in arms])


def _doubted(arms: Sequence[Arm]) -> Iterator[str]:
    """The notes that runs made on their times (step times outside of a profile or filled in, a machine that did not
    keep up) and on their routing."""
    runs = [(arm.name, run) for arm in arms for run in arm.runs]
    found = {
        "Prices": [(name, note) for name, run in runs for note in price_notes(run.manifest)],
        "Measured": [(name, note) for name, run in runs for note in replay_notes(run.manifest)],
        "Routed": [(name, Note.of_text(text)) for name, run in runs for text in routing_notes(run.summary)],
    }
    for what, notes in found.items():
        for note, name, num, rank in told(notes):
            yield f"{what}, {name}: {note}" + (f" (the {rank or 'first'} of {num} runs that say so)" if num > 1 else "")


def _copies(loads: Mapping[str, Sequence[Arm]]) -> Iterator[str]:
    """Sentences on runs that are no replicates: of a trace that their arm had already, or with equal decisions."""
    arms = [arm for group in loads.values() for arm in group]
    num = sum(len(arm.runs) for arm in arms)
    left = num - sum(len(counted(arm)) for arm in arms)
    copies = num - sum(len({decided_alike(run) for run in arm.runs}) for arm in arms)
    others = sum(len({(decided_alike(run), run.fingerprint) for run in arm.runs}) for arm in arms) - (num - copies)
    if copies:
        why = (
            "a seed makes no replicate of a trace that is recorded, or whose trace.seed is given (docs/traces.md says "
            "what does)"
            if copies > others
            else "what differs in their traces changed no decision"
        )
        yield f"{copies} of {num} runs repeat another one, decision for decision, and count once: {why}."
    if left > copies:
        yield (
            f"{left - copies} of {num} runs are on a trace that their arm had already. How a random policy varies on "
            "one trace says nothing of other traces: the first run on each counts."
        )


def _unnamed(arms: Sequence[Arm]) -> Iterator[str]:
    """A sentence on the settings in which arms differ in addition to those in their names. Settings that belong to a
    preset in the name do not count."""
    runs = [run for arm in arms for run in arm.runs]
    named = {key for arm in arms for key in arm.naming}
    if not named:
        return  # one arm, or arms with given names
    bundles = {key.rpartition(".")[0] for key in named if key.split(".")[-1] in NAMING_KEYS}
    given = {key for run in runs for key in run.manifest.get("given") or ()}  # unknown for older runs
    found = [
        key
        for key in swept_keys(runs)
        if is_policy(key) and key not in named and (key in given or not any(key.startswith(f"{b}.") for b in bundles))
    ]
    said = []
    for key in found[:_MAX_KEYS]:
        per_arm = {arm.name: _span([run.flat_config.get(key) for run in arm.runs]) for arm in arms}
        said.append(f"{factor_name(key)} ({_listed(per_arm, arms)})")
    said += [f"{len(found) - _MAX_KEYS} more"] if len(found) > _MAX_KEYS else []
    is_simulated = any(run.manifest.get("backend") == "sim" for run in runs)
    for name, words in {**_RESOLVED, **({} if is_simulated else {"device": "device"})}.items():
        per_arm = {arm.name: _span([run.manifest.get(name) for run in arm.runs]) for arm in arms}
        if len(set(per_arm.values())) > 1 and not any(key.endswith(name) for key in (*named, *found)):
            said.append(f"{words} ({_listed(per_arm, arms)})")
    if said:
        yield f"The arms differ in more than their names say: {fmt.listing(said)}."


def _ambiguous(arms: Sequence[Arm]) -> Iterator[str]:
    """A sentence if `auto` stands for different settings in different arms."""
    told = meanings(arms)
    if len(set(told.values())) < 2:
        return
    effects = (
        ": no average effect of the victim is given, and that of the queue order includes this change"
        if is_full_design(arms)
        else ""
    )
    yield f"victim auto stands for {_listed(told, [arm for arm in arms if arm.name in told])}{effects}."


def changed_sources(runs: Sequence[Run]) -> list[str]:
    """A sentence if compared runs used files, classes or code of the same name with different content."""
    made = [run.manifest.get("identity") or {} for run in runs]  # older runs lack it
    by_name: dict[str, set[str]] = {}
    for part in ("classes", "files"):
        for name, content in ((name, content) for one in made for name, content in (one.get(part) or {}).items()):
            by_name.setdefault(name, set()).add(content)
    changed = [name for name, contents in by_name.items() if len(contents) > 1]
    changed += ["the code of the testbed"] if len({one["code"] for one in made if "code" in one}) > 1 else []
    if not changed:
        return []
    return [
        f"Between the runs that are compared {fmt.listing(changed)} changed, and what looks like an arm's doing may be "
        "that: run them again from one state."
    ]


def _listed(per_arm: Mapping[str, str], arms: Sequence[Arm]) -> str:
    """The values as text, each with the arms that have it."""
    having = grouped(arms, lambda arm: per_arm[arm.name])
    return _shown([f"{value} in {_who_are(mine, arms)}" for value, mine in having.items()])


def _shown(parts: Sequence[str]) -> str:
    return "; ".join(parts[:_MAX_KEYS]) + ("; …" if len(parts) > _MAX_KEYS else "")


def _who_are(mine: Sequence[Arm], arms: Sequence[Arm]) -> str:
    """The arms as text: by a level that exactly these have, if there is one, else by name."""
    names = [arm.name for arm in mine]
    for key, level in mine[0].levels.items() if len(mine) > 1 else ():
        if [arm.name for arm in arms if arm.levels.get(key) == level] == names:
            return f"all with {level_names({key: level})}"
    return fmt.listing(names, _MAX_KEYS)


def _span(values: Sequence[object]) -> str:
    distinct = list(dict.fromkeys(fmt.plain(value) for value in values))
    return distinct[0] if len(distinct) == 1 else f"{distinct[0]} and others"


def _outrun(arms: Sequence[Arm]) -> Iterator[str]:
    """A sentence on the arms that are beyond their capacity."""
    known = judged(arms)
    beyond = [one for one in known if one.state == "beyond"]
    if beyond:
        names = who(known, "beyond").replace("every arm", "Every arm")
        shown = _how_outrun([run for one in beyond for run in one.runs], sum(one.num_runs for one in beyond))
        yield (
            f"{names} {'is' if len(beyond) == 1 or names == 'Every arm' else 'are'} beyond capacity: {shown} until the "
            "last one came. Such latencies depend on how long the trace is, and so does how many keep an SLO; compare "
            "throughputs there, or lower the rate."
        )


def _how_outrun(runs: Sequence[Run], num_of: int) -> str:
    """The evidence for an overload, averaged over these runs, which are some of `num_of`. Rates are left out for closed
    loops: later turns arrive only when earlier ones have been served."""
    where = "" if len(runs) == num_of else f"in {len(runs)} of {num_of} runs "
    if not any(map(is_closed_loop, runs)):
        offered, reached = _mean_rates(runs)
        return f"{where}{offered} came, {reached} were served, and more and more work waited or was in the system"
    before, _, after = np.mean([run.summary["steadiness"]["in_system"] for run in runs], axis=0).tolist()
    if after <= before:  # only sessions grew
        return f"{where}more and more were in the system"
    early, late = (fmt.significant(count, 2) for count in (before, after))
    return f"{where}{early} requests were in the system early in the trace, {late} late in it, and ever more"


def _mean_rates(runs: Sequence[Run]) -> list[str]:
    """The mean rates at which requests arrived and were served, as text."""
    rates = [run.summary["throughput"] for run in runs]
    means = [float(np.mean([rate[name] or 0.0 for rate in rates])) for name in ("offered_per_s", "requests_per_s")]
    return [("on average " if len(runs) > 1 else "") + fmt.number(means[0], "req/s"), fmt.number(means[1], "req/s")]


_DRAINED = 0.85  # served over offered rate; below it the time after the last arrival distorts the served rate


def _draining(arms: Sequence[Arm]) -> Iterator[str]:
    """Sentences on rates of traces that are short compared with the time that their last requests or sessions take."""
    drained = [(arm.name, run) for arm in arms for run in counted(arm) if _is_drained_long(run)]
    by_loop = grouped(drained, lambda one: is_closed_loop(one[1]))
    if closed := by_loop.get(True):
        begin_s, last_s = (
            fmt.seconds(float(np.mean([find(run) for _, run in closed]))) for find in (began_within_s, _lasted_s)
        )
        yield (
            f"Rates are over all of a run, and sessions began only in a part of it: {_in_which(closed, arms)}the last "
            f"one began after {begin_s} of {last_s}{' on average' * (len(closed) > 1)}, and from then on ever fewer "
            "had turns left. The offered rate is an outcome, too, as later turns wait for earlier ones. A difference "
            "in rates or goodput may be one in how long the last sessions took; more sessions help."
        )
    if slow := by_loop.get(False):
        offered, reached = _mean_rates([run for _, run in slow])
        yield (
            f"Rates are over all of a run, and traces are short: {_in_which(slow, arms)}{offered} came and {reached} "
            "were served, as no more came while the last ones were being served. A difference in rates or goodput may "
            "be one in how long these took; a longer trace helps."
        )


def _is_drained_long(run: Run) -> bool:
    rate = run.summary["throughput"]
    if state_of(run) not in ("kept up", "untold") or ignored(run):
        return False
    if is_closed_loop(run):
        return began_within_s(run) < _DRAINED * _lasted_s(run)
    return bool(rate["requests_per_s"] < _DRAINED * (rate["offered_per_s"] or 0.0))


def _lasted_s(run: Run) -> float:
    return float(run.summary["duration_s"]) + _warmup_s(run)


def _in_which(chosen: Sequence[tuple[str, Run]], arms: Sequence[Arm]) -> str:
    """The runs that a number is from: "in 5 of 25 runs (every arm; seed 3) ". Arms and replicates are named if not all
    of them are concerned; "" for all runs."""
    every = [(arm.name, run) for arm in arms for run in counted(arm)]
    if len(chosen) == len(every):
        return ""
    runs = [run for _, run in every]
    parts = []
    for name in (lambda one: str(one[0]), lambda one: replicate_name(one[1], runs)):
        names, among = dict.fromkeys(map(name, every)), set(map(name, chosen))
        these = [one for one in names if one in among]
        if len(these) < len(names):
            parts.append(fmt.listing(these, _MAX_KEYS))
    if len({name for name, _ in chosen}) == len(arms) > 1:
        parts.insert(0, "every arm")
    told = f" ({'; '.join(parts)})" if parts else ""
    return f"in {len(chosen)} of {len(every)} runs{told} "


def _uneven(arms: Sequence[Arm]) -> Iterator[str]:
    nums = {arm.name: len(replicates(arm)) for arm in arms}
    if len(set(nums.values())) > 1:
        told = _shown([f"{num} of {name}" for name, num in nums.items()])
        yield (
            f"There are not as many replicates of every arm ({told}). Means in tables are over all that an arm has, "
            f"changes over those that it shares with {arms[0].name}."
        )


def _left_out_start(arms: Sequence[Arm]) -> Iterator[str]:
    """A sentence on the requests that report.warmup_s leaves out."""
    runs = [run for arm in arms for run in arm.runs if run.summary.get("num_in_warmup")]
    if runs:
        left, kept = (sum(run.summary[name] for run in runs) for name in ("num_in_warmup", "num_requests"))
        yield (
            f"The requests that came in the first {_warmup_s(runs[0]):g} s of each run (report.warmup_s), "
            f"{fmt.number(left)} of {fmt.number(left + kept)}, count in no latency and no SLO attainment; throughput "
            "and goodput are of all that ended after these seconds."
        )


_MIN_FOR_P99 = 100  # requests; with fewer, less than one is expected beyond P99


def _few_requests(arms: Sequence[Arm]) -> Iterator[str]:
    """A sentence if a run has so few finished requests that its P99 is close to the largest value."""
    least = min((run.summary["num_finished"] for arm in arms for run in arm.runs), default=_MIN_FOR_P99)
    if not least:
        yield "A run has no request that ended: it has no E2E latency."
    elif least < _MIN_FOR_P99:
        yield (
            f"A run has {fmt.count(least, 'request')} that ended: its P99s are all but its largest values, and say "
            "little of a tail. More requests help."
        )


def _warm_up(arms: Sequence[Arm], margin: float) -> Iterator[str]:
    """A sentence if the start of the runs, as MSER-5 determines it from TTFT, lowers mean TTFT by more than the margin
    in the median replicate of an arm. A slow start does not count: an empty system is fast, so this is a burst."""
    changes = {arm.name: [(run, _change_by_warm_up(run)) for run in counted(arm)] for arm in arms}
    if not any(np.median([change for _, change in each]) > margin for each in changes.values()):
        return
    changed = [(name, run) for name, each in changes.items() for run, change in each if change > margin]
    most = max(change for each in changes.values() for _, change in each)
    said, longer = "The start, when the system is still empty,", ""
    if warmup_s := _warmup_s(changed[0][1]):
        said, longer = f"After the first {warmup_s:g} s the system still fills up, which", "a longer "
    yield (
        f"{said} is part of all numbers: without it (MSER-5's cut) mean TTFT {_in_which(changed, arms)}would be up to "
        f"{fmt.change(100 * most)} off what is shown. A longer trace helps, or {longer}report.warmup_s."
    )


def _change_by_warm_up(run: Run) -> float:
    """The relative change of mean TTFT if the start is cut; 0 beyond capacity, where there is no steady state."""
    if state_of(run) == "beyond":
        return 0.0
    requests = run.requests.sort_values("arrival_ns", kind="stable")
    start_ns = requests["arrival_ns"].min() + round(_warmup_s(run) * 1e9)
    kept = requests[requests["arrival_ns"] >= start_ns]
    ttft = kept["ttft_s"].dropna().to_numpy(dtype=np.float64)
    cut = mser5(ttft)
    return float(ttft[cut:].mean() / ttft.mean() - 1.0) if cut and ttft.mean() > 0 else 0.0


def _warmup_s(run: Run) -> float:
    return run.flat_config.get("report.warmup_s") or 0.0
