"""A fleet's records, replica by replica: steps of several engines are no sequence, so each is measured by itself.

Of the fleet: counts of sequences (running, waiting, swapped), steps and times are sums over the replicas; shares (KV
utilisation, busy) are means over the replicas, idle ones included; the KV peak is the highest of any replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from analysis.frames import FloatArray, numbers, texts
from analysis.occupancy import step_metrics

COMPLETED = ("stop", "length")
SUMS = ("num_steps", "mean_running", "mean_waiting", "mean_swapped")


def split(
    requests: pd.DataFrame, steps: pd.DataFrame, manifest: Mapping[str, Any]
) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """The requests and the steps of each replica, those included that did nothing; steps in order of time."""
    num = max(int(manifest.get("num_replicas") or 1), 1)
    if num == 1:
        return [(requests, steps)]
    whose, of_step = numbers(requests, "replica"), numbers(steps, "replica")
    parts = []
    for number in range(num):
        own = steps[of_step == number]
        parts.append((requests[whose == number], own.sort_values("start_ns", kind="stable")))
    return parts


def fleet_step_metrics(
    parts: list[tuple[pd.DataFrame, pd.DataFrame]], num_gpu_blocks: int | None, start_ns: float, end_ns: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """`step_metrics` of the fleet, and of each replica, over [start_ns, end_ns]. num_gpu_blocks: of one replica."""
    each = [step_metrics(requests, steps, num_gpu_blocks, start_ns, end_ns) for requests, steps in parts]
    if len(each) == 1:
        return each[0], each
    for one, (_, steps) in zip(each, parts, strict=True):
        if not len(steps) and end_ns > start_ns:
            _be_idle(one, (end_ns - start_ns) / 1e9, knows_pool=bool(num_gpu_blocks))
    fleet: dict[str, Any] = {name: _joined([one[name] for one in each], sum) for name in SUMS}
    fleet["busy_share"] = _joined([one["busy_share"] for one in each], _mean)
    fleet["kv"] = {
        "utilisation_mean": _joined([one["kv"]["utilisation_mean"] for one in each], _mean),
        "utilisation_peak": _joined([one["kv"]["utilisation_peak"] for one in each], max),
    }
    times = [one["time_s"] for one in each if one["time_s"] is not None]
    names = dict.fromkeys(name for time in times for name in time)
    fleet["time_s"] = {name: sum(time.get(name, 0.0) for time in times) for name in names} or None
    return fleet, each


def describe_replicas(
    parts: list[tuple[pd.DataFrame, pd.DataFrame]],
    each: list[dict[str, Any]],
    manifest: Mapping[str, Any],
    duration_s: float,
) -> dict[str, Any] | None:
    """What a summary says of each replica, and how evenly they were loaded; None where there is only one.

    requests_per_s and the token rates are of the whole time base, so they add up to the fleet's over a whole run.
    `imbalance` is the most of any replica over the mean (1: even); `jain`: Jain's index of the same.
    """
    if len(parts) == 1:
        return None
    rows = [_replica(*part, steps, duration_s) for part, steps in zip(parts, each, strict=True)]
    busy = np.array([row["busy_share"] or 0.0 for row in rows])
    tokens = np.array([row["num_computed_tokens"] for row in rows], dtype=np.float64)
    sent = np.array([row["num_requests"] for row in rows], dtype=np.float64)
    return {
        "num": len(rows),
        "router": manifest.get("router"),
        "imbalance": {"requests": _imbalance(sent), "computed_tokens": _imbalance(tokens), "busy": _imbalance(busy)},
        "jain": {"requests": _jain(sent), "computed_tokens": _jain(tokens), "busy": _jain(busy)},
        "each": rows,
    }


def _replica(requests: pd.DataFrame, steps: pd.DataFrame, metrics: dict[str, Any], duration_s: float) -> dict[str, Any]:
    done = np.isin(texts(requests, "finish_reason", "unfinished"), COMPLETED)
    started = requests["first_scheduled_ns"].notna().to_numpy(dtype=bool)
    prompt, output = numbers(requests, "num_prompt_tokens"), numbers(requests, "num_output_tokens")
    cached = np.nan_to_num(numbers(requests, "num_cached_tokens"))
    ttft = numbers(requests, "ttft_s")
    computed = numbers(steps, "num_prefill_tokens").sum() + numbers(steps, "num_decode_tokens").sum()
    return {
        "num_requests": len(requests),
        "num_finished": int(done.sum()),
        "num_computed_tokens": int(computed),
        "requests_per_s": done.sum() / duration_s if duration_s > 0 else None,
        "output_tokens_per_s": output.sum() / duration_s if duration_s > 0 else None,
        "prefix_hit_rate": cached[started].sum() / prompt[started].sum() if started.any() else None,
        "num_preemptions": int(numbers(requests, "num_preemptions").sum()),
        "ttft_mean_s": float(np.nanmean(ttft)) if (~np.isnan(ttft)).any() else None,
        **{name: metrics[name] for name in ("num_steps", "mean_running", "mean_waiting", "busy_share", "kv")},
    }


def _be_idle(metrics: dict[str, Any], length_s: float, *, knows_pool: bool) -> None:
    """A replica that took no step was idle all the time."""
    metrics |= {"mean_running": 0.0, "mean_waiting": 0.0, "mean_swapped": 0.0, "busy_share": 0.0}
    metrics["time_s"] = {"idle": length_s}
    if knows_pool:
        metrics["kv"] = {"utilisation_mean": 0.0, "utilisation_peak": 0.0}


def _joined(values: list[Any], join: Callable[[list[Any]], Any]) -> Any:
    """None where one is not known."""
    return None if any(value is None for value in values) else join(values)


def _mean(values: list[float]) -> float:
    return float(np.mean(values))


def _imbalance(values: FloatArray) -> float | None:
    return float(values.max() / values.mean()) if values.sum() > 0 else None


def _jain(values: FloatArray) -> float | None:
    """(sum x)^2 / (n sum x^2): 1 if all are equal, 1/n if one has all."""
    return float(values.sum() ** 2 / (values.size * (values**2).sum())) if values.sum() > 0 else None
