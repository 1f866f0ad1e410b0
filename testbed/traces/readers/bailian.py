"""Qwen-Bailian usage traces (Alibaba; "KVCache in the wild", ATC 2025).

JSONL `chat_id`, `parent_chat_id` (-1: the root of a conversation), `timestamp` (s), `input_length`, `output_length`,
`turn`, `type`, `hash_ids`: one global id for each block of 16 tokens, rounded up or down. Turns come at their recorded
instants. Equal ids share content with earlier turns; generated tokens are shared only if ids cover them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from testbed.traces.readers.fields import present, refuse, seconds, token_count, whole_number
from testbed.traces.readers.from_zero import stream_from_zero
from testbed.traces.readers.hash_blocks import BlockSemantics, HashBlocks
from testbed.traces.readers.open_text import read_objects
from testbed.traces.schema import Span, TraceRequest
from testbed.traces.stream import OutOfOrderError, StreamedTrace
from testbed.traces.synthesis import numbered_keys

SEMANTICS = BlockSemantics(block_tokens=16, rounding="either", scope="global")
_rest_key_of, _output_key_of = numbered_keys("bailian-rest"), numbered_keys("bailian-output")


class _Chat(NamedTuple):
    """A chat before its session is known. row: contents without ids are keyed by the row's number in the file."""

    row: TraceRequest
    number: int
    parent: int


def stream_bailian(path: str | Path, limit: int | None = None) -> StreamedTrace:
    """Reads a Bailian file (plain, .gz, .zst), at most its first `limit` rows; the first request arrives at 0.

    A chat's tenant is its `type`. A chat that continues another one in the file is a turn of the same session; turns
    count from the first chat that the file has. Of several continuations of a chat, the first in time is in its
    session, and the others begin sessions. Read whole, the order of rows in the file makes no difference, except at one
    instant. Memory grows with the number of chats, as each may be continued. Raises TraceError, with file and line, on
    a malformed row.
    """
    nothing = f"{path}: no requests; expected one JSON object on each line"
    return stream_from_zero(
        "bailian",
        lambda: _streamed(path, limit),
        nothing,
        unordered=lambda: iter(_linked(list(_chats(path, limit)))),
    )


def _streamed(path: str | Path, limit: int | None) -> Iterator[TraceRequest]:
    """Yields the rows of a file in which no chat is before the one that it continues."""
    known: dict[int, tuple[str, int] | None] = {}  # chat -> (session, turn); None: another chat continues its session
    awaited: set[int] = set()  # parents that were not in the file so far
    for row, number, parent in _chats(path, limit):
        if number in awaited:
            raise OutOfOrderError(
                f"{row.place}: chat {number} stands after one that continues it; expected rows in order"
            )
        session, turn = known.get(parent) or (f"bailian-{number}", -1)
        if parent in known:
            known[parent] = None
        elif parent >= 0:
            awaited.add(parent)
        known[number] = (session, turn + 1)
        yield row._replace(session_id=session, turn=turn + 1)


def _linked(chats: list[_Chat]) -> list[TraceRequest]:
    """Returns the rows of all chats, in the file's order, with their sessions. Contents are keyed by order in time."""
    order = sorted(range(len(chats)), key=lambda position: chats[position].row.arrival_ns)
    positions = {chat.number: position for position, chat in enumerate(chats)}
    following: dict[int, int] = {}  # position of a chat -> that of the chat that continues its session
    roots: list[int] = []
    for position in order:
        parent = positions.get(chats[position].parent)
        if parent is None or parent in following:
            roots.append(position)
        else:
            following[parent] = position
    rows: dict[int, TraceRequest] = {}
    for root in roots:
        session, turn = f"bailian-{chats[root].number}", 0
        at: int | None = root
        while at is not None:
            rows[at] = chats[at].row._replace(session_id=session, turn=turn)
            at, turn = following.get(at), turn + 1
    if len(rows) < len(chats):
        row, _, parent_number = next(chat for position, chat in enumerate(chats) if position not in rows)
        raise refuse(row.place, "parent_chat_id", parent_number, "a chat that does not continue this one in turn")
    for place, position in enumerate(order):
        if place != position:
            rows[position] = _rekeyed(rows[position], position, place)
    return [rows[position] for position in range(len(chats))]


def _rekeyed(row: TraceRequest, before: int, after: int) -> TraceRequest:
    """Returns the row with its contents without ids keyed by another number."""
    *parts, last = row.prompt
    if isinstance(last, Span) and last.key == _rest_key_of(before):
        last = last._replace(key=_rest_key_of(after))
    assert isinstance(row.output, Span)
    return row._replace(prompt=(*parts, last), output=row.output._replace(key=_output_key_of(after)))


def _chats(path: str | Path, limit: int | None) -> Iterator[_Chat]:
    """Yields the chats in the file's order, on the file's clock."""
    blocks = HashBlocks("bailian", SEMANTICS)
    numbers: set[int] = set()
    for i, (place, fields) in enumerate(islice(read_objects(path), limit)):
        number, parent = _id(fields, "chat_id", place, 0), _id(fields, "parent_chat_id", place, -1)
        if number in numbers:
            raise refuse(place, "chat_id", number, "an id not used before")
        numbers.add(number)
        if number == parent:
            raise refuse(place, "parent_chat_id", parent, "another chat, or -1")
        num_prompt = token_count(present(fields, "input_length", place), place, "input_length")
        num_output = token_count(present(fields, "output_length", place), place, "output_length")
        tenant = fields.get("type")
        if tenant is not None and not isinstance(tenant, str):
            raise refuse(place, "type", tenant, "a string")
        row = TraceRequest(
            request_id=f"bailian-{number}",
            arrival_ns=seconds(present(fields, "timestamp", place), place, "timestamp"),
            prompt=blocks.prompt(present(fields, "hash_ids", place), num_prompt, place, _rest_key_of(i)),
            output=Span(_output_key_of(i), 0, num_output),
            tenant=tenant or None,
            place=place,
        )
        yield _Chat(row, number, parent)


def _id(fields: dict[str, Any], field: str, place: str, least: int) -> int:
    return whole_number(present(fields, field, place), place, field, least, 2**63)
