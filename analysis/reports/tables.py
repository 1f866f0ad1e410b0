"""The tables of a report as plain cells, which both the HTML and the Markdown template print."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from analysis import format as fmt
from analysis.comparison.arms import Arm, counted, infer_arms, is_policy, settings_apart, stated_replicates
from analysis.comparison.compare import LATENCY, TIMES, Comparison, Metric, mean_over_replicates, metric_of
from analysis.comparison.effects import Effect, by_factor
from analysis.comparison.pairs import Pair, engine_of
from analysis.comparison.wording import bounds_text, change_text, interval_text, is_unlike, verdict_text, winner_text
from analysis.load import Run, num_replicas, swept_keys
from analysis.measures.checks import outline
from analysis.measures.slo import SLO
from analysis.naming import factor_name, is_seed, level_text

MAX_FACTS = 5  # values of one fact that are listed, as every manifest may have its own


class Cell(NamedTuple):
    """A cell: its text, smaller lines below it, and a kind (better, worse, noise, head, strong) for its style."""

    text: str
    notes: tuple[str, ...] = ()
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""  # directly below the table


def ablation_table(
    caption: str,
    arms: Sequence[Arm],
    metrics: Sequence[Metric],
    comparisons: Sequence[Comparison],
    margin: float,
    slo: SLO | None,
) -> Table:
    """Arms x metrics: the value and, except for the baseline (the first arm), its change, interval and verdict. Without
    comparisons, what is equal in all arms, or of one arm 0 or unknown, is in a note below."""
    found = {(row.arm, row.metric.path): row for row in comparisons}
    left_out = {} if found else _told_once(arms, metrics, slo)
    metrics = [metric for metric in metrics if metric not in left_out]
    rows = []
    for arm in arms:
        cells = [Cell(arm.name, ("baseline",) if arm is arms[0] else (), "head")]
        for metric in metrics:
            row = found.get((arm.name, metric.path))
            if row is None:
                cells.append(Cell(_written(metric, mean_over_replicates(arm, metric, slo))))
                continue
            size = "" if row.effect is None else f"d = {fmt.significant(row.effect, 2)}"
            sign = _SIGN if is_unlike(row, mean_over_replicates(arms[0], metric, slo)) else ""
            cells.append(_judged(metric.write(row.value), interval_text(row) + sign, verdict_text(row, margin), size))
        rows.append(tuple(cells))
    is_marked = any(note.endswith(_SIGN) for cells in rows for cell in cells for note in cell.notes)
    why = "The same in all arms" if len(arms) > 1 else "Left out"
    note = f"{why}: {', '.join(left_out.values())}." if left_out else _UNLIKE if is_marked else ""
    return Table(caption, ("arm", *[metric.label for metric in metrics]), tuple(rows), note)


def _told_once(arms: Sequence[Arm], metrics: Sequence[Metric], slo: SLO | None) -> dict[Metric, str]:
    """Each metric without a better direction that is equal in all arms, or of one arm 0 or unknown, with its value; if
    all are, those that are unknown."""
    told = {}
    for metric in (one for one in metrics if not one.better):
        texts = {_written(metric, mean_over_replicates(arm, metric, slo)) for arm in arms}
        if len(texts) == 1 and (len(arms) > 1 or not texts.isdisjoint((fmt.NOTHING, metric.write(0.0)))):
            told[metric] = texts.pop()
    unknown = {metric: text for metric, text in told.items() if text == fmt.NOTHING}
    shown = told if len(told) < len(metrics) else unknown
    return {metric: f"{metric.label} {text.replace(fmt.NOTHING, 'not recorded')}" for metric, text in shown.items()}


def _written(metric: Metric, value: float | None) -> str:
    """The value as text: a dash for a time that was not recorded, and not reached if it is a latency."""
    return fmt.NOTHING if value is None and not metric.better else metric.write(value)


ASSUMED_FAIR = (
    "The service gap takes tenants as entitled to equal service while two of them wait, and counts that time only: an "
    "order that lets one of them never wait has a small gap, however long the other waits. Jain's index (1: equal) "
    "takes them as entitled to the same time per output token, whatever they ask for."
)


def _judged(text: str, interval: str, verdict: str, size: str = "") -> Cell:
    notes = tuple(note for note in (interval, verdict, size) if note)
    return Cell(text, notes, verdict if verdict in ("better", "worse") else "noise")


_SIGN = f"{fmt.SPACE}†"
_UNLIKE = (
    "† Changes are geometric means over replicates; here they differ from the ratio of the means, as replicates differ "
    "much."
)


def effects_table(caption: str, effects: Sequence[Effect], margin: float) -> Table:
    """Factors x metrics: the main effect, its interval and verdict, and both ends over the cells if it depends on the
    other factors; no average that hides what these disagree on."""
    groups = by_factor(effects)
    metrics = list(dict.fromkeys(effect.comparison.metric.label for effect in effects))
    rows = []
    for group in groups.values():
        first = group[0]
        step = " → ".join(level_text(first.factor, one) for one in (first.base_level, first.level))
        cells = [
            Cell(factor_name(first.factor), (step, f"mean of {fmt.count(len(first.pairs), 'pair')} of arms"), "head")
        ]
        found = {effect.comparison.metric.label: effect for effect in group}
        for label in metrics:
            effect = found[label]  # every step has an effect in each metric
            row = effect.comparison
            if row.estimate is None:
                cells.append(Cell(fmt.NOTHING, ("not comparable",), "noise"))
            elif effect.is_uneven:
                cells.append(Cell(" to ".join(map(change_text, effect.ends)), _by_cells(effect, margin), "noise"))
            else:
                cell = _judged(change_text(row), bounds_text(row), verdict_text(row, margin))
                cells.append(cell._replace(notes=(*cell.notes, *_by_cells(effect, margin))))
        rows.append(tuple(cells))
    return Table(caption, ("factor", *metrics), tuple(rows))


def _by_cells(effect: Effect, margin: float) -> tuple[str, ...]:
    """Notes on an effect that depends on the other factors: both `ends`, with their verdicts if these disagree, else
    with the difference between them."""
    if effect.interaction is None:
        return ()
    about = "depends on the other factors"
    if effect.is_uneven:
        return about, *(f"{interval_text(end)} with {end.arm}: {verdict_text(end, margin)}" for end in effect.ends)
    apart = replace(effect.comparison, estimate=effect.interaction.estimate, verdict="higher")
    is_in_unit = effect.interaction.estimate.scale == "difference" and not apart.metric.is_share
    by = bounds_text(apart).removeprefix("by ") if is_in_unit else interval_text(apart)
    return about, *(f"{change_text(end)} with {end.arm}" for end in effect.ends), f"apart by {by}"


_OF_RATES = "rates: until the last request came, or on until half had ended; if all came at once, to the end"


def setup_table(caption: str, runs: Sequence[Run]) -> Table:
    """The setup of the runs: one row for each fact, with the values joined if runs differ."""

    def joined(found: Iterable[str]) -> str:
        distinct = list(dict.fromkeys(filter(None, found)))
        if len(distinct) > MAX_FACTS:
            return f"{len(distinct)} different, the first: {'; '.join(distinct[:MAX_FACTS])}"
        return "; ".join(distinct) or fmt.NOTHING

    def values(*keys: str) -> str:
        found: list[str] = []
        for run in runs:
            value: Any = run.manifest
            for key in keys:
                value = value.get(key) if isinstance(value, Mapping) else None
            if value not in (None, "", [], {}):
                found.append(_fact(value))
        return joined(found)

    is_fleet = any(num_replicas(run) > 1 for run in runs)
    facts = [
        ("trace", values("trace", "name")),
        ("requests in the trace", values("trace", "num_requests")),
        ("notes on the trace", values("trace", "notes")),
        ("seeds", ", ".join(dict.fromkeys(fmt.plain(run.manifest.get("seed")) for run in runs)) or fmt.NOTHING),
        ("backend", values("backend")),
        ("model", values("model")),
        ("device", values("device")),
        ("cost model", joined(map(_cost_model, runs))),
        ("attention", values("attention")),
        ("GPU KV blocks × block size", f"{values('num_gpu_blocks')} × {values('block_size')}"),
        ("CPU KV blocks", values("num_cpu_blocks") if any(run.has_swapped for run in runs) else fmt.NOTHING),
        ("replicas, each with blocks of its own", values("num_replicas") if is_fleet else fmt.NOTHING),
        ("router", values("router") if is_fleet else fmt.NOTHING),
        ("scheduler", values("scheduler")),
        ("given to all runs", _given_to_all(runs)),
        ("the arms differ in", settings_apart([run.flat_config for run in runs], swept_keys(runs))),
        ("classes of one's own", _own_classes(runs)),
        ("commands were given in", values("started_in")),
        ("machine that ran it", values("machine")),
        ("pace of the replay", values("replay", "pace")),
        ("a probe's median time over what it should take", values("replay", "probe", "slowness", "p50")),
        ("code version", values("code_version")),
        ("time base", "; ".join([*dict.fromkeys(run.summary["time_base"] for run in runs), _OF_RATES])),
        ("checks of the records", "; ".join(dict.fromkeys(outline(run.summary["checks"]) for run in runs))),
    ]
    rows = tuple((Cell(name, kind="head"), Cell(text)) for name, text in facts if text not in ("", fmt.NOTHING))
    return Table(caption, ("", ""), rows)


def _given_to_all(runs: Sequence[Run]) -> str:
    """The policies' settings that every command gave, as no arm's name has them: "scheduler.queue_order=sjf; …"."""
    first, *others = [run.manifest.get("given") or {} for run in runs]
    alike = {key: value for key, value in first.items() if all(one.get(key) == value for one in others)}
    return "; ".join(f"{key}={value}" for key, value in alike.items() if "." in key and is_policy(key))


_AS_FITTED = {"host_factor": 1.0, "device_factor": 1.0, "repeated_saving": None}  # settings that change a fit


def _cost_model(run: Run) -> str:
    """The cost model with what was given to a fit, "calibrated, cost.host_factor=2"; "" for a measured run."""
    found = {name: run.flat_config.get(f"cost.{name}", own) for name, own in _AS_FITTED.items()}
    given = [f"cost.{name}={fmt.plain(value)}" for name, value in found.items() if value != _AS_FITTED[name]]
    return ", ".join([str(cost), *given]) if (cost := run.manifest.get("cost")) else ""


def _own_classes(runs: Sequence[Run]) -> str:
    """The user's own classes, each once, with the hash of its file, and with every value of a parameter that has
    several. Those that some presets have begin with these: "vllm_v1, ours: scheduler.victim = mine.Last(of=2/3), …"."""
    found: dict[str, dict[str, dict[str, None]]] = {}  # by class: its parameters' values, in order
    having: dict[str, dict[str, None]] = {}  # by class: presets
    presets: dict[str, None] = {}
    for run in runs:
        files = (run.manifest.get("identity") or {}).get("classes") or {}
        preset = str((run.manifest.get("given") or {}).get("scheduler") or run.manifest.get("scheduler"))
        presets[preset] = None
        for where, node in _nodes(run.config):
            target = str(node["_target_"])
            if digest := files.get(target.rpartition(".")[0], files.get(target)):  # the latter: of a notebook's cell
                told = f"{where} = {target}({{}}), file {digest[:8]}"
                having.setdefault(told, {})[preset] = None
                for name, value in node.items():
                    values = found.setdefault(told, {}).setdefault(name, {})
                    values[fmt.plain(value)] = None
    return "; ".join(
        ("" if having[told].keys() == presets.keys() else f"{', '.join(having[told])}: ")
        + told.format(", ".join(f"{name}={'/'.join(values)}" for name, values in given.items() if name != "_target_"))
        for told, given in found.items()
    )


def _nodes(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(key, settings) of each class: a whole group, as cost and trace may be, or a value of one."""
    groups = {key: below for key, below in config.items() if isinstance(below, Mapping)}
    values = {f"{group}.{key}": value for group, below in groups.items() for key, value in below.items()}
    for key, node in (groups | values).items():
        if isinstance(node, Mapping) and "_target_" in node:
            yield key, node


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {fmt.plain(item)}" for key, item in value.items() if item not in (None, ""))
    return ", ".join(fmt.plain(item) for item in value) if isinstance(value, list) else fmt.plain(value)


_MAX_PAIRS = 9  # in one table, which has the width of a page


def error_tables(errors: Mapping[str, pd.DataFrame]) -> list[Table]:
    """Metrics x pairs: real -> simulated, with the signed error below. Of many pairs several tables."""
    labels = list(errors)
    return [_error_table(errors, labels[i : i + _MAX_PAIRS]) for i in range(0, len(labels), _MAX_PAIRS)]


def _error_table(errors: Mapping[str, pd.DataFrame], labels: Sequence[str]) -> Table:
    rows = []
    for index, path in enumerate(next(iter(errors.values()))["metric"]):
        metric = metric_of(path)
        cells = [Cell(metric.label, kind="head")]
        for label in labels:
            real, sim, error = (_float(errors[label][name].iloc[index]) for name in ("real", "sim", "error"))
            written = [metric.write(real), metric.write(sim)]
            said = fmt.NOTHING if error is None else fmt.change(100 * error)
            cells.append(Cell(" → ".join(written), (said,), "strong"))
        rows.append(tuple(cells))
    caption = "Each metric, real → simulated, and below it the signed relative error, (sim − real) / real"
    return Table(caption, ("metric", *labels), tuple(rows))


def side_by_side(pairs: Sequence[Pair], engines: Sequence[str]) -> Table:
    """Policies and metrics x engines: the simulated value, and that of each engine."""
    found: dict[Path, dict[str, Run]] = {}
    for pair in pairs:
        found.setdefault(pair.sim.path, {"sim": pair.sim})[engine_of(pair.real)] = pair.real
    names = {id(run): arm.name for arm in infer_arms([runs["sim"] for runs in found.values()]) for run in arm.runs}
    rows = []
    for runs in found.values():
        for metric in LATENCY:
            values = [metric.of(runs[name]) if name in runs else None for name in ("sim", *engines)]
            cells = [Cell(fmt.NOTHING if value is None else fmt.seconds(value)) for value in values]
            policy = (names[id(runs["sim"])],) if len(found) > 1 else ()
            rows.append((Cell(metric.label, policy, "head"), *cells))
    return Table("The same trace and policy, simulated and on each engine", ("metric", "sim", *engines), tuple(rows))


def request_error_table(errors: Mapping[str, pd.DataFrame]) -> Table:
    """Latencies and pairs x errors of single requests."""
    rows = []
    for label, frame in errors.items():
        for item in frame.to_dict("records"):
            texts = [_float(item[name]) for name in ("median_error", "abs_error_p90", "abs_error_p99")]
            median, *tails = [fmt.NOTHING if value is None else fmt.change(100 * value) for value in texts]
            head = Cell(TIMES[str(item["metric"])], (label,) if len(errors) > 1 else (), "head")
            counts = (Cell(fmt.number(item["num"])), Cell(fmt.number(item["num_unmatched"])))
            rows.append((head, *counts, Cell(median), *[Cell(tail.lstrip("+")) for tail in tails]))
    headers = ("latency", "requests", "in one run only", "median error", "P90 of |error|", "P99 of |error|")
    return Table("Error of single requests, matched by id", headers, tuple(rows))


def ranking_table(ranking: pd.DataFrame, load: str) -> Table:
    """One row for each metric: Kendall's tau of the policies' order, if the engine distinguishes any; both winners; and
    whether these are the same, if the engine distinguishes the best from the second."""
    rows = []
    for item in ranking.to_dict("records"):
        told_apart = item["num_told_apart"]
        tau = _float(item["kendall_tau"]) if told_apart else None
        same = {True: "yes", False: "no"}[item["same_winner"]] if item["winner_is_clear"] else fmt.NOTHING
        cells = [metric_of(str(item["metric"])).label, fmt.number(item["num_policies"]), fmt.number(tau)]
        cells.append(f"{item['num_same_order']} of {told_apart}" if told_apart else "none told apart")
        cells += [winner_text(item[name]) for name in ("sim_winner", "real_winner")]
        rows.append((Cell(cells[0], kind="head"), *[Cell(text) for text in cells[1:]], Cell(same)))
    headers = ("metric", "policies", "Kendall's τ", "pairs ordered alike", "best in sim", "best in real", "same")
    caption = (
        f"Do simulator and real engine rank the policies alike{f' at {load}' if load else ''}? "
        "Kendall's τ is 1 for the same order, 0 for unrelated orders and −1 for the reverse."
    )
    return Table(caption, headers, tuple(rows))


def runs_table(loads: Mapping[str, Sequence[Arm]], links: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(arm, load and replicate, link) of every run that counts (see `counted`). loads: the arms at each."""
    name_of = replicate_names([run for arms in loads.values() for arm in arms for run in arm.runs])
    return [
        (arm.name, ", ".join(filter(None, (load, name_of(run)))), links[str(run.path)])
        for load, arms in loads.items() for arm in arms for run in counted(arm)
    ]  # fmt: skip


def replicate_names(every: Sequence[Run]) -> Callable[[Run], str]:
    """Returns the function that names the replicate of a run of `every`: by its values of the trace's settings that are
    declared as replicates, and its seed, if runs differ in them. It reads all configurations, once."""
    keys = [key for key in swept_keys(every) if key.split(".")[0] == "trace" and not is_seed(key)]
    stated = stated_replicates(every)
    keys = [key for key in keys if any(key.startswith(name) for name in stated)]
    has_seeds = len({one.manifest.get("seed") for one in every}) > 1 or not keys

    def name_of(run: Run) -> str:
        told = [fmt.plain(run.flat_config.get(key)) for key in keys]
        return ", ".join([*told, *([f"seed {fmt.plain(run.manifest.get('seed'))}"] if has_seeds else [])])

    return name_of


def _float(value: Any) -> float | None:
    return None if value is None or value != value else float(value)
