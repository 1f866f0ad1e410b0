"""vLLM's schedulers observed, and ours served by vLLM: logs conform, tapes replay, tokens are stock vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not in this environment: make test-vllm")

from analysis.load import load_run
from experiments.commands.app import config_from
from experiments.conform.cases import read_cases
from experiments.conform.replay import replay_case
from experiments.conform.systems import SYSTEMS
from experiments.observe.importing import import_log
from experiments.runs.parity import check_parity
from experiments.runs.run import execute
from real.vllm import check_version
from real.vllm.observer import unknown_to_us
from real.vllm.scheduler import check_engine
from testbed.errors import ConfigError
from tests.vllm.conftest import no_veto

pytestmark = pytest.mark.vllm
TIGHT = 40


def served(
    start: Callable[..., Any], prompts: list[list[int]], num_tokens: list[int], *, aborts: bool = False, **options: Any
) -> list[list[int]]:
    """Every other request comes while others run. Outputs of those that were not aborted; others are empty."""
    import vllm

    with no_veto():
        llm = start(num_gpu_blocks_override=TIGHT + 1, **options)
    engine, outputs, left = llm.llm_engine, dict[str, list[int]](), list(range(len(prompts)))
    num_steps = 0
    while left or engine.has_unfinished_requests():
        for _ in range(3 if num_steps % 7 == 0 else 0):
            if left:
                i = left.pop(0)
                params = vllm.SamplingParams(temperature=0, max_tokens=num_tokens[i], ignore_eos=True, detokenize=False)
                engine.add_request(f"r{i}", {"prompt_token_ids": prompts[i]}, params)
        if aborts and num_steps % 40 == 39:
            engine.abort_request([f"r{len(prompts) - len(left) - 2}"])
        for one in engine.step() if engine.has_unfinished_requests() else ():
            if one.finished and one.outputs[0].finish_reason == "length":
                outputs[one.request_id] = list(one.outputs[0].token_ids)
        num_steps += 1
    engine.engine_core.shutdown()
    return [outputs.get(f"r{i}", []) for i in range(len(prompts))]


@pytest.mark.parametrize("aborts", [False, True], ids=["all served", "some aborted"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_what_vllm_decides_conforms(
    tmp_path: Path, start: Callable[..., Any], prompts: list[list[int]], num_tokens: list[int], is_async: bool,
    aborts: bool,
) -> None:  # fmt: skip
    log = tmp_path / "log.jsonl"
    served(
        start, prompts, num_tokens, aborts=aborts, async_scheduling=is_async,
        scheduler_cls=f"real.vllm.Observed{'Async' if is_async else ''}Scheduler",
        additional_config={"testbed": {"observe": str(log)}},
    )  # fmt: skip
    import_log(log, tmp_path / "run")
    (case,) = read_cases(tmp_path / "run" / "case.jsonl")
    assert sum(len(step["preempted"]) for step in case.steps) > 0
    assert bool(case.aborts) == aborts
    mismatch = replay_case(case, SYSTEMS[case.system], SYSTEMS[case.system].preset)
    assert mismatch is None, mismatch


POLICIES = {
    "vllm_v1": {},
    "sarathi": {"scheduler": "sarathi"},
    "decode_first, sjf, longest remaining": {
        "scheduler": {"name": "decode_first", "queue_order": "sjf", "victim": "longest_remaining", "oracle": "perfect"}
    },
    "own class": {"scheduler": {"name": "vllm_v1", "victim": {"_target_": "tests.vllm.own_victim.Youngest"}}},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_our_scheduler_in_a_served_vllm(
    tmp_path: Path, start: Callable[..., Any], prompts: list[list[int]], num_tokens: list[int],
    stock: list[list[int]], policy: str, is_async: bool,
) -> None:  # fmt: skip
    folder = tmp_path / "run"
    options = {"scheduler_cls": "real.vllm.TestbedScheduler", "async_scheduling": is_async}
    settings = {"out": str(folder), "device": "cpu", **POLICIES[policy]}
    outputs = served(start, prompts, num_tokens, aborts=True, additional_config={"testbed": settings}, **options)
    aborted = [i for i, output in enumerate(outputs) if not output]
    assert 0 < len(aborted) < 10
    assert [i for i, output in enumerate(outputs) if output and output != stock[i]] == []
    run = load_run(folder)
    assert run.manifest["status"] == "complete"
    assert run.requests["num_preemptions"].sum() > 0
    report = check_parity(folder)
    assert report.divergence is None, report.divergence
    assert report.num_steps == run.manifest["num_steps"]


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path, start: Callable[..., Any]) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(Exception, match="already holds a run"):
        start(scheduler_cls="real.vllm.TestbedScheduler", additional_config={"testbed": {"out": str(tmp_path)}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedular": "sarathi"}, "unknown key 'schedular'; did you mean 'scheduler'"),
        ({"scheduler": "sarathy"}, "did you mean 'sarathi'"),
        ({"scheduler": {"name": "sarathi", "max_num_seqs": 99}}, "is 99, and vLLM was started for 16"),
        ({"cache": {"block_size": 16}}, "cache.block_size is 16, and vLLM's is 32"),
        ({"scheduler": {"name": "vllm_v1", "preemption": "swap"}}, "vLLM has no CPU blocks to swap to"),
        ({"cache": {"sliding_window": 32}}, "workers read the blocks that this releases"),
        ({"scheduler": "orca"}, "vLLM's workers were sized for 256"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_served(
    start: Callable[..., Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        start(scheduler_cls="real.vllm.TestbedScheduler", additional_config={"testbed": settings})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduling_policy": "priority"}, "policy=priority, which only its own scheduler reads"),
        ({"long_prefill_token_threshold": 64}, "long_prefill_token_threshold=64, which only its own scheduler reads"),
    ],
)
def test_what_only_vllms_own_scheduler_reads_is_refused(
    start: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        start(scheduler_cls="real.vllm.TestbedScheduler", **options)


def test_a_served_run_can_be_simulated_as_it_was(
    tmp_path: Path, start: Callable[..., Any], prompts: list[list[int]], stock: list[list[int]]
) -> None:
    """Without prefix caching, as vLLM was started; with outputs as long as they came, not as they might have."""
    import vllm

    llm = start(
        scheduler_cls="real.vllm.TestbedScheduler", enable_prefix_caching=False,
        additional_config={"testbed": {"out": str(tmp_path / "run")}},
    )  # fmt: skip
    stops = [output[2] for output in stock[:6]]
    sent = [{"prompt_token_ids": prompt} for prompt in prompts[:6]]
    params = [
        vllm.SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop], logprob_token_ids=[stop, 1])
        for stop in stops
    ]
    outputs = [one.outputs[0] for one in llm.generate(sent, params, use_tqdm=False)]
    assert all({stop, 1} <= {*one.logprobs[0]} for one, stop in zip(outputs, stops, strict=True))
    llm.llm_engine.engine_core.shutdown()
    run = load_run(tmp_path / "run")
    assert run.manifest["prefix_cache"]["hit_tokens"] == 0
    assert check_parity(tmp_path / "run").divergence is None
    lengths = sorted(len(one.token_ids) for one in outputs)
    assert max(lengths) < 40
    again = execute(config_from(tmp_path / "run", ["backend=sim", "cost=constant"]), tmp_path / "sim")
    assert sorted(load_run(again.folder).requests["num_output_tokens"]) == lengths


def test_a_log_without_a_place_is_refused(start: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match="tell the observer where to write"):
        start(scheduler_cls="real.vllm.ObservedScheduler")


def engine_config(**changes: Any) -> tuple[Any, Any]:
    """What check_engine looks at, of a vLLM that it takes."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = object.__new__(FullAttentionSpec)
    config = SimpleNamespace(
        speculative_config=None, lora_config=None, kv_transfer_config=None, ec_transfer_config=None,
        kv_events_config=None, parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        model_config=SimpleNamespace(is_multimodal_model=False, is_encoder_decoder=False, runner_type="generate"),
    )  # fmt: skip
    groups = [SimpleNamespace(kv_cache_spec=spec)]
    for key, value in changes.items():
        if key == "groups":
            groups = groups * value
        else:
            setattr(config, key, value)
    return config, SimpleNamespace(kv_cache_groups=groups)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA"),
        ({"kv_transfer_config": object()}, "KV connectors"),
        ({"ec_transfer_config": object()}, "encoder-cache connectors"),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "pipeline parallelism"),
        ({"model_config": SimpleNamespace(is_multimodal_model=True)}, "multimodal models"),
        ({"groups": 2}, "2 groups of KV caches"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(change: dict[str, Any], name: str) -> None:
    check_engine(*engine_config())
    with pytest.raises(ConfigError, match=f"has no {name}"):
        check_engine(*engine_config(**change))


def test_a_request_says_what_we_have_not() -> None:
    plain = {
        "sampling_params": object(), "prompt_token_ids": [1], "structured_output_request": None, "lora_request": None,
        "mm_features": [],
    }  # fmt: skip
    assert unknown_to_us(SimpleNamespace(**plain)) == ""
    assert unknown_to_us(SimpleNamespace(**{**plain, "lora_request": object()})) == "LoRA"
    assert unknown_to_us(SimpleNamespace(**{**plain, "structured_output_request": object()})) == "structured output"
    assert unknown_to_us(SimpleNamespace(**{**plain, "mm_features": [1]})) == "multimodal inputs"
    assert unknown_to_us(SimpleNamespace(**{**plain, "sampling_params": None})) == "pooling"


@pytest.mark.parametrize("version", ["0.27.1", "0.34.0", "1.0", "what"])
def test_other_versions_are_refused(version: str) -> None:
    check_version("0.28.0")
    check_version("0.33.1+cpu")
    with pytest.raises(ConfigError, match=r"fits into 0\.28 to 0\.33"):
        check_version(version)
