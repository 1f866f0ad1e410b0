"""Feeds an observed run to a recorder: arrivals, steps and ends, in the order in which they happened."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from experiments.observe.case import request_of
from experiments.observe.log import ObservedLog, ObservedRequest, ObservedStep
from testbed.core.batch import Batch
from testbed.core.commands import Recorder, StepView
from testbed.core.outcome import Finished, FinishReason, Spans, StepResult
from testbed.core.plan import RESET, Admission, BatchPlan, BatchShape, Preemption, PreemptionMode
from testbed.core.sequence import Sequence
from testbed.core.serve import NOT_YET
from testbed.core.state import SequenceState

REASONS = {
    "stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT,
    "error": FinishReason.ABORT, "repetition": FinishReason.STOP,
}  # fmt: skip


class LoggedStep(NamedTuple):
    """Shape and times of a step, for a profile. period_ns: from its plan to the next plan, or before a pause to its
    end."""

    shape: BatchShape
    spans: Spans
    period_ns: int


def replay(log: ObservedLog, recorder: Recorder) -> list[LoggedStep]:
    """Feeds the whole log to the recorder; returns the shape and times of each step, in order."""
    told = _Told(log, recorder)
    aborts = [one for one in log.requests.values() if one.aborted is not None]
    happened: list[tuple[int, int, Callable[[], None]]] = [
        *((one.queued_ns, 0, partial(told.arrived, one)) for one in log.requests.values()),
        *((step.planned_ns, 1, partial(told.planned, step)) for step in log.steps),
        *((step.end_ns, 2, partial(told.committed, step)) for step in log.steps),
        *((one.ended_ns or 0, 3, partial(told.aborted, one)) for one in aborts),
    ]
    for _, _, tell in sorted(happened, key=itemgetter(0, 1)):
        tell()
    return told.measured


class _Told:
    """Sequences with the token counts that follow from the log, and the calls of the recorder."""

    def __init__(self, log: ObservedLog, recorder: Recorder) -> None:
        self.measured: list[LoggedStep] = []
        self._log = log
        self._recorder = recorder
        self._max_model_len = int(log.header["config"]["max_model_len"])
        self._seqs: dict[str, Sequence] = {}
        self._plans: deque[StepView] = deque()  # in flight
        self._after_reset = {one.place[0] for one in log.resets if one.preempts}  # plans whose victims are a reset's
        self._num_plans = self._num_steps = 0

    def arrived(self, one: ObservedRequest) -> None:
        self._seqs[one.name] = Sequence(one.number, request_of(one), self._max_model_len)
        self._recorder.arrived(self._seqs[one.name].request, one.queued_ns, self._num_steps)

    def aborted(self, one: ObservedRequest) -> None:
        assert one.ended_ns is not None
        self._recorder.aborted(one.name, one.ended_ns, self._num_steps)
        self._end([(one.name, FinishReason.ABORT)], one.ended_ns)

    def planned(self, step: ObservedStep) -> None:
        view = StepView(
            self._plan(step), step.began_ns, NOT_YET, bytes(8), [], step.num_running, step.num_waiting, 0,
            step.free_blocks, 0,
        )  # fmt: skip
        self._plans.append(view)
        self._recorder.launched(view)
        self._num_plans += 1

    def committed(self, step: ObservedStep) -> None:
        view = self._plans.popleft()
        last_ns = self._log.steps[self._num_steps - 1].taken_ns if self._num_steps else 0
        spans = Spans(
            schedule_ns=step.planned_ns - step.began_ns,
            forward_ns=max(0, step.taken_ns - max(step.planned_ns, last_ns)),
            sample_ns=step.end_ns - step.taken_ns,
        )
        emitted = [name for name, tokens in step.emitted.items() for _ in tokens]
        view.emitters = [self._seqs[name] for name in emitted if name in self._seqs]
        view.result = StepResult(step.end_ns, None, spans)
        self._recorder.committed(view)
        self.measured.append(LoggedStep(view.plan.shape, spans, self._period_ns(step)))
        self._num_steps += 1
        self._end([(name, REASONS.get(reason, FinishReason.STOP)) for name, reason in step.ended.items()], step.end_ns)

    def _period_ns(self, step: ObservedStep) -> int:
        """Returns the time from plan to plan while there is work; for the last step before a pause, up to its end."""
        later = self._log.steps[self._num_steps + 1 : self._num_steps + 2]
        left = step.num_running + step.num_waiting - len(step.ended)
        is_busy = bool(later) and left > 0
        return (later[0].began_ns if is_busy else step.end_ns) - step.began_ns

    def _plan(self, step: ObservedStep) -> BatchPlan:
        preempted = []
        for name in step.preempted:
            seq = self._seqs[name]
            preempted.append(Preemption(seq.seq_id, name, PreemptionMode.RECOMPUTE, seq.num_computed_tokens))
            seq.restart()
            seq.enter(SequenceState.WAITING)
            seq.num_preemptions += 1
        admitted = []
        for name, start in step.admitted.items():
            seq = self._seqs[name]
            seq.restart(start)
            seq.enter(SequenceState.RUNNING)
            admitted.append(Admission(seq.seq_id, name, start, seq.num_preemptions > 0))
        batch = Batch(0)
        for name, num_tokens in step.scheduled.items():
            batch.add(self._seqs[name], num_tokens)
        shape = batch.shape(None, 0, 0, 0, 0)
        for seq, num_tokens in zip(batch.seqs, batch.counts, strict=True):
            if seq.advance(num_tokens):
                seq.num_tokens += 1  # the emitted token, or its placeholder, exists when the next step is planned
        whose = (RESET,) * len(preempted) if self._num_plans in self._after_reset else ()
        return BatchPlan(self._num_plans, shape, batch, tuple(admitted), tuple(preempted), preempted_for=whose)

    def _end(self, ended: list[tuple[str, FinishReason]], now_ns: int) -> None:
        finished = []
        for name, reason in ended:
            seq = self._seqs.pop(name, None)
            if seq is not None:
                output = self._log.requests[name].output
                finished.append(Finished(seq.request, reason, "", len(output), output))
        if finished:
            self._recorder.ended(finished, now_ns)
