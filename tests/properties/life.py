"""One life of a core: a scheduler and its shadow, driven together, and the log of calls that repeats it."""

from __future__ import annotations

import random
from collections import Counter

from testbed.blocks.chain import CacheEntry
from testbed.blocks.kv_sequence import RELEASED
from testbed.blocks.manager import BlockManager
from testbed.core.outcome import StepResult
from testbed.core.plan import BatchPlan
from testbed.core.request import Request
from testbed.core.scheduler import Scheduler
from tests.properties.setups import NS_PER_S, Setup, random_request, random_setup
from tests.properties.shadow import Shadow

Call = tuple[str, Request | str | StepResult, int]
MAX_PATIENCE = 400  # steps in which everything must end, where it is promised to no one


class Life:
    """Every method is one operation; after each, the core's own invariants and the shadow's laws hold."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self.setup = setup
        self.scheduler = setup.scheduler()
        self.shadow = Shadow(setup, self.scheduler, rng)
        self.now_ns = 0
        self.calls: list[Call] = []
        self.digests: list[int] = []
        self._rng = rng
        self._num_requests = 0

    @property
    def counts(self) -> Counter[str]:
        return self.shadow.counts

    @staticmethod
    def no_counts() -> Counter[str]:
        return Counter()

    def use(self, rng: random.Random) -> Life:
        """Draws from another source from now on."""
        self._rng = self.shadow.rng = rng
        return self

    def add(self) -> None:
        request = random_request(self._rng, f"r{self._num_requests}", self.now_ns)
        self._num_requests += 1
        self.calls.append(("add", request, self.now_ns))
        self.scheduler.add(request)
        self.shadow.added(request)
        self._check()

    def abort(self) -> None:
        if not self.shadow.jobs:
            assert self.scheduler.abort("nobody", self.now_ns) is None
            return
        name = self._rng.choice(list(self.shadow.jobs))
        self.calls.append(("abort", name, self.now_ns))
        self.shadow.aborted(name, self.scheduler.abort(name, self.now_ns))
        self._check()

    def reset(self) -> None:
        self.calls.append(("reset", "", self.now_ns))
        self.scheduler.reset_prefixes()
        self.shadow.reset()
        self._check()

    def step(self) -> None:
        """A plan, what a device makes of it, and its commit."""
        scheduler, shadow = self.scheduler, self.shadow
        self.now_ns += self._rng.randrange(3) * NS_PER_S
        if not scheduler.has_work:
            assert scheduler.plan(self.now_ns).is_empty
            assert scheduler.blocks.num_free_blocks == self.setup.num_blocks, "idle, but blocks are held"
            assert scheduler.blocks.num_free_cpu_blocks == self.setup.num_cpu_blocks, "idle, but CPU blocks are held"
            return
        planned_ns = self.now_ns
        num_cached = self._num_cached_blocks()
        plan = scheduler.plan(planned_ns)
        self.counts["evictions"] += max(0, num_cached - self._num_cached_blocks())  # at least
        self._check()
        if not plan.is_empty:
            self._check_repeated(plan)
        rows = plan.scheduled if not plan.is_empty else ()
        shadow.planned(plan)
        result = shadow.execute(plan)
        self.now_ns += 1
        self.calls.append(("step", result, planned_ns))
        finished = scheduler.commit(result, self.now_ns)
        shadow.committed(plan, rows, result, finished)
        self.digests.append(scheduler.digest)
        self._check()
        shadow.check_contents()

    def drain(self) -> None:
        """Everything ends: where that is promised within a bound that grows with the work (the sequence in front is
        never preempted, and each step computes a token of it or makes room), else with aborts."""
        num_tokens = sum(len(one.tokens) + 30 for one in self.shadow.members.values())
        bound = 4 * num_tokens + 100 if self.setup.ends_alone else MAX_PATIENCE
        for _ in range(bound):
            if not self.scheduler.has_work:
                break
            self.step()
        if self.scheduler.has_work:
            assert not self.setup.ends_alone, "the run does not end"
            self.counts["runs that do not end by themselves"] += 1
        while self.scheduler.has_work:
            self.abort()
        self.step()  # idle: everything is free

    def check_repeats(self, seed: int) -> None:
        """The same calls give the same digests on another scheduler, whatever its physical block ids, and whether or
        not it puts off what nobody has asked for."""
        if self.setup.caching and self.setup.num_hashes is None:
            found = repeat(self.setup.scheduler(lists_late=False), self.calls)
            assert found == self.digests, "prefixes that are not listed show"
            self.counts["digests repeated with all prefixes listed"] += len(found)
        if self.setup.ids_decide:
            return
        scheduler = self.setup.scheduler()
        shuffle_blocks(scheduler.blocks, seed)
        assert repeat(scheduler, self.calls) == self.digests, "other block ids, other decisions"
        self.counts["digests repeated"] += len(self.digests)

    def _check_repeated(self, plan: BatchPlan) -> None:
        """Positions of blocks that several decodes read, but for one of them each: all if only decodes hold blocks, and
        if all who hold any are in the step, no more than that and what prompts share of blocks that they compute."""
        shape, size = plan.shape, self.scheduler.blocks.block_size
        assert 0 <= shape.repeated_context_tokens <= shape.decode_context_tokens - shape.longest_decode_context
        decodes = [row for row in plan.scheduled if row.num_tokens == 1 and row.start >= row.num_prompt_tokens]
        held = Counter(block for row in decodes for block in row.block_table if block != RELEASED)
        repeated = (held.total() - len(held)) * size
        holders = [seq for seq in self.scheduler.unfinished() if seq.block_table]
        if len(holders) == len(decodes):
            assert shape.repeated_context_tokens == min(
                repeated, shape.decode_context_tokens - shape.longest_decode_context
            )
            self.counts["steps of decodes that share"] += repeated > 0
        elif len(holders) == len(plan.scheduled):
            num_holders = Counter(block for row in plan.scheduled for block in row.block_table)
            prompts = [row for row in plan.scheduled if row not in decodes]
            ahead = [block for row in prompts for block in row.block_table[row.start // size :]]
            assert shape.repeated_context_tokens <= repeated + size * sum(num_holders[block] > 1 for block in ahead)
            self.counts["steps of decodes that share beside prompts"] += shape.repeated_context_tokens > 0

    def _num_cached_blocks(self) -> int:
        return self.scheduler.blocks._gpu.cache.num_cached_blocks

    def _check(self) -> None:
        self.scheduler.check_invariants()
        self._check_chains()
        self.counts["operations"] += 1

    def _check_chains(self) -> None:
        """What a sequence has published is in its blocks, and its chain ends at the last entry."""
        cache = self.scheduler.blocks._gpu.cache
        for seq in self.scheduler.unfinished():
            chain, table = seq.chain, seq.block_table
            if chain is None or not table:
                continue
            assert chain.num_published <= len(table)
            if chain.entry is not None and not chain.is_broken:
                assert chain.entry.key == chain.keys[chain.num_published - 1]
            for index, block in enumerate(table[: chain.num_published]):
                content = None if block == RELEASED else cache.content_of[block]
                if isinstance(content, CacheEntry):
                    assert (content.key, content.content) == (chain.keys[index], chain.contents[index])
                elif content is not None:
                    assert content.chain.keys[0] == chain.keys[0]
                else:
                    assert block == RELEASED or chain.is_broken or cache._is_newest_found, "a published block is lost"


def shuffle_blocks(blocks: BlockManager, seed: int) -> None:
    """Free blocks are handed out in another order."""
    for pool in (blocks._gpu.pool, blocks._cpu.pool):
        random.Random(seed).shuffle(pool.free)


def repeat(scheduler: Scheduler, calls: list[Call]) -> list[int]:
    """The digest after each step."""
    digests = []
    for kind, what, now_ns in calls:
        if isinstance(what, Request):
            scheduler.add(what)
        elif kind == "abort":
            scheduler.abort(str(what), now_ns)
        elif kind == "reset":
            scheduler.reset_prefixes()
        else:
            assert isinstance(what, StepResult)
            scheduler.plan(now_ns)
            scheduler.commit(what, now_ns + 1)
            digests.append(scheduler.digest)
    return digests


def random_life(seed: str, num_operations: int, composition: str | None = None) -> Life:
    """A whole life: adds, aborts, resets and steps in a random mix, then the rest of the work, then the repetition."""
    rng = random.Random(seed)
    life = Life(random_setup(rng, composition), rng)
    share_added = rng.choice((0.1, 0.25, 0.4))
    share_aborted = rng.choice((0.0, 0.02, 0.1))
    share_reset = rng.choice((0.0, 0.0, 0.02, 0.1))
    try:
        for _ in range(num_operations):
            choice = rng.random()
            if choice < share_added:
                life.add()
            elif choice < share_added + share_aborted:
                life.abort()
            elif choice > 1 - share_reset:
                life.reset()
            else:
                life.step()
        life.drain()
        life.check_repeats(1)
    except Exception as error:
        error.add_note(f"life {seed!r}, {num_operations} operations, {len(life.calls)} calls: {life.setup}")
        raise
    return life
