"""Sentences on the simulator and the real engine: errors, noise, the best policy on each, and what was not measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis import format as fmt
from analysis.comparison.arms import Arm, grouped, num_repeats
from analysis.comparison.compare import LATENCY, RATES, Comparison, engine_noise, metric_of, repeated
from analysis.comparison.fidelity import StepErrors, alike_policies, worst_errors
from analysis.comparison.pairs import Pair
from analysis.load import Run
from analysis.measures.statistics import ENOUGH
from analysis.reading.frames import numbers
from testbed.foreign_text import is_device

_MAX_MISSED = 3  # wrong picks that are named; the table has all
_TOO_NOISY = 0.3  # if equal real runs differ by more (not only in a tail), they hardly allow to judge a simulator
_ERRORS_TOLD = ("ttft_s.p50", "ttft_s.p99", "tpot_s.mean", "e2e_s.p50", "throughput.output_tokens_per_s")
_UNEVEN = 1.15  # on an idle machine, or scaled by a probe, parts of a run differ by at most 1.10
_ANOTHER = 1.12  # the same for a kind of step against its time when it was fitted
_ALIKE = 1.25  # largest over smallest of these ratios, if it is the machine; one kind that is off is a sim error
_OFTEN = 25  # steps of a kind that are enough to judge it
_PROBE = "on a CPU that others use too, measure and calibrate with backend.pace=probe_scaled"
UNMEASURED = (
    "How far the real engine differs from itself was not measured, so a difference may be its own noise: run an arm "
    "again on the same trace, and give both folders."
)


def engine_noise_said(loads: Mapping[str, Sequence[Arm]]) -> list[str]:
    """A sentence if measured arms are compared: the largest spread of repeats over loads, or that there are none."""
    measured = [arms for arms in loads.values() if len(arms) > 1 and not all(arm.runs[0].is_simulated for arm in arms)]
    if not measured:
        return []
    groups = [repeated(arms) for arms in measured]
    num = sum(len(runs) for group in groups for runs in group if len(runs) > 1)
    if not num:
        return [UNMEASURED]
    known = {metric.label: [engine_noise(arms, metric) for arms in measured] for metric in (*LATENCY, *RATES)}
    noise = {label: [one for one in found if one is not None] for label, found in known.items()}
    told = [f"{label} {fmt.percent(max(found))}" for label, found in noise.items() if found]
    also = _widened(min(filter(None, map(num_repeats, groups))))
    return [
        f"{num} runs are repeats on the real engine: their mean counts, as one run. They differ by up to "
        f"{fmt.listing(told)} (largest over smallest, minus 1); of a change within that{also} no claim is made."
    ]


def _widened(num: int) -> str:
    """A suffix for noise that is known from so few repeats that `statistics.widened` widens it; "" for others."""
    if not 0 < num < ENOUGH:
        return ""
    return f" (widened, as {'1 repeat hardly says' if num == 1 else f'{num} repeats hardly say'} how large it is)"


def too_noisy(noise: Mapping[str, float], *, is_scaled: bool) -> list[str]:
    """A warning of one sentence if equal real runs differ too much. noise: of each metric, see `fidelity.real_noise`.
    is_scaled: whether times are scaled by a probe."""
    largest, path = _largest(noise)
    if largest <= _TOO_NOISY:
        return []
    return [
        "The machine was too noisy for a comparison with the real engine: two equal real runs differed by up to "
        f"{fmt.percent(largest)} in {metric_of(path).label}. Run it again when the machine is idle"
        f"{'' if is_scaled else f'; {_PROBE}'}."
    ]


def pace_said(steps: StepErrors | None, *, is_fitted: bool, is_scaled: bool) -> tuple[str, ...]:
    """Warnings, one sentence each, if the machine may cause an error instead of the simulator: its speed varied, or
    differs from that at calibration. is_fitted: whether step times were fitted on the machine. is_scaled: whether times
    are scaled by a probe."""
    if steps is None or not (len(steps.paces) and len(steps.own_paces)):
        return ()
    said: tuple[str, ...] = ()
    advice = "" if is_scaled else f"; {_PROBE}"
    apart, own = (float(np.divide(*np.quantile(paces, (0.9, 0.1)))) for paces in (steps.paces, steps.own_paces))
    if apart > _UNEVEN * own:
        said = (
            f"Steps of the same shape took {apart:.2f} times as long in some parts of this run as in others (in the "
            f"simulation {own:.2f}): the machine that ran it was not as fast all along. Measure again when it is idle"
            f"{advice}.",
        )
    often = steps.by_region[steps.by_region["num_steps"] >= _OFTEN]
    ratios = 1.0 / (1.0 + numbers(often, "error"))
    if is_fitted and len(ratios) > 1 and ratios.max() < _ALIKE * ratios.min():
        pace = float(np.median(ratios))
        if ratios.min() > _ANOTHER or ratios.max() < 1.0 / _ANOTHER:
            said += (
                f"Steps of every kind took {pace:.2f} times as long as simulated: the machine was "
                f"{'slower' if pace > 1.0 else 'faster'} than when it was calibrated. Calibrate again, close to the run"
                f"{advice}.",
            )
    return said


def probe_of(manifest: Mapping[str, Any]) -> int | None:
    """The probe time to which a real run's times are scaled, ns; None: times are as measured."""
    found: int | None = ((manifest.get("replay") or {}).get("probe") or {}).get("probe_ns")
    return found


def unlike_clocks(probes: Iterable[int | None]) -> tuple[str, ...]:
    """A warning of one sentence if compared times are not scaled in the same way. probes: from `probe_of`."""
    found = sorted(set(probes), key=lambda probe: probe or 0)
    if len(found) < 2:
        return ()
    plain = "as they were measured"
    said = [plain if probe is None else f"scaled to a probe of {fmt.seconds(probe / 1e9)}" for probe in found]
    return (
        f"Times that are compared here are {fmt.listing(said)}: errors are off by as much. Give every run, and "
        "`testbed calibrate`, the same backend.pace and backend.probe_ns.",
    )


def _largest(noise: Mapping[str, float]) -> tuple[float, str]:
    """The largest noise of the reported metrics, without P99s, which depend on few requests; and its metric."""
    return max(((noise[path], path) for path in _ERRORS_TOLD if path in noise and "p99" not in path), default=(0.0, ""))


def winners(rankings: Mapping[str, pd.DataFrame], noise: Mapping[str, float]) -> Iterator[str]:
    """Whether the simulator picks the real engine's best policy, one sentence for each load. rankings: results of
    `fidelity.ranking_agreement` by load. noise: of equal real runs; empty if none was repeated."""
    by = "" if noise else " (each policy ran once, so whether that is noise is not known)"
    for load, ranking in ranked(rankings).items():
        told = ranking[ranking["winner_is_clear"]]
        where = f"At {load}" if load else "On this trace"
        if told.empty:
            yield f"{where} the real engine tells no policy apart as the best in any metric: no pick is checked."
            continue
        missed = [
            f"{metric_of(str(row['metric'])).label} ({_instead(row)})"
            for row in told[~told["same_winner"].astype(bool)].to_dict("records")
        ]
        yield (
            f"{where} the simulator picks the real engine's best policy in {len(told) - len(missed)} of the "
            f"{len(told)} metrics in which the engine tells it apart from the second best{by}"
            + (f"; not in {fmt.listing(missed, _MAX_MISSED)}." if missed else ".")
        )


def ranked(rankings: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The rankings of several policies; see `fidelity.alike_policies`."""
    return {load: ranking for load, ranking in rankings.items() if ranking["num_policies"].max() > 1}


def alike_said(pairs: Mapping[str, Sequence[Run]]) -> list[str]:
    """A sentence on policies that cannot be ranked; none if all can. pairs: as for `fidelity.ranking_agreement`, of one
    trace."""
    told = []
    for names in alike_policies(pairs):
        sims, reals = ([run for name in names for run in pairs[name][part]] for part in (slice(1), slice(1, None)))
        told_by = [any(run.summary["preemptions"]["total"] for run in runs) for runs in (sims, reals)]
        engine = " (the engine preempted there, and the simulation did not)" if told_by == [False, True] else ""
        told += [f"{fmt.listing(names)}{engine}"] if len(names) > 1 else []
    if not told:
        return []
    return [f"In the simulation these took the same decisions, so there is nothing to rank: {'; '.join(told)}."]


def _instead(row: Mapping[Any, Any]) -> str:
    """The policy that is best in the simulator, for a row of the ranking."""
    if row["sim_winner"] == "":
        return "where several are best"
    regret = "somewhat" if pd.isna(row["regret"]) else fmt.percent(row["regret"])
    return f"{row['sim_winner']}, on the engine {regret} behind {row['real_winner']}"


def num_picked(rankings: Mapping[str, pd.DataFrame]) -> tuple[int, int]:
    """Over the metrics and loads in which the engine has a clear best policy: how often the simulator picks it, and the
    number of them."""
    clear = [ranking[ranking["winner_is_clear"]]["same_winner"] for ranking in rankings.values()]
    return sum(int(same.sum()) for same in clear), sum(map(len, clear))


def fidelity_findings(
    pairs: Sequence[Pair],
    tables: Mapping[str, pd.DataFrame],
    rankings: Mapping[str, pd.DataFrame],
    margin: float,
    noise: Mapping[str, float],
) -> list[str]:
    """Sentences on the pairs: whether the best policy is the engine's, the error of each latency and rate, the engine's
    noise, the order of the policies. rankings: by load."""
    by_trace = grouped(pairs, lambda pair: pair.real.fingerprint).values()
    alike = [text for those in by_trace for text in alike_said({pair.label: pair.runs for pair in those})]
    said = [*dict.fromkeys(alike), *winners(rankings, noise)]
    num = num_repeats([pair.reals for pair in pairs])
    known = [path for path in _ERRORS_TOLD if path in noise]
    for pair in pairs:
        errors = tables[pair.label].set_index("metric")["error"].dropna()
        paths = [path for path in _ERRORS_TOLD if path in errors.index]
        shown = [f"{metric_of(path).label} {fmt.change(100 * errors[path])}" for path in paths]
        if shown:
            said.append(f"{pair.label}: the simulator's signed error is {fmt.listing(shown)}.")
    if known:
        told = fmt.listing([f"{metric_of(path).label} {fmt.percent(noise[path])}" for path in known])
        reach = "" if _largest(noise)[0] > _TOO_NOISY else ": a smaller error cannot be told from that"
        again = f"The real engine itself, run again on one trace under one policy ({fmt.count(num, 'repeat')}),"
        said.append(f"{again} differed by up to {told}{reach}.")
    elif pairs:
        said.append(UNMEASURED)
    for load, ranking in ranked(rankings).items():
        told_apart, same = int(ranking["num_told_apart"].sum()), int(ranking["num_same_order"].sum())
        limit = f"{margin * 100:g} %" + (f" and by more than its own noise{_widened(num)}" if noise else "")
        order = f"; the simulator orders {same} of these alike" if told_apart else ", so their order is not checked"
        said.append(
            f"Over all metrics{f' at {load}' if load else ''} the real engine tells {told_apart or 'no'} pairs of "
            f"policies apart by more than {limit}{order}."
        )
    return said


def smaller_than_error(rows: Sequence[Comparison], tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """A warning of one sentence on claimed changes that are smaller than the simulator's measured error in a metric."""
    worst = {path: 100 * error for path, error in worst_errors(tables.values()).items()}
    claims = [(row.metric, row.estimate) for row in rows if row.is_claim and row.metric.path in worst]
    claimed = Counter(metric for metric, _ in claims)
    smaller = Counter(
        metric
        for metric, change in claims
        if change is not None and change.scale == "log_ratio" and abs(change.percent()[0]) < worst[metric.path]
    )
    if not smaller:
        return []
    counted = [
        f"{num} of {claimed[metric]} in {metric.label} (error up to {fmt.significant(worst[metric.path], 2)} %)"
        for metric, num in smaller.items()
    ]
    return [
        "Changes that are smaller than the simulator's largest measured error in their metric, to be confirmed on the "
        f"real engine before they are relied on: {fmt.listing(counted)}. Errors that all arms share cancel in a "
        "change, so this is a caution and not a verdict."
    ]


def not_measured_on(arms: Sequence[Arm], pairs: Sequence[Pair]) -> dict[str, list[str]]:
    """The devices and the models of the arms that no real run used, under the keys "device" and "model"."""
    runs, reals = [run for arm in arms for run in arm.runs], [pair.real for pair in pairs]
    devices = {str(run.manifest.get("device")) for run in runs}
    models = {str(run.manifest.get("model")) for run in runs} - {str(real.manifest.get("model")) for real in reals}
    return {
        "device": sorted(name for name in devices if not any(_is_of(name, real) for real in reals)),
        "model": sorted(models),
    }


def _is_of(device: str, real: Run) -> bool:
    """Whether a real run used this device of the library; `cpu` is any CPU."""
    said = str(real.manifest.get("device"))
    is_cpu = (real.manifest.get("machine") or {}).get("gpu") is None or "thread" in said
    return is_cpu if device == "cpu" else is_device(device, said)


def not_measured(arms: Sequence[Arm], pairs: Sequence[Pair]) -> Iterator[str]:
    """Sentences on what the fidelity numbers do not cover."""
    runs = [run for arm in arms for run in arm.runs if run.is_simulated]
    if not runs:
        return
    if not pairs:
        yield "No real run was given. How far the simulated numbers are from a real engine was not measured."
        return
    for word, names in not_measured_on(arms, pairs).items():
        measured = sorted({str(pair.real.manifest.get(word)) for pair in pairs})
        if names:
            yield (
                f"The ablation simulates the {word} {fmt.listing(names)}; the real runs used {fmt.listing(measured)}. "
                "The error on the former was not measured."
            )
    traces = {run.fingerprint for run in runs}
    if not traces & {pair.real.fingerprint for pair in pairs}:
        yield "The real runs used another trace than the ablation; the errors on its own trace were not measured."
    if len(pairs) < len(arms):
        yield f"{len(pairs)} of the policies ran on the real engine; the errors of the others were not measured."
