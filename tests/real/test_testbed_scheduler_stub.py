"""TestbedScheduler as vLLM makes it, without vLLM: its settings, what it refuses, and the run folder that it leaves."""

from __future__ import annotations

import json
import random
import re
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis.load import load_run
from analysis.measures.checks import failures
from experiments.commands.app import config_from
from experiments.configuration.config import RunConfig
from experiments.runs.parity import check_parity
from experiments.runs.run import execute
from testbed.errors import ConfigError, RequestError, RunFolderError, TestbedError
from testbed.traces.readers.own import read_jsonl
from testbed.traces.schema import TokenIds
from tests.real import vllm_stub_types as vllm
from tests.real.vllm_stub import LOOPS, RUNNERS
from tests.real.vllm_stub_worker import VOCAB_SIZE, Memory, NewerRunner, OlderRunner

pytestmark = pytest.mark.usefixtures("vllm_stub")

BLOCK_SIZE, NUM_BLOCKS = 4, 17
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "eos_token_id": 2, "head_dim": 32, "hidden_size": 128, "hidden_act": "silu",
    "intermediate_size": 256, "max_position_embeddings": 2048, "model_type": "qwen3", "num_attention_heads": 4,
    "num_hidden_layers": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "tie_word_embeddings": True, "torch_dtype": "float32", "vocab_size": VOCAB_SIZE,
}  # fmt: skip


def made(
    settings: Any, *, is_async: bool = False, is_newer: bool = False, budget: int = 32,
    model: dict[str, Any] = MODEL, caches: bool = True, device: tuple[str, str] = ("cpu", "cpu"), **flags: Any,
) -> Any:  # fmt: skip
    from experiments.serving.inside_vllm import TestbedScheduler
    from tests.real.vllm_stub_engine import engine_config

    config = engine_config(
        num_blocks=NUM_BLOCKS, is_newer=is_newer, additional_config={"testbed": settings},
        scheduler_config=SimpleNamespace(
            max_num_seqs=6, max_num_batched_tokens=budget, async_scheduling=is_async, **flags
        ),
        model_config=SimpleNamespace(
            model="/models/tiny", dtype="torch.float32", max_model_len=64, runner_type="generate",
            hf_text_config=SimpleNamespace(to_json_string=lambda use_diff: json.dumps(model)),
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=caches, cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
        device_config=SimpleNamespace(device_type=device[0]),
    )  # fmt: skip
    return TestbedScheduler(*config, None, BLOCK_SIZE, BLOCK_SIZE)


def engine_of(scheduler: Any, *, is_async: bool = False, is_newer: bool = False) -> Any:
    """The stub's engine with a worker of its own."""
    from tests.real.vllm_stub_engine import Engine

    memory = Memory(BLOCK_SIZE, NUM_BLOCKS, reads_own_step=True)
    worker = NewerRunner(memory, 6) if is_newer else OlderRunner(memory, is_async=is_async)
    return Engine(scheduler, worker, is_async=is_async)


def add(scheduler: Any, name: str, prompt: list[int], max_tokens: int, **options: Any) -> vllm.Request:
    request = vllm.Request(name, prompt, vllm.SamplingParams(max_tokens, **options))
    scheduler.add_request(request)
    return request


def served(scheduler: Any, **kinds: bool) -> dict[str, vllm.Request]:
    """Every request comes while others run; one is aborted."""
    engine, rng, requests = engine_of(scheduler, **kinds), random.Random(5), dict[str, vllm.Request]()
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(12)]
    for number in range(12):
        prompt = shared + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 9))]
        requests[f"r{number}"] = add(scheduler, f"r{number}", prompt, rng.randrange(8, 20), stop_token_ids=[3])
        engine.step()
        if number == 9:
            engine.aborts.append("r8")
    engine.run()
    scheduler.shutdown()
    return requests


@RUNNERS
@LOOPS
def test_a_run_folder_is_left_whose_tape_replays(tmp_path: Path, is_async: bool, is_newer: bool) -> None:
    from tests.real.vllm_stub_engine import written

    folder = tmp_path / "run"
    scheduler = made({"out": str(folder), "device": "cpu"}, is_async=is_async, is_newer=is_newer)
    requests = served(scheduler, is_async=is_async, is_newer=is_newer)
    aborted = requests.pop("r8")
    assert aborted.status == vllm.RequestStatus.FINISHED_ABORTED
    for request in requests.values():
        assert request.output_token_ids == written(request, 64)
    run = load_run(folder)
    assert run.manifest["status"] == "complete"
    assert run.requests["num_preemptions"].sum() > 0
    records = run.requests.set_index("request_id")
    num_tokens = {name: request.num_output_tokens for name, request in requests.items()}
    assert records["num_output_tokens"].to_dict().items() >= num_tokens.items()
    row = records.loc["r8"]
    assert (row["finish_reason"], row["num_output_tokens"]) == ("abort", aborted.num_output_tokens), "it got no more"
    assert failures(run.summary["checks"]) == []
    report = check_parity(folder)
    assert report.divergence is None, report.divergence
    assert report.num_steps == run.manifest["num_steps"]
    rows = {row.request_id: row for row in read_jsonl(folder / "trace.jsonl")}
    for name, request in requests.items():
        assert isinstance(output := rows[name].output, TokenIds)
        assert output.ids.tolist() == request.output_token_ids, "what came, not what might have"
    assert any(one.num_output_tokens < one.max_tokens for one in requests.values())
    assert rows["r8"].cancel_after_ns is not None
    config = config_from(folder, ["backend=sim", "cost=constant"])
    again = execute(config, tmp_path / "sim")
    simulated = load_run(again.folder).requests.set_index("request_id")["num_output_tokens"]
    assert simulated[list(requests)].to_dict() == num_tokens
    with pytest.raises(RunFolderError, match="already holds a run"):
        made({"out": str(folder)})


@LOOPS
def test_requests_that_are_aborted_while_a_step_has_them_were_scheduled(tmp_path: Path, is_async: bool) -> None:
    scheduler = made({"out": str(tmp_path / "run"), "device": "cpu"}, is_async=is_async)
    engine = engine_of(scheduler, is_async=is_async)
    add(scheduler, "r0", [5] * 6, 12)
    engine.step()
    add(scheduler, "r1", [6] * 6, 12)
    engine.aborts = ["r1"]  # while the step is in flight that admits it
    engine.run()
    scheduler.shutdown()
    run = load_run(tmp_path / "run")
    row = run.requests.set_index("request_id").loc["r1"]
    assert (row["finish_reason"], row["num_output_tokens"]) == ("abort", 0)
    assert row["queued_ns"] <= row["first_scheduled_ns"] <= row["finish_ns"]
    assert failures(run.summary["checks"]) == []


def test_a_model_that_has_no_price_here_is_served_and_its_tape_replays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"out": str(tmp_path / "run"), "device": "cpu"}
    scheduler = made(settings, model={"architectures": ["OddForCausalLM"], "state_size": 16})
    assert "/models/tiny has no price here: " in caplog.text
    served(scheduler)
    assert check_parity(tmp_path / "run").divergence is None
    assert load_run(tmp_path / "run").manifest["model"] == "tiny"
    with pytest.raises(ConfigError, match=r"tiny has no price here.*say whose prices to take, as model=llama3.1_8b"):
        config_from(tmp_path / "run", ["backend=sim"])
    config_from(tmp_path / "run", ["backend=sim", "cost=constant"])
    config_from(tmp_path / "run", ["backend=sim", "model=llama3.1_8b"])


def test_what_vllm_admits_and_our_records_do_not_is_bounded_or_named_anew(tmp_path: Path) -> None:
    scheduler = made({"out": str(tmp_path / "run")})
    engine = engine_of(scheduler)
    for priority, max_tokens in ((10**15, 4), (-(10**15), 4), (0, 2**40)):
        request = vllm.Request("again", [7] * 5, vllm.SamplingParams(max_tokens), priority=priority)
        scheduler.add_request(request)
        with pytest.raises(RequestError, match="'again' is in use"):
            scheduler.add_request(request)
        engine.run()
    scheduler.shutdown()
    run = load_run(tmp_path / "run")
    assert list(run.requests["request_id"]) == ["again", "again~2", "again~3"]
    assert list(run.requests["priority"]) == [2**31 - 1, 1 - 2**31, 0]
    assert check_parity(tmp_path / "run").divergence is None


def test_prompt_logprobs_are_refused_where_the_workers_lose_them() -> None:
    for is_newer, num_refused in ((False, 0), (True, 1)):
        scheduler = made({}, is_newer=is_newer)
        params = vllm.SamplingParams(4)
        params.prompt_logprobs = 1
        scheduler.add_request(vllm.Request("a", [7] * 5, params))
        assert len(scheduler._refused) == num_refused
        if num_refused:
            scheduler.add_request(vllm.Request("a", [7] * 5, params))
            assert len(scheduler._refused) == 2, "who was refused is not live: its id may come again"


def test_a_killed_engine_leaves_what_its_tape_needs(tmp_path: Path) -> None:
    scheduler = made({"out": str(tmp_path / "run")})
    engine = engine_of(scheduler)
    for number in range(4):
        add(scheduler, f"r{number}", [7 + number] * 5, 12, stop_token_ids=[3])
        engine.step()
    report = check_parity(tmp_path / "run")  # vLLM never said that it was over
    assert (report.divergence, report.is_cut, report.num_steps) == (None, True, 4)
    (note,) = json.loads((tmp_path / "run" / "manifest.json").read_text())["trace"]["notes"]
    assert note == "of requests that had not ended, outputs are as long as they had leave for"


POLICIES = """
from testbed.policies.queue_order import FCFS


class Raises(FCFS):
    def head(self, now_ns):
        raise ValueError("no head today")


class Quits(FCFS):
    def head(self, now_ns):
        raise SystemExit(3)


class DoesNothing:
    def compose(self, step):
        pass


class TakesAll:
    def compose(self, step):
        while step.num_waiting:
            seq = step.head()
            step.admit(seq, step.blocks.lookup(seq), 2)
"""


@pytest.fixture
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "served_policies.py"
    file.write_text(POLICIES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, file.stem, raising=False)  # of the test before
    return file


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("queue_order", "Raises", "{file}:7: ValueError: no head today (in {named})"),
        ("queue_order", "Quits", "{file}:12: SystemExit: 3 (in {named})"),
        ("composition", "TakesAll", "{named} computes 8 sequences in step 0, and scheduler.max_num_seqs is 6; look at"),
    ],
)
def test_a_policy_that_fails_is_named_in_the_error_and_in_the_folder(
    tmp_path: Path, policies: Path, key: str, name: str, said: str
) -> None:
    target = f"served_policies.{name}"
    preset = {"name": "vllm_v1", key: {"_target_": target}}
    scheduler = made({"out": str(tmp_path / "run"), "scheduler": preset})
    engine = engine_of(scheduler)
    for number in range(8):
        add(scheduler, f"r{number}", [7] * 3, 4)
    line = said.format(file=policies, named=f"scheduler.{key}={target}")
    for _ in range(2):  # whoever asks again is told the same
        with pytest.raises(TestbedError, match=re.escape(line)):
            engine.step()
    scheduler.finish_requests(["r0"], None)
    scheduler.shutdown()
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert line in manifest["failure"]
    assert manifest["status"] == "partial"
    assert not (tmp_path / "run" / "done").exists()


def test_requests_that_no_step_moves_are_named_once(
    policies: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("real.vllm.own_loop.OwnLoop.PATIENCE_NS", 1)
    scheduler = made({"scheduler": {"name": "vllm_v1", "composition": {"_target_": "served_policies.DoesNothing"}}})
    engine = engine_of(scheduler)
    for number in range(2):
        add(scheduler, f"r{number}", [7] * 5, 4)
    for _ in range(5):
        engine.step()
    (line,) = [record.getMessage() for record in caplog.records if "no step has moved" in record.getMessage()]
    assert "no step has moved any of 2 requests: r0, r1; check the policies (scheduler.composition" in line


@pytest.mark.parametrize("num_before", [0, 40], ids=["in the tape", "in a row of the trace"])
def test_a_full_disk_ends_the_records_and_not_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_before: int
) -> None:
    """num_before: requests that come before the first step."""
    scheduler = made({"out": str(tmp_path / "run")})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))
    try:
        for number in range(num_before):
            add(scheduler, f"early{number}", [7] * 40, 1)
        requests = served(scheduler)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all(request.is_finished() for request in requests.values())
    (line,) = [record.getMessage() for record in caplog.records if "nothing more is recorded" in record.getMessage()]
    assert line.endswith("serving goes on")
    assert "File too large" in json.loads((tmp_path / "run" / "manifest.json").read_text())["failure"]
    report = check_parity(tmp_path / "run")
    assert (report.divergence, report.is_cut) == (None, True)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configurations of the schedulers that are made."""
    from experiments.serving import inside_vllm

    configs: list[RunConfig] = []
    build = inside_vllm.build_scheduler
    monkeypatch.setattr(
        inside_vllm, "build_scheduler", lambda config, pools: configs.append(config) or build(config, pools)
    )
    return configs


def test_the_device_is_the_engines_if_nobody_says_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, built: list[RunConfig]
) -> None:
    from real.vllm import observer

    made({})
    monkeypatch.setattr(observer, "device_name", lambda: "NVIDIA A100-SXM4-80GB")
    made({}, device=("cuda", ""))
    made({"device": "l40s"}, device=("cuda", ""))
    assert "device library" not in caplog.text
    monkeypatch.setattr(observer, "device_name", lambda: "NVIDIA Nothing 9000")
    made({}, device=("cuda", ""))
    assert "NVIDIA Nothing 9000 is not in the device library" in caplog.text
    assert [config.device.name for config in built] == ["cpu", "a100", "l40s", "h100"]


def test_what_vllm_was_started_with_holds_for_the_cache() -> None:
    assert made({}).steering.cached_block_size == BLOCK_SIZE
    assert made({"cache": {"prefix_caching": False}}).steering.cached_block_size is None
    assert made({}, caches=False).steering.cached_block_size is None
    with pytest.raises(ConfigError, match=r"^cache.prefix_caching is true, and vLLM was started without"):
        made({"cache": {"prefix_caching": True}}, caches=False)


@pytest.mark.parametrize(
    ("flags", "key", "settings"),
    [
        ({"policy": "priority"}, "scheduler.queue_order", {"name": "vllm_v1", "queue_order": "fcfs"}),
        ({"long_prefill_token_threshold": 9}, "scheduler.long_prefill_token_threshold",
         {"name": "vllm_v1", "long_prefill_token_threshold": 9}),
    ],
)  # fmt: skip
def test_what_only_vllms_own_scheduler_reads_is_refused(
    flags: dict[str, Any], key: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"^vLLM was started with .* leave it out, and say {key} to this one"):
        made({}, **flags)
    made({"scheduler": settings}, **flags)
    with pytest.raises(ConfigError, match=r"say cache\.watermark to this one"):
        made({}, watermark=0.01)


def test_policies_that_ask_for_prices_are_told_those_of_the_model_that_is_served(built: list[RunConfig]) -> None:
    made({})
    assert (built[0].model.hidden_size, built[0].model.dtype) == (MODEL["hidden_size"], "float32")


FROZEN = {"name": "vllm_v0", "preemption": "recompute"}
MERGED = FROZEN | {"kv_rules": {"hits_frozen": False}}


@pytest.mark.parametrize(
    ("settings", "is_async", "message"),
    [
        ("sarathi", False, "is 'sarathi'; it must have keys, as {'scheduler': 'sarathi'}"),
        ({"scheduler": 5}, False, "scheduler is 5; it must be a string or keys"),
        ([], False, r"is \[\]; it must have keys"),
        ({"out": ""}, False, "out is empty; leave it out"),
        ({5: "sarathi"}, False, "unknown key 5"),
        ({"cache": "off"}, False, "cache is 'off'; it must be keys"),
        ({"out": 5}, False, "out is 5; it must be a string"),
        ({"out": "/dev/null/run"}, False, "out is /dev/null/run, and Not a directory"),
        ({"schedular": "sarathi"}, False, "unknown key 'schedular'; did you mean 'scheduler'"),
        ({"scheduler": "sarathy"}, False, "did you mean 'sarathi'"),
        ({"scheduler": {"name": "sarathi", "max_num_seqs": 99}}, False, "is 99, and vLLM was started for 6"),
        ({"cache": {"block_size": 16}}, False, "cache.block_size is 16, and vLLM's is 4"),
        ({"scheduler": {"name": "vllm_v1", "preemption": "swap"}}, False, "vLLM has no CPU blocks to swap to"),
        ({"scheduler": {"name": "vllm_v1", "preemption": "cheaper"}}, False, "vLLM has no CPU blocks to swap to"),
        ({"cache": {"sliding_window": 32}}, False, "workers read the blocks that this releases"),
        ({"scheduler": {"name": "vllm_v1", "async_scheduling": True}}, False, "is True, and vLLM's is False"),
        ({"scheduler": "vllm_v1_async"}, False, "of vllm_v1_async is True, and vLLM's is False"),
        ({"scheduler": {"name": "vllm_v1", "max_num_seqs": "99"}}, False, "is 99, and vLLM was started for 6"),
        ({"scheduler": {"name": "vllm_v1", "max_model_len": 32}}, False, "max_model_len is 32, and vLLM's is 64"),
        ({"cache": {"kv_dtype": "fp8"}}, False, "cache.kv_dtype is fp8: that is vLLM's; leave it out"),
        ({"scheduler": FROZEN}, False, "hits_frozen=true counts blocks as cached that were evicted"),
        ({"scheduler": "vllm_v0_chunked"}, False, "hits_visible=plan counts chunks as cached"),
        ({"scheduler": MERGED}, True, "duplicates=merged changes block tables while a token is on its way"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_served(
    settings: Any, is_async: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        made(settings, is_async=is_async, budget=64)


def test_another_vllm_is_refused_before_anything_of_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a name may be missing, and that would be all that is said."""
    import vllm as stub_of_vllm

    import real.vllm

    monkeypatch.setattr(stub_of_vllm, "__version__", "0.35.0")
    for module in ("experiments.serving.inside_vllm", "real.vllm.scheduler"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.delattr(sys.modules["vllm.v1.core.sched.interface"], "PauseState")
    with pytest.raises(ConfigError, match=r"vLLM 0\.35\.0 is installed, and this testbed's scheduler fits into 0\.28"):
        _ = real.vllm.TestbedScheduler


def test_merged_blocks_go_where_no_token_is_on_its_way() -> None:
    made({"scheduler": MERGED}, budget=64)
    made({"scheduler": MERGED, "cache": {"prefix_caching": False}}, is_async=True, budget=64)


def test_a_policy_that_splits_no_prompt_needs_workers_of_the_longest_one() -> None:
    made({"scheduler": "orca"}, budget=64)
    with pytest.raises(ConfigError, match=r"scheduler=orca splits no prompt: a step may have max_model_len \(64\)"):
        made({"scheduler": "orca"}, budget=63)
