"""The scheduler: queues, lifecycle and commit. A pure state machine; a composition decides each step.

    add / abort / reset_prefixes    at any time
    plan(now) -> plan               decides a step and changes block tables; touches no device
    commit(result, now)             applies the result of the oldest plan; ends finished requests

At most one plan is in flight. With `limits.max_num_plans` = 2 (asynchronous scheduling) the next step is planned while
one is in flight: counts already include that one, the tokens it samples are placeholders, and a request that ends with
it ends at its commit, a step late. The same configuration, calls and outcomes give the same decisions on every machine.
"""

from __future__ import annotations

from testbed.blocks.kv_sequence import KVSequence
from testbed.blocks.manager import BlockManager
from testbed.composites import declared
from testbed.core.commit import Commit, note_prompts
from testbed.core.composition import Composition
from testbed.core.digest import Digest
from testbed.core.interfaces import AdmissionPolicy, PreemptionChoice, VictimChoice, WaitingQueue
from testbed.core.limits import Limits
from testbed.core.outcome import Finished, FinishReason, StepResult
from testbed.core.plan import BatchPlan
from testbed.core.planning import make_plan
from testbed.core.policies import Policies
from testbed.core.request import Request
from testbed.core.running import Running
from testbed.core.sequence import Sequence
from testbed.core.state import SequenceState
from testbed.core.step import Step
from testbed.core.waiting import Waiting
from testbed.errors import RequestError


class Scheduler:
    """Owns every live sequence. The module's docstring has the order of calls.

    eos_token_id: the token that ends a sequence, unless its output is forced or it ignores EOS. oracle: told the ends.
    """

    def __init__(
        self, *, limits: Limits, blocks: BlockManager, composition: Composition, queue: WaitingQueue,
        victims: VictimChoice, admission: AdmissionPolicy, preemption: PreemptionChoice,
        eos_token_id: int | None = None, oracle: object = None,
    ) -> None:  # fmt: skip
        self.limits = limits
        self.blocks = blocks
        self.num_steps = 0  # committed steps
        self.num_known_tokens = 0  # prompt and emitted tokens of all live sequences
        self.free_gpu_blocks = blocks.num_free_blocks  # after the last plan
        self.free_cpu_blocks = blocks.num_free_cpu_blocks
        self._composition = composition
        self._policies = Policies(admission, preemption, victims, queue, oracle, composition)
        self._eos_token_id = eos_token_id
        self._running = Running()
        self._waiting = Waiting(queue, limits)
        self._digest = Digest()
        self._commit = Commit(self._running, blocks, self._digest)
        self._live: dict[str, Sequence] = {}  # the first sequence of each request that has not ended, by its id
        self._rejected: list[tuple[Sequence, str]] = []  # rejected by `add`; the next plan reports them
        self._steps: tuple[Step, ...] = ()  # the plans in flight, the oldest first
        self._late: tuple[Sequence, ...] = ()  # victims that return to the queue at the next commit
        self._resets = False  # whether the next plan resets the prefix cache

    # --- state ---

    @property
    def digest(self) -> int:
        """The decision digest after the last committed step."""
        return int.from_bytes(self._digest.value, "big")

    @property
    def digest_bytes(self) -> bytes:
        """The decision digest after the last committed step, 8 bytes, big-endian."""
        return self._digest.value

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_running(self) -> int:
        """Running sequences; of a group, each one that exists."""
        return self._running.num_existing

    @property
    def num_waiting(self) -> int:
        return self._waiting.num_seqs + len(self._late)

    @property
    def num_swapped(self) -> int:
        """Swapped-out sequences; a group counts once."""
        return len(self._running.swapped)

    @property
    def emitters(self) -> list[Sequence]:
        """Sequences that emitted in the last step, in the order scheduled, one entry per token."""
        return self._commit.emitters

    def unfinished(self) -> list[Sequence]:
        """Live sequences in order of arrival."""
        return [seq for first in self._live.values() for seq in first.members]

    # --- requests ---

    def is_live(self, request_id: str) -> bool:
        return request_id in self._live

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError if its id is live. One that can never run ends as ignored."""
        if request.request_id in self._live:
            raise RequestError(f"request id {request.request_id!r} is in use; ids of live requests must differ")
        seq_id = self._commit.new_seq_ids(1 if request.sampling.beam_width > 1 else request.sampling.num_seqs)
        eos = () if self._eos_token_id is None or request.sampling.ignore_eos else (self._eos_token_id,)
        stops = (*request.sampling.stop_token_ids, *eos)
        seq = Sequence(seq_id, request, self.limits.max_model_len, stops)
        self._live[request.request_id] = seq
        self.num_known_tokens += seq.num_tokens
        if reason := self._never_runs(seq):
            self._rejected.append((seq, reason))
        else:
            self._waiting.push(seq)

    def _never_runs(self, seq: Sequence) -> str:
        """Returns why no step can ever admit the sequence, or "". If `never_fits_at=head`, its size is tested later."""
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if seq.num_seqs > (limit := getattr(self.limits, name)):
                return f"{seq.num_seqs} sequences that run together exceed {name} ({limit})"
        if self.blocks.rules.never_fits_at == "head":
            return ""
        if seq.num_prompt_tokens > self.limits.max_model_len:
            return self.limits.too_long_reason(seq.num_prompt_tokens)
        return self.blocks.never_fits_reason(seq)

    def abort(self, request_id: str, now_ns: int) -> Finished | None:
        """Ends a request in any state and frees its blocks. None if it is not live, or if a plan in flight ends it."""
        first = self._live.get(request_id)
        if first is None:
            return None
        finished: list[Finished] = []
        for seq in [one for one in first.members if not self._is_ended(one)]:
            self._digest.aborted(seq.seq_id)
            self._leave(seq)
            self._end(seq, FinishReason.ABORT, "aborted", now_ns, finished)
        self.blocks.reuse_cpu_blocks()
        return finished[0] if finished else None

    def reset_prefixes(self) -> None:
        """Discards all KV at the next plan: empties the prefix cache, recomputes running and swapped-out sequences."""
        self._resets = True

    def _leave(self, seq: Sequence) -> None:
        """Removes a live sequence from its queue or from the running ones, and frees its blocks."""
        if seq.state is not SequenceState.WAITING:
            self._running.leave(seq)
            self.blocks.free(seq)
        elif seq in self._late:
            self._late = tuple([one for one in self._late if one is not seq])
        elif any(seq is rejected for rejected, _ in self._rejected):
            self._rejected = [item for item in self._rejected if item[0] is not seq]
        elif not self._is_ended(seq):
            self._waiting.remove(seq)

    def _is_ended(self, seq: Sequence) -> bool:
        """Whether a plan in flight ends the sequence as ignored."""
        return any(seq is one for step in self._steps for one, _ in step.leaving.ended)

    # --- steps ---

    def plan(self, now_ns: int) -> BatchPlan:
        """Decides the next step. An empty plan means that nothing can be done before another event or commit."""
        assert len(self._steps) < self.limits.max_num_plans, "commit before planning more"
        step = Step(
            self.num_steps + len(self._steps), now_ns, self.limits, self.blocks, self._running, self._waiting,
            self._policies, is_ahead=bool(self._steps),
        )  # fmt: skip
        self._policies.tell_time(now_ns)
        if self._resets:
            self._resets = False
            step.leaving.reset()
        for seq, reason in self._rejected:
            step.leaving.end(seq, reason)
        self._rejected = []
        if not step.leaving.held:  # a reset has held its victims: they must return before others are admitted
            self._composition.compose(step)
        if not step.batch.seqs:
            self._unblock(step)
        self._late += step.close()
        plan = make_plan(step, has_groups=self._running.num_groups > 0)
        if not plan.is_empty:
            self._steps += (step,)
            if self.limits.max_num_plans > 1:
                self._commit.plan_ahead(step.batch)
            self.free_gpu_blocks = step.free_gpu_blocks = self.blocks.num_free_blocks
            self.free_cpu_blocks = step.free_cpu_blocks = self.blocks.num_free_cpu_blocks
        return plan

    def commit(self, result: StepResult, now_ns: int) -> list[Finished]:
        """Applies the result of the oldest plan in flight; returns the requests that ended, ignored ones first."""
        assert self._steps, "nothing is in flight"
        step, self._steps = self._steps[0], self._steps[1:]
        self._digest.begin(step)
        finished: list[Finished] = []
        for seq, message in step.leaving.ended:
            if seq.state is not SequenceState.FINISHED:  # it may have ended with a token that was in flight
                self._end(seq, FinishReason.IGNORED, message, now_ns, finished)
        if result.prompt_logprobs:
            note_prompts(step.batch, result.prompt_logprobs)
        ending = self._commit.advance(step.batch, result.outcomes or ())
        self.num_known_tokens += self._commit.num_new_tokens
        if self.emitters:
            self._running.got_on()
        self._policies.tell_served(step.batch, self.emitters, now_ns)
        for seq, reason in ending:
            self._leave(seq)
            self._digest.finished(seq.seq_id, reason)
            self._end(seq, reason, "aborted" if reason is FinishReason.ABORT else "", now_ns, finished)
        for seq in self._late:
            self._waiting.push_back(seq)
        self._late = ()
        self.blocks.reuse_cpu_blocks()
        self.num_steps += 1
        self._digest.end()
        return finished

    def _end(self, seq: Sequence, reason: FinishReason, message: str, now_ns: int, finished: list[Finished]) -> None:
        """Ends a sequence; appends the result of its request to `finished` if it was the request's last one."""
        self._running.got_on()
        seq.enter(SequenceState.FINISHED)
        seq.finish_reason = reason
        self.num_known_tokens -= seq.num_known_tokens
        seq.part()
        self.blocks.forget(seq)
        for left in self._policies.left:
            left(seq, now_ns)
        if seq.group is None or seq.group.leave(seq, reason, message):
            del self._live[seq.request_id]
            finished.append(seq.finished(message))

    def _unblock(self, step: Step) -> None:
        """Ends a head as ignored if it is blocked while nothing runs: it would wait forever. The message says why."""
        leaving, running = step.leaving, self._running
        if leaving.preempted or leaving.ignored or running.units or running.swapped or self._steps:
            return
        seq = step.head()
        if seq is not None and step.blocked_by is not None:
            step.ignore(seq, f"blocked by {step.blocked_by.value} while nothing runs: no later step could admit it")

    # --- checks ---

    def check_invariants(self) -> None:
        """Asserts that every live sequence is in exactly one place, and that computed tokens have blocks."""
        running, live = self._running, self.unfinished()
        holders: list[KVSequence] = list(live)
        self.blocks.check_invariants(holders)
        running.check_invariants(is_between_steps=not self._steps)
        self._waiting.check_invariants()
        ended = {seq.seq_id for seq in live if self._is_ended(seq)}
        late = {seq.seq_id for seq in self._late} | {seq.seq_id for seq, _ in self._rejected}
        places: dict[SequenceState, set[int]] = {
            SequenceState.WAITING: {seq.seq_id for seq in self._waiting} | late,
            SequenceState.RUNNING: {one.seq_id for seq in running.units.values() for one in seq.together},
            SequenceState.SWAPPED: {one.seq_id for seq in running.swapped.values() for one in seq.together},
        }
        assert sum(map(len, places.values())) + len(ended) == len(live), "a sequence is lost or twice"
        assert self.num_known_tokens == sum([seq.num_known_tokens for seq in live])
        for seq in live:
            if seq.seq_id not in ended:
                assert seq.seq_id in places[seq.state], f"{seq} is in the wrong place"
                self._check_sequence(seq)
        assert declared(self._composition, "caps_batches_only", False) or running.num_seqs <= self.limits.max_num_seqs

    def _check_sequence(self, seq: Sequence) -> None:
        assert seq.num_together == len(seq.together)
        assert seq.shares_blocks == (seq.group is not None)
        if seq.siblings is not None:
            assert len(seq.siblings) > 1
            assert seq in seq.siblings
            assert all(one.state is seq.state and one.unit_id == seq.unit_id for one in seq.siblings), "apart"
        assert seq.is_forced or len(seq._content) == seq.num_known_tokens
        num_in_flight = sum([step.batch.num_tokens_of(seq) for step in self._steps])
        assert seq.num_in_flight_tokens in (0, num_in_flight), f"{seq} expects what no plan in flight brings"
        assert seq.num_placeholders <= len(self._steps)
        if seq.state is SequenceState.RUNNING:
            num_slots = len(seq.block_table) * self.blocks.block_size
            assert seq.num_computed_tokens <= num_slots, f"{seq} has computed tokens without blocks"
            assert seq.num_computed_tokens < seq.num_tokens, f"{seq} has nothing left to compute"
        elif seq.state is SequenceState.WAITING:
            assert seq.num_computed_tokens == 0, f"{seq} has computed tokens but does not run"
