"""Transformations that combine traces: repeat, merge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from heapq import merge as merge_sorted

from testbed.checks import require
from testbed.traces.schema import Trace, TraceRequest, TraceSource
from testbed.traces.stream import MAX_HELD_ROWS, MAX_STREAMED_ROWS, StreamedTrace
from testbed.traces.transforms.common import MAX_S, S, derived, marked, renamed

_REPEATED = "repeated"  # the beginning of the note of a repeated trace


def repeat(trace: S, times: int, gap_s: float = 0.0, fresh_content: bool = True) -> S:
    """Returns the trace `times` times, each copy `gap_s` after the last arrival of the one before.

    Ids of copies get "#1", "#2", ..., or "##1", ... if the trace is itself repeated. fresh_content: copies have their
    own contents (explicit token ids stay); else prompts of a copy hit in a prefix cache that has those of the first
    copy.
    """
    require("times", times, times >= 1, "at least 1")
    held = isinstance(trace, Trace)
    num_once = trace.num_requests or 1
    most = max(1, (MAX_HELD_ROWS if held else MAX_STREAMED_ROWS) // num_once)
    how = " in memory (trace.stream=true for more)" if held else ""
    each = "" if trace.num_requests is None else f", for {num_once:,} requests each time{how}"
    require("times", times, times <= most, f"at most {most:,}{each}")
    require("gap_s", gap_s, 0 <= gap_s <= MAX_S, f"0 to {MAX_S:.1e}")
    gap_ns = round(gap_s * 1e9)
    mark = "#" * (1 + sum(1 for note in trace.notes if _REPEATED in note))

    def rows() -> Iterator[TraceRequest]:
        period_ns = 0
        for copy in range(times):
            for row in trace:
                if copy == 0:
                    period_ns = row.arrival_ns + gap_ns  # after the first copy: that of its last row
                    yield row
                    continue
                again = marked(row, "", f"{mark}{copy}")._replace(arrival_ns=row.arrival_ns + copy * period_ns)
                yield renamed(again, f"copy{mark[1:]}", copy) if fresh_content else again

    num = None if trace.num_requests is None else trace.num_requests * times
    how = "copies with contents of their own" if fresh_content else "copies with the same contents"
    made = derived(trace, rows, f"{_REPEATED} {times} times, {gap_s:g} s apart, {how}", num_requests=num)
    # the first turns of a second copy are behind the closed-loop turns of the first
    return replace(made, closed_tail=False) if isinstance(made, StreamedTrace) and times > 1 else made


def merge(traces: Mapping[str, TraceSource], share_content: bool = False) -> StreamedTrace:
    """Returns several traces as one. The label of each is put before its ids, sessions and tenants (label/tenant).

    share_content: equal contents of two traces are equal tokens (two windows of one file); else they are different.
    """
    require("traces", len(traces), len(traces) >= 1, "at least 1 trace")

    def labelled(label: str, trace: TraceSource) -> Iterator[TraceRequest]:
        for row in trace:
            own = marked(row, f"{label}/", "")._replace(tenant=label if row.tenant is None else f"{label}/{row.tenant}")
            yield own if share_content else renamed(own, "merged", label)

    def rows() -> Iterator[TraceRequest]:
        parts = [labelled(label, trace) for label, trace in traces.items()]
        return merge_sorted(*parts, key=lambda row: row.arrival_ns)

    counts = [trace.num_requests for trace in traces.values()]
    num = None if None in counts else sum(count or 0 for count in counts)
    how = "equal contents are shared" if share_content else "contents are kept apart"
    told = [f"{label}: {note}" for label, trace in traces.items() for note in trace.notes]
    return StreamedTrace("+".join(traces), rows, (*told, f"{' and '.join(traces)} merged, {how}"), num)
