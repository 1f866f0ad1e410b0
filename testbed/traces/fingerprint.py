"""The fingerprint of a trace: equal if and only if a run could not tell two traces apart (up to hash collisions)."""

from __future__ import annotations

import struct

import xxhash

from testbed.traces.parts import join_parts
from testbed.traces.schema import Part, Span, Trace, TraceRequest


def fingerprint(trace: Trace) -> str:
    """32 hex digits of a 128-bit xxh3 over all that matters for a run, in row order.

    In: ids, arrivals, contents, priorities, tenants, sessions, think times, cancellations, deadlines, salts. Out: the
    trace's name and notes, where rows came from, and the arrival of a closed-loop turn, which is ignored. How a content
    is cut into parts makes no difference. The same in every process and on every machine.
    """
    digest = xxhash.xxh3_128(b"testbed trace 1")
    for row in trace.rows:
        digest.update(_encode(row))
    return str(digest.hexdigest())


def _encode(row: TraceRequest) -> bytes:
    numbers = (row.arrival_ns if row.think_ns is None else None, row.priority, row.turn, row.think_ns)
    fields = [_text(row.request_id), _text(row.tenant), _text(row.session_id)]
    fields += [_number(number) for number in (*numbers, row.cancel_after_ns)]
    if row.deadline_ns is not None or row.cache_salt is not None:  # absent: as before they were known
        fields += [_number(row.deadline_ns), _text(row.cache_salt)]
    fields += [_content(row.prompt), b"-" if row.output is None else _content((row.output,))]
    return b"".join(fields)


def _text(text: str | None) -> bytes:
    if text is None:
        return b"-"
    raw = text.encode()
    return struct.pack("<cI", b"s", len(raw)) + raw


def _number(number: int | None) -> bytes:
    return b"-" if number is None else struct.pack("<cq", b"i", number)


def _content(parts: tuple[Part, ...]) -> bytes:
    """Spans by key and place; runs of explicit ids by their ids, however they were cut."""
    encoded = [b"("]
    ids: list[int] = []
    for part in (*join_parts(parts), None):
        if part is not None and not isinstance(part, Span):
            ids.extend(part.ids)
            continue
        if ids:
            encoded.append(struct.pack(f"<cQ{len(ids)}i", b"t", len(ids), *ids))
            ids = []
        if part is not None:
            encoded.append(struct.pack("<cQQQ", b"k", *part))
    encoded.append(b")")
    return b"".join(encoded)
