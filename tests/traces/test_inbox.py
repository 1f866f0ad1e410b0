"""The inbox delivers what is due, in order, once; closed loops wait for what finished; aborts forget the finished."""

from hypothesis import given
from hypothesis import strategies as st

from testbed.core.commands import Abort, Arrive
from testbed.core.interfaces import Inbox
from testbed.core.outcome import Finished, FinishReason
from testbed.core.request import SamplingParams
from testbed.traces.arrange import arrange
from testbed.traces.inbox import TraceInbox, to_request
from testbed.traces.schema import Span, TraceRequest
from testbed.traces.synthesis import content_key, materialize


def row(name: str, at: int = 0, **more) -> TraceRequest:
    key = content_key(name)
    return TraceRequest(name, at, (Span(key, 0, 5),), Span(key, 5, 2), **more)


def turns(session: str, at: int, *thinks: int) -> list[TraceRequest]:
    first = row(f"{session}0", at, session_id=session, turn=0)
    later = [row(f"{session}{k}", session_id=session, turn=k, think_ns=t) for k, t in enumerate(thinks, 1)]
    return [first, *later]


def inbox(*rows: TraceRequest) -> TraceInbox:
    return TraceInbox(arrange("test", rows), vocab_size=100)


def num_left(box: TraceInbox) -> int:
    """Rows that may still come."""
    return len(box._rows) + len(box._ahead)


def names(events) -> list[str]:
    return [e.request.request_id if isinstance(e, Arrive) else f"abort {e.request_id}" for e in events]


def end(box: TraceInbox, request, now_ns: int, reason=FinishReason.LENGTH) -> None:
    box.finished([Finished(request, reason, "", 2, ())], now_ns)
    box.check_invariants()


def only(events):
    (event,) = events
    assert isinstance(event, Arrive)
    return event.request


def test_it_is_an_inbox_that_is_never_open():
    box: Inbox = inbox(row("a"))
    assert box.is_open is False


def test_rows_come_when_they_are_due_ties_in_row_order():
    box = inbox(row("b", 5), row("c", 7), row("a", 5))
    assert (box.next_ns(), box.due(4)) == (5, [])
    assert names(box.due(6)) == ["b", "a"]
    assert (box.next_ns(), num_left(box)) == (7, 1)
    assert names(box.due(7)) == ["c"]
    assert box.next_ns() is None
    box.check_invariants()


def test_a_request_carries_the_fields_and_the_tokens_of_its_row():
    sampling = SamplingParams(temperature=0.5)
    given_row = row("a", 3, priority=2, tenant="t", session_id="s", turn=0, cancel_after_ns=9)
    request = only(TraceInbox(arrange("x", [given_row]), 100, sampling).due(3))
    assert request.prompt_token_ids == materialize(given_row.prompt, 100)
    assert request.forced_output == materialize((given_row.output,), 100)
    assert (request.arrival_ns, request.priority, request.tenant) == (3, 2, "t")
    assert (request.session_id, request.turn) == ("s", 0)
    assert (request.cancel_after_ns, request.sampling) == (9, sampling)
    declared = to_request(given_row._replace(max_tokens=40), 100, 3, sampling)
    assert declared == request.replace(sampling=SamplingParams(temperature=0.5, max_tokens=40))
    free = to_request(TraceRequest("b", 4, given_row.prompt, None), 100)
    assert (free.forced_output, free.arrival_ns) == (None, 4)


def test_a_closed_turn_comes_think_time_after_the_finish():
    box = inbox(*turns("s", 10, 5, 0))
    first = only(box.due(10))
    assert box.next_ns() is None
    end(box, first, 100)
    assert box.next_ns() == 105
    second = only(box.due(200))
    assert second.arrival_ns == 105  # when it was due, not when it was fetched
    end(box, second, 300)
    assert box.next_ns() == 300
    assert only(box.due(300)).arrival_ns == 300  # a think time of 0 means the same instant
    assert num_left(box) == 0


def test_open_and_closed_arrivals_of_one_instant_come_in_row_order():
    box = inbox(*turns("s", 0, 10), row("late", 20), row("early", 20))
    end(box, only(box.due(0)), 10)
    assert names(box.due(20)) == ["s1", "late", "early"]


def test_an_abort_comes_after_its_delay_and_is_dropped_once_finished():
    box = inbox(row("a", 0, cancel_after_ns=10), row("b", 0, cancel_after_ns=10), row("c", 10, cancel_after_ns=0))
    a = only(box.due(0)[:1])
    assert box.next_ns() == 10
    end(box, a, 5)
    assert names(box.due(10)) == ["abort b", "c", "abort c"]
    assert box.next_ns() is None


def test_an_abort_of_a_finished_request_does_not_wake_the_loop():
    box = inbox(row("a", 0, cancel_after_ns=10))
    end(box, only(box.due(0)), 5)
    assert (box.next_ns(), box.due(20)) == (None, [])


def test_an_abort_counts_from_the_due_instant_of_a_closed_turn():
    first, second = turns("s", 0, 7)
    box = inbox(first, row("s1", session_id="s", turn=1, think_ns=7, cancel_after_ns=3))
    assert second.think_ns == 7
    end(box, only(box.due(0)), 50)
    assert names(box.due(58)) == ["s1"]
    assert box.next_ns() == 60
    assert box.due(60) == [Abort("s1")]


def test_turns_after_an_ignored_or_aborted_one_are_never_sent():
    for reason in (FinishReason.IGNORED, FinishReason.ABORT):
        box = inbox(*turns("s", 0, 1, 1))
        end(box, only(box.due(0)), 5, reason)
        assert (box.next_ns(), box._unsent, num_left(box)) == (None, ["s1", "s2"], 0)


def test_a_timed_turn_comes_whatever_became_of_the_one_before():
    rows = [*turns("s", 0, 1), row("s2", 50, session_id="s", turn=2), row("s3", session_id="s", turn=3, think_ns=1)]
    box = inbox(*rows)
    end(box, only(box.due(0)), 5, FinishReason.ABORT)
    assert box._unsent == ["s1"]
    end(box, only(box.due(50)), 60)
    assert only(box.due(61)).request_id == "s3"


@st.composite
def traces(draw):
    rows = []
    for number in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, 30))
        rows += turns(f"s{number}-", at, *draw(st.lists(st.integers(0, 9), max_size=3)))
    for number in range(draw(st.integers(0, 5))):
        rows.append(row(f"r{number}", draw(st.integers(0, 30)), cancel_after_ns=draw(st.none() | st.integers(0, 20))))
    return rows


@given(traces(), st.randoms(use_true_random=False))
def test_every_row_is_sent_once_or_given_up_whatever_the_server_does(rows, rng):
    box = inbox(*rows)
    by_name = {r.request_id: r for r in rows}
    live: dict = {}
    sent: list[str] = []
    finished_at: dict[str, int] = {}
    now = 0
    while live or box.next_ns() is not None:
        wake = box.next_ns()
        now = max(now, wake) if wake is not None and (not live or rng.random() < 0.5) else now + rng.randrange(5)
        for event in box.due(now):
            if isinstance(event, Abort):
                end(box, live.pop(event.request_id), now, FinishReason.ABORT)
                continue
            request = event.request
            source = by_name[request.request_id]
            if source.think_ns is None:
                assert request.arrival_ns == source.arrival_ns
            else:
                before = f"{request.request_id[:-1]}{source.turn - 1}"
                assert request.arrival_ns == finished_at[before] + source.think_ns
            assert request.arrival_ns <= now
            sent.append(request.request_id)
            live[request.request_id] = request
        box.check_invariants()
        for name in [name for name in live if rng.random() < 0.5]:
            reason = rng.choice([FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.IGNORED])
            finished_at[name] = now
            end(box, live.pop(name), now, reason)
    assert sorted(sent + box._unsent) == sorted(by_name)
    assert num_left(box) == 0
