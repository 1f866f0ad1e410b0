"""Measures each replica of a fleet separately, as steps of several engines are not one sequence of steps.

Numbers of the fleet: counts of sequences (running, waiting, swapped), steps and times are sums over the replicas.
Shares (KV utilisation, busy) are means over the replicas, idle ones included. The KV peak is the highest of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from analysis.measures.metrics import jain_index
from analysis.measures.occupancy import STEPS_READ, Occupancy, fragmentation
from analysis.measures.statistics import mean_of_all
from analysis.reading.request_columns import Requests, Rule
from analysis.reading.rows import Rows
from analysis.reading.timeline import step_runs

FEW = 10  # requests per replica, on average; with fewer, a replica may get none by chance
SUMS = ("num_steps", "mean_running", "mean_waiting", "mean_swapped")


def split(requests: Requests, manifest: Mapping[str, Any]) -> list[Requests]:
    """The requests of each replica, including replicas that served none."""
    num = max(int(manifest.get("num_replicas") or 1), 1)
    if num == 1:
        return [requests]
    return [requests.where(of_replica(number)) for number in range(num)]


def of_replica(number: int) -> Rule:
    """The rule that selects the requests of one replica."""
    return lambda piece: piece.numbers("replica") == number


def measure(
    parts: list[Requests], steps: Rows, manifest: Mapping[str, Any], start_ns: int, end_ns: int
) -> list[Occupancy]:
    """The steps of each replica, summed up over [start_ns, end_ns]."""
    pool = manifest.get("num_gpu_blocks"), manifest.get("block_size")  # of one replica
    each = [Occupancy(part, *pool, start_ns, end_ns) for part in parts]
    for number, run in step_runs(steps, STEPS_READ, range(len(parts)) if len(parts) > 1 else None):
        each[number].add(run)
    return each


def fleet_step_metrics(measured: list[Occupancy]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The part of a summary that comes from steps: for the fleet, and for each replica."""
    is_recorded = any(one.is_recorded for one in measured)  # else steps were not kept, or nothing ran
    each = [one.metrics(is_recorded=is_recorded) for one in measured]
    if len(each) == 1:
        return each[0], each
    fleet: dict[str, Any] = {name: _joined([one[name] for one in each], sum) for name in SUMS}
    fleet["busy_share"] = mean_of_all([one["busy_share"] for one in each])
    fleet["kv"] = {
        "utilisation_mean": mean_of_all([one["kv"]["utilisation_mean"] for one in each]),
        "utilisation_peak": _joined([one["kv"]["utilisation_peak"] for one in each], max),
        **fragmentation(measured),
    }
    times = [one["time_s"] for one in each]
    fleet["time_s"] = None if None in times else {name: sum(time[name] for time in times) for name in times[0]}
    return fleet, each


def describe_replicas(
    parts: list[Requests],
    rates: list[dict[str, Any]],
    measured: list[Occupancy],
    each: list[dict[str, Any]],
    manifest: Mapping[str, Any],
) -> dict[str, Any] | None:
    """The part of a summary about replicas: the numbers of each, and how evenly they were loaded; None if only one.

    rates: each replica's throughput, over the fleet's time, so that all add up to the fleet's. `imbalance` is the
    largest load of a replica over the mean (1: even); `jain`: Jain's index of the loads.
    """
    if len(parts) == 1:
        return None
    is_recorded = any(one.is_recorded for one in measured)
    rows = [
        _replica(part, rate, one.num_computed_tokens if is_recorded else None, metrics)
        for part, rate, one, metrics in zip(parts, rates, measured, each, strict=True)
    ]
    columns = {"requests": "num_requests", "computed_tokens": "num_computed_tokens", "busy": "busy_share"}
    loads = {name: np.array([row[of] or 0 for row in rows], dtype=np.float64) for name, of in columns.items()}
    return {
        "num": len(rows),
        "router": manifest.get("router"),
        "num_in_sessions": sum(part.sum(lambda piece: piece.is_known("session_id").sum()) for part in parts),
        "imbalance": {name: float(of.max() / of.mean()) if of.sum() > 0 else None for name, of in loads.items()},
        "jain": {name: jain_index(values) for name, values in loads.items()},
        "each": rows,
    }


def routing_notes(summary: Mapping[str, Any]) -> list[str]:
    """Warnings about how a fleet's requests were routed, one sentence each."""
    fleet = summary.get("replicas")
    if fleet is None:
        return []
    router, notes = fleet["router"], []
    idle = sum(one["num_requests"] == 0 for one in fleet["each"])
    if idle and summary["num_requests"] >= FEW * fleet["num"]:
        notes.append(f"{idle} of {fleet['num']} replicas served no request (router {router})")
    if str(router).rpartition(".")[2] in ("session_sticky", "SessionSticky") and not fleet["num_in_sessions"]:
        notes.append(f"no request was in a session: router {router} had none to keep together, and its `others` chose")
    return notes


def _replica(
    requests: Requests, rates: dict[str, Any], num_computed: int | None, metrics: dict[str, Any]
) -> dict[str, Any]:
    started = requests.where(lambda piece: piece.is_known("first_scheduled_ns"))
    prompt = started.sum(lambda piece: piece.numbers("num_prompt_tokens").sum())
    cached = started.sum(lambda piece: np.nansum(piece.numbers("num_cached_tokens")))
    num_ttft = requests.sum(lambda piece: piece.is_known("ttft_s").sum())
    ttft_s = requests.sum(lambda piece: np.nansum(piece.numbers("ttft_s")))
    num_unserved = requests.sum(
        lambda piece: (piece.reasons.among(("abort", "unfinished")) & ~piece.is_known("ttft_s")).sum()
    )  # a mean without them would flatter
    return {
        "num_requests": len(requests),
        "num_finished": requests.sum(lambda piece: piece.is_completed.sum()),
        "num_computed_tokens": num_computed,
        **{name: rates[name] for name in ("requests_per_s", "output_tokens_per_s")},
        "prefix_hit_rate": cached / prompt if len(started) else None,
        "num_preemptions": requests.sum(lambda piece: piece.whole("num_preemptions").sum()),
        "ttft_mean_s": ttft_s / num_ttft if num_ttft and not num_unserved else None,
        **{name: metrics[name] for name in ("num_steps", "mean_running", "mean_waiting", "busy_share", "kv")},
    }


def _joined(values: list[Any], join: Callable[[list[Any]], Any]) -> Any:
    """`join` of the values; None if one is unknown."""
    return None if any(value is None for value in values) else join(values)
