"""Transformations by name: composable, alike on whole and streamed traces, and refused in one line when wrong."""

import itertools
from array import array

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from testbed.core.outcome import FinishReason
from testbed.errors import ConfigError, TraceError
from testbed.traces import transforms
from testbed.traces.arrange import arrange
from testbed.traces.fingerprint import fingerprint
from testbed.traces.generators import SyntheticConfig, generate, stream_generated
from testbed.traces.schema import Span, TokenIds, TraceRequest
from testbed.traces.stream import StreamedTrace, whole
from testbed.traces.summary import PrefixShare, summarise
from testbed.traces.synthesis import materialize
from tests.traces.kit import S, plain
from tests.traces.test_streams import serve

CHAT = SyntheticConfig(num_requests=60, rate=2.0, max_turns=4, num_system_prompts=1, num_tenants=2)
STEPS = [
    {"name": "scale_rate", "factor": 2}, {"name": "speed_up", "factor": 3}, 
    {"name": "set_rate", "rate": 3.5, "by": "warp"},
    {"name": "thin", "fraction": 0.6}, {"name": "set_rate", "rate": 0.5, "by": "thin"},
    {"name": "sample_sessions", "num": 12},
    {"name": "shift", "offset_s": 3.5}, {"name": "window", "start_s": 0, "end_s": 15},
    {"name": "limit", "num_requests": 40},
    {"name": "filter", "max_prompt_tokens": 1500, "max_turn": 2},
    {"name": "scale_lengths", "prompt": 0.5, "output": 0.5},
    {"name": "clip_lengths", "max_output_tokens": 20}, {"name": "repeat", "times": 2, "gap_s": 1.0},
    {"name": "spread"}, {"name": "arrivals", "arrival": "gamma", "cv": 2.0},
    {"name": "jitter", "within_s": 2.0}, {"name": "bootstrap"}, {"name": "copies", "num": 1.5, "within_s": 4.0},
    {"name": "label", "classes": [{"tenant": "chat", "priority": 0}, {"share": 2, "priority": 1, "deadline_s": 1.5}]},
]  # fmt: skip


def no_file(name, path, seed):
    raise AssertionError("nothing to open")


def test_every_transformation_is_tried_here():
    assert {step["name"] for step in STEPS} == set(transforms.TRANSFORMS) - {"merge"}


@given(st.lists(st.sampled_from(STEPS), max_size=3), st.booleans())
@example([STEPS[12], STEPS[12], STEPS[7]], False)  # repeat, repeat, window
def test_whole_and_streamed_traces_come_out_alike(steps, closed_loop):
    from dataclasses import replace

    config = replace(CHAT, closed_loop=closed_loop)
    try:
        expected = transforms.apply_all(generate(config, 1), steps, no_file, 5)
    except (ConfigError, TraceError) as refused:
        with pytest.raises(type(refused)):
            whole(transforms.apply_all(stream_generated(config, 1), steps, no_file, 5))
        return
    found = transforms.apply_all(stream_generated(config, 1), steps, no_file, 5)
    assert fingerprint(found) == fingerprint(expected)
    if not {"spread", "arrivals", "jitter", "bootstrap", "copies"} & {step["name"] for step in steps}:
        assert isinstance(found, StreamedTrace)
        assert found.num_requests in (None, len(expected))


@pytest.mark.parametrize("make", [generate, stream_generated])
def test_a_trace_of_one_instant_that_a_step_cannot_change_is_told_with_the_step(make):
    config, step = SyntheticConfig(num_requests=3, arrival="all_at_once"), {"name": "set_rate", "rate": 2, "by": "warp"}
    with pytest.raises(ConfigError, match=r"^trace\.transforms\[0\] \(set_rate\): trace 'synthetic' has no rate "):
        tuple(transforms.apply_all(make(config, 1), [step], no_file, 5))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step["name"])
@pytest.mark.parametrize("gap_s", [None, 0.0, 10.0])
def test_closed_loops_are_served_alike_whole_and_streamed(step, gap_s):
    """gap_s: of a repetition after the step."""
    config = SyntheticConfig(num_requests=40, arrival="closed_loop", num_users=3, think_time_s=1.0, max_turns=3)
    steps = [step] if gap_s is None else [step, {"name": "repeat", "times": 2, "gap_s": gap_s}]
    try:
        expected = transforms.apply_all(generate(config, 1), steps, no_file, 5)
    except (ConfigError, TraceError):
        return  # there is no rate to change
    found = transforms.apply_all(stream_generated(config, 1), steps, no_file, 5)
    assert fingerprint(found) == fingerprint(expected)
    times_ns, reasons = [3 * 10**8, 5 * 10**9, 10**7], [FinishReason.LENGTH] * 6 + [FinishReason.IGNORED]
    assert serve(found, times_ns, reasons) == serve(expected, times_ns, reasons)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"name": "thn"}, r"trace\.transforms\[1\]\.name is 'thn'; did you mean 'thin'\? valid: scale_rate"),
        ({"name": "thin", "fractoin": 1}, r"unknown key 'trace\.transforms\[1\]\.fractoin'; did you mean 'fraction'\?"),
        ({"name": "thin"}, r"trace\.transforms\[1\] \(thin\) lacks 'fraction'; it has: fraction, seed"),
        ({"name": "thin", "fraction": "x"}, r"trace\.transforms\[1\]\.fraction is 'x'; it must be a number"),
        ({"name": "thin", "fraction": True}, r"fraction is true; it must be a number"),
        ({"name": "limit", "num_requests": 1.5}, "num_requests is 1.5; it must be a whole number"),
        ({"name": "window", "end_s": []}, r"end_s is \[\]; it must be a number or null"),
        ({"name": "thin", "fraction": 2},
         r"trace\.transforms\[1\] \(thin\): fraction is 2; it must be above 0, up to 1"),
        ({"name": "filter"}, "filter is empty; it must be given at least one bound"),
        ({"name": "set_rate", "rate": 9, "by": "wrap"}, r"by is 'wrap'; did you mean 'warp'\?"),
        ({"name": "set_rate", "rate": 9, "by": "thin"}, "rate is 9; it must be at most the trace's own 1 per second"),
        (
            {"name": "set_rate", "rate": 9},
            r"\[1\] \(set_rate\) lacks 'by'; choose by: thin \(keeps all times, .*\) or by: "
            r"warp \(keeps all requests, ",
        ),
        ({"name": "set_rate", "rate": 1e-300, "by": "warp"}, "rate is 1e-300; it must be large enough that"),
        ({"name": "scale_rate", "factor": float("inf")}, "factor is inf; it must be a finite number above 0"),
        ({"name": "scale_rate", "factor": 10**400},
         "factor is a whole number of about 401 digits; it must be a number"),
        ({"name": "shift", "offset_s": 1e12}, r"must be a number of seconds from -4\.6e\+09 to 4\.6e\+09"),
        ({"name": "scale_lengths"}, r"\[1\] \(scale_lengths\) changes nothing as it is; it has: prompt, output"),
        ({"name": "clip_lengths", "max_prompt_tokens": None}, r"\(clip_lengths\) changes nothing as it is; it has: "),
        ({"name": "window"}, r"\(window\) changes nothing as it is; it has: start_s, end_s"),
        ({"name": "scale_lengths", "prompt": 0}, "prompt is 0; it must be above 0"),
        ({"name": "shift", "offset_s": float("nan")}, "offset_s is nan"),
        ({"name": "sample_sessions", "num": 0}, "num is 0; it must be at least 1"),
        ({"name": "label", "classes": []}, r"\(label\): classes is \[\]; it must be a list of at least one {tenant: "),
        ({"name": "label", "classes": ["chat"]}, r"classes\[0\] is 'chat'; it must be {tenant: <text>, share: "),
        ({"name": "label", "classes": [{"priorty": 1}]}, r"key 'classes\[0\].priorty'; did you mean 'priority'\?"),
        ({"name": "label", "classes": [{"share": 0}]}, r"classes\[0\].share is 0; it must be above 0, up to 1e15"),
        ({"name": "label", "classes": [{"deadline_s": -1}]}, r"\(label\): classes\[0\].deadline_s is -1; it must be 0"),
        ({"name": "label", "classes": [{"tenant": " "}]}, r"classes\[0\].tenant is ' '; it must be not empty"),
        ({"name": "merge", "path": "x", "label": "plain"}, "label is 'plain', which is the name of the first trace"),
        ("thin", r"trace\.transforms\[1\] is 'thin'; it must be \{name: <one of"),
    ],
)  # fmt: skip
def test_steps_that_make_no_sense_are_refused(step, message):
    with pytest.raises(ConfigError, match=message):
        transforms.apply_all(plain(0, 1, 2), [{"name": "limit", "num_requests": 3}, step], lambda *_: plain(1))


def labelled(trace, *shares, seed=3):
    classes = [{"tenant": f"class-{i}", "share": share, "priority": i} for i, share in enumerate(shares)]
    return transforms.apply_all(trace, [{"name": "label", "classes": classes, "seed": seed}], no_file, 7)


def test_sessions_are_labelled_whole_by_shares_and_seed():
    chat = generate(SyntheticConfig(num_requests=4_000, max_turns=4, deadline_s=2.0), 1)
    found = labelled(chat, 0.6, 0.4)
    assert {(row.tenant, row.priority, row.deadline_ns) for row in found} == {
        ("class-0", 0, 2 * S), ("class-1", 1, 2 * S)
    }  # fmt: skip
    of = {row.session_id: row.tenant for row in found}
    assert all(of[row.session_id] == row.tenant for row in found)
    assert list(of.values()).count("class-0") / len(of) == pytest.approx(0.6, abs=0.03)
    assert [row._replace(tenant=None, priority=0) for row in found] == list(chat)
    more = {row.session_id: row.tenant for row in labelled(chat, 7, 3)}
    assert not any(of[name] == "class-0" != more[name] for name in of), "a larger share only takes sessions in"
    assert fingerprint(found) == fingerprint(labelled(chat, 0.6, 0.4)) != fingerprint(labelled(chat, 6, 4, seed=4))
    assert found.notes[-1].startswith(
        "sessions put into classes (tenant class-0, share 0.6, priority 0; tenant class-1"
    )


def test_a_run_s_seed_makes_no_replicates_by_other_labels():
    labels = [{"name": "label", "classes": [{"tenant": "a"}, {"tenant": "b", "priority": None}]}]
    first, other = (transforms.apply_all(plain(*range(50)), labels, no_file, seed) for seed in (1, 2))
    assert fingerprint(first) == fingerprint(other)
    assert first.notes[-1].startswith("sessions put into classes (tenant a; tenant b) with seed 0")


def test_labels_of_a_second_step_are_drawn_apart_from_those_of_the_first():
    tenants, levels = [{"tenant": "a"}, {"tenant": "b"}], [{"priority": 0}, {"priority": 1}]
    steps = [{"name": "label", "classes": classes} for classes in (tenants, levels)]
    once, twice = (transforms.apply_all(plain(*range(4_000)), steps[:num], no_file, 5) for num in (1, 2))
    assert [row.tenant for row in once] == [row.tenant for row in twice]
    for tenant in ("a", "b"):
        assert np.mean([row.priority for row in twice if row.tenant == tenant]) == pytest.approx(0.5, abs=0.05)


def test_labels_are_drawn_apart_from_what_is_thinned():
    rows = plain(*range(4_000))
    kept = labelled(transforms.thin(rows, 0.5, 3), 1, 1)
    assert sum(row.priority for row in kept) / len(kept) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("kind", ["default", "given"])
def test_a_second_draw_by_the_same_seed_is_another_one(kind):
    rows = plain(*range(4_000))
    seed = {} if kind == "default" else {"seed": 3}

    def kept(*steps):
        return [row.request_id for row in transforms.apply_all(rows, steps, no_file, 3)]

    half = {"name": "thin", "fraction": 0.5, **seed}
    warp, shift = {"name": "set_rate", "rate": 2.0, "by": "warp", **seed}, {"name": "shift", "offset_s": 1.0}
    once, twice, thrice = kept(half), kept(half, half), kept(half, half, half)
    assert once == [row.request_id for row in transforms.thin(rows, 0.5, 3)] == kept(shift, warp, half)
    for more, fewer in ((once, twice), (twice, thrice)):
        assert set(fewer) < set(more)
        assert len(fewer) / len(more) == pytest.approx(0.5, abs=0.08)
    assert len(kept(half, {"name": "sample_sessions", "num": 100, **seed})) == 100
    assert set(kept(half, half | {"seed": 4})) != set(twice)
    steps = [{"name": "arrivals", "arrival": "poisson", "rate": 2.0, **seed}]
    alone = [row.arrival_ns for row in transforms.apply_all(rows, steps, no_file, 3)]
    after = transforms.apply_all(rows, [half | {"fraction": 1.0}, *steps], no_file, 3)
    assert [row.arrival_ns for row in after] == alone, "starts are drawn by themselves"


def test_thinning_and_warping_are_two_ways_to_one_rate():
    config = SyntheticConfig(num_requests=4000, arrival="mmpp", rate=10.0, burst_s=5.0, calm_s=20.0)
    trace = generate(config, 1)
    warped, thinned = transforms.set_rate(trace, 2.0, "warp"), transforms.set_rate(trace, 2.0, by="thin", seed=3)
    own = summarise(trace).rate
    assert warped.notes == (f"rate set from {own:g} to 2 per second by warp: arrival rate x {2 / own:g}",)
    told = f"rate set from {own:g} to 2 per second by thin: thinned to {2 / own:g} with seed 3"
    assert thinned.notes == (f"{told}: {len(thinned)} of 4000 requests kept",)
    assert transforms.set_rate(stream_generated(config, 1), 2.0, "thin", 3).notes == (told,)
    assert summarise(warped).rate == pytest.approx(2.0, rel=1e-6)
    assert summarise(thinned).rate == pytest.approx(2.0, rel=0.1)
    assert len(warped) == len(trace)
    assert summarise(thinned).duration_s == pytest.approx(summarise(trace).duration_s, rel=0.02)
    assert summarise(warped).dispersion(50.0) == pytest.approx(summarise(trace).dispersion(10.0), rel=0.05)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("step", "told"),
    [
        ({"name": "thin", "fraction": 0.5, "seed": 7}, "thinned to 0.5 with seed 7"),
        ({"name": "sample_sessions", "num": 3}, "a sample of 3 sessions with seed 5"),
        ({"name": "repeat", "times": 2, "gap_s": 1.5, "fresh_content": False},
         "repeated 2 times, 1.5 s apart, copies with the same contents"),
        ({"name": "clip_lengths", "max_prompt_tokens": 3}, "lengths clipped to max_prompt_tokens=3"),
        ({"name": "arrivals", "arrival": "gamma", "cv": 2.0, "burst_s": 9.0},
         "sessions start anew by gamma, 4 per second, cv 2, seed 5; burst_s has no effect with arrival=gamma"),
        ({"name": "scale_rate", "factor": 2}, "arrival rate x 2"),
    ],
)  # fmt: skip
def test_notes_have_what_it_takes_to_do_it_again(step, told, stream):
    trace = plain(*range(9))
    source = StreamedTrace("plain", lambda: iter(trace), (), 9) if stream else trace
    note = transforms.apply_all(source, [step], no_file, 5).notes[-1]
    assert note == told or note.startswith(f"{told}: ")


def test_lengths_are_not_scaled_beyond_what_a_file_may_have():
    long = [TraceRequest("r", 0, (Span(1, 0, 10**6),), Span(1, 10**6, 5))]
    assert transforms.scale_lengths(arrange("x", long), 100).rows[0].num_prompt_tokens == 10**8
    with pytest.raises(
        ConfigError, match="prompt is 101; it must be smaller: that of r would be above 100,000,000 tok"
    ):
        transforms.scale_lengths(arrange("x", long), 101)


def test_a_step_that_makes_impossible_rows_is_named():
    steps = [{"name": "limit", "num_requests": 2}, {"name": "repeat", "times": 3, "gap_s": 4e9}]
    with pytest.raises(TraceError, match=r"^trace.transforms\[1\] \(repeat\): request 'r0#2': .* arrives at 8e\+09 s"):
        transforms.apply_all(plain(1, 2), steps, no_file)


def test_scaled_lengths_share_in_proportion():
    chat = generate(SyntheticConfig(num_requests=80, max_turns=5), 3)
    half = transforms.scale_lengths(chat, 0.5, 0.5)
    whole_share, half_share = PrefixShare(), PrefixShare()
    hits = [(whole_share.add(a), half_share.add(b)) for a, b in zip(chat, half, strict=True)]
    assert all(abs(b - a / 2) <= 2 for a, b in hits)
    for before, after in zip(chat, half, strict=True):
        assert abs(after.num_prompt_tokens - before.num_prompt_tokens / 2) <= 1
    tiny = transforms.scale_lengths(chat, 1e-9, 1e-9)
    assert {(row.num_prompt_tokens, row.num_output_tokens) for row in tiny} == {(1, 1)}


@pytest.mark.parametrize(("factor", "num_tokens", "num_shared"), [(0.1, 160, 80), (0.03, 48, 24), (1.03, 1648, 824)])
def test_blocks_of_a_prompt_are_rounded_together_when_scaled(factor, num_tokens, num_shared):
    blocks = [tuple(Span(key, 0, 16) for key in (*range(50), *range(first, first + 50))) for first in (100, 200)]
    rows = [TraceRequest(f"r{i}", i, prompt, Span(900 + i, 0, 5)) for i, prompt in enumerate(blocks)]
    found = transforms.scale_lengths(arrange("blocks", rows), factor)
    assert [row.num_prompt_tokens for row in found] == [num_tokens] * 2
    assert summarise(found.rows).shared() == num_shared / (2 * num_tokens)


def of_ids(trace):
    """The same trace with explicit token ids, one part for each question and each answer."""

    def ids(part):
        return TokenIds(materialize((part,), 1000))

    rows, history = [], {}
    for row in trace:
        before = history.get(row.session_id, ())
        num = sum(part.num_tokens for part in before)
        asked = TokenIds(materialize(row.prompt, 1000)[num:])
        rows.append(row._replace(prompt=(*before, asked), output=ids(row.output)))
        history[row.session_id] = (*rows[-1].prompt, rows[-1].output)
    return arrange("ids", rows)


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize(("prompt", "output"), [(1, 0.5), (0.3, 1), (0.3, 0.7), (1, 2), (2, 0.1)])
def test_prompts_repeat_the_answers_that_were_scaled_by_a_factor_of_their_own(prompt, output, with_ids):
    config = SyntheticConfig(num_requests=60, rate=1.0, max_turns=5, closed_loop=False, num_system_prompts=1)
    chat = of_ids(generate(config, 3)) if with_ids else generate(config, 3)
    if with_ids and max(prompt, output) > 1:
        name = "prompt is 2" if prompt > 1 else "output is 2"
        with pytest.raises(ConfigError, match=f"{name}; it must be at most 1 for the explicit token ids of s0-t0"):
            transforms.scale_lengths(chat, prompt, output)
        return
    found = transforms.scale_lengths(chat, prompt, output)
    said, sizes = {}, {}
    for before, after in zip(chat, found, strict=True):
        history = said.get(before.session_id, [])
        tokens = materialize(after.prompt, 1000)
        assert tokens[: len(history)].tolist() == history
        said[before.session_id] = [*tokens, *materialize((after.output,), 1000)]
        asked, answered = sizes.get(before.session_id, (0, 0))
        asked = before.num_prompt_tokens - answered
        assert abs(len(tokens) - prompt * asked - output * answered) <= 0.5
        assert abs(after.num_output_tokens - output * before.num_output_tokens) <= 1
        sizes[before.session_id] = asked, answered + before.num_output_tokens


def test_a_question_that_repeats_an_answer_is_scaled_as_a_question():
    yes, no = (TokenIds(array("i", [token] * 10)) for token in (1, 2))
    turns = [((yes,), yes), ((yes, yes, yes), no), ((yes, yes, yes, no, yes), yes)]
    rows = [TraceRequest(f"t{i}", i, asked, said, session_id="s", turn=i) for i, (asked, said) in enumerate(turns)]
    found = transforms.scale_lengths(arrange("chat", rows), 1.0, 0.5)
    assert [[part.num_tokens for part in row.prompt] for row in found] == [[10], [10, 5, 10], [10, 5, 10, 5, 10]]


def test_samples_of_sessions_nest_and_have_the_size_asked_for():
    chat = generate(CHAT, 1)
    names = [{row.session_id for row in transforms.sample_sessions(chat, num, 4)} for num in (3, 9)]
    assert [len(sample) for sample in names] == [3, 9]
    assert names[0] < names[1]
    assert len(transforms.sample_sessions(chat, 10**6)) == len(chat)


def test_merged_with_another_trace_its_names_are_kept_apart():
    steps = [{"name": "merge", "path": "f", "format": "azure", "label": "other"}]
    merged = transforms.apply_all(plain(0, 2), steps, lambda name, path, seed: plain(1, 3))
    assert [row.request_id for row in merged] == ["plain/r0", "other/r0", "plain/r1", "other/r1"]
    streamed = transforms.apply_all(StreamedTrace("plain", lambda: iter(plain(0, 2))), steps, lambda *_: plain(1, 3))
    assert isinstance(streamed, StreamedTrace)
    assert fingerprint(streamed) == fingerprint(merged)


@pytest.mark.parametrize("form", ["lengths", "auto"])
def test_what_a_merged_format_samples_is_drawn_by_the_run_s_seed_apart_from_all_else(tmp_path, form):
    from experiments.configuration.compose import compose_config, to_overrides
    from experiments.wiring.traces import build_source

    file = tmp_path / "a.csv"
    file.write_text("num_prefill_tokens,num_decode_tokens\n" + "9,5\n" * 200)
    steps = [{"name": "merge", "path": str(file), "format": form, "label": label} for label in ("a", "b")]
    gaps = {}
    for seed in (0, 1):
        made = build_source(compose_config(to_overrides({"trace": {"transforms": steps}, "seed": seed})))
        for label in ("synthetic+a/synthetic", "synthetic+a/a", "b"):
            arrivals = [row.arrival_ns for row in made if row.tenant == label]
            gaps[label, seed] = np.diff(arrivals)
    for one, other in itertools.combinations(gaps, 2):
        assert abs(np.corrcoef(gaps[one], gaps[other])[0, 1]) < 0.3, (one, other)


def test_new_starts_move_whole_sessions():
    chat = generate(SyntheticConfig(num_requests=40, max_turns=4, closed_loop=False), 1)
    moved = transforms.apply_all(chat, [{"name": "arrivals", "arrival": "deterministic", "rate": 0.5}], no_file)
    before, after = {r.request_id: r.arrival_ns for r in chat}, {r.request_id: r.arrival_ns for r in moved}
    starts = [after[row.request_id] for row in chat if row.turn == 0]
    assert starts == [2 * S * i for i in range(len(starts))]
    for row in chat:
        first = f"{row.session_id}-t0"
        assert after[row.request_id] - after[first] == before[row.request_id] - before[first]
