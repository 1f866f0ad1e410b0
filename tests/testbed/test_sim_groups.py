"""The simulator's beams: which fork and which are dropped is drawn, the same in every run."""

from __future__ import annotations

from collections import Counter

import pytest
from scipy.stats import chisquare

from sim.backend import SchedulerTime, SimBackend, SimWork
from testbed.core.batch import Batch
from testbed.core.outcome import Outcome, Spans
from testbed.core.plan import BatchPlan, BatchShape, ScheduledSequence
from testbed.core.request import SamplingParams
from testbed.made_rows import MadeRows

VOCAB_SIZE = 50


class FreeOfCharge:
    def price(self, shape: BatchShape) -> Spans:
        return Spans(forward_ns=3)


def backend(seed: int = 0, **options) -> SimBackend:
    return SimBackend(FreeOfCharge(), seed=seed, vocab_size=VOCAB_SIZE, **options)


def beams(group_id: int, position: int, num_rows: int, width: int = 4, **options) -> list[ScheduledSequence]:
    """The rows of one group whose next tokens stand at `position`."""
    sampling = SamplingParams(beam_width=width, **options)
    num_samples = width if num_rows == 1 else 1
    return [
        ScheduledSequence(10 * group_id + i, position - 1, 1, [1], True, False, [0], sampling, num_samples, group_id)
        for i in range(num_rows)
    ]


def plan_of(rows: list[ScheduledSequence], *, has_beams: bool = True) -> BatchPlan:
    shape = BatchShape(len(rows), len(rows), (), len(rows))
    return BatchPlan(0, shape, MadeRows(tuple(rows)), has_beams=has_beams)


def outcomes(engine: SimBackend, rows: list[ScheduledSequence]) -> tuple[Outcome, ...]:
    work = engine.start(plan_of(rows))
    assert work.duration_ns == 3
    assert work.outcomes is not None
    return work.outcomes


def forced(seq_id: int) -> ScheduledSequence:
    return ScheduledSequence(seq_id, 0, 1, [1], True, True, [0], SamplingParams(n=3), 3, seq_id)


def num_children(outcome: Outcome) -> int:
    return len(outcome.tokens) + len(outcome.forks)


def test_a_prompt_forks_into_the_width():
    (outcome,) = outcomes(backend(), beams(3, 20, 1))
    assert (outcome.seq_id, outcome.dropped, outcome.stop) == (30, False, None)
    assert len(outcome.tokens) == 1
    assert len(outcome.forks) == 3


@pytest.mark.parametrize("num_rows", [2, 3, 4])
def test_the_width_is_kept_and_every_row_has_its_outcome_in_its_place(num_rows):
    for position in range(20, 60):
        rows = beams(3, position, num_rows)
        found = outcomes(backend(), rows)
        assert [outcome.seq_id for outcome in found] == [row.seq_id for row in rows]
        assert sum(map(num_children, found)) == 4
        for outcome in found:
            assert outcome.dropped == (not outcome.tokens)
            assert len(outcome.tokens) == 1 or not outcome.forks


def test_one_beam_alone_goes_on():
    (outcome,) = outcomes(backend(), beams(3, 20, 1, width=1))
    assert (len(outcome.tokens), outcome.forks, outcome.dropped) == (1, (), False)


def test_siblings_differ_and_nothing_that_is_made_up_stops_a_sequence():
    engine = backend(eos_token_id=7)
    seen: set[int] = set()
    for position in range(20, 400):
        for outcome in outcomes(engine, beams(3, position, 2, width=10, stop_token_ids=(5, 6))):
            tokens = (*outcome.tokens, *outcome.forks)
            assert len(set(tokens)) == len(tokens)
            seen |= set(tokens)
    assert seen == set(range(VOCAB_SIZE)) - {5, 6, 7}


def test_beams_of_a_group_do_not_all_say_the_same():
    first = {tuple(o.tokens[0] for o in outcomes(backend(), beams(3, p, 2)) if o.tokens) for p in range(20, 60)}
    assert sum(len(tokens) == 2 and tokens[0] != tokens[1] for tokens in first) > 10


def test_parents_are_drawn_with_equal_chances():
    engine = backend(seed=2)
    counts: Counter[int] = Counter()
    num_dropped = 0
    for position in range(1, 2001):
        found = outcomes(engine, beams(3, position, 4))
        counts.update({index: num_children(outcome) for index, outcome in enumerate(found)})
        num_dropped += sum(outcome.dropped for outcome in found)
    assert chisquare([counts[index] for index in range(4)]).pvalue > 1e-3
    assert abs(num_dropped / 8000 - 0.75**4) < 0.02  # multinomial: nobody of four draws it


def test_draws_depend_on_seed_group_and_position_alone():
    rows = beams(3, 20, 4)
    alone = outcomes(backend(), rows)
    others = [forced(90), *beams(5, 33, 4), *rows, *beams(6, 20, 1), forced(91)]
    engine = backend()
    together = outcomes(engine, others)
    assert [outcome.seq_id for outcome in together] == [50, 51, 52, 53, 30, 31, 32, 33, 60]
    assert together[4:8] == alone
    assert outcomes(engine, rows) == alone  # nothing is remembered
    series = {
        tuple(outcome.replace(seq_id=0) for p in range(20, 30) for outcome in outcomes(engine, beams(g, p, 4)))
        for engine, g in ((backend(0), 3), (backend(1), 3), (backend(0), 4), (backend(2**70), 3))
    }
    assert len(series) == 4
    seeded = [
        [outcome.replace(seq_id=0) for outcome in outcomes(engine, beams(g, 20, 4, seed=seed))]
        for engine, g, seed in ((backend(0), 3, 9), (backend(1), 4, 9), (backend(0), 3, 8))
    ]
    assert seeded[0] == seeded[1] != seeded[2], "a request's own seed decides alone"


def test_a_beam_row_in_a_chunk_that_does_not_sample_has_no_outcome():
    (row,) = beams(3, 20, 1)
    assert backend().start(plan_of([row.replace(samples=False), forced(90)])).outcomes is None


def test_a_plan_without_beams_never_looks_at_its_rows():
    batch = Batch(1)
    batch.is_over = True  # whose rows nobody can make
    plan = BatchPlan(0, BatchShape(1, 1, (), 1), batch)
    with pytest.raises(AssertionError):
        _ = plan.scheduled
    assert SimBackend(FreeOfCharge()).start(plan).outcomes is None


def test_replicas_draw_apart_and_the_first_as_one_engine_alone():
    def works(engine: SimBackend) -> list[SimWork]:
        return [engine.start(plan_of(beams(3, position, 4))) for position in range(20, 60)]

    alone = SimBackend(FreeOfCharge(), seed=5, vocab_size=11, eos_token_id=7, scheduler_time=SchedulerTime(40))
    first, second, third, again = (works(alone.of_replica(number)) for number in (0, 1, 2, 1))
    assert first == works(alone)
    assert second == again
    assert second != first != third != second
    assert {work.duration_ns for work in second} == {43}
    said = {token for work in second for outcome in work.outcomes or () for token in (*outcome.tokens, *outcome.forks)}
    assert said == {*range(11)} - {7}
