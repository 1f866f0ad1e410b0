"""The only loop: arrivals, plan, execute, commit. A generator that does no waiting and no work.

Its driver is its clock: it yields commands (WaitUntil, Execute) and is resumed with the time. Requests are pulled at
step boundaries only.
"""

from __future__ import annotations

from collections.abc import Generator

from testbed.core.commands import Arrive, Event, Execute, Resume, StepView, WaitUntil
from testbed.core.interfaces import Inbox, Recorder
from testbed.core.scheduler import Scheduler
from testbed.core.thrash import Thrash
from testbed.errors import LivelockError
from testbed.foreign_text import some

Loop = Generator[WaitUntil | Execute, Resume, None]


def serve(inbox: Inbox, scheduler: Scheduler, recorder: Recorder) -> Loop:
    """Serves the inbox to its end. Raises LivelockError when work remains that nothing will ever move, or that goes
    round in circles."""
    thrash = Thrash()
    first_ns = inbox.next_ns()
    now_ns = 0 if first_ns is None else (yield WaitUntil(first_ns)).now_ns
    while True:
        for event in inbox.due(now_ns):
            _take(event, inbox, scheduler, recorder, now_ns)
        if scheduler.has_work:
            plan = scheduler.plan(now_ns)
            if not plan.is_empty:
                num_running, num_waiting = scheduler.num_running, scheduler.num_waiting
                num_swapped = scheduler.num_swapped
                free_gpu, free_cpu = scheduler.free_gpu_blocks, scheduler.free_cpu_blocks
                resume = yield Execute(plan)
                result, plan_ns, now_ns = resume.result, now_ns, resume.now_ns
                assert result is not None, "an executed plan has a result"
                finished = scheduler.commit(result, now_ns)
                recorder.committed(
                    StepView(
                        plan, plan_ns, result, scheduler.digest_bytes, scheduler.emitters, num_running, num_waiting,
                        num_swapped, free_gpu, free_cpu,
                    )
                )  # fmt: skip
                if finished:
                    recorder.ended(finished, now_ns)
                    inbox.finished(finished, now_ns)
                circle = thrash.committed(plan, scheduler, has_ended=bool(finished))
                if inbox.is_open:  # what others do at this instant comes before the next plan
                    now_ns = (yield WaitUntil(now_ns, circle is not None)).now_ns
                if circle is not None and not inbox.is_open and inbox.next_ns() is None:
                    raise LivelockError(circle)
                continue
        next_ns = inbox.next_ns()
        if next_ns is None and not inbox.is_open:
            if scheduler.has_work:
                raise LivelockError(_stuck(scheduler))
            return
        now_ns = (yield WaitUntil(next_ns)).now_ns


def _take(event: Event, inbox: Inbox, scheduler: Scheduler, recorder: Recorder, now_ns: int) -> None:
    if isinstance(event, Arrive):
        recorder.arrived(event.request, now_ns, scheduler.num_steps)
        scheduler.add(event.request)
        return
    finished = scheduler.abort(event.request_id)
    if finished is not None:
        recorder.aborted(event.request_id, now_ns, scheduler.num_steps)
        recorder.ended([finished], now_ns)
        inbox.finished([finished], now_ns)


def _stuck(scheduler: Scheduler) -> str:
    ids = [seq.request.request_id for seq in scheduler.unfinished()]
    return (
        f"nothing can be scheduled and nothing will arrive, but {len(ids)} requests wait: {some(ids)}; check the policy"
    )
