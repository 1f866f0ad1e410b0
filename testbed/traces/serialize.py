"""Rows of a trace as JSON, without loss: for tapes, and for trace files that are read back exactly."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from testbed.traces.readers.own import row_from_fields
from testbed.traces.schema import Part, Span, TokenIds, Trace, TraceRequest


def row_to_json(row: TraceRequest) -> dict[str, Any]:
    """The row in our own schema, with exact forms (arrival_ns, prompt_parts, ...) beside those meant for the eye."""
    fields: dict[str, Any] = {"request_id": row.request_id}
    if row.think_ns is None:
        fields["arrival_time"] = row.arrival_ns / 1e9
    fields["arrival_ns"] = row.arrival_ns
    if len(row.prompt) == 1 and isinstance(row.prompt[0], TokenIds):
        fields["prompt_token_ids"] = row.prompt[0].ids.tolist()
    else:
        fields["prompt_tokens"] = row.num_prompt_tokens
        fields["prompt_parts"] = [part_to_json(part) for part in row.prompt]
    if isinstance(row.output, TokenIds):
        fields["output_token_ids"] = row.output.ids.tolist()
    elif row.output is not None:
        fields["output_tokens"] = row.output.num_tokens
        fields["output_part"] = part_to_json(row.output)
    for name in ("tenant", "session_id", "turn", "think_ns", "cancel_after_ns", "deadline_ns", "cache_salt"):
        if getattr(row, name) is not None:
            fields[name] = getattr(row, name)
    if row.priority:
        fields["priority"] = row.priority
    if row.place:
        fields["place"] = row.place
    return fields


def row_from_json(fields: dict[str, Any]) -> TraceRequest:
    """The row that row_to_json wrote, equal in every field. Raises TraceError on a bad value."""
    return row_from_fields(fields, str(fields.get("place", "")))


def part_to_json(part: Part) -> dict[str, Any]:
    if isinstance(part, Span):
        return {"span": [f"{part.key:016x}", part.start, part.length]}
    return {"ids": part.ids.tolist()}


def write_jsonl(trace: Trace, path: str | Path) -> None:
    """Writes a trace (gzipped if `path` ends in .gz) that read_jsonl reads back with the same fingerprint."""
    file = Path(path)
    with gzip.open(file, "wt", encoding="utf-8") if file.suffix == ".gz" else file.open("w", encoding="utf-8") as out:
        for row in trace.rows:
            fields = row_to_json(row)
            fields.pop("place", None)  # the reader gives the place in this file
            out.write(json.dumps(fields, separators=(",", ":")) + "\n")
