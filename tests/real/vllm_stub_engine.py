"""A stand-in for vLLM's EngineCore, with both of its loops, and a life in it: random requests, aborts and pauses.

Import within tests.real.vllm_stub.stub_vllm() only.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from experiments.serving.inside_vllm import _request_of
from real.vllm.own_loop import OwnLoop
from real.vllm.scheduler import CoreInVllm, Steering
from sim.driver import drive
from sim.recorded_device import RecordedDevice
from testbed.core.commands import Recorder, StepView
from testbed.core.plan import BatchPlan
from testbed.core.request import Request as OurRequest
from testbed.core.serve import serve
from testbed.records.tape import TapeInbox, TapeWriter, read_tape
from tests.properties.setups import EOS, Setup
from tests.real import vllm_stub_types as vllm
from tests.real.vllm_stub_worker import VOCAB_SIZE, Memory, NewerRunner, OlderRunner, draw

STOP = 3
NUM_STEPS_UNMOVED = 500  # without a token: more than any prompt here needs


def engine_config(
    *, max_model_len: int = 64, max_num_seqs: int = 8, is_newer: bool = False, num_blocks: int = 17,
    specs: tuple[Any, ...] = (), **changes: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """What a scheduler is made with, of an engine that ours takes; num_blocks: with the null block."""
    config = {
        "speculative_config": None, "lora_config": None, "kv_transfer_config": None, "ec_transfer_config": None,
        "kv_events_config": None, "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "model_config": SimpleNamespace(max_model_len=max_model_len, runner_type="generate"),
        "scheduler_config": SimpleNamespace(max_num_seqs=max_num_seqs), "use_v2_model_runner": is_newer,
    }  # fmt: skip
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs or (vllm.FullAttentionSpec(),)]
    return SimpleNamespace(**{**config, **changes}), SimpleNamespace(kv_cache_groups=groups, num_blocks=num_blocks)


class Steered(CoreInVllm):
    """CoreInVllm with a loop that is given."""

    def __init__(self, steering: Steering, config: tuple[Any, Any], block_size: int, **options: Any) -> None:
        self._given = steering
        super().__init__(*config, None, block_size, block_size, **options)

    def make_steering(self) -> Steering:
        return self._given


class Engine:
    """Steps a scheduler and a worker. is_async: with a queue of two batches; the device runs them as they come."""

    def __init__(self, scheduler: Any, worker: Any, *, is_async: bool) -> None:
        self.scheduler, self._worker, self._is_async = scheduler, worker, is_async
        self.queue: deque[tuple[Any, Any]] = deque()
        self.aborts: list[str] = []  # that come while a batch is in flight

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self.queue)

    def run(self) -> None:
        """Until there is nothing to do."""
        while self.has_work:
            self.step()

    def abort(self, names: list[str]) -> list[Any]:
        return self.scheduler.finish_requests(names, vllm.RequestStatus.FINISHED_ABORTED)

    def step(self) -> list[Any]:
        """A turn of the busy loop; what it has for the clients."""
        outputs = self._step_ahead() if self._is_async else self._step()
        self.abort(self.aborts)  # they come by two ways
        self.aborts = []
        return [one for made in outputs.values() for one in made.outputs]

    def _launch(self) -> tuple[Any, Any]:
        output = self.scheduler.schedule()
        return output, self._worker.execute(output)

    def _take(self, output: Any, answer: Any) -> dict[int, Any]:
        self.abort(self.aborts)
        found: dict[int, Any] = self.scheduler.update_from_output(output, answer)
        return found

    def _step(self) -> dict[int, Any]:
        return self._take(*self._launch()) if self.scheduler.has_requests() else {}

    def _step_ahead(self) -> dict[int, Any]:
        assert len(self.queue) < 2
        if self.scheduler.has_requests():
            self.queue.append(self._launch())
            was_run = self.queue[-1][0].total_num_scheduled_tokens > 0
            if len(self.queue) < 2 and (was_run or self.scheduler.has_requests()):
                return {}
        return self._take(*self.queue.popleft()) if self.queue else {}


def written(request: Any, max_model_len: int) -> list[int]:
    """What the model makes of a request that is alone."""
    params, text, output = request.sampling_params, list(request.prompt_token_ids), list[int]()
    while True:
        output.append(draw(text + output))
        ends = output[-1] in (params.eos_token_id, *params.stop_token_ids)
        if ends or len(output) >= params.max_tokens or len(text) + len(output) >= max_model_len:
            return output


class _Ticking:
    """A clock on which any time passes between two looks."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._now_ns = rng, 0

    def __call__(self) -> int:
        self._now_ns += self._rng.choice((0, 1, 1_000, 1_000_000_000))
        return self._now_ns


class _WatchedLoop(OwnLoop):
    """Shows each plan before vLLM has it."""

    watch: Callable[[BatchPlan], None]

    def next_plan(self) -> BatchPlan | None:
        plan = super().next_plan()
        if plan is not None:
            self.watch(plan)
        return plan


class InVllm:
    """A random core in a stub of vLLM. Clients' requests and what came of them are checked as they come."""

    def __init__(self, setup: Setup, rng: random.Random, tape: Path, *, is_newer: bool) -> None:
        self.setup, self.counts = setup, Counter[str]()
        self._rng, self._tape = rng, tape
        self.core = setup.scheduler()
        is_async = setup.limits.max_num_plans > 1
        writer = TapeWriter(tape, is_live=True)
        self.loop = _WatchedLoop(self.core, writer, self._ours, writer.close, _Ticking(rng))
        self.loop.watch = self._watch
        config = engine_config(
            max_model_len=setup.limits.max_model_len, max_num_seqs=setup.limits.max_num_seqs, is_newer=is_newer,
            num_blocks=setup.num_blocks + 1,
        )  # fmt: skip
        self.scheduler = Steered(self.loop, config, setup.block_size)
        self.memory = Memory(
            setup.block_size,
            setup.num_blocks + 1,
            reads_own_step=setup.caching and setup.rules.hits_visible != "commit",
        )
        self.worker = (
            NewerRunner(self.memory, setup.limits.max_num_seqs)
            if is_newer
            else OlderRunner(self.memory, is_async=is_async)
        )
        self.engine = Engine(self.scheduler, self.worker, is_async=is_async)
        self.live: dict[str, Any] = {}
        self._requests: dict[str, OurRequest] = {}
        self._num_requests = self._unmoved = 0

    def _ours(self, name: str, request: Any, arrival_ns: int) -> OurRequest:
        made = self._requests[name] = _request_of(name, request, arrival_ns)
        return made

    def _watch(self, plan: BatchPlan) -> None:
        assert plan.copies == plan.swap_in == plan.swap_out == (), "nobody moves blocks in vLLM"
        self.counts["preempted"] += len(plan.preempted)
        self.counts["hits"] += sum(item.num_cached_tokens > 0 for item in plan.admitted)

    # --- clients ---

    def add(self) -> None:
        rng = self._rng
        shared = random.Random(rng.randrange(2))
        prompt = [shared.randrange(VOCAB_SIZE) for _ in range(rng.choice((0, 4, 9, 16, 24)))]
        prompt += [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((0, 1, 3, 6)) if prompt else 2)]
        params = vllm.SamplingParams(
            max_tokens=rng.choice((1, 2, 5, 12, 20)), eos_token_id=rng.choice((None, EOS)),
            stop_token_ids=rng.choice(([], [STOP])),
        )  # fmt: skip
        salt, priority = rng.choice((None, None, None, "a")), rng.randrange(3)
        for _ in range(rng.choice((1, 1, 1, 2))):  # twins
            request = vllm.Request(
                f"r{self._num_requests}", list(prompt), params, cache_salt=salt, priority=priority
            )  # fmt: skip
            self._num_requests += 1
            self.scheduler.add_request(request)
            self.live[request.request_id] = request

    def abort(self) -> None:
        """Between two steps, or with the next one while its batch is in flight."""
        if not self.live:
            return
        name = self._rng.choice(list(self.live))
        is_during_step = self._rng.random() < 0.5
        self.counts["aborts in flight"] += is_during_step or bool(self.engine.queue)
        if is_during_step:
            self.engine.aborts.append(name)
            self.step()
        else:
            assert self.engine.abort([name]) == [self.live[name]]
            assert self.engine.abort([name, "nobody"]) == []
        if self.live.pop(name, None) is not None:
            self.counts["aborted"] += 1

    def reset(self) -> None:
        """Between two steps: of all, or only if nothing runs."""
        preempts = self._rng.random() < 0.8
        runs = self.core.num_running > 0
        is_reset = self.scheduler.reset_prefix_cache(reset_running_requests=preempts)
        assert is_reset or not preempts
        if is_reset:
            self.memory.wipe()
            self.counts["resets of nobody"] += not runs
            self.counts["resets in flight"] += runs and bool(self.engine.queue)
            self.counts["resets of who runs"] += runs

    def pause(self) -> None:
        """Everything stands still, and nothing is lost."""
        self.scheduler.set_pause_state(vllm.PauseState.PAUSED_ALL)
        if self._rng.random() < 0.3:
            self.reset()
        for _ in range(4):
            if self._rng.random() < 0.2:
                self.add()
            if self._rng.random() < 0.2:
                self.abort()
            if self.engine.has_work:
                self.step()
        assert not self.engine.has_work, "a paused engine goes on"
        self.scheduler.set_pause_state(vllm.PauseState.UNPAUSED)
        self.counts["pauses with requests"] += bool(self.live)

    # --- steps ---

    def step(self) -> None:
        if not self.engine.has_work:
            return
        emitted = self.engine.step()
        self.core.check_invariants()
        self._unmoved = 0 if emitted else self._unmoved + 1
        for one in emitted:
            request = self.live.get(one.request_id)
            assert request is not None, f"{one.request_id} has ended, and says {one}"
            if one.finish_reason is not None:
                del self.live[one.request_id]
                self._ended(request, one)

    def _ended(self, request: Any, last: Any) -> None:
        alone = written(request, self.setup.limits.max_model_len)
        self.counts[f"ends by {last.finish_reason}"] += 1
        if last.finish_reason == vllm.FinishReason.ERROR:  # it can never fit
            alone = alone[: request.num_output_tokens]
        assert request.output_token_ids == alone, f"{request.request_id} has other tokens than alone"

    def drain(self) -> None:
        while self.live:
            assert self.engine.has_work, "requests are left, and the engine sleeps"
            self.step()
            if self._unmoved > NUM_STEPS_UNMOVED:  # it goes round in circles
                assert not self.setup.ends_alone, "the run does not end"
                self.abort()
                self._unmoved = 0
        while self.engine.has_work:
            self.step()
        assert self.core.blocks.num_free_blocks == self.setup.num_blocks, "idle, but blocks are held"
        assert not self.worker.known, "the worker remembers who has ended"
        assert not self.scheduler._names, "names are kept of who has ended"
        assert self.scheduler.get_request_counts() == (0, 0)
        self.scheduler.shutdown()

    def check_tape(self) -> None:
        """The tape, replayed by the simulator's driver, decides the same at every step."""
        tape = read_tape(self._tape)
        again = self.setup.scheduler()
        digests = _Digests()

        def make(name: str, arrival_ns: int) -> OurRequest:
            assert self._requests[name].arrival_ns == arrival_ns
            return self._requests[name]

        drive(serve(TapeInbox(tape, make), again, digests), RecordedDevice(tape))
        assert digests.found == [step.digest for step in tape.steps]
        assert again.digest == self.core.digest, "what came after the last step differs"


class _Digests(Recorder):
    """A recorder that keeps the digest of each step."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def committed(self, step: StepView) -> None:
        self.found.append(step.digest)
