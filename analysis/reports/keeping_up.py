"""Which arms kept up with the arrivals: judged once for each load, so that all texts of a report agree.

It does not know how the texts use the verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from analysis import format as fmt
from analysis.comparison.arms import Arm, counted, replicates
from analysis.load import Run

State = Literal["beyond", "untold", "at once", "kept up"]
_MAX_LISTED = 6  # arms
_FIRST: tuple[State, ...] = ("beyond", "untold", "at once", "kept up")  # an arm has the first one that a run has


class Judged(NamedTuple):
    """An arm at one load. runs: the runs in this state, of num_runs in total. are_replicates: no run is a repeat of
    another. num_untold: the number of runs that could not be judged, for an arm beyond its capacity."""

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
    """Whether there are runs, and no request of any run finished: all were ignored, aborted or unfinished."""
    runs = [run for arm in arms for run in arm.runs]
    return bool(runs) and not any(run.summary["num_finished"] for run in runs)


def judged(arms: Sequence[Arm]) -> list[Judged]:
    """The state of each arm: "beyond" its capacity if any of its runs is, else not judged if any run is not."""
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
    """The state of one run: "untold" if the trace does not tell, "at once" if all requests arrived at once."""
    known = run.summary["steadiness"]
    if known is None:
        return "at once"
    return "untold" if known["is_outrun"] is None else "beyond" if known["is_outrun"] else "kept up"


def began_within_s(run: Run) -> float:
    """The time from the first arrival to that of the last session, or request outside sessions."""
    requests = run.requests.sort_values("arrival_ns", kind="stable")
    first_turns = requests[~requests["session_id"].duplicated() | requests["session_id"].isna()]
    return float(first_turns["arrival_ns"].max() - requests["arrival_ns"].min()) / 1e9


def is_closed_loop(run: Run) -> bool:
    """Whether turns of sessions waited for the turns before them."""
    return bool(run.manifest["trace"].get("is_closed_loop"))


def who(every: Sequence[Judged], state: State, most: int | None = None) -> str:
    """The arms in a state, by name (the first _MAX_LISTED), or by number if there are more than `most`; "" for none. If
    not all runs of an arm are in that state, their number is added."""
    those = [one for one in every if one.state == state]
    if len(those) == len(every) > 1 and all(one.is_whole for one in those):
        return "every arm"
    if most is not None and len(those) > most:
        return ("every arm" if len(those) == len(every) else f"{len(those)} of {len(every)} arms") + _in_which(those)
    return fmt.listing([fmt.names([one.name]) + _in_which([one]) for one in those], _MAX_LISTED)


def _in_which(those: Sequence[Judged]) -> str:
    """The number of their runs in the state, and of runs not judged, as a suffix; "" if all runs are in it."""
    num, num_of = sum(len(one.runs) for one in those), sum(one.num_runs for one in those)
    if num == num_of:
        return ""
    what = "replicates" if len(those) == 1 and those[0].are_replicates else "runs"
    num_untold = sum(one.num_untold for one in those)
    return f" (in {num} of {num_of} {what}{f', {num_untold} not judged' if num_untold else ''})"
