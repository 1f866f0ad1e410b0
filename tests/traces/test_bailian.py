"""Bailian's chats become sessions, in whatever order their rows stand."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import TraceError
from testbed.traces.fingerprint import fingerprint
from testbed.traces.readers import open_trace, read_trace
from testbed.traces.stream import OutOfOrderError
from testbed.traces.synthesis import materialize
from tests.traces.kit import check_refused, json_lines, write


def chat(number, parent, at=5, length=40, ids=None):
    fields = {"chat_id": number, "parent_chat_id": parent, "timestamp": at, "input_length": length}
    return fields | {"output_length": 2, "type": "text", "turn": 1, "hash_ids": ids or [number, 9]}


def test_bailian_chats_become_sessions(tmp_path):
    rows = (chat(10, -1, 100.25, 20, [1, 2]), chat(11, 10, 101.5, 40, [1, 3, 4]), chat(12, -1, 102, 35, [1, 3]))
    trace = read_trace("bailian", write(tmp_path, "q.jsonl", json_lines(*rows)))
    assert [(row.session_id, row.turn, row.arrival_ns) for row in trace] == [
        ("bailian-10", 0, 0),
        ("bailian-10", 1, 1_250_000_000),
        ("bailian-12", 0, 1_750_000_000),
    ]
    first, second, third = (materialize(row.prompt, 9999) for row in trace)
    assert first[:16] == second[:16]
    assert first[16:20] != second[16:20]
    assert second[:32] == third[:32]
    assert second[32:35] != third[32:]  # blocks rounded down: the rest is the request's own


@given(st.lists(st.tuples(st.integers(-1, 7), st.integers(0, 5)), min_size=1, max_size=8), st.randoms())
def test_the_sessions_of_bailian_are_found_in_any_order(tmp_path_factory, chats, random):
    lines = [
        chat(i, -1 if parent == i else parent, 2 * at + i / 100, length=32 + i % 2)
        for i, (parent, at) in enumerate(chats)
    ]  # no two at one instant; with and without a rest that has no id
    ordered = sorted(lines, key=lambda fields: fields["timestamp"])
    shuffled = random.sample(lines, len(lines))
    file = tmp_path_factory.mktemp("bailian") / "q.jsonl"
    found = []
    for given_lines, stream in ((ordered, False), (ordered, True), (shuffled, False)):
        file.write_text(json_lines(*given_lines))
        try:
            trace = open_trace("bailian", file, stream=stream)
            found.append((fingerprint(trace), [(row.session_id, row.turn) for row in trace]))
        except TraceError as error:
            found.append(re.search("before turn|does not continue|stands after one that continues it", str(error)))
    if isinstance(found[0], re.Match):
        assert all(isinstance(refused, re.Match) for refused in found)
    else:
        assert found[0] == found[1] == found[2]
        parents = {f"bailian-{fields['chat_id']}": fields["parent_chat_id"] for fields in lines}
        turns = {row.request_id: row.turn for row in trace}
        carried = {parents[name] for name, turn in turns.items() if turn}
        there = {parent for parent in parents.values() if f"bailian-{parent}" in turns}
        assert carried == there, "every chat that is continued is carried on by one other"


def test_bailian_chats_of_one_instant_and_in_a_circle(tmp_path):
    file = write(tmp_path, "q.jsonl", json_lines(chat(2, 1), chat(1, -1)))
    assert [(row.request_id, row.session_id, row.turn) for row in read_trace("bailian", file)] == [
        ("bailian-1", "bailian-1", 0),
        ("bailian-2", "bailian-1", 1),
    ]
    with pytest.raises(OutOfOrderError, match=r"q\.jsonl:2: chat 1 stands after one .* set trace\.stream=false"):
        open_trace("bailian", file, stream=True)
    write(tmp_path, "q.jsonl", json_lines(chat(1, 2), chat(2, 1)))
    with pytest.raises(TraceError, match=r"q\.jsonl:1: field 'parent_chat_id' is 2; expected a chat that does not"):
        read_trace("bailian", file)


def test_a_bailian_chat_that_continues_itself_is_refused(tmp_path):
    file = write(tmp_path, "q.jsonl", json_lines(chat(-1, -1)))
    check_refused("bailian", file, r"q\.jsonl:1: field 'chat_id' is -1; expected a whole number from 0")
    file = write(tmp_path, "q.jsonl", json_lines(chat(1, 1)))
    check_refused("bailian", file, r"q\.jsonl:1: field 'parent_chat_id' is 1; expected another chat, or -1")
