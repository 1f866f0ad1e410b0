"""The simulated backend: prices a plan instead of running it. Knows cost models; knows no clock and no queues."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby
from typing import NamedTuple

from sim.cost.base import CostModel, price_decodes
from testbed.errors import ConfigError, RequestError
from testbed.plan import BatchPlan, BatchShape, Outcome, RunSpans, ScheduledSequence, Spans
from testbed.streams import draw

_FIRST_PIECE = 16  # steps of a run, priced at once, before it is known how many fit; most runs are shorter


class SimWork(NamedTuple):
    """What a plan costs, step by step. A step lasts at least 1 ns, also one that only preempts."""

    durations_ns: Sequence[int]
    spans: Sequence[Spans]
    outcomes: tuple[Outcome, ...] | None = None


class SimBackend:
    """Prices plans. Rows are forced and draw no tokens, except beams: which fork and which are dropped is drawn.

    A beam search keeps `beam_width` live beams. In each step, every one that lives on draws its parent among the beams
    before, all equally likely: a beam that nobody drew is dropped, one drawn m times has m - 1 forks. From the prompt,
    the one row there is, all of them come. Tokens are made up; siblings differ, and none stops a sequence, so a search
    lasts until its length limit. All is a hash of (seed, group, position): it depends neither on the rest of the batch
    nor on how steps are counted. The order of the outcomes is the real engine's (real/beams.py).

    seed: of the draws. vocab_size: made-up tokens lie below it. eos_token_id: the model's, which is not made up.
    schedule_ns and schedule_ns_per_seq: what the scheduler itself costs on the CPU before the device starts, for each
    step and for each of its rows, beyond what the cost model says. (A real run measures its own.)
    """

    def __init__(
        self,
        cost: CostModel,
        *,
        seed: int = 0,
        vocab_size: int = 32_000,
        eos_token_id: int | None = None,
        schedule_ns: int = 0,
        schedule_ns_per_seq: int = 0,
    ) -> None:
        self.cost = cost
        self._prices_runs = hasattr(cost, "price_decodes")
        self._schedule_ns = schedule_ns
        self._schedule_ns_per_seq = schedule_ns_per_seq
        self._seed = seed
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id

    def start(self, plan: BatchPlan, limit_ns: int | None = None) -> SimWork:
        """limit_ns: of several steps, none is priced that begins so long after the first, or not much later."""
        shape = plan.shape
        if plan.num_steps > 1:
            return self._run(plan, limit_ns)
        spans = self._scheduled(self.cost.price(shape), shape)
        if min(spans) < 0:
            raise self._negative((spans,))
        return SimWork((max(1, sum(spans)),), (spans,), self._outcomes(plan) if plan.has_beams else None)

    def _negative(self, spans: Sequence[Spans]) -> ConfigError:
        worst = min(spans, key=min)
        name, value = min(worst._asdict().items(), key=lambda item: item[1])
        return ConfigError(f"cost: {type(self.cost).__name__} returned {name}={value}; a span is 0 ns or more")

    def of_replica(self, number: int) -> SimBackend:
        """The same prices for another replica, with draws of its own; replica 0 has this one's."""
        seed = draw(self._seed, "replica", number) if number else self._seed
        return SimBackend(
            self.cost, seed=seed, vocab_size=self._vocab_size, eos_token_id=self._eos_token_id,
            schedule_ns=self._schedule_ns, schedule_ns_per_seq=self._schedule_ns_per_seq,
        )  # fmt: skip

    def transfer_ns(self, num_blocks_out: int, num_blocks_in: int) -> int:
        """What the link takes to move these blocks: the swap part of the price of a step that does nothing else."""
        return self.cost.price(BatchShape(0, 0, (), 0, num_blocks_out, num_blocks_in)).swap_ns

    def _run(self, plan: BatchPlan, limit_ns: int | None) -> SimWork:
        """Prices of the steps of a plan, in pieces: how many are wanted is known from what they last."""
        left = plan.num_steps
        first_piece = 1 if plan.shape.prefills or not self._prices_runs else _FIRST_PIECE
        piece = left if limit_ns is None else min(left, first_piece)
        spans, durations_ns = self._piece(plan, 0, piece)
        if limit_ns is None:
            return SimWork(durations_ns, spans)
        all_spans, all_ns = [spans], durations_ns
        left_ns = limit_ns - sum(durations_ns)
        while left_ns > 0 and len(all_ns) < left:
            piece = min(left - len(all_ns), left_ns // all_ns[-1] + 1)
            spans, durations_ns = self._piece(plan, len(all_ns), piece)
            all_spans.append(spans)
            all_ns = all_ns + durations_ns
            left_ns -= sum(durations_ns)
        return SimWork(all_ns, spans if len(all_spans) == 1 else _joined(all_spans))

    def _piece(self, plan: BatchPlan, start: int, num_steps: int) -> tuple[Sequence[Spans], list[int]]:
        """Spans and durations of some steps of a plan, from step `start` on."""
        shape = plan.shape_of(start) if start else plan.shape
        if shape.prefills:
            each = [self.cost.price(plan.shape_of(start + index)) for index in range(num_steps)]
            spans: Sequence[Spans] = tuple([self._scheduled(one, shape) for one in each])
        else:
            spans = price_decodes(self.cost, shape, num_steps)
            if isinstance(spans, RunSpans):
                return self._priced_at_once(spans, shape)
            spans = tuple([self._scheduled(one, shape) for one in spans])
        if min(map(min, spans)) < 0:
            raise self._negative(spans)
        return spans, [max(1, sum(one)) for one in spans]

    def _priced_at_once(self, spans: RunSpans, shape: BatchShape) -> tuple[RunSpans, list[int]]:
        first = self._scheduled(spans.first, shape)
        if first is not spans.first:
            spans = RunSpans(first, spans.forward_ns)
        rest_ns = sum(first) - first.forward_ns  # the same in each step
        durations_ns = [rest_ns + ns for ns in spans.forward_ns]
        if min(spans.forward_ns) < 0 or min(first) < 0:
            raise self._negative(spans)
        return spans, durations_ns if min(durations_ns) > 0 else [max(1, ns) for ns in durations_ns]

    def _scheduled(self, spans: Spans, shape: BatchShape) -> Spans:
        """The price with the scheduler's own time, which is the same for each step of a plan."""
        if not (self._schedule_ns or self._schedule_ns_per_seq):
            return spans
        own_ns = self._schedule_ns + (shape.num_decodes + len(shape.prefills)) * self._schedule_ns_per_seq
        return spans._replace(schedule_ns=spans.schedule_ns + own_ns)

    def _outcomes(self, plan: BatchPlan) -> tuple[Outcome, ...] | None:
        """One for each beam row that samples, in the order of the rows."""
        assert plan.num_steps == 1, "beams part at each step"
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
        """64 random bits: by the request's seed (experiments/seeds.py), else by the group's number."""
        if row.sampling.seed is not None:
            return draw(row.sampling.seed, "beams", position, index)
        return draw(self._seed, "beams of group", row.group_id, position, index)


def _joined(pieces: list[Sequence[Spans]]) -> Sequence[Spans]:
    """The spans of one run."""
    runs = [piece for piece in pieces if isinstance(piece, RunSpans)]
    if len(runs) < len(pieces):
        return tuple(chain.from_iterable(pieces))
    return RunSpans(runs[0].first, list(chain.from_iterable([run.forward_ns for run in runs])))


def _outcome(seq_id: int, tokens: tuple[int, ...]) -> Outcome:
    return Outcome(seq_id, tokens[:1], forks=tokens[1:], dropped=not tokens)


def refuse_unforced(request_id: str, num_output_tokens: int | None) -> None:
    """The simulator cannot know what a model would say. Raises RequestError for an output that is not forced."""
    if num_output_tokens is None:
        raise RequestError(
            f"request {request_id!r} forces no output, and the simulator has no model to sample from; "
            "give it output_tokens or output_token_ids"
        )
