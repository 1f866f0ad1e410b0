"""The simulated backend: prices a plan instead of running it. Knows cost models; knows no clock and no queues."""

from __future__ import annotations

from itertools import groupby
from operator import index
from typing import Any, ClassVar

from mypy_extensions import mypyc_attr

from sim.cost.base import CostModel
from testbed.core.outcome import Outcome, Spans
from testbed.core.plan import BatchPlan, BatchShape, ScheduledSequence
from testbed.core.value import Value
from testbed.errors import ConfigError, RequestError
from testbed.foreign_text import shown
from testbed.streams import draw


class SchedulerTime(Value):
    """What the scheduler itself costs on the CPU before the device starts, beyond what the cost model says: for each
    step, each of its rows, and each 1,024 tokens of their contexts. (A real run measures its own.)"""

    FIELDS: ClassVar = ("ns", "ns_per_seq", "ns_per_1k_tokens")
    __slots__ = FIELDS

    def __init__(self, ns: int = 0, ns_per_seq: int = 0, ns_per_1k_tokens: int = 0) -> None:
        self.ns = ns
        self.ns_per_seq = ns_per_seq
        self.ns_per_1k_tokens = ns_per_1k_tokens

    def of(self, shape: BatchShape) -> int:
        time_ns = self.ns + (shape.num_decodes + len(shape.prefills)) * self.ns_per_seq
        if not self.ns_per_1k_tokens:
            return time_ns
        num_tokens = shape.decode_context_tokens + sum([chunk.start + chunk.num_tokens for chunk in shape.prefills])
        return time_ns + num_tokens * self.ns_per_1k_tokens // 1024


@mypyc_attr(free_list_len=1)
class SimWork(Value):
    """What a step costs. It lasts at least 1 ns, also one that only preempts."""

    FIELDS: ClassVar = ("duration_ns", "spans", "outcomes")
    __slots__ = FIELDS

    def __init__(self, duration_ns: int, spans: Spans, outcomes: tuple[Outcome, ...] | None = None) -> None:
        self.duration_ns = duration_ns
        self.spans = spans
        self.outcomes = outcomes


class SimBackend:
    """Prices plans. Rows are forced and draw no tokens, except beams: which fork and which are dropped is drawn.

    A beam search keeps `beam_width` live beams. In each step, every one that lives on draws its parent among the beams
    before, all equally likely: a beam that nobody drew is dropped, one drawn m times has m - 1 forks. From the prompt,
    the one row there is, all of them come. Tokens are made up; siblings differ, and none stops a sequence, so a search
    lasts until its length limit. All is a hash of (seed, group, position): it depends neither on the rest of the batch
    nor on how steps are counted. The order of the outcomes is the real engine's (real/beams.py).

    seed: of the draws. vocab_size: made-up tokens lie below it. eos_token_id: the model's, which is not made up.
    """

    def __init__(
        self,
        cost: CostModel,
        *,
        seed: int = 0,
        vocab_size: int = 32_000,
        eos_token_id: int | None = None,
        scheduler_time: SchedulerTime | None = None,
    ) -> None:
        self.cost = cost
        self._scheduler_time = scheduler_time or SchedulerTime()
        self._seed = seed
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id

    def start(self, plan: BatchPlan) -> SimWork:
        spans = self._price(plan.shape)
        return SimWork(max(1, spans.total_ns), spans, self._outcomes(plan) if plan.has_beams else None)

    def _price(self, shape: BatchShape) -> Spans:
        """The spans of one step. Raises ConfigError for what a cost model of a user's may not return."""
        cost: Any = self.cost  # a user's model may answer anything
        priced = cost.price(shape)
        spans = priced if isinstance(priced, Spans) and _is_whole(priced) else self._checked(priced)
        own_ns = self._scheduler_time.of(shape)
        if not own_ns:
            return spans
        return Spans(spans.schedule_ns + own_ns, spans.prepare_ns, spans.swap_ns, spans.forward_ns, spans.sample_ns)

    def _checked(self, priced: Any) -> Spans:
        """What a model returned, as spans of Python's integers: others (numpy's) are not exact."""
        model = type(self.cost).__name__
        try:
            schedule_ns, prepare_ns, swap_ns, forward_ns, sample_ns = map(index, priced)
        except (TypeError, ValueError):
            given = tuple(priced) if isinstance(priced, Spans | tuple) else priced
            raise ConfigError(
                f"cost: {model} returned {shown(given)} for a step; it must be testbed.core.outcome.Spans, five whole "
                "numbers of ns"
            ) from None
        whole = Spans(schedule_ns, prepare_ns, swap_ns, forward_ns, sample_ns)
        for name in Spans.FIELDS:
            if getattr(whole, name) < 0:
                raise ConfigError(f"cost: {model} returned {name}={getattr(whole, name)}; a span is 0 ns or more")
        return whole

    def of_replica(self, number: int) -> SimBackend:
        """The same prices for another replica, with draws of its own; replica 0 has this one's."""
        seed = draw(self._seed, "replica", number) if number else self._seed
        return SimBackend(
            self.cost, seed=seed, vocab_size=self._vocab_size, eos_token_id=self._eos_token_id,
            scheduler_time=self._scheduler_time,
        )  # fmt: skip

    def transfer_ns(self, num_blocks_out: int, num_blocks_in: int) -> int:
        """What the link takes to move these blocks: the swap part of the price of a step that does nothing else."""
        return self._price(BatchShape(0, 0, (), 0, num_blocks_out, num_blocks_in)).swap_ns

    def _outcomes(self, plan: BatchPlan) -> tuple[Outcome, ...] | None:
        """One for each beam row that samples, in the order of the rows."""
        rows = [row for row in plan.scheduled if row.samples and not row.forced]
        assert all(row.sampling.beam_width for row in rows), "the simulator draws for beams alone"
        outcomes: list[Outcome] = []
        for _, members in groupby(rows, key=lambda row: row.group_id):
            outcomes += self._part(list(members))
        return tuple(outcomes) or None

    def _part(self, rows: list[ScheduledSequence]) -> list[Outcome]:
        """How the beams of one group go on."""
        position = rows[0].start + rows[0].num_tokens
        assert all(row.start + row.num_tokens == position for row in rows), "the beams of a group are of one length"
        num_children = [0] * len(rows)
        for beam in range(rows[0].sampling.beam_width):
            num_children[self._draw(rows[0], position, beam) % len(rows)] += 1
        return [
            _outcome(row.seq_id, self._tokens(row, self._draw(rows[0], position, ~index), num))
            for index, (row, num) in enumerate(zip(rows, num_children, strict=True))
        ]

    def _tokens(self, row: ScheduledSequence, first: int, num_tokens: int) -> tuple[int, ...]:
        """Different tokens, from a drawn one on, none of which stops the sequence."""
        tokens: list[int] = []
        token = first
        while len(tokens) < num_tokens:
            token = (token + 1) % self._vocab_size
            if token != self._eos_token_id and token not in row.sampling.stop_token_ids:
                tokens.append(token)
        return tuple(tokens)

    def _draw(self, row: ScheduledSequence, position: int, index: int) -> int:
        """64 random bits: by the request's seed (testbed/seeds.py), else by the group's number."""
        if row.sampling.seed is not None:
            return draw(row.sampling.seed, "beams", position, index)
        return draw(self._seed, "beams of group", row.group_id, position, index)


def _is_whole(spans: Spans) -> bool:
    """Whether these are Python's integers, and none is negative."""
    is_positive = spans.schedule_ns >= 0 and spans.prepare_ns >= 0 and spans.swap_ns >= 0
    return is_positive and spans.forward_ns >= 0 and spans.sample_ns >= 0 and isinstance(spans.total_ns, int)


def _outcome(seq_id: int, tokens: tuple[int, ...]) -> Outcome:
    return Outcome(seq_id, tokens[:1], forks=tokens[1:], dropped=not tokens)


def refuse_unforced(request_id: str, num_output_tokens: int | None) -> None:
    """The simulator cannot know what a model would say. Raises RequestError for an output that is not forced."""
    if num_output_tokens is None:
        raise RequestError(
            f"request {request_id!r} forces no output, and the simulator has no model to sample from; "
            "give it output_tokens or output_token_ids"
        )
