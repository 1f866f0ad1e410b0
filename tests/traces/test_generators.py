"""Generated traces: reproducible, streams independent of each other, distributions and structure as configured."""

import statistics
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise

import pytest

from testbed.errors import ConfigError
from testbed.traces.arrange import arrange
from testbed.traces.arrivals import ArrivalConfig, instants
from testbed.traces.batches import Batches
from testbed.traces.draws import stream, streams
from testbed.traces.fingerprint import fingerprint
from testbed.traces.generator_config import AgentConfig, RagConfig
from testbed.traces.generators import LengthConfig, SyntheticConfig, generate, stream_generated
from testbed.traces.lengths import endless_lengths
from testbed.traces.schema import Span, TraceRequest
from testbed.traces.summary import summarise
from testbed.traces.synthesis import materialize

CHAT = SyntheticConfig(num_requests=300, min_turns=2, max_turns=6, num_system_prompts=3, system_prompt_tokens=40)


def gaps(config: SyntheticConfig) -> list[float]:
    instants = [0, *(row.arrival_ns / 1e9 for row in generate(config, 1))]
    return [b - a for a, b in pairwise(instants)]


def test_the_same_seed_gives_the_same_trace_and_another_seed_another():
    assert fingerprint(generate(CHAT, 7)) == fingerprint(generate(CHAT, 7))
    assert fingerprint(generate(CHAT, 7)) != fingerprint(generate(CHAT, 8))


def test_changing_the_rate_leaves_the_lengths_and_scales_the_arrivals():
    slow = generate(SyntheticConfig(num_requests=50, rate=1.0), 3)
    fast = generate(SyntheticConfig(num_requests=50, rate=2.0), 3)
    assert [r.prompt for r in slow] == [r.prompt for r in fast]
    assert all(abs(s.arrival_ns - 2 * f.arrival_ns) <= 2 for s, f in zip(slow, fast, strict=True))


def test_streams_of_two_purposes_differ():
    assert stream(1, "a").random() != stream(1, "b").random()
    assert stream(1, "a").random() == stream(1, "a").random()


def test_gamma_arrivals_of_cv_1_are_those_of_poisson():
    gamma = SyntheticConfig(num_requests=1000, arrival="gamma", cv=1.0)
    assert gaps(gamma) == gaps(replace(gamma, arrival="poisson"))


def test_batches_by_a_clock_of_microseconds_are_batches():
    """The last of each eight comes a microsecond after the others."""
    rows = [TraceRequest(f"r{i}", i // 8 * 10**9 + 1000 * (i % 8 == 7), (Span(i, 0, 9),), None) for i in range(400)]
    note = summarise(arrange("batches", rows)).batches.note
    assert note is not None
    assert note.startswith("75% of arrivals at the instant of the one before")


def test_closed_loop_turns_are_in_no_batch():
    batches = Batches()
    for second, think_ns in ((0, None), (0, None), (1, None), (1, 5), (1, None), (2, None)):
        batches.add(TraceRequest("r", second * 10**9, (Span(1, 0, 9),), None, think_ns=think_ns))
    assert batches.num == 5
    assert batches.note is not None
    assert batches.note.startswith("50% of arrivals at the instant of the one before"), "two of four gaps"


def test_gamma_gaps_that_round_to_nothing_are_no_batches():
    trace = generate(SyntheticConfig(num_requests=2000, arrival="gamma", cv=3.0), 1)
    assert sum(gap == 0 for gap in gaps(SyntheticConfig(num_requests=2000, arrival="gamma", cv=3.0))) > 100
    assert summarise(trace).batches.note is None


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("gamma", 1.0), ("gamma", 0.3), ("gamma", 3.0)])
def test_gaps_have_the_mean_and_burstiness_asked_for(kind, cv):
    found = gaps(SyntheticConfig(num_requests=20_000, arrival=kind, rate=5.0, cv=cv))
    assert statistics.fmean(found) == pytest.approx(0.2, rel=0.06)
    assert statistics.stdev(found) / statistics.fmean(found) == pytest.approx(cv, rel=0.06)


def test_regular_arrivals_are_exact():
    regular, at_once = ArrivalConfig("deterministic", 3.0), ArrivalConfig("all_at_once", 3.0)
    assert list(islice(instants(regular, streams(0)), 4)) == [0, 333_333_333, 666_666_667, 10**9]
    assert list(islice(instants(at_once, streams(0)), 3)) == [0, 0, 0]


def test_lengths_follow_their_distribution():
    def lengths(config: LengthConfig, num: int) -> list[int]:
        return [min(length, config.most) for length in islice(endless_lengths(config, stream(0, "x")), num)]

    assert lengths(LengthConfig("constant", 9), 3) == [9, 9, 9]
    assert sorted(set(lengths(LengthConfig("uniform", min_tokens=3, max_tokens=5), 2000))) == [3, 4, 5]
    found = lengths(LengthConfig("lognormal", 200, sigma=1.0, min_tokens=10, max_tokens=1000), 20_000)
    assert statistics.median(found) == pytest.approx(200, rel=0.05)
    assert (min(found), max(found)) == (10, 1000)
    assert sum(n <= 200 * 2.718281828 for n in found) / len(found) == pytest.approx(0.841, abs=0.01)


def test_empirical_lengths_come_in_pairs():
    source = generate(SyntheticConfig(num_requests=40), 1)
    pairs = {(row.num_prompt_tokens, row.num_output_tokens) for row in source}
    empirical = LengthConfig("empirical")
    drawn = generate(SyntheticConfig(num_requests=200, prompt=empirical, output=empirical), 2, lengths_from=source)
    assert {(row.num_prompt_tokens, row.num_output_tokens) for row in drawn} <= pairs
    with pytest.raises(ConfigError, match=r"trace\.prompt\.kind is 'empirical' without a trace to draw from"):
        generate(SyntheticConfig(prompt=empirical))
    with pytest.raises(ConfigError, match=r"trace\.agent\.call\.kind is 'empirical'; only trace\.prompt, "):
        generate(SyntheticConfig(prompt=empirical, agent=AgentConfig(max_calls=2, call=empirical)), 2, source)


LONG = [(7, 3), (20_000, 9_000), (300_000, 5)]


def test_what_is_given_is_not_cut_and_a_cut_is_told_with_counts():
    rows = [TraceRequest(str(i), i, (Span(i, 0, a),), Span(i, a, b)) for i, (a, b) in enumerate(LONG)]
    source, empirical = arrange("long", rows), LengthConfig("empirical")
    config = SyntheticConfig(num_requests=300, prompt=empirical, output=empirical)
    drawn = generate(config, 2, source)
    assert {(row.num_prompt_tokens, row.num_output_tokens) for row in drawn} == set(LONG)
    assert drawn.notes == stream_generated(config, 2, source).notes == ()
    cut_at = replace(config, prompt=replace(empirical, max_tokens=8192))
    cut = generate(cut_at, 2, source)
    num = sum(row.num_prompt_tokens > 8192 for row in drawn)
    assert cut.notes == (f"{num} of 300 lengths cut at 8,192 tokens: trace.prompt.max_tokens",)
    pairs = zip(drawn, cut, strict=True)
    assert all(b.num_prompt_tokens == min(a.num_prompt_tokens, 8192) for a, b in pairs)
    told = "67% of lengths are cut at 8,192 tokens: trace.prompt.max_tokens"
    assert stream_generated(cut_at, 2, source).notes == (told,)
    raised = SyntheticConfig(num_requests=3, prompt=LengthConfig("constant", 100, min_tokens=200))
    assert stream_generated(raised, 2).notes == ("100% of lengths are raised to 200 tokens: trace.prompt.min_tokens",)
    for value, num_notes in ((10.5, 0), (11.5, 1)):  # samples are rounded half to even: 10 and 12
        bound = LengthConfig("lognormal", value, sigma=0.0, max_tokens=int(value))
        found = stream_generated(SyntheticConfig(num_requests=3, prompt=bound), 2).notes
        assert found == (f"100% of lengths are cut at {int(value)} tokens: trace.prompt.max_tokens",) * num_notes
    constant = SyntheticConfig(num_requests=3, prompt=LengthConfig("constant", 100_000))
    assert [row.num_prompt_tokens for row in generate(constant)] == [100_000] * 3


def test_the_tail_of_a_distribution_is_cut_as_before_and_told():
    config = SyntheticConfig(num_requests=4000, max_turns=3, prompt=LengthConfig(value=4000.0), num_tenants=0,
                             turn_prompt=LengthConfig(value=2000.0, max_tokens=3000))  # fmt: skip
    trace = generate(config, 1)
    new = {0: [], 1: []}
    said = 0
    for row in trace:
        said = said if row.turn else 0
        new[min(row.turn, 1)].append(row.num_prompt_tokens - said)
        said = row.num_prompt_tokens + row.num_output_tokens
    expected = [
        f"{counts[most]:,} of {len(lengths):,} lengths cut at {most:,} tokens: trace.{name}.max_tokens"
        for name, most, lengths in (("prompt", 8192, new[0]), ("turn_prompt", 3000, new[1]))
        for counts in [Counter(lengths)]
    ]
    assert [note for note in trace.notes if "output" not in note] == expected, "none is drawn at the very maximum"
    shares = [int(note.split("%")[0]) for note in stream_generated(config, 1).notes]
    assert shares == pytest.approx(
        [100 * Counter(new[i])[most] / len(new[i]) for i, most in enumerate((8192, 3000))], abs=2
    )
    short = generate(SyntheticConfig(num_requests=50, max_session_tokens=100), 1)
    assert short.notes[-1].endswith("first turns cut, documents first: trace.max_session_tokens")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"cv": 2.0}, ["trace.cv has no effect with trace.arrival=poisson"]),
        ({"arrival": "gamma", "cv": 2.0}, []),
        ({"num_users": 3}, ["trace.num_users has no effect with trace.arrival=poisson"]),
        ({"arrival": "closed_loop", "num_users": 3, "think_time_s": 1.0}, []),
        ({"arrival": "closed_loop", "rate": 9.0}, ["trace.rate has no effect with trace.arrival=closed_loop"]),
        ({"think_time_s": 1.0}, ["trace.think_time_s has no effect with trace.max_turns=1"]),
        ({"think_time_s": 1.0, "max_turns": 2}, []),
        ({"rag": RagConfig(skew=2.0)}, ["trace.rag.skew has no effect with trace.rag.num_documents=0"]),
        ({"rag": RagConfig(num_documents=2, skew=2.0)}, []),
        ({"prompt": LengthConfig("uniform", value=9.0)},
         ["trace.prompt.value has no effect with trace.prompt.kind=uniform"]),
        ({"cv": 2.0, "tenants": ({"name": "a", "arrival": "gamma"}, {"name": "b"})}, []),
        (
            {"cv": 2.0, "tenants": ({"name": "a", "cv": 3.0}, {"name": "b"})},
            ["trace.cv has no effect with trace.arrival=poisson",
             "trace.tenants[0].cv has no effect with trace.arrival=poisson"],
        ),
    ],
)  # fmt: skip
def test_settings_without_effect_are_told(values, told):
    config = SyntheticConfig(num_requests=5, **values)
    assert list(generate(config).notes) == told == list(stream_generated(config).notes)
    if told and "tenants" not in values:
        plain = {"arrival": values["arrival"]} if "arrival" in values else {}
        if "prompt" not in values:
            assert fingerprint(generate(config)) == fingerprint(generate(SyntheticConfig(num_requests=5, **plain)))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"max_session_tokens": "x"},
         r"trace\.tenants\[0\]\.max_session_tokens is 'x'; it must be a whole number or null"),
        ({"turn_prompt": 5}, r"trace\.tenants\[0\]\.turn_prompt is 5; it must be a group with keys of kind, value"),
        ({"rate": True}, r"trace\.tenants\[0\]\.rate is true; it must be a number"),
        ({"priorty": 1}, r"unknown key 'trace\.tenants\[0\]\.priorty'; did you mean 'priority'\?"),
        ({"priority": 0.5}, r"trace\.tenants\[0\]\.priority is 0\.5; it must be a whole number"),
        ({"priority": 2**31},
         r"trace\.tenants\[0\]\.priority is 2147483648; it must be -2,147,483,648 to 2,147,483,647"),
        ({"deadline_s": -1}, r"trace\.tenants\[0\]\.deadline_s is -1; it must be 0 to 1e9, or absent"),
        ({"prompt": {"value": 0}}, r"trace\.tenants\[0\]\.prompt\.value is 0; it must be 1 to"),
        ({"share": 10**400}, r"trace\.tenants\[0\]\.share is a whole number of about 401 digits; it must be above 0"),
        ({"num_users": 10**400},
         r"trace\.tenants\[0\]\.num_users is a whole number of about 401 digits; it must be 1 to"),
    ],
)  # fmt: skip
def test_what_a_tenant_has_of_another_type_is_refused(entry, message):
    with pytest.raises(ConfigError, match=message):
        SyntheticConfig(tenants=({"name": "a", **entry},))
    own = {"name": "a", "turn_prompt": {"value": 6}, "max_session_tokens": None, "prompt": {"max_tokens": None}}
    SyntheticConfig(tenants=(own,), max_session_tokens=99)


def test_a_turn_is_the_session_so_far_and_new_text():
    trace = generate(CHAT, 1)
    sessions: dict = {}
    for row in trace:
        sessions.setdefault(row.session_id, []).append(row)
    assert len(trace) == 300
    heads = set()
    for rows in sessions.values():
        assert [row.turn for row in rows] == list(range(len(rows)))
        assert [row.think_ns is None for row in rows] == [True] + [False] * (len(rows) - 1)
        heads.add(tuple(materialize(rows[0].prompt, 1000)[:40]))
        for before, after in pairwise(rows):
            said = materialize((*before.prompt, before.output), 1000)
            assert materialize(after.prompt, 1000)[: len(said)] == said
            assert after.num_prompt_tokens > len(said)
    assert len(heads) == 3
    contents = {tuple(materialize(rows[0].prompt, 1000)[40:50]) for rows in sessions.values()}
    assert len(contents) == len(sessions)
    found = summarise(trace)
    assert found.arrivals_s.tolist() == [rows[0].arrival_ns / 1e9 for rows in sessions.values()]
    assert found.turns == Counter(map(len, sessions.values()))


def test_open_loop_turns_have_arrivals_of_their_own():
    config = SyntheticConfig(num_requests=60, max_turns=4, closed_loop=False, think="constant", think_time_s=2.0)
    trace = generate(config, 1)
    assert all(row.think_ns is None for row in trace)
    first = {row.session_id: row.arrival_ns for row in trace if row.turn == 0}
    assert all(row.arrival_ns == first[row.session_id] + row.turn * 2 * 10**9 for row in trace)


def test_sessions_stay_within_their_limit():
    config = SyntheticConfig(num_requests=200, max_turns=8, max_session_tokens=400, num_system_prompts=1,
                             system_prompt_tokens=100)  # fmt: skip
    trace = generate(config, 1)
    assert len(trace) == 200
    assert max(row.num_prompt_tokens + row.num_output_tokens for row in trace) <= 400


def test_popular_system_prompts_and_tenants():
    config = SyntheticConfig(num_requests=2000, num_system_prompts=4, system_prompt_skew=1.0, num_tenants=2)
    trace = generate(config, 1)
    uses: dict = {}
    for row in trace:
        uses[row.prompt[0].key] = uses.get(row.prompt[0].key, 0) + 1
    expected = [2000 / rank / (1 + 1 / 2 + 1 / 3 + 1 / 4) for rank in (1, 2, 3, 4)]
    assert sorted(uses.values(), reverse=True) == pytest.approx(expected, rel=0.15)
    assert {row.tenant for row in trace} == {"tenant-0", "tenant-1"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"arrival": "posson"}, r"trace.arrival is 'posson'; did you mean 'poisson'\? choose one of poisson, gamma"),
        ({"think": "x"}, "trace.think is 'x'; choose one of constant, exponential"),
        ({"num_requests": 0}, "trace.num_requests is 0; it must be at least 1"),
        ({"rate": 0.0}, "trace.rate is 0.0; it must be above 0"),
        ({"rate": float("nan")}, "trace.rate is nan"),
        ({"cv": 0.0}, "trace.cv is 0.0; it must be above 0"),
        ({"min_turns": 0}, "trace.min_turns is 0"),
        ({"min_turns": 3, "max_turns": 2}, r"trace.max_turns is 2; it must be at least min_turns \(3\)"),
        ({"think_time_s": -1.0}, "trace.think_time_s is -1.0; it must be 0 to 1e9"),
        ({"num_system_prompts": -1}, "trace.num_system_prompts is -1"),
        ({"num_tenants": -1}, "trace.num_tenants is -1"),
        ({"system_prompt_tokens": 0}, "trace.system_prompt_tokens is 0"),
        ({"system_prompt_skew": -0.1}, "trace.system_prompt_skew is -0.1"),
        ({"max_session_tokens": 1}, "trace.max_session_tokens is 1; it must be at least 2"),
        ({"max_session_tokens": 512, "num_system_prompts": 1}, "it must be at least 514, or absent"),
    ],
)
def test_settings_out_of_range_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        SyntheticConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "normal"}, "lengths.kind is 'normal'; did you mean 'lognormal'\\? choose one of constant, uniform"),
        ({"value": 0.5}, "lengths.value is 0.5; it must be 1 to"),
        ({"sigma": -1.0}, "lengths.sigma is -1.0"),
        ({"min_tokens": 0}, "lengths.min_tokens is 0; it must be 1 to 100,000,000"),
        ({"min_tokens": 9, "max_tokens": 8}, r"lengths.max_tokens is 8; it must be from min_tokens \(9\)"),
    ],
)
def test_length_settings_out_of_range_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        LengthConfig(**values)


def test_negative_seeds_are_refused():
    with pytest.raises(ConfigError, match="seed is -1; it must be 0 or above"):
        generate(SyntheticConfig(), -1)


@pytest.mark.parametrize("rate", [1e-300, 1e-9])
@pytest.mark.parametrize("arrival", ["poisson", "gamma", "deterministic"])
def test_arrivals_beyond_any_clock_are_refused(arrival, rate):
    with pytest.raises(ConfigError, match=f"trace.rate is {rate}; the last of 200 arrivals would come after"):
        generate(SyntheticConfig(arrival=arrival, rate=rate))
