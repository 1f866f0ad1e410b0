"""Replicates of a recorded trace: whole sessions and conversations are kept, drawn and moved; each seed is another."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed.errors import ConfigError, TraceError
from testbed.traces.arrange import arrange
from testbed.traces.arrivals import ArrivalConfig
from testbed.traces.fingerprint import fingerprint
from testbed.traces.generators import SyntheticConfig, generate
from testbed.traces.readers import read_trace
from testbed.traces.schema import Span, Trace, TraceRequest
from testbed.traces.summary import summarise
from testbed.traces.transforms import pipeline
from testbed.traces.transforms.resampling import bootstrap, copies, jitter
from testbed.traces.transforms.selection import sample_sessions, thin
from testbed.traces.transforms.units import MAX_TURNS, units_of
from tests.traces.kit import S, published, write
from tests.traces.test_drawn_formats import archive, session
from tests.traces.test_streams import FILES

SYSTEM = 7  # a block that all conversations begin with
CHAT = generate(SyntheticConfig(num_requests=80, min_turns=1, max_turns=5, num_system_prompts=1, closed_loop=False), 1)


def blocks(num_conversations: int = 40, num_turns: int = 4) -> Trace:
    """Conversations without sessions, by turns: each prompt is the one before and two blocks more, the last one cut."""
    rows = []
    for turn in range(num_turns):
        for one in range(num_conversations):
            keys = [SYSTEM, *(1000 * (one + 1) + i for i in range(2 * turn + 2))]
            last = Span(10**9 + 1000 * one + turn, 0, 5)  # partial: another content than the block it becomes
            prompt = (*(Span(key, 0, 16) for key in keys), last)
            arrival_ns = (turn * num_conversations + one) * S
            rows.append(TraceRequest(f"c{one}-{turn}", arrival_ns, prompt, Span(-one * 100 - turn - 1, 0, 4)))
    return arrange("blocks", rows)


def conversation(row: TraceRequest) -> str:
    return row.request_id.split("-")[0]


def test_conversations_show_by_their_blocks() -> None:
    trace = blocks()
    unit_of = units_of(trace)
    names = {conversation(row): unit_of(row) for row in trace}
    assert len(set(names.values())) == len(names) == 40
    assert all(unit_of(row) == names[conversation(row)] for row in trace)


def test_what_is_no_conversation_stays_a_request() -> None:
    rows = [TraceRequest(f"r{i}", i * S, (Span(SYSTEM, 0, 16), Span(100 + i, 0, 9 + i)), None) for i in range(12)]
    trace = arrange("system prompts", rows)
    assert len({units_of(trace)(row) for row in trace}) == 12
    assert MAX_TURNS > 12, "else the shared prompt would have told them apart anyway"


@given(st.integers(0, 2**32), st.sampled_from([0.2, 0.5, 0.8]))
def test_thinning_keeps_whole_conversations(seed: int, fraction: float) -> None:
    trace = blocks()
    kept = thin(trace, fraction, seed) if seed % 2 else sample_sessions(trace, round(40 * fraction), seed)
    assert set(Counter(map(conversation, kept)).values()) <= {4}
    if not seed % 2:
        assert len(kept) == 4 * round(40 * fraction)


@given(st.integers(0, 2**32), st.sampled_from([blocks(), CHAT]))
def test_jitter_moves_what_belongs_together_together(seed: int, trace: Trace) -> None:
    moved = jitter(trace, 3.0, seed)
    unit_of, by_id = units_of(trace), {row.request_id: row for row in trace}
    assert {row.request_id for row in moved} == set(by_id)
    by: dict[object, set[int]] = {}
    for row in moved:
        by.setdefault(unit_of(row), set()).add(row.arrival_ns - by_id[row.request_id].arrival_ns)
        assert row.prompt == by_id[row.request_id].prompt
    assert all(len(offsets) == 1 for offsets in by.values())
    assert all(abs(offset) <= 3 * S for offsets in by.values() for offset in offsets)
    assert moved.rows[0].arrival_ns >= 0
    assert len({offset for offsets in by.values() for offset in offsets}) > len(by) // 2, "all moved alike"


def test_jitter_piles_nothing_up_at_the_start() -> None:
    rows = [TraceRequest(f"r{i}", i * S // 20, (Span(i, 0, 9),), None) for i in range(4000)]  # 20 a second for 200 s
    starts = [row.arrival_ns for row in jitter(arrange("steady", rows), 50.0, seed=1)]
    assert len(set(starts)) > 3990
    for from_s in range(0, 150, 10):
        num = sum(from_s * S <= start < (from_s + 10) * S for start in starts)
        assert 160 <= num <= 240, f"{num} instead of about 200 from {from_s} s on"


@given(st.integers(0, 2**32), st.sampled_from([blocks(), CHAT]))
def test_a_bootstrap_has_the_starts_and_whole_units_up_to_the_recorded_end(seed: int, trace: Trace) -> None:
    drawn = bootstrap(trace, seed)
    unit_of, end_ns = units_of(trace), max(row.arrival_ns for row in trace)
    starts: dict[object, int] = {}
    for row in trace:
        starts.setdefault(unit_of(row), row.arrival_ns)
    groups: dict[str, list[TraceRequest]] = {}
    for row in drawn:
        groups.setdefault(row.request_id.rpartition("~")[2], []).append(row)
    assert sorted(min(row.arrival_ns for row in rows) for rows in groups.values()) == sorted(starts.values())
    by_id = {row.request_id: row for row in trace}
    for rows in groups.values():
        originals = [by_id[row.request_id.rpartition("~")[0]] for row in rows]
        assert len({unit_of(row) for row in originals}) == 1
        later_ns = rows[0].arrival_ns - originals[0].arrival_ns
        whole = [row for row in trace if unit_of(row) == unit_of(originals[0])]
        assert originals == [row for row in whole if row.arrival_ns + later_ns <= end_ns]
        assert [row.num_prompt_tokens for row in rows] == [row.num_prompt_tokens for row in originals]


def test_copies_share_with_the_first_one_no_more_than_others_do() -> None:
    drawn = bootstrap(blocks(), 0)
    owners: dict[int, set[str]] = {}
    for row in drawn:
        for part in row.prompt:
            assert isinstance(part, Span)
            owners.setdefault(part.key, set()).add(row.request_id.rpartition("~")[2])
    assert {key for key, numbers in owners.items() if len(numbers) > 1} == {SYSTEM}


STEPS = [{"name": "jitter", "within_s": 1.0}, {"name": "bootstrap"}, {"name": "copies", "num": 2, "within_s": 1.0}]


@pytest.mark.parametrize("step", STEPS, ids=lambda s: s["name"])
def test_the_runs_seed_makes_another_replicate(step: dict[str, object]) -> None:
    made = [fingerprint(pipeline.apply_all(CHAT, [step], _opens_nothing, seed)) for seed in (0, 1, 0)]
    assert made[0] == made[2] != made[1]
    assert made[0] != fingerprint(CHAT)


def _opens_nothing(format: str, path: str) -> Trace:
    raise AssertionError


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    """A trace of every format that has sessions, ids of blocks or token ids, and of those that have not."""
    folder = tmp_path_factory.mktemp("recorded")
    found = [read_trace(form, write(folder, f"{form}.txt", text)) for form, text in FILES if form != "parquet"]
    coding = archive(folder / "a.tar", session() | session("b"))
    chats = [{"conversations": [{"from": who, "value": f"{who} {i} " * (turn + 2)} for turn in range(3)
                                for who in ("human", "gpt")]} for i in range(9)]  # fmt: skip
    shared = write(folder, "chats.json", json.dumps(chats))
    by_ids = read_trace("sharegpt", shared, tokenizer=lambda text: [ord(letter) for letter in text])
    agents = [read_trace("agentic", coding, arrivals=ArrivalConfig(), closed_loop=closed) for closed in (True, False)]
    conversations = arrange("blocks", [row._replace(output=Span(i, 0, 4)) for i, row in enumerate(blocks())])
    return [*found, by_ids, *agents, conversations, CHAT]


def contents(row: TraceRequest) -> set[object]:
    """What other rows may share with it: keys, and the salt of token ids."""
    parts = row.prompt if row.output is None else (*row.prompt, row.output)
    return {part.key if isinstance(part, Span) else f"salt {row.cache_salt}" for part in parts}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from([0.8, 1, 1.5, 2, 3.25]), st.sampled_from([0.5, 40.0]), st.integers(0, 99))
def test_copies_are_as_many_users_with_their_own_pauses_and_contents(recorded, data, num, within_s, seed) -> None:
    trace = data.draw(st.sampled_from(recorded))
    made = copies(trace, num, within_s, seed)
    assert fingerprint(copies(trace, num, within_s, seed)) == fingerprint(made)
    unit_of, by_id = units_of(trace), {row.request_id: row for row in trace}
    of_copy: dict[int, list[TraceRequest]] = {}
    for row in made:
        of_copy.setdefault(int(row.request_id.partition("@")[2] or 0), []).append(row)
    seen: set[object] = set()
    for copy, rows in of_copy.items():
        before = [by_id[row.request_id.partition("@")[0]] for row in rows]
        units = [unit_of(row) for row in before]
        assert Counter(units) == {unit: n for unit, n in Counter(map(unit_of, trace)).items() if unit in units}
        assert copy + 1 > num or len(rows) == len(trace), "whole but for the last"
        moves = {unit: row.arrival_ns - was.arrival_ns for unit, row, was in zip(units, rows, before, strict=True)}
        for unit, row, was in zip(units, rows, before, strict=True):
            assert row.arrival_ns == was.arrival_ns + moves[unit], "pauses stay"
            kept = ("think_ns", "turn", "tenant", "priority", "deadline_ns", "num_prompt_tokens", "num_output_tokens")
            assert [getattr(row, name) for name in kept] == [getattr(was, name) for name in kept]
        assert all(abs(move) <= within_s * S if copy else move == 0 for move in moves.values())
        assert summarise(rows).hits.tolist() == summarise(before).hits.tolist(), "prefixes are shared as they were"
        own = {content for row in rows for content in contents(row)}
        assert seen.isdisjoint(own), "and not between copies"
        seen |= own


def test_a_part_of_a_copy_has_that_share_of_the_sessions_and_less_is_within_more() -> None:
    trace = blocks(400, 2)
    ids = [
        {(row.request_id, row.arrival_ns) for row in copies(trace, num, 9.0, seed=3)}
        for num in (0.3, 0.6, 1, 1.5, 2.25)
    ]
    assert [round(len(each) / len(trace), 1) for each in ids] == pytest.approx([0.3, 0.6, 1, 1.5, 2.25], abs=0.1)
    assert ids[0] < ids[1] < ids[2] < ids[3] < ids[4]


def test_copies_of_copies_have_names_and_contents_of_their_own() -> None:
    once = copies(CHAT, 2, 1.0, 0)
    twice = pipeline.apply_all(CHAT, [{"name": "copies", "num": 2, "within_s": 1.0}] * 2, _opens_nothing, 0)
    assert (len(once), len(twice)) == (2 * len(CHAT), 4 * len(CHAT))
    assert twice.notes[-2].startswith("2 copies at once, starts moved by up to 1 s, seed 0")


def test_more_copies_than_memory_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num is 1000000.0; .* at most 125,000, for 80 requests each"):
        copies(CHAT, 1e6, 1.0)
    with pytest.raises(ConfigError, match=r"within_s is 0; it must be above 0"):
        copies(CHAT, 2, 0)


def test_what_cannot_be_resampled_is_refused() -> None:
    one = arrange("one", [row for row in CHAT if row.session_id == CHAT.rows[0].session_id])
    with pytest.raises(TraceError, match="is one session: there is nothing to draw from"):
        bootstrap(one, 0)
    with pytest.raises(ConfigError, match=r"within_s is 0; it must be above 0"):
        jitter(CHAT, 0, 0)


def test_half_of_the_published_conversations_hit_as_much_as_all() -> None:
    trace = read_trace("mooncake", published("mooncake_fast25_conversation.jsonl.gz"))
    whole, half = hit_rate(trace), hit_rate(thin(trace, 0.5, 0))
    assert half == pytest.approx(whole, rel=0.1)
    assert hit_rate(arrange("every other request", trace.rows[::2])) < 0.8 * whole


def hit_rate(trace: Trace) -> float:
    """With an infinite cache, of blocks."""
    seen: set[object] = set()
    num_hit = num = 0
    for row in trace:
        for part in row.prompt:
            num_hit += part.num_tokens * (part in seen)
            num += part.num_tokens
            seen.add(part)
    return num_hit / num
