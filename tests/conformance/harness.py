"""Every backend behind one door: its own driver, the same scheduler, the same requests."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments.wiring.traces import forcing
from sim.backend import SimBackend
from sim.cost.config import ConstantConfig, LinearConfig, RooflineConfig
from sim.cost.constant import ConstantCost
from sim.cost.linear import LinearCost
from sim.cost.roofline import KVLayout, RooflineCost
from sim.driver import drive as drive_device
from sim.driver import run as drive_simulated
from sim.recorded_device import RecordedDevice
from testbed.blocks.config import KVRules
from testbed.core.commands import Execute, Recorder, Resume, StepView, WaitUntil
from testbed.core.outcome import Finished, Spans
from testbed.core.plan import BatchPlan, ScheduledSequence
from testbed.core.scheduler import Scheduler
from testbed.core.serve import Loop, serve
from testbed.records.recorders import Recorders
from testbed.records.tape import Tape, TapeInbox, TapeStep, TapeWriter, read_tape
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec
from testbed.traces.inbox import TraceInbox, to_request
from testbed.traces.schema import Trace
from tests.testbed.core_kit import make_limits, make_scheduler

VOCAB_SIZE = 512
BLOCK_SIZE = 4
BUDGET = 128  # tokens a step
SPEC = ModelSpec("tiny", "Qwen3ForCausalLM", 64, 96, 2, 4, 2, 16, VOCAB_SIZE, 256, True, dtype="float32")


class Seen(NamedTuple):
    """All that a run shows: the steps, the rows of each as the backend read them, and how requests ended."""

    steps: list[StepView]
    rows: list[tuple[ScheduledSequence, ...]]
    ended: dict[str, Finished]
    cached: dict[str, int]  # prefix tokens found at the first admission


class Watch(Recorder):
    """Between driver and backend, and a recorder: reads every plan's rows in start(), as a device would.

    backend: or a device of the simulator's driver.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.seen = Seen([], [], {}, {})

    def start(self, plan: BatchPlan) -> Any:
        self._read(plan)
        return self.backend.start(plan)

    def execute(self, command: Execute, now_ns: int) -> Resume:
        if command.plan is not None:
            self._read(command.plan)
        answer: Resume = self.backend.execute(command, now_ns)
        return answer

    def resume(self, until_ns: int | None, now_ns: int) -> Resume | None:
        found: Resume | None = self.backend.resume(until_ns, now_ns)
        return found

    def _read(self, plan: BatchPlan) -> None:
        self.seen.rows.append(
            tuple(row.replace(tokens=list(row.tokens), block_table=list(row.block_table)) for row in plan.scheduled)
        )
        for item in plan.admitted:
            self.seen.cached.setdefault(item.request_id, item.num_cached_tokens)

    def committed(self, step: StepView) -> None:
        self.seen.steps.append(step)

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        self.seen.ended.update({item.request.request_id: item for item in finished})


Core = Callable[[], Scheduler]  # makes a fresh one


class Simulated:
    """SimBackend at one cost model's prices."""

    is_real = False
    compositions: tuple[str, ...] | None = None  # what it is tried under; None: all

    def __init__(self, cost: Any) -> None:
        self.backend: Any = SimBackend(cost)

    def drive(self, loop: Loop, backend: Any) -> None:
        drive_simulated(loop, backend)

    def serve(self, trace: Trace, make: Core, folder: Path, forced: str = "tokens") -> Seen:
        """A whole run. forced: what of the outputs; to a simulator `lengths` are no less than `tokens`."""
        watch = Watch(self.backend)
        inbox = TraceInbox(trace, VOCAB_SIZE, change=partial(forcing, forced=forced) if self.is_real else None)
        self.drive(serve(inbox, make(), watch), watch)
        return watch.seen

    def execute(self, plans: Sequence[BatchPlan]) -> list[Resume]:
        """Plans made by hand, one after another."""
        return self._execute(plans, self.backend)

    def _execute(self, plans: Sequence[BatchPlan], backend: Any, drive: Any = None) -> list[Resume]:
        resumes: list[Resume] = []

        def loop() -> Generator[WaitUntil | Execute, Resume, None]:
            for plan in plans:
                resumes.append((yield Execute(plan)))  # noqa: PERF401  (a comprehension cannot yield)

        (drive or self.drive)(loop(), backend)
        return resumes


class Recorded(Simulated):
    """RecordedDevice on a tape that a simulated run of the same requests left."""

    def __init__(self) -> None:
        super().__init__(LinearCost(LinearConfig()))

    def serve(self, trace: Trace, make: Core, folder: Path, forced: str = "tokens") -> Seen:
        watch = Watch(self.backend)
        tape_file = folder / "tape.jsonl"
        writer = TapeWriter(tape_file)
        self.drive(serve(TraceInbox(trace, VOCAB_SIZE), make(), Recorders(watch, writer)), watch)
        writer.close()
        tape = read_tape(tape_file)
        rows = {row.request_id: row for row in trace.rows}
        inbox = TapeInbox(tape, lambda name, arrival_ns: to_request(rows[name], VOCAB_SIZE, arrival_ns))
        again = Watch(RecordedDevice(tape))
        drive_device(serve(inbox, make(), again), again)
        assert [step.digest for step in again.seen.steps] == [step.digest for step in watch.seen.steps]
        return again.seen

    def execute(self, plans: Sequence[BatchPlan]) -> list[Resume]:
        steps = tuple(TapeStep(10 * i, 10 * i + 7, None, Spans(0, 1, 0, 5, 1), 0, {}) for i in range(len(plans)))
        return self._execute(plans, RecordedDevice(Tape(steps, ())), drive_device)


class Real(Simulated):
    """RealBackend, with random weights."""

    is_real = True

    def __init__(self, device: str) -> None:
        from real.config import RealConfig
        from tests.real.engine_helpers import tiny_backend

        self.config = RealConfig(device=device, pace="as_fast_as_possible")
        self.backend = tiny_backend(SPEC, block_size=BLOCK_SIZE, device=device, max_num_batched_tokens=BUDGET)

    def drive(self, loop: Loop, backend: Any) -> None:
        from real.clocks import make_clock
        from real.driver import run

        run(loop, backend, make_clock(self.config))


class RealRanks(Real):
    """Two ranks, each a process. A step of theirs takes many times that of one: sums between processes."""

    compositions = ("vllm_v1",)

    def __init__(self) -> None:
        from real.config import EngineOptions, RealConfig
        from real.parallel.backend import RankedBackend

        self.config = RealConfig(device="cpu", num_threads=2, pace="as_fast_as_possible")
        options = EngineOptions(BLOCK_SIZE, BUDGET, 8, SPEC.max_length, num_gpu_blocks=64, num_cpu_blocks=16)
        self.backend = RankedBackend(SPEC, self.config, options, 2)


BACKENDS: dict[str, Callable[[], Simulated]] = {
    "roofline": lambda: Simulated(
        RooflineCost(SPEC, DeviceSpec("h100"), RooflineConfig(), kv_layout=KVLayout(BLOCK_SIZE))
    ),
    "linear": lambda: Simulated(LinearCost(LinearConfig())),
    "constant": lambda: Simulated(ConstantCost(ConstantConfig())),
    "recorded": Recorded,
    "real-cpu": lambda: Real("cpu"),
    "real-cpu-2-ranks": RealRanks,
    "real-cuda": lambda: Real("cuda"),
}


VLLM_V1 = KVRules(
    allocate="chunk", full_length_must_fit=True, hits_visible="allocation", watermark_when_idle=False,
    watermark_extra_blocks=1,
)  # fmt: skip


def core(composition: str, *, num_blocks: int = 60, caching: bool = True, plans: int = 1) -> Core:
    """The scheduler that all backends serve. vllm_v1: the preset's rules, a step hits blocks that it fills."""
    is_preset = composition == "vllm_v1"
    return lambda: make_scheduler(
        "unified" if is_preset else composition, rules=VLLM_V1 if is_preset else KVRules(), num_blocks=num_blocks,
        block_size=BLOCK_SIZE, caching=caching, limits=make_limits(budget=BUDGET, model_len=256, plans=plans),
    )  # fmt: skip
