"""The only loop: arrivals, plan, execute, commit. A generator that does no waiting and no work.

Its driver is its clock: it yields commands (WaitUntil, Execute) and is resumed with the time. Requests are pulled at
step boundaries only.
"""

from __future__ import annotations

from collections.abc import Generator

from testbed.core.interfaces import Arrive, Event, Execute, Inbox, Recorder, Resume, WaitUntil, steps_of
from testbed.core.scheduler import Scheduler
from testbed.core.thrash import Thrash
from testbed.errors import LivelockError

Loop = Generator[WaitUntil | Execute, Resume, None]


def serve(inbox: Inbox, scheduler: Scheduler, recorder: Recorder, max_steps: int = 1) -> Loop:
    """Serves the inbox to its end. Raises LivelockError when work remains that nothing will ever move, or that goes
    round in circles.

    max_steps: how many steps a plan may span; more than one is fast forward, which its driver must know.
    """
    thrash = Thrash()
    now_ns = (yield WaitUntil(inbox.next_ns())).now_ns if inbox.next_ns() is not None else 0
    while True:
        for event in inbox.due(now_ns):
            _take(event, inbox, scheduler, recorder, now_ns)
        if scheduler.has_work:
            plan = scheduler.plan(now_ns, max_steps)
            if not plan.is_empty:
                free_cpu = scheduler.free_cpu_blocks
                counts = scheduler.counts()
                resume = yield Execute(plan, inbox.next_ns() if plan.num_steps > 1 else None)
                assert resume.result is not None, "an executed plan has a result"
                finished = scheduler.commit(resume.result, resume.now_ns)
                for step in steps_of(
                    plan, now_ns, resume.result, scheduler.digests, scheduler.emitters,
                    counts, scheduler.free_blocks, free_cpu,
                ):  # fmt: skip
                    recorder.committed(step)
                now_ns = resume.now_ns
                if finished:
                    recorder.ended(finished, now_ns)
                    inbox.finished(finished, now_ns)
                circle = None
                if plan.preempted or thrash.is_watching:
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
    named = ", ".join(ids[:5]) + (", …" if len(ids) > 5 else "")
    return f"nothing can be scheduled and nothing will arrive, but {len(ids)} requests wait: {named}; check the policy"
