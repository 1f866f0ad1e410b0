"""One core under test, drawn from a small but complete range of configurations, driven together with its reference."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

from testbed.blocks.config import KVRules
from testbed.blocks.keys import TokenKeys
from testbed.plan import Finished, StepResult
from testbed.policies.config import Limits
from testbed.policies.victim import MostRecentlyAdmitted
from testbed.request import Request, SamplingParams
from testbed.scheduler import Scheduler
from testbed.sequence import Sequence
from tests.properties.reference import Reference
from tests.testbed.core_kit import WeakKeys, make_blocks, make_scheduler

EOS = 1
VOCAB_SIZE = 11
RULES = {
    "whole": KVRules(),
    "chunk": KVRules(allocate="chunk"),
    "chunk, full length must fit": KVRules(allocate="chunk", full_length_must_fit=True),
    "whole, visible at allocation": KVRules(hits_visible="allocation", watermark_extra_blocks=1),
    "chunk, visible at allocation": KVRules(
        allocate="chunk", hits_visible="allocation", watermark_when_idle=False, watermark_extra_blocks=1
    ),
    "as vLLM V1": KVRules("chunk", True, "allocation", False, 1),
}


class OldestFirst:
    """A user's own victim choice: it may take what was scheduled in the same step already."""

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        return next(iter(running.values()))


@dataclass(frozen=True)
class Setup:
    composition: str
    rules: str
    caching: bool
    num_hashes: int | None  # None: the real hash; else that many values
    block_size: int
    num_blocks: int
    watermark: float
    limits: Limits
    last_is_victim: bool = True

    def scheduler(self) -> Scheduler:
        blocks = make_blocks(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            watermark=self.watermark,
            rules=RULES[self.rules],
            caching=self.caching,
            key_source=WeakKeys(self.block_size, self.num_hashes) if self.num_hashes else TokenKeys(self.block_size),
        )
        victims = MostRecentlyAdmitted() if self.last_is_victim else OldestFirst()
        return make_scheduler(self.composition, blocks=blocks, limits=self.limits, eos_token_id=EOS, victims=victims)


@dataclass(frozen=True)
class Shape:
    """What a request looks like; its tokens come from a few shared texts."""

    text: int
    num_shared: int
    num_own: int
    num_output: int
    is_forced: bool = True
    salt: str = ""
    ignore_eos: bool = False
    stops: tuple[int, ...] = ()

    def request(self, number: int) -> Request:
        text, own = random.Random(self.text), random.Random(1000 + number)
        prompt = [text.randrange(VOCAB_SIZE) for _ in range(self.num_shared)]
        prompt += [own.randrange(2) for _ in range(self.num_own)]
        output = [own.randrange(2) for _ in range(self.num_output)]
        sampling = SamplingParams(
            max_tokens=None if self.is_forced else self.num_output,
            stop_token_ids=self.stops,
            ignore_eos=self.ignore_eos,
        )
        return Request(
            f"r{number}",
            array("i", prompt),
            forced_output=array("i", output) if self.is_forced else None,
            sampling=sampling,
            cache_salt=self.salt,
        )


class Pair:
    """A scheduler and its reference, and a log of the calls so that they can be repeated."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.scheduler = setup.scheduler()
        self.reference = Reference(
            setup.composition, setup.limits, self.scheduler, eos_token_id=EOS, vocab_size=VOCAB_SIZE,
            last_is_victim=setup.last_is_victim,
        )  # fmt: skip
        self.calls: list[Request | str | StepResult] = []
        self.digests: list[int] = []
        self.finished: list[Finished] = []

    def add(self, shape: Shape) -> None:
        request = shape.request(self.reference.num_added)
        self.calls.append(request)
        self.scheduler.add(request)
        self.reference.added(request)
        self.scheduler.check_invariants()

    def abort(self, choice: int) -> None:
        live = list(self.reference.live)
        if live:
            request_id = live[choice % len(live)]
            self.calls.append(request_id)
            self.reference.aborted(request_id, self.scheduler.abort(request_id))
        self.scheduler.check_invariants()

    def step(self) -> None:
        if not self.scheduler.has_work:
            assert self.scheduler.plan(0).is_empty
            assert self.scheduler.blocks.num_free_blocks == self.setup.num_blocks, "idle, but blocks are held"
            return
        plan = self.scheduler.plan(0)
        rows = plan.scheduled if not plan.is_empty else ()
        self.scheduler.check_invariants()
        self.reference.planned(plan)
        result = self.reference.execute(plan)
        self.calls.append(result)
        finished = self.scheduler.commit(result, 1)
        self.reference.committed(rows, plan, finished)
        self.scheduler.check_invariants()
        self.digests.append(self.scheduler.digest)
        self.finished += finished

    def drain(self) -> None:
        """Everything ends within a bound that grows with the work."""
        work = sum(len(known.tokens) + 100 for known in self.reference.live.values())
        limit = 4 * work * (1 + len(self.reference.live))
        for _ in range(limit if self.setup.last_is_victim else 100):
            if not self.scheduler.has_work:
                break
            self.step()
        if not self.setup.last_is_victim:  # may take turns for ever
            while self.scheduler.has_work:
                self.abort(0)
        assert not self.scheduler.has_work, "the run does not end"
        self.step()  # idle: everything is free

    def check_repeats(self, seed: int) -> None:
        """The same calls give the same digests on another scheduler, whatever its physical block ids."""
        scheduler = self.setup.scheduler()
        random.Random(seed).shuffle(scheduler.blocks._pool._free)
        digests = []
        for call in self.calls:
            if isinstance(call, Request):
                scheduler.add(call)
            elif isinstance(call, str):
                scheduler.abort(call)
            else:
                scheduler.plan(0)
                scheduler.commit(call, 1)
                digests.append(scheduler.digest)
        assert digests == self.digests


def random_setup(rng: random.Random) -> Setup:
    budget = rng.choice((1, 2, 5, 16, 64))
    return Setup(
        composition=rng.choice(("prefill_first", "decode_first", "unified")),
        rules=rng.choice(tuple(RULES)),
        caching=rng.random() < 0.8,
        num_hashes=rng.choice((None, None, 1, 2, 5)),
        block_size=rng.choice((1, 2, 3, 4, 512)),
        num_blocks=rng.randint(1, 24),
        watermark=rng.choice((0.0, 0.01, 0.2)),
        limits=Limits(
            rng.choice((1, 2, 3, 8)), budget, rng.choice((8, 30, 512)), rng.choice((0, 0, 1, min(budget, 4))),
            rng.choice((1, 2, 3)),
        ),
        last_is_victim=rng.random() < 0.8,
    )  # fmt: skip


def random_shape(rng: random.Random) -> Shape:
    num_shared = rng.choice((0, 1, 4, 8, 9, 16, 24))
    return Shape(
        text=rng.randrange(2),
        num_shared=num_shared,
        num_own=rng.randint(0 if num_shared else 1, 6),
        num_output=rng.choice((1, 2, 5, 12, 20)),
        is_forced=rng.random() < 0.7,
        salt=rng.choice(("", "", "a")),
        ignore_eos=rng.random() < 0.5,
        stops=rng.choice(((), (), (3,))),
    )
