"""The front end: its constant is in every TTFT and E2E once and in nothing else, and it sends one token at a time."""

from __future__ import annotations

import json

import pytest

from analysis.explain.request import explain_request
from analysis.explain.whole_run import explain_run
from analysis.measures.metrics import request_metrics
from experiments import simulate
from experiments.cli import main
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
    inbox = FrontEnd(TraceInbox(Trace("one", (row,)), 100), 300)
    assert inbox.next_ns() == 1300
    assert inbox.due(1299) == []
    (arrival,) = inbox.due(1300)
    assert isinstance(arrival, Arrive)
    assert arrival.request.arrival_ns == 1000
    assert inbox.next_ns() == 1350
    assert inbox.due(1350) == [Abort("a")]


# --- tokens on their way out: steps take 10 ms ---

MS = 1_000_000
COST = {"name": "constant", "step_s": 0.01}
AT_CLIENT = ["first_sent_ns", "last_sent_ns", "ttft_s", "tpot_s", "e2e_s"]


def row(name, arrival_s=0.0, output_tokens=5, **more):
    return {"request_id": name, "arrival_time": arrival_s, "prompt_tokens": 16, "output_tokens": output_tokens} | more


def at_once(num, output_tokens):
    return [row(f"r{i}", output_tokens=output_tokens) for i in range(num)]


def both(rows, per_token_ns=MS, backend=(), **settings):
    """Without a time for each token, and with it."""
    settings = {"cost": COST, **settings}
    return [
        simulate(rows, backend={"name": "sim", "frontend_ns_per_token": ns, **dict(backend)}, **settings)
        for ns in (0, per_token_ns)
    ]


def test_the_tokens_of_a_step_leave_one_after_the_other():
    plain, behind = (run.requests for run in both(at_once(3, 5)))
    assert plain[["first_sent_ns", "last_sent_ns"]].isna().all(axis=None), "at the commit"
    assert behind["first_sent_ns"].tolist() == [11 * MS, 12 * MS, 13 * MS]
    assert behind["last_sent_ns"].tolist() == [51 * MS, 52 * MS, 53 * MS]
    for column in ("ttft_s", "e2e_s"):
        assert (behind[column] - plain[column]).tolist() == pytest.approx([0.001, 0.002, 0.003])
    assert behind["tpot_s"].tolist() == plain["tpot_s"].tolist()


@pytest.mark.parametrize("settings", [{}, {"scheduler": "vllm_v1_async"}, {"cache": {"num_gpu_blocks": 12}}])
@pytest.mark.parametrize("replicas", [1, 3])
def test_replicas_have_one_server_and_the_engines_do_what_they_did(replicas, settings):
    """What is sent when, made anew from the instants of the engines alone."""
    rows = [row(f"r{i}", 0.004 * i, 3 + i % 9) for i in range(40)]
    plain, behind = both(rows, 300_000, {"num_replicas": replicas}, **settings)
    assert behind.steps.equals(plain.steps)
    assert behind.manifest["digest"] == plain.manifest["digest"]
    engines, clients = plain.requests.drop(columns=AT_CLIENT), behind.requests.drop(columns=AT_CLIENT)
    assert clients.equals(engines)
    assert [check["holds"] for check in behind.summary["checks"].values()] == [
        check["holds"] for check in plain.summary["checks"].values()
    ]
    emitted = sorted(ns for instants in plain.requests["token_ns"] for ns in instants)
    free_ns, sent = 0, []
    for ns in emitted:
        free_ns = max(free_ns, ns) + 300_000
        sent.append(free_ns)
    found = behind.requests
    assert set(found["first_sent_ns"]) | set(found["last_sent_ns"]) <= set(sent)
    assert (found["first_sent_ns"] > found["first_token_ns"]).all()
    assert (found["last_sent_ns"] > found["finish_ns"]).all()
    assert found["last_sent_ns"].max() == sent[-1]
    assert request_metrics(found)[["ttft_s", "tpot_s", "e2e_s"]].equals(found[["ttft_s", "tpot_s", "e2e_s"]])


def test_a_server_that_is_slower_than_its_engine_sends_what_waits_together():
    """16 ms for what the engine makes in 10. At 20 ms r5, r6 and r7 still wait, at 30 ms r2, r3 and r4."""
    _, behind = both(at_once(8, 3), 2 * MS)
    assert (behind.requests["first_sent_ns"] // MS).tolist() == [12, 14, 16, 18, 20, 22, 24, 26]
    assert (behind.requests["last_sent_ns"] // MS).tolist() == [38, 40, 32, 34, 36, 42, 44, 46]
    plain, behind = both(at_once(8, 200), 2 * MS)
    assert (behind.requests["last_sent_ns"] - behind.requests["finish_ns"]).between(1, 16 * MS).all()
    for name in ("duration_s", "throughput", "kv_usage", "fairness", "steadiness"):
        assert behind.summary.get(name) == plain.summary.get(name)


def test_a_server_forgets_whom_it_has_served():
    sender = Sender(5)
    assert [sender.send(name, 100) for name in "abab"] == [105, 110, 105, 110]
    assert sender.last_ns("a", 100) == 105
    assert sender.last_ns("a", 100) == 100, "it is forgotten, or was never sent anything"
    assert sender.send("a", 104) == 115


def test_a_replay_of_a_tape_has_no_front_end(tmp_path, capsys):
    pytest.importorskip("torch")
    real = ["run", "backend=real", "model=tiny", "trace.num_requests=3", "record.steps=true"]
    assert main([*real, f"hydra.run.dir={tmp_path / 'real'}"]) == 0
    replay = ["run", f"from={tmp_path / 'real'}", "backend=sim", "cost=recorded", f"cost.run={tmp_path / 'real'}"]
    assert main([*replay, "backend.frontend_ns_per_token=5", f"hydra.run.dir={tmp_path / 'sim'}"]) == 1
    assert "error: backend.frontend_ns_per_token is 5, but cost=recorded replays" in capsys.readouterr().err


def test_without_instants_of_tokens_or_steps_the_latencies_are_the_same():
    kept, *others = (
        simulate(at_once(5, 9), backend={"name": "sim", "frontend_ns_per_token": 333_333}, cost=COST, record=record)
        for record in ({}, {"token_times": False}, {"steps": False})
    )
    for other in others:
        for name in ("ttft_s", "e2e_s", "tpot_s", "throughput", "duration_s"):
            assert other.summary[name] == kept.summary[name]


def test_a_turn_follows_when_its_own_client_has_the_answer():
    turns = [
        row(f"{session}{turn}", None, 4, session_id=session, turn=turn)
        | ({"arrival_time": 0.0} if turn == 0 else {"think_time": 1.0})
        for session in "abc" for turn in range(2)
    ]  # fmt: skip
    plain, behind = (run.requests.set_index("request_id") for run in both(turns))
    for place, session in enumerate("abc", 1):
        first, second = f"{session}0", f"{session}1"
        assert behind.loc[first, "last_sent_ns"] == plain.loc[first, "finish_ns"] + place * MS
        assert behind.loc[second, "arrival_ns"] == behind.loc[first, "last_sent_ns"] + 1000 * MS


def test_a_client_that_has_gone_away_gets_nothing_more():
    rows = [row(f"r{i}", output_tokens=50, cancel_after=0.025) for i in range(6)]
    plain, behind = both(rows, 5 * MS)
    assert behind.requests["finish_reason"].tolist() == ["abort"] * 6
    had_gone = behind.requests["first_sent_ns"] > behind.requests["finish_ns"]
    assert 0 < had_gone.sum() < 6
    assert behind.requests["ttft_s"].isna().tolist() == had_gone.tolist()
    assert behind.summary["ttft_s"]["num_censored"] == had_gone.sum()
    assert request_metrics(behind.requests)["ttft_s"].equals(behind.requests["ttft_s"])
    assert behind.summary["itl_s"] == plain.summary["itl_s"]


def test_the_answers_of_a_request_are_there_with_the_last_token_of_all():
    plain, behind = (run.requests for run in both(at_once(2, 4), sampling={"n": 3, "temperature": 1.0}))
    assert behind["token_ns"].equals(plain["token_ns"])
    assert behind["first_sent_ns"].tolist() == [11 * MS, 12 * MS]
    assert behind["last_sent_ns"].tolist() == [41 * MS, 42 * MS], "those of one request go together"
    assert behind["e2e_s"].tolist() == [0.041, 0.042]


def test_a_search_for_capacity_comes_to_what_whole_runs_come_to(tmp_path):
    """TPOT at the client may be less than the engine's: a first token is the last of its step."""
    rows = [row(f"{i}-{j}", 0.5 * i, 2 if j == 7 else 1) for i in range(20) for j in range(8)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [
        "capacity", "trace=jsonl", f"trace.path={tmp_path / 'trace.jsonl'}", "cost=constant", "cost.step_s=0.01",
        "backend.frontend_ns_per_token=1000000", "slo.tpot_s=0.005",
    ]  # fmt: skip
    found = []
    for name, whole in (("stopped", []), ("whole", ["--whole"])):
        assert main([*command, "--out", str(tmp_path / name), *whole]) == 0
        found.append(json.loads((tmp_path / name / "capacity.json").read_text()))
    assert found[0]["policies"] == found[1]["policies"]


def test_explanations_tell_of_the_way_out():
    _, behind = both(at_once(8, 20), MS, record={"decisions": True})
    told = explain_request(behind, "r7").replace("\u00a0", " ")
    assert "The front end brought it its first token 8.00 ms and its last token 8.00 ms after" in told
    told = explain_run(behind).replace("\u00a0", " ")
    assert "- r7: 208 ms, 8.00 ms of it for the front end to send it; did not wait" in told
