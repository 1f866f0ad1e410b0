"""What the generator makes: arrivals by their laws, structure that is shared, tenants, and streams that stay apart."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import ConfigError
from testbed.traces.draws import stream
from testbed.traces.fingerprint import fingerprint
from testbed.traces.generators import LengthConfig, SyntheticConfig, generate, stream_generated
from testbed.traces.lengths import endless_lengths
from testbed.traces.schema import Span, TraceRequest
from testbed.traces.summary import summarise
from testbed.traces.synthesis import materialize

S = 10**9


def instants(**config) -> np.ndarray:
    trace = stream_generated(SyntheticConfig(num_requests=20_000, output=LengthConfig("constant", 1), **config), 2)
    return np.array([row.arrival_ns for row in trace]) / S


def test_bursts_have_the_rate_and_the_dispersion_of_their_process():
    times = instants(arrival="mmpp", rate=10.0, burst_factor=5.0, burst_s=5.0, calm_s=20.0)
    assert len(times) / times[-1] == pytest.approx(10, rel=0.1)
    swing = 2 * 0.2 * 0.8 * (27.78 - 5.556) ** 2 / 10  # a fifth of the time at 5 times the rate of the rest; 0.25 s^-1
    for window_s in (1.0, 10.0):
        turns = 0.25 * window_s
        expected = 1 + swing / 0.25 * (1 - (1 - np.exp(-turns)) / turns)  # 8.3 and 41
        assert summary_of(times).dispersion(window_s) == pytest.approx(expected, rel=0.2)
    assert summary_of(instants(rate=10.0)).dispersion(10.0) == pytest.approx(1, abs=0.25)


def test_poisson_arrivals_have_the_dispersion_1_also_over_few_windows():
    rng, found = np.random.default_rng(0), []
    for _ in range(1000):
        times = np.append(np.sort(rng.uniform(0.0, 5.0, rng.poisson(50.0))), (5.0,))
        found.append(summary_of(np.append(0.0, times)).dispersion(1.0))
    assert np.mean(found) == pytest.approx(1, abs=0.1)


def summary_of(times):
    rows = [TraceRequest(str(i), round(at * S), (Span(i, 0, 1),), None) for i, at in enumerate(times)]
    return summarise(rows)


def test_days_have_their_peak_where_it_is_asked_for():
    times = instants(arrival="diurnal", rate=10.0, amplitude=0.8, period_s=200.0, peak_s=50.0)
    counts = np.histogram(times % 200, 8, (0, 200))[0] / (times[-1] / 200) / 25
    middles = np.arange(12.5, 200, 25)
    assert counts == pytest.approx(10 * (1 + 0.8 * np.cos(2 * np.pi * (middles - 50) / 200)), rel=0.15)


def test_users_come_again_after_they_were_served():
    trace = generate(SyntheticConfig(num_requests=50, arrival="closed_loop", num_users=4, max_turns=3), 1)
    users = {row.session_id for row in trace}
    assert users == {"u0", "u1", "u2", "u3"}
    assert sum(row.think_ns is None for row in trace) == 4
    assert {row.arrival_ns for row in trace} == {0}
    turns = [row.turn for row in trace if row.session_id == "u2"]
    assert turns == list(range(12))


def test_zipf_lengths_follow_their_law():
    config = LengthConfig("zipf", exponent=1.0, min_tokens=10, max_tokens=1000)
    found = list(itertools.islice(endless_lengths(config, stream(0, "x")), 50_000))
    counts = np.bincount(found, minlength=1001)
    norm = sum(1 / n for n in range(10, 1001))
    assert counts[:10].sum() == 0
    assert counts[10] / 50_000 == pytest.approx(1 / 10 / norm, rel=0.1)
    assert counts[10:101].sum() / 50_000 == pytest.approx(sum(1 / n for n in range(10, 101)) / norm, rel=0.03)


def test_structure_is_shared_as_it_is_described():
    config = SyntheticConfig(num_requests=300, num_system_prompts=1, system_prompt_tokens=10,
                             few_shot=few_shot(2), rag=rag(5, 2))  # fmt: skip
    trace = generate(config, 1)
    tasks = {row.prompt[1] for row in trace}
    documents = {part for row in trace for part in row.prompt[2:-1]}
    assert (len(tasks), len(documents)) == (2, 5)
    assert all(1 <= len(row.prompt[2:-1]) <= 2 for row in trace)
    assert len({tuple(materialize((document,), 999)[:8]) for document in documents}) == 5


def few_shot(num):
    from testbed.traces.generator_config import FewShotConfig

    return FewShotConfig(num_tasks=num)


def rag(num, per_prompt):
    from testbed.traces.generator_config import RagConfig

    return RagConfig(num_documents=num, documents_per_prompt=per_prompt)


def test_agents_call_tools_before_they_answer():
    from testbed.traces.generator_config import AgentConfig

    constant = LengthConfig("constant", 7)
    agent = AgentConfig(2, 2, call=constant, result=LengthConfig("constant", 11), tool_time_s=0.5)
    trace = generate(
        SyntheticConfig(num_requests=30, max_turns=1, agent=agent, output=LengthConfig("constant", 100)), 1
    )
    one = [row for row in trace if row.session_id == "s0"]
    assert [row.num_output_tokens for row in one] == [7, 7, 100]
    assert [b.num_prompt_tokens - a.num_prompt_tokens for a, b in itertools.pairwise(one)] == [18, 18]
    assert [row.think_ns is None for row in one] == [True, False, False]
    many = generate(SyntheticConfig(num_requests=3000, max_turns=1, think_time_s=9.0, agent=agent), 1)
    waits = [row.think_ns for row in many if row.think_ns is not None]
    assert np.mean(waits) == pytest.approx(0.5 * S, rel=0.1), "each result comes after the time of its tool"
    assert np.std(waits) == pytest.approx(0.5 * S, rel=0.1)


def test_tenants_have_a_mix_of_their_own_and_share_the_rate():
    tenants = (
        {"name": "chat", "share": 3, "max_turns": 4},
        {"name": "batch", "prompt": {"kind": "constant", "value": 9}},
    )
    trace = generate(SyntheticConfig(num_requests=400, tenants=tenants), 1)
    by_tenant = {name: [row for row in trace if row.tenant == name] for name in ("chat", "batch")}
    assert {name: len(rows) for name, rows in by_tenant.items()} == {"chat": 300, "batch": 100}
    assert {row.num_prompt_tokens for row in by_tenant["batch"]} == {9}
    other = generate(SyntheticConfig(num_requests=400, tenants=({**tenants[0], "max_turns": 2}, tenants[1])), 1)
    assert [r for r in other if r.tenant == "batch"] == by_tenant["batch"], "one tenant's knob leaves the others alone"


def test_tenants_have_their_shares_of_the_requests_from_start_to_end_whatever_their_turns():
    def ends(num_requests, *tenants, **more):
        named = tuple({"name": str(i), **tenant} for i, tenant in enumerate(tenants))
        trace = generate(SyntheticConfig(num_requests=num_requests, rate=40.0, tenants=named, **more), 1)
        rows = [[row for row in trace if row.tenant == tenant["name"]] for tenant in named]
        assert len(trace) == num_requests == sum(map(len, rows))
        return [len(own) for own in rows], [own[-1].arrival_ns / S for own in rows]

    calls = {"agent": {"min_calls": 2, "max_calls": 2}}
    nums, last_s = ends(8_000, {"share": 3, "max_turns": 5}, {}, {"max_turns": 2, **calls}, {"share": 3, "rate": 30.0})
    assert nums == [3_000, 1_000, 1_000, 3_000]
    assert last_s == pytest.approx([200, 200, 200, 100], rel=0.1), "a tenant's own rate is taken as it is"
    nums, last_s = ends(8_000, {}, {"max_turns": 5}, min_turns=4, max_turns=4)
    assert nums == [4_000, 4_000]
    assert last_s == pytest.approx([50, 50], rel=0.1), "40 sessions of four turns a second, as without tenants"
    assert sorted(ends(100, {}, {}, {})[0]) == [33, 33, 34]
    with pytest.raises(ConfigError, match=r"tenants\[1\] has a share of less than one of the 10 requests; raise"):
        ends(10, {"share": 99}, {"share": 1})


@pytest.mark.parametrize("arrival", ["poisson", "closed_loop"])
def test_tenants_have_a_priority_and_a_deadline_of_their_own(arrival):
    def made(**urgent):
        tenants = ({"name": "chat", "max_turns": 3, **urgent}, {"name": "batch", "deadline_s": None})
        return generate(SyntheticConfig(num_requests=20, arrival=arrival, priority=2, deadline_s=9, tenants=tenants), 1)

    trace = made(priority=-1, deadline_s=0.5)
    assert {(row.tenant, row.priority, row.deadline_ns) for row in trace} == {
        ("chat", -1, S // 2), ("batch", 2, None)
    }  # fmt: skip
    prints = {fingerprint(each) for each in (trace, made(deadline_s=0.5), made(priority=-1), made())}
    assert len(prints) == 4


@given(st.sampled_from(["rate", "output", "think_time_s", "rag", "agent", "num_tenants"]))
def test_a_knob_changes_only_what_it_is_about(knob):
    from dataclasses import replace

    from testbed.traces.generator_config import AgentConfig

    base = SyntheticConfig(num_requests=50)
    value = {"rate": 9.0, "output": LengthConfig("constant", 5), "think_time_s": 99.0, "rag": rag(5, 2),
             "agent": AgentConfig(), "num_tenants": 3}[knob]  # fmt: skip
    one, two = generate(base, 4), generate(replace(base, **{knob: value}), 4)
    for a, b in zip(one, two, strict=True):
        assert knob == "rate" or a.arrival_ns == b.arrival_ns
        assert knob == "output" or a.num_output_tokens == b.num_output_tokens
        assert a.prompt[-1].length == b.prompt[-1].length
