"""The ablation report from run folders: one self-contained HTML page, and the same content as Markdown.

`write_report` takes arms and sim-real pairs; `report_from_folders` infers both from the swept keys. Next to
`<out>.html` they write `<out>.md` and `<out>_files/` with every figure as PNG and SVG; the HTML needs neither.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from analysis import format as fmt
from analysis.comparison import fidelity
from analysis.comparison.arms import (
    Arm,
    by_load,
    comparable,
    find_arm,
    infer_arms,
    joined,
    num_replicates,
    on_one_replicate,
)
from analysis.comparison.compare import (
    DEADLINES,
    FAIRNESS,
    FILLED,
    FLEET,
    INSIDE,
    LATENCY,
    P99_ITL,
    RATES,
    SLO_METRICS,
    Metric,
    chosen_metrics,
    compare,
)
from analysis.comparison.effects import Compared, main_effects
from analysis.comparison.groups import (
    check_warm_up,
    differing,
    experiments,
    left_out,
    of_newest,
    refuse_unused,
    stated,
    stated_slo,
    tell_versions_apart,
)
from analysis.comparison.pairs import infer_pairs, join_repeats
from analysis.load import Run, Sweep, num_replicas, relative
from analysis.load import load as load_all
from analysis.measures.slo import SLO
from analysis.progress import progress
from analysis.reports import fidelity_findings, findings, gates, tables
from analysis.reports.cautions import cautions, changed_sources, lost
from analysis.reports.classes import class_claims, class_tables, compared_classes, pooled_said
from analysis.reports.fidelity_section import fidelity_section
from analysis.reports.figures import change_bars, main_figure, own_plots, run_plots
from analysis.reports.first_screen import MAX_SENTENCES, answer
from analysis.reports.numbers import FILE, comparisons_frame
from analysis.reports.observed import observed
from analysis.reports.parts import (
    DEFAULT_MARGIN,
    OwnPlot,
    PlotError,
    ReportInput,
    Sections,
    baseline_text,
    default_question,
    what_ran,
)
from analysis.reports.trust import trust
from testbed.errors import RunFolderError
from testbed.output import written

_MAX_NAMED = 3  # arms
_MAX_COMMANDS = 12  # with more, the list is folded


def write_report(report: ReportInput, out: str | os.PathLike[str]) -> Path:
    """Writes the report to `out` (with suffix .html) and returns that path. Raises RunFolderError without any arm, for
    arms or pairs of different traces, or for different warm-ups; what fails leaves nothing of the page behind. Raises
    PlotError at the end if plots of the user's own failed, and before it what `gates.check` does: then the rest is
    there."""
    if not report.arms:
        raise RunFolderError("a report needs at least one arm with a run")
    check_warm_up(report.runs)
    path = Path(out).with_suffix(".html")
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        progress("report", "figure") as bar,
        TemporaryDirectory(prefix=f".{path.stem}_files-", dir=path.parent) as part,
    ):
        sections = Sections(path, Path(part), bar.update)
        html, markdown = _pages(report, sections)
        comparisons_frame(sections.compared).to_csv(sections.part / FILE, index=False)
        with written(path) as page, written(path.with_suffix(".md")) as plain_page:
            for file, text in ((page, html), (plain_page, markdown)):
                file.write(text)
                file.flush()  # a full disk is told before the figures are kept
            sections.keep()
    names = [arm.name for arm in report.arms]
    gates.check(report.gates, sections.compared, names, path, num_left_out=len(report.incomplete))
    if sections.failed:
        of_own = fmt.count(len(sections.failed), "plot")
        raise PlotError(f"{path} is written without {of_own} of your own: {'; '.join(sections.failed)}")
    return path


def _pages(report: ReportInput, sections: Sections) -> tuple[str, str]:
    """The page as HTML and as Markdown."""
    slo = SLO.parse(report.slo)
    baseline = find_arm(report.arms, report.baseline)
    groups = _comparable_groups(sections, report, baseline.name)
    for load, arms in groups.items():
        _ablation(sections, load, arms, report, slo)
    context = _context(report, sections, groups, baseline, slo)
    context["plots"] += own_plots(sections, report)  # last: they may change the frames that they are given
    environment = Environment(
        loader=PackageLoader("analysis.reports"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["md"] = _markdown
    html = environment.get_template("report.html.j2").render(context)
    markdown = environment.overlay(autoescape=False).get_template("report.md.j2").render(context)
    return html, markdown


def report_from_folders(
    folders: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    title: str | None = None,
    baseline: str | None = None,
    question: str | None = None,
    slo: SLO | Mapping[str, float | None] | None = None,
    margin: float | None = None,
    command: str = "",
    plots: Callable[[Sequence[Run]], Sequence[OwnPlot]] = lambda runs: (),
    metrics: Callable[[Sequence[Run]], Sequence[Metric]] = lambda runs: (),
    fail_if: Sequence[str] = (),
) -> Path:
    """Writes a report on every complete run at or below `folders`; returns its path. Arms are inferred from the swept
    keys, pairs from traces and policies. Baseline, question, SLO and margin are as given, else as the runs state them.
    plots, metrics: make the user's own, for the runs of the arms. fail_if: limits of changes (`gates`), such as
    "ttft_s.mean>5%"; raises ConfigError for what is none, and GateError at the end for changes beyond them.

    Arms are simulated runs, or real runs if there are no simulated ones. A trace on which every simulated run is paired
    with a real one is left out of the arms, if there are other traces. Of several experiments the largest is reported;
    the report names what is left out (incomplete runs, other experiments).
    """
    limits = [gates.Gate.parse(text) for text in fail_if]
    sweep = load_all(folders)
    assert isinstance(sweep, Sweep), folders
    runs, older = of_newest(sweep.runs)
    pairs = join_repeats(infer_pairs(runs))
    tell_versions_apart(runs, folders)
    sims = [run for run in runs if run.is_simulated] or runs
    paired = {pair.sim.path for pair in pairs}
    traces = {run.fingerprint for run in sims if run.path not in paired}
    chosen, *others = experiments([run for run in sims if run.fingerprint in traces] or sims)
    others = [other for other in others if not {run.path for run in other} <= paired]
    compared = [*chosen, *(run for pair in pairs for run in pair.runs)]
    refuse_unused(compared, runs, folders)
    counted = {run.path for run in (*sims, *compared)}
    others += [alone] if (alone := [run for run in runs if run.path not in counted]) else []
    arms = infer_arms(chosen)
    report = ReportInput(
        arms=arms,
        pairs=pairs,
        cautions=[*older, *(left_out(chosen, other, Path(out).parent) for other in others)],
        title=title or ("Ablation report" if len(arms) > 1 else "Run report"),
        question=question or stated(chosen, "question") or "",
        baseline=baseline or (stated(chosen, "baseline") if len(arms) > 1 else None),  # alone it is compared with none
        slo=slo or stated_slo(chosen),
        margin=margin or stated(chosen, "margin") or DEFAULT_MARGIN,
        replicated=stated(chosen, "replicates") or (),
        command=command,
        incomplete=sweep.incomplete,
        metrics=chosen_metrics(metrics(chosen), chosen),
        plots=plots(chosen),
        gates=limits,
    )
    return write_report(report, out)


def _comparable_groups(sections: Sections, report: ReportInput, baseline_name: str) -> dict[str, list[Arm]]:
    """Load -> its baseline (the report's, else the first arm there) and the arms that share a trace with it.

    Raises RunFolderError if there are several arms, and some can be compared neither with another nor with a real run.
    """
    loads, groups = by_load(report.arms, report.replicated), {}
    lacking: dict[str, list[str]] = {}  # arms -> loads
    for load, arms in loads.items():
        ordered = sorted(arms, key=lambda arm: arm.name != baseline_name)
        groups[load] = comparable(ordered, ordered[0])
        at_load = f"At {load} " if load else ""
        if lacks := [arm.name for arm in report.arms if arm.name not in {baseline_name, *(one.name for one in arms)}]:
            lacking.setdefault(fmt.names(lacks, _MAX_NAMED), []).append(load)
        if ordered[0].name != baseline_name:
            sections.notes.append(f"{at_load}the baseline is {ordered[0].name}: {baseline_name} has no run there.")
        missing = [arm.name for arm in arms if arm.name not in {kept.name for kept in groups[load]}]
        if missing:
            why = f"on other traces or seeds than {ordered[0].name}"
            sections.notes.append(f"{at_load}not compared, because {why}: {'; '.join(missing)}.")
    sections.notes += [f"There is no run of {names} at {fmt.listing(at)}." for names, at in lacking.items()]
    paired = {run.path for pair in report.pairs for run in pair.runs}
    is_paired = all(any(run.path in paired for run in arm.runs) for arm in report.arms)
    if len(report.arms) > 1 and not is_paired and all(len(arms) < 2 for arms in groups.values()):
        first, *others = [arm for arms in loads.values() for arm in arms]
        other = [run for arm in others for run in arm.runs]
        raise RunFolderError(
            f"nothing to compare: the arms ran different traces ({differing(first.runs, other)}). "
            "Report them separately, or run them on one trace"
        )
    return groups


def _ablation(sections: Sections, load: str, arms: Sequence[Arm], report: ReportInput, slo: SLO | None) -> None:
    """Adds tables and bars for one load; the first arm is the baseline."""
    baseline = arms[0]
    where = f" at {load}" if load else ""
    runs = [run for arm in arms for run in arm.runs]
    kept = (*(SLO_METRICS if slo else ()), *([DEADLINES] * any(run.summary["deadlines"] for run in runs)))
    has_gaps = any(P99_ITL.of(run) is not None for run in runs)
    latency = tuple(metric for metric in LATENCY if metric is not P99_ITL or has_gaps)
    parts = {"latency": latency, "throughput": (*RATES, *kept)}
    chosen = {metric.path: metric for metric in report.metrics}
    parts = {what: tuple(chosen.pop(metric.path, metric) for metric in part) for what, part in parts.items()}
    if chosen:
        parts["chosen metrics"] = tuple(chosen.values())
    metrics = [metric for part in parts.values() for metric in part]
    rows = compare(arms, baseline, metrics, report.margin, slo)
    effects = main_effects(arms, baseline, metrics, report.margin, slo)
    num = num_replicates(arms)
    classes = compared_classes(arms, report.margin, slo)
    sections.compared.append(Compared(load, arms, rows, effects if num > 1 else (), classes))
    filled = (*FILLED, *(FLEET if any(num_replicas(run) > 1 for run in runs) else ()))
    told = {"what happened inside": INSIDE, "how full the engine was": filled}
    means = " (means over replicates)" if len(runs) > len(arms) else ""
    told |= {"tenants": FAIRNESS} if all(r.summary["fairness"] for r in runs) else {}
    made = [
        tables.effects_table(
            f"Main effects on {what}{where}: one factor changed, averaged over the levels of the others",
            [effect for effect in effects if effect.comparison.metric in part], report.margin,
        )
        for what, part in parts.items() if effects
    ]  # fmt: skip
    for what, part in (parts | told).items():
        caption = f"{what.capitalize()}{where}{means if what in told else ''}"
        table = tables.ablation_table(caption, arms, part, () if what in told else rows, report.margin, slo)
        assumed = [tables.ASSUMED_FAIR] if what == "tenants" else []
        if table.headers[1:]:  # else nothing of it was recorded
            made.append(replace(table, note=" ".join([*assumed, *filter(None, [table.note])])))
    made += class_tables(arms, classes, where, report.margin, slo)
    method = findings.interval_method(rows, num, on_one_replicate(arms)) if len(arms) > 1 else ""
    is_new = all(method != other["method"] for other in sections.ablation)  # stated once
    group = {"load": load, "method": method if is_new else "", "tables": made, "plots": []}
    if any(row.estimate is not None and row.verdict != "identical" for row in rows):
        group["plots"] = [change_bars(sections, sections.compared[-1])]
    sections.ablation.append(group)


def commands_of(runs: Sequence[Run]) -> list[str]:
    """The commands that reproduce the runs; for a sweep its command, not one for each point."""
    commands = [run.manifest.get("sweep") or run.manifest.get("command") for run in runs]
    return list(dict.fromkeys(str(command) for command in commands if command))


def _context(
    report: ReportInput, sections: Sections, groups: Mapping[str, Sequence[Arm]], baseline: Arm, slo: SLO | None
) -> dict[str, Any]:
    runs = [run for arm in report.arms for run in arm.runs]
    compared = joined(arm for group in groups.values() for arm in group)
    everything = report.runs
    links = {str(run.path): relative(run.path, sections.out.parent) for run in everything}
    noise = fidelity.real_noise([pair.reals for pair in report.pairs])
    replayed = [fidelity_findings.probe_of(run.manifest) for run in everything if run.manifest.get("replay")]
    commands = report.commands or commands_of(everything)
    measured = fidelity_section(report, sections, noise)
    rankings: Mapping[str, Any] = measured["rankings"]
    missed = [text for text in fidelity_findings.winners(rankings, noise) if "; not in " in text]
    versions = dict.fromkeys(str(run.manifest.get("code_version") or "") for run in everything)
    values, pooled = observed(sections.compared, report.metrics, slo), pooled_said(sections.compared)
    most = MAX_SENTENCES - len(values) - len(pooled)
    said = answer(sections.compared, slo, report.margin, most)
    said += class_claims(sections.compared, report.margin, most - len(said))
    return {
        "title": report.title,
        "question": report.question or default_question(compared, baseline),
        "ran": what_ran(everything),
        "baseline": baseline_text(report, baseline),
        "cautions": [
            *findings.failed_checks(links, everything),
            *missed,
            *changed_sources(everything),
            *fidelity_findings.too_noisy(noise, is_scaled=any(replayed)),
            *fidelity_findings.unlike_clocks(replayed),
            *report.cautions,
            *lost(report.arms, report.incomplete, sections.out.parent),
            *sections.notes,
            *cautions(groups, report.margin, report.replicated, report.pairs),
        ],
        "answer": [*values, *said, *pooled],
        "main_figure": main_figure(sections),
        "setup": tables.setup_table("Setup of the runs compared", runs),
        "slo": None if slo is None else str(slo),
        "ablation": sections.ablation,
        "plots": run_plots(sections, groups, baseline, report),
        "fidelity": measured,
        "trust": trust(sections.compared, report.pairs, measured["errors"], rankings, len(report.incomplete)),
        "limits": [
            *measured["not_measured"],
            *findings.limits([one.arms for one in sections.compared], report.arms, slo),
            *report.notes,
        ],
        "incomplete": [(relative(path, sections.out.parent), reason) for path, reason in report.incomplete],
        "commands": [*commands, *([report.command] if report.command else [])],
        "max_commands": _MAX_COMMANDS,
        "versions": [version for version in versions if version],
        "runs": tables.runs_table(by_load(report.arms, report.replicated), links),
        "created": max((str(run.manifest.get("created") or "") for run in everything), default=""),
    }


def _markdown(text: Any) -> str:
    """Escapes text for Markdown; line ends become spaces. Underscores within a word and brackets without a link are no
    markup; what begins an item of a list is, at the start."""
    return _MARKUP.sub(r"\\\g<0>", str(text)).replace("\n", " ")


_MARKUP = re.compile(r"[\\`*<>|#~$]|(?<![^\W_])_|_(?![^\W_])|\](?=[(\[:])|^[-+](?=\s)|(?<=^\d)[.)](?=\s)")
