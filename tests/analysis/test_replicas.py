"""Metrics of fleets: each replica is measured by itself, and sums and means are taken over them."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from analysis.measures.replicas import FEW, routing_notes, split
from analysis.measures.summary import summarise
from analysis.reading.request_columns import Requests
from testbed.records.schema import REQUEST_COLUMNS, STEP_COLUMNS
from tests.analysis.runs import request_row, simulate, table

S = 10**9


def twice() -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """A run, and the same run on two replicas at once: requests, steps, manifest; the summary of the one."""
    requests, steps, manifest = simulate(seed=3, num_blocks=100, rate=12)
    alone = summarise(requests, steps, manifest)

    def both(data: Any) -> pd.DataFrame:
        frame = data.to_pandas()
        return pd.concat([frame, frame.assign(replica=1)], ignore_index=True)

    doubled = both(requests)
    doubled["request_id"] = [
        f"{name}/{number}" for name, number in zip(doubled.request_id, doubled.replica, strict=True)
    ]
    mixed = both(steps).sort_values("start_ns", kind="stable")  # in no one order
    return doubled, mixed, manifest | {"num_replicas": 2, "router": "round_robin"}, alone


def test_two_equal_replicas_are_twice_one() -> None:
    requests, steps, manifest, alone = twice()
    fleet = summarise(requests, steps, manifest)
    for name in ("num_steps", "mean_running", "mean_waiting", "mean_swapped"):
        assert fleet[name] == pytest.approx(2 * alone[name])
    for name in ("busy_share", "kv", "prefix_hit_rate"):
        assert fleet[name] == alone[name]
    assert fleet["ttft_s"]["mean"] == pytest.approx(alone["ttft_s"]["mean"])
    assert fleet["time_s"] == pytest.approx({key: 2 * value for key, value in alone["time_s"].items()})
    assert fleet["throughput"]["requests_per_s"] == pytest.approx(2 * alone["throughput"]["requests_per_s"])
    assert alone["replicas"] is None
    replicas = fleet["replicas"]
    assert (replicas["num"], replicas["router"]) == (2, "round_robin")
    assert replicas["imbalance"] == replicas["jain"] == {"requests": 1.0, "computed_tokens": 1.0, "busy": 1.0}
    first, second = replicas["each"]
    assert first == second
    assert first["kv"] == alone["kv"]
    assert first["num_preemptions"] == alone["preemptions"]["total"] > 0
    told = first["prefix_hit_rate"], first["ttft_mean_s"], first["num_finished"]
    assert told == pytest.approx((alone["prefix_hit_rate"], alone["ttft_s"]["mean"], alone["num_finished"]))
    assert first["requests_per_s"] == pytest.approx(alone["throughput"]["requests_per_s"])
    assert {name: check["holds"] for name, check in fleet["checks"].items()} == {
        name: check["holds"] for name, check in alone["checks"].items()
    }


def test_a_replica_that_did_nothing_counts() -> None:
    row = {"arrival_ns": 0, "token_ns": [1 * S, 2 * S], "finish_ns": 2 * S, "finish_reason": "length", "ttft_s": 1.0}
    counts = {"num_running": 1, "num_waiting": 0, "num_swapped": 0, "num_preempted": 0, "num_ignored": 0}
    parts = dict.fromkeys(("schedule_ns", "prepare_ns", "swap_ns", "forward_ns", "sample_ns"), 0)
    step = {"start_ns": 0, "end_ns": 2 * S, "num_prefill_tokens": 10, "num_decode_tokens": 1, "num_cached_tokens": 0}
    steps = [counts | parts | step | {"free_gpu_blocks": 4, "replica": 1, "num_emitted": 2}]
    requests = table([request_row(request_id="a", replica=1, **row)], REQUEST_COLUMNS)
    manifest = {"num_replicas": 4, "num_gpu_blocks": 8, "router": "random"}
    summary = summarise(requests, table(steps, STEP_COLUMNS), manifest)
    assert summary["mean_running"] == 1.0
    assert summary["busy_share"] == 0.25
    assert (summary["kv"]["utilisation_mean"], summary["kv"]["utilisation_peak"]) == (0.125, 0.5)
    assert summary["time_s"]["idle"] == 6.0
    replicas = summary["replicas"]
    assert replicas["imbalance"] == {"requests": 4.0, "computed_tokens": 4.0, "busy": 4.0}
    assert replicas["jain"] == {"requests": 0.25, "computed_tokens": 0.25, "busy": 0.25}
    assert [one["num_computed_tokens"] for one in replicas["each"]] == [0, 11, 0, 0]
    assert [one["ttft_mean_s"] for one in replicas["each"]] == [None, 1.0, None, None]
    assert summarise(table([], REQUEST_COLUMNS), table([], STEP_COLUMNS), manifest)["replicas"]["jain"]["busy"] is None
    gone = request_row(request_id="b", replica=1, arrival_ns=0, token_ns=[], finish_ns=1 * S, finish_reason="abort")
    both = table([request_row(request_id="a", replica=1, **row), gone], REQUEST_COLUMNS)
    served = summarise(both, table(steps, STEP_COLUMNS), manifest)["replicas"]["each"]
    assert served[1]["ttft_mean_s"] is None, "one was aborted before its first token"


def test_how_requests_were_routed_is_told_where_it_misleads() -> None:
    requests, steps, manifest, _ = twice()
    sticky = manifest | {"router": "session_sticky"}
    assert routing_notes(summarise(requests, steps, manifest)) == []
    (said,) = routing_notes(summarise(requests, steps, sticky))
    assert said.startswith("no request was in a session: router session_sticky had none to keep together")
    in_sessions = requests.assign(session_id=requests["request_id"])
    assert routing_notes(summarise(in_sessions, steps, sticky)) == []
    wider = manifest | {"num_replicas": 4, "router": "prefix_hash"}
    assert routing_notes(summarise(requests, steps, wider)) == [
        "2 of 4 replicas served no request (router prefix_hash)"
    ]
    few = requests.head(FEW * 4 - 1)
    assert routing_notes(summarise(few, steps, wider)) == [], "by chance"
    assert routing_notes({"replicas": None}) == []


def test_without_a_fleet_nothing_is_split() -> None:
    requests, _, manifest = simulate(seed=3, num_requests=5)
    columns = Requests.of(requests)
    assert split(columns, manifest) == [columns]
