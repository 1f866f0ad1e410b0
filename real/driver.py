"""Drives the core's loop in real time: carries out its commands, which are to wait or to execute a plan on the engine.

The clock starts at 0 with the loop's first command. It is passed in, so that tests can control it. This module needs no
torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from real.clocks import Clock, scaled
from testbed.core.commands import Execute, Resume, WaitUntil
from testbed.core.interfaces import Backend
from testbed.core.outcome import Outcome, PromptLogprobs, Spans, StepResult
from testbed.core.serve import Loop
from testbed.errors import LivelockError


class Computed(NamedTuple):
    """The result of a plan. outcomes: of the rows that sample and are not forced; None: there are none."""

    outcomes: tuple[Outcome, ...] | None
    spans: Spans
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class Work(NamedTuple):
    """A started plan. wait: must be called once, in the order of the plans; on a CPU it computes. is_done: whether it
    waits for nothing; always False if the engine does not know."""

    wait: Callable[[], Computed]
    is_done: Callable[[], bool] = lambda: False


class StepLog(Protocol):
    """Is called for each step that was waited for; real.replay.HostTimes implements it."""

    def stepped(self, launch_ns: int, length_ns: int, spans: Spans) -> None:
        """launch_ns: duration of the launch, without preparing. length_ns: from the plan to the result; if the step was
        planned while another was in flight, from the other's result to its own."""
        ...


def run(
    loop: Loop,
    backend: Backend[Work],
    clock: Clock,
    log: StepLog | None = None,
    catch_up: Callable[[], None] | None = None,
) -> None:
    """Runs `testbed.core.serve.serve(...)` to its end on the engine.

    Raises LivelockError if the loop waits for an event, as none can come. Errors of the loop or the engine, interrupts
    included, pass through; records of committed steps stay with the recorder. log: gets the host's times of each step.
    catch_up: does work that can wait until a step is launched (`LateRecords`).
    """
    drive = Drive(loop, backend, clock, log, catch_up)
    while not drive.is_over:
        drive.step()


class Drive:
    """A loop whose commands are carried out one by one, for callers that do other work in between.

    is_waiting: the next command is a wait; the loop of an open inbox waits after each step. Then no plan is in flight,
    or one that was launched ahead. A caller that drives several loops launches with `begin`, calls `step` when it does
    not block, and `wake` when an event has come.
    """

    def __init__(
        self,
        loop: Loop,
        backend: Backend[Work],
        clock: Clock,
        log: StepLog | None = None,
        catch_up: Callable[[], None] | None = None,
    ) -> None:
        self.is_over = False
        self.is_waiting = False
        self._loop, self._backend, self._clock, self._log = loop, backend, clock, log
        self.catch_up = catch_up or (lambda: None)  # called after a launch, and when there is nothing to launch
        self._failure: Exception | None = None
        self._last_ns, self._schedule_ns, self._ended_ns = 0, 0, 0
        self._in_flight: deque[_InFlight] = deque()
        self._is_begun = False  # whether the next command's plan is launched
        self._command: WaitUntil | Execute
        self._ask(None)
        clock.start()

    def step(self) -> None:
        """Carries out the next command, and gets the one after it."""
        if isinstance(self._command, Execute):
            self.begin()
            self._go_on(self._answer(self._command))
        else:
            self.catch_up()
            self._go_on(_wait(self._command, self._clock, self._last_ns))

    def wake(self, now_ns: int) -> None:
        """Resumes a waiting loop. After a step, it resumes at the instant at which the step ended, like the loop of a
        closed inbox; otherwise at `now_ns`, up to which its inbox has all events."""
        assert isinstance(self._command, WaitUntil), "only a loop that waits is woken"
        until_ns = self._command.until_ns
        self._go_on(Resume(max(now_ns if until_ns is None else until_ns, self._last_ns)))

    def begin(self) -> None:
        """Launches the plan of the next command, if it has one that is not yet launched."""
        if not isinstance(self._command, Execute) or self._command.plan is None or self._is_begun:
            return
        rate = self._clock.before_step()
        began_ns = self._clock.now_ns()
        work = self._backend.start(self._command.plan)
        launch_ns = self._clock.now_ns() - began_ns
        self._in_flight.append(_InFlight(work, self._last_ns, self._schedule_ns, launch_ns, rate))
        self._is_begun = True
        try:
            self.catch_up()
        except Exception as error:  # noqa: BLE001  (raised once the step is done, so that none is left in flight)
            self._failure = error

    @property
    def awaits_result(self) -> bool:
        """Whether the answer to the next command is the result of the oldest step in flight."""
        return not self.is_over and isinstance(self._command, Execute) and not self._command.is_ahead

    @property
    def waits_for_events(self) -> bool:
        """Whether the loop makes no progress until an event comes: it has no work, or its requests are stuck."""
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
        except StopIteration:
            self.is_over = True
        self.is_waiting = not self.is_over and isinstance(self._command, WaitUntil)

    def _answer(self, command: Execute) -> Resume:
        """Waits for the oldest step in flight, unless the plan is ahead. Answers are at least 1 ns apart."""
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


class _InFlight(NamedTuple):
    """A step in flight: when it was planned, the durations of planning and launching, and the clock's rate."""

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
