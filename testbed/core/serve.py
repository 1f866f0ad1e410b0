"""The serving loop: arrivals, plan, execute, commit. A generator that neither waits nor executes anything itself.

Its driver provides the time: the loop yields commands (WaitUntil, Execute) and is resumed with the current instant.
Requests are pulled at step boundaries only. With `limits.max_num_plans` = 2, the next plan is made while one runs.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from testbed.core.commands import Abort, Arrive, Event, Execute, Recorder, Resume, StepView, WaitUntil
from testbed.core.interfaces import Inbox
from testbed.core.outcome import StepResult
from testbed.core.plan import BatchPlan
from testbed.core.scheduler import Scheduler
from testbed.core.thrash import Thrash
from testbed.errors import LivelockError
from testbed.foreign_text import some

Loop = Generator[WaitUntil | Execute, Resume, None]
NOT_YET: Final = StepResult(0)


def serve(inbox: Inbox, scheduler: Scheduler, recorder: Recorder) -> Loop:
    """Serves the inbox until it is empty and closed. Raises LivelockError if the remaining requests cannot progress."""
    try:
        thrash = Thrash()
        in_flight: tuple[StepView, ...] = ()
        now_ns = 0 if (first_ns := inbox.next_ns()) is None else (yield WaitUntil(first_ns)).now_ns
        while True:
            for event in inbox.due(now_ns):
                _take(event, inbox, scheduler, recorder, now_ns)
                thrash = Thrash()  # it may free those that are stuck
            plan = scheduler.plan(now_ns) if scheduler.has_work else None
            newest = None if plan is None or plan.is_empty else _view_after(plan, now_ns, scheduler)
            if newest is not None:
                in_flight += (newest,)
                recorder.launched(newest)
            elif in_flight and in_flight[-1].looked_ns is None:
                in_flight[-1].looked_ns = now_ns
            if in_flight:
                is_ahead = newest is not None and len(in_flight) < scheduler.limits.max_num_plans
                resume = yield Execute(None if newest is None else newest.plan, is_ahead)
                now_ns = resume.now_ns
                if resume.result is not None:
                    _commit(in_flight[0], resume.result, inbox, scheduler, recorder, thrash, now_ns)
                    in_flight = in_flight[1:]
                if inbox.is_open:  # events of others at this instant come before the next plan
                    resume = yield WaitUntil(now_ns, thrash.message is not None)
                    while resume.result is not None:  # a step in flight ended while the loop waited
                        _commit(in_flight[0], resume.result, inbox, scheduler, recorder, thrash, resume.now_ns)
                        in_flight = in_flight[1:]
                        resume = yield WaitUntil(resume.now_ns, thrash.message is not None)
                    now_ns = resume.now_ns
                if thrash.message is not None and not inbox.is_open and inbox.next_ns() is None:
                    raise LivelockError(thrash.message)
                continue
            next_ns = inbox.next_ns()
            if next_ns is None and not inbox.is_open:
                if scheduler.has_work:
                    raise LivelockError(_stuck(scheduler))
                return
            now_ns = (yield WaitUntil(next_ns)).now_ns
    except StopIteration as error:  # of a user's class; compiled, this generator would seem to have come to its end
        raise RuntimeError("StopIteration was raised while serving") from error


def _view_after(plan: BatchPlan, now_ns: int, scheduler: Scheduler) -> StepView:
    return StepView(
        plan, now_ns, NOT_YET, b"", [], scheduler.num_running, scheduler.num_waiting, scheduler.num_swapped,
        scheduler.free_gpu_blocks, scheduler.free_cpu_blocks,
    )  # fmt: skip


def _commit(
    step: StepView, result: StepResult, inbox: Inbox, scheduler: Scheduler, recorder: Recorder, thrash: Thrash,
    now_ns: int,
) -> None:  # fmt: skip
    """Commits the oldest plan in flight."""
    finished = scheduler.commit(result, now_ns)
    step.result, step.digest_bytes, step.emitters = result, scheduler.digest_bytes, scheduler.emitters
    recorder.committed(step)
    if finished:
        recorder.ended(finished, now_ns)
        inbox.finished(finished, now_ns)
    thrash.committed(step.plan, scheduler, has_ended=bool(finished))


def _take(event: Event, inbox: Inbox, scheduler: Scheduler, recorder: Recorder, now_ns: int) -> None:
    if isinstance(event, Arrive):
        recorder.arrived(event.request, now_ns, scheduler.num_steps)
        scheduler.add(event.request)
    elif isinstance(event, Abort):
        if scheduler.is_live(event.request_id):  # recorded now, even if a plan in flight ends a part of the group later
            recorder.aborted(event.request_id, now_ns, scheduler.num_steps)
        if (finished := scheduler.abort(event.request_id, now_ns)) is not None:
            recorder.ended([finished], now_ns)
            inbox.finished([finished], now_ns)
    else:
        recorder.prefixes_reset(now_ns, scheduler.num_steps)
        scheduler.reset_prefixes()


def _stuck(scheduler: Scheduler) -> str:
    left = [f"{seq.request_id} ({seq.state.name.lower()})" for seq in scheduler.unfinished()]
    return f"nothing can be scheduled and nothing will arrive, but {len(left)} left: {some(left)}; check the policy"
