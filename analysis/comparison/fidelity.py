"""How far the simulator is from the real engine: by request, metric and step, and in the ranking of policies.

Errors are signed and relative to the real run: (sim - real) / real. Only runs of one trace are matched. They do not
take the same steps, so steps are compared by shape: those of one cell (region, and powers of two of decodes, prefill
tokens and context) on both sides, median against median. A cell that only one run has is left out and counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.load import Run, same_trace
from analysis.measures.metrics import itl_pooled, request_metrics
from analysis.measures.statistics import mean_of_all, spread
from analysis.measures.summary import summary_value
from analysis.measures.survival import distribution
from analysis.reading.frames import numbers
from analysis.reading.rows import FloatArray
from testbed.errors import RunFolderError

LATENCY_METRICS = ("ttft_s", "tpot_s", "e2e_s")  # that each request has
DISTRIBUTIONS = ("ttft_s", "tpot_s", "itl_s", "e2e_s")  # of a run; ITL is of all gaps together
STATISTICS = ("mean", "p50", "p90", "p99")
RATES = ("requests_per_s", "output_tokens_per_s")
FIDELITY_METRICS: dict[str, int] = {  # dotted path in a summary -> +1 where more is better, -1 where less is
    **{f"{metric}.{statistic}": -1 for metric in DISTRIBUTIONS for statistic in STATISTICS},
    **{f"throughput.{rate}": 1 for rate in RATES},
}


def match_requests(sim: Run, real: Run) -> pd.DataFrame:
    """One row a request: request_id, and sim_ and real_ of ttft_s, tpot_s, e2e_s, num_output_tokens and the like.

    RunFolderError when the traces differ, or the runs do not hold the same request ids.
    """
    same_trace([sim, real])
    frames = []
    for run in (sim, real):
        frame = request_metrics(run.requests).set_index("request_id")
        for name in ("num_output_tokens", "num_cached_tokens", "num_preemptions"):
            frame[name] = numbers(run.requests, name)
        frames.append(frame)
    only = set(frames[0].index) ^ set(frames[1].index)
    if only:
        raise RunFolderError(
            f"{sim.path} and {real.path}: {len(only)} requests are in one run only, the first {min(only)}; "
            "match runs of the same requests"
        )
    return frames[0].add_prefix("sim_").join(frames[1].add_prefix("real_")).reset_index()


def pair_of(matched: pd.DataFrame, name: str) -> tuple[FloatArray, FloatArray]:
    """(real, simulated) seconds of a latency, of the requests that have it in both runs."""
    real, sim = numbers(matched, f"real_{name}"), numbers(matched, f"sim_{name}")
    good = (real > 0) & (sim > 0)
    return real[good], sim[good]


def relative_error(sim: float | None, real: float | None) -> float | None:
    """(sim - real) / real; None where either is unknown or the real value is 0."""
    return None if sim is None or not real else (sim - real) / real


def error_table(sim: Run, *reals: Run) -> pd.DataFrame:
    """One row a metric of `FIDELITY_METRICS`: metric, sim, real, error (signed, relative; None: not reached).

    reals: one run, or one and its repeats, whose mean counts."""
    same_trace([sim, *reals])
    return _errors(*[{path: _mean(runs, path) for path in FIDELITY_METRICS} for runs in ([sim], reals)])


def _mean(runs: Sequence[Run], path: str) -> float | None:
    """Of a metric over equal runs; None: one of them has none."""
    return mean_of_all([summary_value(run.summary, path) for run in runs])


def _errors(sim: Mapping[str, float | None], real: Mapping[str, float | None]) -> pd.DataFrame:
    rows = [
        {"metric": path, "sim": sim[path], "real": real[path], "error": relative_error(sim[path], real[path])}
        for path in sim
    ]
    return pd.DataFrame(rows).astype({"sim": float, "real": float, "error": float})


def worst_errors(tables: Iterable[pd.DataFrame]) -> dict[str, float]:
    """Metric -> the largest absolute error that one of the `error_table`s has; of those that are reached."""
    worst: dict[str, float] = {}
    for table in tables:
        for path, error in table.set_index("metric")["error"].dropna().items():
            worst[str(path)] = max(worst.get(str(path), 0.0), abs(float(error)))
    return worst


def part_errors(sim: Run, real: Run, request_ids: Collection[str]) -> pd.DataFrame:
    """As error_table, of the latencies of these requests only."""
    same_trace([sim, real])
    return _errors(*[_part_values(run, request_ids) for run in (sim, real)])


def _part_values(run: Run, request_ids: Collection[str]) -> dict[str, float | None]:
    frame = run.requests[run.requests["request_id"].isin(list(request_ids))]
    metrics = request_metrics(frame)
    each = {name: itl_pooled(frame) if name == "itl_s" else numbers(metrics, name) for name in DISTRIBUTIONS}
    described = {name: distribution(values) for name, values in each.items()}
    return {f"{name}.{statistic}": described[name][statistic] for name in DISTRIBUTIONS for statistic in STATISTICS}


def request_errors(matched: pd.DataFrame) -> pd.DataFrame:
    """One row a latency over matched requests: num, median signed error, P90 and P99 of the absolute error.

    `num_unmatched` are the requests that have the latency in one of the two runs only.
    """
    rows = []
    for name in LATENCY_METRICS:
        sim, real = numbers(matched, f"sim_{name}"), numbers(matched, f"real_{name}")
        both = ~np.isnan(sim) & (real > 0)
        error = (sim[both] - real[both]) / real[both] if both.any() else np.array([np.nan])
        p90, p99 = np.quantile(np.abs(error), [0.9, 0.99]).tolist()
        counts = {"num": int(both.sum()), "num_unmatched": int((np.isnan(sim) ^ np.isnan(real)).sum())}
        errors = {"median_error": float(np.median(error)), "abs_error_p90": p90, "abs_error_p99": p99}
        rows.append({"metric": name, **counts, **errors})
    return pd.DataFrame(rows)


def real_noise(groups: Sequence[Sequence[Run]]) -> dict[str, float]:
    """Metric -> how far equal runs are apart (`spread`), at most over the groups; without repeats nothing. A group:
    equal real runs (same trace, same policy), in any order."""
    noise: dict[str, float] = {}
    for runs in groups:
        same_trace(runs)
        for path in FIDELITY_METRICS:
            values = [value for run in runs if (value := summary_value(run.summary, path)) is not None]
            if len(values) > 1:
                noise[path] = max(noise.get(path, 0.0), spread(values))
    return noise


def ranking_agreement(
    pairs: Mapping[str, Sequence[Run]],
    metrics: Sequence[str] | None = None,
    noise: Mapping[str, float] | None = None,
    margin: float = 0.02,
) -> pd.DataFrame:
    """Does the simulator rank policies as the real engine does? One row a metric.

    `pairs`: policy -> its sim run, its real run and the repeats of that (their mean counts), all on one trace.
    Columns: metric, num_policies, kendall_tau (tau-b; None for fewer than two policies or all equal), sim_winner,
    real_winner ("": several are best, so that same_winner is False and there is no regret), same_winner, regret (by
    what share of the best real value sim_winner's is worse; 0 if it is that), real_spread (largest real value over the
    smallest, minus 1); num_told_apart: pairs of policies whose real values differ by more than the metric's `noise` and
    by more than `margin`; num_same_order: those that sim orders alike; winner_is_clear: whether the best real value is
    so far from every other.
    """
    same_trace([run for pair in pairs.values() for run in pair])
    rows: list[dict[str, Any]] = []
    for path in metrics or tuple(FIDELITY_METRICS):
        values = {name: (_mean([sim], path), _mean(reals, path)) for name, (sim, *reals) in pairs.items()}
        known = {name: (sim, real) for name, (sim, real) in values.items() if sim is not None and real is not None}
        row: dict[str, Any] = {"metric": path, "num_policies": len(known), "kendall_tau": None}
        row |= {"sim_winner": None, "real_winner": None, "same_winner": None, "regret": None, "real_spread": None}
        row |= {"num_told_apart": 0, "num_same_order": 0, "winner_is_clear": False}
        if len(known) >= 2:
            sign = FIDELITY_METRICS.get(path, -1)
            sims, reals = zip(*known.values(), strict=True)
            if len(set(sims)) > 1 and len(set(reals)) > 1:
                from scipy import stats  # slow to import

                row["kendall_tau"] = float(stats.kendalltau(sims, reals).statistic)
            names = list(known)
            picked, best = (_winner(names, values, sign) for values in (sims, reals))
            row |= {"sim_winner": picked, "real_winner": best, "same_winner": best != "" and picked == best}
            row["real_spread"] = max(reals) / min(reals) - 1.0 if min(reals) > 0 else None
            if picked and best and known[best][1] > 0:
                row["regret"] = abs(known[picked][1] - known[best][1]) / known[best][1]
            threshold = max(margin, (noise or {}).get(path, 0.0))
            row |= _order(list(known.values()), threshold)
            first, second = sorted(reals, key=lambda value: -sign * value)[:2]
            row["winner_is_clear"] = max(first, second) > min(first, second) * (1.0 + threshold)
        rows.append(row)
    return pd.DataFrame(rows)


def _winner(names: Sequence[str], values: Sequence[float], sign: int) -> str:
    """Who has the largest value, times `sign`; "" where several have."""
    most = max(sign * value for value in values)
    best = [name for name, value in zip(names, values, strict=True) if sign * value == most]
    return best[0] if len(best) == 1 else ""


def _order(values: Sequence[tuple[float, float]], threshold: float) -> dict[str, int]:
    """Of the pairs of (sim, real) whose real values are more than `threshold` apart, how many sim orders alike."""
    told_apart = same = 0
    for (sim_a, real_a), (sim_b, real_b) in combinations(values, 2):
        low, high = sorted((real_a, real_b))
        if high > low * (1.0 + threshold):
            told_apart += 1
            same += (sim_a - sim_b) * (real_a - real_b) > 0
    return {"num_told_apart": told_apart, "num_same_order": same}


# --- step by step ---

REGIONS = ("decode", "prefill", "mixed")
_SHAPE = ["region", "decodes", "prefill", "context"]
_STRETCHES, _STEPS_EACH = 20, 25  # of a run, to see whether a step takes as long in all of it


class StepErrors(NamedTuple):
    """One row each group: group, num_steps, measured_s and sim_s (medians over those steps of their cells' medians),
    error (median over steps of the signed error of their cell). num_compared, num_steps: of the measured steps. paces:
    how many times as long as simulated a step of its shape took, the median of each of 20 stretches of the measured run
    (float64 [20], in order; empty where they would be short). own_paces: the same of the simulated run against itself:
    what comes of cells that are not one shape."""

    by_region: pd.DataFrame
    by_decodes: pd.DataFrame
    num_compared: int
    num_steps: int
    paces: FloatArray
    own_paces: FloatArray


def step_errors(sim: Run, real: Run) -> StepErrors | None:
    """None where either run has no steps."""
    cells = [_cells(run) for run in (sim, real)]
    if any(frame.empty for frame in cells):
        return None
    medians = cells[0].groupby(_SHAPE)["time_s"].median().rename("sim_s")
    real_medians = cells[1].groupby(_SHAPE)["time_s"].median().rename("real_s")
    joined = cells[1].join(medians, on=_SHAPE, how="inner").join(real_medians, on=_SHAPE)
    joined["error"] = (joined["sim_s"] - joined["real_s"]) / joined["real_s"]
    only_decodes = joined[joined["region"] == "decode"]
    return StepErrors(
        _by(joined, "region", REGIONS), _by(only_decodes, "decodes", sorted(only_decodes["decodes"].unique())),
        len(joined), len(cells[1]), _paces(joined.sort_index()), _paces(cells[0].join(medians, on=_SHAPE)),
    )  # fmt: skip


def _paces(steps: pd.DataFrame) -> FloatArray:
    if len(steps) < _STRETCHES * _STEPS_EACH:
        return np.empty(0)
    ratios = numbers(steps, "time_s") / numbers(steps, "sim_s")
    return np.array([np.median(part) for part in np.array_split(ratios, _STRETCHES)])


def _cells(run: Run) -> pd.DataFrame:
    """The steps that computed something: their time and cell."""
    steps = run.steps
    time_s = (numbers(steps, "end_ns") - numbers(steps, "start_ns")) / 1e9
    decodes, prefill = numbers(steps, "num_decode_tokens"), numbers(steps, "num_prefill_tokens")
    region = np.where(prefill == 0, "decode", np.where(decodes == 0, "prefill", "mixed"))
    frame = pd.DataFrame({
        "region": region, "decodes": _power(decodes), "prefill": _power(prefill),
        "context": _power(numbers(steps, "decode_context_tokens")), "time_s": time_s,
    })  # fmt: skip
    return frame[((decodes > 0) | (prefill > 0)) & (time_s > 0)]


def _power(values: FloatArray) -> FloatArray:
    """The power of two that reaches each value; 0 for 0."""
    return np.where(values > 0, 2.0 ** np.ceil(np.log2(np.maximum(values, 1))), 0.0)


def _by(joined: pd.DataFrame, column: str, groups: Iterable[Any]) -> pd.DataFrame:
    table = joined.groupby(column).agg(
        num_steps=("error", "size"), measured_s=("real_s", "median"), sim_s=("sim_s", "median"),
        error=("error", "median"),
    )  # fmt: skip
    table = table.reindex([group for group in groups if group in table.index])
    return table.rename_axis("group").reset_index()
