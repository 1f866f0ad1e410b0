"""Recorded chats at a higher load: a trace that is sped up says what it does to them, and copies are more users."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.load import load_run
from analysis.measures.turns import Turns, squeezed_by, squeezed_note, turns_of
from experiments import find_capacity
from experiments.capacity.command import warnings
from experiments.runs.run import execute
from tests.experiments.kit import TINY, Say, config_of, latest, write_rows

SERVER = (*TINY, "cost=constant", "cost.step_s=0.01", "cache.num_gpu_blocks=4096", "scheduler.max_num_seqs=64")


def chats(folder: Path, *, gap_s: float = 1.0, think_s: float | None = None) -> Path:
    """100 chats, one each second, of three turns of 0.2 s, one `gap_s` after another (or `think_s` after its end)."""
    rows = [
        {"session_id": f"s{chat}", "turn": turn, "prompt_tokens": 10 + 30 * turn, "output_tokens": 20,
         **({"arrival_time": chat + turn * gap_s} if think_s is None or not turn else {"think_time": think_s})}
        for chat in range(100) for turn in range(3)
    ]  # fmt: skip
    return write_rows(folder / "chats.jsonl", rows)


def note_of(said: str) -> str:
    return next((line for line in said.splitlines() if "recorded pauses" in line), "")


@pytest.mark.parametrize(
    ("faster", "by", "share"),
    [
        ("trace.rate_scale=4", "trace.rate_scale=4 ", "0.0% of 200"),
        ("trace.rate_scale=8", "trace.rate_scale=8 ", "100.0% of 200"),
        ("trace.transforms=[{name: scale_rate, factor: 8}]", "the transformation scale_rate ", "100.0% of 200"),
        ("trace.transforms=[{name: speed_up, factor: 8}]", "the transformation speed_up ", "100.0% of 200"),
        ("trace.transforms=[{name: set_rate, rate: 24, by: warp}]", "the transformation set_rate ", "100.0% of 200"),
        ("trace.rate_scale=0.5", None, ""),
        ("trace.transforms=[{name: copies, num: 3, within_s: 5}]", None, ""),
        ("trace.transforms=[{name: thin, fraction: 0.5}]", None, ""),
    ],
)
def test_a_run_says_that_pauses_of_chats_are_shortened_and_what_became_of_them(here, say: Say, faster, by, share):
    """A turn takes 0.2 s: a gap of 0.25 s is longer, of 0.125 s is not."""
    said = note_of(say("run", *SERVER, "trace=jsonl", f"trace.path={chats(here)}", faster).success())
    assert (by is None) == (said == "")
    if by is not None:
        assert f"note         {by}scales the recorded pauses within sessions, too: {share} later turns" in said


def test_turns_that_wait_for_each_other_and_single_requests_are_not_squeezed(here, say: Say):
    faster = (*SERVER, "trace.rate_scale=9", "trace=jsonl")
    assert not note_of(say("run", *faster, f"trace.path={chats(here, think_s=0.5)}").success())
    alone = write_rows(
        here / "t.jsonl", [{"arrival_time": i, "prompt_tokens": 5, "output_tokens": 3} for i in range(9)]
    )
    assert not note_of(say("run", *faster, f"trace.path={alone}").success())
    turns = Turns(9, 0)
    assert squeezed_note("x", turns, is_closed_loop=True) is None
    assert squeezed_note("x", turns, is_closed_loop=False) is not None
    assert squeezed_note("x", Turns(9, 1), is_closed_loop=True) is not None, "some have recorded instants"
    assert squeezed_by({"name": "jsonl"}, speed=4.0) == "backend.speed=4"


def test_a_sweep_says_it_once_of_its_worst_point(here, say: Say):
    said = say("run", "-m", *SERVER, "trace=jsonl", f"trace.path={chats(here)}", "trace.rate_scale=1,2,8").success()
    (line,) = [line for line in said.splitlines() if "recorded pauses" in line]
    assert "100.0% of 200 later turns" in line


def test_a_turn_is_early_if_the_one_before_had_not_ended_when_it_came():
    frame = pd.DataFrame({
        "session_id": ["a", "b", "a", "a", None], "turn": [1, 1, 3, 2, None],
        "arrival_ns": [0, 0, 9, 5, 1], "finish_ns": [5.0, np.nan, 30.0, 9.0, 2.0],
    })  # fmt: skip
    assert turns_of(frame) == Turns(2, 0), "each came as the one before ended"
    later = pd.DataFrame({"session_id": ["b", "a"], "turn": [2, 4], "arrival_ns": [50, 29], "finish_ns": [60.0, 31.0]})
    assert turns_of(pd.concat([frame, later])) == Turns(4, 2), "the first turn of b never ended"
    assert turns_of(frame[frame["session_id"].isna()]) == Turns(0, 0)


def test_copies_of_chats_keep_their_hits_where_there_is_room(tmp_path: Path):
    settings = {"trace": {"name": "jsonl", "path": str(chats(tmp_path))}}
    once = load_run(execute(config_of(SERVER, **settings), tmp_path / "once").folder)
    more = {**settings["trace"], "transforms": [{"name": "copies", "num": 4, "within_s": 20.0}]}
    four = load_run(execute(config_of(SERVER, trace=more), tmp_path / "four").folder)
    assert len(four.requests) == 4 * len(once.requests) == 1200
    assert four.summary["prefix_hit_rate"] == once.summary["prefix_hit_rate"] > 0.5
    assert turns_of(four.requests) == Turns(800, 0)


def test_a_search_says_that_it_squeezes_chats_or_searches_the_number_of_their_copies(tmp_path: Path):
    given = (*SERVER, "scheduler.max_num_seqs=2", "trace=jsonl", f"trace.path={chats(tmp_path)}", "slo.ttft_s=0.5",
             "slo.attainment=0.95")  # fmt: skip
    (squeezed,) = find_capacity(*latest(*given), folder=tmp_path / "rate").found
    assert squeezed.arm.rate_key == "trace.rate_scale"
    (said,) = [said for said in warnings(squeezed) if "recorded pauses" in said]
    assert "whose number can be searched (docs/capacity.md)" in said
    assert squeezed.at_kept is not None
    assert f"{squeezed.at_kept.num_early / 200:.1%} of 200 later turns" in said
    copies = "trace.transforms=[{name: shift, offset_s: 1}, {name: copies, num: 1, within_s: 30}]"
    out = tmp_path / "copies"
    (found,) = find_capacity(*latest(*given, copies), folder=out, tolerance=0.1).found
    kept, failed = found.bracket
    assert found.arm.rate_key == "trace.transforms[1].num"
    assert not any("recorded pauses" in said for said in warnings(found))
    assert kept is not None
    assert failed is not None
    assert 1 < kept < failed <= 1.1 * kept
    assert found.capacity == pytest.approx(kept * found.arm.per_value)
    loads = {value: load.num_requests for value, load in found.tried if load.is_whole}
    assert loads[1.0] == 300 < loads[2.0] == 600
    again = find_capacity(*latest(*given, copies), folder=out, tolerance=0.1).found[0]
    assert again.bracket == found.bracket
