"""A trace as an Inbox: delivers its rows as requests when they are due. Knows no scheduler, no backend and no clock.

Open rows come at their arrival. A closed-loop turn (think_ns set) comes think_ns after the turn before it finished, in
both modes. A row with cancel_after_ns brings an Abort that long after its arrival, unless it finished before. Events of
one instant come in row order, a request before its own abort. Tokens are made when a request is delivered and are not
kept here: memory follows the live requests, not the trace.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise

from testbed.interfaces import Abort, Arrive, Event
from testbed.plan import Finished, FinishReason
from testbed.request import GREEDY, Request, SamplingParams
from testbed.traces.arrange import sessions_of
from testbed.traces.schema import Trace, TraceRequest
from testbed.traces.synthesis import materialize

_ARRIVE, _ABORT = 0, 1  # in this order at one instant


class TraceInbox:
    """Implements testbed.interfaces.Inbox for one trace. `vocab_size` bounds the synthetic tokens."""

    def __init__(self, trace: Trace, vocab_size: int, sampling: SamplingParams = GREEDY) -> None:
        self._rows = trace.rows
        self._vocab_size = vocab_size
        self._sampling = sampling
        rows = trace.rows
        self._open = sorted(
            (i for i, row in enumerate(rows) if row.think_ns is None), key=lambda i: rows[i].arrival_ns
        )  # stable: ties in row order
        self._num_opened = 0
        self._later: list[tuple[int, int, int]] = []  # heap of (instant, row, _ARRIVE of a closed-loop turn or _ABORT)
        self._follower: dict[int, int] = {}  # row -> the closed-loop turn that waits for it
        for positions in sessions_of(rows).values():
            for before, after in pairwise(positions):
                if rows[after].think_ns is not None:
                    self._follower[before] = after
        self._live: dict[str, int] = {}  # request_id -> row, delivered and not finished
        self._num_delivered = 0
        self._num_finished = 0
        self._unsent: list[int] = []

    @property
    def is_open(self) -> bool:
        """False: `next_ns` knows every event but those that a finished request causes, and those need no waiting."""
        return False

    @property
    def num_unsent(self) -> int:
        """Closed-loop turns that are never sent, as an earlier turn of their session was ignored or aborted."""
        return len(self._unsent)

    @property
    def unsent_ids(self) -> list[str]:
        """The request ids of those turns, in the order in which they were given up."""
        return [self._rows[i].request_id for i in self._unsent]

    @property
    def num_delivered(self) -> int:
        return self._num_delivered

    @property
    def num_remaining(self) -> int:
        """Rows that may still come."""
        return len(self._rows) - self._num_delivered - len(self._unsent)

    def due(self, now_ns: int) -> list[Event]:
        """Removes and returns the events at or before `now_ns`, in order of instant, then of row."""
        events: list[Event] = []
        rows, order, later = self._rows, self._open, self._later
        while True:
            opening: tuple[int, int, int] | None = None
            if self._num_opened < len(order):
                first = order[self._num_opened]
                opening = (rows[first].arrival_ns, first, _ARRIVE)
            if later and (opening is None or later[0] < opening):
                if later[0][0] > now_ns:
                    return events
                instant, i, kind = heappop(later)
                if kind == _ARRIVE:
                    events.append(self._deliver(i, instant))
                elif rows[i].request_id in self._live:
                    events.append(Abort(rows[i].request_id))
            elif opening is not None and opening[0] <= now_ns:
                self._num_opened += 1
                events.append(self._deliver(opening[1], opening[0]))
            else:
                return events

    def next_ns(self) -> int | None:
        """The instant of the next known event; None if there is none. Aborts of finished requests are forgotten."""
        later = self._later
        while later and later[0][2] == _ABORT and self._rows[later[0][1]].request_id not in self._live:
            heappop(later)
        opening = self._rows[self._open[self._num_opened]].arrival_ns if self._num_opened < len(self._open) else None
        if not later:
            return opening
        return later[0][0] if opening is None else min(opening, later[0][0])

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        """Schedules the closed-loop turns after `requests`, or gives them up after an ignored or aborted turn."""
        for finished in requests:
            i = self._live.pop(finished.request.request_id)  # a KeyError is a bug: it was never sent, or ended twice
            self._num_finished += 1
            follower = self._follower.pop(i, None)
            if follower is None:
                continue
            if finished.reason in (FinishReason.IGNORED, FinishReason.ABORT):
                self._give_up(follower)
            else:
                think_ns = self._rows[follower].think_ns
                assert think_ns is not None
                heappush(self._later, (now_ns + think_ns, follower, _ARRIVE))

    def check_invariants(self) -> None:
        """Every row is delivered, unsent or still to come; every delivered one is live or finished."""
        assert len(self._live) + self._num_finished == self._num_delivered
        num_scheduled = sum(1 for _, _, kind in self._later if kind == _ARRIVE)
        num_waiting = len(self._follower)
        num_opening = len(self._open) - self._num_opened
        assert num_opening + num_scheduled + num_waiting == self.num_remaining

    def _give_up(self, first: int) -> None:
        """Drops a closed-loop turn and those that wait for it, up to a turn with an arrival of its own."""
        row: int | None = first
        while row is not None:
            self._unsent.append(row)
            row = self._follower.pop(row, None)

    def _deliver(self, i: int, arrival_ns: int) -> Arrive:
        row = self._rows[i]
        if row.cancel_after_ns is not None:
            heappush(self._later, (arrival_ns + row.cancel_after_ns, i, _ABORT))
        self._live[row.request_id] = i
        self._num_delivered += 1
        return Arrive(to_request(row, self._vocab_size, arrival_ns, self._sampling))


def to_request(
    row: TraceRequest, vocab_size: int, arrival_ns: int | None = None, sampling: SamplingParams = GREEDY
) -> Request:
    """The request of a row, its tokens made. arrival_ns: the due instant of a closed-loop turn; None: the row's own."""
    arrival_ns = row.arrival_ns if arrival_ns is None else arrival_ns
    return Request(
        request_id=row.request_id,
        prompt_token_ids=materialize(row.prompt, vocab_size),
        arrival_ns=arrival_ns,
        forced_output=None if row.output is None else materialize((row.output,), vocab_size),
        sampling=sampling,
        priority=row.priority,
        tenant=row.tenant,
        session_id=row.session_id,
        turn=row.turn,
        cancel_after_ns=row.cancel_after_ns,
        deadline_ns=None if row.deadline_ns is None else arrival_ns + row.deadline_ns,
        cache_salt=row.cache_salt or "",
    )
