"""What a device makes of a plan's rows: random tokens, forks, drops and stops."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from testbed.core.outcome import FinishReason, Outcome, StepResult
from testbed.core.plan import ScheduledSequence
from tests.properties.members import Member
from tests.properties.setups import VOCAB_SIZE

SHARE_STOPPED = 0.03  # of what is drawn is ended by the device: a stop string


def draw(rows: Sequence[ScheduledSequence], members: Mapping[int, Member], rng: random.Random) -> StepResult:
    """An outcome for each row that samples and is not forced, in the order of the rows."""
    drawn = [row for row in rows if row.samples and not row.forced]
    outcomes: dict[int, Outcome] = {}
    searched: dict[int, list[ScheduledSequence]] = {}
    for row in drawn:
        if members[row.seq_id].job.is_beam:
            searched.setdefault(row.group_id, []).append(row)
            continue
        tokens = [rng.randrange(VOCAB_SIZE) for _ in range(row.num_samples)]
        outcomes[row.seq_id] = Outcome(row.seq_id, (tokens[0],), _stop(rng), tuple(tokens[1:]))
    for beams in searched.values():
        for outcome in _search(beams, members, rng):
            outcomes[outcome.seq_id] = outcome
    return StepResult(1, tuple(outcomes[row.seq_id] for row in drawn) or None)


def _search(rows: list[ScheduledSequence], members: Mapping[int, Member], rng: random.Random) -> list[Outcome]:
    """A random beam search: each row gets some of at most `width` children; none: the beam is dropped.

    Some are left, unless the request has outputs already: it would end with none at all.
    """
    job = members[rows[0].seq_id].job
    may_end = bool(job.outputs) and rng.random() < 0.1
    wanted = job.width if rng.random() < 0.5 else rng.randint(0 if may_end else 1, job.width)
    children: list[list[int]] = [[] for _ in rows]
    for _ in range(wanted):
        rng.choice(children).append(rng.randrange(VOCAB_SIZE))
    outcomes = []
    for row, tokens in zip(rows, children, strict=True):
        if not tokens or rng.random() < 0.05:  # a beam may be dropped and its forks live
            outcomes.append(Outcome(row.seq_id, (), None, tuple(tokens), dropped=True))
        else:
            outcomes.append(Outcome(row.seq_id, (tokens[0],), _stop(rng), tuple(tokens[1:])))
    return outcomes


def _stop(rng: random.Random) -> FinishReason | None:
    return FinishReason.STOP if rng.random() < SHARE_STOPPED else None
