"""A report names what no arm triggered, what hardly any did, and what did not come from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from analysis.load import load_sweep
from tests.experiments.report_kit import LOAD, TIGHT, answered, ran, ran_each, report

pytestmark = pytest.mark.usefixtures("unrendered")  # words alone are looked at


def test_what_was_not_recorded_is_no_reason(tmp_path: Path) -> None:
    for mode in ("swap", "recompute"):
        scheduler = {"name": "vllm_v0", "preemption": mode, "queue_order": "fcfs"}
        ran(tmp_path / mode, scheduler=scheduler, record={"steps": False})
    said = report(tmp_path)
    assert "was never triggered: nothing was preempted." in said, "requests say so"
    assert "no step lacked KV blocks" not in said
    assert "| records | fair |" in said


def test_the_same_decisions_on_two_devices_are_no_sign_that_nothing_was_triggered(tmp_path: Path) -> None:
    for device in ("h100", "a100"):
        trace = {"num_requests": 20, "arrival": "all_at_once"}
        ran(tmp_path / device, device=device, trace=trace, cache=TIGHT)
    said = report(tmp_path)
    assert "never triggered" not in said
    assert "| load | fair | not judged: requests came all at once |" in said


@pytest.mark.parametrize("seeds", [1, 3])
def test_what_was_never_triggered_is_called_so(tmp_path: Path, seeds: int) -> None:
    for mode in ("swap", "recompute"):
        for seed in range(seeds):
            ran(tmp_path / f"{mode}-{seed}", scheduler={"name": "vllm_v0", "preemption": mode}, seed=seed)
    said = report(tmp_path)
    same = "preemption swap took the same decisions as preemption recompute at every step"
    told = f"- {same}; what sets them apart was never triggered: nothing was preempted."
    assert said.splitlines().count(told) == 2, "a caution, and the answer"
    assert answered(said) == [told]


def test_an_idle_policy_of_a_preset_is_no_reason_of_its_other_settings_effects(tmp_path: Path) -> None:
    for rate in (90.0, 120.0):
        trace = {**LOAD, "rate": rate, "name": "synthetic"}
        ran_each(tmp_path / str(rate), ("vllm_v1", "vtc", "sarathi"), trace=trace)
    told = [line for line in report(tmp_path).splitlines() if "Part of what sets the arms apart" in line]
    tenant = "queue order vtc (the trace has one tenant)"
    assert told == [
        f"- Part of what sets the arms apart was never triggered: preemption (nothing was preempted); {tenant}."
    ]


def test_arms_that_decided_alike_share_a_sentence(tmp_path: Path) -> None:
    for budget in (64, 2048, 4096):
        trace = {**LOAD, "prompt": {"kind": "constant", "value": 512}, "name": "synthetic", "rate": 10.0}
        scheduler = {"name": "sarathi", "max_num_batched_tokens": budget}
        ran(tmp_path / f"{budget}", trace=trace, scheduler=scheduler, cache={"num_gpu_blocks": 5000})
    said = report(tmp_path, baseline="tokens 64")
    small, *large = (f"max num batched tokens {budget}" for budget in (64, 2048, 4096))
    (told,) = answered(said)
    assert told.startswith(f"- On this one trace, {' and '.join(large)} against {small}: better in mean TTFT")


def test_a_price_that_was_never_paid_is_called_so(tmp_path: Path) -> None:
    for name, price_s in (("a", 1e-6), ("b", 1e-3)):
        ran(tmp_path / name, cost={"name": "linear", "per_copied_block_s": price_s})
    said = report(tmp_path)
    price = "per copied block s"
    same = f"- {price} 0.001 took the same decisions as {price} 1e-06 at every step, in the same time."
    assert answered(said) == [same]
    (row,) = re.findall(rf"^\| {price} 0.001 \| (.*)", said.partition("**Latency**")[2], re.MULTILINE)[:1]
    assert row.count("<br>identical") == row.count(" | ") > 4


def test_routers_that_sent_every_request_alike_are_called_so(tmp_path: Path) -> None:
    """Without sessions a router that keeps them together is the other one that it goes by."""
    for router in ("least_loaded", "session_sticky", "round_robin"):
        backend = {"name": "sim", "num_replicas": 2, "router": router}
        ran(tmp_path / router, backend=backend, trace={"name": "synthetic", "num_requests": 40, "rate": 60})
    said = report(tmp_path, baseline="router least_loaded")
    assert "- router session_sticky took the same decisions as router least_loaded at every step." in said
    assert "- Routed, router session_sticky: no request was in a session" in said
    assert "router round_robin took the same" not in said


def test_a_factor_that_was_never_triggered_is_told_with_what_another_did(tmp_path: Path) -> None:
    for mode in ("recompute", "swap"):
        for seqs in (64, 2):
            for seed in range(2):
                scheduler = {"name": "vllm_v0", "preemption": mode, "max_num_seqs": seqs}
                ran(tmp_path / f"{mode}-{seqs}-{seed}", scheduler=scheduler, seed=seed)
    *_, told = answered(report(tmp_path, baseline="max num seqs 64, preemption recompute"))
    assert told.startswith("- preemption swap took the same decisions as preemption recompute at every step; what sets")
    assert told.endswith(" was never triggered: nothing was preempted.")


def test_victims_that_were_chosen_alike_were_triggered(tmp_path: Path) -> None:
    same = {"_target_": "testbed.policies.victim.MostBlocks"}
    for name, victim in (("a", "most_blocks"), ("b", same)):
        ran(tmp_path / name, scheduler={"name": "vllm_v1", "victim": victim}, cache={"num_gpu_blocks": 330})
    said = report(tmp_path)
    assert load_sweep(tmp_path).runs[0].summary["preemptions"]["total"] > 0
    assert "never triggered" not in said
    assert answered(said) == ["- victim MostBlocks took the same decisions as victim most_blocks at every step."]


GROWING = [{"arrival_time": 0.0, "prompt_tokens": 100, "output_tokens": 100} for _ in range(2)]
GROWN = {"num_gpu_blocks": 20, "num_cpu_blocks": 20}  # one of the two is preempted; nobody else waits


@pytest.mark.parametrize("steps", [True, False])
def test_a_prefix_that_only_preempted_requests_hit_was_hit(tmp_path: Path, *, steps: bool) -> None:
    for eviction in ("lru", "fifo"):
        ran(tmp_path / eviction, trace=GROWING, cache=GROWN | {"eviction": eviction}, record={"steps": steps})
    summary = load_sweep(tmp_path).runs[0].summary
    assert (summary["prefix_hit_rate"], summary["preemptions"]["total"]) == (0, 1)
    (said,) = answered(report(tmp_path, baseline="eviction lru"))
    assert said == "- eviction fifo took the same decisions as eviction lru at every step."


def test_a_pool_that_ran_full_lacked_blocks_though_nobody_waited_for_them(tmp_path: Path) -> None:
    scheduler = {"name": "vllm_v1", "preemption": "swap"}
    for watermark in (0.0, 0.01):
        ran(tmp_path / str(watermark), trace=GROWING, scheduler=scheduler, cache=GROWN | {"watermark": watermark})
    assert not load_sweep(tmp_path).runs[0].steps["blocked_by"].notna().any()
    (said,) = answered(report(tmp_path, baseline="watermark 0"))
    assert said == "- watermark 0.01 took the same decisions as watermark 0 at every step."


def test_what_was_hardly_triggered_is_told_with_how_often(tmp_path: Path) -> None:
    for mode in ("recompute", "swap"):
        scheduler = {"name": "vllm_v0", "preemption": mode}
        ran(tmp_path / mode, scheduler=scheduler, cache={"num_gpu_blocks": 400, "num_cpu_blocks": 400})
    runs = load_sweep(tmp_path).runs
    num = sum(run.summary["preemptions"]["total"] for run in runs)
    assert num > 0
    *_, told = answered(report(tmp_path))
    at = "Beyond the capacity of every arm, on this one trace"
    assert told.startswith(f"- {at}, there is too little data for a claim ({num} preemptions in 240 requests): ")


def test_fair_shares_of_one_tenant_say_nothing(tmp_path: Path) -> None:
    for order in ("fcfs", "vtc"):
        ran(tmp_path / order, scheduler={"name": "decode_first", "queue_order": order})
    assert "the trace has one tenant" in report(tmp_path)
