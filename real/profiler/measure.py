"""Makes the steps of a grid and measures them like a run's steps: with the same scheduler, loop, driver and recorders.

State that a measured step needs (contexts of decoding sequences, cached prefixes) is planned and committed like any
step, but not computed. K and V are then arbitrary memory contents, on which a step's time does not depend. So contexts
take no time to make, and every sequence still has blocks of its own. Blocks to move are chosen at random and added to a
plan of decodes. They are swaps without a swapped sequence, so the scheduler's decisions about swaps are not measured.

Knows no cost model. The maker of schedulers and the recorders are passed in.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from random import Random
from typing import Any, NamedTuple, Protocol

import numpy as np

from real.clocks import Clock
from real.driver import Computed, Work
from real.driver import run as drive
from real.profiler.grid import Batch, Episode, Moves, Room
from testbed.core.commands import Abort, Arrive, Event, Recorder, StepView
from testbed.core.interfaces import Backend
from testbed.core.outcome import Finished, Spans
from testbed.core.plan import BatchPlan, BatchShape, PrefillChunk
from testbed.core.request import Request
from testbed.core.sampling import SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.core.serve import serve

MeasuredStep = tuple[BatchShape, Spans, int]  # shape and spans of a step, and the ns from its plan to its commit
Recorded = tuple[Recorder, Callable[[], None] | None]  # a recorder, and the driver's catch_up


class MakeScheduler(Protocol):
    """Creates a scheduler that admits requests at once: no watermark, first come first served, decodes in every step.

    budget: tokens per step. caching: whether prefixes are looked up; None: as configured. decodes_wait: decodes wait
    while there are prompts.
    """

    def __call__(self, *, budget: int, caching: bool | None, decodes_wait: bool) -> Scheduler: ...


class Bench(NamedTuple):
    """The engine and settings with which episodes run."""

    backend: Backend[Work]
    clock: Clock
    room: Room
    make_scheduler: MakeScheduler
    record: Callable[[Recorder], AbstractContextManager[Recorded]]  # adds the recorders of a run to this one
    vocab_size: int
    sampling: SamplingParams


class Unit(NamedTuple):
    """Work that is measured as a whole. is_repeated: measured in every repeat, after one unmeasured run; else once."""

    run: Callable[[], list[MeasuredStep]]
    is_repeated: bool = True


class Profiled(NamedTuple):
    """Measured steps, in order. num_units: measurements of units that are complete, of num_wanted. ended_by: why it
    ended early; None: it did not. is_interrupted: whether the user interrupted it."""

    steps: list[MeasuredStep]
    num_units: int
    num_wanted: int
    ended_by: str | None = None
    is_interrupted: bool = False


def measure(
    units: Sequence[Unit], *, repeats: int, max_s: float, seed: int, progress: Callable[[], object]
) -> Profiled:
    """Measures all units in `repeats` rounds, each in another random order; those that are not repeated, in the first
    alone. There each repeated unit is run once before, so that no measured step includes one-time work.

    It ends early after max_s and at an interrupt, and returns the units that are complete by then.
    """
    draw = Random(seed)
    orders = [[unit for unit in units if unit.is_repeated or not repeat] for repeat in range(repeats)]
    so_far = Profiled([], 0, sum(map(len, orders)))
    began = time.monotonic()
    try:
        for repeat, order in enumerate(orders):
            draw.shuffle(order)
            for unit in order:
                if time.monotonic() - began > max_s:
                    return so_far._replace(ended_by=f"its {max_s:g} s were over")
                if unit.is_repeated and not repeat:
                    unit.run()
                so_far.steps.extend(unit.run())
                so_far = so_far._replace(num_units=so_far.num_units + 1)
                progress()
    except KeyboardInterrupt:
        return so_far._replace(ended_by="it was interrupted", is_interrupted=True)
    return so_far


def fill_with_noise(kv: Any) -> None:
    """Fills a GPU's KV memory with random numbers, like in a run: computing with zeros takes less power, so the GPU's
    clock would be higher. kv: a tensor. FP8 is not changed, as torch has no random numbers in it.
    """
    if kv.is_cuda and kv.dtype.itemsize > 1:
        kv.normal_()


def run_episode(bench: Bench, episode: Episode, seed: int) -> list[MeasuredStep]:
    """Runs one episode; returns its measured steps. seed: for token ids and for the blocks that are moved."""
    room = bench.room
    has_prefixes = episode.num_common > 0 or any(chunk.start for batch in episode.batches for chunk in batch)
    budget = episode.budget or room.max_num_seqs * room.max_model_len
    scheduler = bench.make_scheduler(
        budget=budget, caching=True if has_prefixes else None, decodes_wait=episode.decodes_wait
    )
    stage = _Stage(bench, episode, Random(seed))
    with bench.record(stage) as (recorder, catch_up):
        drive(serve(stage, scheduler, recorder), stage, bench.clock, catch_up=catch_up)
    return stage.measured


NOT_COMPUTED = Work(lambda: Computed(None, Spans()))


class _Stage(Recorder):
    """One episode: sends the requests (an Inbox), executes or skips the plans (a backend), keeps steps (a Recorder)."""

    is_open = False

    def __init__(self, bench: Bench, episode: Episode, draw: Random) -> None:
        self.measured: list[MeasuredStep] = []
        self._bench, self._episode, self._draw = bench, episode, draw
        self._tokens = np.random.default_rng(draw.getrandbits(63))
        self._script = self._events()
        self._is_over = False
        self._is_skipped = self._is_kept = False  # whether the next plan is not computed; whether it is measured
        self._moves = Moves()  # of the next plan
        self._shape = BatchShape(0, 0, (), 0)  # of the last plan that was executed
        self._num_to_compute = 0  # prompt tokens that are still to be skipped
        self._live: set[str] = set()  # unfinished requests of a batch
        self._num_sent = 0

    # --- the script ---

    def _events(self) -> Iterator[list[Event]]:
        """Yields the events at each step boundary, after setting how the step is treated."""
        episode = self._episode
        common = self._ids(episode.num_common)
        owned = [self._ids(context - episode.num_common) for context in episode.contexts]
        decoding = [self._made(common + own, episode.num_steps) for own in owned]
        prefixes = {chunk: self._ids(chunk.start) for batch in episode.batches for chunk in batch if chunk.start}
        if common:
            yield from self._skipped([self._made(common, 1)], len(common))
        others = [self._made(ids, 1) for ids in prefixes.values()]
        if before := [*decoding, *others]:
            yield from self._skipped(before, sum(map(len, [*owned, *prefixes.values()])))
        yield [] if decoding else [Arrive(self._made(self._ids(self._bench.room.block_size), 1))]  # unmeasured
        self._is_kept = True
        for moves in (*[Moves()] * episode.num_alone, *episode.moves):
            self._moves = moves
            yield []
        self._moves = Moves()
        for batch in episode.batches:
            yield from self._prompts(batch, prefixes)
            if episode.decodes_wait:
                yield []
        self._is_kept, self._is_skipped, self._is_over = False, True, True
        yield [Abort(request.request_id) for request in decoding]

    def _skipped(self, requests: list[Request], num_tokens: int) -> Iterator[list[Event]]:
        """Yields the events of requests until `num_tokens` prompt tokens are planned and committed, not computed."""
        self._num_to_compute, self._is_skipped = num_tokens, True
        yield [Arrive(request) for request in requests]
        while self._num_to_compute > 0:
            yield []
        self._is_skipped = False

    def _prompts(self, batch: Batch, prefixes: dict[PrefillChunk, array[int]]) -> Iterator[list[Event]]:
        """Yields the events of a batch of prompts, until they are computed."""
        requests = []
        for chunk in batch:
            prefix = prefixes[chunk] if chunk.start else array("i")
            requests.append(self._made(prefix + self._ids(chunk.num_tokens), 1))
        self._live = {request.request_id for request in requests}
        yield [Arrive(request) for request in requests]
        while self._live:
            yield []

    def _made(self, prompt: array[int], num_output_tokens: int) -> Request:
        self._num_sent += 1
        output = self._ids(num_output_tokens)
        return Request(f"r{self._num_sent}", prompt, forced_output=output, sampling=self._bench.sampling)

    def _ids(self, num: int) -> array[int]:
        return array("i", self._tokens.integers(0, self._bench.vocab_size, num, dtype=np.int32).tobytes())

    # --- inbox ---

    def due(self, now_ns: int) -> list[Event]:
        return next(self._script, [])

    def next_ns(self) -> int | None:
        return None if self._is_over else 0

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        self._live.difference_update([item.request.request_id for item in requests])

    # --- backend ---

    def start(self, plan: BatchPlan) -> Work:
        if self._is_skipped:
            self._num_to_compute -= plan.shape.num_prefill_tokens
            return NOT_COMPUTED
        if any(self._moves):
            plan = self._moving(plan)
        self._shape = plan.shape
        return self._bench.backend.start(plan)

    def _moving(self, plan: BatchPlan) -> BatchPlan:
        """Adds blocks to move to the plan; they are scattered, like those of a pool after long use."""
        num_out, num_in, num_copied = self._moves
        room = self._bench.room
        gpu = self._draw.sample(range(room.num_gpu_blocks), num_out + num_in + 2 * num_copied)
        # a swap space allocates its lowest blocks first, again and again; the memory beyond them was never touched
        cpu = self._draw.sample(range(min(room.num_cpu_blocks, room.num_gpu_blocks)), num_out + num_in)
        inward, sources = gpu[num_out : num_out + num_in], gpu[num_out + num_in :]
        return plan.replace(
            shape=plan.shape.replace(
                num_blocks_swapped_out=num_out, num_blocks_swapped_in=num_in, num_blocks_copied=num_copied
            ),
            swap_out=tuple(zip(gpu[:num_out], cpu[:num_out], strict=True)),
            swap_in=tuple(zip(cpu[num_out:], inward, strict=True)),
            copies=tuple(zip(sources[:num_copied], sources[num_copied:], strict=True)),
        )

    # --- recorder ---

    def committed(self, step: StepView) -> None:
        if self._is_kept:
            self.measured.append((self._shape, step.result.spans, step.end_ns - step.plan_ns))
