"""Transformations keep what they do not name, say what they did, and refuse what makes no sense."""

from array import array

import pytest

from testbed.errors import ConfigError, TraceError
from testbed.traces import transforms
from testbed.traces.arrange import arrange
from testbed.traces.fingerprint import fingerprint
from testbed.traces.generators import LengthConfig, SyntheticConfig, generate
from testbed.traces.schema import Span, TokenIds, Trace, TraceRequest
from testbed.traces.stream import StreamedTrace, whole
from testbed.traces.synthesis import materialize
from tests.traces.kit import S, plain


@pytest.fixture(scope="module")
def chat() -> Trace:
    return generate(SyntheticConfig(num_requests=80, min_turns=1, max_turns=5, num_system_prompts=1), 1)


def instants(trace: Trace) -> list[float]:
    return [row.arrival_ns / S for row in trace]


def test_rate_scales_arrivals(chat):
    assert instants(transforms.scale_rate(plain(0, 1, 3), 2)) == [0, 0.5, 1.5]
    assert transforms.scale_rate(plain(0, 1), 2).notes == ("arrival rate x 2",)
    fast = transforms.speed_up(chat, 2)
    assert fast.notes[-1] == "the trace's clock x 2"
    for before, after in zip(chat, fast, strict=True):
        assert after.arrival_ns == round(before.arrival_ns / 2)
        assert after.think_ns == (None if before.think_ns is None else round(before.think_ns / 2))


def test_shift_window_and_limit():
    assert instants(transforms.shift(plain(1, 2), -1.0)) == [0, 1]
    assert instants(transforms.window(plain(0, 1, 2, 3), 1, 3)) == [0, 1]
    assert len(transforms.limit(plain(0, 1, 2), 2)) == 2
    assert transforms.limit(plain(0, 1), 5).notes == ()
    long = StreamedTrace("long", lambda: iter(plain(0, 1)))
    assert transforms.limit(long, 1).notes == ("the first 1 request",)
    known = StreamedTrace("known", lambda: iter(plain(0, 1)), num_requests=2)
    assert [transforms.limit(one, 1).num_requests for one in (long, known)] == [None, 1]


def test_a_cut_session_keeps_its_closed_turns_together(chat):
    cut = transforms.window(chat, 2.0, 8.0)
    expected = [r for r in chat if 2 * S <= r.arrival_ns < 8 * S]
    assert [r.request_id for r in cut] == [r.request_id for r in expected]


def test_spread_is_even():
    assert instants(transforms.spread(plain(0, 0, 0, 3, 3))) == [0, 1, 2, 3, 4.5]
    assert instants(transforms.spread(plain(1, 1))) == [1, 1]
    late = transforms.spread(plain(1, 1, 3, 3))
    assert instants(late) == [1, 2, 3, 4]
    assert late.notes == ("2 of 4 arrivals, batched in the file, were spread up to the next",)


def test_a_rate_is_that_between_the_first_and_the_last_arrival():
    assert instants(transforms.set_rate(plain(10, 11, 12), 2, "warp")) == [5, 5.5, 6]


def test_clipping_cuts_the_ends(chat):
    clipped = transforms.clip_lengths(chat, max_prompt_tokens=600, max_output_tokens=30)
    for before, after in zip(chat, clipped, strict=True):
        assert materialize(after.prompt, 100) == materialize(before.prompt, 100)[:600]
        assert materialize((after.output,), 100) == materialize((before.output,), 100)[:30]
    fitted = transforms.clip_lengths(chat, max_total_tokens=500)
    assert max(r.num_prompt_tokens + r.num_output_tokens for r in fitted) == 500
    ids = arrange("ids", [TraceRequest("a", 0, (TokenIds(array("i", [1, 2, 3])),), None)])
    assert transforms.clip_lengths(ids, max_total_tokens=3).rows[0].prompt[0].ids.tolist() == [1, 2]


def test_thinning_keeps_whole_sessions_and_nests(chat):
    half, third = transforms.thin(chat, 0.5, seed=1), transforms.thin(chat, 0.3, seed=1)
    kept = {row.request_id for row in half}
    assert {row.request_id for row in third} < kept
    sessions = {row.session_id for row in half}
    assert kept == {row.request_id for row in chat if row.session_id in sessions}
    many = plain(*range(2000))
    assert len(transforms.thin(many, 0.25)) == pytest.approx(500, abs=80)


def test_a_filter_ends_a_session_where_it_refuses_a_turn(chat):
    kept = transforms.keep(chat, lambda row: row.turn != 1)
    assert {row.turn for row in kept} == {0}


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({"min_prompt_tokens": 20}, "bc"), ({"max_prompt_tokens": 20}, "ab"), ({"min_output_tokens": 15}, "c"),
        ({"max_output_tokens": 5}, "a"), ({"tenant": "x"}, "ac"), ({"min_prompt_tokens": 20, "tenant": "x"}, "c"),
        ({"max_turn": 0}, "abc"),
    ],
)  # fmt: skip
def test_a_filter_keeps_what_is_within_all_bounds(bounds, kept):
    sizes = {"a": (10, 5, "x"), "b": (20, None, None), "c": (30, 15, "x")}  # prompt, output, tenant
    rows = [
        TraceRequest(name, 0, (Span(1, 0, prompt),), None if output is None else Span(2, 0, output), tenant=tenant)
        for name, (prompt, output, tenant) in sizes.items()
    ]
    found = transforms.keep_within(arrange("rows", rows), **bounds)
    assert "".join(row.request_id for row in found) == kept


def test_a_repeated_trace_is_repeated_with_new_ids_and_contents():
    again = transforms.repeat(transforms.repeat(plain(0, 1), 2), 2)
    assert [row.request_id for row in again] == ["r0", "r1", "r0#1", "r1#1", "r0##1", "r1##1", "r0#1##1", "r1#1##1"]
    assert len({row.prompt[0].key for row in again}) == 8


def test_repeats_have_contents_of_their_own_unless_asked(chat):
    twice = transforms.repeat(chat, 2, gap_s=1)
    assert len(twice) == 2 * len(chat)
    first, copy = chat.rows[0], next(row for row in twice if row.request_id == chat.rows[0].request_id + "#1")
    assert copy.arrival_ns == first.arrival_ns + chat.rows[-1].arrival_ns + S
    assert copy.session_id == f"{first.session_id}#1"
    assert materialize(copy.prompt, 1000) != materialize(first.prompt, 1000)
    same = transforms.repeat(chat, 2, fresh_content=False)
    copy = next(row for row in same if row.request_id == first.request_id + "#1")
    assert copy.prompt == first.prompt
    fresh = {row.request_id: row for row in twice}
    for row in chat:  # prefixes are shared within a copy as they were in the original
        if row.turn == 1:
            head = fresh[row.request_id.replace("-t1", "-t0") + "#1"]
            said = materialize((*head.prompt, head.output), 99)
            assert materialize(fresh[row.request_id + "#1"].prompt, 99)[: len(said)] == said


def test_merged_traces_keep_apart_what_has_the_same_name():
    one, two = plain(0, 2), plain(1, 2)
    stream = transforms.merge({"a": one, "b": two})
    assert stream.num_requests == 4
    merged = whole(stream)
    assert [row.request_id for row in merged] == ["a/r0", "b/r0", "a/r1", "b/r1"]
    assert [row.tenant for row in merged] == ["a", "b", "a", "b"]
    assert merged.rows[0].prompt != merged.rows[1].prompt
    shared = whole(transforms.merge({"a": one, "b": two}, share_content=True))
    assert shared.rows[0].prompt == shared.rows[1].prompt


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: transforms.scale_rate(t, 0), "factor is 0; it must be a finite number above 0"),
        (lambda t: transforms.scale_rate(t, float("nan")), "factor is nan"),
        (lambda t: transforms.scale_rate(t, 1e-300), "factor is 1e-300; it must be large enough"),
        (lambda t: transforms.window(t, 1e300), r"start_s is 1e\+300; it must be 0 to"),
        (lambda t: transforms.window(t, 0, float("inf")), "end_s is inf"),
        (lambda t: transforms.shift(t, -2.0), r"offset_s is -2\.0; it must be at least -1\.0 s"),
        (lambda t: transforms.window(t, -1), "start_s is -1"),
        (lambda t: transforms.window(t, 1, 1), r"end_s is 1; it must be above start_s \(1\)"),
        (lambda t: transforms.limit(t, 0), "num_requests is 0"),
        (lambda t: transforms.thin(t, 0), "fraction is 0; it must be above 0, up to 1"),
        (lambda t: transforms.clip_lengths(t, max_prompt_tokens=0), "max_prompt_tokens is 0"),
        (lambda t: transforms.clip_lengths(t, max_total_tokens=1), "max_total_tokens is 1; it must be at least 2"),
        (lambda t: transforms.repeat(t, 0), "times is 0"),
        (lambda t: transforms.repeat(t, 1, -1), "gap_s is -1"),
        (lambda t: transforms.merge({}), "traces is 0; it must be at least 1 trace"),
    ],
)
def test_impossible_parameters_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        change(plain(1, 2))


def test_nothing_left_is_an_error_that_says_why():
    end = ", and the last request arrives at 2 s"
    with pytest.raises(TraceError, match=rf"no requests; expected at least one \(after: cut to 5 s … 6 s{end}\)"):
        transforms.window(plain(1, 2), 5, 6)
    assert transforms.window(plain(1, 2), 1, 1_000_000).notes == (f"cut to 1 s … 1000000 s{end}",)
    said = r"\(after: cut to 5 s … 6 s.*; before that: arrival rate x 2; the first 3 of 4 requests\)"
    for trace in (plain(1, 2, 5, 6), StreamedTrace("x", lambda: iter(plain(1, 2, 5, 6).rows), num_requests=4)):
        cut = transforms.limit(transforms.scale_rate(trace, 2), 3)
        with pytest.raises(TraceError, match=said):
            whole(transforms.window(cut, 5, 6))


# --- fingerprints ---


def test_every_field_that_matters_changes_the_fingerprint():
    row = TraceRequest("a", 5, (Span(1, 0, 8),), Span(1, 8, 2), 0, "t", "s", 0, None, 7, place="here:1")
    base = fingerprint(Trace("x", (row,)))
    changes = [
        {"request_id": "b"}, {"arrival_ns": 6}, {"prompt": (Span(2, 0, 8),)}, {"prompt": (Span(1, 1, 8),)},
        {"prompt": (Span(1, 0, 9),)}, {"output": None}, {"output": Span(1, 8, 3)}, {"priority": 1}, {"tenant": None},
        {"session_id": "r"}, {"turn": 1}, {"think_ns": 0}, {"cancel_after_ns": None}, {"cancel_after_ns": 8},
        {"deadline_ns": 0}, {"deadline_ns": 1}, {"cache_salt": "a"}, {"cache_salt": "b"},
        {"max_tokens": 7}, {"max_tokens": 8},
        {"prompt": (Span(1, 0, 8), TokenIds(array("i", [1])))}, {"prompt": (TokenIds(array("i", [1])),)},
    ]  # fmt: skip
    found = [fingerprint(Trace("x", (row._replace(**change),))) for change in changes]
    assert len({base, *found}) == len(changes) + 1
    plain = TraceRequest("a", 5, (Span(1, 0, 8),), Span(1, 8, 2))  # is encoded faster
    more = [{"tenant": "t"}, {"session_id": "s"}, {"turn": 0}, {"cancel_after_ns": 7}, {"priority": 2}]
    changes = [change for change in [*changes, *more] if plain._replace(**change) != plain]
    found = [fingerprint(Trace("x", (plain._replace(**change),))) for change in [{}, *changes]]
    assert len(set(found)) == len(changes) + 1
    for one, cut in ((Span(1, 0, 8), (Span(1, 0, 3), Span(1, 3, 5))), (Span(1, 0, 0), ())):
        rows = (plain._replace(prompt=parts) for parts in ((one,), cut))
        assert len({fingerprint(Trace("x", (row,))) for row in rows}) == 1


def test_names_notes_places_and_cuts_do_not_change_the_fingerprint():
    row = TraceRequest("a", 5, (Span(1, 0, 8), TokenIds(array("i", [1, 2]))), None, place="here:1")
    cut = (Span(1, 0, 3), Span(1, 3, 5), TokenIds(array("i", [1])), TokenIds(array("i", [2])))
    base = fingerprint(Trace("x", (row,)))
    assert fingerprint(Trace("y", (row._replace(prompt=cut, place=""),), ("note",))) == base


def test_an_ignored_arrival_does_not_change_the_fingerprint():
    rows = [
        TraceRequest(f"s{t}", 5, (Span(1, 0, 8),), None, session_id="s", turn=t, think_ns=t or None) for t in (0, 1)
    ]
    moved = [rows[0], rows[1]._replace(arrival_ns=99)]
    assert fingerprint(Trace("x", tuple(rows))) == fingerprint(Trace("x", tuple(moved)))


def test_the_order_of_rows_matters():
    trace = plain(1, 1)
    assert fingerprint(trace) != fingerprint(Trace("x", trace.rows[::-1]))


def test_the_fingerprint_is_the_same_in_every_process():
    trace = arrange("golden", [TraceRequest("a", 1, (Span(2, 0, 3),), Span(2, 3, 4), tenant="t")])
    assert fingerprint(trace) == "b01e0d8c0f2620c3549a06523f0c8b9d"
    assert len(fingerprint(generate(SyntheticConfig(num_requests=5, prompt=LengthConfig("constant", 3))))) == 32
