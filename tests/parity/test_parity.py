"""What ran is what the simulator replays: the same decision at every step, and the same instants for every request."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from experiments.runs.parity import check_parity
from experiments.runs.run import execute
from testbed.records.tape import read_tape
from tests.experiments.kit import manifest_of, table_of, trace_of
from tests.parity.kit import (
    CLOSED,
    COMPOSITIONS,
    ROOMY,
    TIGHT,
    TIMED,
    real_config,
    real_run,
    replay_config,
    replayed_run,
)

MATRIX = [
    pytest.param(composition, caching, num_blocks, arrivals, id="-".join(names))
    for composition, (caching, *a), (num_blocks, *b), (arrivals, *c) in product(
        COMPOSITIONS,
        ((True, "cached"), (False, "uncached")),
        ((ROOMY, "roomy"), (TIGHT, "tight")),
        ((TIMED, "timed"), (CLOSED, "closed")),
    )
    for names in [(composition, *a, *b, *c)]
]


@pytest.mark.parametrize(("composition", "caching", "num_blocks", "arrivals"), MATRIX)
def test_a_real_run_is_replayed_decision_by_decision(
    tmp_path: Path, composition: str, caching: bool, num_blocks: int, arrivals: dict[str, Any]
) -> None:
    config = real_config(composition, cache__prefix_caching=caching, cache__num_gpu_blocks=num_blocks, **arrivals)
    result = real_run(tmp_path / "real", config)
    assert (result.status, result.exit_status) == ("complete", 0), result.message
    assert (result.summary["preemptions"]["total"] > 0) is (num_blocks == TIGHT), "the regime is not what it says"
    assert (result.summary["prefix_hit_rate"] > 0) is caching
    report = check_parity(tmp_path / "real")
    assert report.divergence is None
    assert report.num_steps == manifest_of(tmp_path / "real")["num_steps"] > 20
    assert f"{report.digest:016x}" == manifest_of(tmp_path / "real")["digest"]
    assert_same_run(tmp_path / "real", replayed_run(tmp_path / "sim", config, tmp_path / "real").folder)


def assert_same_run(real: Path, replayed: Path) -> None:
    """Digest, every instant of every request, every column of every step."""
    assert manifest_of(replayed)["digest"] == manifest_of(real)["digest"]
    assert manifest_of(replayed)["status"] == manifest_of(real)["status"]
    for name in ("requests", "steps"):
        assert table_of(replayed, name).equals(table_of(real, name)), f"{name}.parquet differs"


# Sampled, not forced: what the model said is on the tape.
def unforced_rows(num: int = 10) -> list[dict[str, Any]]:
    return [
        {"request_id": f"r{i}", "arrival_time": i * 0.001, "prompt_token_ids": [7 + i % 3] * 9 + [i + 1] * (3 + 2 * i)}
        for i in range(num)
    ]


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sampled_outputs_come_from_the_tape(tmp_path: Path, composition: str, temperature: float) -> None:
    rows = unforced_rows()
    rows[4]["output_tokens"] = 5  # forced and sampled rows in one batch
    config = real_config(
        composition, sampling__temperature=temperature, sampling__max_tokens=12, cache__num_gpu_blocks=TIGHT,
        model__eos_token_id=3,
    )  # fmt: skip
    result = real_run(tmp_path / "real", config, trace_of(tmp_path, rows))
    assert result.exit_status == 0, result.message
    tape = read_tape(tmp_path / "real" / "tape.jsonl")
    said = [outcome.seq_id for step in tape.steps for outcome in step.outcomes or ()]
    assert len(said) > 50
    assert 4 not in said, "the core knows what a forced row emits"
    assert check_parity(tmp_path / "real").divergence is None
    assert_same_run(tmp_path / "real", replayed_run(tmp_path / "sim", config, tmp_path / "real").folder)


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_what_the_model_says_ends_a_request_at_eos_in_the_replay_too(tmp_path: Path, composition: str) -> None:
    probe = real_config(composition, sampling__max_tokens=12)
    rows = unforced_rows(4)
    real_run(tmp_path / "probe", probe, trace_of(tmp_path, rows))
    steps = read_tape(tmp_path / "probe" / "tape.jsonl").steps
    said = [outcome.tokens[0] for step in steps for outcome in step.outcomes or ()]
    config = real_config(composition, sampling__max_tokens=12, model__eos_token_id=said[len(said) // 2])
    result = real_run(tmp_path / "real", config, trace_of(tmp_path, rows))
    assert result.summary["finish_reasons"]["stop"] > 0
    assert check_parity(tmp_path / "real").divergence is None
    assert_same_run(tmp_path / "real", replayed_run(tmp_path / "sim", config, tmp_path / "real").folder)


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_aborts_and_ignored_requests_are_replayed(tmp_path: Path, composition: str) -> None:
    rows: list[dict[str, Any]] = [
        {"request_id": f"r{i}", "arrival_time": i * 0.0005, "prompt_tokens": 12, "output_tokens": 30} for i in range(8)
    ]
    for i in (1, 3, 6):
        rows[i]["cancel_after"] = 0.004 * i  # while waiting or running, according to the machine
    rows[2]["prompt_tokens"] = 130  # more than the pool
    rows[5]["prompt_tokens"] = 300  # more than the model
    first = {"request_id": "x0", "arrival_time": 0.0, "prompt_tokens": 8, "output_tokens": 60, "cancel_after": 0.001}
    after = {"request_id": "x1", "think_time": 0.001, "prompt_tokens": 70, "output_tokens": 2}  # never sent
    rows += [first | {"session_id": "s", "turn": 0}, after | {"session_id": "s", "turn": 1}]
    config = real_config(composition, cache__num_gpu_blocks=TIGHT)
    result = real_run(tmp_path / "real", config, trace_of(tmp_path, rows))
    assert result.status == "complete"
    assert result.summary["finish_reasons"]["ignored"] == 2
    assert result.summary["finish_reasons"]["abort"] >= 1
    assert check_parity(tmp_path / "real").divergence is None
    assert_same_run(tmp_path / "real", replayed_run(tmp_path / "sim", config, tmp_path / "real").folder)


def test_waiting_in_real_time_is_replayed_too(tmp_path: Path) -> None:
    config = real_config("unified", backend__pace="real_time", trace__rate=300.0, trace__num_requests=8)
    real_run(tmp_path / "real", config)
    assert check_parity(tmp_path / "real").divergence is None
    assert_same_run(tmp_path / "real", replayed_run(tmp_path / "sim", config, tmp_path / "real").folder)


def test_a_replay_has_as_many_blocks_as_the_real_run_found(tmp_path: Path) -> None:
    config = real_config("unified", cache__num_gpu_blocks=None, backend__cpu_kv_bytes=40_000)
    real_run(tmp_path / "real", config)
    measured = manifest_of(tmp_path / "real")["num_gpu_blocks"]
    assert 18 < measured < 100
    replayed = execute_recorded(tmp_path, config)
    assert manifest_of(replayed)["num_gpu_blocks"] == measured
    assert manifest_of(replayed)["digest"] == manifest_of(tmp_path / "real")["digest"]


def execute_recorded(tmp_path: Path, config: Any) -> Path:
    return replayed_run(tmp_path / "sim", config, tmp_path / "real").folder


def test_the_generated_trace_itself_is_the_same_trace(tmp_path: Path) -> None:
    """Without a trace given by hand: the configuration makes it again, and the fingerprints match."""
    config = real_config("decode_first", **CLOSED)
    real_run(tmp_path / "real", config)
    execute(replay_config(config, tmp_path / "real"), tmp_path / "sim")
    assert_same_run(tmp_path / "real", tmp_path / "sim")


# Every preset, with swap, groups and beams; the real engine moves the blocks.
PRESETS = (
    "vllm_v1_0_8", "vllm_v0", "vllm_v0_chunked", "vllm_v0_classic", "nano_vllm", "sarathi", "orca", "static",
    "trtllm_no_evict", "trtllm_max_util", "sglang_lpm", "lightllm", "vtc", "vllm_v1_async",
)  # fmt: skip


def check_both_ways(tmp_path: Path, config: Any) -> dict[str, Any]:
    result = real_run(tmp_path / "real", config)
    assert (result.status, result.exit_status) == ("complete", 0), result.message
    assert check_parity(tmp_path / "real").divergence is None
    assert_same_run(tmp_path / "real", replayed_run(tmp_path / "sim", config, tmp_path / "real").folder)
    return result.summary


ON_DEVICE = {  # what a device needs of presets whose rules count blocks as computed that are not
    "vllm_v0": {"scheduler__kv_rules__hits_frozen": False},
    "vllm_v0_chunked": {
        "scheduler__kv_rules__hits_frozen": False, "scheduler__kv_rules__hits_visible": "commit",
        "scheduler__kv_rules__duplicates": "listed",
    },
}  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_every_preset_is_replayed_with_swap(tmp_path: Path, preset: str, caching: bool) -> None:
    config = real_config(
        preset, scheduler__preemption="swap", cache__num_cpu_blocks=64, cache__num_gpu_blocks=TIGHT,
        cache__prefix_caching=caching, **CLOSED, **ON_DEVICE.get(preset, {}),
    )  # fmt: skip
    check_both_ways(tmp_path, config)


@pytest.mark.parametrize("composition", [*COMPOSITIONS, "vllm_v0_classic", "nano_vllm"])
@pytest.mark.parametrize("group", ["n", "beam_width"])
def test_groups_are_swapped_copied_and_replayed(tmp_path: Path, composition: str, group: str) -> None:
    config = real_config(
        composition, cache__num_cpu_blocks=200, cache__num_gpu_blocks=40, scheduler__max_num_seqs=12,
        **{f"sampling__{group}": 3}, **CLOSED,
    )  # fmt: skip
    check_both_ways(tmp_path, config)
    steps = table_of(tmp_path / "real", "steps").to_pydict()
    assert max(steps["num_emitted"]) > 3
    assert sum(steps["num_swapped_out"]) > 0, "the regime is not what it says"


AT_ONCE = {
    "two ranks": ("decode_first", {"device__tensor_parallel_size": 2, "scheduler__preemption": "swap"}),
    "two ranks, vllm_v1": ("vllm_v1", {"device__tensor_parallel_size": 2}),
    "planned ahead": ("vllm_v1_async", {}),
    "planned ahead, swap": ("decode_first", {"scheduler__async_scheduling": True, "scheduler__preemption": "swap"}),
}


@pytest.mark.parametrize(("composition", "settings"), AT_ONCE.values(), ids=AT_ONCE)
def test_chunks_swaps_copies_hits_and_forced_tokens_at_once(
    tmp_path: Path, composition: str, settings: dict[str, Any]
) -> None:
    config = real_config(
        composition, cache__num_cpu_blocks=200, cache__num_gpu_blocks=44, scheduler__max_num_seqs=12,
        scheduler__max_num_batched_tokens=24, sampling__n=3, **CLOSED, **settings,
    )  # fmt: skip
    summary = check_both_ways(tmp_path, config)
    assert summary["prefix_hit_rate"] > 0
    steps = table_of(tmp_path / "real", "steps").to_pydict()
    assert sum(steps["num_prefills"]) > sum(steps["num_admitted"]), "no prompt came in chunks"
    assert sum(steps["num_swapped_out"]) > 0
    prompts = table_of(tmp_path / "real", "requests").to_pydict()["num_prompt_tokens"]
    assert any(num % config.cache.block_size for num in prompts), "no members of a group copy the block they share"


def test_sampled_groups_come_from_the_tape(tmp_path: Path) -> None:
    config = real_config(
        "prefill_first", sampling__temperature=0.8, sampling__n=3, sampling__max_tokens=9, model__eos_token_id=3,
        cache__num_gpu_blocks=40, cache__num_cpu_blocks=100, scheduler__max_num_seqs=12,
    )  # fmt: skip
    result = real_run(tmp_path / "real", config, trace_of(tmp_path, unforced_rows()))
    assert result.exit_status == 0, result.message
    outcomes = [o for step in read_tape(tmp_path / "real" / "tape.jsonl").steps for o in step.outcomes or ()]
    assert sum(len(outcome.forks) for outcome in outcomes) == 2 * len(unforced_rows())
    assert check_parity(tmp_path / "real").divergence is None
    assert_same_run(tmp_path / "real", replayed_run(tmp_path / "sim", config, tmp_path / "real").folder)
