"""A trace as data: its rows have the lengths and the contents of requests, not their tokens.

A prompt is a tuple of parts. A part is either explicit token ids or a `Span` of synthetic content. Token j of the
content with key `key` is a pure function of (key, j). So equal prefixes are equal tokens, any slice can be made without
the rest, and memory does not grow with prompt lengths. An output is one part, or None (the model decides).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

MAX_NS = 2**62  # of an arrival, a wait, or an instant of a tape: fits into int64
MAX_PRIORITY = 2**31 - 1  # the lowest is -MAX_PRIORITY - 1: int32 in frozen files
MAX_NUM_TOKENS = 100_000_000  # of one prompt or output; more is surely a mistake, and would not fit into memory


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
    """One row of a trace. A NamedTuple, as a long trace has many rows, and transformations copy them (`_replace`).

    arrival_ns: the intended arrival. For a closed-loop turn (think_ns set) it is ignored: the turn arrives think_ns
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
    cache_salt: str | None = None  # cached prefixes are shared only with rows of the same salt
    max_tokens: int | None = None  # the most that the client asks for; None: the run's sampling.max_tokens
    place: str = ""  # the source of the row, as "file:line", for messages

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

    notes: how the input was changed, for users ("31 rows out of order, sorted by arrival").
    """

    name: str
    rows: tuple[TraceRequest, ...]
    notes: tuple[str, ...] = ()
    closed_tail: ClassVar[bool] = False

    @property
    def num_requests(self) -> int:
        return len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.rows)


class TraceSource(Protocol):
    """Rows in order of arrival, to be iterated any number of times: a Trace, or a StreamedTrace that holds no rows.

    A closed-loop turn has the arrival of the turn before it, and comes after it. Request ids are unique.
    """

    @property
    def name(self) -> str: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def num_requests(self) -> int | None:
        """Number of rows; None: not known before all rows have been read."""
        ...

    @property
    def closed_tail(self) -> bool:
        """Whether all rows after the first closed-loop turn are closed-loop turns, turn by turn of all sessions.

        Then a row need not be read before the turn before it has finished. For a few users with endless requests.
        """
        ...

    def __iter__(self) -> Iterator[TraceRequest]: ...
