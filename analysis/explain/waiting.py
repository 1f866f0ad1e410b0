"""Which request waited for what, for each engine: the decisions of each step are related to the requests' times.

The state of a step lasts from its start to the start of the next one. A request waits from the boundary that first saw
it, or from the step that preempted it, to the step that admits it or swaps it in. A request of several sequences waits
while none of them runs. The cause of a wait (`blocked_by` of the step) concerns the head of the queue, and counts for
all requests behind it, too. The head is the waiting request that was admitted next. Memory grows with the requests,
with the waits that have ended, and with the steps whose head is not known yet.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from analysis.explain.decisions import DecidedStep

IN_FLIGHT = "step_in_flight"  # a step was still running when the request arrived
NEVER_FITS = "never_fits"
SWAPPED_OUT = "swapped_out"
UNSAID = "unsaid"  # the step records no cause


class Life(NamedTuple):
    """A request's time in the system. finish_ns: None if it had not ended when the run did."""

    request_id: str
    queued_ns: int
    finish_ns: int | None
    num_prompt_tokens: int


class WaitRow(NamedTuple):
    request_id: str
    replica: int
    kind: str  # why it had to wait: queued, or preempted by recompute or swap
    start_ns: int
    end_ns: int
    cause: str
    ns: int  # the part of the wait with this cause
    head_ns: int  # the part of `ns` at the head of the queue


@dataclass(slots=True)
class Preempted:
    """One preemption. An instant is None if the event did not happen. cost_ns: an estimate, see `docs/explain.md`."""

    request_id: str
    replica: int
    step: int
    at_ns: int
    mode: str
    why: str  # growth, queue_order, reset, or unknown (a log of vLLM does not state it)
    for_request_id: str | None  # the request whose growth caused it
    lost_tokens: int
    back_ns: int | None = None
    recomputed_tokens: int = 0
    caught_up_ns: int | None = None  # when all lost tokens were computed again
    cost_ns: float = 0.0
    left: int = 0  # tokens still to compute again


@dataclass(slots=True)
class _Wait:
    kind: str
    since_ns: int
    first: int = -1  # index of the first step that considered it
    base: dict[str, int] = field(default_factory=dict)  # ns of each cause before that step
    fixed: dict[str, int] = field(default_factory=dict)  # ns of causes that no step records
    at_head: dict[str, int] = field(default_factory=dict)  # ns of each cause while at the head
    label: str = ""  # if given, the cause of the whole wait


class Engine:
    """One replica's requests and steps, in order of time. Call `take` for each step, then `close`."""

    def __init__(self, replica: int, lives: list[Life]) -> None:
        self.rows: list[WaitRow] = []
        self.preempted: list[Preempted] = []
        self.waits: dict[str, _Wait] = {}
        self.last: dict[str, Preempted] = {}  # each request's latest preemption
        self.cause = UNSAID  # of the current step
        self.start_ns = 0  # of the current step, or the instant up to which it is accounted for
        self.index = -1  # of the current step
        self._replica = replica
        self._finish_ns = {life.request_id: life.finish_ns for life in lives}
        self._arrivals = deque(sorted((life.queued_ns, life.request_id) for life in lives))
        self._ends = deque(sorted((life.finish_ns, life.request_id) for life in lives if life.finish_ns is not None))
        self._spent: dict[str, int] = {}  # ns of each cause before the current step
        self._headless: list[tuple[int, str, int]] = []  # steps whose head is not known yet: index, cause, ns
        self._behind: dict[str, Preempted] = {}  # requests that have tokens to compute again
        self._gone: dict[str, None] = {}  # requests that were preempted and have not run again
        self._end_ns = 0

    def take(self, step: DecidedStep) -> None:
        self._pass(step.start_ns)
        self.start_ns, self._end_ns = step.start_ns, step.end_ns
        self.index += 1
        self.cause = step.blocked_by or ("preemption" if step.victims else UNSAID)
        self._arrive(step.plan_ns)
        for name in step.ignored:
            if (wait := self.waits.pop(name, None)) is not None:
                self._record(name, wait, step.start_ns)
                self.waits[name] = _Wait(wait.kind, step.start_ns, label=NEVER_FITS)
        for name, mode in step.victims.items():
            self._preempt(step, name, mode)
        self._take_back(step)
        self._catch_up(step)

    def close(self) -> None:
        """Call after the last step: a request that still waits does so until it was aborted, or the run ended."""
        horizon = max([self._end_ns, *(ns for ns, _ in self._ends)])
        self._pass(horizon)
        self._arrive(horizon)
        for name in list(self.waits):
            self._end(name, max(horizon, self.waits[name].since_ns))

    def head(self, name: str, index: int) -> None:
        """A hook for subclasses, called when it is known that request `name` was the queue's head in step `index`."""

    # --- advancing time ---

    def _pass(self, now_ns: int) -> None:
        """Lets the current step last until `now_ns`, and ends the waits of requests that finished by then."""
        is_queue = any(wait.kind != "swap" for wait in self.waits.values())
        while self._ends and self._ends[0][0] <= now_ns:
            finish_ns, name = self._ends.popleft()
            self._behind.pop(name, None)
            self._gone.pop(name, None)
            self._end(name, finish_ns)
        if self.index < 0:
            return
        self._spent[self.cause] = self._spent.get(self.cause, 0) + now_ns - self.start_ns
        if is_queue:
            self._headless.append((self.index, self.cause, now_ns - self.start_ns))
        else:
            self._headless.clear()
        self.start_ns = now_ns

    def _arrive(self, plan_ns: int) -> None:
        while self._arrivals and self._arrivals[0][0] <= plan_ns:
            queued_ns, name = self._arrivals.popleft()
            finish_ns = self._finish_ns[name]
            if finish_ns is not None and finish_ns <= self.start_ns:  # it ended before any step saw it
                self._record(name, _Wait("queued", queued_ns, label=IN_FLIGHT), finish_ns)
                continue
            wait = _Wait("queued", queued_ns, self.index, dict(self._spent))
            wait.fixed[IN_FLIGHT] = max(0, self.start_ns - queued_ns)
            self.waits[name] = wait

    # --- a step's decisions ---

    def _preempt(self, step: DecidedStep, name: str, mode: str) -> None:
        if (former := self.last.get(name)) is not None:
            former.recomputed_tokens += min(0, step.recomputed_tokens.get(name, 0))
        finish_ns = self._finish_ns.get(name)
        if finish_ns is not None and finish_ns < step.end_ns:
            return  # it was aborted during the step
        self._behind.pop(name, None)
        lost, whose = step.lost_tokens.get(name, 0), step.preempted_for.get(name)
        why = "unknown" if name not in step.preempted_for else "queue_order" if whose is None else "growth"
        if whose == "":
            why, whose = "reset", None
        self.last[name] = Preempted(name, self._replica, step.step, step.start_ns, mode, why, whose, lost)
        self.preempted.append(self.last[name])
        if mode == "swap":
            self.last[name].cost_ns = step.swap_ns / sum(how == "swap" for how in step.victims.values())
        if name not in self.waits and name not in step.scheduled:
            label = SWAPPED_OUT if mode == "swap" else ""
            self.waits[name] = _Wait(mode, step.start_ns, self.index, dict(self._spent), label=label)
            self._gone[name] = None

    def _take_back(self, step: DecidedStep) -> None:
        for name in step.admitted:
            if name in self.waits:
                self._found_head(name, self.waits[name].first)
        stray = [name for name in self._gone if name in step.scheduled]
        for name in dict.fromkeys([*step.admitted, *step.swapped_in, *stray]):
            former = self.last.get(name)
            if former is not None and former.back_ns is None:
                former.back_ns = step.start_ns
                if former.mode == "swap" and name in step.swapped_in:
                    former.cost_ns += step.swap_ns / len(step.swapped_in)
                    former.caught_up_ns = step.start_ns
            if name not in step.victims or name in step.scheduled:
                self._end(name, step.start_ns)
                self._gone.pop(name, None)

    def _catch_up(self, step: DecidedStep) -> None:
        """Accounts for tokens that are computed again after a preemption."""
        for name in step.admitted:
            if (former := self.last.get(name)) is not None and former.mode == "recompute":
                num_tokens = max(0, step.recomputed_tokens.get(name, 0))
                former.recomputed_tokens += num_tokens
                former.left += num_tokens
                self._behind[name] = former
        num_tokens = sum(step.scheduled.values()) if self._behind else 0
        for name, former in list(self._behind.items()):
            part = min(former.left, step.scheduled.get(name, 0))
            former.left -= part
            if part:
                former.cost_ns += (step.end_ns - step.start_ns) * part / num_tokens
            if not former.left:
                former.caught_up_ns = step.end_ns if part else step.start_ns
                del self._behind[name]

    def _found_head(self, name: str, first: int) -> None:
        """Makes an admitted request the head of all steps of its wait whose head is not known yet."""
        at_head = self.waits[name].at_head
        while first >= 0 and self._headless and self._headless[-1][0] >= first:
            index, cause, ns = self._headless.pop()
            at_head[cause] = at_head.get(cause, 0) + ns
            self.head(name, index)

    # --- the end of a wait ---

    def _end(self, name: str, now_ns: int) -> None:
        wait = self.waits.pop(name, None)
        if wait is not None:
            self._record(name, wait, now_ns)

    def _record(self, name: str, wait: _Wait, now_ns: int) -> None:
        """Adds a row for each cause of the wait. now_ns: its end, within the current step or at that step's start."""
        if wait.label:
            spent = {wait.label: now_ns - wait.since_ns}
        else:
            spent = {cause: ns - wait.base.get(cause, 0) for cause, ns in self._spent.items()} | wait.fixed
            spent[self.cause] = spent.get(self.cause, 0) + now_ns - self.start_ns
        self.rows += [
            WaitRow(name, self._replica, wait.kind, wait.since_ns, now_ns, cause, ns, wait.at_head.get(cause, 0))
            for cause, ns in spent.items()
            if ns
        ]
