"""Warnings that a reader needs before the findings: each sentence names a reason why these could mislead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from analysis import format as fmt
from analysis.comparison.arms import (
    Arm,
    counted,
    decided_alike,
    grouped,
    is_policy,
    joined,
    load_keys,
    replicates,
    unsaid_keys,
)
from analysis.comparison.compare import ignored
from analysis.comparison.effects import is_full_design, meanings
from analysis.comparison.pairs import Pair
from analysis.comparison.sharing import common_share, drawn_by
from analysis.comparison.triggered import idle_settings, never_triggered
from analysis.load import Run, relative, swept_keys
from analysis.measures.notes import Note, price_notes, rate_notes, replay_notes, told
from analysis.measures.replicas import routing_notes
from analysis.naming import NAMING_KEYS, VERSION, align, factor_name, level_names, level_text, naming_keys
from analysis.reading.files import read_manifest, read_yaml
from analysis.reports.fidelity_findings import engine_noise_said
from analysis.reports.load_cautions import draining, left_out_start, outrun, warm_up
from testbed.errors import RunFolderError

_RESOLVED = {"num_gpu_blocks": "GPU KV blocks", "num_cpu_blocks": "CPU KV blocks"}  # in manifests; depend on memory
_LIMITS = ("max_num_seqs", "max_num_batched_tokens")  # a preset's own may decide more than its rules
_TRANSFORMS = "trace.transforms"
_ONE_LOAD = 1.5  # highest over least rate of what passes for one load
_MAX_KEYS = 6  # items that are listed


def cautions(
    loads: Mapping[str, Sequence[Arm]], margin: float, replicated: Sequence[str] = (), pairs: Sequence[Pair] = ()
) -> list[str]:
    """All warnings. loads: the arms compared at each load, the baseline first. replicated: as for `by_load`. pairs:
    what tells of the simulator's error."""
    arms = joined(arm for group in loads.values() for arm in group)
    said = [*_doubted(arms, pairs), *_copies(loads), *engine_noise_said(loads), *_unnamed(arms), *_ambiguous(arms)]
    said += [*left_out_start(arms), *_few_requests(arms)]
    runs = [run for group in loads.values() for arm in group for run in arm.runs]
    if _are_windows(loads, load_keys(runs, replicated)):
        said.append(
            "The loads are windows of one trace. If they are replicates of one load, run the sweep's command again "
            f"with 'report.replicates=[{_TRANSFORMS}]': it runs nothing anew, and the next report is over all of them."
        )
    if unsaid := unsaid_keys(runs, replicated):
        what = fmt.listing([key.removeprefix("trace.") for key in unsaid[:_MAX_KEYS]])
        said.append(f"The loads are different traces, each to be read by itself: they differ in {what}, too.")
    found = [(load, text) for load, group in loads.items() for text in idle_settings(group)]
    for load, group in loads.items():
        here = _unlike(group) if replicated else []
        here += [*outrun(group, margin), *_uneven(group), *warm_up(group, margin), *never_triggered(group)]
        found += [(load, text) for text in here]
    for text, at in grouped(found, lambda one: one[1]).items():
        said.append(f"At {fmt.listing([load for load, _ in at])}: {text}" if len(at) < len(loads) else text)
    return [*said, *draining(loads)]


def _are_windows(loads: Mapping[str, Sequence[Arm]], keys: Sequence[str]) -> bool:
    """Whether loads that differ in these keys are disjoint windows of one trace, offered at about one rate."""
    runs = [group[0].runs[0] for group in loads.values()]
    is_cut = keys == [_TRANSFORMS] and drawn_by([run.flat_config for run in runs]) == ["window"]
    return is_cut and not _span_of_rates(runs) and common_share(runs) == 0


def _span_of_rates(runs: Sequence[Run]) -> str:
    """The least and the highest offered rate of runs at what are different loads, else ""."""
    rates = sorted(run.summary["throughput"]["offered_per_s"] or 0.0 for run in runs)
    if not rates or rates[-1] <= _ONE_LOAD * rates[0]:
        return ""
    return f"{fmt.number(rates[0])} to {fmt.number(rates[-1])} requests/s"


def _unlike(arms: Sequence[Arm]) -> list[str]:
    """Stated replicates that are different loads."""
    if not (span := _span_of_rates([run for arm in arms for run in arm.runs])):
        return []
    return [
        f"What report.replicates calls replicates was offered {span}: these are different loads, and what holds in the "
        "mean over them may hold at none."
    ]


def lost(arms: Sequence[Arm], incomplete: Sequence[tuple[Path, str]], start: Path) -> Iterator[str]:
    """Sentences on the arms that lack a run, or requests of a run. start: the folder that paths are relative to."""
    whose = grouped(incomplete, lambda entry: _arm_of(entry[0], arms))
    if len(whose) > _MAX_KEYS:  # of a sweep that was interrupted
        whose = {fmt.count(len(whose), "arm"): list(incomplete)}
    for name, entries in whose.items():
        runs = fmt.count(len(entries), "run") + (f" of {name} failed" if name else " failed")
        are = "is" if len(entries) == 1 else "are"
        by_reason = grouped(entries, lambda entry: re.sub(r"\d", "", entry[1]))  # the same of other requests is one
        why = [_where([path for path, _ in those], start) + f": {those[0][1]}" for those in by_reason.values()]
        yield f"{runs} or did not end, and {are} left out ({'; '.join(why)})."
    yield from _ignoring(arms)
    yield from _cut(arms)
    for arm in arms:
        if num_aborted := sum(run.summary["finish_reasons"]["abort"] for run in arm.runs):
            yield (
                f"{fmt.share(num_aborted / _num_sent(arm))} of the requests of {arm.name} were aborted: they have no "
                "E2E, and their TTFT and TPOT are of what came before."
            )


def _where(folders: Sequence[Path], start: Path) -> str:
    first = relative(folders[0], start)
    return first if len(folders) == 1 else f"{first} and {len(folders) - 1} more"


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
        runs = [run.manifest for run in arm.runs]
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
    return fmt.names([arm.name for arm in arms], _MAX_KEYS), " each" if len(arms) > 1 else ""


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
    configs = [*(dict(arm.runs[0].flat_config) for arm in arms), config]
    align(configs)
    policies = [key for key in config if is_policy(key) and len({repr(one.get(key)) for one in configs}) > 1]
    kept = [key for key in policies if not key.startswith("hydra.")]
    return level_names({key: config[key] for key in naming_keys(configs, kept)}) or fmt.listing([a.name for a in arms])


def _doubted(arms: Sequence[Arm], pairs: Sequence[Pair]) -> Iterator[str]:
    """The notes that runs made on their times (step times outside of a profile or filled in, a machine that did not
    keep up), on the rate at which requests came, and on their routing."""
    named = {run.path: (pair.label, run) for pair in pairs for run in pair.runs}
    named |= {run.path: (arm.name, run) for arm in arms for run in arm.runs}
    runs = list(named.values())
    found = {
        "Step times": [(name, note) for name, run in runs for note in price_notes(run.manifest)],
        "Measured": [(name, note) for name, run in runs for note in replay_notes(run.manifest)],
        "Load": [
            (name, Note.of_text(text))
            for name, run in runs
            if run.is_simulated
            for text in rate_notes(run.config.get("trace") or {}, run.summary)
        ],
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
    """A sentence on the settings in which arms differ in addition to those in their names. Of the settings that belong
    to a preset in the name only its limits count."""
    runs = [run for arm in arms for run in arm.runs]
    named = {key for arm in arms for key in arm.naming}
    if not named:
        return  # one arm, or arms with given names
    bundles = {key.rpartition(".")[0] for key in named if key.split(".")[-1] in NAMING_KEYS}
    given = {key for run in runs for key in run.manifest.get("given") or ()}
    found = [
        key
        for key in swept_keys(runs)
        if is_policy(key)
        and key not in named
        and any(run.flat_config.get(key) != runs[0].flat_config.get(key) for run in runs)  # a null may be left out
        and (key in given or key.endswith(_LIMITS) or not any(key.startswith(f"{b}.") for b in bundles))
    ]
    said = []
    for key in found[:_MAX_KEYS]:
        per_arm = {arm.name: _span([level_text(key, run.flat_config.get(key)) for run in arm.runs]) for arm in arms}
        said.append(f"{factor_name(key)} ({_listed(per_arm, arms, key)})")
    said += [f"{len(found) - _MAX_KEYS} more"] if len(found) > _MAX_KEYS else []
    is_simulated = any(run.is_simulated for run in runs)
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
    """A sentence if compared runs, of one version, used files, classes or code of the same name with different
    content."""
    by_name: dict[tuple[str, object], set[str]] = {}  # (what, version): contents
    for run in runs:
        identity, version = run.manifest.get("identity") or {}, run.flat_config.get(VERSION)
        parts = {**(identity.get("classes") or {}), **(identity.get("files") or {})}
        parts |= {"the code of the testbed": identity["code"]} if "code" in identity else {}
        for name, content in parts.items():
            by_name.setdefault((name, version), set()).add(content)
    changed = list(dict.fromkeys(name for (name, _), contents in by_name.items() if len(contents) > 1))
    if not changed:
        return []
    return [
        f"Between the runs that are compared {fmt.listing(changed)} changed, and what looks like an arm's doing may be "
        "that: run them again from one state (versions to compare: from a folder each, and report on these folders)."
    ]


def _listed(per_arm: Mapping[str, str], arms: Sequence[Arm], key: str = "") -> str:
    """The values (of this key) as text, each with the arms that have it."""
    having = grouped(arms, lambda arm: per_arm[arm.name])
    return _shown([f"{value} in {_who_are(mine, arms, key)}" for value, mine in having.items()])


def _shown(parts: Sequence[str]) -> str:
    return "; ".join(parts[:_MAX_KEYS]) + ("; …" if len(parts) > _MAX_KEYS else "")


def _who_are(mine: Sequence[Arm], arms: Sequence[Arm], told: str) -> str:
    """The arms as text: by a level in their names that exactly these have, if there is one (not of the key that is
    told), else by name."""
    names = [arm.name for arm in mine]
    for key in mine[0].naming if len(mine) > 1 else ():
        level = mine[0].levels[key]
        if key != told and [arm.name for arm in arms if arm.levels.get(key) == level] == names:
            return f"all with {level_names({key: level})}"
    return fmt.names(names, _MAX_KEYS)


def _span(values: Sequence[object]) -> str:
    distinct = list(dict.fromkeys(fmt.plain(value) for value in values))
    return distinct[0] if len(distinct) == 1 else f"{distinct[0]} and others"


def _uneven(arms: Sequence[Arm]) -> Iterator[str]:
    traces = {arm.name: {run.fingerprint for run in replicates(arm)} for arm in arms}
    if any(theirs != traces[arms[0].name] for theirs in traces.values()):
        fewest_first = sorted(traces.items(), key=lambda item: len(item[1]))
        told = _shown([f"{len(theirs)} of {name}" for name, theirs in fewest_first])
        num_common = len(set.intersection(*traces.values()))
        effects = ", main effects over those that their arms share" if is_full_design(arms) else ""
        yield (
            f"The arms do not have the same replicates ({told}): {num_common or 'none'} in common. Means in tables "
            f"are over all that an arm has, changes over those that it shares with {arms[0].name}{effects}."
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
