"""Victim choice: which sequence is preempted when a running sequence cannot grow.

A choice guarantees progress if one running sequence is always spared until it ends: then every sequence ends, however
small the pool is, although others may be preempted many times. Each class states whether it does so, for the queue
order fcfs with victims that return to the front. A rule that spares no sequence (for example: preempt the one admitted
first) may let two prompts that do not fit together preempt each other forever, if blocks are allocated by chunks. Such
a run ends with an error that names the requests (`testbed/core/thrash.py`).

A group of sequences is one entry, its first member (`together` has all of them). It is preempted as a whole.
"""

from __future__ import annotations

from typing import Any

from mypy_extensions import mypyc_attr

from testbed.blocks.kv_sequence import num_distinct
from testbed.core.interfaces import WaitingQueue
from testbed.core.sequence import Sequence
from testbed.errors import ConfigError
from testbed.policies.admission import final_num_tokens
from testbed.policies.context import PolicyContext
from testbed.policies.oracle import has_no_opinion


@mypyc_attr(allow_interpreted_subclasses=True)
class MostRecentlyAdmitted:
    """The last in running order: the sequence admitted or swapped in last (vLLM's first engine, nano-vllm).

    `decode_first` changes that order where prefills are unfinished. Guarantees progress: the first in running order is
    spared, and without swaps and several partial prefills it stays the first until it ends.
    """

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        return running[next(reversed(running))]


@mypyc_attr(allow_interpreted_subclasses=True)
class LastInQueueOrder:
    """The sequence that the queue would serve last: the largest rank, then the latest arrival.

    For a queue without ranks (fcfs), the latest arrival. Ranks are evaluated at `now_ns`, which matters only for orders
    in which the differences of ranks change with time.
    Guarantees progress if the queue's ranks of two sequences never swap places (fcfs, priority, deadlines, shortest
    job or remaining work first): the one in front is spared. Orders by service received (fair shares, feedback queues)
    or by waiting time (response ratio) guarantee nothing.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self._queue: Any = None

    def bind_queue(self, queue: WaitingQueue) -> None:
        """Called once, before the first choice."""
        self._queue = queue if hasattr(queue, "rank") else None

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        queue, now_ns = self._queue, self.now_ns
        if queue is None:
            return running[max(running)]
        return max(running.values(), key=lambda seq: (queue.rank(seq, now_ns), seq.seq_id))


@mypyc_attr(allow_interpreted_subclasses=True)
class LeastProgress:
    """The sequence that has emitted the fewest tokens, the latest arrival among equals.

    Guarantees progress: emitted tokens are never lost, and the sequence that has emitted most is spared.
    """

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        return min(running.values(), key=lambda seq: (sum(one.num_output_tokens for one in seq.together), -seq.seq_id))


@mypyc_attr(allow_interpreted_subclasses=True)
class MostBlocks:
    """The sequence with the most KV blocks, the latest arrival among equals: so there are few victims.

    Guarantees progress only if prompts are allocated whole (`kv_rules.allocate`): a victim is then preempted for a
    sequence that emits a token, which is never lost. It spares no sequence, so if blocks are allocated by chunks, two
    prompts may preempt each other forever.
    """

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        return max(
            running.values(), key=lambda seq: (num_distinct([one.block_table for one in seq.together]), seq.seq_id)
        )


@mypyc_attr(allow_interpreted_subclasses=True)
class LongestRemaining:
    """The sequence with the most remaining output, as predicted by the oracle; the latest arrival among equals.

    Without a prediction, the request's `max_tokens` is used, else max_model_len.
    Guarantees progress if predictions never rise: the sequence that is nearest to its end is spared.
    Raises ConfigError if the scheduler has no oracle.
    """

    asks = ("oracle",)

    def __init__(self) -> None:
        self._context: PolicyContext | None = None

    def bind(self, context: PolicyContext) -> None:
        if has_no_opinion(context.oracle):
            raise ConfigError(
                "scheduler.victim is 'longest_remaining', but scheduler.oracle is none; choose an oracle, "
                "or another victim"
            )
        self._context = context

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        context = self._context
        assert context is not None, "bind comes first"
        limits, oracle = context.limits, context.oracle
        return max(
            running.values(), key=lambda seq: (final_num_tokens(seq, limits, oracle) - seq.num_tokens, seq.seq_id)
        )


@mypyc_attr(allow_interpreted_subclasses=True)
class LowestPriority:
    """The largest priority value, then the latest arrival (vLLM V1 under priority scheduling).

    Guarantees progress: the order never changes, and the first of the running sequences is spared.
    """

    goes_by = "priority"

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        return max(running.values(), key=lambda seq: (seq.request.priority, seq.request.arrival_ns, seq.seq_id))
