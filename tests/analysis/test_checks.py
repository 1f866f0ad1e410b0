"""The checks of a run's records hold on every run of random cores, and fail on records that were tampered with."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analysis.measures.checks import CHECKS, Check, failures, outline, run_checks
from sim.backend import SimBackend
from sim.cost.base import CostModel
from sim.cost.config import LinearConfig
from sim.cost.linear import LinearCost
from sim.fleet import Fleet
from testbed.blocks.config import KVRules
from testbed.core.limits import Limits
from testbed.core.request import GREEDY, SamplingParams
from testbed.errors import LivelockError
from testbed.routing.routers import Random, RoundRobin, RouterContext, bind
from testbed.traces.arrange import arrange
from testbed.traces.inbox import TraceInbox
from testbed.traces.schema import Span, Trace, TraceRequest
from tests.properties.policies import COMPOSITIONS
from tests.properties.setups import Setup, presets, random_setup
from tests.sim.kit import VOCAB_SIZE, Records, constant, fleet_recorded, recorded

SIM = {"backend": "sim", "cost": "linear"}
REAL = {"backend": "real", "cost": None}
MS = 1_000_000
GROUPS = (SamplingParams(n=2), SamplingParams(best_of=3), SamplingParams(beam_width=2))


def random_trace(rng: random.Random, num_requests: int) -> Trace:
    """Open arrivals and closed-loop sessions, shared prompts, aborts; arrivals often at one instant."""
    rows: list[TraceRequest] = []
    now_ns = 0
    while len(rows) < num_requests:
        now_ns += rng.choice((0, 0, rng.randrange(3 * MS), rng.randrange(40 * MS)))
        number = len(rows)
        num_turns = rng.choice((1, 1, 1, 2, 3))
        key, num_shared = rng.randrange(2), rng.choice((0, 4, 9, 17))
        text = rng.randrange(1, 9)
        for turn in range(num_turns):
            output = rng.choice((1, 2, 5, 12))
            shared = (Span(key, 0, num_shared),) if num_shared else ()
            rows.append(
                TraceRequest(
                    f"s{number}-{turn}", now_ns, (*shared, Span(1000 + number, 0, text)),
                    Span(1000 + number, text, output), priority=rng.randrange(3), tenant=rng.choice(("a", "b")),
                    session_id=f"s{number}", turn=turn, think_ns=rng.choice((0, 2 * MS)) if turn else None,
                    cancel_after_ns=rng.randrange(30 * MS) if rng.random() < 0.1 else None,
                    deadline_ns=rng.choice((None, 20 * MS)),
                )
            )  # fmt: skip
            text += output + rng.randrange(1, 5)
    return arrange("random", rows)


def random_cost(rng: random.Random) -> CostModel:
    return constant(rng.choice((1, 3 * MS))) if rng.random() < 0.3 else LinearCost(LinearConfig(base_s=1e-3))


def random_records(setup: Setup, rng: random.Random, sampling: SamplingParams = GREEDY) -> Records:
    trace = random_trace(rng, rng.choice((1, 5, 15, 30)))
    return recorded(
        setup.scheduler(), trace, random_cost(rng), sampling=sampling, num_steps=600, stops_on=(LivelockError,)
    )


def checked(records: Records) -> dict[str, Check]:
    return run_checks(records.requests, records.steps, SIM)


def expect_sound(records: Records, where: str) -> dict[str, Check]:
    """No check fails, and each applies unless nothing was computed."""
    checks = checked(records)
    assert not failures(checks), f"{where}: {failures(checks)}"
    assert len(records.steps) == 0 or all(check["holds"] for check in checks.values()), f"{where}: {checks}"
    return checks


def is_exact(work: Check) -> bool:
    return bool(work["num_needed_tokens_least"] == work["num_needed_tokens_most"])


# --- every run ---


@pytest.mark.parametrize("composition", COMPOSITIONS)
@settings(
    max_examples=25, deadline=None, derandomize=True, print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)  # fmt: skip
@given(rng=st.randoms(note_method_calls=False, use_true_random=False))
def test_every_check_holds_whatever_the_policies_and_the_trace(composition: str, rng: random.Random) -> None:
    setup = random_setup(rng, composition)
    expect_sound(random_records(setup, rng), repr(setup))


@pytest.mark.parametrize("name", presets())
def test_every_check_holds_of_every_preset(name: str) -> None:
    """Denser: many requests in a small pool, so that hits, preemptions and swaps abound."""
    for number in range(6):
        rng = random.Random(f"checks/{name}/{number}")
        setup = Setup(**presets()[name], limits=Limits(8, 16, 60, 0, 1), num_blocks=16, num_cpu_blocks=12)
        expect_sound(random_records(setup, rng), f"{name}/{number}")


@pytest.mark.parametrize("sampling", GROUPS, ids=["n", "best_of", "beams"])
def test_runs_with_groups_say_what_does_not_apply_and_check_the_rest(sampling: SamplingParams) -> None:
    seen: Counter[str] = Counter()
    for number in range(15):
        rng = random.Random(f"groups/{sampling}/{number}")
        records = random_records(random_setup(rng), rng, sampling)
        checks = checked(records)
        assert not failures(checks), (number, failures(checks))
        if (records.requests["num_output_tokens"] != records.requests["num_token_steps"]).any():
            seen["groups"] += 1
            assert [checks[name]["holds"] for name in CHECKS] == [None, None, True]
            assert all(str(checks[name]["why"]).startswith("not applicable: ") for name in CHECKS[:2])
    assert seen["groups"] > 3


def test_a_run_that_was_cut_short_is_checked_as_far_as_it_went() -> None:
    for number in range(10):
        rng = random.Random(f"cut/{number}")
        setup = Setup(num_blocks=12, limits=Limits(4, 16, 60, 0, 1))
        records = recorded(setup.scheduler(), random_trace(rng, 30), random_cost(rng), num_steps=rng.randrange(1, 40))
        assert records.is_cut
        assert records.requests["finish_ns"].isna().any()
        expect_sound(records, f"cut/{number}")


def test_what_a_request_finds_cached_beyond_its_own_work_is_allowed_for() -> None:
    """Preempted in the middle of its prompt, then given the rest by a neighbour: no record says how much that was."""
    setup = Setup(
        rules=KVRules(allocate="chunk"), limits=Limits(5, 16, 60, 2, 1), block_size=3, num_blocks=16, num_cpu_blocks=0,
        queue="mlfq", victim="oldest first",
    )  # fmt: skip
    num_skipped = []
    for number in range(12):
        rows = random_trace(random.Random(f"skip/{number}"), 25).rows
        trace = arrange("to the end", [row._replace(cancel_after_ns=None) for row in rows])
        records = recorded(setup.scheduler(), trace)
        work = expect_sound(records, f"skip/{number}")["work_conserved"]
        if records.requests["finish_reason"].eq("length").all():
            num_skipped.append(work["num_needed_tokens_most"] - work["num_computed_tokens"])
    assert max(num_skipped) > 0


def test_every_check_holds_of_every_fleet() -> None:
    """Replicas behind a router, swaps within steps or on links of their own or shared."""
    for number in range(25):
        rng = random.Random(f"fleet/{number}")
        setup, num_replicas = random_setup(rng), rng.choice((2, 3))
        router = rng.choice((RoundRobin, Random))()
        bind(router, RouterContext(number, num_replicas))
        cost, trace = random_cost(rng), random_trace(rng, 40)
        fleet = Fleet(
            TraceInbox(trace, VOCAB_SIZE), router, [SimBackend(cost) for _ in range(num_replicas)],
            replicas_per_link=rng.choice((None, 1, num_replicas)),
        )  # fmt: skip
        records = fleet_recorded(fleet, [setup.scheduler() for _ in range(num_replicas)])
        expect_sound(records, f"fleet/{number}: {setup}")


# --- records that are wrong ---


@pytest.fixture(scope="module")
def sound() -> Records:
    """A run with preemptions and hits, in which every check is exact."""
    rows = [
        TraceRequest(f"r{i}", i * 2 * MS, (Span(i % 2, 0, 9), Span(100 + i, 0, 1 + i % 7)), Span(200 + i, 0, 4 + i % 9))
        for i in range(40)
    ]
    setup = Setup(num_blocks=12, limits=Limits(6, 16, 60, 0, 1))
    records = recorded(setup.scheduler(), arrange("sound", rows), LinearCost(LinearConfig(base_s=1e-3)))
    checks = expect_sound(records, "sound")
    assert is_exact(checks["work_conserved"])
    assert records.steps["num_preempted"].sum() > 0
    assert records.steps["num_cached_tokens"].sum() > 0
    assert (records.steps["num_waiting"] > 0).sum() > 10
    return records


Tamper = Callable[[pd.DataFrame, pd.DataFrame], Any]


def change(frame: pd.DataFrame, row: int, column: str, by: int) -> None:
    frame[column] = frame[column].astype("Int64")
    frame.loc[frame.index[row], column] += by


TAMPERINGS: dict[str, tuple[str, Tamper]] = {
    "a step counts one waiting too many": ("littles_law", lambda r, s: change(s, 7, "num_waiting", 1)),
    "a step counts one running too few": ("littles_law", lambda r, s: change(s, -1, "num_running", -1)),
    "a request ends a step later": ("littles_law", lambda r, s: change(r, 3, "finish_ns", 4 * MS)),
    "a request ends a nanosecond early": ("littles_law", lambda r, s: change(r, 3, "finish_ns", -1)),
    "a request is seen a nanosecond late": ("littles_law", lambda r, s: change(r, 5, "queued_ns", 1)),
    "a request is seen before it comes": ("littles_law", lambda r, s: change(r, 5, "arrival_ns", 500 * MS)),
    "a decode is not counted": ("work_conserved", lambda r, s: change(s, 9, "num_decode_tokens", -1)),
    "a chunk is counted twice": ("work_conserved", lambda r, s: change(s, 0, "num_prefill_tokens", 2)),
    "recomputed tokens are forgotten": (
        "work_conserved",
        lambda r, s: change(r, int(r["num_recomputed_tokens"].argmax()), "num_recomputed_tokens", -1),
    ),
    "a hit is credited that was none": ("work_conserved", lambda r, s: change(r, 0, "num_cached_tokens", 4)),
    "a token is lost on its way": ("work_conserved", lambda r, s: change(s, 11, "num_emitted", -1)),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_wrong_record_fails_its_check(name: str, sound: Records) -> None:
    check, tamper = TAMPERINGS[name]
    requests, steps = sound.requests.copy(), sound.steps.copy()
    tamper(requests, steps)
    checks = run_checks(requests, steps, SIM)
    assert checks[check]["holds"] is False, name
    assert all(sentence.startswith("CHECK FAILED: ") for sentence in failures(checks))
    assert "FAILS" in outline(checks)


def test_in_vllm_a_step_may_have_computed_a_token_for_each_request_that_was_aborted_meanwhile(sound: Records) -> None:
    for num_aborted, num_more, holds in ((0, 0, True), (0, 1, False), (2, 2, True), (2, 3, False)):
        requests, steps = sound.requests.copy(), sound.steps.copy()
        requests.loc[requests["num_preemptions"].eq(0).nlargest(num_aborted).index, "finish_reason"] = "abort"
        change(steps, 9, "num_decode_tokens", num_more)
        assert run_checks(requests, steps, {"backend": "vllm"})["work_conserved"]["holds"] is holds, num_more
        assert run_checks(requests, steps, SIM)["work_conserved"]["holds"] is (num_more == 0)


def test_a_missing_step_fails_every_check(sound: Records) -> None:
    for row in range(len(sound.steps) // 4, len(sound.steps), 5):
        if sound.steps["num_running"].iloc[row] and sound.steps["num_emitted"].iloc[row]:
            checks = run_checks(sound.requests, sound.steps.drop(index=row), SIM)
            assert checks["work_conserved"]["holds"] is False, row
            assert checks["never_idle"]["holds"] is False, row


def test_a_missing_request_fails_littles_law_and_the_conservation_of_work(sound: Records) -> None:
    for row in range(0, len(sound.requests), 3):
        checks = run_checks(sound.requests.drop(index=row), sound.steps, SIM)
        assert checks["littles_law"]["holds"] is False, row
        assert checks["work_conserved"]["holds"] is False, row


class Idler:
    """A composition that serves nothing before noon."""

    def __init__(self, noon_ns: int) -> None:
        self.noon_ns = noon_ns

    def compose(self, step: Any) -> None:
        if step.now_ns >= self.noon_ns:
            COMPOSITIONS["unified"]().compose(step)


def test_an_engine_that_idles_while_requests_wait_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPOSITIONS, "idler", lambda: Idler(50 * MS))  # type: ignore[misc]  # a dict after all
    rows = [TraceRequest(f"r{i}", at * MS, (Span(i, 0, 4),), Span(i, 4, 3)) for i, at in enumerate((10, 60, 200))]
    checks = checked(recorded(Setup(composition="idler").scheduler(), arrange("t", rows)))
    assert [checks[name]["holds"] for name in CHECKS] == [True, True, False]
    assert checks["never_idle"]["num_requests_idle"] == 1
    assert "0.050000 s for one" in str(checks["never_idle"]["why"])


def test_a_real_engines_clock_may_oversleep() -> None:
    """Its idle time counts from the boundary that saw a request; a simulation has no excuse, a replay has."""
    rows = [
        TraceRequest("r0", 0, (Span(0, 0, 4),), Span(0, 4, 2)),
        TraceRequest("r1", MS, (Span(1, 0, 4),), Span(1, 4, 2)),
    ]
    records = recorded(Setup().scheduler(), arrange("t", rows))
    requests, steps = records.requests.copy(), records.steps.copy()
    for name in ("queued_ns", "finish_ns", "first_scheduled_ns", "first_token_ns"):
        requests[name] += 300
    for name in ("start_ns", "end_ns"):
        steps[name] += 300
    checks = run_checks(requests, steps, REAL)
    assert checks["never_idle"]["holds"] is True
    law, duration_ns = checks["littles_law"], int(steps["end_ns"].max())  # from the first arrival on, at 0
    in_system_ns = (requests["finish_ns"] - requests["queued_ns"]).sum()
    told = [law[name] for name in ("mean_in_system", "arrival_rate_per_s", "mean_sojourn_s")]
    assert told == pytest.approx([in_system_ns / duration_ns, 2e9 / duration_ns, in_system_ns / 2e9], rel=1e-9)
    assert run_checks(requests, steps, SIM | {"cost": "recorded"})["never_idle"]["holds"] is True
    assert run_checks(requests, steps, SIM)["never_idle"]["holds"] is False


def test_what_cannot_be_checked_says_why(sound: Records) -> None:
    cases = {
        "no step": (sound.requests, sound.steps.iloc[:0]),
        "no request": (sound.requests.iloc[:0], sound.steps),
        "num_ignored not recorded": (sound.requests, sound.steps.assign(num_ignored=None)),
    }
    for why, (requests, steps) in cases.items():
        for check in run_checks(requests, steps, SIM).values():
            assert check["holds"] is None
            assert why in str(check["why"])


IMPOSSIBLE: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "a step ends a nanosecond late": lambda steps: changed(steps, 7, "end_ns", 1),
    "a step lasts no time": lambda steps: changed(
        steps, 7, "end_ns", int((steps["start_ns"] - steps["end_ns"]).iloc[7])
    ),
    "a step is written twice": lambda steps: pd.concat([steps.iloc[:8], steps.iloc[7:]]),
    "every step is written twice": lambda steps: pd.concat([steps, steps]),
}


def changed(frame: pd.DataFrame, row: int, column: str, by: int) -> pd.DataFrame:
    frame = frame.copy()
    change(frame, row, column, by)
    return frame


@pytest.mark.parametrize("name", IMPOSSIBLE)
@pytest.mark.parametrize("of_fleet", [False, True])
def test_steps_of_one_replica_that_overlap_or_last_no_time_fail_every_check(
    name: str, of_fleet: bool, sound: Records
) -> None:
    requests, steps = sound.requests, sound.steps
    row = next(row for row in range(7, len(steps)) if steps["end_ns"].iloc[row] == steps["start_ns"].iloc[row + 1])
    assert row == 7  # no gap after it, so that a nanosecond is an overlap
    wrong = IMPOSSIBLE[name](steps)
    if of_fleet:  # the other one's records are in order
        requests = pd.concat([requests, requests.assign(replica=1)])
        wrong = pd.concat([wrong, steps.assign(replica=1)])
    checks = run_checks(requests, wrong, SIM)
    for check in checks.values():
        assert check["holds"] is False
        why = str(check["why"])
        assert "overlap the one after, or last no time" in why
        assert why.startswith("replica 0: " * of_fleet)
        at = (0 if of_fleet else len(steps) - 1) if name.startswith("every") else 7
        assert f"The first is row {at} of its steps in steps.parquet, from " in why
        assert "replica 1" not in why
    assert len(failures(checks)) == len(CHECKS)


def test_a_fleet_is_checked_replica_by_replica(sound: Records) -> None:
    """Two replicas of one run's records, their rows mixed; the second one an hour later."""
    hour = 3600 * 10**9
    requests, steps = sound.requests.copy(), sound.steps.copy()
    for name in ("arrival_ns", "queued_ns", "first_scheduled_ns", "first_token_ns", "finish_ns"):
        requests[name] += hour
    for name in ("start_ns", "end_ns"):
        steps[name] += hour
    requests["replica"], steps["replica"] = 1, 1
    both = pd.concat([sound.requests, requests]), pd.concat([steps, sound.steps]).sort_values("step", kind="stable")
    one, fleet = checked(sound), run_checks(*both, SIM)
    assert [check["holds"] for check in fleet.values()] == [True, True, True], fleet
    for name, key in (("littles_law", "ns_in_system_by_steps"), ("work_conserved", "num_computed_tokens")):
        assert fleet[name][key] == 2 * one[name][key]
    lost = run_checks(both[0], both[1][both[1]["replica"] == 0], SIM)
    assert "replica 1: not applicable: no step was recorded" in str(lost["work_conserved"]["why"])
    change(both[1], 3, "num_running", 1)
    failed = run_checks(*both, SIM)["littles_law"]
    assert failed["holds"] is False
    assert str(failed["why"]).startswith("replica 0: 1 of 114 steps count another number of requests than are in the")
    assert "; the first is row 1 of its steps in steps.parquet, at " in failed["why"]


def test_sums_beyond_64_bits_are_exact() -> None:
    """Three weeks of six thousand requests in the system: 10^19 ns."""
    num, length = 6000, 21 * 86_400 * 10**9
    request = {"arrival_ns": 0, "queued_ns": 0, "first_scheduled_ns": 0, "first_token_ns": length, "finish_ns": length}
    request |= {"finish_reason": "length", "num_prompt_tokens": 1, "num_output_tokens": 1, "num_token_steps": 1}
    request |= {"num_cached_tokens": 0, "num_preemptions": 0, "num_recomputed_tokens": 0, "replica": 0}
    step = {
        "replica": 0, "start_ns": 0, "end_ns": length, "num_running": num, "num_prefill_tokens": num,
        "num_emitted": num,
    }  # fmt: skip
    names = ("num_decode_tokens", "num_waiting", "num_swapped", "num_cached_tokens", "num_preempted", "num_ignored")
    checks = run_checks(pd.DataFrame([request] * num), pd.DataFrame([step | dict.fromkeys(names, 0)]), SIM)
    assert [check["holds"] for check in checks.values()] == [True, True, True]
    assert checks["littles_law"]["ns_in_system_by_steps"] == num * length > np.iinfo(np.int64).max
