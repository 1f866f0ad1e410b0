"""A trace as an Inbox: delivers its rows as requests when they are due. Knows no scheduler, no backend and no clock.

Open-loop rows come at their arrival. A closed-loop turn (think_ns set) comes think_ns after the turn before it
finished. A row with cancel_after_ns causes an Abort that long after its arrival, unless it finished before. Events of
one instant come in row order, a request before its own abort.

Rows are read as time goes on: those that are due, up to READ_AHEAD more, and the closed-loop turns that wait for one of
these. Tokens are made when they are read, except the first few of a prompt, by which shared prefixes are found. These
are made shortly before a request is delivered, those of several requests in one pass. The inbox keeps no others, so
memory grows with the live sessions, not with the trace.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import islice
from typing import Final

from testbed.core.commands import Abort, Arrive, Event
from testbed.core.outcome import Finished, FinishReason
from testbed.core.request import GREEDY, Request, SamplingParams
from testbed.errors import TraceError
from testbed.traces.lazy_tokens import LazyTokens
from testbed.traces.schema import Span, TraceRequest, TraceSource
from testbed.traces.synthesis import heads, materialize

READ_AHEAD: Final = 32  # rows
_HEAD_TOKENS: Final = 64  # first tokens of a prompt that are made early: a first block is seldom longer
_ARRIVE: Final = 0  # at one instant, _ARRIVE is before _ABORT
_ABORT: Final = 1


class TraceInbox:
    """A testbed.core.interfaces.Inbox for one trace, whole or streamed. `vocab_size` bounds the synthetic tokens.

    change: returns what is delivered for a request of the trace; None: that request. `next_ns`, `due` and `finished`
    raise the errors of reading a streamed trace, when they reach the bad row.
    """

    def __init__(
        self,
        trace: TraceSource,
        vocab_size: int,
        sampling: SamplingParams = GREEDY,
        change: Callable[[Request], Request] | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._change = change
        self._sampling = sampling
        self._closed_tail = trace.closed_tail
        self._source: Iterator[TraceRequest] = iter(trace)
        self._num_read = 0  # rows taken from `_ahead`; a row's number is its position in the trace
        self._events: list[tuple[int, int, int, str]] = []  # heap of (instant, row, _ARRIVE or _ABORT, request_id)
        self._rows: dict[int, TraceRequest] = {}  # taken and not delivered
        self._follower: dict[int, int] = {}  # row -> the closed-loop turn that waits for it
        self._last_turn: dict[str, int] = {}  # session -> its last row; without a closed tail only of the last instant
        self._read_ns = -1
        self._given_up: dict[str, None] = {}  # sessions whose later turns are still to be read (closed tails only)
        self._live: dict[str, int] = {}  # request_id -> row, delivered and not finished
        self._num_delivered = 0
        self._num_finished = 0
        self._unsent: list[str] = []  # closed-loop turns after one that was ignored or aborted
        self._ahead: deque[TraceRequest] = deque(islice(self._source, READ_AHEAD))  # read, not yet taken
        self._heads: dict[int, array[int]] = {}  # row -> the first tokens of its prompt
        # closed: `next_ns` knows every event except those that ended requests cause, for which no loop has to wait
        self.is_open = False

    def due(self, now_ns: int) -> list[Event]:
        """Removes and returns the events at or before `now_ns`, in order of instant, then of row."""
        events: list[Event] = []
        ahead, queue = self._ahead, self._events
        while ahead and ahead[0].arrival_ns <= now_ns and not self._is_in_tail(ahead[0]):
            first = ahead[0]
            is_single = first.session_id is None and first.think_ns is None
            if is_single and (not queue or first.arrival_ns < queue[0][0]):  # no event comes before it
                self._pass()
                events.append(self._deliver(self._num_read - 1, first, first.arrival_ns))
            else:
                self._take()
        while queue and queue[0][0] <= now_ns:
            instant, i, kind, request_id = heappop(queue)
            if kind == _ARRIVE:
                events.append(self._deliver(i, self._rows.pop(i), instant))
            elif request_id in self._live:
                events.append(Abort(request_id))
        return events

    def next_ns(self) -> int | None:
        """Returns the instant of the next known event; None without any. Forgets the aborts of finished requests."""
        queue = self._events
        while queue and queue[0][2] == _ABORT and queue[0][3] not in self._live:
            heappop(queue)
        ahead = self._ahead
        if self._closed_tail:
            while ahead and not queue and not self._live and self._is_in_tail(ahead[0]):
                self._take()  # turns of sessions that were given up, so never sent
        if not ahead or (self._closed_tail and self._is_in_tail(ahead[0])):
            return queue[0][0] if queue else None
        first_ns = ahead[0].arrival_ns
        return min(first_ns, queue[0][0]) if queue else first_ns

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        """Schedules the closed-loop turns that follow `requests`; gives them up after an ignored or aborted turn."""
        for finished in requests:
            request_id = finished.request.request_id
            i = self._live.pop(request_id)  # a KeyError is a bug: it was never sent, or ended twice
            self._num_finished += 1
            is_given_up = finished.reason in (FinishReason.IGNORED, FinishReason.ABORT)
            session = finished.request.session_id
            if self._closed_tail and session is not None:
                if is_given_up:
                    self._given_up[session] = None
                while i not in self._follower and self._ahead and not is_given_up:
                    self._take()
            follower = self._follower.pop(i, None)
            if follower is None:
                continue
            if is_given_up:
                self._give_up(follower)
            else:
                row = self._rows[follower]
                assert row.think_ns is not None
                heappush(self._events, (now_ns + row.think_ns, follower, _ARRIVE, row.request_id))

    def check_invariants(self) -> None:
        """Asserts: each row taken is delivered, unsent or still to come; each delivered one is live or finished."""
        assert len(self._live) + self._num_finished == self._num_delivered
        num_scheduled = sum(1 for event in self._events if event[2] == _ARRIVE)
        assert num_scheduled + len(self._follower) == len(self._rows)
        assert len(self._rows) + self._num_delivered + len(self._unsent) == self._num_read

    def _is_in_tail(self, row: TraceRequest) -> bool:
        """Whether this row is in the closed tail: it and all later rows wait for requests, and can stay unread."""
        return self._closed_tail and row.think_ns is not None

    def _take(self) -> None:
        """Takes the first row of `_ahead`: as an event, as a turn that waits, or as one that is never sent."""
        i, row = self._num_read, self._ahead[0]
        self._pass()
        before = None if row.session_id is None else self._last_of(row, row.session_id, i)
        if row.think_ns is None:
            self._rows[i] = row
            heappush(self._events, (row.arrival_ns, i, _ARRIVE, row.request_id))
        elif row.session_id in self._given_up:
            self._unsent.append(row.request_id)
        elif before is None:
            raise TraceError(
                f"{row.place or row.request_id}: closed-loop turn {row.turn} of {row.session_id!r} does not follow "
                "the turn before it; expected it after that turn, at the same arrival"
            )
        else:
            self._rows[i] = row
            self._follower[before] = i

    def _pass(self) -> None:
        """Removes the first row of `_ahead`, and reads more rows if none is left."""
        self._num_read += 1
        self._ahead.popleft()
        if not self._ahead:
            self._ahead.extend(islice(self._source, READ_AHEAD))

    def _last_of(self, row: TraceRequest, session: str, i: int) -> int | None:
        """Returns the number of the session's row before this one, if a closed-loop turn can still follow that row."""
        if row.arrival_ns != self._read_ns:
            self._read_ns = row.arrival_ns
            if not self._closed_tail:
                self._last_turn.clear()  # closed-loop turns have the arrival of the turn before them
        before = self._last_turn.get(session)
        self._last_turn[session] = i
        return before

    def _give_up(self, first: int) -> None:
        """Drops a closed-loop turn and those that wait for it, up to a turn with an arrival of its own."""
        row: int | None = first
        while row is not None:
            self._unsent.append(self._rows.pop(row).request_id)
            row = self._follower.pop(row, None)

    def _deliver(self, i: int, row: TraceRequest, arrival_ns: int) -> Arrive:
        if row.cancel_after_ns is not None:
            heappush(self._events, (arrival_ns + row.cancel_after_ns, i, _ABORT, row.request_id))
        self._live[row.request_id] = i
        self._num_delivered += 1
        head = self._heads.pop(i, None)
        if head is None and isinstance(row.prompt[0], Span):
            head = self._make_heads(row.prompt[0])
        request = to_request(row, self._vocab_size, arrival_ns, self._sampling, head)
        return Arrive(request if self._change is None else self._change(request))

    def _make_heads(self, first: Span) -> array[int]:
        """Returns the first tokens of this span. In the same pass, makes and keeps those of the next prompts."""
        spans, numbers = [first], [-1]
        for number, row in enumerate(self._ahead, self._num_read):
            part = row.prompt[0]
            if row.think_ns is None and number not in self._heads and isinstance(part, Span):
                spans.append(part)
                numbers.append(number)
        made = heads(spans, _HEAD_TOKENS, self._vocab_size)
        self._heads.update(zip(numbers[1:], made[1:], strict=True))
        return made[0]


def to_request(
    row: TraceRequest, vocab_size: int, arrival_ns: int | None = None, sampling: SamplingParams = GREEDY,
    head: array[int] | None = None,
) -> Request:  # fmt: skip
    """Returns the request of a row. arrival_ns: the instant of a closed-loop turn; None: the row's own. head: the first
    tokens of the prompt, if they are made already."""
    arrival_ns = row.arrival_ns if arrival_ns is None else arrival_ns
    prompt, output = row.prompt, row.output
    forced = None
    if output is not None:
        forced = LazyTokens(output.num_tokens, partial(materialize, (output,), vocab_size))
    return Request(
        request_id=row.request_id,
        prompt_token_ids=LazyTokens(row.num_prompt_tokens, partial(materialize, prompt, vocab_size), head),
        arrival_ns=arrival_ns,
        forced_output=forced,
        sampling=sampling if row.max_tokens is None else replace(sampling, max_tokens=row.max_tokens),
        priority=row.priority,
        tenant=row.tenant,
        session_id=row.session_id,
        turn=row.turn,
        cancel_after_ns=row.cancel_after_ns,
        deadline_ns=None if row.deadline_ns is None else arrival_ns + row.deadline_ns,
        cache_salt=row.cache_salt or "",
    )
