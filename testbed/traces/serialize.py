"""Rows of a trace as JSON, without loss: for run folders, and for trace files that are read back exactly."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from testbed.output import whole_file
from testbed.traces.readers.open_text import open_bytes
from testbed.traces.schema import Part, Span, TokenIds, TraceRequest, TraceSource


def row_to_json(row: TraceRequest, *, exact_parts: bool = False) -> dict[str, Any]:
    """Returns the row in the testbed's schema, with exact fields (arrival_ns, prompt_parts, ...) next to readable ones.

    exact_parts: writes explicit token ids as parts, too.
    """
    fields: dict[str, Any] = {"request_id": row.request_id}
    if row.think_ns is None:
        fields["arrival_time"] = row.arrival_ns / 1e9
    fields["arrival_ns"] = row.arrival_ns
    if not exact_parts and len(row.prompt) == 1 and isinstance(row.prompt[0], TokenIds):
        fields["prompt_token_ids"] = row.prompt[0].ids.tolist()
    else:
        fields["prompt_tokens"] = row.num_prompt_tokens
        fields["prompt_parts"] = [part_to_json(part) for part in row.prompt]
    if not exact_parts and isinstance(row.output, TokenIds):
        fields["output_token_ids"] = row.output.ids.tolist()
    elif row.output is not None:
        fields["output_tokens"] = row.output.num_tokens
        fields["output_part"] = part_to_json(row.output)
    for name in (
        "tenant", "session_id", "turn", "think_ns", "cancel_after_ns", "deadline_ns", "cache_salt", "max_tokens",
    ):  # fmt: skip
        if getattr(row, name) is not None:
            fields[name] = getattr(row, name)
    if row.priority:
        fields["priority"] = row.priority
    if row.place:
        fields["place"] = row.place
    return fields


def part_to_json(part: Part) -> dict[str, Any]:
    if isinstance(part, Span):
        return {"span": [f"{part.key:016x}", part.start, part.length]}
    return {"ids": part.ids.tolist()}


def write_jsonl(trace: TraceSource, path: str | Path) -> None:
    """Writes a trace row by row, whole or not at all, compressed by its extension. read_jsonl reads it back with the
    same fingerprint."""
    with whole_file(Path(path)) as part, io.TextIOWrapper(open_bytes(part, "wb"), encoding="utf-8") as out:
        for row in trace:
            fields = row_to_json(row)
            fields.pop("place", None)  # the reader gives the place in the new file
            out.write(json.dumps(fields, separators=(",", ":")) + "\n")
