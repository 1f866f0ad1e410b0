"""An independent model of what a scheduler may do under fcfs, and a fake device that remembers what its KV slots hold.

It shares no code with the core: it sees requests, plans and results only (block tables of unscheduled sequences are
read for the conservation of blocks). A prefix is named by an interned integer, so "this slot holds exactly this token
at this position after exactly these tokens" is one comparison.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from testbed.plan import BatchPlan, BlockedBy, Finished, FinishReason, Outcome, ScheduledSequence, StepResult
from testbed.policies.config import Limits
from testbed.request import Request
from testbed.scheduler import Scheduler


@dataclass
class Known:
    """A live request as the model sees it."""

    seq_id: int
    request: Request
    tokens: list[int]
    prefixes: list[int] = field(default_factory=list)  # interned name of tokens[:i + 1]
    num_computed: int = 0
    was_admitted: bool = False

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Reference:
    """Follows a scheduler call by call; every method asserts that what happened was right."""

    def __init__(
        self,
        composition: str,
        limits: Limits,
        scheduler: Scheduler,
        *,
        eos_token_id: int,
        vocab_size: int,
        last_is_victim: bool = True,
    ) -> None:
        self.composition = composition
        self.limits = limits
        self.scheduler = scheduler
        self.eos_token_id = eos_token_id
        self.vocab_size = vocab_size
        self.last_is_victim = last_is_victim  # the rule of the product; a user's own may differ
        self.slots: dict[int, int] = {}  # physical slot -> interned prefix
        self.live: dict[str, Known] = {}
        self.waiting: deque[str] = deque()
        self.rejected: list[str] = []
        self.running: list[str] = []  # in order of admission
        self.ended: dict[str, FinishReason] = {}
        self.num_added = 0
        self.num_hit_tokens = 0
        self.num_preempted = 0
        self._names: dict[tuple[int | str, int], int] = {}

    # --- calls ---

    def added(self, request: Request) -> None:
        known = Known(self.num_added, request, [])
        self.num_added += 1
        self.live[request.request_id] = known
        for token in request.prompt_token_ids:
            self._append(known, token)
        if known.num_prompt > self.limits.max_model_len:
            self.rejected.append(request.request_id)
        else:
            self.waiting.append(request.request_id)

    def aborted(self, request_id: str, finished: Finished | None) -> None:
        known = self.live.pop(request_id)
        assert finished is not None
        assert finished.reason is FinishReason.ABORT
        assert list(finished.output_token_ids) == known.output
        for place in (self.waiting, self.running, self.rejected):
            if request_id in place:
                place.remove(request_id)
        self.ended[request_id] = FinishReason.ABORT

    def planned(self, plan: BatchPlan) -> None:
        """Checks a plan against the queue, the budgets and the content of the KV slots."""
        rows = plan.scheduled
        self._check_progress(plan, rows)
        self._follow_queue(plan)
        self._check_budgets(plan, rows)
        for row in rows:
            self._check_row(row)
        self._check_shape(plan, rows)
        self._check_blocks(plan)
        self._check_content(rows)

    def execute(self, plan: BatchPlan) -> StepResult:
        """What a device does with the plan: writes its slots, and draws a token where the plan says so."""
        outcomes = []
        for row in plan.scheduled:
            self.slots.update(self._writes(row))
            if row.samples and not row.forced:
                outcomes.append(Outcome(row.seq_id, (self._draw(row),)))
        return StepResult((1,), tuple(outcomes) or None)

    def committed(self, plan_rows: tuple[ScheduledSequence, ...], plan: BatchPlan, finished: list[Finished]) -> None:
        """Appends what was emitted and checks who ended, why, and with which output."""
        expected = [(item.request_id, FinishReason.IGNORED) for item in plan.ignored]
        for row in plan_rows:
            known = self._of(row.seq_id)
            known.num_computed = row.start + row.num_tokens
            if row.samples:
                reason = self._emit(known, row)
                if reason is not None:
                    expected.append((known.request.request_id, reason))
        assert [(item.request.request_id, item.reason) for item in finished] == expected
        emitting = [self._of(row.seq_id).request.request_id for row in plan_rows if row.samples]
        assert self.scheduler.emitted == emitting
        for item in finished:
            known = self.live.pop(item.request.request_id)
            if item.request.request_id in self.running:
                self.running.remove(item.request.request_id)
            assert list(item.output_token_ids) == known.output
            assert item.num_output_tokens == len(known.output)
            self._check_output(known, item.reason)
            self.ended[item.request.request_id] = item.reason
        assert len(self.live) + len(self.ended) == self.num_added, "a request is lost"

    # --- a plan ---

    def _check_progress(self, plan: BatchPlan, rows: tuple[ScheduledSequence, ...]) -> None:
        """Work always moves, and the oldest running sequence is never passed over: fcfs cannot starve it."""
        assert not plan.is_empty
        touched = {row.seq_id for row in rows} | {item.seq_id for item in plan.preempted}
        if self.composition == "prefill_first" and plan.admitted:
            assert {row.seq_id for row in rows} == {item.seq_id for item in plan.admitted}, "a batch of prompts only"
            return
        decoding = [name for name in self.running if not self._is_prefilling(self.live[name])]
        first = decoding or self.running if self.composition == "decode_first" else self.running
        if first and self.last_is_victim:
            assert self.live[first[0]].seq_id in touched, "the oldest was passed over"

    def _follow_queue(self, plan: BatchPlan) -> None:
        assert not (plan.admitted and plan.preempted), "admitted in a step that preempted"
        if self.composition == "prefill_first":  # looks at the queue before it decodes
            self._follow_admissions(plan)
            self._follow_preemptions(plan)
        else:
            self._follow_preemptions(plan)
            self._follow_admissions(plan)
        assert not self.waiting or plan.blocked_by is not None, "nobody says why the head waits"
        if plan.preempted and self.waiting and self.composition != "prefill_first":
            assert plan.blocked_by is BlockedBy.PREEMPTION

    def _follow_preemptions(self, plan: BatchPlan) -> None:
        for item in plan.preempted:
            if self.last_is_victim:
                assert self.running[-1] == item.request_id, "the victim was not the last admitted"
            self.running.remove(item.request_id)
            known = self.live[item.request_id]
            assert known.num_computed == item.num_computed_tokens
            known.num_computed = 0
            self.waiting.appendleft(item.request_id)
            self.num_preempted += 1

    def _follow_admissions(self, plan: BatchPlan) -> None:
        ended = [item.request_id for item in plan.ignored]
        assert ended[: len(self.rejected)] == self.rejected
        del ended[: len(self.rejected)]
        self.rejected.clear()
        entering = [item.request_id for item in plan.admitted]
        taken = [self.waiting.popleft() for _ in range(len(entering) + len(ended))]
        assert [name for name in taken if name in entering] == entering, "not first come, first served"
        assert [name for name in taken if name not in entering] == ended
        for item in plan.admitted:
            known = self.live[item.request_id]
            assert item.is_resumed == known.was_admitted
            assert item.num_cached_tokens % self.scheduler.blocks.block_size == 0
            assert item.num_cached_tokens < len(known.tokens), "at least one token is computed"
            known.was_admitted = True
            known.num_computed = item.num_cached_tokens
            self.num_hit_tokens += item.num_cached_tokens
            self.running.append(item.request_id)

    def _check_budgets(self, plan: BatchPlan, rows: tuple[ScheduledSequence, ...]) -> None:
        resumes_alone = len(rows) == len(plan.admitted) == 1 and plan.admitted[0].is_resumed
        if not (self.composition == "prefill_first" and resumes_alone):
            assert sum(row.num_tokens for row in rows) <= self.limits.max_num_batched_tokens
        assert len(self.running) == self.scheduler.num_running <= self.limits.max_num_seqs
        assert len(self.waiting) == self.scheduler.num_waiting
        assert len({row.seq_id for row in rows}) == len(rows)
        names = [self._of(row.seq_id).request.request_id for row in rows]
        assert plan.num_scheduled == tuple((name, row.num_tokens) for name, row in zip(names, rows, strict=True))
        assert all(name in self.running for name in names)
        if self.composition == "decode_first":
            ends = {row.seq_id: row.start + row.num_tokens for row in rows}
            known = [self.live[name] for name in self.running]
            partial = [
                k for k in known if ends.get(k.seq_id, k.num_computed) < len(k.tokens) and self._is_prefilling(k)
            ]
            assert len(partial) <= self.limits.max_num_partial_prefills

    def _check_row(self, row: ScheduledSequence) -> None:
        known = self._of(row.seq_id)
        end = row.start + row.num_tokens
        assert row.start == known.num_computed
        assert row.num_tokens >= 1
        assert list(row.tokens) == known.tokens[row.start : end]
        assert row.samples == (end == len(known.tokens))
        assert row.forced == (known.request.forced_output is not None)
        assert len(set(row.block_table)) == len(row.block_table)
        assert len(row.block_table) * self.scheduler.blocks.block_size >= end, "no slot for a token"
        assert row.sampling == known.request.sampling

    def _check_shape(self, plan: BatchPlan, rows: tuple[ScheduledSequence, ...]) -> None:
        decodes = [row for row in rows if row.num_tokens == 1 and row.start >= self._of(row.seq_id).num_prompt]
        prefills = [(row.start, row.num_tokens) for row in rows if row not in decodes]
        assert plan.shape.num_decodes == len(decodes)
        assert plan.shape.decode_context_tokens == sum(row.start + 1 for row in decodes)
        assert [tuple(chunk) for chunk in plan.shape.prefills] == prefills
        assert plan.shape.num_samples == sum(row.samples for row in rows)
        assert plan.shape.num_tokens == sum(row.num_tokens for row in rows)

    def _check_blocks(self, plan: BatchPlan) -> None:
        blocks = self.scheduler.blocks
        held: set[int] = set()
        for name in self.running:
            held.update(blocks.table(self.live[name].seq_id))
        assert self.scheduler.free_gpu_blocks == blocks.num_gpu_blocks - len(held)
        was_idle = len(self.running) == len(plan.admitted)
        if plan.admitted and (blocks.rules.watermark_when_idle or not was_idle):
            assert self.scheduler.free_gpu_blocks >= blocks.watermark_blocks, "an admission went below the watermark"

    # --- KV content ---

    def _check_content(self, rows: tuple[ScheduledSequence, ...]) -> None:
        """Every position before a row's tokens is in its slot: from an earlier step or, where hits are visible at
        allocation, from a row before it in this one. No write of this step may have destroyed it."""
        writes: dict[int, int] = {}
        for row in rows:
            own = self._writes(row)
            assert not writes.keys() & own.keys(), "two rows write one slot"
            writes.update(own)
        after = self.slots | writes
        in_step = self.scheduler.blocks.rules.hits_visible == "allocation"
        before = dict(self.slots)
        for row in rows:
            prefixes = self._of(row.seq_id).prefixes
            for position in range(row.start):
                slot = self._slot(row, position)
                assert after.get(slot) == prefixes[position], f"seq {row.seq_id} reads a foreign token at {position}"
                assert before.get(slot) == prefixes[position], f"seq {row.seq_id} reads {position} before it is written"
            if in_step:
                before.update(self._writes(row))

    def _writes(self, row: ScheduledSequence) -> dict[int, int]:
        prefixes = self._of(row.seq_id).prefixes
        return {self._slot(row, p): prefixes[p] for p in range(row.start, row.start + row.num_tokens)}

    def _slot(self, row: ScheduledSequence, position: int) -> int:
        block_size = self.scheduler.blocks.block_size
        return row.block_table[position // block_size] * block_size + position % block_size

    # --- tokens ---

    def _append(self, known: Known, token: int) -> None:
        parent: int | str = known.prefixes[-1] if known.prefixes else known.request.cache_salt
        known.tokens.append(token)
        known.prefixes.append(self._names.setdefault((parent, token), len(self._names)))

    def _draw(self, row: ScheduledSequence) -> int:
        return (row.seq_id * 5 + row.start * 3 + row.num_tokens) % self.vocab_size

    def _emit(self, known: Known, row: ScheduledSequence) -> FinishReason | None:
        request = known.request
        token = self._draw(row) if request.forced_output is None else request.forced_output[len(known.output)]
        self._append(known, token)
        if request.forced_output is None:
            is_eos = token == self.eos_token_id and not request.sampling.ignore_eos
            if is_eos or token in request.sampling.stop_token_ids:
                return FinishReason.STOP
        return FinishReason.LENGTH if len(known.output) == self._max_output(known) else None

    def _max_output(self, known: Known) -> int:
        wanted = known.request.sampling.max_tokens
        if known.request.forced_output is not None:
            wanted = len(known.request.forced_output)
        room = max(1, self.limits.max_model_len - known.num_prompt)
        return room if wanted is None else min(wanted, room)

    def _check_output(self, known: Known, reason: FinishReason) -> None:
        if known.request.forced_output is not None:
            forced = list(known.request.forced_output)[: self._max_output(known)]
            assert known.output == (forced[: len(known.output)] if reason is FinishReason.IGNORED else forced)
        if reason is FinishReason.IGNORED and not known.was_admitted:
            assert not known.output

    def _is_prefilling(self, known: Known) -> bool:
        return known.num_computed < max(known.num_prompt, len(known.tokens) - 1)

    def _of(self, seq_id: int) -> Known:
        return next(known for known in self.live.values() if known.seq_id == seq_id)
