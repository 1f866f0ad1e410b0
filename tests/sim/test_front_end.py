"""The front end: its constant is in every TTFT and E2E once and in nothing else, and it sends one token at a time."""

from __future__ import annotations

import pytest

from experiments import simulate
from testbed.core.commands import Abort, Arrive
from testbed.records.sender import Sender
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
    inbox = FrontEnd(TraceInbox(Trace("one", (row,)), 100), 300, Sender())
    assert inbox.next_ns() == 1300
    assert inbox.due(1299) == []
    (arrival,) = inbox.due(1300)
    assert isinstance(arrival, Arrive)
    assert arrival.request.arrival_ns == 1000
    assert inbox.next_ns() == 1350
    assert inbox.due(1350) == [Abort("a")]


# --- tokens on their way out: steps take 10 ms ---

MS = 1_000_000
STEP_COLUMNS = ["start_ns", "end_ns", "num_emitted", "digest"]


def at_once(num, output_tokens):
    return [
        {"request_id": f"r{i}", "arrival_time": 0.0, "prompt_tokens": 16, "output_tokens": output_tokens}
        for i in range(num)
    ]


def test_the_tokens_of_a_step_leave_one_after_the_other():
    plain, sent = (lines(at_once(3, 5), frontend_ns_per_token=ns) for ns in (0, MS))
    assert (plain["first_token_ns"] == 10 * MS).all()
    assert sent["first_token_ns"].tolist() == [11 * MS, 12 * MS, 13 * MS]
    assert [list(each) for each in sent["token_ns"]] == [
        [(10 * step + place) * MS for step in range(1, 6)] for place in (1, 2, 3)
    ]
    assert (sent["finish_ns"] == plain["finish_ns"]).all()  # the engine's
    for column in ("ttft_s", "e2e_s"):
        assert (sent[column] - plain[column]).tolist() == pytest.approx([0.001, 0.002, 0.003])
    assert sent["tpot_s"].tolist() == plain["tpot_s"].tolist()


def test_a_server_that_is_slower_than_its_engine_falls_behind():
    num, each = 8, 20
    sent = lines(at_once(num, each), frontend_ns_per_token=2 * MS)  # 16 ms for what the engine makes in 10
    last_ns = [max(instants) for instants in sent["token_ns"]]
    assert max(last_ns) == 10 * MS + num * each * 2 * MS
    assert sent["finish_ns"].max() == each * 10 * MS
    assert sent["tpot_s"].tolist() == pytest.approx([0.016] * num)
    assert (sent["e2e_s"] * 1e9).round().astype(int).tolist() == last_ns


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_the_engine_does_stays_as_it_was_and_replicas_have_one_server(replicas):
    plain, behind = (
        simulate(
            at_once(6, 7), backend={"name": "sim", "num_replicas": replicas, "frontend_ns_per_token": ns},
            cost={"name": "constant", "step_s": 0.01},
        )
        for ns in (0, MS)
    )  # fmt: skip
    assert behind.steps[STEP_COLUMNS].equals(plain.steps[STEP_COLUMNS])
    assert behind.manifest["digest"] == plain.manifest["digest"]
    assert behind.manifest["frontend_ns_per_token"] == MS
    firsts = sorted(behind.requests["first_token_ns"])
    assert firsts == [(11 + place) * MS for place in range(6)]
    checks = behind.summary["checks"]
    assert {name: check["holds"] for name, check in checks.items()} == {
        name: check["holds"] for name, check in plain.summary["checks"].items()
    }
    for kind in ("e2e_s", "ttft_s"):
        assert behind.summary[kind]["mean"] == pytest.approx(behind.requests[kind].mean())


def test_without_instants_of_tokens_the_latencies_are_the_same():
    """`record.token_times=false`: the last token's instant follows from TPOT."""
    kept, left_out = (
        simulate(
            at_once(5, 9), backend={"name": "sim", "frontend_ns_per_token": 333_333},
            cost={"name": "constant", "step_s": 0.01}, record={"token_times": keeps},
        ).summary
        for keeps in (True, False)
    )  # fmt: skip
    for name in ("ttft_s", "e2e_s", "tpot_s"):
        assert left_out[name] == kept[name]


def test_a_turn_follows_when_its_client_has_the_answer():
    plain, behind = (lines(TURNS, frontend_ns_per_token=ns) for ns in (0, 3 * MS))
    assert (behind["arrival_ns"] - plain["arrival_ns"]).tolist() == [0, 3 * MS, 6 * MS]
    assert (behind["e2e_s"] - plain["e2e_s"]).tolist() == pytest.approx([0.003] * 3)


def test_tokens_that_the_sequences_of_a_request_emit_together_have_one_instant():
    run = simulate(
        at_once(2, 4), backend={"name": "sim", "frontend_ns_per_token": MS}, sampling={"n": 3, "temperature": 1.0},
        cost={"name": "constant", "step_s": 0.01},
    )  # fmt: skip
    assert run.requests["num_token_steps"].tolist() == [4, 4]
    assert run.requests["num_output_tokens"].tolist() == [12, 12]
    first, second = [[ns // MS for ns in instants] for instants in run.requests["token_ns"]]
    assert first == [11, 21, 31, 41]
    assert second == [12, 24, 34, 44]  # in the first step, those that part from the two come after both
