"""An independent model of what a scheduler may do, whatever its composition, rules and policies.

It shares no code with the core: it sees requests, plans and results only (block tables are read for the content and the
conservation of blocks). Every method asserts that what happened was right.
"""

from __future__ import annotations

import random
from collections import Counter, deque

from testbed.core.outcome import Finished, FinishReason, Outcome, StepResult
from testbed.core.plan import RESET, BatchPlan, PreemptionMode, ScheduledSequence
from testbed.core.request import Request
from testbed.core.scheduler import Scheduler
from testbed.core.sequence import Sequence
from tests.properties.device import Device
from tests.properties.draws import draw
from tests.properties.laws import check_admissions, check_budgets, check_finished, check_shape, check_steps_of_their_own
from tests.properties.members import ENDED, RUNNING, SWAPPED, WAITING, Job, Member
from tests.properties.merges import Merges
from tests.properties.setups import EOS, Setup


class Shadow:
    """Follows a scheduler call by call and plays its device."""

    def __init__(self, setup: Setup, scheduler: Scheduler, rng: random.Random) -> None:
        self.setup = setup
        self.scheduler = scheduler
        self.device = Device(setup.block_size, setup.num_blocks, setup.num_cpu_blocks)
        self.jobs: dict[str, Job] = {}
        self.members: dict[int, Member] = {}
        self.queue: deque[Member] = deque()  # the waiting ones as first come, first served would have them
        self.counts: Counter[str] = Counter()
        self.rng = rng
        self._next_id = 0
        self._num_queried = self._num_hit = 0  # tokens, of first admissions
        self._doomed: list[Member] = []  # ended by the plan in flight
        self._recomputed: list[Member] = []  # by it, until they are apart
        self._is_reset = False  # what was computed is lost with the next plan
        self.lost: list[Member] = []  # whom that one has put back into the queue
        rules = setup.rules
        self._reads_own_step = rules.hits_visible != "commit"
        self._trusts_hits = not (rules.hits_frozen or rules.hits_visible == "plan")
        in_chunks = setup.composition in ("unified", "decode_first", "prefill_decode_split")
        self._merges = Merges(setup.block_size, in_chunks=in_chunks)

    # --- calls ---

    def added(self, request: Request) -> None:
        job = self.jobs[request.request_id] = Job(request, self._next_id)
        member = Member(self._next_id, job, [], [])
        member.unit = [member]
        for token in request.prompt_token_ids:
            self._append(member, token)
        job.members.append(member)
        self.members[member.seq_id] = member
        self.queue.append(member)
        self._next_id += 1 if job.is_beam else job.width
        self.counts["adds"] += 1

    def aborted(self, request_id: str, finished: Finished | None) -> None:
        job = self.jobs[request_id]
        for member in job.members[:]:
            self.counts[f"aborts of {member.place}"] += 1
            self._end(member, FinishReason.ABORT)
        assert finished is not None
        check_finished(job, finished, self.setup.limits.max_model_len)
        self.check_conservation()

    def reset(self) -> None:
        self.device.wipe()
        self._is_reset = True
        self.counts["resets"] += 1

    def planned(self, plan: BatchPlan) -> None:
        """Checks a plan against the model, the limits, and the content of the KV slots, and executes its moves."""
        assert not plan.is_empty, "work is left, and nothing moves"
        rows = plan.scheduled
        plan = self._follow_reset(plan)
        before = {member.seq_id: member.place for member in self.members.values()}
        check_admissions(self, plan)
        check_steps_of_their_own(self, plan)
        self._follow_events(plan)
        for row in rows:
            self._check_row(row)
        check_shape(self, plan, rows)
        check_budgets(self, plan, rows)
        self.check_conservation()
        blocks = self.scheduler.blocks
        assert self.scheduler.num_waiting == sum(one.place == WAITING for one in self.members.values())
        assert (blocks.prefixes.num_queried_tokens, blocks.prefixes.num_hit_tokens) == (
            self._num_queried,
            self._num_hit,
        ), "hit counts"
        assert self.scheduler.free_gpu_blocks == blocks.num_free_blocks
        assert self.scheduler.free_cpu_blocks == blocks.num_free_cpu_blocks
        if not self._trusts_hits:
            self._merges.note(plan, list(self.members.values()), self._sequences())
        self.device.move(plan)
        self.device.compute(rows, self._prefixes, self._is_read, reads_own_step=self._reads_own_step)
        self._count(plan, before)

    def execute(self, plan: BatchPlan) -> StepResult:
        return draw(plan.scheduled, self.members, self.rng)

    def committed(
        self, plan: BatchPlan, rows: tuple[ScheduledSequence, ...], result: StepResult, finished: list[Finished]
    ) -> None:
        """Appends what was emitted and checks who ended, why, and with which output."""
        outcomes = iter(result.outcomes or ())
        done: list[Job] = []
        emitted: list[str] = []
        ending = [(member, FinishReason.IGNORED) for member in self._doomed]
        forking: list[tuple[Member, tuple[int, ...]]] = []
        for row in rows:
            member = self.members[row.seq_id]
            member.num_computed = row.start + row.num_tokens
            if not row.samples:
                continue
            outcome = None if row.forced else next(outcomes)
            forks = (0,) * (row.num_samples - 1) if outcome is None else outcome.forks
            member.job.has_forked = True
            member.at_fork = member.tokens[:], member.prefixes[:]
            if forks:
                forking.append((member, forks))
            reason = self._emit(member, outcome)
            if reason is not FinishReason.DROPPED:
                emitted.append(member.job.request.request_id)
            if reason is not None:
                ending.append((member, reason))
        assert next(outcomes, None) is None
        for parent, tokens in forking:
            ending += self._part(parent, tokens, emitted)
        for member, reason in ending:
            self._end(member, reason)
            if not member.job.members:
                done.append(member.job)
        self._doomed = []
        assert Counter(seq.request_id for seq in self.scheduler.emitters) == Counter(emitted), "not what was emitted"
        assert [item.request.request_id for item in finished] == [job.request.request_id for job in done]
        for job, item in zip(done, finished, strict=True):
            check_finished(job, item, self.setup.limits.max_model_len)
        self.check_conservation()

    # --- events of a plan ---

    def _follow_reset(self, plan: BatchPlan) -> BatchPlan:
        """Before all else of the plan: whoever had anything has nothing. Returns the rest of it."""
        num = sum(whose == RESET for whose in plan.preempted_for)
        assert set(plan.preempted_for[:num]) <= {RESET}, "a reset comes first"
        assert self._is_reset or not num, "a reset that nobody asked for"
        held = [member for member in self.members.values() if member.place in (RUNNING, SWAPPED)]
        self.lost = [self.members[item.seq_id] for item in plan.preempted[:num]]
        beams = [item.seq_id for item in plan.ignored if "to a reset" in item.reason]
        self._doomed = [one for seq_id in beams for one in self.members[seq_id].unit]
        if self._is_reset:
            assert all(member in self.lost or member in self._doomed for member in held), "somebody kept its KV"
        for member in self._doomed:
            assert self._is_reset
            assert member.job.is_beam
            member.place = ENDED
            self.counts["beams lost to a reset"] += 1
        for item, member in zip(plan.preempted, self.lost, strict=False):
            assert item.mode is PreemptionMode.RECOMPUTE
            assert item.num_computed_tokens == member.num_computed
            self.counts[f"resets of {member.place}"] += 1
            self._preempt(member, item.mode)
        self._regroup()
        if self.lost and self.setup.rules.victims_return == "next_step":
            assert plan.shape.is_empty, "somebody enters before those who ran"
        self._is_reset = False
        return plan.replace(preempted=plan.preempted[num:], preempted_for=plan.preempted_for[num:])

    def _follow_events(self, plan: BatchPlan) -> None:
        """Moves each sequence through what the plan says happened to it, in the only order that makes sense."""
        preempted: dict[int, list[PreemptionMode]] = {}
        for item in plan.preempted:
            assert self.members[item.seq_id].job.request.request_id == item.request_id
            assert item.num_computed_tokens == self._computed_at_preemption(plan, item.seq_id)
            preempted.setdefault(item.seq_id, []).append(item.mode)
        brought = self._brought_in(plan, preempted)
        admitted = {item.seq_id: item for item in plan.admitted}
        for member in sorted(self.members.values(), key=lambda one: one.seq_id):
            modes = preempted.get(member.seq_id, [])
            num_in = brought.get(member.seq_id, 0)
            item = admitted.get(member.seq_id)
            while True:
                if member.place == RUNNING and modes:
                    self._preempt(member, modes.pop(0))
                elif member.place == SWAPPED and num_in:
                    member.place, num_in = RUNNING, num_in - 1
                elif member.place == WAITING and item is not None:
                    assert item.is_resumed == (member.num_preempted > 0)
                    self._check_hit(member, item.num_cached_tokens)
                    member.place, member.is_prefilling = RUNNING, True
                    member.num_computed = member.num_hit = item.num_cached_tokens
                    if self.setup.caching and not member.was_admitted:
                        self._num_queried += len(member.tokens)
                        self._num_hit += item.num_cached_tokens
                    member.was_admitted = True
                    item = None
                else:
                    break
            left = (modes, num_in, item)
            assert left == ([], 0, None), f"{member.seq_id} is {member.place}, and there is more: {left}"
        self._regroup()
        ignored = [one for item in plan.ignored for one in self.members[item.seq_id].unit]
        for member in [one for one in ignored if one not in self._doomed]:
            assert member.place != ENDED
            member.place = ENDED
            self._doomed.append(member)

    def _computed_at_preemption(self, plan: BatchPlan, seq_id: int) -> int:
        admitted = [item.num_cached_tokens for item in plan.admitted if item.seq_id == seq_id]
        member = self.members[seq_id]
        return admitted[0] if admitted and member.place == WAITING else member.num_computed

    def _check_hit(self, member: Member, num_tokens: int) -> None:
        assert 0 <= num_tokens < len(member.tokens), "at least one token is computed"
        assert self.setup.caching or num_tokens == 0
        if self.setup.rules.hit_cap == "last_block" or num_tokens < len(member.tokens) - 1:
            assert num_tokens % self.setup.block_size == 0, "only full blocks are hit"

    def _preempt(self, member: Member, mode: PreemptionMode) -> None:
        member.num_preempted += 1
        if mode is PreemptionMode.SWAP:
            member.place = SWAPPED
        else:
            assert not (member.job.is_beam and len(member.unit) > 1), "beams are never recomputed"
            self._recomputed.append(member)
            member.place, member.num_computed, member.num_hit = WAITING, 0, 0
            member.merged, member.table = set(), []

    def _regroup(self) -> None:
        """Sequences that are recomputed, together, go on by themselves; some may have come back in the same step."""
        for member in self._recomputed:
            assert all(one in self._recomputed for one in member.unit), "some that go together were left"
        for member in self._recomputed:
            member.unit = [member]
        self._recomputed = []

    def _brought_in(self, plan: BatchPlan, preempted: dict[int, list[PreemptionMode]]) -> dict[int, int]:
        """How often each sequence was swapped in. The plan names requests: of several sequences of one request that
        were swapped out apart, those are meant that have a table on the GPU now."""
        brought: dict[int, int] = {}
        for name, times in Counter(plan.swapped_in).items():
            units = {
                one.unit[0].seq_id: one.unit
                for one in self.jobs[name].members
                if one.place == SWAPPED or PreemptionMode.SWAP in preempted.get(one.seq_id, ())
            }
            if len(units) > 1:
                on_gpu = {seq.seq_id for seq in self.scheduler.unfinished() if seq.block_table}
                units = {key: unit for key, unit in units.items() if unit[0].seq_id in on_gpu}
            assert units, f"{name} was swapped in, and nothing of it was swapped out"
            for unit in units.values():
                for one in unit:
                    brought[one.seq_id] = max(1, times - len(units) + 1)
        return brought

    # --- rows ---

    def _check_row(self, row: ScheduledSequence) -> None:
        member = self.members[row.seq_id]
        job, end = member.job, row.start + row.num_tokens
        assert member.place == RUNNING, f"a row of {row.seq_id}, which is {member.place}"
        assert row.start == member.num_computed
        assert row.num_tokens >= 1
        assert list(row.tokens) == member.tokens[row.start : end]
        assert row.samples == (end == len(member.tokens))
        assert row.forced == job.is_forced
        assert row.num_samples == (1 if job.has_forked else job.width)
        assert row.group_id == job.group_id
        assert row.sampling == job.request.sampling
        size = self.setup.block_size
        ahead = end if member.is_prefilling else min(end + self.setup.lookahead, self.setup.limits.max_model_len)
        assert len(row.block_table) * size >= max(end, ahead), "no slot for a token"
        first = self._first_read(row.start) // size
        held = list(row.block_table[first:])
        assert -1 not in held, "a block inside the window was released"
        in_use = [block for block in row.block_table if block >= 0]
        assert len(set(in_use)) == len(in_use), "a table names a block twice"

    def _first_read(self, position: int) -> int:
        """The first position that the token at `position` looks at."""
        return 0 if self.setup.window is None else max(0, position + 1 - self.setup.window)

    def _is_read(self, row: ScheduledSequence, position: int) -> bool:
        if position < self._first_read(row.start):
            return False
        member = self.members[row.seq_id]
        return self._trusts_hits or not (position < member.num_hit or position in member.merged)

    def _prefixes(self, seq_id: int) -> list[int]:
        return self.members[seq_id].prefixes

    # --- conservation ---

    def _sequences(self) -> dict[int, Sequence]:
        """What the scheduler has, by id: read for block tables and counts only."""
        return {seq.seq_id: seq for seq in self.scheduler.unfinished()}

    def check_conservation(self) -> None:
        """Counts of sequences and of their tokens, and the blocks of both pools: each held, cached or free."""
        blocks, setup = self.scheduler.blocks, self.setup
        places = Counter(member.place for member in self.members.values())
        swapped = {member.unit[0].seq_id for member in self.members.values() if member.place == SWAPPED}
        assert self.scheduler.num_running == places[RUNNING]
        assert self.scheduler.num_waiting <= places[WAITING], "those refused at `add` wait for the next plan to end"
        assert self.scheduler.num_swapped == len(swapped)
        assert self.scheduler.has_work == bool(self.jobs)
        seqs = self._sequences()
        assert set(seqs) == set(self.members), "a sequence is lost, or lives on"
        on_gpu: set[int] = set()
        on_cpu: set[int] = set()
        for member in self.members.values():
            seq = seqs[member.seq_id]
            assert (seq.num_tokens, seq.num_computed_tokens) == (len(member.tokens), member.num_computed), seq
            for place, table, held in ((RUNNING, seq.block_table, on_gpu), (SWAPPED, seq.cpu_table, on_cpu)):
                assert member.place == place or not table, f"{member.seq_id} is {member.place}, and has blocks"
                in_use = [block for block in table if block >= 0]
                assert len(set(in_use)) == len(in_use), "a table names a block twice"
                held.update(in_use)
        assert blocks.num_free_blocks == setup.num_blocks - len(on_gpu), "GPU blocks are lost, or free and held"
        assert blocks.num_free_cpu_blocks == setup.num_cpu_blocks - len(on_cpu), "CPU blocks are lost, or free and held"

    def check_contents(self) -> None:
        """Every computed token of every running and swapped-out sequence is where its table says."""
        seqs = self._sequences()
        for member in self.members.values():
            if member.place not in (RUNNING, SWAPPED):
                continue
            seq, on_gpu = seqs[member.seq_id], member.place == RUNNING
            table = seq.block_table if on_gpu else seq.cpu_table
            self.device.holds(
                table, member.prefixes, member.num_computed, first=self._first_read(member.num_computed),
                skip=self._untrusted(member), on_gpu=on_gpu,
            )  # fmt: skip

    def _untrusted(self, member: Member) -> set[int]:
        return set() if self._trusts_hits else {*range(member.num_hit), *member.merged}

    # --- tokens and ends ---

    def _append(self, member: Member, token: int) -> None:
        parent: int | str = member.prefixes[-1] if member.prefixes else member.job.request.cache_salt
        member.tokens.append(token)
        member.prefixes.append(self.device.name(parent, token))

    def _emit(self, member: Member, outcome: Outcome | None) -> FinishReason | None:
        member.is_prefilling = False
        if outcome is not None and outcome.dropped:
            return FinishReason.DROPPED
        if outcome is None:
            assert member.job.request.forced_output is not None
            token = member.job.request.forced_output[len(member.output)]
        else:
            (token,) = outcome.tokens
        self._append(member, token)
        if outcome is not None and outcome.stop is not None:
            return outcome.stop
        return self._reason(member)

    def _reason(self, member: Member) -> FinishReason | None:
        """Whether the sequence ends with its newest token."""
        sampling, token = member.job.request.sampling, member.tokens[-1]
        if not member.job.is_forced and (
            token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
        ):
            return FinishReason.STOP
        is_whole = len(member.output) >= member.job.max_output(self.setup.limits.max_model_len)
        return FinishReason.LENGTH if is_whole else None

    def _part(self, parent: Member, tokens: tuple[int, ...], emitted: list[str]) -> list[tuple[Member, FinishReason]]:
        job = parent.job
        ending: list[tuple[Member, FinishReason]] = []
        for token in tokens:
            if job.is_beam:
                seq_id, self._next_id = self._next_id, self._next_id + 1
            else:
                seq_id = job.group_id + job.num_made
            job.num_made += 1
            known, names = parent.at_fork
            child = Member(
                seq_id, job, known[:], names[:], RUNNING, parent.num_computed, parent.num_hit, parent.num_preempted,
                was_admitted=True, merged=set(parent.merged), table=parent.table[:],
            )  # fmt: skip
            if job.is_forced:
                assert job.request.forced_output is not None
                token = job.request.forced_output[0]
            self._append(child, token)
            self.members[seq_id] = child
            job.members.append(child)
            child.unit = parent.unit
            parent.unit.append(child)
            emitted.append(job.request.request_id)
            self.counts["forks"] += 1
            reason = self._reason(child)
            if reason is not None:
                ending.append((child, reason))
        return ending

    def _end(self, member: Member, reason: FinishReason) -> None:
        job = member.job
        job.members.remove(member)
        member.unit.remove(member)
        del self.members[member.seq_id]
        if member in self.queue:
            self.queue.remove(member)
        if reason is FinishReason.DROPPED:
            self.counts["drops"] += 1
        else:
            job.outputs.append(member.output)
            job.reasons.append(reason)
        if not job.members:
            del self.jobs[job.request.request_id]
            self.counts[f"ended by {job.reason}"] += 1

    def _count(self, plan: BatchPlan, before: dict[int, str]) -> None:
        counts = self.counts
        counts["plans"] += 1
        for item in plan.preempted:
            counts[f"preemptions by {item.mode}"] += 1
        counts["blocks swapped out"] += len(plan.swap_out)
        counts["blocks swapped in"] += len(plan.swap_in)
        counts["swap ins"] += len(plan.swapped_in)
        counts["copies on write"] += len(plan.copies)
        counts["ignored sequences"] += len(plan.ignored)
        counts["admissions"] += len(plan.admitted)
        counts["hit tokens"] += sum(item.num_cached_tokens for item in plan.admitted)
        counts["beams given up"] += sum("beams were preempted" in item.reason for item in plan.ignored)
        counts["victims admitted again in the step"] += sum(
            1 for item in plan.admitted if before.get(item.seq_id) == RUNNING
        )
