"""The writer of a run's records: it sees each step and each request, and makes the rows of `schema.py`."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from testbed.core.interfaces import StepView
from testbed.core.outcome import Finished, FinishReason
from testbed.core.plan import Admission, Preemption, PreemptionMode
from testbed.core.request import Request
from testbed.core.sequence import Sequence
from testbed.records.schema import COMPLETED, REQUEST_COLUMNS, STEP_COLUMNS, decision
from testbed.records.tables import RowTable, StepTable


class RunRecorder:
    """Writes requests.parquet, steps.parquet and, if asked, decisions.jsonl into a run folder, as a `Recorder`.

    Rows are flushed in groups, so memory does not grow with the run. `close` adds a row for every request that is
    unfinished and completes the files; it must be called also after a failure.

    replica: the number of the one that it records, of a fleet; None: there is only one. beside: another replica's
    recorder, into whose files this one writes too; that one is closed last.
    """

    FLUSH_ROWS = 8192
    FLUSH_REQUESTS = 1024  # each has an instant for every token
    MAX_ENDS = 1 << 16  # ends of steps that are kept for sequences that emit together, until each has its own

    def __init__(
        self,
        folder: Path,
        *,
        token_times: bool = True,
        decisions: bool = False,
        steps: bool = True,
        replica: int | None = None,
        beside: RunRecorder | None = None,
    ) -> None:
        self.num_finished = 0
        self.num_sent = 0
        self.ignored: list[tuple[str, str]] = []  # request id, reason
        self._replica = replica
        self._is_first = beside is None
        if beside is None:
            self._requests = RowTable(folder / "requests.parquet", REQUEST_COLUMNS, self.FLUSH_REQUESTS)
            self._steps = StepTable(folder / "steps.parquet", STEP_COLUMNS, self.FLUSH_ROWS)
            self._decisions = (folder / "decisions.jsonl").open("w", encoding="utf-8") if decisions else None
        else:
            self._requests, self._steps, self._decisions = beside._requests, beside._steps, beside._decisions
        self._token_times = token_times
        self._keeps_steps = steps
        self._open: dict[str, _OpenRequest] = {}
        # When the sequences emitted that emit in each step: from the ends of those steps, and since when each is there.
        self._ends = array("q")
        self._emitters: list[Sequence] = []
        self._since: dict[Sequence, int] = {}  # its first end in `_ends`
        self._has_groups = False  # whether any request is several sequences
        self._in_groups: list[str] = []  # requests of those that are in groups, once for each member

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        self.num_sent += 1
        self._has_groups = self._has_groups or request.sampling.num_seqs > 1
        self._open[request.request_id] = _OpenRequest(request, now_ns)

    def aborted(self, request_id: str, now_ns: int, step: int) -> None:
        """Nothing to write: `ended` follows."""

    def committed(self, step: StepView) -> None:
        plan, emitters = step.plan, step.emitters
        num_recomputed = num_preempted = 0
        if plan.preempted:
            num_recomputed, num_preempted = self._preempted(plan.preempted)
        for admission in plan.admitted:
            self._open[admission.request_id].admitted(admission, step.plan_ns)
        if emitters is not self._emitters:
            self._change_emitters(emitters)
        for request_id in self._in_groups:
            self._open[request_id].member_emitted(step.commit_ns)
        if self._since:
            self._ends.extend(step.result.end_ns)
            if len(self._ends) > self.MAX_ENDS:
                self._change_emitters([])
        if self._keeps_steps:
            self._steps.append(step, num_recomputed, num_preempted - num_recomputed, self._replica or 0)
        if self._decisions is not None:
            for one in step.each():
                whose = {} if self._replica is None else {"replica": self._replica}
                self._decisions.write(json.dumps(whose | decision(one)) + "\n")

    def _preempted(self, preempted: tuple[Preemption, ...]) -> tuple[int, int]:
        """How many requests are to be recomputed, and how many were preempted; the members of a group go together."""
        modes: dict[str, PreemptionMode] = {}
        for preemption in preempted:
            is_first = preemption.request_id not in modes
            self._open[preemption.request_id].preempted(preemption, is_first=is_first)
            modes[preemption.request_id] = preemption.mode
        return sum([1 for mode in modes.values() if mode is PreemptionMode.RECOMPUTE]), len(modes)

    def _change_emitters(self, emitters: list[Sequence]) -> None:
        """From here on, these emit in each step: what the others emitted becomes theirs."""
        before, end = self._since, len(self._ends)
        known = list(before)
        if known and not self._has_groups and emitters[: len(known)] == known:  # those before, and perhaps more
            for seq in emitters[len(known) :]:
                before[seq] = end
                self._open[seq.request.request_id].emits = seq
            self._emitters = emitters
            return
        since: dict[Sequence, int] = {}
        in_groups: list[str] = []
        for seq in emitters:
            start = before.pop(seq, None)
            if start is not None:
                since[seq] = start
            elif self._has_groups and seq.group is not None:
                in_groups.append(seq.request.request_id)
            else:
                since[seq] = end
                self._open[seq.request.request_id].emits = seq
        for seq in before:
            self._take_ends(self._open[seq.request.request_id], before[seq])
        if not since:
            self._ends = array("q")
        self._emitters, self._since, self._in_groups = emitters, since, in_groups

    def _take_ends(self, request: _OpenRequest, start: int) -> None:
        """The sequence of a request has emitted in each step since the end of number `start`, and emits no more."""
        request.emits = None
        request.token_ns.extend(self._ends[start:])

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        for item in finished:
            if item.reason is FinishReason.IGNORED:
                self.ignored.append((item.request.request_id, item.message))
            request = self._open.pop(item.request.request_id)
            if request.emits is not None:
                self._take_ends(request, self._since.pop(request.emits))
            self._requests.append(self._row(request, item.reason.value, item.message, now_ns))
            self.num_finished += 1

    def _row(
        self, request: _OpenRequest, reason: str | None, message: str | None, finish_ns: int | None
    ) -> tuple[Any, ...]:
        return request.row(reason, message, finish_ns, self._token_times, self._replica or 0)

    def close(self) -> None:
        self._change_emitters([])
        for request in self._open.values():
            self._requests.append(self._row(request, None, None, None))
        self._open = {}
        if not self._is_first:
            return
        try:
            self._requests.close()
        finally:
            try:
                self._steps.close()
            finally:
                if self._decisions is not None:
                    self._decisions.close()


class _OpenRequest:
    """What is known of a request that has not ended."""

    __slots__ = (
        "emits",
        "first_scheduled_ns",
        "num_cached_tokens",
        "num_group_tokens",
        "num_preemptions",
        "num_recomputed_tokens",
        "queued_ns",
        "request",
        "restarts",
        "token_ns",
    )  # fmt: skip

    def __init__(self, request: Request, queued_ns: int) -> None:
        self.request = request
        self.queued_ns = queued_ns
        self.first_scheduled_ns: int | None = None
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        # by seq_id: tokens that were computed once, at the last preemption; those that the cache gave back since
        self.restarts: dict[int, tuple[int, int]] = {}
        self.num_group_tokens = 0
        self.token_ns = array("q")  # each step that emitted
        self.emits: Sequence | None = None  # its sequence, while it emits in each step: then the last instants lack

    def member_emitted(self, now_ns: int) -> None:
        """One token of one of its several sequences."""
        self.num_group_tokens += 1
        if not self.token_ns or self.token_ns[-1] != now_ns:
            self.token_ns.append(now_ns)

    def admitted(self, admission: Admission, plan_ns: int) -> None:
        if self.first_scheduled_ns is None:
            self.first_scheduled_ns, self.num_cached_tokens = plan_ns, admission.num_cached_tokens
        most_computed, _ = self.restarts.get(admission.seq_id, (0, 0))
        self.restarts[admission.seq_id] = most_computed, admission.num_cached_tokens
        self.num_recomputed_tokens += max(0, most_computed - admission.num_cached_tokens)

    def preempted(self, preemption: Preemption, *, is_first: bool) -> None:
        """What it had not yet got back of an earlier preemption was not computed again after all."""
        self.num_preemptions += is_first
        if preemption.mode is PreemptionMode.SWAP:
            return
        num_computed = preemption.num_computed_tokens
        most_computed, restarted_at = self.restarts.get(preemption.seq_id, (0, 0))
        self.num_recomputed_tokens -= max(0, most_computed - max(num_computed, restarted_at))
        self.restarts[preemption.seq_id] = max(most_computed, num_computed), restarted_at

    def row(
        self, reason: str | None, message: str | None, finish_ns: int | None, token_times: bool, replica: int
    ) -> tuple[Any, ...]:
        request, times = self.request, self.token_ns
        num_steps = len(times)
        arrival_ns = request.arrival_ns
        return (
            request.request_id, request.session_id, request.turn, request.tenant, request.priority, replica,
            len(request.prompt_token_ids), self.num_group_tokens or num_steps, num_steps, self.num_cached_tokens,
            self.num_preemptions, self.num_recomputed_tokens, reason, message or None,
            arrival_ns, self.queued_ns, self.first_scheduled_ns,
            times[0] if times else None, finish_ns, times if token_times else None,
            (times[0] - arrival_ns) / 1e9 if times else None,
            (times[-1] - times[0]) / (num_steps - 1) / 1e9 if num_steps > 1 else None,
            (finish_ns - arrival_ns) / 1e9 if finish_ns is not None and reason in COMPLETED else None,
        )  # fmt: skip
