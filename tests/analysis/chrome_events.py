"""The events of a file in Chrome's Trace Event Format, and the rules that it is held to."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def read(file: Path) -> list[Event]:
    """The events of a timeline, which is held to the rules of the format."""
    packed = file.suffix == ".gz"
    document = json.loads(gzip.decompress(file.read_bytes()) if packed else file.read_bytes())
    events = document["traceEvents"]
    check_format(events)
    return [event for event in events if event["ph"] != "M"]


def check_format(events: list[Event]) -> None:
    named: dict[str, set[Any]] = {"process_name": set(), "thread_name": set()}
    nested: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    open_slices: dict[Any, list[tuple[int, str]]] = defaultdict(list)
    for event in events:
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            if event["name"] in named:
                assert isinstance(event["args"]["name"], str)
                named[event["name"]].add((event["pid"], event.get("tid")))
            continue
        assert event["ph"] in "XiCbne"
        assert isinstance(event["name"], str)
        assert isinstance(event["ts"], float)
        assert event["ts"] >= 0
        assert (event["pid"], None) in named["process_name"]
        if event["ph"] != "C":
            assert (event["pid"], event["tid"]) in named["thread_name"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            nested[event["pid"], event["tid"]].append((ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])))
        elif event["ph"] == "i":
            assert event["s"] == "t"
        elif event["ph"] == "C":
            assert event["args"]
            assert all(type(value) is int for value in event["args"].values())
        else:
            check_asynchronous(event, open_slices[event["pid"], event["cat"], event["id2"]["local"]])
    assert not any(open_slices.values()), "every b has its e"
    for slices in nested.values():
        check_nesting(slices)


def check_asynchronous(event: Event, stack: list[tuple[int, str]]) -> None:
    """Marks come after what they lie in, so they are not looked at here."""
    if event["ph"] == "b":
        assert not stack or ns(event["ts"]) >= stack[-1][0]
        stack.append((ns(event["ts"]), event["name"]))
    elif event["ph"] == "e":
        at_ns, name = stack.pop()
        assert name == event["name"]
        assert ns(event["ts"]) >= at_ns


def check_nesting(slices: list[tuple[int, int]]) -> None:
    stack: list[tuple[int, int]] = []
    for start, end in sorted(slices, key=lambda one: (one[0], -one[1])):
        while stack and stack[-1][1] <= start:
            stack.pop()
        assert not stack or end <= stack[-1][1], "slices of a track lie side by side or one within the other"
        stack.append((start, end))
