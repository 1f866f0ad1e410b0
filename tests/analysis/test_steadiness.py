"""An engine that is outrun is called so, and one that is only busy is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.request_columns import Requests
from analysis.steadiness import is_outrun, outrun_note, steadiness, waiting_by_quarter
from experiments import simulate
from testbed.records.schema import REQUEST_COLUMNS
from tests.analysis.runs import request_row, table

S = 10**9


def requests(arrivals_s: list[float], waits_s: list[float | None]) -> Requests:
    rows = [
        request_row(
            request_id=f"r{i}", arrival_ns=round(at * S),
            first_scheduled_ns=None if wait is None else round((at + wait) * S),
        )
        for i, (at, wait) in enumerate(zip(arrivals_s, waits_s, strict=True))
    ]  # fmt: skip
    return Requests.of(table(rows, REQUEST_COLUMNS))


def test_numbers_waiting_are_areas_over_quarters() -> None:
    arrivals = [0.0, 1.0, 2.0, 3.0, 4.0]  # quarters of 1 s
    assert waiting_by_quarter(requests(arrivals, [0.0] * 5)) == (0.0, 0.0, 0.0)
    assert waiting_by_quarter(requests(arrivals, [None] * 5)) == pytest.approx((2.0, 3.0, 4.0))
    assert waiting_by_quarter(requests(arrivals, [0.0, 0.5, 2.0, 0.0, 0.0])) == pytest.approx((0.5, 1.0, 1.0))
    assert waiting_by_quarter(requests([1.0, 1.0], [0.0, 5.0])) == ()


def test_growth_must_go_on_and_be_more_than_chance() -> None:
    assert is_outrun((10.0, 60.0, 110.0), 1000)
    assert not is_outrun((10.0, 110.0, 60.0), 1000), "a burst that is over"
    assert not is_outrun((10.0, 30.0, 60.0), 1000), "three standard deviations are 67"
    assert not is_outrun((), 1000)
    assert is_outrun((1000.0, 2000.0, 4000.0), 100_000)
    assert not is_outrun((1000.0, 2000.0, 3000.0), 100_000), "5 % of what came are 2,500"


@pytest.mark.parametrize(("rate", "outrun"), [(10.0, False), (60.0, False), (90.0, True), (200.0, True)])
def test_a_server_beyond_its_capacity_is_outrun(tmp_path: Path, rate: float, outrun: bool) -> None:
    """Steps of 0.1 s, one token each, eight at a time: 80 requests/s."""
    run = simulate(
        {"num_requests": 600, "rate": rate, "arrival": "deterministic", "output": {"kind": "constant", "value": 1}},
        folder=tmp_path / "run", model="tiny", cost={"name": "constant", "step_s": 0.1},
        scheduler={"name": "vllm_v1", "max_num_seqs": 8},
    )  # fmt: skip
    assert run.summary["steadiness"]["is_outrun"] is outrun
    note = outrun_note(run.summary)
    assert (note is not None) is outrun
    assert note is None or "the latencies depend on how long the trace is" in note


def test_a_frame_says_what_the_files_say(tmp_path: Path) -> None:
    run = simulate({"num_requests": 400, "rate": 60.0}, folder=tmp_path / "run")
    assert steadiness(Requests.of(run.requests)) == run.summary["steadiness"]
