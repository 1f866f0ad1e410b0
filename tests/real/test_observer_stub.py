"""What is put before vLLM's schedulers to log them, without vLLM: over a scheduler that does what a test says."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.observe.log import read_log
from testbed.errors import ConfigError
from tests.real import vllm_stub_types as vllm
from tests.real.vllm_stub import VERSION, AsyncScheduler, Scheduler, stub_vllm

pytestmark = pytest.mark.usefixtures("vllm_stub")

MODEL = {"model_type": "qwen3", "num_hidden_layers": 2}
BLOCK_SIZE, NUM_BLOCKS = 4, 9


class Pool:
    """Of the null block, and as many as the requests' tokens leave."""

    def __init__(self) -> None:
        self.scheduler: Any = None
        self.block_pool = self

    def get_num_free_blocks(self) -> int:
        computed = [request.num_computed_tokens for request in self.scheduler.requests.values()]
        return NUM_BLOCKS - 1 - sum(-(-num // BLOCK_SIZE) for num in computed)


def made(
    additional_config: dict[str, Any] | None, *, is_async: bool = False, observes: bool | None = None, **unknown: Any
) -> Any:
    """An observed scheduler. observes: whether the asynchronous class does; by default that which fits."""
    from real.vllm.observer import ObservedAsyncScheduler, ObservedScheduler

    pool = Pool()
    config = SimpleNamespace(
        additional_config=additional_config, kv_cache_manager=pool,
        scheduler_config=SimpleNamespace(
            max_num_seqs=8, max_num_batched_tokens=64, policy="fcfs", long_prefill_token_threshold=0, watermark=0.0,
            async_scheduling=is_async,
        ),
        model_config=SimpleNamespace(
            model="/models/tiny", dtype="torch.float32", max_model_len=64,
            hf_text_config=SimpleNamespace(to_json_string=lambda use_diff: json.dumps(MODEL)),
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
        device_config=SimpleNamespace(device_type="cpu"),
        **unknown,
    )  # fmt: skip
    caches = SimpleNamespace(
        num_blocks=NUM_BLOCKS, kv_cache_groups=[SimpleNamespace(kv_cache_spec=vllm.FullAttentionSpec())]
    )
    kind = ObservedAsyncScheduler if (is_async if observes is None else observes) else ObservedScheduler
    pool.scheduler = kind(config, caches, BLOCK_SIZE)
    return pool.scheduler


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def observed(log: Path, tokens: str = "ids", **options: Any) -> Any:
    return made({"testbed": {"observe": str(log), "tokens": tokens}}, **options)


def plan(scheduler: Any, preempted: set[str] | None = None, **counts: int) -> Any:
    output = vllm.SchedulerOutput(
        [], vllm.CachedRequestData.make_empty(), counts, sum(counts.values()), {}, {}, set(), [], preempted
    )
    scheduler.plans.append(output)
    return scheduler.schedule()


def add(scheduler: Any, name: str, prompt: list[int] | None, max_tokens: int = 2, **fields: Any) -> None:
    scheduler.add_request(vllm.Request(name, prompt, vllm.SamplingParams(max_tokens), **fields))


def lines(log: Path, *kinds: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in found if not kinds or line["kind"] in kinds]


def picked(line: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: line[key] for key in keys}


def test_the_first_line_describes_the_engine(log: Path) -> None:
    scheduler = observed(log, lora_config=object(), speculative_config=None)
    add(scheduler, "a", [1])
    plan(scheduler, a=1)
    (first,) = lines(log, "observed")
    assert picked(first, "version", "vllm", "scheduler", "unknown") == {
        "version": 1, "vllm": VERSION, "scheduler": "ObservedScheduler", "unknown": ["lora_config"],
    }  # fmt: skip
    expected = {
        "max_num_seqs": 8, "block_size": 4, "num_gpu_blocks": 8, "num_kv_cache_groups": 1, "max_model_len": 64,
        "prefix_caching": True, "prefill_schedule_interval": None, "async_scheduling": False,
        "kv_cache_specs": ["FullAttentionSpec"],
    }  # fmt: skip
    assert picked(first["config"], *expected) == expected
    assert first["model"] == {"name": "/models/tiny", "dtype": "float32", "hf_config": MODEL}
    assert picked(first["device"], "type", "tensor_parallel_size") == {"type": "cpu", "tensor_parallel_size": 1}


def test_the_synchronous_class_is_refused_where_vllm_plans_ahead(log: Path) -> None:
    settings = {"testbed": {"observe": str(log)}}
    with pytest.raises(ValueError, match=r"take real\.vllm\.ObservedAsyncScheduler"):
        made(settings, is_async=True, observes=False)
    made(settings, is_async=False, observes=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"observe": "log.jsonl", "tokens": "length"}, r"has tokens='length'; the observer has observe \(a file\)"),
        ({"observ": "log.jsonl"}, "has observ='log.jsonl'; the observer has"),
        ({"observe": 5}, "has observe=5; the observer has"),
        ("log.jsonl", "has 'log.jsonl'; the observer has"),
        ({"observe": "nosuch/log.jsonl"}, "to be nosuch/log.jsonl, and there is no such folder"),
    ],
)
def test_settings_of_the_observer_that_cannot_be_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made({"testbed": settings})


def test_steps_are_logged_as_they_are_planned_and_taken(log: Path) -> None:
    scheduler = observed(log)
    add(scheduler, "a", [1, 2, 3], arrival_time=1.5, cache_salt="s", priority=2)
    add(scheduler, "b", [7] * 5)
    scheduler.update_from_output(plan(scheduler, a=3, b=2), {"a": 9})
    scheduler.requests["b"].num_computed_tokens = 0
    scheduler.update_from_output(plan(scheduler, preempted={"b"}, a=1), {"a": 8})
    scheduler.update_from_output(plan(scheduler, b=5), {"b": 6})
    expected = {"id": "a", "prompt": [1, 2, 3], "plans": 0, "commits": 0, "salt": "s", "priority": 2, "max_tokens": 2}
    assert picked(lines(log, "add")[0], *expected, "arrival_unix_ns") == expected | {"arrival_unix_ns": 1_500_000_000}
    keys = ("step", "committed", "scheduled", "admitted", "preempted", "free_blocks", "num_running", "num_waiting")
    assert [[line[key] for key in keys] for line in lines(log, "plan")] == [
        [0, 0, {"a": 3, "b": 2}, {"a": 0, "b": 0}, [], 6, 2, 0],
        [1, 1, {"a": 1}, {}, ["b"], 7, 2, 0],
        [2, 2, {"b": 5}, {"b": 0}, [], 6, 1, 0],
    ]
    assert [[line[key] for key in ("step", "emitted", "ended", "free_blocks")] for line in lines(log, "commit")] == [
        [0, {"a": [9]}, {}, 6],
        [1, {"a": [8]}, {"a": "length"}, 8],
        [2, {"b": [6]}, {}, 6],
    ]
    for line in lines(log, "plan", "commit"):
        assert line["began_ns"] <= line["ns"]
    found = read_log(log)
    assert found.num_open == 1, "b has not ended"
    assert (len(found.steps), found.requests["a"].output, found.requests["a"].reason) == (3, [9, 8], "length")


def test_an_asynchronous_scheduler_plans_before_it_takes(log: Path) -> None:
    scheduler = observed(log, is_async=True)
    add(scheduler, "a", [1, 2])
    first, second = plan(scheduler, a=2), plan(scheduler, a=1)
    scheduler.update_from_output(first, {"a": 5})
    scheduler.update_from_output(second, {"a": 6})
    assert [line["kind"] for line in lines(log)] == ["observed", "add", "plan", "plan", "commit", "commit"]
    assert [line["committed"] for line in lines(log, "plan")] == [0, 0]
    assert [line["step"] for line in lines(log, "commit")] == [0, 1]
    found = read_log(log)
    assert found.num_open == 0
    assert found.header["scheduler"] == "ObservedAsyncScheduler"


def test_steps_without_requests_are_not_logged_but_those_that_only_preempt(log: Path) -> None:
    scheduler = observed(log)
    add(scheduler, "a", [1, 2])
    plan(scheduler, a=1)
    scheduler.update_from_output(plan(scheduler), {})
    plan(scheduler, preempted={"a"})
    assert [line["preempted"] for line in lines(log, "plan")] == [[], ["a"]]
    assert lines(log, "commit") == []


def test_each_step_is_in_the_file_when_it_is_done(log: Path) -> None:
    """Whoever kills the engine then has all of it."""
    scheduler = observed(log)
    add(scheduler, "a", [1, 2])
    output = plan(scheduler, a=2)
    assert [line["kind"] for line in lines(log)] == ["observed", "add", "plan"]
    scheduler.update_from_output(output, {"a": 5})
    assert [line["kind"] for line in lines(log)] == ["observed", "add", "plan", "commit"]


def test_lengths_in_place_of_ids_if_asked_for(log: Path) -> None:
    scheduler = observed(log, "lengths")
    add(scheduler, "a", [1, 2, 3], max_tokens=1)
    add(scheduler, "of embeddings", None)
    scheduler.update_from_output(plan(scheduler, a=3), {"a": 9})
    assert [line["prompt"] for line in lines(log, "add")] == [3, 0]
    assert [line["emitted"] for line in lines(log, "commit")] == [{"a": 1}]
    assert "[9]" not in log.read_text()
    found = read_log(log)
    assert (found.requests["a"].prompt, found.requests["a"].output) == (3, [0])


NAMED = {
    "one": lambda: "a", "list": lambda: ["nobody", "a"], "set": lambda: {"a"},
    "iterator": lambda: iter(["a", "nobody"]), "all": lambda: None,
}  # fmt: skip


@pytest.mark.parametrize("named", NAMED)
def test_aborts_are_noted_in_whatever_form_they_come(log: Path, named: str) -> None:
    scheduler = observed(log)
    add(scheduler, "a", [1, 2])
    output = plan(scheduler, a=2)
    ended = scheduler.finish_requests(NAMED[named](), vllm.RequestStatus.FINISHED_ABORTED)
    assert [request.request_id for request in ended] == ["a"]
    scheduler.update_from_output(output, {})
    (abort,) = lines(log, "abort")
    assert picked(abort, "id", "plans", "commits") == {"id": "a", "plans": 1, "commits": 0}
    found = read_log(log)
    assert found.requests["a"].reason == "abort"
    assert found.requests["a"].aborted == (1, 0)
    assert found.num_open == 0


def test_resets_of_the_prefix_cache_are_noted(log: Path) -> None:
    scheduler = observed(log)
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    add(scheduler, "a", [1, 2], max_tokens=1)
    scheduler.update_from_output(plan(scheduler, a=2), {"a": 5})
    assert scheduler.calls == ["reset_prefix_cache"]
    assert read_log(log).resets == (((0, 0), True),)


class _Full:
    """A file on a disk that is full."""

    def __init__(self, fails_at: str) -> None:
        self._fails_at = fails_at

    def _do(self, what: str) -> None:
        if what == self._fails_at:
            raise OSError(28, "No space left on device")

    def write(self, text: str) -> None:
        self._do("write")

    def flush(self) -> None:
        self._do("flush")

    def close(self) -> None:
        self._do("close")


@pytest.mark.parametrize("fails_at", ["write", "flush", "close", "it is closed"])
def test_a_log_that_cannot_be_written_is_given_up_and_serving_goes_on(
    log: Path, caplog: pytest.LogCaptureFixture, fails_at: str
) -> None:
    scheduler = observed(log)
    scheduler.testbed_log._file.close()
    if fails_at != "it is closed":
        scheduler.testbed_log._file = _Full(fails_at)
    add(scheduler, "a", [1, 2])
    for token in (5, 6):
        num_tokens = 2 if token == 5 else 1
        found = scheduler.update_from_output(plan(scheduler, a=num_tokens), {"a": token})
        assert found[0].outputs[0].new_token_ids == [token]
    scheduler.finish_requests(None, vllm.RequestStatus.FINISHED_ABORTED)
    scheduler.reset_prefix_cache()
    scheduler.shutdown()
    assert scheduler.calls == ["reset_prefix_cache", "shutdown"]
    assert caplog.text.count("the testbed's log is given up at step") == 1


def test_a_log_without_a_place_is_refused(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    for config in (None, {}, {"testbed": None}, {"testbed": {"tokens": "ids"}}):
        monkeypatch.delenv("TESTBED_OBSERVE", raising=False)
        with pytest.raises(ValueError, match="tell the observer where to write"):
            made(config)
        monkeypatch.setenv("TESTBED_OBSERVE", str(log))
        made(config).shutdown()
    assert len(list(log.parent.iterdir())) == 4


def test_a_log_is_never_written_over(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that is started again after a crash, and each of its engines, gets a file of its own."""
    engines = [observed(log) for _ in range(3)]
    for number, engine in enumerate(engines):
        add(engine, f"r{number}", [1])
        engine.shutdown()
    for number, name in enumerate(("log.jsonl", "log-1.jsonl", "log-2.jsonl")):
        assert [line["id"] for line in lines(log.with_name(name), "add")] == [f"r{number}"]
    assert caplog.messages == [
        f"the testbed's log is written to {log.with_name(name)}: {log} is there already"
        for name in ("log-1.jsonl", "log-2.jsonl")
    ]


def test_what_vllm_is_told_to_import_is_found_by_name() -> None:
    import real.vllm as plugins

    assert issubclass(plugins.ObservedScheduler, Scheduler)
    assert issubclass(plugins.ObservedAsyncScheduler, AsyncScheduler)
    assert issubclass(plugins.TestbedScheduler, vllm.SchedulerInterface)
    with pytest.raises(AttributeError, match="no attribute 'Observer'"):
        _ = plugins.Observer


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "no installed package has them"),
        ("real.vllm.of_before:TestbedScheduler", "real.vllm.of_before:TestbedScheduler, which they name, is not there"),
        ("nosuch.inside:TestbedScheduler", "nosuch.inside:TestbedScheduler, which they name, is not there"),
    ],
)
def test_what_was_not_installed_or_long_ago_is_to_be_installed(
    monkeypatch: pytest.MonkeyPatch, value: str, said: str
) -> None:
    """A checkout on PYTHONPATH; an install from before a module moved."""
    import real.vllm as plugins

    found = [EntryPoint("TestbedScheduler", value, plugins.GROUP)] if value else []
    monkeypatch.setattr(plugins, "entry_points", lambda **_: found)
    with pytest.raises(ConfigError, match=rf"{re.escape(said)}: pip install this repository \(again\) in vLLM's env"):
        _ = plugins.TestbedScheduler


def test_a_stub_hides_what_was_there_and_puts_it_back() -> None:
    """A real vLLM, or another stub."""
    from real.vllm import told

    there, names = sys.modules["vllm"], set(sys.modules)
    with stub_vllm():
        from real.vllm import told as other

        assert sys.modules["vllm"] is not there
        assert other is not told
    from real.vllm import told as again

    assert sys.modules["vllm"] is there
    assert again is told is sys.modules["real.vllm.told"]
    assert set(sys.modules) == names
