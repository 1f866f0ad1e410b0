"""The fingerprint of a trace: equal if and only if a run could not tell two traces apart (up to hash collisions)."""

from __future__ import annotations

import struct

import xxhash

from testbed.traces.parts import whole_runs
from testbed.traces.schema import Part, Span, TraceRequest, TraceSource

_pack_text = struct.Struct("<cI").pack
_pack_number = struct.Struct("<cq").pack
_pack_span = struct.Struct("<cQQQ").pack


class Fingerprint:
    """The fingerprint of rows that are added one by one: the same value as `fingerprint` of the whole trace."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128(b"testbed trace 1")

    def update(self, row: TraceRequest) -> None:
        self._digest.update(_encode(row))

    def hexdigest(self) -> str:
        return str(self._digest.hexdigest())


def fingerprint(trace: TraceSource) -> str:
    """Returns 32 hex digits of a 128-bit xxh3 over everything that matters for a run, in row order.

    Included: ids, arrivals, contents, priorities, tenants, sessions, think times, cancellations, deadlines, salts. Not
    included: the trace's name and notes, the places of rows, and the arrivals of closed-loop turns, which have no
    effect. How a content is cut into parts makes no difference. The value is the same in every process and on every
    machine. Iterates over the rows once.
    """
    digest = Fingerprint()
    for row in trace:
        digest.update(row)
    return digest.hexdigest()


def _encode(row: TraceRequest) -> bytes:
    output = row.output
    numbers = (row.arrival_ns if row.think_ns is None else None, row.priority, row.turn, row.think_ns)
    fields = [_text(row.request_id), _text(row.tenant), _text(row.session_id)]
    fields += [_number(number) for number in (*numbers, row.cancel_after_ns)]
    if row.deadline_ns is not None or row.cache_salt is not None:  # newer fields: without them the value stays
        fields += [_number(row.deadline_ns), _text(row.cache_salt)]
    if row.max_tokens is not None:
        fields += [b"m", _number(row.max_tokens)]
    fields += [_content(row.prompt), b"-" if output is None else _content((output,))]
    return b"".join(fields)


def _text(text: str | None) -> bytes:
    if text is None:
        return b"-"
    raw = text.encode()
    return _pack_text(b"s", len(raw)) + raw


def _number(number: int | None) -> bytes:
    return b"-" if number is None else _pack_number(b"i", number)


def _content(parts: tuple[Part, ...]) -> bytes:
    """Encodes spans by key, start and length, and runs of explicit ids by their ids, however they are cut."""
    runs = parts if len(parts) == 1 and parts[0].num_tokens else whole_runs(parts)
    return b"(%b)" % b"".join(map(_part, runs))


def _part(part: Part) -> bytes:
    if isinstance(part, Span):
        return _pack_span(b"k", *part)
    return struct.pack(f"<cQ{len(part.ids)}i", b"t", len(part.ids), *part.ids)
