"""Qwen-Bailian usage traces (Alibaba; "KVCache in the wild", ATC 2025).

JSONL `chat_id`, `parent_chat_id` (-1: the root of a conversation), `timestamp` (s), `input_length`, `output_length`,
`turn`, `type`, `hash_ids`: one global id for each block of 16 tokens, rounded up or down. Turns come at their recorded
instants. A turn shares what its ids share with earlier ones; generated tokens are known only as far as ids name them.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from testbed.errors import TraceError
from testbed.traces.arrange import arrange
from testbed.traces.readers.fields import json_object, present, refuse, seconds, token_count, whole_number
from testbed.traces.readers.hash_blocks import BlockSemantics, HashBlocks
from testbed.traces.readers.open_text import read_lines
from testbed.traces.schema import Span, Trace, TraceRequest
from testbed.traces.synthesis import content_key
from testbed.traces.transforms.timing import shift

SEMANTICS = BlockSemantics(block_tokens=16, rounding="either", scope="global")


def read_bailian(path: str | Path, limit: int | None = None) -> Trace:
    """Reads a Bailian file (plain, .gz, .zst), at most its first `limit` rows; the first request arrives at 0.

    A chat's tenant is its `type`. Chats that continue an earlier one of the file are turns of its session, numbered
    from the first that the file has; where a chat has several continuations, the first carries the session on.
    Raises TraceError, naming file and line, on a malformed row.
    """
    blocks = HashBlocks("bailian", SEMANTICS)
    rows: list[TraceRequest] = []
    place_in_session: dict[int, tuple[str, int]] = {}  # chat -> (session, turn), as long as nothing continues it
    for i, (number, line) in enumerate(islice(read_lines(path), limit)):
        place = f"{path}:{number}"
        fields = json_object(line, place)
        chat, parent = _id(fields, "chat_id", place), _id(fields, "parent_chat_id", place)
        session, turn = place_in_session.pop(parent, (f"bailian-{chat}", -1))
        place_in_session[chat] = (session, turn + 1)
        num_prompt = token_count(present(fields, "input_length", place), place, "input_length")
        num_output = token_count(present(fields, "output_length", place), place, "output_length")
        rest_key = content_key("bailian-rest", i)
        tenant = fields.get("type")
        if tenant is not None and not isinstance(tenant, str):
            raise refuse(place, "type", tenant, "a text")
        rows.append(
            TraceRequest(
                request_id=f"bailian-{chat}",
                arrival_ns=seconds(present(fields, "timestamp", place), place, "timestamp"),
                prompt=blocks.prompt(present(fields, "hash_ids", place), num_prompt, place, rest_key),
                output=Span(content_key("bailian-output", i), 0, num_output),
                tenant=tenant or None,
                session_id=session,
                turn=turn + 1,
                place=place,
            )
        )
    if not rows:
        raise TraceError(f"{path}: no requests; expected one JSON object on each line")
    trace = arrange("bailian", rows)
    return shift(trace, -trace.rows[0].arrival_ns, note=False)


def _id(fields: dict[str, Any], field: str, place: str) -> int:
    return whole_number(present(fields, field, place), place, field, -1, 2**63, "a whole number, -1 or above")
