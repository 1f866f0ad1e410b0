"""The writer of a run's records: makes the rows of `schema.py` from the steps and requests that it observes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, cast

from librt.vecs import append, vec
from mypy_extensions import i64

from testbed.core.commands import Recorder, StepView
from testbed.core.outcome import Finished, FinishReason
from testbed.core.plan import Admission, BatchPlan, Preemption, PreemptionMode
from testbed.core.request import Request
from testbed.core.sequence import Sequence
from testbed.records.latencies import e2e_s, tpot_s, ttft_s
from testbed.records.schema import COMPLETED, REQUEST_COLUMNS, decision, explanation
from testbed.records.sender import Sender
from testbed.records.tables import RowTable, StepTable


class RunRecorder(Recorder):
    """Writes requests.parquet, steps.parquet and, if requested, decisions.jsonl into a run folder.

    Rows are flushed in groups; only Parquet's metadata of each group stays in memory. A separate thread writes them; a
    failed write raises its error at the next group or at `close`. `close` adds a row for every unfinished request and
    completes the files; it must be called after a failure too. A loop can have only one such recorder, because it keeps
    its state of a request in `Sequence.record`.

    replica: the number of the recorded replica; None: there is only one. beside: the recorder of another replica, into
    whose files this one writes; that one must be closed last. explains: decisions have the cause and the cost of each
    preemption. sender: delivers tokens to the clients; None: they have their tokens at the commit.
    """

    FLUSH_ROWS: ClassVar[int] = 8192
    FLUSH_REQUESTS: ClassVar[int] = 1024  # fewer, as each has an instant for every token

    def __init__(
        self,
        folder: Path,
        *,
        token_times: bool = True,
        decisions: bool = False,
        explains: bool = False,
        steps: bool = True,
        replica: int | None = None,
        beside: RunRecorder | None = None,
        sender: Sender | None = None,
    ) -> None:
        self.num_finished = 0
        self.num_sent = 0
        self.num_cut = self.num_cut_tokens = 0  # forced outputs cut by the model's length, and their missing tokens
        self.ignored: list[tuple[str, str]] = []  # request id, reason
        self._replica = replica
        self._is_first = beside is None
        if beside is None:
            self._worker = ThreadPoolExecutor(1, "parquet")
            self._requests = RowTable(folder / "requests.parquet", REQUEST_COLUMNS, self._worker, self.FLUSH_REQUESTS)
            self._steps = StepTable(folder / "steps.parquet", self._worker, self.FLUSH_ROWS)
            self._decisions = (folder / "decisions.jsonl").open("w", encoding="utf-8") if decisions else None
        else:
            self._worker, self._requests, self._steps = beside._worker, beside._requests, beside._steps
            self._decisions = beside._decisions
        self._explains = explains
        self._token_times = token_times
        self._sender = sender
        self._end_ns = 0  # the end of the previous step
        self._keeps_steps = steps
        self._open: dict[str, OpenRequest] = {}

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        self.num_sent += 1
        self._open[request.request_id] = OpenRequest(request, now_ns, self._token_times)

    def launched(self, step: StepView) -> None:
        for admission in step.plan.admitted:  # already now, as the request may be aborted while the plan is in flight
            self._open[admission.request_id].scheduled(admission, step.plan_ns)

    def committed(self, step: StepView) -> None:
        plan = step.plan
        before = self._recomputed(plan) if self._explains else {}
        num_recomputed = num_preempted = 0
        if plan.preempted:
            num_recomputed, num_preempted = self._preempted(plan.preempted)
        for admission in plan.admitted:
            if (request := self._open.get(admission.request_id)) is not None:  # it may have ended with an earlier step
                request.admitted(admission)
        self._emitted(step.emitters, step.end_ns)
        if self._keeps_steps:
            start_ns = max(step.plan_ns, self._end_ns)
            self._steps.append(step, start_ns, num_recomputed, num_preempted - num_recomputed, self._replica or 0)
        self._end_ns = step.end_ns
        if self._decisions is not None:
            whose = {} if self._replica is None else {"replica": self._replica}
            more = explanation(plan, before, self._recomputed(plan)) if self._explains else {}
            self._decisions.write(json.dumps(whose | decision(step) | more) + "\n")

    def _recomputed(self, plan: BatchPlan) -> dict[str, int]:
        """Returns the recomputed tokens so far of each request that the plan preempts or resumes."""
        names = [item.request_id for item in plan.preempted]
        names += [item.request_id for item in plan.admitted if item.is_resumed]
        return {name: self._open[name].num_recomputed_tokens for name in names if name in self._open}

    def _emitted(self, emitters: list[Sequence], end_ns: i64) -> None:
        for seq in emitters:
            if seq.record is None:
                seq.record = self._open[seq.request_id]
            request = cast("OpenRequest", seq.record)
            request.emitted(end_ns)
            if self._sender is not None:
                request.sent(self._sender.send(seq.request_id, end_ns))

    def _preempted(self, preempted: tuple[Preemption, ...]) -> tuple[int, int]:
        """Counts the requests preempted by recompute, and all preempted ones. Members of a group count once."""
        modes: dict[str, PreemptionMode] = {}
        for preemption in preempted:
            is_first = preemption.request_id not in modes
            if (request := self._open.get(preemption.request_id)) is not None:
                request.preempted(preemption, is_first)
            modes[preemption.request_id] = preemption.mode
        return sum([1 for mode in modes.values() if mode is PreemptionMode.RECOMPUTE]), len(modes)

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        for item in finished:
            if item.reason is FinishReason.IGNORED:
                self.ignored.append((item.request.request_id, item.message))
            elif item.reason is FinishReason.LENGTH and (wanted := _num_wanted(item.request)):
                missing = wanted - len(item.output_token_ids)
                self.num_cut += missing > 0
                self.num_cut_tokens += missing
            request = self._open.pop(item.request.request_id)
            self._requests.append(request.row(item.reason.value, item.message, now_ns, self._replica or 0))
            self.num_finished += 1

    def close(self) -> None:
        for request in self._open.values():
            self._requests.append(request.row(None, None, None, self._replica or 0))
        self._open = {}
        if not self._is_first:
            return
        try:
            self._requests.close()
        finally:
            try:
                self._steps.close()
            finally:
                self._worker.shutdown()
                if self._decisions is not None:
                    self._decisions.close()


class OpenRequest:
    """The recorder's state of a request that has not ended.

    Tokens that several sequences of a group emit in one step have one instant. keeps_instants: whether all are kept.
    """

    def __init__(self, request: Request, queued_ns: int, keeps_instants: bool) -> None:
        self.request = request
        self.queued_ns = queued_ns
        self.first_scheduled_ns: int | None = None
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        # by seq_id: the most tokens computed before a preemption, and the prefix-cache hit of the last admission
        self.restarts: dict[int, tuple[int, int]] = {}
        self.num_tokens = self.num_token_steps = i64(0)
        self.first_ns = self.last_ns = i64(-1)  # instants of the first and the last token
        self.first_sent_ns = self.last_sent_ns = i64(-1)  # the same at the client, if there is a sender
        self.instants: vec[i64] = vec[i64]()
        self.keeps_instants = keeps_instants

    def emitted(self, now_ns: i64) -> None:
        """Counts an emitted token."""
        self.num_tokens += 1
        if now_ns == self.last_ns:
            return
        self.last_ns = now_ns
        self.num_token_steps += 1
        if self.num_token_steps == 1:
            self.first_ns = now_ns
        if self.keeps_instants:
            self.instants = append(self.instants, now_ns)

    def sent(self, now_ns: i64) -> None:
        """Notes when the client has the newest token."""
        if self.first_sent_ns < 0:
            self.first_sent_ns = now_ns
        self.last_sent_ns = now_ns

    def scheduled(self, admission: Admission, plan_ns: int) -> None:
        if self.first_scheduled_ns is None:
            self.first_scheduled_ns, self.num_cached_tokens = plan_ns, admission.num_cached_tokens

    def admitted(self, admission: Admission) -> None:
        most_computed, _ = self.restarts.get(admission.seq_id, (0, 0))
        self.restarts[admission.seq_id] = most_computed, admission.num_cached_tokens
        self.num_recomputed_tokens += max(0, most_computed - admission.num_cached_tokens)

    def preempted(self, preemption: Preemption, is_first: bool) -> None:
        """Counts a preemption. Subtracts tokens of an earlier one that have not been computed again."""
        self.num_preemptions += is_first
        if preemption.mode is PreemptionMode.SWAP:
            return
        num_computed = preemption.num_computed_tokens
        most_computed, restarted_at = self.restarts.get(preemption.seq_id, (0, 0))
        self.num_recomputed_tokens -= max(0, most_computed - max(num_computed, restarted_at))
        self.restarts[preemption.seq_id] = max(most_computed, num_computed), restarted_at

    def row(self, reason: str | None, message: str | None, finish_ns: int | None, replica: int) -> tuple[Any, ...]:
        """Returns the request's row of requests.parquet."""
        request, num_steps, arrival_ns = self.request, int(self.num_token_steps), self.request.arrival_ns
        is_sent = self.first_sent_ns >= 0
        first_ns = int(self.first_sent_ns if is_sent else self.first_ns)
        last_ns = int(self.last_sent_ns if is_sent else self.last_ns)
        had_gone = reason == FinishReason.ABORT.value and finish_ns is not None and first_ns > finish_ns
        return (
            request.request_id, request.session_id, request.turn, request.tenant, request.priority,
            request.deadline_ns, replica, len(request.prompt_token_ids), self.num_tokens, num_steps,
            self.num_cached_tokens, self.num_preemptions, self.num_recomputed_tokens, reason,
            message or None, arrival_ns, self.queued_ns, self.first_scheduled_ns,
            int(self.first_ns) if num_steps else None, finish_ns,
            memoryview(self.instants) if self.keeps_instants else None,
            first_ns if is_sent else None, last_ns if is_sent else None,
            ttft_s(arrival_ns, first_ns) if num_steps and not had_gone else None,
            tpot_s(first_ns, last_ns, num_steps),
            e2e_s(arrival_ns, max(finish_ns, last_ns)) if finish_ns is not None and reason in COMPLETED else None,
        )  # fmt: skip


def _num_wanted(request: Request) -> int:
    """Returns the length of an output that nothing but the model's length ends earlier; 0: it has none."""
    if request.forced_output is not None:
        return len(request.forced_output)
    return request.sampling.max_tokens or 0 if request.sampling.ignore_eos else 0
