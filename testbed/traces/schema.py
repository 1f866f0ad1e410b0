"""A trace as data: rows that say how long and from what content, not the tokens themselves.

A prompt is a tuple of parts. A part is either explicit token ids or a `Span` of synthetic content: token j of the
content keyed `key` is a pure function of (key, j), so equal prefixes are equal tokens, any slice can be made without
the rest, and memory does not grow with prompt lengths. An output is one part, or None (the model decides).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

MAX_NS = 2**62  # of an arrival or a wait, so that sums of a few stay within int64


class Span(NamedTuple):
    """`length` synthetic tokens of content `key`, from position `start` of that content."""

    key: int  # 64-bit content key (see synthesis.content_key)
    start: int
    length: int

    @property
    def num_tokens(self) -> int:
        return self.length


class TokenIds(NamedTuple):
    """Explicit token ids."""

    ids: array[int]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


Part = Span | TokenIds


class TraceRequest(NamedTuple):
    """One row of a trace. A NamedTuple, as a long trace has many, each made anew (`_replace`) by a transformation.

    arrival_ns: the intended arrival; for a closed-loop turn (think_ns set) it is ignored, and the turn arrives think_ns
    after the turn before it in the same session finished. The first turn of a session always has an arrival_ns.
    """

    request_id: str
    arrival_ns: int
    prompt: tuple[Part, ...]
    output: Part | None
    priority: int = 0
    tenant: str | None = None
    session_id: str | None = None
    turn: int | None = None
    think_ns: int | None = None
    cancel_after_ns: int | None = None
    deadline_ns: int | None = None  # after its arrival
    cache_salt: str | None = None  # shares cached prefixes only with rows of the same salt
    place: str = ""  # where it came from, as "file:line", for messages

    @property
    def num_prompt_tokens(self) -> int:
        prompt = self.prompt
        return prompt[0].num_tokens if len(prompt) == 1 else sum(part.num_tokens for part in prompt)

    @property
    def num_output_tokens(self) -> int | None:
        return None if self.output is None else self.output.num_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """A named, ordered trace. rows: sorted by arrival_ns, ties in file order; turns of a session in turn order.

    notes: what was done to the input on the way in ("31 rows were out of order and were sorted").
    """

    name: str
    rows: tuple[TraceRequest, ...]
    notes: tuple[str, ...] = ()

    @property
    def num_requests(self) -> int:
        return len(self.rows)

    @property
    def closed_tail(self) -> bool:
        return False

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.rows)


class TraceSource(Protocol):
    """Rows in order of arrival that can be gone through again: a whole Trace, or a StreamedTrace that holds no rows.

    A closed-loop turn stands at the arrival of the turn before it, after it. Request ids are unique.
    """

    @property
    def name(self) -> str: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def num_requests(self) -> int | None:
        """None: not known before the rows have been gone through."""
        ...

    @property
    def closed_tail(self) -> bool:
        """Whether after the first closed-loop turn all rows are closed-loop turns, of all sessions by turns.

        Then they need not be read before the turn before them has finished: a few users who come again and again.
        """
        ...

    def __iter__(self) -> Iterator[TraceRequest]: ...
