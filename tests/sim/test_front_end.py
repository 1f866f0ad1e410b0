"""The front end's constant: in every TTFT and E2E once, in nothing else."""

from __future__ import annotations

import pytest

from experiments import simulate
from testbed.core.commands import Abort, Arrive
from testbed.traces.inbox import TraceInbox
from testbed.traces.schema import Span, Trace, TraceRequest

from sim.front_end import FrontEnd  # isort: skip

ALONE = [{"request_id": f"r{i}", "arrival_time": 5.0 * i, "prompt_tokens": 100, "output_tokens": 20} for i in range(4)]
TURNS = [
    {"request_id": f"t{i}", "session_id": "s", "turn": i, "prompt_tokens": 64, "output_tokens": 8}
    | ({"arrival_time": 0.0} if i == 0 else {"think_time": 1.0})
    for i in range(3)
]


def lines(rows, **backend):
    run = simulate(rows, backend={"name": "sim", **backend}, cost={"name": "constant", "step_s": 0.01})
    return run.requests.sort_values("request_id").reset_index(drop=True)


@pytest.mark.parametrize("replicas", [1, 2])
def test_ttft_and_e2e_grow_by_it_and_tpot_does_not(replicas):
    plain, behind = (lines(ALONE, num_replicas=replicas, frontend_ns=ns) for ns in (0, 7_000_000))
    assert (behind["arrival_ns"] == plain["arrival_ns"]).all()
    for column in ("first_token_ns", "finish_ns"):
        assert (behind[column] - plain[column] == 7_000_000).all()


def test_every_turn_of_a_session_passes_it():
    plain, behind = (lines(TURNS, frontend_ns=ns) for ns in (0, 7_000_000))
    assert (behind["finish_ns"] - plain["finish_ns"]).tolist() == [7_000_000, 14_000_000, 21_000_000]
    assert (behind["arrival_ns"] - plain["arrival_ns"]).tolist() == [0, 7_000_000, 14_000_000]  # when the user asks


def test_an_abort_comes_after_its_request_and_as_late():
    row = TraceRequest("a", 1000, (Span(1, 0, 8),), Span(2, 0, 8), cancel_after_ns=50)
    inbox = FrontEnd(TraceInbox(Trace("one", (row,)), 100), 300)
    assert inbox.next_ns() == 1300
    assert inbox.due(1299) == []
    (arrival,) = inbox.due(1300)
    assert isinstance(arrival, Arrive)
    assert arrival.request.arrival_ns == 1000
    assert inbox.next_ns() == 1350
    assert inbox.due(1350) == [Abort("a")]
