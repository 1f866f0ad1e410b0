"""CoreInVllm by hand, without vLLM: what it refuses, what EngineCore asks of it, and pauses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from real.vllm import check_version
from testbed.core.commands import Recorder, StepView
from testbed.core.limits import Limits
from testbed.core.outcome import Outcome, Spans
from testbed.core.request import Request, SamplingParams
from testbed.errors import ConfigError
from tests.properties.setups import Setup
from tests.real import vllm_stub_types as vllm
from tests.real.vllm_stub import LOOPS, RUNNERS
from tests.real.vllm_stub_worker import Memory, NewerRunner, OlderRunner

pytestmark = pytest.mark.usefixtures("vllm_stub")

BLOCK_SIZE = 4
ALL, NEW, NONE = vllm.PauseState.PAUSED_ALL, vllm.PauseState.PAUSED_NEW, vllm.PauseState.UNPAUSED


class Served:
    """A roomy core in the stub's engine."""

    def __init__(self, *, is_async: bool = False, is_newer: bool = False, **options: Any) -> None:
        from experiments.serving.inside_vllm import _Nothing, _request_of
        from real.vllm.own_loop import OwnLoop
        from tests.real.vllm_stub_engine import Engine, Steered, engine_config

        limits = Limits(8, 64, 64, 0, 1, max_num_plans=1 + is_async)
        self.core = Setup(num_cpu_blocks=0, preemption="recompute", limits=limits).scheduler()
        loop = OwnLoop(self.core, _Nothing(), _request_of)
        self.scheduler = Steered(loop, engine_config(is_newer=is_newer), BLOCK_SIZE, **options)
        self.memory = Memory(BLOCK_SIZE, 17, reads_own_step=False)
        self.worker = NewerRunner(self.memory, 8) if is_newer else OlderRunner(self.memory, is_async=is_async)
        self.engine = Engine(self.scheduler, self.worker, is_async=is_async)
        self.reasons: dict[str, str] = {}

    def add(
        self, name: str, prompt: list[int] | None = None, max_tokens: int = 6, *, client: int = 0, **fields: Any
    ) -> vllm.Request:
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9] if prompt is None else prompt
        request = vllm.Request(name, prompt, vllm.SamplingParams(max_tokens), client_index=client, **fields)
        self.scheduler.add_request(request)
        return request

    def step(self, num: int = 1) -> None:
        for _ in range(num):
            for one in self.engine.step():
                if one.finish_reason is not None:
                    assert one.request_id not in self.reasons
                    self.reasons[one.request_id] = str(one.finish_reason)

    def run(self) -> dict[str, str]:
        """Until there is nothing to do; why each ended."""
        for _ in range(200):
            if not self.engine.has_work:
                return self.reasons
            self.step()
        raise AssertionError("the engine does not come to rest")

    def turn(self) -> tuple[Any, dict[int, Any]]:
        """Plans and executes a step by hand: what was scheduled, and what there is for each client."""
        output = self.scheduler.schedule()
        return output, self.scheduler.update_from_output(output, self.worker.execute(output))

    @property
    def num_hit_tokens(self) -> int:
        return self.core.blocks.prefixes.num_hit_tokens

    def check_nothing_is_left(self) -> None:
        assert self.core.blocks.num_free_blocks == 16
        assert self.worker.known == {}


def tokens_alone(request: vllm.Request) -> list[int]:
    from tests.real.vllm_stub_engine import written

    return written(request, 64)


def check_tokens(*requests: vllm.Request) -> None:
    """Each has those that it gets alone."""
    for request in requests:
        assert request.output_token_ids == tokens_alone(request)


# --- refusals ---


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA"),
        ({"kv_transfer_config": object()}, "KV connectors"),
        ({"ec_transfer_config": object()}, "encoder-cache connectors"),
        ({"kv_events_config": SimpleNamespace(enable_kv_cache_events=True)}, "KV events"),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "pipeline parallelism"),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=2)}, "data parallelism"),
        ({"model_config": SimpleNamespace(is_multimodal_model=True)}, "multimodal models"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "encoder-decoder models"),
        ({"model_config": SimpleNamespace(runner_type="pooling")}, "pooling models"),
        ({"specs": (vllm.FullAttentionSpec(),) * 2}, "2 groups of KV caches"),
        ({"specs": (vllm.SlidingWindowSpec(),)}, "KV caches other than of full attention"),
    ],
)
def test_an_engine_is_refused_by_the_name_of_what_we_have_not(change: dict[str, Any], name: str) -> None:
    from tests.real.vllm_stub_engine import Steered, engine_config

    with pytest.raises(ConfigError, match=f"this testbed's scheduler has no {name}"):
        Steered(object(), engine_config(**change), BLOCK_SIZE)


@pytest.mark.parametrize("version", ["0.27.1", "0.34.0", "1.0", "what"])
def test_an_engine_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    import vllm as stub_of_vllm

    check_version("0.28.0")
    check_version("0.33.1+cpu")
    monkeypatch.setattr(stub_of_vllm, "__version__", version)
    with pytest.raises(ConfigError, match=r"fits into 0\.28 to 0\.33"):
        Served()


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("sampling_params", None, "pooling"),
        ("prompt_token_ids", None, "prompts of embeddings"),
        ("prompt_embeds", object(), "prompts of embeddings"),
        ("structured_output_request", object(), "structured output"),
        ("lora_request", object(), "LoRA"),
        ("mm_features", [object()], "multimodal inputs"),
        ("resumable", True, "streaming sessions"),
    ],
)
@LOOPS
def test_a_request_for_what_we_have_not_ends_with_an_error_and_others_go_on(
    caplog: pytest.LogCaptureFixture, is_async: bool, field: str, value: Any, name: str
) -> None:
    from real.vllm.scheduler import unknown_to_us

    served = Served(is_async=is_async)
    good = served.add("good")
    served.step()
    bad = vllm.Request("bad", [1], vllm.SamplingParams(2))
    assert unknown_to_us(bad) == ""
    setattr(bad, field, value)
    served.scheduler.add_request(bad)
    assert served.run() == {"good": "length", "bad": "error"}
    assert f"request bad ends with an error: this testbed's scheduler has no {name}" in caplog.text
    check_tokens(good)
    assert not served.scheduler._names


@LOOPS
def test_a_request_that_can_never_fit_ends_with_an_error(is_async: bool) -> None:
    served = Served(is_async=is_async)
    served.add("too long", [1] * 65)
    served.add("fits")
    assert served.run() == {"too long": "error", "fits": "length"}
    assert served.worker.known == {}


# --- what EngineCore asks ---


def test_of_what_we_have_not_there_is_nothing() -> None:
    scheduler = Served().scheduler
    assert scheduler.connector is scheduler.ec_connector is None
    assert scheduler.get_grammar_bitmask(None) is scheduler.get_kv_connector() is scheduler.get_ec_connector() is None
    assert scheduler.get_kv_event_publisher_config() is None
    scheduler.update_draft_token_ids(None)
    scheduler.update_draft_token_ids_in_output(None, None)
    scheduler.reset_encoder_cache()
    assert scheduler.make_stats() is None


def test_statistics_are_with_the_outputs_if_vllm_wants_them() -> None:
    served = Served(log_stats=True)
    served.add("a")
    _, found = served.turn()
    stats = found[0].scheduler_stats
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (1, 0)
    assert stats.kv_cache_usage == served.scheduler.get_kv_cache_usage() == pytest.approx(3 / 16)
    assert served.scheduler.get_request_counts() == (1, 0)


def test_what_happened_to_a_request_is_with_its_output_if_vllm_wants_it() -> None:
    """Its own metrics are made of that: time in the queue, of the prefill, tokens found in the cache."""
    served = Served(log_stats=True)
    for name in ("a", "b"):  # the second one finds the first one's blocks
        served.add(name, [7] * 9)
        found = served.turn()[1][0]
        (one,) = [made for made in found.outputs if made.request_id == name]
        assert one.events == [vllm.EngineCoreEventType.QUEUED, vllm.EngineCoreEventType.SCHEDULED]
        assert one.prefill_stats == vllm.PrefillStats(9, 8 * (name == "b"), 8 * (name == "a"))
        assert found.scheduler_stats.prefix_cache_stats == vllm.PrefixCacheStats(9, 8 * (name == "b"))
    silent = Served()
    silent.add("a")
    assert silent.turn()[1][0].outputs[0].events is None


def test_each_client_is_told_of_its_own_requests_and_of_those_that_ended() -> None:
    served = Served(include_finished_set=True)
    served.add("a", max_tokens=1, client=0)
    served.add("b", max_tokens=2, client=1)
    served.add("c", client=2)
    served.scheduler.finish_requests("c", vllm.RequestStatus.FINISHED_ABORTED)
    told = []
    for _ in range(2):
        found = served.turn()[1].items()
        told.append({at: ([one.request_id for one in made.outputs], made.finished_requests) for at, made in found})
    assert told == [{0: (["a"], {"a"}), 1: (["b"], set()), 2: ([], {"c"})}, {1: (["b"], {"b"})}]


@LOOPS
def test_all_requests_can_be_ended_at_once(is_async: bool) -> None:
    served = Served(is_async=is_async)
    requests = [served.add(name) for name in "abc"]
    served.step(2)
    ended = served.scheduler.finish_requests(None, vllm.RequestStatus.FINISHED_ABORTED)
    assert sorted(request.request_id for request in ended) == ["a", "b", "c"]
    assert all(request.is_finished() for request in requests)
    assert served.run() == {}
    served.check_nothing_is_left()


@RUNNERS
def test_an_id_may_come_again_while_what_was_drawn_for_it_is_on_its_way(is_newer: bool) -> None:
    served = Served(is_async=True, is_newer=is_newer)
    served.add("a")
    served.step()
    assert len(served.engine.queue) == 1
    served.engine.abort(["a"])
    again = served.add("a", [5, 4, 3])
    assert served.run() == {"a": "length"}
    check_tokens(again)


def test_what_was_cached_before_a_reset_is_found_no_more() -> None:
    served = Served()
    served.add("a")
    served.run()
    served.add("b")
    served.step()
    assert served.num_hit_tokens == 8
    assert not served.scheduler.reset_prefix_cache(), "as long as requests have blocks"
    served.run()
    assert served.scheduler.reset_prefix_cache()
    assert served.add("c", cache_salt="own").cache_salt == "own"
    served.add("d")
    served.run()
    assert served.num_hit_tokens == 8
    served.add("e")
    assert served.run() == dict.fromkeys("abcde", "length")
    assert served.num_hit_tokens == 16


@RUNNERS
@LOOPS
@pytest.mark.parametrize("is_paused", [False, True], ids=["between steps", "in a pause"])
def test_a_reset_of_what_runs_has_it_computed_again_and_changes_no_token(
    is_newer: bool, is_async: bool, is_paused: bool
) -> None:
    """As vLLM's pause_generation(mode="keep", clear_cache=True) asks for it, before weights are changed."""
    served = Served(is_async=is_async, is_newer=is_newer)
    requests = [served.add("a"), served.add("b"), served.add("c", [7, 7])]
    served.step(3)
    if is_paused:
        served.scheduler.set_pause_state(ALL)
        assert served.run() == {}
    num_hit = served.num_hit_tokens
    assert served.scheduler.reset_prefix_cache(True, True)
    served.memory.wipe()
    served.scheduler.set_pause_state(NONE)
    assert served.run() == dict.fromkeys("abc", "length")
    check_tokens(*requests)
    assert [request.num_preemptions for request in requests] == [1] * 3
    assert num_hit == served.num_hit_tokens == 0
    served.check_nothing_is_left()


@LOOPS
def test_aborts_and_a_reset_at_once(is_async: bool) -> None:
    """As a pause with mode="abort" has it: nothing is left to preempt."""
    served = Served(is_async=is_async)
    served.add("a")
    served.step(2)
    served.scheduler.finish_requests(None, vllm.RequestStatus.FINISHED_ABORTED)
    assert served.scheduler.reset_prefix_cache(), "what has ended has no blocks"
    served.memory.wipe()
    again = served.add("b")
    assert served.run() == {"b": "length"}
    check_tokens(again)
    assert again.num_preemptions == served.num_hit_tokens == 0


# --- pauses ---


@RUNNERS
@LOOPS
def test_a_pause_of_all_comes_to_rest_and_loses_nothing(is_newer: bool, is_async: bool) -> None:
    served = Served(is_async=is_async, is_newer=is_newer)
    running = [served.add("a"), served.add("b", [4, 4])]
    served.step(3)
    served.scheduler.set_pause_state(ALL)
    assert served.scheduler.pause_state == ALL
    assert served.run() == {}, "vLLM takes a pause for complete when there is nothing to do"
    num_output = running[0].num_output_tokens
    later = served.add("c", [7])
    assert [served.scheduler.has_request(name) for name in "abcd"] == [True, True, True, False]
    assert served.scheduler.get_num_unfinished_requests() == 0
    served.engine.abort(["b"])
    assert not served.engine.has_work
    served.scheduler.set_pause_state(NONE)
    assert served.run() == {"a": "length", "c": "length"}
    assert not any(map(served.scheduler.has_request, "abc"))
    assert len(tokens_alone(running[0])) > num_output > 0
    check_tokens(running[0], later)
    served.check_nothing_is_left()


@RUNNERS
@LOOPS
def test_steps_without_requests_in_between_lose_no_token(is_newer: bool, is_async: bool) -> None:
    """Workers take everyone out of their batch then."""
    served = Served(is_async=is_async, is_newer=is_newer)
    request = served.add("a")
    served.step(4)
    served.scheduler.set_pause_state(ALL)
    served.run()
    output, _ = served.turn()
    assert output.total_num_scheduled_tokens == 0
    served.scheduler.set_pause_state(NONE)
    assert served.run() == {"a": "length"}
    check_tokens(request)


def test_while_new_requests_are_paused_those_that_are_there_end_and_others_are_kept_back() -> None:
    served = Served()
    served.add("a")
    served.step()
    served.scheduler.set_pause_state(NEW)
    later, gone = served.add("b"), served.add("c")
    assert served.scheduler.get_num_unfinished_requests() == 1
    assert served.run() == {"a": "length"}
    assert served.engine.abort(["c"]) == [gone]
    assert not served.engine.has_work
    assert served.scheduler.reset_prefix_cache(), "nobody is served"
    served.scheduler.set_pause_state(NONE)
    assert served.run() == {"a": "length", "b": "length"}
    check_tokens(later)
    assert served.num_hit_tokens == 0


def test_steps_are_timed_by_the_clock_of_the_loop() -> None:
    from real.vllm.own_loop import OwnLoop

    class Steps(Recorder):
        def committed(self, step: StepView) -> None:
            steps.append((step.plan_ns, step.end_ns, step.result.spans))

    def made(name: str, prompt: list[int], arrival_ns: int) -> Request:
        return Request(name, prompt, arrival_ns=arrival_ns, sampling=SamplingParams(max_tokens=1))

    steps: list[tuple[int, int, Spans]] = []
    now_ns = 50
    core = Setup(num_cpu_blocks=0, preemption="recompute").scheduler()
    loop = OwnLoop(core, Steps(), made, read_ns=lambda: now_ns)
    now_ns = 150
    loop.added("a", [1, 2, 3])
    now_ns = 250
    (row,) = loop.next_plan().scheduled
    now_ns = 750
    loop.took((Outcome(row.seq_id, (5,)),))
    assert steps == [(200, 700, Spans(schedule_ns=1, forward_ns=499))]
