"""The scheduler: queues, lifecycle and commit. A pure state machine; a composition decides each step.

    add / abort          between steps
    plan(now) -> plan    decides a step and changes block tables; touches no device
    commit(result, now)  takes what came out of it; ends what is finished

One plan is in flight at most. Given the same configuration, calls and outcomes, it decides the same on every machine.
"""

from __future__ import annotations

from testbed.blocks.manager import BlockManager
from testbed.core.commit import Progress
from testbed.core.digest import Digest, abort_event, finish_event, plan_events
from testbed.core.plan import BatchPlan, Finished, FinishReason, StepResult
from testbed.core.planning import make_plan
from testbed.core.request import Request
from testbed.core.running import Core
from testbed.core.sequence import Sequence, SequenceState
from testbed.core.step import Step
from testbed.errors import RequestError
from testbed.policies.admission import Admission, Watermark
from testbed.policies.compositions import Composition
from testbed.policies.config import Limits
from testbed.policies.preemption import Auto, PreemptionChoice
from testbed.policies.queue_order import WaitingQueue
from testbed.policies.victim import VictimChoice


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
        admission: Admission | None = None,
        preemption: PreemptionChoice | None = None,
        eos_token_id: int | None = None,
        record_decisions: bool = False,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self._core = Core(
            limits, blocks, queue, victims, admission or Watermark(), preemption or Auto(),
            is_composition_steady=not getattr(composition, "is_time_dependent", True),
        )  # fmt: skip
        self._progress = Progress(self._core)
        self._composition = composition
        self._eos_token_id = eos_token_id
        self._record_decisions = record_decisions
        self._served = getattr(queue, "served", None)
        self._left = getattr(queue, "left", None)
        self._tells_victims_time = hasattr(victims, "now_ns")
        self._live: dict[str, list[Sequence]] = {}  # members that have not ended, by request id
        self._rejected: list[tuple[Sequence, str]] = []  # ended at `add`; reported by the next plan
        self._digest = Digest()
        self._pending_events: list[int] = []
        self._step: Step | None = None  # the plan in flight
        self._num_planned = 0  # its steps
        self._composition_hash = 0
        self.digests: list[int] = []  # after each step of the last commit
        self.free_blocks: list[int] = []  # GPU blocks after the plan of each
        self.free_gpu_blocks = blocks.num_free_blocks  # after the last plan
        self.free_cpu_blocks = blocks.num_free_cpu_blocks

    # --- state ---

    @property
    def digest(self) -> int:
        """The decision digest after the last committed step."""
        return self._digest.value

    @property
    def num_steps(self) -> int:
        return self._core.num_steps

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_running(self) -> int:
        """Running sequences; a group counts as many as it has."""
        core = self._core
        return len(core.running) if not core.num_groups else sum(len(s.together) for s in core.running.values())

    @property
    def num_waiting(self) -> int:
        return len(self._core.queue)

    @property
    def num_swapped(self) -> int:
        """Swapped-out groups and sequences."""
        return len(self._core.swapped)

    def counts(self) -> tuple[int, int, int]:
        """How many run, wait and are swapped out."""
        core = self._core
        return self.num_running if core.num_groups else len(core.running), len(core.queue), len(core.swapped)

    @property
    def emitters(self) -> list[Sequence]:
        """Emitted a token in each step of the last commit, in the order scheduled; the same list while it does not
        change."""
        return self._progress.emitters

    @property
    def emitted(self) -> list[str]:
        """Ids of the requests that emitted tokens in the last step, in the order scheduled, once for each token."""
        return [seq.request.request_id for seq in self.emitters]

    def unfinished(self) -> list[Sequence]:
        """Live sequences in order of arrival."""
        return [seq for members in self._live.values() for seq in members]

    # --- requests ---

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError for an id that is live; one too long for the model ends as ignored."""
        if request.request_id in self._live:
            raise RequestError(f"request id {request.request_id!r} is in use; ids of live requests must differ")
        seq = Sequence(self._core.next_seq_id, request, self.limits.max_model_len, self._stop_tokens(request))
        is_beam = request.sampling.beam_width > 1
        self._core.next_seq_id += (
            1 if is_beam else request.sampling.num_seqs
        )  # parallel samples: theirs are kept for them
        self._live[request.request_id] = [seq] if seq.group is None else seq.group.members
        reason = self._exceeds_limits(seq)
        if not reason and self.blocks.rules.never_fits_at == "add":
            reason = self._never_runs(seq)
        if reason:
            self._rejected.append((seq, reason))
        else:
            self._core.push(seq)

    def _exceeds_limits(self, seq: Sequence) -> str:
        """Why a group is too large to be ever in a batch, which would block the queue; empty: it is not."""
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            limit = getattr(self.limits, name)
            if seq.num_seqs > limit:
                return f"{seq.num_seqs} sequences that run together exceed {name} ({limit})"
        return ""

    def _never_runs(self, seq: Sequence) -> str:
        """Why no step could ever admit the sequence; empty: one may."""
        if seq.num_prompt_tokens > self.limits.max_model_len:
            return self.limits.too_long_reason(seq.num_prompt_tokens)
        return self.blocks.never_fits_reason(seq) if self.blocks.never_fits(seq) else ""

    def abort(self, request_id: str) -> Finished | None:
        """Ends a request in any state and frees all it held. None if it is not live (it may have just finished)."""
        assert self._step is None, "abort between steps, not while a plan is in flight"
        members = self._live.get(request_id)
        if members is None:
            return None
        finished: list[Finished] = []
        for seq in members[:]:
            self._pending_events += abort_event(seq.seq_id)
            if seq.state is SequenceState.RUNNING:
                self._core.stop_one(seq)
                self.blocks.free(seq)
            elif seq.state is SequenceState.SWAPPED:
                self._core.swapped.pop(seq.unit_id, None)
                self.blocks.free(seq)
            elif any(seq is rejected for rejected, _ in self._rejected):
                self._rejected = [item for item in self._rejected if item[0] is not seq]
            else:
                self._core.remove(seq)
            self._end(seq, FinishReason.ABORT, "aborted", 0, finished)
        return finished[0] if finished else None

    # --- steps ---

    def plan(self, now_ns: int, max_steps: int = 1) -> BatchPlan:
        """Decides the next step. An empty plan means that nothing can be done before something else happens.

        max_steps: how many steps the plan may span, if all of them would be decided alike.
        """
        assert self._step is None, "one plan in flight"
        assert max_steps >= 1
        step = Step(now_ns, self._core)
        if self._tells_victims_time:
            self._core.victims.now_ns = now_ns  # type: ignore[attr-defined]  # looked for when it was built
        if self._rejected:
            for seq, reason in self._rejected:
                step.end(seq, reason)
            self._rejected = []
        self._composition.compose(step)
        if not (step.rows or step.decoded):
            self._unblock(step)
        step.close()
        plan = make_plan(step, self._core, record_decisions=self._record_decisions, max_steps=max_steps)
        if not plan.is_empty:
            self._step = step
            self._num_planned = plan.num_steps
            self._composition_hash = self._digest.composition(step)
            self.free_gpu_blocks = self.blocks.num_free_blocks
            self.free_cpu_blocks = self.blocks.num_free_cpu_blocks
        return plan

    def commit(self, result: StepResult, now_ns: int) -> list[Finished]:
        """Takes the outcome of the plan in flight; returns the requests that ended with it, in order scheduled."""
        step = self._step
        assert step is not None, "nothing is in flight"
        num_steps = len(result.end_ns)
        assert 1 <= num_steps <= self._num_planned, "an end for each step, up to the planned number"
        self._step = None
        step.is_over = True
        self.digests, self.free_blocks = [], []
        events, self._pending_events = self._pending_events, []
        events += plan_events(step)
        if num_steps > 1:
            self._run_ahead(step, result.end_ns[:-1], events)
            events = []
        self._core.num_steps += 1
        finished: list[Finished] = []
        for seq, message in step.ended:
            self._end(seq, FinishReason.IGNORED, message, now_ns, finished)
        if result.prompt_logprobs:
            self._progress.note_prompts(step, result.prompt_logprobs)
        ending = self._progress.advance(step, result.outcomes or (), events)
        if self._served is not None:
            for seq, num_tokens, num_emitted in self._progress.service(step):
                self._served(seq, num_tokens, num_emitted, now_ns)
        for seq, reason in ending:
            if seq.state is SequenceState.RUNNING:
                self._core.stop_one(seq)
                self.blocks.free(seq)
            events += finish_event(seq.seq_id, reason)
            self._end(seq, reason, "", now_ns, finished)
        self._add_digest(events)
        return finished

    def _add_digest(self, events: list[int]) -> None:
        self.digests.append(
            self._digest.add(self._composition_hash, self.free_gpu_blocks, self.free_cpu_blocks, events)
        )
        self.free_blocks.append(self.free_gpu_blocks)

    def _run_ahead(self, step: Step, end_ns: tuple[int, ...], events: list[int]) -> None:
        """Commits these steps, each a decode of all and perhaps one more chunk of a prompt, and plans the one after
        each: no more than that is to be done. events: of the first."""
        core, blocks = self._core, self.blocks
        if events or step.rows or self._served is not None:
            self._step_ahead(step, end_ns, events)
        else:
            core.num_steps += len(end_ns)
            free = [self.free_gpu_blocks, *core.decodes.run_ahead(len(end_ns), blocks)]
            self.free_gpu_blocks = free.pop()
            self.free_blocks = free
            self.digests = self._digest.add_steps(self._composition_hash, free, self.free_cpu_blocks)
        core.decodes.last_step = core.num_steps

    def _step_ahead(self, step: Step, end_ns: tuple[int, ...], events: list[int]) -> None:
        """The same, step by step."""
        core, blocks, decodes = self._core, self.blocks, self._core.decodes
        for now_ns in end_ns:
            core.num_steps += 1
            crossing = self._progress.repeat(step)
            if self._served is not None:
                for seq, num_tokens, num_emitted in self._progress.service(step):
                    self._served(seq, num_tokens, num_emitted, now_ns)
            self._add_digest(events)
            events = []
            decodes.grow(blocks, crossing)
            step.repeat_rows()
            self.free_gpu_blocks = blocks.num_free_blocks

    def _end(self, seq: Sequence, reason: FinishReason, message: str, now_ns: int, finished: list[Finished]) -> None:
        """The sequence has ended; adds what to say of its request if it was the last of it."""
        seq.enter(SequenceState.FINISHED)
        seq.finish_reason = reason
        self.blocks.forget(seq)
        if self._left is not None:
            self._left(seq, now_ns)
        request_id = seq.request.request_id
        members = self._live[request_id]
        members.remove(seq)
        if seq.group is not None and reason is not FinishReason.DROPPED:
            seq.group.finished.append(seq)
        if not members:
            del self._live[request_id]
            finished.append(seq.finished(message))

    def _unblock(self, step: Step) -> None:
        """A head that is blocked while nothing runs would wait for ever: it ends as ignored, naming the rule."""
        core = self._core
        if step.preempted or step.ignored or core.running or core.swapped:
            return
        seq = step.head()
        if seq is not None and step.blocked_by is not None:
            step.ignore(seq, f"blocked by {step.blocked_by.value} while nothing runs: no later step could admit it")

    # --- inside ---

    def _stop_tokens(self, request: Request) -> tuple[int, ...]:
        stops = request.sampling.stop_token_ids
        if self._eos_token_id is None or request.sampling.ignore_eos:
            return stops
        return (*stops, self._eos_token_id)

    def check_invariants(self) -> None:
        """Every live sequence is in exactly one place; running ones have tables that cover what is computed."""
        core = self._core
        self.blocks.check_invariants()
        core.check_invariants(is_between_steps=self._step is None)
        ended = {seq.seq_id for seq, _ in self._step.ended} if self._step is not None else set()
        places: dict[SequenceState, set[int]] = {
            SequenceState.WAITING: {seq.seq_id for seq in core.queue} | {seq.seq_id for seq, _ in self._rejected},
            SequenceState.RUNNING: {one.seq_id for seq in core.running.values() for one in seq.together},
            SequenceState.SWAPPED: {one.seq_id for seq in core.swapped.values() for one in seq.together},
        }
        live = self.unfinished()
        assert sum(map(len, places.values())) + len(ended) == len(live), "a sequence is lost or twice"
        for seq in live:
            if seq.seq_id not in ended:
                assert seq.seq_id in places[seq.state], f"{seq} is in the wrong place"
                self._check_sequence(seq)
        if not getattr(self._composition, "caps_batches_only", False):
            assert sum(seq.num_seqs for seq in core.running.values()) <= self.limits.max_num_seqs

    def _check_sequence(self, seq: Sequence) -> None:
        if seq.siblings is not None:
            assert len(seq.siblings) > 1
            assert seq in seq.siblings
            assert all(one.state is seq.state and one.unit_id == seq.unit_id for one in seq.siblings), "apart"
        if not seq.is_forced:
            assert len(seq.tokens) == seq.num_tokens
        if seq.state is SequenceState.RUNNING:
            num_slots = len(self.blocks.table(seq.seq_id)) * self.blocks.block_size
            assert seq.num_slots == num_slots, f"{seq} has {num_slots} slots, not {seq.num_slots}"
            assert seq.num_computed_tokens <= num_slots, f"{seq} has computed tokens without blocks"
            assert seq.num_computed_tokens < seq.num_tokens, f"{seq} has nothing left to compute"
        elif seq.state is SequenceState.WAITING:
            assert seq.num_computed_tokens == 0, f"{seq} has computed tokens but does not run"
