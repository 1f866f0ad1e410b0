"""What a device makes of a plan's rows, from nothing but the rows: random tokens, forks, drops and stops."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import groupby

from testbed.core.outcome import FinishReason, Outcome, StepResult
from testbed.core.plan import ScheduledSequence
from tests.properties.setups import VOCAB_SIZE

SHARE_STOPPED = 0.03  # of what is drawn is ended by the device: a stop string


def result_of(end_ns: int, outcomes: tuple[Outcome, ...] | None) -> StepResult:
    """The one place that makes a step's result."""
    return StepResult(end_ns, outcomes)


def draw(rows: Sequence[ScheduledSequence], rng: random.Random) -> tuple[Outcome, ...] | None:
    """An outcome for each row that samples and is not forced, in the order of the rows."""
    outcomes: list[Outcome] = []
    drawn = [row for row in rows if row.samples and not row.forced]
    for _, members in groupby(drawn, key=lambda row: row.group_id):
        group = list(members)
        if group[0].sampling.beam_width > 1:
            outcomes += _search(group, rng)
        else:
            outcomes += [_outcome(row, _tokens(row.num_samples, rng), rng) for row in group]
    return tuple(outcomes) or None


def _search(beams: list[ScheduledSequence], rng: random.Random) -> list[Outcome]:
    """A random beam search: at least one child and at most `beam_width`; a beam without any is dropped."""
    width = beams[0].sampling.beam_width
    children: list[list[int]] = [[] for _ in beams]
    for _ in range(width if rng.random() < 0.5 else rng.randint(1, width)):
        rng.choice(children).append(rng.randrange(VOCAB_SIZE))
    outcomes = []
    for row, tokens in zip(beams, children, strict=True):
        if not tokens or rng.random() < 0.05:  # a beam may be dropped and its forks live
            outcomes.append(Outcome(row.seq_id, (), None, tuple(tokens), dropped=True))
        else:
            outcomes.append(_outcome(row, tokens, rng))
    return outcomes


def _outcome(row: ScheduledSequence, tokens: list[int], rng: random.Random) -> Outcome:
    """The first token continues the sequence, the others begin new ones."""
    stop, forks = _stop(rng), tuple(tokens[1:])
    fork_stops = tuple(_stop(rng) for _ in forks) if forks and rng.random() < 0.1 else ()
    return Outcome(row.seq_id, (tokens[0],), stop, forks, fork_stops=fork_stops)


def _tokens(num_tokens: int, rng: random.Random) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def _stop(rng: random.Random) -> FinishReason | None:
    return FinishReason.STOP if rng.random() < SHARE_STOPPED else None
