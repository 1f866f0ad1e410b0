"""The scheduler: queues, lifecycle and commit. A pure state machine; a composition decides each step.

    add / abort          between steps
    plan(now) -> plan    decides a step and changes block tables; touches no device
    commit(result, now)  takes what came out of it; ends what is finished

One plan is in flight at most. Given the same configuration, calls and outcomes, it decides the same on every machine.
"""

from __future__ import annotations

from testbed.blocks.manager import BlockManager
from testbed.digest import Digest, abort_event, finish_event, plan_events
from testbed.errors import RequestError
from testbed.plan import (
    BatchPlan,
    BatchShape,
    Finished,
    FinishReason,
    Outcome,
    PrefillChunk,
    ScheduledSequence,
    StepResult,
)
from testbed.policies.compositions import Composition
from testbed.policies.config import Limits
from testbed.policies.queue_order import WaitingQueue
from testbed.policies.victim import VictimChoice
from testbed.request import Request
from testbed.sequence import Sequence, SequenceState
from testbed.step import Row, Step

NO_OUTCOME = Outcome(-1, ())  # no sequence has this id


class Scheduler:
    """Owns every live sequence. See the module's docstring for its life.

    eos_token_id ends sequences that are not forced and do not ignore it. record_decisions fills
    `BatchPlan.num_scheduled`, which costs time.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        blocks: BlockManager,
        composition: Composition,
        queue: WaitingQueue,
        victims: VictimChoice,
        eos_token_id: int | None = None,
        record_decisions: bool = False,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.num_steps = 0
        self._composition = composition
        self._waiting = queue
        self._victims = victims
        self._eos_token_id = eos_token_id
        self._record_decisions = record_decisions
        self._running: dict[int, Sequence] = {}
        self._live: dict[str, Sequence] = {}
        self._rejected: list[tuple[Sequence, str]] = []  # ended at `add`; reported by the next plan
        self._next_seq_id = 0
        self._digest = Digest()
        self._pending_events: list[int] = []
        self._step: Step | None = None  # the plan in flight
        self._plan: BatchPlan | None = None
        self._composition_hash = 0
        self._committed_rows: list[Row] = []
        self._silent: dict[int, None] = {}
        self._prefilling: dict[int, Sequence] = {}  # running sequences whose prefill is unfinished
        self.free_gpu_blocks = blocks.num_free_blocks  # after the last plan

    # --- state ---

    @property
    def digest(self) -> int:
        """The decision digest after the last committed step."""
        return self._digest.value

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_swapped(self) -> int:
        return 0

    @property
    def emitted(self) -> list[str]:
        """Ids of the requests that emitted a token in the last commit, in the order scheduled."""
        return [seq.request.request_id for seq, _, _ in self._committed_rows if seq.seq_id not in self._silent]

    def unfinished(self) -> list[Sequence]:
        """Live sequences in order of arrival."""
        return list(self._live.values())

    # --- requests ---

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError for an id that is live; one too long for the model ends as ignored."""
        if request.request_id in self._live:
            raise RequestError(f"request id {request.request_id!r} is in use; ids of live requests must differ")
        seq = Sequence(self._next_seq_id, request, self.limits.max_model_len, self._stop_tokens(request))
        self._next_seq_id += 1
        self._live[request.request_id] = seq
        if seq.num_prompt_tokens > self.limits.max_model_len:
            reason = f"prompt of {seq.num_prompt_tokens} tokens exceeds max_model_len ({self.limits.max_model_len})"
            self._rejected.append((seq, reason))
        else:
            self._waiting.push(seq)

    def abort(self, request_id: str) -> Finished | None:
        """Ends a request in any state and frees all it held. None if it is not live (it may have just finished)."""
        assert self._plan is None, "abort between steps, not while a plan is in flight"
        seq = self._live.get(request_id)
        if seq is None:
            return None
        if seq.state is SequenceState.RUNNING:
            del self._running[seq.seq_id]
            self._prefilling.pop(seq.seq_id, None)
            self.blocks.free(seq)
        elif any(seq is rejected for rejected, _ in self._rejected):
            self._rejected = [item for item in self._rejected if item[0] is not seq]
        else:
            self._waiting.remove(seq)
        self._pending_events += abort_event(seq.seq_id)
        return self._end(seq, FinishReason.ABORT, "aborted")

    # --- steps ---

    def plan(self, now_ns: int, max_steps: int = 1) -> BatchPlan:
        """Decides the next step. An empty plan means that nothing can be done before something else happens."""
        assert self._plan is None, "one plan in flight"
        assert max_steps >= 1
        step = Step(now_ns, self.limits, self.blocks, self._waiting, self._running, self._prefilling, self._victims)
        for seq, reason in self._rejected:
            step.end_rejected(seq, reason)
        self._rejected = []
        self._composition.compose(step)
        self._unblock(step)
        plan = self._to_plan(step)
        if not plan.is_empty:
            self._step, self._plan = step, plan
            self._composition_hash = self._digest.composition(step)
            self.free_gpu_blocks = self.blocks.num_free_blocks
        return plan

    def commit(self, result: StepResult, now_ns: int) -> list[Finished]:
        """Takes the outcome of the plan in flight; returns the requests that ended with it, in order scheduled."""
        step = self._step
        assert step is not None, "nothing is in flight"
        assert len(result.end_ns) == 1, "a plan of one step has one end"
        self._step = self._plan = None
        self.num_steps += 1
        events = self._pending_events + plan_events(step)
        finished = [self._end(seq, FinishReason.IGNORED, reason) for seq, reason in step.ended]
        for seq, reason in self._advance(step.rows, result.outcomes):
            del self._running[seq.seq_id]
            self.blocks.free(seq)
            events += finish_event(seq.seq_id, reason)
            finished.append(self._end(seq, reason, ""))
        self._digest.add(self._composition_hash, self.free_gpu_blocks, self.blocks.num_free_cpu_blocks, events)
        self._pending_events = []
        return finished

    # --- inside ---

    def _advance(self, rows: list[Row], outcomes: tuple[Outcome, ...] | None) -> list[tuple[Sequence, FinishReason]]:
        """Counts the rows as computed and appends the tokens that they emit; the sequences that end with it."""
        drawn = iter(outcomes or ())
        ending: list[tuple[Sequence, FinishReason]] = []
        silent: dict[int, None] = {}  # rows that leave tokens to compute, and so emit nothing
        block_size, publish, prefilling = self.blocks.block_size, self.blocks.publish, self._prefilling
        for seq, start, num_tokens in rows:
            num_computed = start + num_tokens
            seq.num_computed_tokens = num_computed
            tokens = seq.tokens
            if num_tokens > 1 or not num_computed % block_size:
                publish(seq, num_computed)
            if num_computed < len(tokens):
                silent[seq.seq_id] = None
                if not seq.is_prefilling:  # a resumed sequence whose newest token alone is left: a decode from here on
                    prefilling.pop(seq.seq_id, None)
                continue
            if prefilling:
                prefilling.pop(seq.seq_id, None)
            forced = seq.forced
            if forced is not None:
                tokens.append(forced[num_computed - seq.num_prompt_tokens])
                if num_computed + 1 >= seq.token_limit:
                    ending.append((seq, FinishReason.LENGTH))
                continue
            seq_id, new_tokens, stop, _, _ = next(drawn, NO_OUTCOME)
            assert seq_id == seq.seq_id, "outcomes come in the order scheduled, one for each row that was not forced"
            token = new_tokens[0]
            tokens.append(token)
            if stop is not None:
                ending.append((seq, stop))
            elif token in seq.stop_tokens:
                ending.append((seq, FinishReason.STOP))
            elif num_computed + 1 >= seq.token_limit:
                ending.append((seq, FinishReason.LENGTH))
        self._committed_rows, self._silent = rows, silent
        return ending

    def _end(self, seq: Sequence, reason: FinishReason, message: str) -> Finished:
        seq.enter(SequenceState.FINISHED)
        seq.finish_reason = reason
        self.blocks.forget(seq)
        del self._live[seq.request.request_id]
        return Finished(seq.request, reason, message, seq.num_output_tokens, seq.tokens[seq.num_prompt_tokens :])

    def _unblock(self, step: Step) -> None:
        """A head that is blocked while nothing runs would wait for ever: it ends as ignored, naming the rule."""
        if step.rows or step.preempted or step.ignored or self._running:
            return
        seq = step.head()
        if seq is not None and step.blocked_by is not None:
            step.ignore(seq, f"blocked by {step.blocked_by.value} while nothing runs: no later step could admit it")

    def _to_plan(self, step: Step) -> BatchPlan:
        rows = step.rows
        prefills: list[PrefillChunk] = []
        if step.prefilling:
            decodes = []
            num_samples = 0
            for row in rows:
                seq, start, num_tokens = row
                if num_tokens == 1 and start >= seq.num_prompt_tokens:
                    decodes.append(row)
                else:
                    prefills.append(PrefillChunk(start, num_tokens))
                num_samples += start + num_tokens == len(seq.tokens)
        else:
            decodes, num_samples = rows, len(rows)
        num_decodes = len(decodes)
        context = sum([row[1] for row in decodes]) + num_decodes
        return BatchPlan(
            step=self.num_steps,
            num_steps=1,
            shape=BatchShape(num_decodes, context, tuple(prefills), num_samples),
            rows=lambda: self._rows(step),
            num_scheduled=tuple((seq.request.request_id, num_tokens) for seq, _, num_tokens in rows)
            if self._record_decisions
            else None,
            admitted=tuple(step.admitted),
            preempted=tuple(step.preempted),
            ignored=tuple(step.ignored),
            blocked_by=step.blocked_by,
        )

    def _rows(self, step: Step) -> tuple[ScheduledSequence, ...]:
        assert self._step is step, "a plan's rows are valid until it is committed"
        return tuple(
            ScheduledSequence(
                seq.seq_id,
                start,
                num_tokens,
                seq.tokens[start : start + num_tokens],
                start + num_tokens == len(seq.tokens),
                seq.forced is not None,
                self.blocks.table(seq.seq_id),
                seq.request.sampling,
            )
            for seq, start, num_tokens in step.rows
        )

    def _stop_tokens(self, request: Request) -> tuple[int, ...]:
        stops = request.sampling.stop_token_ids
        if self._eos_token_id is None or request.sampling.ignore_eos:
            return stops
        return (*stops, self._eos_token_id)

    def check_invariants(self) -> None:
        """Every live sequence is in exactly one place; running ones have tables that cover what is computed."""
        self.blocks.check_invariants()
        waiting = {seq.seq_id for seq in self._waiting}
        rejected = {seq.seq_id for seq, _ in self._rejected}
        ended = {seq.seq_id for seq, _ in self._step.ended} if self._step is not None else set()
        running = set(self._running)
        assert len(waiting) + len(rejected) + len(ended) + len(running) == len(self._live), "a request is lost or twice"
        for seq in self._live.values():
            in_place = running if seq.state is SequenceState.RUNNING else waiting | rejected | ended
            assert seq.seq_id in in_place, f"{seq} is in the wrong place"
            if seq.state is SequenceState.RUNNING:
                num_slots = len(self.blocks.table(seq.seq_id)) * self.blocks.block_size
                assert seq.num_slots == num_slots, f"{seq} has {num_slots} slots, not {seq.num_slots}"
                assert seq.num_computed_tokens <= num_slots, f"{seq} has computed tokens without blocks"
                assert seq.num_computed_tokens < len(seq.tokens), f"{seq} has nothing left to compute"
            else:
                assert seq.num_computed_tokens == 0, f"{seq} has computed tokens but does not run"
        assert len(self._running) <= self.limits.max_num_seqs
        if self._step is None:
            prefilling = [seq_id for seq_id, seq in self._running.items() if seq.is_prefilling]
            assert list(self._prefilling) == prefilling, "unfinished prefills are kept in order of admission"
