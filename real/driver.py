"""Drives the core's loop in real time: waits when it says wait, runs the engine when it says execute.

The clock starts at 0 with the loop's first command and is handed in, so that tests can turn it by hand. This module
needs no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, NamedTuple, Protocol, TypeVar

from real.clocks import Clock, scaled
from testbed.core.commands import Execute, Resume, WaitUntil
from testbed.core.outcome import Outcome, PromptLogprobs, Spans, StepResult
from testbed.core.plan import BatchPlan
from testbed.errors import LivelockError

Result = TypeVar("Result")


class Computed(NamedTuple):
    """What came of a plan. outcomes: of the rows that were not forced; None: there are none."""

    outcomes: tuple[Outcome, ...] | None
    spans: Spans
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class Work(NamedTuple):
    """A plan that was launched. wait: may be called once, and in the order of the plans. is_done: whether that would
    not block, where the engine can say it."""

    wait: Callable[[], Computed]
    is_done: Callable[[], bool] = lambda: False


class RunningBackend(Protocol):
    """What the driver asks of an engine; RealBackend is one."""

    def start(self, plan: BatchPlan) -> Work: ...


class StepLog(Protocol):
    """Is told of each step that was waited for; real.replay.HostTimes is one."""

    def stepped(self, launch_ns: int, length_ns: int, spans: Spans) -> None:
        """launch_ns: of the launch, without preparing. length_ns: from its plan to its result; of a step planned while
        another was in flight, from that one's result on."""
        ...


def run(
    loop: Generator[WaitUntil | Execute, Resume, Result],
    backend: RunningBackend,
    clock: Clock,
    log: StepLog | None = None,
    catch_up: Callable[[], None] | None = None,
) -> Result:
    """Runs `testbed.core.serve.serve(...)` to its end on the engine; returns what the loop returns.

    Raises LivelockError if the loop waits for a wake: nobody is there to wake it. What the loop or the engine raises,
    an interrupt included, passes through; records of committed steps are the recorder's and stay. log: is told what
    the host did in each step. catch_up: does what can wait until a step is launched (`LateRecords`).
    """
    drive = Drive(loop, backend, clock, log, catch_up)
    while not drive.is_over:
        drive.step()
    return drive.result


class Drive(Generic[Result]):
    """A loop whose commands are carried out one by one, for callers who do something between them.

    is_waiting: the next command is a wait, as the loop of an open inbox has it after each step. No plan is in flight
    then, or one that was launched ahead. Who drives several loops launches with `begin`, goes on with `step` when that
    blocks nobody, and with `wake` when something has come.
    """

    def __init__(
        self,
        loop: Generator[WaitUntil | Execute, Resume, Result],
        backend: RunningBackend,
        clock: Clock,
        log: StepLog | None = None,
        catch_up: Callable[[], None] | None = None,
    ) -> None:
        self.result: Result  # once it is over
        self.is_over = False
        self.is_waiting = False
        self._loop, self._backend, self._clock, self._log = loop, backend, clock, log
        self.catch_up = catch_up or (lambda: None)  # does now what was to wait for a launch, where there is none
        self._failure: Exception | None = None
        self._last_ns, self._schedule_ns, self._ended_ns = 0, 0, 0
        self._in_flight: deque[_Launched] = deque()
        self._is_begun = False  # whether the next command's plan is launched
        self._command: WaitUntil | Execute
        self._ask(None)
        clock.start()

    def step(self) -> None:
        """Carries the next command out, and hears the one after it."""
        if isinstance(self._command, Execute):
            self.begin()
            self._go_on(self._answer(self._command))
        else:
            self.catch_up()
            self._go_on(_wait(self._command, self._clock, self._last_ns))

    def wake(self, now_ns: int) -> None:
        """A loop that waits goes on: from the end of a step at that very instant, as the loop of a closed inbox does;
        else at `now_ns`, up to which its inbox has what came."""
        assert isinstance(self._command, WaitUntil), "only a loop that waits is woken"
        until_ns = self._command.until_ns
        self._go_on(Resume(max(now_ns if until_ns is None else until_ns, self._last_ns)))

    def begin(self) -> None:
        """Launches what the next command has to launch."""
        if not isinstance(self._command, Execute) or self._command.plan is None or self._is_begun:
            return
        rate = self._clock.before_step()
        began_ns = self._clock.now_ns()
        work = self._backend.start(self._command.plan)
        launch_ns = self._clock.now_ns() - began_ns
        self._in_flight.append(_Launched(work, self._last_ns, self._schedule_ns, launch_ns, rate))
        self._is_begun = True
        try:
            self.catch_up()
        except Exception as error:  # noqa: BLE001  (raised once the step is done, so that none is left in flight)
            self._failure = error

    @property
    def awaits_result(self) -> bool:
        """Whether the next command is answered when the oldest step in flight is done, and not before."""
        return not self.is_over and isinstance(self._command, Execute) and not self._command.is_ahead

    @property
    def waits_for_events(self) -> bool:
        """Whether it has nothing to do, or goes round in circles, until something comes."""
        command = self._command
        return self.is_waiting and isinstance(command, WaitUntil) and (command.until_ns is None or command.is_stuck)

    def _go_on(self, resume: Resume) -> None:
        sent_ns = self._clock.now_ns()
        self._ask(resume)
        self._last_ns, self._schedule_ns = resume.now_ns, self._clock.now_ns() - sent_ns

    def _ask(self, resume: Resume | None) -> None:
        self._is_begun = False
        try:
            self._command = next(self._loop) if resume is None else self._loop.send(resume)
        except StopIteration as end:
            self.result = end.value
            self.is_over = True
        self.is_waiting = not self.is_over and isinstance(self._command, WaitUntil)

    def _answer(self, command: Execute) -> Resume:
        """Waits for the oldest step in flight unless told not to. Each answer is at least 1 ns after the one before."""
        clock = self._clock
        if command.is_ahead:
            return Resume(max(clock.now_ns(), self._last_ns + 1))
        launched = self._in_flight.popleft()
        outcomes, spans, prompt_logprobs = launched.work.wait()
        if self._failure is not None:
            raise self._failure
        now_ns = max(clock.now_ns(), self._last_ns + 1)
        spans = scaled(spans, launched.rate).replace(schedule_ns=launched.schedule_ns)
        began_ns, self._ended_ns = max(launched.plan_ns, self._ended_ns), now_ns
        if self._log is not None:
            self._log.stepped(max(0, launched.launch_ns - spans.prepare_ns), now_ns - began_ns, spans)
        return Resume(now_ns, StepResult(now_ns, outcomes, spans, prompt_logprobs=prompt_logprobs))


class _Launched(NamedTuple):
    """A step in flight: when it was planned, how long that took, how long its launch; the rate of the clock."""

    work: Work
    plan_ns: int
    schedule_ns: int
    launch_ns: int
    rate: float


def _wait(command: WaitUntil, clock: Clock, last_ns: int) -> Resume:
    if command.until_ns is None:
        raise LivelockError("the loop waits to be woken, but a replayed trace has nobody who could wake it")
    clock.wait_until(command.until_ns)
    return Resume(max(clock.now_ns(), command.until_ns, last_ns))
