"""KV fragmentation and the cost of preemptions, from the records of whole runs."""

from __future__ import annotations

from typing import Any

import pytest

from experiments import simulate

STEP_S = 0.002
COST = {"name": "constant", "step_s": STEP_S}


def summary_of(trace: Any, **settings: Any) -> dict[str, Any]:
    return simulate(trace, cost=COST, **settings).summary


def lengths(num_requests: int, prompt: int, output: int, **more: Any) -> dict[str, Any]:
    fixed = {"prompt": {"kind": "constant", "value": prompt}, "output": {"kind": "constant", "value": output}}
    return {"num_requests": num_requests, "arrival": "all_at_once", **fixed, **more}


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_fragmentation_is_what_the_last_block_leaves_unfilled(block_size: int) -> None:
    """A request decodes at positions 10 to 28: its blocks hold the tokens before it and the new one."""
    cache = {"block_size": block_size, "num_gpu_blocks": 100}
    kv = summary_of(lengths(1, 10, 20), scheduler="vllm_v1", cache=cache)["kv"]
    filled = range(11, 30)
    held = [-(-tokens // block_size) * block_size for tokens in filled]
    assert kv["fragmentation"] == pytest.approx(1 - sum(filled) / sum(held))
    num_slots = 100 * block_size
    assert kv["fragmentation_of_pool"] == pytest.approx((sum(held) - sum(filled)) / len(held) / num_slots)


def test_reserved_lookahead_slots_are_fragmentation() -> None:
    trace, cache = lengths(8, 100, 40), {"num_gpu_blocks": 2000}
    plain, ahead = (
        summary_of(trace, cache=cache, scheduler={"name": "vllm_v1", "lookahead_slots": slots})["kv"]["fragmentation"]
        for slots in (0, 64)
    )
    assert plain < 0.1 < 0.3 < ahead


def test_where_sequences_share_blocks_fragmentation_is_not_known() -> None:
    trace = lengths(4, 40, 10, num_system_prompts=1, system_prompt_tokens=64, arrival="deterministic", rate=20)
    summary = summary_of(trace, cache={"num_gpu_blocks": 200})
    assert summary["prefix_hit_rate"] > 0
    assert (summary["kv"]["fragmentation"], summary["kv"]["fragmentation_of_pool"]) == (None, None)


def test_where_blocks_are_shared_without_a_counted_hit_fragmentation_is_not_known() -> None:
    trace = lengths(6, 40, 10, num_system_prompts=1, system_prompt_tokens=64)
    summary = summary_of(trace, cache={"num_gpu_blocks": 200}, scheduler="vllm_v0")
    assert summary["prefix_hit_rate"] == 0
    assert summary["kv"]["fragmentation"] is None


def test_a_fleets_fragmentation_is_that_of_all_slots_though_one_engine_is_idle() -> None:
    trace = lengths(2, 10, 20)
    backend = {"name": "sim", "num_replicas": 3}
    fleet, one = (
        summary_of(trace, cache={"num_gpu_blocks": 100}, backend=given)["kv"] for given in (backend, {"name": "sim"})
    )
    assert fleet["fragmentation"] == pytest.approx(one["fragmentation"])
    assert fleet["fragmentation_of_pool"] == pytest.approx(one["fragmentation_of_pool"] / 2)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemptions_are_counted_by_mode_with_the_time_that_they_cost(mode: str) -> None:
    scheduler = {"name": "vllm_v0", "preemption": mode}
    cache = {"num_gpu_blocks": 40, "num_cpu_blocks": 200, "prefix_caching": False}
    run = simulate(lengths(8, 60, 60), scheduler=scheduler, cache=cache)
    preemptions, steps = run.summary["preemptions"], run.steps
    assert preemptions["total"] == preemptions[f"by_{mode}"] > 0
    assert preemptions["by_recompute"] + preemptions["by_swap"] == preemptions["total"]
    moves = steps[(steps.num_swapped_out > 0) | (steps.num_swapped_in > 0)]
    assert preemptions["swap_s"] == pytest.approx(moves.swap_ns.sum() / 1e9)
    assert (preemptions["swap_s"] > 0) == (mode == "swap")
    assert (preemptions["recompute_s"] > 0) == (mode == "recompute")


def test_recomputed_tokens_take_their_share_of_the_steps_time() -> None:
    """In steps that only prefill, or only decode, the time of a prefill token is that of the prefill steps."""
    scheduler, cache = {"name": "vllm_v0", "preemption": "recompute"}, {"num_gpu_blocks": 40, "prefix_caching": False}
    run = simulate(lengths(8, 60, 60), scheduler=scheduler, cache=cache, cost=COST)
    prefills = run.steps[run.steps.num_prefill_tokens > 0]
    assert not prefills.num_decode_tokens.any()
    spent_s = (prefills.end_ns - prefills.start_ns).sum() / 1e9
    share = run.requests.num_recomputed_tokens.sum() / prefills.num_prefill_tokens.sum()
    assert run.summary["preemptions"]["recompute_s"] == pytest.approx(spent_s * share)


def test_without_steps_the_costs_are_not_known() -> None:
    summary = summary_of(lengths(2, 10, 5), record={"steps": False})
    assert [summary["preemptions"][name] for name in ("by_recompute", "by_swap", "recompute_s", "swap_s")] == [None] * 4
    assert summary["kv"]["fragmentation"] is None
