"""Qwen-Bailian usage traces (Alibaba; "KVCache in the wild", ATC 2025).

JSONL `chat_id`, `parent_chat_id` (-1: the root of a conversation), `timestamp` (s), `input_length`, `output_length`,
`turn`, `type`, `hash_ids`: one global id for each block of 16 tokens, rounded up or down. Turns come at their recorded
instants. A turn shares what its ids share with earlier ones; generated tokens are known only as far as ids name them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from testbed.traces.readers.fields import json_object, present, refuse, seconds, token_count, whole_number
from testbed.traces.readers.from_zero import read_from_zero, stream_from_zero
from testbed.traces.readers.hash_blocks import BlockSemantics, HashBlocks
from testbed.traces.readers.open_text import read_lines
from testbed.traces.schema import Span, Trace, TraceRequest
from testbed.traces.stream import StreamedTrace
from testbed.traces.synthesis import numbered_keys

SEMANTICS = BlockSemantics(block_tokens=16, rounding="either", scope="global")
_rest_key_of, _output_key_of = numbered_keys("bailian-rest"), numbered_keys("bailian-output")


def read_bailian(path: str | Path, limit: int | None = None) -> Trace:
    """Reads a Bailian file (plain, .gz, .zst), at most its first `limit` rows; the first request arrives at 0.

    A chat's tenant is its `type`. Chats that continue an earlier one of the file are turns of its session, numbered
    from the first that the file has; where a chat has several continuations, the first carries the session on.
    Raises TraceError, naming file and line, on a malformed row.
    """
    return read_from_zero("bailian", path, _rows(path, limit))


def stream_bailian(path: str | Path, limit: int | None = None) -> StreamedTrace:
    """As read_bailian, row by row; iterating raises OutOfOrderError where the file is out of order.

    Memory follows the number of chats: what each may be continued by.
    """
    return stream_from_zero("bailian", path, lambda: _rows(path, limit))


def _rows(path: str | Path, limit: int | None) -> Iterator[TraceRequest]:
    """The rows in the file's order, on the file's clock."""
    blocks = HashBlocks("bailian", SEMANTICS)
    chats: dict[int, tuple[str, int] | None] = {}  # -> (session, turn); None: another chat carries its session on
    for i, (number, line) in enumerate(islice(read_lines(path), limit)):
        place = f"{path}:{number}"
        fields = json_object(line, place)
        chat, parent = _id(fields, "chat_id", place, 0), _id(fields, "parent_chat_id", place, -1)
        if chat in chats:
            raise refuse(place, "chat_id", chat, "an id not used before")
        if chat == parent:
            raise refuse(place, "parent_chat_id", parent, "another chat, or -1")
        session, turn = chats.get(parent) or (f"bailian-{chat}", -1)
        if parent in chats:
            chats[parent] = None
        chats[chat] = (session, turn + 1)
        num_prompt = token_count(present(fields, "input_length", place), place, "input_length")
        num_output = token_count(present(fields, "output_length", place), place, "output_length")
        tenant = fields.get("type")
        if tenant is not None and not isinstance(tenant, str):
            raise refuse(place, "type", tenant, "a text")
        yield TraceRequest(
            request_id=f"bailian-{chat}",
            arrival_ns=seconds(present(fields, "timestamp", place), place, "timestamp"),
            prompt=blocks.prompt(present(fields, "hash_ids", place), num_prompt, place, _rest_key_of(i)),
            output=Span(_output_key_of(i), 0, num_output),
            tenant=tenant or None,
            session_id=session,
            turn=turn + 1,
            place=place,
        )


def _id(fields: dict[str, Any], field: str, place: str, least: int) -> int:
    return whole_number(present(fields, field, place), place, field, least, 2**63, f"a whole number, {least} or above")
