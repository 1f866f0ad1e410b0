"""A user's own policies, in a file outside the package. docs/extending.md runs them; a test keeps that true.

One class for each place where a policy plugs in. The last lines let a type checker confirm that they fit.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from sim.cost.base import CostModel
from sim.cost.context import CostContext
from testbed.blocks.demand import AllocStatus
from testbed.blocks.interfaces import EvictionPolicy
from testbed.core.composition import Composition
from testbed.core.interfaces import AdmissionPolicy, PreemptionChoice, VictimChoice, WaitingQueue
from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape, BlockedBy, PreemptionMode, PrefillChunk
from testbed.core.request import Request
from testbed.core.sequence import Sequence
from testbed.core.step import Step
from testbed.policies.compositions.swap_in import take_all_back
from testbed.policies.context import LengthOracle, PolicyContext
from testbed.policies.orders import KeyedQueue
from testbed.policies.queue_order import FCFS
from testbed.routing.routers import Replicas, Router

# --- queue orders ---


def shortest_prompt_first() -> KeyedQueue:
    """A queue order whose key does not change while a sequence waits is one expression; ties go by arrival."""
    return KeyedQueue(lambda seq: (seq.num_prompt_tokens, seq.seq_id))


class TenantsInTurn:
    """A queue order from scratch: one request of each tenant in turn, first come, first served inside a tenant.

    push, remove and head are O(1).
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[str, FCFS] = OrderedDict()  # the tenant whose turn it is comes first; none is empty

    def push(self, seq: Sequence) -> None:
        self._queues.setdefault(seq.request.tenant or "", FCFS()).push(seq)

    def push_preempted(self, seq: Sequence) -> None:
        """It was served once: it is its tenant's next one, whenever that tenant's turn comes."""
        self._queues.setdefault(seq.request.tenant or "", FCFS()).push_preempted(seq)

    def head(self, now_ns: int) -> Sequence | None:
        for queue in self._queues.values():
            return queue.head(now_ns)
        return None

    def remove(self, seq: Sequence) -> None:
        """It was admitted (or ended): the tenant goes behind the others."""
        tenant = seq.request.tenant or ""
        queue = self._queues.pop(tenant)
        queue.remove(seq)
        if queue:
            self._queues[tenant] = queue

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue


# --- admission, preemption ---


class TenantCap:
    """An admission: at most `max_requests` of one tenant run at a time. The head that is refused waits, and the queue
    behind it."""

    def __init__(self, max_requests: int = 4) -> None:
        self._max_requests = max_requests

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        tenant = seq.request.tenant
        return sum(1 for other in running if other.request.tenant == tenant) < self._max_requests


class TenantRate:
    """An admission by the clock: each tenant has a bucket of `burst` tokens, which fills with `tokens_per_s`; a prompt
    takes its tokens out of it. While nothing runs, all are admitted: they would be rejected."""

    now_ns = 0  # set before each step

    def __init__(self, tokens_per_s: int = 4_000, burst: int = 8_000) -> None:
        self._tokens_per_s, self._burst = tokens_per_s, burst
        self._filled: dict[str, tuple[int, int]] = {}  # by tenant: the instant, and billionths of a token at it

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        then_ns, level = self._filled.get(seq.tenant, (self.now_ns, self._burst * 10**9))
        level = min(level + (self.now_ns - then_ns) * self._tokens_per_s, self._burst * 10**9)
        wanted = min(seq.num_prompt_tokens, self._burst) * 10**9
        is_allowed = level >= wanted or not running
        self._filled[seq.tenant] = self.now_ns, level - wanted if is_allowed else level
        return is_allowed


class CheapestToRecompute:
    """A victim choice: what takes the least time to compute again, by the run's cost model; the newest among equals."""

    def bind(self, context: PolicyContext) -> None:
        self._recompute_ns = context.estimator.recompute_ns

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        return min(running.values(), key=lambda seq: (self._recompute_ns(0, seq.num_computed_tokens), -seq.seq_id))


class SwapWhatIsLarge:
    """A preemption mode: swap from `min_blocks` KV blocks on, recompute what has fewer."""

    def __init__(self, min_blocks: int = 16) -> None:
        self._min_blocks = min_blocks

    def mode(self, seq: Sequence, num_blocks: int) -> PreemptionMode:
        return PreemptionMode.SWAP if num_blocks >= self._min_blocks else PreemptionMode.RECOMPUTE


# --- eviction, foresight ---


class DeepestFirst:
    """An eviction policy: the deepest block of all goes first, so that the beginnings of prompts stay; among equals the
    one released earliest. Every operation is O(log n)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int]] = []  # -depth, release, block; those no longer in _releases are stale
        self._releases: dict[int, int] = {}  # of the blocks that are here: when they came
        self._num_releases = 0

    def add(self, block: int, depth: int, last_step: int) -> None:
        self._num_releases += 1
        self._releases[block] = self._num_releases
        heapq.heappush(self._heap, (-depth, self._num_releases, block))

    def hit(self, block: int) -> None:
        """How often content is found does not matter here."""

    def remove(self, block: int) -> None:
        del self._releases[block]
        if len(self._heap) > 2 * len(self._releases) + 64:
            self._heap = [entry for entry in self._heap if self._releases.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def pop(self) -> int:
        while True:
            _, release, block = heapq.heappop(self._heap)
            if self._releases.get(block) == release:
                del self._releases[block]
                return block

    def __len__(self) -> int:
        return len(self._releases)


class TwoQueues:
    """An eviction policy that remembers: 2Q (Johnson and Shasha, VLDB 1994), with least recently used first in both
    queues. New content is on probation, in `probation` of the pool. If it comes again after it was evicted from there,
    of which `remembered` pools are known, it goes to the main queue. So content that is used once, as in a scan, evicts
    no content that is used again. Every operation is O(1)."""

    def __init__(self, probation: float = 0.25, remembered: float = 0.5) -> None:
        self._shares = probation, remembered
        self._new: OrderedDict[int, None] = OrderedDict()  # blocks, the least recently released first
        self._main: OrderedDict[int, None] = OrderedDict()
        self._evicted: OrderedDict[int, None] = OrderedDict()  # content keys, the first evicted first
        self._keys: dict[int, int] = {}  # by block, until it is evicted
        self._is_main: set[int] = set()  # blocks

    def bind(self, context: PolicyContext) -> None:
        self._context = context
        self._most_new, self._most_evicted = (int(share * context.blocks.num_gpu_blocks) for share in self._shares)

    def add(self, block: int, depth: int, last_step: int) -> None:
        key = self._context.content_key(block, depth)
        assert key is not None
        if self._keys.get(block) != key:  # new content
            self._keys[block] = key
            (self._is_main.add if key in self._evicted else self._is_main.discard)(block)
        self._queue_of(block)[block] = None

    def hit(self, block: int) -> None:
        """It becomes the most recent one when it is released."""

    def remove(self, block: int) -> None:
        del self._queue_of(block)[block]

    def pop(self) -> int:
        is_new = bool(self._new) and (len(self._new) > self._most_new or not self._main)
        block, _ = (self._new if is_new else self._main).popitem(last=False)
        key = self._keys.pop(block)
        if is_new:
            self._evicted[key] = None
            if len(self._evicted) > self._most_evicted:
                self._evicted.popitem(last=False)
        return block

    def __len__(self) -> int:
        return len(self._new) + len(self._main)

    def _queue_of(self, block: int) -> OrderedDict[int, None]:
        return self._main if block in self._is_main else self._new


class ByTenant:
    """An oracle: the output length that is usual for the tenant; None, no opinion, of tenants that it does not know."""

    def __init__(self, lengths: Mapping[str, int]) -> None:
        self._lengths = dict(lengths)

    def predict(self, seq: Sequence) -> int | None:
        return self._lengths.get(seq.request.tenant or "")


class PastOutputs:
    """An oracle that learns: the mean output of the tenant's last `num` requests that ended; None before the first."""

    def __init__(self, num: int = 50) -> None:
        self._num = num
        self._lengths: dict[str, deque[int]] = {}  # by tenant

    def predict(self, seq: Sequence) -> int | None:
        lengths = self._lengths.get(seq.tenant)
        return None if lengths is None else max(sum(lengths) // len(lengths), seq.num_output_tokens + 1)

    def left(self, seq: Sequence, now_ns: int) -> None:
        if seq.finish_reason in ("stop", "length"):
            self._lengths.setdefault(seq.tenant, deque(maxlen=self._num)).append(seq.num_output_tokens)


# --- a batch composition ---


class FewPrefills:
    """Decodes first, then at most `max_prefills` prompts at a time in chunks of the budget that is left.

    The fewer prompts share a step, the sooner the first of them is done; the decodes beside them never wait.
    """

    unused_limits = ("long_prefill_token_threshold", "max_num_partial_prefills", "max_long_partial_prefills")

    def __init__(self, max_prefills: int = 1) -> None:
        self._max_prefills = max_prefills

    def compose(self, step: Step) -> None:
        step.decode()
        for seq in list(step.prefilling.values()):
            num_tokens = min(seq.num_tokens - seq.num_computed_tokens, step.token_budget)
            if num_tokens and step.reserve(seq, num_tokens):  # False: it was preempted itself
                step.schedule(seq, num_tokens)
        if not step.preempted:
            take_all_back(step)
        self._admit(step)

    def _admit(self, step: Step) -> None:
        while (seq := step.head()) is not None:
            if step.preempted and not step.made_room:
                return step.blocked(BlockedBy.PREEMPTION)
            if step.num_swapped:
                return step.blocked(BlockedBy.SWAPPED_FIRST)
            if len(step.prefilling) >= self._max_prefills:
                return step.blocked(BlockedBy.PARTIAL_PREFILLS)
            if step.token_budget == 0:
                return step.blocked(BlockedBy.TOKEN_BUDGET)
            if step.num_running + seq.num_seqs > step.limits.max_num_seqs:
                if step.make_room():  # only where the queue order is preemptive
                    continue
                return step.blocked(BlockedBy.MAX_NUM_SEQS)
            hit = step.blocks.lookup(seq)
            num_tokens = min(seq.num_tokens - hit.num_tokens, step.token_budget)
            status = step.can_admit(seq, hit.num_tokens + num_tokens, hit)  # NEVER has ended it, and says why
            if status is AllocStatus.LATER:
                if step.make_room():
                    continue
                return None
            if status is AllocStatus.OK:
                step.admit(seq, hit, num_tokens)
        return None


class BoundedSteps:
    """Another composition, one that splits prompts, within a budget with which a step is predicted to take at most
    `max_step_ms`: so are the gaps between the tokens of those that decode. Prompts get at least `min_chunk` tokens."""

    def __init__(self, of: Composition, max_step_ms: float, min_chunk: int = 16) -> None:
        self.parts, self._max_ns, self._min_chunk = (of,), int(max_step_ms * 1e6), min_chunk

    def bind(self, context: PolicyContext) -> None:
        self._step_ns = context.estimator.step_ns

    def compose(self, step: Step) -> None:
        contexts = [seq.num_tokens for seq in step.running() if seq.seq_id not in step.prefilling]
        start = max([seq.num_computed_tokens for seq in step.prefilling.values()], default=0)
        least, most = self._min_chunk, max(step.token_budget - len(contexts), self._min_chunk)
        while least < most:  # the largest chunk that fits
            size = (least + most + 1) // 2
            shape = BatchShape(len(contexts), sum(contexts), (PrefillChunk(start, size),), len(contexts) + 1)
            if self._step_ns(shape) <= self._max_ns:
                least = size
            else:
                most = size - 1
        if contexts:
            step.token_budget = min(step.token_budget, len(contexts) + least)
        self.parts[0].compose(step)


# --- a router, in front of several simulated replicas ---


class ShortPromptsApart:
    """Prompts of at most `max_tokens` tokens have replica 0 to themselves; the others go where the fewest wait."""

    def __init__(self, max_tokens: int = 256) -> None:
        self._max_tokens = max_tokens

    def route(self, request: Request, replicas: Replicas) -> int:
        if len(request.prompt_token_ids) <= self._max_tokens or len(replicas) == 1:
            return 0
        return min(replicas[1:], key=lambda one: (one.num_waiting, one.num_tokens, one.number)).number


# --- a cost model of the simulator ---


class SlowPrefill:
    """A fixed price a step, and `per_prefill_token_us` for every prefilled token."""

    def __init__(self, base_us: int = 5_000, per_prefill_token_us: int = 100) -> None:
        self.base_us = base_us
        self.per_prefill_token_us = per_prefill_token_us

    def price(self, shape: BatchShape) -> Spans:
        return Spans(forward_ns=1_000 * (self.base_us + self.per_prefill_token_us * shape.num_prefill_tokens))


class Noisy:
    """Another cost model of the same run, whose forward passes take a random factor: log-normal, `sigma` wide. `keys`
    are those of the other."""

    def __init__(self, of: str = "roofline", sigma: float = 0.1, **keys: Any) -> None:
        self._of, self._sigma, self._keys = of, sigma, keys

    def bind(self, context: CostContext) -> None:
        self._inner = context.cost(self._of, **self._keys)
        self._random = random.Random(context.seed)

    def price(self, shape: BatchShape) -> Spans:
        spans = self._inner.price(shape)
        return spans.replace(forward_ns=round(spans.forward_ns * self._random.lognormvariate(0, self._sigma)))


# --- a trace ---


def bursts(num: int = 200, rate: float = 40.0, size: int = 8, seed: int = 0) -> list[dict[str, float]]:
    """Bursts of `size` requests at one instant, `rate` requests per second in the mean (a compound Poisson process).

    Rows of the testbed's own schema (docs/traces.md). `seed` is the run's, as the file of this trace gives none.
    """
    drawn = random.Random(seed)
    rows: list[dict[str, float]] = []
    time_s = 0.0
    while len(rows) < num:
        time_s += drawn.expovariate(rate / size)
        for _ in range(min(size, num - len(rows))):
            prompt, output = drawn.randint(50, 500), drawn.randint(10, 200)
            rows.append({"arrival_time": time_s, "prompt_tokens": prompt, "output_tokens": output})
    return rows


_orders: list[WaitingQueue] = [shortest_prompt_first(), TenantsInTurn()]
_admissions: list[AdmissionPolicy] = [TenantCap(), TenantRate()]
_victim: VictimChoice = CheapestToRecompute()
_mode: PreemptionChoice = SwapWhatIsLarge()
_evictions: list[EvictionPolicy] = [DeepestFirst(), TwoQueues()]
_oracles: list[LengthOracle] = [ByTenant({}), PastOutputs()]
_compositions: list[Composition] = [FewPrefills(), BoundedSteps(FewPrefills(), 5.0)]
_router: Router = ShortPromptsApart()
_costs: list[CostModel] = [SlowPrefill(), Noisy()]
