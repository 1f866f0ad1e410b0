"""What the tests of queue orders share: sequences by hand, random calls on a queue beside a plain model, keys."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

import testbed.policies.orders as orders
from testbed.blocks.manager import BlockManager
from testbed.core.limits import Limits
from testbed.core.request import Request
from testbed.core.sequence import Sequence
from testbed.policies.context import PolicyContext, bind
from testbed.policies.oracle import Perfect
from tests.testbed.core_kit import make_blocks

NS_PER_S = 1_000_000_000
MAX_MODEL_LEN = 1 << 20


def bound(queue: Any, *, oracle: Any = None, blocks: BlockManager | None = None, seed: int = 0) -> Any:
    """blocks None: an empty pool."""
    limits = Limits(8, 64, MAX_MODEL_LEN, 0, 1)
    context = PolicyContext(blocks or make_blocks(), limits, oracle or Perfect(), None, seed)
    for part in (context.oracle, queue):
        bind(part, context)
    return queue


def caching(*prompts: Iterable[int], block_size: int = 4) -> BlockManager:
    """A pool in which these prompts are cached, as far as they fill blocks, and nothing runs."""
    blocks = make_blocks(num_blocks=4096, block_size=block_size)
    for prompt in prompts:
        cache(blocks, prompt)
    return blocks


def cache(blocks: BlockManager, prompt: Iterable[int]) -> None:
    tokens = [*prompt]
    if not tokens:
        return
    seq = make_seq(99_999, tokens)
    blocks.admit(seq, len(tokens), blocks.lookup(seq))
    blocks.prefixes.publish(seq, len(tokens))
    blocks.free(seq)
    blocks.forget(seq)


def make_seq(
    seq_id: int, prompt: int | Iterable[int] = 10, output: int = 5, *, salt: str = "", **fields: Any
) -> Sequence:
    tokens = range(seq_id * 10_000, seq_id * 10_000 + prompt) if isinstance(prompt, int) else prompt
    request = Request(
        f"r{seq_id}", array("i", tokens), forced_output=array("i", range(output)), cache_salt=salt, **fields
    )
    return Sequence(seq_id, request, MAX_MODEL_LEN)


def emit(seq: Sequence, num_tokens: int = 1) -> None:
    for _ in range(num_tokens):
        seq.emit(0)


def drain(queue: Any, now_ns: int = 0) -> list[int]:
    """Ids in the order served at this instant."""
    ids = []
    while (seq := queue.head(now_ns)) is not None:
        queue.remove(seq)
        ids.append(seq.seq_id)
    assert len(queue) == 0
    return ids


def pushed(queue: Any, *seqs: Sequence) -> Any:
    for seq in seqs:
        queue.push(seq)
    return queue


# --- random calls ---


ARRIVALS = st.tuples(  # one by one they would take several times as long to draw
    st.integers(1, 60), st.integers(1, 60), st.integers(0, 3), st.integers(-3, 3),
    st.sampled_from((None, "a", "b", "c")), st.integers(0, 40),
)  # fmt: skip


@dataclass
class World:
    """A queue under test, and what waits, runs and has been in it, as the scheduler would know it."""

    queue: Any
    waiting: dict[int, Sequence]
    running: dict[int, Sequence]
    now_ns: int = 0
    num_seqs: int = 0

    def push(self, prompt: int, output: int, age_s: int, priority: int, tenant: str | None, deadline: int) -> None:
        seq = make_seq(
            self.num_seqs,
            prompt,
            output,
            arrival_ns=max(0, self.now_ns - age_s * NS_PER_S),
            priority=priority,
            tenant=tenant,
            deadline_ns=None if deadline > 30 else deadline * NS_PER_S,
        )
        self.num_seqs += 1
        self.queue.push(seq)
        self.waiting[seq.seq_id] = seq

    def admit(self, seq: Sequence | None) -> None:
        if seq is not None:
            self.queue.remove(self.waiting.pop(seq.seq_id))
            self.running[seq.seq_id] = seq

    def step(self, draw: Callable[[int, int], int]) -> None:
        """Some of the running advance; the finished leave."""
        self.now_ns += draw(1, 3 * NS_PER_S)
        for seq in list(self.running.values()):
            num_tokens = min(draw(0, 30), seq.num_tokens - seq.num_computed_tokens)
            if num_tokens == 0:
                continue
            seq.num_computed_tokens += num_tokens
            num_emitted = int(seq.num_computed_tokens == seq.num_tokens)
            emit(seq, num_emitted)
            if hasattr(self.queue, "served"):
                self.queue.served(seq, num_tokens, num_emitted, self.now_ns)
            if seq.num_output_tokens == len(seq.request.forced_output or ()):
                self.end(self.running.pop(seq.seq_id))

    def preempt(self, seq: Sequence) -> None:
        del self.running[seq.seq_id]
        seq.num_computed_tokens = 0
        self.queue.push_preempted(seq)
        self.waiting[seq.seq_id] = seq

    def abort(self, seq: Sequence) -> None:
        if self.waiting.pop(seq.seq_id, None):
            self.queue.remove(seq)
        else:
            del self.running[seq.seq_id]
        self.end(seq)

    def end(self, seq: Sequence) -> None:
        if hasattr(self.queue, "left"):
            self.queue.left(seq, self.now_ns)


def play(queue: Any, data: st.DataObject, check: Callable[[World], None]) -> World:
    """Random calls in an order that a scheduler could make; `check` after each."""
    world = World(queue, {}, {})

    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    def pick(seqs: dict[int, Sequence]) -> Sequence:
        return list(seqs.values())[draw(0, len(seqs) - 1)]

    for _ in range(draw(1, 40)):
        action = draw(0, 9)
        if action <= 4 or not (world.waiting or world.running):
            world.push(*data.draw(ARRIVALS))
        elif action <= 6:
            world.admit(queue.head(world.now_ns))
        elif action == 7:
            world.step(draw)
        elif action == 8 and world.running:
            world.preempt(pick(world.running))
        elif world.waiting or world.running:
            world.abort(pick({**world.waiting, **world.running}))
        assert len(queue) == len(world.waiting)
        assert sorted(seq.seq_id for seq in queue) == sorted(world.waiting)
        check(world)
    return world


def aged(seq: Sequence, now_ns: int) -> Any:
    wait_s = Fraction(now_ns - seq.request.arrival_ns, NS_PER_S)
    return seq.request.priority - Fraction(1, 10) * wait_s, seq.request.arrival_ns, seq.seq_id


def to_come(seq: Sequence, now_ns: int) -> Any:
    output = len(seq.request.forced_output or ())
    return output - seq.num_output_tokens + seq.num_tokens - seq.num_computed_tokens, seq.seq_id


def late(seq: Sequence, now_ns: int) -> Any:
    deadline_ns = seq.request.deadline_ns
    return deadline_ns is None, deadline_ns or 0, seq.request.arrival_ns, seq.seq_id


def size(prompt: int, output: int, sign: int = 1) -> Callable[[Sequence, int], Any]:
    def key(seq: Sequence, now_ns: int) -> Any:
        return sign * (prompt * seq.num_prompt_tokens + output * len(seq.request.forced_output or ())), seq.seq_id

    return key


KEYED: dict[str, tuple[Callable[[], Any], Callable[[Sequence, int], Any]]] = {
    "lcfs": (orders.lcfs, lambda seq, now_ns: -seq.seq_id),
    "priority": (orders.priority, lambda seq, now_ns: (seq.request.priority, seq.request.arrival_ns, seq.seq_id)),
    "priority_aged": (lambda: orders.priority(ageing_per_s=0.1), aged),
    "edf": (orders.earliest_deadline, late),
    "sjf": (orders.shortest_job, size(1, 0)),
    "sjf_output": (lambda: orders.shortest_job("output"), size(0, 1)),
    "sjf_total": (lambda: orders.shortest_job("total"), size(1, 1)),
    "ljf": (orders.longest_job, size(1, 0, -1)),
    "ljf_output": (lambda: orders.longest_job("output"), size(0, 1, -1)),
    "srpt": (orders.shortest_remaining, to_come),
}
