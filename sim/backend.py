"""The simulated backend: estimates the time of a plan instead of running it. Knows cost models; no clock, no queues."""

from __future__ import annotations

from itertools import groupby
from typing import ClassVar

from mypy_extensions import mypyc_attr

from sim.cost.base import CostModel, priced
from testbed.core.outcome import Outcome, Spans
from testbed.core.plan import BatchPlan, BatchShape, ScheduledSequence
from testbed.core.value import Value
from testbed.streams import draw


class SchedulerTime(Value):
    """The scheduler's CPU time before the device starts, added to the cost model's schedule_ns: a constant for each
    step, for each of its sequences, and for each 1,024 tokens of their contexts. (A real run measures its own.)"""

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
    """The time and the outcomes of a simulated step. duration_ns is at least 1, even if the step only preempts."""

    FIELDS: ClassVar = ("duration_ns", "spans", "outcomes")
    __slots__ = FIELDS

    def __init__(self, duration_ns: int, spans: Spans, outcomes: tuple[Outcome, ...] | None = None) -> None:
        self.duration_ns = duration_ns
        self.spans = spans
        self.outcomes = outcomes


class SimBackend:
    """Estimates step times. Outputs are forced, so no tokens are sampled, except in beam search, which is imitated at
    random.

    A beam search keeps `beam_width` live beams. In each step, every new beam chooses its parent among the old beams,
    all equally likely. An old beam without children is dropped; one with m children has m - 1 forks. All beams of the
    first step come from the prompt's only row. Tokens are made up: siblings differ, and no token stops a sequence, so a
    search lasts until its length limit. Choices and tokens are hashes of (seed, group, position): they do not depend on
    the rest of the batch or on the number of the step. Outcomes have the real engine's order (real/sampling/beams.py).

    seed: of the random choices. vocab_size: made-up tokens are below it. eos_token_id: the model's; never made up.
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
        """Returns the spans of one step. Raises ConfigError if a user's cost model returns an invalid value."""
        spans = priced(self.cost, shape)
        own_ns = self._scheduler_time.of(shape)
        if not own_ns:
            return spans
        return Spans(spans.schedule_ns + own_ns, spans.prepare_ns, spans.swap_ns, spans.forward_ns, spans.sample_ns)

    def of_replica(self, number: int) -> SimBackend:
        """Returns a backend with the same cost model for another replica, with its own seed. Replica 0 keeps this
        backend's seed."""
        seed = draw(self._seed, "replica", number) if number else self._seed
        return SimBackend(
            self.cost, seed=seed, vocab_size=self._vocab_size, eos_token_id=self._eos_token_id,
            scheduler_time=self._scheduler_time,
        )  # fmt: skip

    def transfer_ns(self, num_blocks_out: int, num_blocks_in: int) -> int:
        """Returns the time of a transfer of these blocks over the link: the swap span of a step that does only that."""
        return self._price(BatchShape(0, 0, (), 0, num_blocks_out, num_blocks_in)).swap_ns

    def _outcomes(self, plan: BatchPlan) -> tuple[Outcome, ...] | None:
        """Returns one outcome for each beam row that samples, in row order; None without such rows."""
        rows = [row for row in plan.scheduled if row.samples and not row.forced]
        assert all(row.sampling.beam_width for row in rows), "the simulator draws for beams alone"
        outcomes: list[Outcome] = []
        for _, members in groupby(rows, key=lambda row: row.group_id):
            outcomes += self._fork(list(members))
        return tuple(outcomes) or None

    def _fork(self, rows: list[ScheduledSequence]) -> list[Outcome]:
        """Returns the outcomes of the beams of one group: their children, or that they are dropped."""
        position = rows[0].start + rows[0].num_tokens
        assert all(row.start + row.num_tokens == position for row in rows), "the beams of a group are of one length"
        num_children = [0] * len(rows)
        for beam in range(rows[0].sampling.beam_width):
            num_children[self._draw(rows[0], position, beam) % len(rows)] += 1
        outcomes = []
        for index, (row, num) in enumerate(zip(rows, num_children, strict=True)):
            tokens = self._tokens(row, self._draw(rows[0], position, ~index), num)
            outcomes.append(Outcome(row.seq_id, tokens[:1], forks=tokens[1:], dropped=not tokens))
        return outcomes

    def _tokens(self, row: ScheduledSequence, first: int, num_tokens: int) -> tuple[int, ...]:
        """Returns `num_tokens` different tokens, counting up from the one after `first`; none stops the sequence."""
        tokens: list[int] = []
        token = first
        while len(tokens) < num_tokens:
            token = (token + 1) % self._vocab_size
            if token != self._eos_token_id and token not in row.sampling.stop_token_ids:
                tokens.append(token)
        return tuple(tokens)

    def _draw(self, row: ScheduledSequence, position: int, index: int) -> int:
        """Returns 64 random bits, keyed by the request's seed (testbed/seeds.py) if it has one, else by group_id."""
        if row.sampling.seed is not None:
            return draw(row.sampling.seed, "beams", position, index)
        return draw(self._seed, "beams of group", row.group_id, position, index)
