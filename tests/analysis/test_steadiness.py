"""An engine that is outrun is called so, and one that is only busy is not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from analysis.load import Run
from analysis.measures.steadiness import LIKELY, ends_growing, is_outrun, outrun_note, steadiness, waiting_of
from analysis.reading.request_columns import Requests
from experiments import simulate
from tests.analysis.runs import requests_of

S = 10**9
Waits = Sequence[float | None]  # in s; None: without an end


def requests(arrivals_s: list[float], waits_s: Waits, stays_s: Waits = ()) -> Requests:
    """Each is scheduled when it has waited, and ends when it has stayed, for as long as said; None: not yet."""
    instants = zip(arrivals_s, waits_s, stays_s or [None] * len(arrivals_s), strict=True)
    rows = [[None if s is None else round((at + s) * S) for s in (0.0, wait, stay)] for at, wait, stay in instants]
    names = ("arrival_ns", "first_scheduled_ns", "finish_ns")
    return Requests.of(requests_of(*[dict(zip(names, row, strict=True)) for row in rows]))


def served(arrivals_s: list[float], stays_s: Waits) -> Requests:
    """Scheduled on arrival, and in the system for as long as said."""
    return requests(arrivals_s, [0.0] * len(arrivals_s), stays_s)


def outrun(found: Requests) -> bool | None:
    known = steadiness(found)
    assert known is not None
    verdict: bool | None = known["is_outrun"]
    return verdict


def test_overload_that_is_taken_in_at_once_is_told_by_what_is_in_the_system() -> None:
    arrivals = [i * 0.25 for i in range(200)]  # 4 requests/s for 50 s
    assert outrun(served(arrivals, [3.0] * 200)) is False
    assert outrun(served(arrivals, [2.0 + at * 1.5 for at in arrivals])) is True, "1.6 requests/s are served"
    assert outrun(served(arrivals, [3.0] * 20 + [None] * 180)) is True, "the rest was never done"


def test_a_trace_shorter_than_its_requests_is_not_judged() -> None:
    assert outrun(served([float(i) for i in range(10)], [20.0] * 10)) is None, "few requests, long outputs"
    assert outrun(served([i / 450 for i in range(60)], [2.6] * 60)) is None, "it may only be filling up"
    assert outrun(served([float(i) for i in range(10)], [2.0] * 10)) is False, "a short and light run"
    assert outrun(served([float(i) for i in range(200)], [60.0] * 200)) is False, "long outputs, filled at half"


def test_growth_that_paused_is_not_judged() -> None:
    """Stays of 4, then 3, then 12 s, four a second: the queue is longest where the trace ends."""
    arrivals = [i * 0.25 for i in range(200)]
    stays = [4.0 if at < 25 else 3.0 if at < 32 else 12.0 for at in arrivals]
    assert outrun(served(arrivals, stays)) is None
    assert outrun(served(arrivals, [3.0] * 200)) is False


def test_one_burst_at_the_end_of_a_short_trace_is_not_judged() -> None:
    """Light traffic for 26 s; then 72 of 150 requests in 4 s, which wait for one another."""
    arrivals = [i / 3 for i in range(78)] + [26 + i / 18 for i in range(72)]
    waits: list[float | None] = [0.0] * 78 + [i / 8 for i in range(72)]
    found = requests(arrivals, waits)
    assert waiting_of(found).num[1] == 0.0
    assert outrun(found) is None


@pytest.mark.parametrize(("middle_s", "late_s"), [(1.0, 9.0), (0.0, 6.5)])
def test_a_long_trace_that_ends_while_its_queue_grows_is_not_judged(middle_s: float, late_s: float) -> None:
    """16.7 requests/s for 180 s, and a backlog in the last quarter."""
    arrivals = [i * 0.06 for i in range(3000)]
    waits: list[float | None] = [  # or stays
        1.0 if at < 86 else middle_s if at < 129 else (at - 129) / 43 * late_s for at in arrivals
    ]
    known = steadiness(served(arrivals, waits))
    assert known is not None
    assert known["is_outrun"] is None
    assert ends_growing({"steadiness": known, "num_requests": 3000}) == "in_system"
    before, middle, last = known["in_system"]
    assert 39 < last - min(before, middle) < 75, "one standard deviation, and 2.5 % of what came"
    assert outrun(served(arrivals, [min(wait or 0.0, 1.0) for wait in waits])) is False


@pytest.mark.parametrize("num_stragglers", [0, 10, 40])
def test_a_few_that_come_late_hide_no_overload(num_stragglers: int) -> None:
    """20 requests/s for 50 s, of which 10 are served; the last ones come in the two minutes after the queue is gone."""
    arrivals = [i / 20 for i in range(1000)] + [120 + i * 120 / 40 for i in range(num_stragglers)]
    waits: list[float | None] = [i / 20 for i in range(1000)] + [0.0] * num_stragglers
    assert outrun(requests(arrivals, waits)) is True
    assert outrun(requests(arrivals, [0.0] * len(arrivals))) is not True


def test_where_nearly_all_come_at_once_the_others_are_the_time() -> None:
    """960 at once, of which ten a second are served, and one a second afterwards."""
    arrivals = [0.0] * 960 + [float(i) for i in range(1, 41)]
    found = waiting_of(requests(arrivals, [i / 10 for i in range(1000)]))
    assert len(found.num) == 3
    assert found.num[0] > found.num[1] > found.num[2] > 0
    assert waiting_of(requests([0.0] * 1000, [i / 10 for i in range(1000)])).num == ()


def test_what_was_ignored_does_not_wait_for_ever() -> None:
    assert waiting_of(requests([float(i) for i in range(100)], [None] * 100, [0.0] * 100)).num == (0.0, 0.0, 0.0)


def test_numbers_waiting_are_areas_over_quarters() -> None:
    arrivals = [0.0, 1.0, 2.0, 3.0, 4.0] * 4  # quarters of 1 s
    assert waiting_of(requests(arrivals, [0.0] * 20)).num == (0.0, 0.0, 0.0)
    assert waiting_of(requests(arrivals, [None] * 20)).num == pytest.approx((8.0, 12.0, 16.0))
    assert waiting_of(requests(arrivals, [0.0, 0.5, 2.0, 0.0, 0.0] * 4)).num == pytest.approx((2.0, 4.0, 4.0))
    assert waiting_of(requests([1.0, 1.0], [0.0, 5.0])).num == ()


def test_growth_must_go_on_and_be_more_than_chance() -> None:
    assert is_outrun((10.0, 60.0, 110.0), 1000)
    assert not is_outrun((10.0, 110.0, 60.0), 1000), "a burst that is over"
    assert not is_outrun((10.0, 30.0, 60.0), 1000), "three standard deviations are 67"
    assert not is_outrun((10.0, 30.0, 110.0), 1000), "a fifth of it until the third quarter: a burst at the end"
    assert not is_outrun((10.0, 90.0, 110.0), 1000), "it levels off"
    assert not is_outrun((), 1000)
    assert is_outrun((1000.0, 2000.0, 4000.0), 100_000)
    assert not is_outrun((1000.0, 2000.0, 3000.0), 100_000), "5 % of what came are 2,500"
    assert not is_outrun((10.0, 60.0, 110.0), 1000, 2.5), "of work with sizes that differ three are 106"
    assert [is_outrun((0.0, rise / 2, rise), 1000, 1.0, LIKELY) for rise in (22.0, 23.0)] == [False, True]
    assert [is_outrun((0.0, rise / 2, rise), 100_000, 1.0, LIKELY) for rise in (990.0, 1010.0)] == [False, True]


def run_of(folder: Path, **trace: Any) -> Run:
    """Steps of 0.1 s, one token each, eight at a time: at most 80 requests/s."""
    return simulate(
        {"arrival": "deterministic", "output": {"kind": "constant", "value": 1}, **trace}, folder=folder,
        model="tiny", cost={"name": "constant", "step_s": 0.1}, scheduler={"name": "vllm_v1", "max_num_seqs": 8},
    )  # fmt: skip


@pytest.mark.parametrize(("rate", "verdict"), [(10.0, False), (60.0, None), (90.0, True), (200.0, True)])
def test_a_server_beyond_its_capacity_is_outrun(tmp_path: Path, rate: float, verdict: bool | None) -> None:
    """It serves less than 80 requests/s as prompts fill its budget: of 60 that come in a second it serves 54, and of
    600 that is not enough to tell."""
    run = run_of(tmp_path / "run", num_requests=600, rate=rate)
    assert run.summary["steadiness"]["is_outrun"] is verdict
    note = outrun_note(run.summary)
    assert (note is not None) is (verdict is True)
    assert note is None or "the latencies depend on how long the trace is" in note.text


def test_a_frame_says_what_the_files_say(tmp_path: Path) -> None:
    run = simulate({"num_requests": 400, "rate": 60.0}, folder=tmp_path / "run")
    assert steadiness(Requests.of(run.requests)) == run.summary["steadiness"]


@pytest.mark.parametrize(
    ("rate", "num", "verdict"),
    [(10.0, 1200, False), (30.0, 1200, None), (60.0, 1200, True), (150.0, 3000, True), (60.0, 40, None)],
)
def test_a_server_that_sessions_outrun_is_told_though_their_turns_wait_for_one_another(
    tmp_path: Path, rate: float, num: int, verdict: bool | None
) -> None:
    """40 sessions/s of two turns. As many turns come as are served, however slow it is."""
    turns = {"min_turns": 2, "max_turns": 2, "think_time_s": 1.0}
    run = run_of(tmp_path / "run", num_requests=num, rate=rate, **turns)
    assert run.summary["steadiness"]["is_outrun"] is verdict


def test_an_order_by_size_that_leaves_the_long_ones_waiting_is_outrun_by_their_work() -> None:
    """One of fifty is as long as the other 49 together, and none of these is ever taken: half of the work."""
    rows = []
    for i in range(2000):
        is_long, at = i % 50 == 0, round(i * S / 20)
        size = {"num_prompt_tokens": 5000 if is_long else 102, "num_output_tokens": 0}
        scheduled, finish = (None, None) if is_long else (at, at + S // 2)
        rows.append({"arrival_ns": at, "first_scheduled_ns": scheduled, "finish_ns": finish, **size})
    found = Requests.of(requests_of(*rows))
    waiting = waiting_of(found)
    assert not is_outrun(waiting.num, 2000), "so few"
    assert waiting.grew(2000)
    assert outrun(found) is True
    note = outrun_note({"steadiness": steadiness(found)})
    assert note is not None
    assert "requests waited with the work of " in note.text, "in number there are hardly more"
    many = {"is_outrun": True, "in_system": [50.0, 80.0, 100.0], "waiting_work": [40.0, 60.0, 85.0]}
    said = "50 requests were in the system in the second quarter of their time, and 100 in the last;"
    assert said in str(outrun_note({"steadiness": many}))
    taken = [
        row | {"first_scheduled_ns": at, "finish_ns": at + S // 2} for row in rows if (at := row["arrival_ns"]) < 60 * S
    ]
    assert outrun(Requests.of(requests_of(*taken, *rows[len(taken) :]))) is None, "their work grows at the end alone"
    evenly = [row | {"num_prompt_tokens": 100} for row in rows]
    assert outrun(Requests.of(requests_of(*evenly))) is not True, "of equal ones that would be too few"
