"""The two sources of plans for vLLM's scheduler (real.vllm.scheduler.Steering). OwnLoop is a loop that vLLM drives: it
is asked for a plan for each step, and gets the outcomes. Seat is a place in which a backend of ours puts its plans.
Needs no vLLM.

The loop is the one that every backend runs (testbed.core.serve). Here it has no driver, so it waits between two calls,
and its clock is the time at which it is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from real.clocks import RealTimeClock
from testbed.core.commands import Abort, Arrive, Event, Execute, Recorder, ResetPrefixes, Resume, WaitUntil
from testbed.core.outcome import Finished, FinishReason, Outcome, Spans, StepResult
from testbed.core.plan import BatchPlan
from testbed.core.request import Request
from testbed.core.scheduler import Scheduler
from testbed.core.serve import serve
from testbed.errors import RequestError
from testbed.foreign_text import some

T = TypeVar("T")
R = TypeVar("R")


class ServedInbox:
    """Requests, aborts and resets from vLLM, which the loop sees at the next step boundary. Open until it is closed."""

    def __init__(self) -> None:
        self.is_open = True
        self.ignored: list[tuple[str, str]] = []  # (id, message) of requests that can never fit
        self._events: list[Event] = []

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def put(self, event: Event) -> None:
        self._events.append(event)

    def due(self, now_ns: int) -> list[Event]:
        events, self._events = self._events, []
        return events

    def next_ns(self) -> int | None:
        return None

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        self.ignored += [
            (item.request.request_id, item.message) for item in requests if item.reason is FinishReason.IGNORED
        ]


class OwnLoop:
    """Steers vLLM with a core of its own.

    make_request: (id, vLLM's request, arrival time) -> our request. close: called once, after the last step. checks:
    raise an error for a plan that must not be executed. failed: called with the error that ended the loop; returns the
    error to raise instead. warn: called with one line about requests that make no progress, as vLLM would keep asking
    for plans forever.
    """

    PATIENCE_NS: ClassVar = 5 * 10**9

    def __init__(
        self, scheduler: Scheduler, recorder: Recorder, make_request: Callable[[str, Any, int], Request],
        close: Callable[[], None] = lambda: None, read_ns: Callable[[], int] = time.perf_counter_ns,
        checks: Sequence[Callable[[BatchPlan], None]] = (),
        failed: Callable[[BaseException], BaseException] = lambda error: error,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        self._scheduler, self._make_request, self._close = scheduler, make_request, close
        self._checks, self._failed, self._warn = checks, failed, warn
        self._failure: BaseException | None = None
        self._stalled_ns: int | None = None  # since when no step has made progress; None: the last one did
        self._is_warned = False
        self.cached_block_size = None if (source := scheduler.blocks.prefixes.source) is None else source.block_size
        self._inbox = ServedInbox()
        self._loop = serve(self._inbox, scheduler, recorder)
        self._clock, self._last_ns = RealTimeClock(read_ns), -1
        self._launched_ns: list[tuple[int, int]] = []  # of plans in flight: launch time, and planning time
        self._command: WaitUntil | Execute = next(self._loop)

    def added(self, name: str, request: Any) -> None:
        self._inbox.put(Arrive(self._make_request(name, request, self._clock.now_ns())))

    def aborted(self, name: str) -> None:
        self._inbox.put(Abort(name))

    def reset_prefixes(self) -> None:
        self._inbox.put(ResetPrefixes())

    def next_plan(self) -> BatchPlan | None:
        if self._failure is not None:
            raise self._failure
        assert isinstance(self._command, WaitUntil), "vLLM asks for a step while it owes the outcome of another"
        is_stuck = self._command.is_stuck
        plan = self._ask()
        is_asked = plan is not None or bool(self._launched_ns) or not self._scheduler.has_work
        self._note(is_moving=is_asked and not is_stuck)
        return plan

    def took(self, outcomes: tuple[Outcome, ...]) -> list[tuple[str, str]]:
        now_ns = self._now_ns()
        launched_ns, schedule_ns = self._launched_ns.pop(0)
        spans = Spans(schedule_ns=schedule_ns, forward_ns=max(0, now_ns - launched_ns))
        self._send(Resume(now_ns, StepResult(now_ns, outcomes or None, spans)))
        ignored, self._inbox.ignored = self._inbox.ignored, []
        return ignored

    def num_requests(self) -> tuple[int, int]:
        return self._scheduler.num_running, self._scheduler.num_waiting

    def kv_usage(self) -> float:
        blocks = self._scheduler.blocks
        return 1.0 - blocks.num_free_blocks / blocks.num_gpu_blocks

    def close(self) -> None:
        """Ends the loop, after it has processed the last aborts."""
        if self._failure is None and self._inbox.has_events and isinstance(self._command, WaitUntil):
            self._ask()
        self._inbox.is_open = False
        self._loop.close()
        self._close()

    def _ask(self) -> BatchPlan | None:
        """Resumes the loop from its wait; returns the plan that it wants to execute, if any."""
        began_ns = self._now_ns()
        self._send(Resume(began_ns))
        command = self._command
        if isinstance(command, WaitUntil) or command.plan is None:
            return None
        for check in self._checks:
            self._try(check, command.plan)
        launched_ns = self._now_ns()
        self._launched_ns.append((launched_ns, launched_ns - began_ns))
        if command.is_ahead:
            self._send(Resume(launched_ns))
        return command.plan

    def _send(self, resume: Resume) -> None:
        self._command = self._try(self._loop.send, resume)

    def _try(self, act: Callable[[T], R], given: T) -> R:
        try:
            return act(given)
        except (Exception, SystemExit) as error:  # vLLM treats a SystemExit as a normal end
            self._failure = self._failed(error)
            if self._failure is error:
                raise
            raise self._failure from error

    def _note(self, *, is_moving: bool) -> None:
        """Warns once if no request has made progress for PATIENCE_NS."""
        if is_moving:
            self._stalled_ns, self._is_warned = None, False
            return
        self._stalled_ns = self._last_ns if self._stalled_ns is None else self._stalled_ns
        if not self._is_warned and self._last_ns - self._stalled_ns >= self.PATIENCE_NS:
            self._is_warned = True
            ids = [seq.request.request_id for seq in self._scheduler.unfinished()]
            self._warn(
                f"for {self.PATIENCE_NS // 10**9} s no step has moved any of {len(ids)} requests: {some(ids)}; check "
                "the policies (scheduler.composition, scheduler.admission, scheduler.victim)"
            )

    def _now_ns(self) -> int:
        """Returns the time; each call returns a later one than the call before."""
        self._last_ns = max(self._clock.now_ns(), self._last_ns + 1)
        return self._last_ns


class Seat:
    """Holds a plan from outside until vLLM executes it, and its outcomes until they are taken."""

    cached_block_size: int | None = None  # vLLM's own statistics are not used

    def __init__(self) -> None:
        self.expected = ""  # our id of the request that is being added
        self.plan: BatchPlan | None = None
        self.outcomes: tuple[Outcome, ...] | None = None  # of the oldest plan in flight; None: not there yet
        self.planned_ns = self.taken_ns = 0  # when the last plan was passed on, and when the last result came

    def added(self, name: str, request: Any) -> None: ...
    def aborted(self, name: str) -> None: ...

    def reset_prefixes(self) -> None:
        """Raises RequestError, as the loop that makes the plans gets its resets from the run's inbox."""
        raise RequestError("backend=vllm takes a reset of the prefix cache from the run's inbox, not from vLLM")

    def next_plan(self) -> BatchPlan | None:
        plan, self.plan = self.plan, None
        return plan

    def took(self, outcomes: tuple[Outcome, ...]) -> list[tuple[str, str]]:
        self.outcomes = outcomes
        return []

    def num_requests(self) -> tuple[int, int]:
        return 0, 0

    def kv_usage(self) -> float:
        return 0.0

    def close(self) -> None: ...
