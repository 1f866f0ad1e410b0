"""Which arms kept up with what came: judged once at each load, so that all of a report's texts say the same of an arm.

It must not know what the texts make of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from analysis import format as fmt
from analysis.comparison.arms import Arm, counted, replicates
from analysis.load import Run

State = Literal["beyond", "untold", "at once", "kept up"]
_FIRST: tuple[State, ...] = ("beyond", "untold", "at once", "kept up")  # what an arm is, if a run is


class Judged(NamedTuple):
    """An arm at one load. runs: those that are in this state, of num_runs. are_replicates: none is another's repeat.
    num_untold: runs of an arm beyond its capacity that were not judged."""

    name: str
    state: State
    runs: tuple[Run, ...]
    num_runs: int
    are_replicates: bool
    num_untold: int = 0

    @property
    def is_whole(self) -> bool:
        return len(self.runs) == self.num_runs


def serves_nothing(arms: Sequence[Arm]) -> bool:
    """Whether there are runs, and no request of any came to its end: all were ignored, aborted or cut off."""
    runs = [run for arm in arms for run in arm.runs]
    return bool(runs) and not any(run.summary["num_finished"] for run in runs)


def judged(arms: Sequence[Arm]) -> list[Judged]:
    """Each arm in one state: beyond its capacity if a run is, else not judged if one is not."""
    found = []
    for arm in arms:
        runs = counted(arm)
        states = list(map(state_of, runs))
        state: State = min(states, key=_FIRST.index, default="kept up")
        those = tuple(run for run, its in zip(runs, states, strict=True) if its == state)
        num_untold = sum(its in ("untold", "at once") for its in states) if state == "beyond" else 0
        found.append(Judged(arm.name, state, those, len(runs), len(runs) == len(replicates(arm)), num_untold))
    return found


def state_of(run: Run) -> State:
    """Of one run: "untold" where the trace ends before it shows, "at once" where all its requests came so."""
    known = run.summary.get("steadiness")
    if known is None:
        return "at once"
    return "untold" if known["is_outrun"] is None else "beyond" if known["is_outrun"] else "kept up"


def who(every: Sequence[Judged], state: State, most: int | None = None) -> str:
    """The arms in that state, "" for none; of more than `most`, how many. Each with its runs, where not all are so."""
    those = [one for one in every if one.state == state]
    if len(those) == len(every) > 1 and all(one.is_whole for one in those):
        return "every arm"
    if most is not None and len(those) > most:
        return ("every arm" if len(those) == len(every) else f"{len(those)} of {len(every)} arms") + _in_which(those)
    return fmt.listing([one.name + _in_which([one]) for one in those])


def _in_which(those: Sequence[Judged]) -> str:
    """In how many of their runs, and of how many others it cannot be told; "" for all."""
    num, num_of = sum(len(one.runs) for one in those), sum(one.num_runs for one in those)
    if num == num_of:
        return ""
    what = "replicates" if len(those) == 1 and those[0].are_replicates else "runs"
    num_untold = sum(one.num_untold for one in those)
    return f" (in {num} of {num_of} {what}{f', {num_untold} not judged' if num_untold else ''})"
