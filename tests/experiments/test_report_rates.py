"""Rates in a report: of which part of a trace they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis import format as fmt
from analysis.load import load_run
from analysis.reports.cautions import cautions
from analysis.reports.keeping_up import began_within_s, is_closed_loop
from tests.experiments.report_kit import arms_of, ran, ran_each
from tests.experiments.test_report_referee import LIGHT, light

pytestmark = pytest.mark.usefixtures("unrendered")  # words alone are looked at


@pytest.mark.parametrize(("num_requests", "is_said"), [(40, True), (2000, False)])
def test_rates_of_traces_shorter_than_their_requests_are_said_to_be_so(
    tmp_path: Path, num_requests: int, is_said: bool
) -> None:
    ran_each(tmp_path, trace={**LIGHT, "num_requests": num_requests, "rate": 20.0})
    said = cautions({"": arms_of(tmp_path)}, 0.02)
    assert any("until the last one came; many were still in the system" in text for text in said) is is_said


def test_of_a_closed_loop_rates_are_an_outcome_and_the_time_is_that_in_which_sessions_begin(tmp_path: Path) -> None:
    turns = {**LIGHT, "min_turns": 4, "max_turns": 4, "think_time_s": 2.0}
    for name, more in (("closed", {}), ("open", {"closed_loop": False}), ("users", {"arrival": "closed_loop"})):
        ran(tmp_path / name, trace=turns | more)
    closed, opened, users = (arms_of(tmp_path / name) for name in ("closed", "open", "users"))
    assert [is_closed_loop(arm.runs[0]) for (arm,) in (closed, opened, users)] == [True, False, True]
    row = {"prompt_tokens": 10, "output_tokens": 2}
    rows = [row | {"arrival_time": 50.0 * turn, "session_id": "a", "turn": turn} for turn in range(3)]
    ran(tmp_path / "recorded", trace=rows)
    assert not is_closed_loop(load_run(tmp_path / "recorded")), "turns came late, and did not wait for each other"
    closed[0].runs[0].summary["steadiness"] |= {"is_outrun": None, "in_system": [0.0, 0.0, 50.0]}
    _, why = light(closed, "load")
    assert ": the last sessions begin while ever more requests are in the system, though the queue does not grow" in why
    assert why.endswith("; the offered rate is an outcome, as later turns wait for earlier ones")
    assert ": all sessions began at once, so their number bounds the queue; " in light(users, "load")[1]
    (said,) = [
        text for text in cautions({"": closed}, 0.02) if text.startswith("Rates are until the last request came")
    ]
    began_s, lasted_s = began_within_s(closed[0].runs[0]), closed[0].runs[0].summary["throughput"]["duration_s"]
    assert 0 < began_s < 0.5 * lasted_s, "ten sessions, five a second"
    numbers = f"after {fmt.seconds(began_s)} of {fmt.seconds(lasted_s)}"
    assert f", the last one {numbers}; from then on" in said
    loads = {"rate = 1": closed, "rate = 2": closed}
    (said,) = [text for text in cautions(loads, 0.02) if "Rates are until the last request came" in text]
    assert f", the last one {numbers} at rate = 1 and {numbers} at rate = 2; from then on" in said, "once for all loads"


def test_rates_of_some_runs_say_of_which(tmp_path: Path) -> None:
    ran_each(tmp_path, num_seeds=3, trace=LIGHT)
    arms = arms_of(tmp_path)
    runs = [run for arm in arms for run in arm.runs]
    for short, words in (
        (runs, "Traces are short: on average 10.0 req/s came"),
        (
            [run for run in runs if run.manifest["seed"] == 2],
            "in 2 of 6 runs (every arm; seed 2) on average 10.0 req/s came and 5.00",
        ),
        (arms[0].runs, f"in 3 of 6 runs ({arms[0].name}) on average 10.0 req/s came"),
        (arms[0].runs[:1], f"in 1 of 6 runs ({arms[0].name}; seed 0) 10.0 req/s came"),
    ):
        for run in runs:
            served = 5.0 if run in short else 9.9
            run.summary["throughput"] |= {"offered_per_s": 10.0 + 1e-9, "requests_per_s": served + 1e-9}
        (said,) = [text for text in cautions({"": arms}, 0.02) if "Traces are short" in text]
        assert words in said.replace(fmt.SPACE, " ")
