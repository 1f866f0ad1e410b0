"""Asynchronous scheduling: one plan in flight while the next is decided, over random lives of random cores.

The device here knows only what plans say, and runs them when they are launched: so it tells whether what a plan assumes
of the one before it comes true. Its draws depend on all tokens before, as it finds them in its KV slots.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from testbed.blocks.kv_sequence import RELEASED
from testbed.core.limits import Limits
from testbed.core.outcome import Finished, FinishReason, Outcome, StepResult
from testbed.core.plan import BatchPlan, PreemptionMode, ScheduledSequence
from testbed.core.request import Request, SamplingParams
from testbed.core.state import SequenceState
from tests.properties.device import Device
from tests.properties.setups import EOS, Setup, random_setup

VOCAB_SIZE = 5
UNKNOWN = -1  # the name of a position outside the window
STOP = 3


class AsyncDevice:
    """Draws from what its slots hold. A prefix has a name there: it can be read from the last slot alone."""

    def __init__(self, setup: Setup) -> None:
        self.memory = Device(setup.block_size, setup.num_blocks, setup.num_cpu_blocks)
        self._window = setup.window
        self._reads_own_step = setup.rules.hits_visible != "commit"
        self._prefixes: dict[int, list[int]] = {}
        self._newest: dict[int, int] = {}  # what the last step drew
        self.texts: dict[int, list[int]] = {0: []}  # of a prefix's name
        self.counts: Counter[str] = Counter()

    def launch(self, plan: BatchPlan) -> tuple[Outcome, ...]:
        """Runs the plan behind the one before it."""
        rows = plan.scheduled
        self.memory.move(plan)
        for part in [(row,) for row in rows] if self._reads_own_step else [rows]:
            for row in part:
                self._read_in(row)
            self.memory.compute(part, self._prefixes.__getitem__, self._is_read, reads_own_step=False)
        outcomes = []
        drawn: dict[int, int] = {}
        for row in rows:
            if row.samples:
                text = self.texts[self._prefixes[row.seq_id][row.start + row.num_tokens - 1]]
                drawn[row.seq_id] = draw(text)
                if not row.forced:
                    forks = tuple(draw(text, member) for member in range(1, row.num_samples))
                    outcomes.append(Outcome(row.seq_id, (draw(text),), forks=forks))
                    self.counts["forks"] += len(forks)
        self._newest = drawn
        return tuple(outcomes)

    def _is_read(self, row: ScheduledSequence, position: int) -> bool:
        return self._window is None or position > row.start - self._window

    def _read_in(self, row: ScheduledSequence) -> None:
        tokens: Sequence[int] = row.tokens
        if row.awaits_token:
            tokens = [self._newest[row.seq_id]]
            self.counts["placeholders"] += 1
        known = self._prefixes.setdefault(row.seq_id, [])
        known += [UNKNOWN] * (row.start - len(known))
        size, gpu = self.memory.block_size, self.memory.gpu
        for p in range(row.start):
            block = row.block_table[p // size]
            if known[p] == UNKNOWN and block != RELEASED:  # a hit, or a fork: what others computed of it
                known[p] = gpu[block][p % size]
        del known[row.start :]
        for token in tokens:
            parent = known[-1] if known else 0
            name = self.memory.name(parent, token)
            self.texts[name] = [*self.texts[parent], token]
            known.append(name)


def draw(text: Sequence[int], member: int = 0) -> int:
    """member: of a group at its fork."""
    return zlib.crc32(bytes([*text, *[VOCAB_SIZE] * member])) % VOCAB_SIZE


def written(request: Request, max_model_len: int, member: int) -> list[int]:
    """What the device makes of the request, token after token."""
    text = list(request.prompt_token_ids)
    sampling, output = request.sampling, list[int]()
    while True:
        output.append(draw(text + output, 0 if output else member))
        ends = output[-1] in sampling.stop_token_ids or (output[-1] == EOS and not sampling.ignore_eos)
        if ends or len(output) == sampling.max_tokens or len(text) + len(output) >= max(max_model_len, len(text) + 1):
            return output


class AsyncLife:
    """Drives a core with one plan ahead. Which comes next, a plan or a commit, is left to chance where both can be."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self.setup = setup
        self.scheduler = setup.scheduler()
        self.device = AsyncDevice(setup)
        self.live: dict[str, Request] = {}
        self.now_ns = 0
        self.counts = self.device.counts
        self._rng = rng
        self._in_flight: deque[tuple[Outcome, ...]] = deque()
        self._num_requests = 0

    def add(self) -> None:
        request = self._request()
        self._num_requests += 1
        self.scheduler.add(request)
        self.live[request.request_id] = request
        self.scheduler.check_invariants()

    def _request(self) -> Request:
        rng = self._rng
        shared = random.Random(rng.randrange(2))
        prompt = [shared.randrange(VOCAB_SIZE) for _ in range(rng.choice((0, 4, 9, 16, 24)))]
        prompt += [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0 if prompt else 1, 6))]
        stops = rng.choice(((), (STOP,)))
        sampling = SamplingParams(
            max_tokens=rng.choice((None, 1, 2, 5, 12)), stop_token_ids=stops, ignore_eos=rng.random() < 0.5,
            n=rng.choice((1, 1, 1, 2, 3)),
        )  # fmt: skip
        return Request(
            f"r{self._num_requests}", array("i", prompt), arrival_ns=self.now_ns, sampling=sampling,
            priority=rng.randrange(3),
        )  # fmt: skip

    def abort(self) -> None:
        if not self.live or len(self._in_flight) > 1:
            return
        name = self._rng.choice(list(self.live))
        finished = self.scheduler.abort(name, self.now_ns)
        if finished is not None:  # else a plan in flight ends it
            del self.live[name]
            self.counts["aborts in flight"] += bool(self._in_flight)
        self.scheduler.check_invariants()

    def reset(self) -> None:
        """A plan in flight was executed when it was launched: what it drew still comes."""
        if len(self._in_flight) > 1:
            return
        self.scheduler.reset_prefixes()
        self.device.memory.wipe()
        self.counts["resets in flight"] += bool(self._in_flight)
        self.scheduler.check_invariants()

    def step(self) -> None:
        """A plan if there may be one more, and a commit if there was nothing to plan, or no more may be in flight."""
        self.now_ns += 1
        plan = self.scheduler.plan(self.now_ns) if self.scheduler.has_work else None
        if plan is not None and not plan.is_empty:
            self.counts["preemptions ahead"] += len(plan.preempted) * bool(self._in_flight)
            self._in_flight.append(self.device.launch(plan))
            self.scheduler.check_invariants()
            if len(self._in_flight) < 2:
                return
        if self._in_flight:
            self.now_ns += 1
            for item in self.scheduler.commit(StepResult(self.now_ns, self._in_flight.popleft()), self.now_ns):
                self._ended(item)
            self.scheduler.check_invariants()

    def _ended(self, item: Finished) -> None:
        request = self.live.pop(item.request.request_id)
        members = range(request.sampling.n)
        wanted = Counter(tuple(written(request, self.setup.limits.max_model_len, member)) for member in members)
        for one in item.completions:
            if one.reason in (FinishReason.STOP, FinishReason.LENGTH):
                wanted[tuple(one.token_ids)] -= 1
                self.counts[f"ends by {one.reason}"] += 1
        assert min(wanted.values()) >= 0, f"other tokens: {wanted}"

    def drain(self) -> None:
        for _ in range(4000):
            if not self.scheduler.has_work and not self._in_flight:
                break
            self.step()
        while self._in_flight or self.scheduler.has_work:  # it goes round in circles
            assert not self.setup.ends_alone, "the run does not end"
            if len(self._in_flight) > 1 or not self.live:
                self.step()
            self.abort()
            self.step()
        assert not self.live
        assert self.scheduler.blocks.num_free_blocks == self.setup.num_blocks, "idle, but blocks are held"
        assert self.scheduler.blocks.num_free_cpu_blocks == self.setup.num_cpu_blocks


def ahead(rng: random.Random) -> Setup:
    """A random core that plans ahead; without the quirk of vLLM 0.8.5, whose hits may not be computed, and without a
    window of one token, in which the last slot, where the device reads its prefix, is outside."""
    while True:
        setup = random_setup(rng)
        if setup.rules.duplicates != "merged" and setup.window != 1:
            return replace(setup, limits=replace(setup.limits, max_num_plans=2))


def lived(setup: Setup, rng: random.Random, num_operations: int = 80) -> AsyncLife:
    life = AsyncLife(setup, rng)
    for _ in range(num_operations):
        rng.choices((life.add, life.step, life.abort, life.reset), (10, 40, 2, 1))[0]()
    life.drain()
    return life


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
@example(0)
def test_what_a_plan_assumes_of_the_one_before_it_comes_true(seed: int) -> None:
    rng = random.Random(seed)
    lived(ahead(rng), rng)


def test_long_lives_see_preemptions_surprises_and_aborts_while_a_plan_is_in_flight() -> None:
    counts: Counter[str] = Counter()
    for number in range(60):
        rng = random.Random(f"ahead/{number}")
        counts += lived(ahead(rng), rng, 200).counts
    rare = ("placeholders", "forks", "preemptions ahead", "aborts in flight", "resets in flight")
    assert min(counts[name] for name in rare) > 100, counts
    assert min(counts["ends by stop"], counts["ends by length"]) > 100, counts


# --- by hand ---

ROOMY = Setup(limits=replace(Setup().limits, max_num_plans=2), num_blocks=40)


def one(max_tokens: int, *, forced: int | None = None, name: str = "a") -> Request:
    output = None if forced is None else array("i", range(forced))
    return Request(
        name,
        array("i", [1, 2, 3]),
        forced_output=output,
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )


def test_a_decode_is_planned_before_its_token_is_known() -> None:
    scheduler = ROOMY.scheduler()
    scheduler.add(one(5))
    first, second = scheduler.plan(0), scheduler.plan(1)
    assert [(row.start, row.num_tokens, row.samples) for row in second.scheduled] == [(3, 1, True)]
    assert second.scheduled[0].awaits_token
    with pytest.raises(AssertionError, match="commit before planning more"):
        scheduler.plan(2)
    assert scheduler.commit(StepResult(3, (Outcome(0, (7,)),)), 3) == []
    (seq,) = scheduler.unfinished()
    assert (list(seq.tokens), seq.num_known_tokens, seq.num_tokens) == ([1, 2, 3, 7], 4, 5)
    assert (first.step, second.step) == (0, 1)


def test_no_step_is_planned_behind_an_end_that_is_foreseen() -> None:
    scheduler = ROOMY.scheduler()
    scheduler.add(one(2))
    scheduler.plan(0)
    scheduler.plan(1)
    scheduler.commit(StepResult(2, (Outcome(0, (7,)),)), 2)
    assert scheduler.plan(2).is_empty
    (finished,) = scheduler.commit(StepResult(3, (Outcome(0, (8,)),)), 3)
    assert list(finished.output_token_ids) == [7, 8]


def test_an_end_that_is_not_foreseen_comes_a_step_late_and_its_row_is_dropped() -> None:
    """A forced output that is shorter than the request's leave, as one that a stop token ended."""
    scheduler = ROOMY.scheduler()
    scheduler.add(one(9, forced=1))
    free = scheduler.blocks.num_free_blocks
    scheduler.plan(0)
    assert scheduler.plan(1).num_scheduled == [("a", 1)]
    (finished,) = scheduler.commit(StepResult(2), 2)
    assert (finished.num_output_tokens, scheduler.has_work) == (1, False)
    assert scheduler.blocks.num_free_blocks == free
    assert scheduler.commit(StepResult(3), 3) == []
    assert scheduler.emitters == []


def test_a_victim_whose_token_is_on_its_way_gets_it_while_it_waits() -> None:
    setup = replace(ROOMY, block_size=1, num_blocks=9, preemption="recompute")
    scheduler = setup.scheduler()
    scheduler.add(one(5))
    scheduler.add(one(5, name="b"))
    scheduler.plan(0)
    scheduler.plan(1)
    scheduler.commit(StepResult(2, (Outcome(0, (7,)), Outcome(1, (7,)))), 2)
    plan = scheduler.plan(2)
    assert [item.request_id for item in plan.preempted] == ["b"]
    assert scheduler.num_waiting == 1
    scheduler.commit(StepResult(3, (Outcome(0, (8,)), Outcome(1, (8,)))), 3)
    victim = scheduler.unfinished()[1]
    assert (victim.state, list(victim.tokens)) == (SequenceState.WAITING, [1, 2, 3, 7, 8])
    assert len(scheduler.emitters) == 2


def test_a_penalised_row_has_the_tokens_before_the_one_that_it_samples() -> None:
    """Also if that one is known, as it is forced."""
    scheduler = ROOMY.scheduler()
    sampling = SamplingParams(max_tokens=4, repetition_penalty=1.1)
    scheduler.add(Request("a", array("i", [1, 2, 3]), forced_output=array("i", [5, 6, 7, 8]), sampling=sampling))
    assert [list(scheduler.plan(number).scheduled[0].history) for number in range(2)] == [[1, 2, 3], [1, 2, 3, 5]]


def test_an_aborted_request_has_the_tokens_that_it_emitted_and_none_in_flight() -> None:
    scheduler = ROOMY.scheduler()
    scheduler.add(one(9, forced=6))
    scheduler.plan(0)
    scheduler.plan(1)
    scheduler.commit(StepResult(2), 2)
    finished = scheduler.abort("a", 3)
    assert finished is not None
    assert (finished.num_output_tokens, list(finished.output_token_ids)) == (1, [0])


@pytest.mark.parametrize("composition", ["unified", "decode_first"])
@pytest.mark.parametrize(
    ("num_prompt", "budget", "mode", "chunks"),
    [(10, 64, PreemptionMode.RECOMPUTE, [40, 40]), (9, 21, PreemptionMode.SWAP, [20, 20, 20])],
)
def test_a_group_preempted_while_its_fork_is_in_flight_goes_on_with_its_prompt(
    composition: str, num_prompt: int, budget: int, mode: PreemptionMode, chunks: list[int]
) -> None:
    """By recompute if the plan in flight computes all that it has: there is nothing to swap."""
    limits = Limits(8, budget, 64, 0, 1, max_num_plans=2)
    setup = Setup(
        composition, limits=limits, num_blocks=13, num_cpu_blocks=30, caching=False, preemption="swap", block_size=4
    )
    scheduler = setup.scheduler()
    forced = array("i", [5] * 8)
    scheduler.add(
        Request("a", array("i", range(num_prompt)), forced_output=forced, sampling=SamplingParams(max_tokens=30))
    )
    plans: list[BatchPlan] = []
    num_committed = 0
    for now_ns in range(60):
        if now_ns == 1:
            sampling = SamplingParams(max_tokens=4, n=2)
            scheduler.add(Request("g", array("i", range(40)), forced_output=forced[:4], sampling=sampling))
        while len(plans) - num_committed < 2 and not (plan := scheduler.plan(now_ns)).is_empty:
            plans.append(plan)
        if num_committed < len(plans):
            scheduler.commit(StepResult(now_ns), now_ns)
            num_committed += 1
            scheduler.check_invariants()
    assert not scheduler.has_work
    assert [item.mode for plan in plans for item in plan.preempted] == [mode]
    counts = [num for plan in plans for name, num in plan.num_scheduled if name == "g"]
    assert counts == chunks + [1] * 6
