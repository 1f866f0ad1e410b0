"""Queue orders by the size of a job: shortest and longest first, by prompt or by predicted output length."""

from __future__ import annotations

from collections.abc import Callable

from mypy_extensions import mypyc_attr

from testbed.checks import choose
from testbed.core.sequence import Sequence
from testbed.errors import ConfigError
from testbed.foreign_text import Unchecked
from testbed.lazy_heap import Rank
from testbed.policies.context import LengthOracle, PolicyContext
from testbed.policies.oracle import has_no_opinion
from testbed.policies.orders.keyed import KeyedQueue


@mypyc_attr(allow_interpreted_subclasses=True)
class JobSize:
    """Sizes of jobs in tokens, by one of `MEASURES`.

    The oracle predicts a sequence's output length. Without a prediction, the longest that the model allows is used;
    `bind` rejects an oracle that never predicts.
    """

    def __init__(self, by: Unchecked) -> None:
        self._by = choose("scheduler.queue_order.by", by, MEASURES)
        self.asks = () if by == "prompt" else ("oracle",)
        self._measure = MEASURES[by]
        self._oracle: LengthOracle | None = None
        self._max_model_len = 0

    def bind(self, context: PolicyContext) -> None:
        """Raises ConfigError if the measure needs an oracle and there is none."""
        if self._by != "prompt" and has_no_opinion(context.oracle):
            raise ConfigError(
                f"scheduler.queue_order goes by {self._by} tokens, which no one knows with scheduler.oracle=none; "
                "choose perfect, noisy or binned, or an order that goes by the prompt (sjf)"
            )
        self._oracle = context.oracle
        self._max_model_len = context.limits.max_model_len

    def of(self, seq: Sequence) -> int:
        return self._measure(self, seq)

    def prompt(self, seq: Sequence) -> int:
        return seq.num_prompt_tokens

    def output(self, seq: Sequence) -> int:
        assert self._oracle is not None, "bind comes before the first push"
        predicted = self._oracle.predict(seq)
        return max(1, self._max_model_len - seq.num_prompt_tokens) if predicted is None else predicted

    def total(self, seq: Sequence) -> int:
        return seq.num_prompt_tokens + self.output(seq)

    def remaining(self, seq: Sequence) -> int:
        """Tokens to emit (at least one, as a prediction can be too low) and tokens to compute, without cache hits. A
        token in flight counts as emitted."""
        num_left = self.output(seq) - seq.num_output_tokens - seq.num_placeholders
        return max(1, num_left) + seq.num_tokens - seq.num_computed_tokens


MEASURES: dict[str, Callable[[JobSize, Sequence], int]] = {
    "prompt": JobSize.prompt,
    "output": JobSize.output,
    "total": JobSize.total,
    "remaining": JobSize.remaining,
}


def shortest_job(by: Unchecked = "prompt", preemptive: bool = False) -> KeyedQueue:
    """Shortest job first, then order of arrival. by: see `MEASURES`; all except `prompt` need an oracle."""
    size = JobSize(by)

    def key(seq: Sequence) -> Rank:
        return size.of(seq), seq.seq_id

    return KeyedQueue(key, bind=size.bind, preemptive=preemptive, asks=size.asks)


def shortest_remaining(preemptive: bool = False) -> KeyedQueue:
    """Shortest remaining processing time first, in tokens.

    preemptive: the running sequence with the most work left yields to a head with less. It cannot preempt that one at
    once: after a preemption by recompute, all of its tokens so far must be computed again.
    """
    return shortest_job("remaining", preemptive)


def longest_job(by: Unchecked = "prompt") -> KeyedQueue:
    """Longest job first, then order of arrival. by: see `MEASURES`; all except `prompt` need an oracle."""
    size = JobSize(by)

    def key(seq: Sequence) -> Rank:
        return -size.of(seq), seq.seq_id

    return KeyedQueue(key, bind=size.bind, asks=size.asks)
