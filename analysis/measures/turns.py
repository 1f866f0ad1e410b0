"""Sessions whose turns come at recorded instants: what a trace that runs faster than recorded does to them.

A user sends the next turn when the answer before it was read. Recorded instants that are squeezed shorten these pauses:
turns come before the one before has ended, and prompts hit blocks that would have been evicted meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from analysis.measures.notes import Note
from analysis.reading.request_columns import RequestColumns


class Turns(NamedTuple):
    """Turns after another of their session, and how many of them arrived before that one had ended."""

    num: int
    num_early: int


def turns_of(requests: Any) -> Turns:
    """Counts the later turns of request records (a frame, a table or rows); a turn that never ended is still open."""
    columns = RequestColumns.of(requests)
    columns = columns.where(columns.is_known("session_id"))
    if not len(columns):
        return Turns(0, 0)
    session, turn = columns.codes("session_id").codes, columns.whole("turn")
    order = np.lexsort((turn, session))
    is_later = np.diff(session[order]) == 0
    waits_ns = columns.numbers("arrival_ns")[order][1:] - columns.numbers("finish_ns")[order][:-1]
    return Turns(int(is_later.sum()), int((is_later & ~(waits_ns >= 0)).sum()))


def squeezed_by(trace: Mapping[str, Any], speed: float = 1.0) -> str:
    """The setting by which a trace runs faster than recorded (for a rate that is set: or slower); "" if there is none.
    trace: its settings. speed: of its replay."""
    if trace.get("rate_scale", 1.0) > 1:
        return f"trace.rate_scale={trace['rate_scale']:g}"
    for step in trace.get("transforms") or ():
        if step.get("factor", 1.0) > 1 or step.get("by") == "warp":
            return f"the transformation {step['name']}"
    return f"backend.speed={speed:g}" if speed > 1 else ""


def squeezed_note(by: str, turns: Turns, *, is_closed_loop: bool | None) -> Note | None:
    """The note on sessions that are squeezed `by` a setting; None if their turns wait for each other, or there are
    none. is_closed_loop: whether some turns wait."""
    if not by or not turns.num or (is_closed_loop and not turns.num_early):
        return None
    share = turns.num_early / turns.num
    return Note(
        f"{by} scales the recorded pauses within sessions, too: {share:.1%} of {turns.num:,} later turns came before "
        "the turn before had ended. For more users with their own pauses, take the transformation copies "
        "(docs/traces.md#more-users)",
        "squeezed sessions",
        share,
    )
