"""Every mistake that a user can make gives one line that names the thing, an exit status, and loses nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.comparison.arms import Arm
from analysis.load import load_run
from analysis.reports.cautions import lost
from sim.backend import SimBackend
from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape
from testbed.errors import ConfigError
from tests.experiments.kit import (
    BACKENDS,
    REAL,
    SMALL,
    TINY,
    Say,
    manifest_of,
    needs_engine,
    table_of,
    write_rows,
)
from tests.testbed.core_kit import make_request, make_scheduler

GOOD = {"arrival_time": 0.0, "prompt_tokens": 8, "output_tokens": 3}


def run(say: Say, folder: Path, rows: list[dict[str, Any]], *more: str) -> Any:
    path = write_rows(folder / "t.jsonl", rows)
    base = SMALL if any(item.startswith("model.path") for item in more) else TINY
    return say("run", *base, "trace=jsonl", f"trace.path={path}", f"hydra.run.dir={folder / 'run'}", *more)


# --- traces ---

BAD_ROWS: list[tuple[dict[str, Any], list[str]]] = [
    ({"arrival_time": -1.0}, ["arrival_time", "-1"]),
    ({"arrival_time": "soon"}, ["arrival_time", "soon"]),
    ({"arrival_time": None}, ["arrival_time"]),
    ({"prompt_tokens": -5}, ["prompt_tokens", "-5"]),
    ({"prompt_tokens": 0}, ["prompt_tokens", "0"]),
    ({"prompt_tokens": 2.5}, ["prompt_tokens", "2.5"]),
    ({"prompt_tokens": None, "prompt_token_ids": []}, ["prompt_token_ids"]),
    ({"prompt_tokens": None, "prompt_token_ids": [1, -2]}, ["prompt_token_ids", "-2"]),
    ({"prompt_tokens": None}, ["prompt_tokens"]),
    ({"output_tokens": 0}, ["output_tokens", "0"]),
    ({"output_tokens": -1}, ["output_tokens", "-1"]),
    ({"request_id": "first"}, ["first", "t.jsonl:1"]),  # used by the line before
    ({"session_id": "s", "think_time": 1.0}, ["turn"]),
    ({"cancel_after": -1}, ["cancel_after"]),
]


@pytest.mark.parametrize(("bad", "named"), BAD_ROWS, ids=[json.dumps(bad) for bad, _ in BAD_ROWS])
def test_a_bad_row_is_named_with_file_line_and_reason(
    tmp_path: Path, say: Say, bad: dict[str, Any], named: list[str]
) -> None:
    error = run(say, tmp_path, [{**GOOD, "request_id": "first"}, {**GOOD, **bad}]).error()
    assert "t.jsonl:2" in error
    for name in named:
        assert name in error
    assert not (tmp_path / "run" / "manifest.json").exists()


@pytest.mark.parametrize(("text", "named"), [("{not json\n", "t.jsonl:1"), ("[1, 2]\n", "t.jsonl:1"), ("", "t.jsonl")])
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, say: Say, text: str, named: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    assert named in say("run", "trace=jsonl", f"trace.path={path}", f"hydra.run.dir={tmp_path / 'r'}").error()


@pytest.mark.parametrize("name", ["azure", "burstgpt", "mooncake", "bailian", "jsonl", "csv", "parquet"])
def test_no_file_at_the_path_and_no_path_at_all(tmp_path: Path, say: Say, name: str) -> None:
    where = f"hydra.run.dir={tmp_path / 'run'}"
    assert "nowhere" in say("run", f"trace={name}", f"trace.path={tmp_path}/nowhere", where).error()
    assert "trace.path" in say("run", f"trace={name}", where).error()


def test_rows_out_of_order_are_sorted_and_that_is_said(tmp_path: Path, say: Say) -> None:
    rows = [{**GOOD, "request_id": str(i), "arrival_time": float(t)} for i, t in enumerate((2, 0, 1))]
    run(say, tmp_path, rows).success()
    assert table_of(tmp_path / "run")["request_id"].to_pylist() == ["1", "2", "0"]
    note = " ".join(manifest_of(tmp_path / "run")["trace"]["notes"])
    assert "out of order" in note
    assert note in (tmp_path / "run" / "run.log").read_text()


# --- requests that can never fit ---


@pytest.mark.parametrize("scheduler", ["prefill_first", "decode_first", "unified"])
@pytest.mark.parametrize(("prompt", "reason"), [(257, "max_model_len"), (250, "KV blocks")])
def test_what_can_never_fit_ends_as_ignored_and_the_rest_is_served(
    tmp_path: Path, say: Say, scheduler: str, prompt: int, reason: str
) -> None:
    rows = [{**GOOD, "request_id": "a"}, {**GOOD, "request_id": "b", "prompt_tokens": prompt}]
    rows.append({**GOOD, "request_id": "c", "arrival_time": 0.5})
    more = (f"scheduler={scheduler}", "scheduler.max_num_batched_tokens=256", "cache.num_gpu_blocks=50")
    said = run(say, tmp_path, rows, *more)
    error = said.error()
    assert said.status == 1
    assert "1 of 3 requests" in error
    assert "'b'" in error
    assert reason in error
    assert "allow_ignored=true" in error
    assert (tmp_path / "run" / "done").exists()
    table = table_of(tmp_path / "run").to_pydict()
    assert dict(zip(table["request_id"], table["finish_reason"], strict=True)) == {
        "a": "length",
        "b": "ignored",
        "c": "length",
    }
    again = run(say, tmp_path, rows, *more, "allow_ignored=true", f"hydra.run.dir={tmp_path / 'again'}")
    assert again.status == 0
    assert len(again.lines) == 1
    assert again.lines[0].startswith("note: 1 of 3 requests")
    assert "allow_ignored" not in again.lines[0], "it is given"


@pytest.mark.parametrize(
    "more", [*BACKENDS, pytest.param((*REAL, "trace.forced=lengths"), id="lengths", marks=needs_engine)]
)
def test_an_output_that_the_models_length_cuts_is_told(tmp_path: Path, say: Say, more: tuple[str, ...]) -> None:
    rows = [{**GOOD, "request_id": "fits"}, {**GOOD, "request_id": "cut", "prompt_tokens": 60, "output_tokens": 9}]
    said = run(say, tmp_path, rows, "scheduler.max_model_len=64", *more)
    assert said.status == 0
    note = "1 of 2 outputs were cut, by 5 tokens in all: prompt and output reach scheduler.max_model_len (64). Raise it"
    assert note in said.out + said.err
    manifest = manifest_of(tmp_path / "run")
    assert (manifest["num_cut_outputs"], manifest["num_cut_output_tokens"]) == (1, 5)
    (told,) = lost([Arm("a", {}, (load_run(tmp_path / "run"),))], [], tmp_path)
    assert told == (
        "1 of 2 outputs of a were cut at scheduler.max_model_len, by 5 tokens in all: less was served than the trace "
        "asks for."
    )


@needs_engine
def test_what_can_never_fit_is_ignored_on_the_engine_too(tmp_path: Path, say: Say) -> None:
    rows = [{**GOOD, "request_id": "a"}, {**GOOD, "request_id": "b", "prompt_tokens": 300}]
    assert "'b'" in run(say, tmp_path, rows, *REAL).error()
    run(say, tmp_path, rows, *REAL, "allow_ignored=true", "overwrite=true").success()


# --- models and devices ---


def test_no_model_at_the_path(tmp_path: Path, say: Say) -> None:
    error = run(say, tmp_path, [GOOD], f"model.path={tmp_path}/no-model").error()
    assert "no-model" in error
    assert "config.json" in error


def checkpoint(folder: Path, **changes: Any) -> Path:
    from real.checkpoint import make_checkpoint
    from tests.real.engine_helpers import tiny_spec

    path = make_checkpoint(folder / "model", tiny_spec(), seed=3)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


@needs_engine
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "Qwen3ForCausalLM"]),
        ({"intermediate_size": 80}, ["down_proj", "[64, 96]", "[64, 80]"]),
    ],
    ids=["an architecture that is not supported", "a weight of another shape"],
)
def test_what_the_engine_cannot_load_is_named_with_what_it_can(
    tmp_path: Path, say: Say, changes: dict[str, Any], named: list[str]
) -> None:
    path = checkpoint(tmp_path, **changes)
    error = run(say, tmp_path, [GOOD], *REAL, f"model.path={path}").error()
    assert [name for name in named if name not in error] == []
    assert not (tmp_path / "run" / "manifest.json").exists()


@needs_engine
def test_a_shape_that_contradicts_itself_is_named_with_its_folder(tmp_path: Path, say: Say) -> None:
    path = checkpoint(tmp_path, num_key_value_heads=3)
    error = run(say, tmp_path, [GOOD], f"model.path={path}").error()
    assert error.startswith(f"{path}: model.num_attention_heads (4) must be a multiple of num_key_value_heads (3)")


@needs_engine
def test_a_missing_weight_is_named(tmp_path: Path, say: Say) -> None:
    from safetensors.torch import load_file, save_file

    path = checkpoint(tmp_path)
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors")
    error = run(say, tmp_path, [GOOD], *REAL, f"model.path={path}").error()
    assert "model.layers.1.mlp.up_proj.weight" in error
    assert str(path) in error


@needs_engine
def test_weights_that_are_no_weights_are_named(tmp_path: Path, say: Say) -> None:
    path = checkpoint(tmp_path)
    (path / "model.safetensors").write_bytes(b"\x00" * 100)
    assert "model.safetensors" in run(say, tmp_path, [GOOD], *REAL, f"model.path={path}").error()


def test_no_memory_for_one_block_in_the_simulator(tmp_path: Path, say: Say) -> None:
    where = f"hydra.run.dir={tmp_path / 'run'}"
    error = say("run", "model=qwen3_32b", "device=rtx4090", where).error()
    assert "no room for one KV block" in error
    assert "gpu_memory_utilization" in error


@needs_engine
def test_no_memory_for_one_block_on_the_engine(tmp_path: Path, say: Say) -> None:
    error = run(say, tmp_path, [GOOD], *REAL, "cache.num_gpu_blocks=null", "backend.cpu_kv_bytes=100").error()
    assert "no room for one KV block" in error or "cpu_kv_bytes" in error


@needs_engine
def test_a_gpu_that_is_demanded_and_not_there(tmp_path: Path, say: Say) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    error = run(say, tmp_path, [GOOD], *REAL, "backend.device=cuda").error()
    assert "backend.device=cuda" in error
    assert "backend.device=cpu" in error


# --- folders and disks ---


LIMITS = (
    "scheduler.max_num_batched_tokens", "scheduler.max_model_len", "scheduler.lookahead_slots",
    "scheduler.long_prefill_token_threshold", "cache.sliding_window", "trace.max_prompt_tokens",
)  # fmt: skip


@pytest.mark.parametrize("key", LIMITS)
def test_limits_beyond_every_model_are_named(say: Say, key: str) -> None:
    error = say("run", f"{key}={10**22}").error()
    assert f"{key} is 1000" in error
    assert "to 2,147,483,647" in error


@pytest.mark.parametrize(
    ("sweep", "named"),
    [
        (["seed=range(0,99999999999999)"], "seed=range(0,99999999999999)"),
        (["seed=shuffle(range(0,99999999999999))"], "seed=shuffle(range(0,99999999999999))"),
        (["seed=range(0,1000)", "trace.rate=range(1,1001)", "scheduler=vllm_v1"], "seed × trace.rate"),
    ],
)
def test_a_sweep_without_end_is_refused_before_it_is_made(say: Say, sweep: list[str], named: str) -> None:
    error = say("run", "-m", *sweep).error()
    assert error.startswith(f"{named}: more than 100,000 points; sweep fewer at a time")


def test_a_sweep_and_a_look_at_its_configuration_at_once(say: Say) -> None:
    assert "give one" in say("run", "-m", "--cfg", "job", "seed=1,2").error()


@pytest.mark.parametrize("where", ["hydra.run.dir=/dev/null/run", "hydra.run.dir=/proc/run"])
def test_a_folder_that_cannot_be_made(say: Say, where: str) -> None:
    assert where.partition("=")[2] in say("run", *TINY, "trace.num_requests=1", where).error()


@pytest.mark.parametrize("out", ["/proc/page.html", "/sys/page.html"])
def test_a_page_that_cannot_be_written_is_named_as_it_was_given(tmp_path: Path, say: Say, out: str) -> None:
    run(say, tmp_path, [GOOD]).success()
    assert say("report", str(tmp_path / "run"), "--out", out).error().startswith(f"{out}: ")


def test_a_run_is_never_overwritten_without_being_asked(tmp_path: Path, say: Say) -> None:
    run(say, tmp_path, [GOOD]).success()
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    error = run(say, tmp_path, [GOOD, GOOD]).error()
    assert str(tmp_path / "run") in error
    assert "overwrite=true" in error
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before
    # a slip beside overwrite=true loses nothing either
    run(say, tmp_path, [GOOD, GOOD], "overwrite=true", "scheduler.queue_order=fcsf").error()
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before
    run(say, tmp_path, [GOOD, GOOD], "overwrite=true").success()
    assert manifest_of(tmp_path / "run")["num_sent"] == 2


def test_from_a_folder_that_holds_no_run(tmp_path: Path, say: Say) -> None:
    assert str(tmp_path) in say("run", f"from={tmp_path}").error()


def test_cost_recorded_without_a_run_and_with_a_simulated_one(tmp_path: Path, say: Say) -> None:
    assert "cost.run" in run(say, tmp_path, [GOOD], "cost=recorded").error()
    run(say, tmp_path, [GOOD]).success()
    error = run(
        say, tmp_path, [GOOD], "cost=recorded", f"cost.run={tmp_path / 'run'}", f"hydra.run.dir={tmp_path / 'b'}"
    ).error()
    assert "backend=real" in error


# --- what a review found ---


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("scheduler.victim={target: a.b}", "_target_"),
        ("scheduler.victim=[]", "most_recently_admitted"),
        ("scheduler.queue_order={_target_: json.JSONDecoder}", "json.JSONDecoder lacks"),
    ],
)
def test_a_policy_that_is_none_is_refused_before_anything_is_written(
    say: Say, tmp_path: Path, override: str, told: str
) -> None:
    said = run(say, tmp_path, [GOOD], override)
    assert said.status == 1
    assert told in said.error()
    assert not (tmp_path / "run" / "config.yaml").exists()


@needs_engine
def test_the_real_engine_refuses_ranks_among_which_the_model_does_not_divide(say: Say, tmp_path: Path) -> None:
    said = run(say, tmp_path, [GOOD], *REAL, "device.tensor_parallel_size=3")
    assert said.status == 1
    assert "tensor_parallel_size is 3; it must divide the 4 attention heads" in said.error()


@needs_engine
def test_a_token_that_the_model_does_not_have_is_refused_with_its_place(say: Say, tmp_path: Path) -> None:
    row = {"request_id": "odd", "arrival_time": 0.0, "prompt_token_ids": [1, 99999], "output_tokens": 2}
    said = run(say, tmp_path, [GOOD, row], *REAL)
    assert said.status == 1
    assert all(part in said.error() for part in ("t.jsonl:2", "99999", "'odd'", "vocabulary"))
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_setting_without_effect_is_named(say: Say, tmp_path: Path) -> None:
    said = run(
        say, tmp_path, [GOOD], "scheduler.composition=prefill_first", "scheduler.max_num_partial_prefills=4"
    ).success()
    assert "scheduler.max_num_partial_prefills has no effect with scheduler.composition=prefill_first" in said


@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_row_without_an_output_is_refused_with_its_line(say: Say, tmp_path: Path, stream: str) -> None:
    rows = [{"arrival_time": 0.0, "prompt_tokens": 8, "output_tokens": 2}, {"arrival_time": 1.0, "prompt_tokens": 8}]
    error = run(say, tmp_path, rows, f"trace.stream={stream}").error()
    assert "t.jsonl:2: request '1' forces no output" in error
    assert "give it output_tokens" in error


def test_turns_that_are_never_sent_are_told(say: Say, tmp_path: Path) -> None:
    session = {"session_id": "s", "output_tokens": 2}
    rows = [
        {**session, "turn": 0, "arrival_time": 0.0, "prompt_tokens": 4000},
        {**session, "turn": 1, "think_time": 1.0, "prompt_tokens": 4100},
    ]
    said = run(say, tmp_path, rows, "allow_ignored=true").success()
    assert "1 turn never sent" in said
    assert manifest_of(tmp_path / "run")["num_unsent"] == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("device.flops_per_s=1", "the simulated clock passes"),
        ("backend.schedule_ns=9000000000000000000", "backend.schedule_ns is 9000000000000000000; it must be from 0 to"),
        ("backend.num_replicas=1000000000", "backend.num_replicas is 1000000000; it must be from 1 to 10,000"),
    ],
)
def test_prices_and_sizes_beyond_all_bounds_are_one_line(tmp_path: Path, say: Say, override: str, message: str) -> None:
    said = say("run", override, "trace.num_requests=5", f"hydra.run.dir={tmp_path / 'run'}")
    assert said.status != 0
    assert message in said.error()


def test_a_cost_model_that_returns_a_negative_span_is_told() -> None:
    class Backwards:
        def price(self, shape: BatchShape) -> Spans:
            return Spans(1_000, -5, 0, 2_000, 0)

    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4, 9))
    with pytest.raises(ConfigError, match="Backwards returned prepare_ns=-5; a span is 0 ns or more"):
        SimBackend(Backwards()).start(scheduler.plan(0))
