"""What the step records say about time: KV usage, queue lengths, busy share, and where the time went.

A step's counts are "after the plan": they hold from its start to its end, and on until the next step's start when work
remains. When no request is in the system between two steps, the engine is idle: nothing runs, waits or holds a block
(cached, unreferenced blocks count as free).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.frames import FloatArray, numbers

TIME_PARTS = ("schedule", "prepare", "swap", "forward", "sample")


def run_end_ns(requests: pd.DataFrame, steps: pd.DataFrame) -> float:
    """The end of the last step; without steps the last instant of any request. 0 for an empty run."""
    if len(steps):
        return float(numbers(steps, "end_ns").max())
    instants = [numbers(requests, name) for name in ("arrival_ns", "first_token_ns", "finish_ns")]
    known = np.concatenate(instants)
    return float(known[~np.isnan(known)].max(initial=0.0))


def spans(requests: pd.DataFrame, steps: pd.DataFrame) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The intervals for which each step's counts hold: (start ns, until ns, idle-from ns), each `[num_steps]`.

    `until` is where the values stop to hold; between `until` and the next start everything is zero.
    """
    start, end = numbers(steps, "start_ns"), numbers(steps, "end_ns")
    following = np.append(start[1:], end[-1:])
    seen = np.sort(np.fmax(numbers(requests, "queued_ns"), numbers(requests, "arrival_ns")))
    finish = numbers(requests, "finish_ns")
    present = np.searchsorted(seen, end, side="right") - np.searchsorted(np.sort(finish), end, side="right")
    until = np.where(present > 0, np.fmax(following, end), end)
    return start, until, following


def time_weighted_mean(
    value: FloatArray, start: FloatArray, until: FloatArray, low: float, high: float
) -> float | None:
    """Mean over [low, high] of a function that is `value[k]` on [start[k], until[k]) and 0 elsewhere."""
    if high <= low:
        return None
    weight = np.clip(np.minimum(until, high) - np.maximum(start, low), 0.0, None)
    return float((value * weight).sum() / (high - low))


def kv_usage(steps: pd.DataFrame, num_gpu_blocks: int | None) -> FloatArray | None:
    """Share of the GPU's KV blocks in use after each plan `[num_steps]`; None where the pool's size is unknown."""
    if not num_gpu_blocks:
        return None
    return np.asarray(1.0 - numbers(steps, "free_gpu_blocks") / num_gpu_blocks, dtype=np.float64)


def step_metrics(
    requests: pd.DataFrame, steps: pd.DataFrame, num_gpu_blocks: int | None, start_ns: float, end_ns: float
) -> dict[str, Any]:
    """The part of a summary that comes from steps, over [start_ns, end_ns]."""
    names = ("mean_running", "mean_waiting", "mean_swapped")
    result: dict[str, Any] = {"num_steps": len(steps), "kv": {"utilisation_mean": None, "utilisation_peak": None}}
    result |= dict.fromkeys((*names, "busy_share", "time_s"))
    if not len(steps) or end_ns <= start_ns:
        return result
    start, until, _ = spans(requests, steps)
    usage = kv_usage(steps, num_gpu_blocks)
    if usage is not None:
        result["kv"]["utilisation_mean"] = time_weighted_mean(usage, start, until, start_ns, end_ns)
        result["kv"]["utilisation_peak"] = float(usage[until > start_ns].max(initial=0.0))
    for name in names:
        count = numbers(steps, "num_" + name.removeprefix("mean_"))
        result[name] = time_weighted_mean(count, start, until, start_ns, end_ns)
    busy = time_weighted_mean(np.ones(len(steps)), start, numbers(steps, "end_ns"), start_ns, end_ns)
    result["busy_share"] = busy
    result["time_s"] = time_parts(steps, start_ns, end_ns)
    return result


def time_parts(steps: pd.DataFrame, start_ns: float, end_ns: float) -> dict[str, float]:
    """Where the time went, in seconds: each part of the steps, what of their length no part explains, and idle.

    Parts may overlap (transfers beside compute); `overlap` is by how much their sum exceeds the steps' length.
    """
    start, end = numbers(steps, "start_ns"), numbers(steps, "end_ns")
    inside = (end > start_ns) & (start < end_ns)
    length_s = (end - start)[inside] / 1e9
    unexplained = length_s.copy()
    parts: dict[str, float] = {}
    for name in TIME_PARTS:
        part_s = np.nan_to_num(numbers(steps, f"{name}_ns")[inside]) / 1e9
        parts[name] = float(part_s.sum())
        unexplained -= part_s
    idle_s = max((end_ns - start_ns) / 1e9 - float(length_s.sum()), 0.0)
    other = float(np.clip(unexplained, 0.0, None).sum())
    return parts | {"other": other, "overlap": float(np.clip(-unexplained, 0.0, None).sum()), "idle": idle_s}
