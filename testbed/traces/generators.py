"""Generates traces: arrivals, lengths, shared prompts, growing sessions, closed-loop users, tenants.

Rows are made on demand, so a generated trace can be streamed (`stream_generated`) or held whole (`generate`): both have
the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush, merge
from itertools import islice

from testbed.traces.arrivals import instants
from testbed.traces.conversations import Conversation, Library, Said, length_configs, row_draws, session_draws
from testbed.traces.draws import Stream, streams
from testbed.traces.generator_config import SyntheticConfig, tenants_of
from testbed.traces.idle_settings import idle_notes
from testbed.traces.lengths import Cuts, JointLengths, LengthConfig, expected_cuts
from testbed.traces.schema import Trace, TraceRequest, TraceSource
from testbed.traces.stream import StreamedTrace, whole
from testbed.traces.synthesis import content_key

__all__ = ["LengthConfig", "SyntheticConfig", "generate", "stream_generated"]


def generate(config: SyntheticConfig, seed: int = 0, lengths_from: TraceSource | None = None) -> Trace:
    """Returns the whole trace of stream_generated. Its notes give the number of the lengths that were cut."""
    return whole(stream_generated(config, seed, lengths_from))


def stream_generated(config: SyntheticConfig, seed: int = 0, lengths_from: TraceSource | None = None) -> StreamedTrace:
    """Returns the trace of (config, seed), row by row. Closed-loop sessions have think_ns on all turns but the first.

    lengths_from: the trace from which "empirical" samples lengths: (prompt, output) pairs if both are empirical. Notes
    give the expected share of the lengths that are cut. Memory grows with the sessions that overlap. Raises ConfigError
    for a negative seed, or if "empirical" has no trace.
    """
    streams(seed)  # rejects a bad seed before any row is made
    joint = None if lengths_from is None else JointLengths(lengths_from)
    parts = tenants_of(config) if config.tenants else {"": config}
    notes = idle_notes(config)
    drawn = {label: length_configs(own) for label, own in parts.items()}
    if joint is not None and all(each.kind != "empirical" for own in drawn.values() for each in own.values()):
        notes.append("trace.lengths_from has no effect: no length is of kind empirical")
    expected: list[str] = []
    for label, own in parts.items():
        notes += _told(label, expected_cuts(drawn[label], own.num_requests, joint, is_above=False))
        expected += _told(label, expected_cuts(drawn[label], own.num_requests, joint, is_above=True))
    made: dict[str, _Generator] = {}  # by tenant, in the last iteration

    def rows() -> Iterator[TraceRequest]:
        made.update({label: _Generator(own, seed, label, joint) for label, own in parts.items()})
        each = [part.rows() for part in made.values()]
        return each[0] if len(each) == 1 else merge(*each, key=lambda row: row.arrival_ns)

    def counted() -> list[str]:
        return [*notes, *(note for label, part in made.items() for note in _told(label, part.cuts.notes()))]

    num = sum(own.num_requests for own in parts.values())
    is_tail = config.arrival == "closed_loop" and not config.tenants
    return StreamedTrace(config.name, rows, (*notes, *expected), num, closed_tail=is_tail, counted=counted)


def _told(label: str, notes: Iterator[str]) -> Iterator[str]:
    """Yields the notes on a tenant's part."""
    return (f"{label}: {note}" if label else note for note in notes)


class _Generator:
    """One pass over a generated trace, or over one tenant's part of it (label)."""

    def __init__(self, config: SyntheticConfig, seed: int, label: str, joint: JointLengths | None) -> None:
        rng: Stream = streams(seed, label)
        self._config, self._seed, self._label = config, seed, label
        self._is_closed = config.closed_loop or config.arrival == "closed_loop"
        self._prefix = f"{label}/" if label else ""
        deadline_s = config.deadline_s
        self._deadline_ns = None if deadline_s is None else round(deadline_s * 1e9)
        self._starts = instants(config, rng, config.num_requests)
        self._session_draws = session_draws(config, rng)
        self._draws = row_draws(config, rng, joint)
        self._draw = next(self._draws)  # for the next request
        self.cuts = Cuts(length_configs(config))
        self._library = Library.of(config, seed, streams(seed), self.cuts)
        self._num_sessions = 0

    def rows(self) -> Iterator[TraceRequest]:
        """Returns the rows in order of arrival."""
        if self._config.arrival == "closed_loop":
            return self._users()
        rows = islice(self._sessions(), self._config.num_requests)
        return rows if self._config.closed_loop else _in_order(rows)

    def _begin(self) -> tuple[Conversation, str | None]:
        """Begins the next session. Returns it, and its tenant."""
        draw = next(self._session_draws)
        name = ("synthetic", self._seed, self._label) if self._label else ("synthetic", self._seed)
        key = content_key(*name, self._num_sessions)
        self._num_sessions += 1
        tenant = f"tenant-{draw.tenant}" if self._config.num_tenants else (self._label or None)
        return Conversation(self._config, self._library, draw, key, self.cuts), tenant

    def _say(self, conversation: Conversation) -> Said | None:
        """Returns the session's next request; None: it has ended, and the draw is left to the next session."""
        said = conversation.say(self._draw)
        if said is not None:
            self._draw = next(self._draws)
        return said

    def _sessions(self) -> Iterator[TraceRequest]:
        """Yields the rows of one session after the other. Closed-loop turns have the arrival of the first."""
        config = self._config
        in_session = config.max_turns > 1 or config.agent.max_calls > 0
        for start_ns in self._starts:
            name = f"{self._prefix}{'s' if in_session else 'r'}{self._num_sessions}"
            conversation, tenant = self._begin()
            arrival_ns, turn = start_ns, 0
            while (said := self._say(conversation)) is not None:
                if turn and not config.closed_loop:
                    arrival_ns += said.wait_ns
                yield self._row(name, turn if in_session else None, arrival_ns, said, tenant)
                turn += 1

    def _users(self) -> Iterator[TraceRequest]:
        """Yields the requests of num_users users that begin at 0, turn by turn. Each user has session after session."""
        num_users = min(self._config.num_users, self._config.num_requests)
        talks = [self._begin() for _ in range(num_users)]
        for number in range(self._config.num_requests):
            turn, user = divmod(number, num_users)
            said = self._say(talks[user][0])
            if said is None:
                talks[user] = self._begin()
                said = self._say(talks[user][0])
                assert said is not None, "a session has a first turn"
            yield self._row(f"{self._prefix}u{user}", turn, 0, said, talks[user][1])

    def _row(self, name: str, turn: int | None, arrival_ns: int, said: Said, tenant: str | None) -> TraceRequest:
        """Returns the row of a session's turn; turn: None: a request outside sessions, with this name."""
        in_session = turn is not None
        return TraceRequest(
            request_id=f"{name}-t{turn}" if in_session else name,
            arrival_ns=arrival_ns,
            prompt=said.prompt,
            output=said.output,
            priority=self._config.priority,
            tenant=tenant,
            session_id=name if in_session else None,
            turn=turn,
            think_ns=said.wait_ns if turn and self._is_closed else None,
            deadline_ns=self._deadline_ns,
        )


def _in_order(rows: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    """Yields rows of sessions, which are in order of their starts, in order of arrival."""
    held: list[tuple[int, int, TraceRequest]] = []  # heap by arrival, then by the order in which rows were made
    for number, row in enumerate(rows):
        while not row.turn and held and held[0][0] <= row.arrival_ns:  # no later session begins before this one
            yield heappop(held)[2]
        heappush(held, (row.arrival_ns, number, row))
    while held:
        yield heappop(held)[2]
