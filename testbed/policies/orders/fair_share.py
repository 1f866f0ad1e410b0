"""Fair share between tenants: the virtual token counter of Sheng et al., "Fairness in Serving LLMs" (OSDI 2024)."""

from __future__ import annotations

from collections.abc import Iterator

from mypy_extensions import mypyc_attr

from testbed.checks import require_whole
from testbed.core.sequence import Sequence
from testbed.foreign_text import Unchecked
from testbed.lazy_heap import LazyHeap, Rank
from testbed.policies.orders.meter import PromptMeter
from testbed.policies.queue_order import FCFS


@mypyc_attr(allow_interpreted_subclasses=True)
class VirtualTokenCounter:
    """Serves the waiting tenant with the smallest counter; first come, first served within a tenant.

    A tenant's counter grows by `input_weight` for each prompt token that is computed, and by `output_weight` for each
    token that is emitted; cached and recomputed tokens are free. Requests without a tenant count as one tenant.

    As in the paper, a prompt is charged when it is admitted (`remove`), so that one step does not admit from a single
    tenant only; tokens that are not computed (cached, preempted, aborted) are refunded. A tenant that queues again
    starts at least from the smallest counter among the queued tenants or, if there is none, from that of the tenant
    that left the queue last: idle time earns nothing. The counters of two tenants that always have requests waiting
    differ by at most 2 * max(input_weight * longest prompt, output_weight * tokens in a batch) (theorem 4.4).

    Costs: push, remove, served O(1), and O(log tenants) amortised in `head` for each tenant whose counter changed.
    Iteration is by tenant. Memory: one number for each tenant ever seen.
    """

    goes_by = "tenant"

    def __init__(self, input_weight: Unchecked = 1, output_weight: Unchecked = 2) -> None:
        self._input_weight = require_whole("scheduler.queue_order.input_weight", input_weight, 0)
        self._output_weight = require_whole("scheduler.queue_order.output_weight", output_weight, 0)
        self._counters: dict[str, int] = {}
        self._queues: dict[str, FCFS] = {}  # by tenant; without empty ones
        self._tenants: LazyHeap[str, str] = LazyHeap()  # tenants that queue, by counter; updated by `_renew`
        self._moved: dict[str, None] = {}  # tenants whose place in the heap must be updated
        self._last_tenant = ""  # the tenant that left the queue last; before that all counters are 0
        self._meter = PromptMeter()
        self._advanced: dict[str, int] = {}  # prompt tokens charged but not computed yet, by running request
        self._num_waiting = 0

    def counter(self, tenant: str) -> int:
        return self._counters.get(tenant, 0)

    def push(self, seq: Sequence) -> None:
        tenant = _tenant(seq)
        if tenant not in self._queues:
            self._lift(tenant)
        self._queues.setdefault(tenant, FCFS()).push(seq)
        self._moved[tenant] = None
        self._num_waiting += 1

    def push_preempted(self, seq: Sequence) -> None:
        """Requeues a sequence. Its tenant was not idle, so its counter is not lifted."""
        self._refund(seq)
        tenant = _tenant(seq)
        self._queues.setdefault(tenant, FCFS()).push_preempted(seq)
        self._moved[tenant] = None  # its head has changed
        self._num_waiting += 1

    def head(self, now_ns: int) -> Sequence | None:
        self._renew()
        tenant = self._tenants.first()
        return None if tenant is None else self._queues[tenant].head(now_ns)

    def remove(self, seq: Sequence) -> None:
        """Removes a sequence that is admitted, or that ends (`left` follows), and charges its prompt."""
        self.pass_over(seq)
        advanced = self._advanced[seq.request_id] = self._meter.missing(seq)
        self._charge(_tenant(seq), self._input_weight * advanced)

    def pass_over(self, seq: Sequence) -> None:
        """Removes a sequence that is not admitted: nothing is charged, so its tenant may be next again."""
        tenant = _tenant(seq)
        queue = self._queues[tenant]
        queue.remove(seq)
        self._num_waiting -= 1
        if not queue:
            del self._queues[tenant]
            if tenant in self._tenants:
                self._tenants.remove(tenant)
            self._last_tenant = tenant
        self._moved[tenant] = None  # its head has changed

    def served(self, seq: Sequence, num_tokens: int, num_emitted: int, now_ns: int) -> None:
        cost = self._output_weight * num_emitted
        advanced = self._advanced.get(seq.request_id, 0)
        if advanced:
            num_new = self._meter.count(seq, num_tokens, num_emitted)
            missing = self._advanced[seq.request_id] = self._meter.missing(seq)
            cost += self._input_weight * (num_new + missing - advanced)
        if cost:
            self._charge(_tenant(seq), cost)

    def left(self, seq: Sequence, now_ns: int) -> None:
        if len(seq.members) == 1:  # the last sequence of its request
            self._refund(seq)
            self._meter.forget(seq)

    def rank(self, seq: Sequence, now_ns: int) -> Rank:
        return self.counter(_tenant(seq)), seq.seq_id

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def _lift(self, tenant: str) -> None:
        self._renew()
        rank = self._tenants.first_rank()
        least = self.counter(self._last_tenant) if rank is None else rank[0]
        self._counters[tenant] = max(self.counter(tenant), least)

    def _renew(self) -> None:
        for tenant in self._moved:
            queue = self._queues.get(tenant)
            if queue is not None:
                head = queue.head(0)
                assert head is not None
                self._tenants.put(tenant, (self.counter(tenant), head.seq_id), tenant)
        self._moved.clear()

    def _charge(self, tenant: str, cost: int) -> None:
        self._counters[tenant] = self.counter(tenant) + cost
        self._moved[tenant] = None

    def _refund(self, seq: Sequence) -> None:
        """Refunds what was charged for prompt tokens that will not be computed, or not now."""
        advanced = self._advanced.pop(seq.request_id, 0)
        if advanced:
            self._charge(_tenant(seq), -self._input_weight * advanced)


def _tenant(seq: Sequence) -> str:
    return seq.request.tenant or ""
