"""The errors of the simulator against the real engine: of requests, metrics and steps, and in the ranking of policies.

Errors are signed and relative to the real run: (sim - real) / real. Only runs of one trace are matched. They do not
take the same steps, so steps are compared by shape. A cell is a region together with powers of two of decodes, prefill
tokens and context; its median in the one run is compared with its median in the other. Steps of cells that only one run
has are left out and counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.comparison.arms import decided_alike, grouped, num_repeats
from analysis.load import Run, same_trace
from analysis.measures.metrics import itl_pooled, request_metrics
from analysis.measures.statistics import largest_spread, mean_of_all, widened
from analysis.measures.summary import summary_value
from analysis.measures.survival import distribution
from analysis.reading.frames import numbers
from analysis.reading.rows import FloatArray
from testbed.errors import RunFolderError

LATENCY_METRICS = ("ttft_s", "tpot_s", "e2e_s")  # one value for each request
DISTRIBUTIONS = ("ttft_s", "tpot_s", "itl_s", "e2e_s")  # of a run; ITL pools the gaps of all requests
STATISTICS = ("mean", "p50", "p90", "p99")
RATES = ("requests_per_s", "output_tokens_per_s")
FIDELITY_METRICS: dict[str, int] = {  # dotted path in a summary -> +1 if more is better, -1 if less is
    **{f"{metric}.{statistic}": -1 for metric in DISTRIBUTIONS for statistic in STATISTICS},
    **{f"throughput.{rate}": 1 for rate in RATES},
}


def match_requests(sim: Run, real: Run) -> pd.DataFrame:
    """One row for each request: request_id, and with the prefixes sim_ and real_ the columns of `request_metrics`,
    num_output_tokens, num_cached_tokens and num_preemptions. Requests of the warm-up of either run are left out.

    Raises RunFolderError if the traces or the request ids of the two runs differ.
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
    matched = frames[0].add_prefix("sim_").join(frames[1].add_prefix("real_"))
    for run in (sim, real):
        matched = matched[matched.index.isin(run.counted[0].codes("request_id").texts())]
    return matched.reset_index()


def pair_of(matched: pd.DataFrame, name: str) -> tuple[FloatArray, FloatArray]:
    """(real, simulated) values of a latency in seconds, for the requests that have it, above 0, in both runs."""
    real, sim = numbers(matched, f"real_{name}"), numbers(matched, f"sim_{name}")
    good = (real > 0) & (sim > 0)
    return real[good], sim[good]


def error_table(sim: Run, *reals: Run) -> pd.DataFrame:
    """One row for each of `FIDELITY_METRICS`: metric, sim, real, error (signed, relative; NaN if the real value is 0).
    NaN means not reached. Of a run whose clients did not stream all answers, latencies are of those that they did.

    reals: the real run and its repeats, of which the mean is taken."""
    same_trace([sim, *reals])
    values = [{path: _mean(runs, path) for path in FIDELITY_METRICS} for runs in ([sim], reals)]
    if whole := set().union(*map(_unstreamed, reals)):
        ids = [name for name in sim.requests["request_id"] if name not in whole]
        for found, runs in zip(values, ([sim], reals), strict=True):
            parts = [_part_values(run, ids) for run in runs]
            found |= {path: mean_of_all([part[path] for part in parts]) for path in parts[0]}
            found["throughput.output_tokens_per_s"] = None
    return _errors(*values)


def _unstreamed(real: Run) -> set[str]:
    """The requests that ended well, and whose first token has no instant."""
    frame = real.requests
    return set(frame["request_id"][frame["first_token_ns"].isna() & frame["e2e_s"].notna()])


def _mean(runs: Sequence[Run], path: str) -> float | None:
    """The mean of a metric over equal runs; None if a run has no value."""
    return mean_of_all([summary_value(run.summary, path) for run in runs])


def _errors(sim: Mapping[str, float | None], real: Mapping[str, float | None]) -> pd.DataFrame:
    table = pd.DataFrame({"sim": sim, "real": real}, dtype=float).rename_axis("metric").reset_index()
    return table.assign(error=(table["sim"] - table["real"]) / table["real"].replace(0.0, np.nan))


def worst_errors(tables: Iterable[pd.DataFrame]) -> dict[str, float]:
    """Metric -> the largest absolute error in any of the `error_table`s; without metrics that are never reached."""
    errors = [table.set_index("metric")["error"].abs() for table in tables]
    return pd.concat(errors).groupby(level=0, sort=False).max().dropna().to_dict() if errors else {}


def part_errors(sim: Run, real: Run, request_ids: Collection[str]) -> pd.DataFrame:
    """Like `error_table`, but only of latencies, and only of these requests."""
    same_trace([sim, real])
    return _errors(*[_part_values(run, request_ids) for run in (sim, real)])


def _part_values(run: Run, request_ids: Collection[str]) -> dict[str, float | None]:
    frame = run.requests[run.requests["request_id"].isin(list(request_ids))]
    metrics = request_metrics(frame)
    each = {name: itl_pooled(frame) if name == "itl_s" else numbers(metrics, name) for name in DISTRIBUTIONS}
    described = {name: distribution(values) for name, values in each.items()}
    return {f"{name}.{statistic}": described[name][statistic] for name in DISTRIBUTIONS for statistic in STATISTICS}


def request_errors(matched: pd.DataFrame) -> pd.DataFrame:
    """One row for each latency, over matched requests: num, median signed error, P90 and P99 of the absolute error.

    `num_unmatched` counts the requests that have the latency in only one of the two runs.
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
    """Metric -> the largest `spread` of equal runs over the groups; no entry without repeats. groups: real runs of the
    same trace and policy, in any order."""
    for runs in groups:
        same_trace(runs)
    found = {
        path: largest_spread([summary_value(run.summary, path) for run in runs] for runs in groups)
        for path in FIDELITY_METRICS
    }
    return {path: noise for path, noise in found.items() if noise is not None}


def noise_limits(groups: Sequence[Sequence[Run]]) -> dict[str, float]:
    """Metric -> the relative difference up to which policies are not told apart: `real_noise`, and more of it where
    there are few repeats."""
    return {path: widened(value, num_repeats(groups)) for path, value in real_noise(groups).items()}


def alike_policies(pairs: Mapping[str, Sequence[Run]]) -> list[list[str]]:
    """The policies in groups: those whose simulated runs, the first of each, took the same decisions in the same time,
    so that a simulator has nothing to rank. The real runs are not asked: these decide by when a request comes in, and
    differ under one policy, too."""
    return list(grouped(pairs, lambda name: _decided(pairs[name][0])).values())


def equal_runs(pairs: Mapping[str, Sequence[Run]]) -> list[list[Run]]:
    """The real runs in groups of those that repeat each other: under one policy, or under `alike_policies`."""
    return [[real for name in names for real in pairs[name][1:]] for names in alike_policies(pairs)]


def _decided(sim: Run) -> tuple[str, float | None]:
    return decided_alike(sim), summary_value(sim.summary, "e2e_s.mean")


def ranking_agreement(
    pairs: Mapping[str, Sequence[Run]],
    metrics: Sequence[str] | None = None,
    noise: Mapping[str, float] | None = None,
    margin: float = 0.02,
) -> pd.DataFrame:
    """Whether the simulator ranks policies as the real engine does; one row for each metric.

    `pairs`: policy -> its sim run, its real run and the repeats of that (of which the mean is taken), all on one trace.
    `alike_policies` are one, whose name has all of theirs; their real runs are repeats of each other.
    noise: see `noise_limits`.
    Columns: metric, num_policies, kendall_tau (tau-b; None for fewer than two policies or all equal), sim_winner,
    real_winner ("": several are best, so that same_winner is False and there is no regret), same_winner, regret (how
    much worse the real value of sim_winner is than the best, as a share of the best), real_spread (largest real value
    over the smallest, minus 1), num_told_apart (pairs of policies whose real values differ by more than the metric's
    `noise` and more than `margin`), num_same_order (those pairs that sim orders the same way), winner_is_clear (whether
    the best real value differs that much from every other).
    """
    same_trace([run for pair in pairs.values() for run in pair])
    pairs = {
        " = ".join(names): [pairs[names[0]][0], *reals]
        for names, reals in zip(alike_policies(pairs), equal_runs(pairs), strict=True)
    }
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
    """The name with the best value (largest for sign +1, smallest for -1); "" if several have it."""
    most = max(sign * value for value in values)
    best = [name for name, value in zip(names, values, strict=True) if sign * value == most]
    return best[0] if len(best) == 1 else ""


def _order(values: Sequence[tuple[float, float]], threshold: float) -> dict[str, int]:
    """The number of pairs whose real values differ by more than `threshold`, and how many of them sim orders the same
    way. values: (sim, real) of each policy."""
    told_apart = same = 0
    for (sim_a, real_a), (sim_b, real_b) in combinations(values, 2):
        low, high = sorted((real_a, real_b))
        if high > low * (1.0 + threshold):
            told_apart += 1
            same += (sim_a - sim_b) * (real_a - real_b) > 0
    return {"num_told_apart": told_apart, "num_same_order": same}


# --- comparison of steps ---

REGIONS = ("decode", "prefill", "mixed")
_SHAPE = ["region", "decodes", "prefill", "context"]
_STRETCHES, _STEPS_EACH = 20, 25  # stretches of a run, to check whether step times drift; steps of each, at least


class StepErrors(NamedTuple):
    """Tables with one row for each group: group, num_steps, measured_s and sim_s (medians over those steps of their
    cells' medians), error (median over steps of their cell's signed error). num_compared, num_steps: counts of measured
    steps. paces: measured step time over the simulated median of its cell, as the median of each of 20 stretches of the
    measured run (float64 [20], in order; empty if the run is short). own_paces: the same for the simulated run, which
    shows the variation that comes from different shapes within a cell."""

    by_region: pd.DataFrame
    by_decodes: pd.DataFrame
    num_compared: int
    num_steps: int
    paces: FloatArray
    own_paces: FloatArray


def step_errors(sim: Run, real: Run) -> StepErrors | None:
    """The errors of the steps of `sim`; None if either run has no steps."""
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
    """The time and cell of each step that computed a token."""
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
    """The smallest power of two that is at least the value, for each value; 0 for 0."""
    return np.where(values > 0, 2.0 ** np.ceil(np.log2(np.maximum(values, 1))), 0.0)


def _by(joined: pd.DataFrame, column: str, groups: Iterable[Any]) -> pd.DataFrame:
    table = joined.groupby(column).agg(
        num_steps=("error", "size"), measured_s=("real_s", "median"), sim_s=("sim_s", "median"),
        error=("error", "median"),
    )  # fmt: skip
    table = table.reindex([group for group in groups if group in table.index])
    return table.rename_axis("group").reset_index()
