"""Agentic coding sessions (callanjfox/kv-cache-tester, `traces/`): one JSON file a session, in an archive or a folder.

`id`, `block_size` (64), `hash_id_scope` ("local": ids are valid within one session only), `requests`: each with `t` (s
since the session's start), `in`, `out`, `hash_ids` (one for each whole block of the prompt), `think_time` and
`api_time` (s). An entry of type "subagent" has its own `t` and `requests`, whose `t` counts from its start. The files
have no start times of sessions: the reader samples them.

A session's requests are its turns. A sub-agent is a separate session, `<id>/<agent_id>`, that starts as long after its
parent session's start as recorded. It has the ids of its parent, so equal ids share content. Generated tokens of a
request are shared with later prompts only if ids cover them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from typing import Any

from testbed.traces.arrange import check_turn
from testbed.traces.arrivals import ArrivalConfig, idle_notes, instants
from testbed.traces.draws import streams
from testbed.traces.readers.fields import json_object, name_text, present, refuse, seconds, token_count, whole_number
from testbed.traces.readers.hash_blocks import BlockSemantics, HashBlocks
from testbed.traces.readers.open_archive import archive_files
from testbed.traces.schema import Span, TraceRequest
from testbed.traces.stream import StreamedTrace
from testbed.traces.synthesis import content_key
from testbed.wording import count

SEMANTICS = BlockSemantics(block_tokens=64, rounding="floor", scope="session")
SESSION_STARTS = ArrivalConfig(arrival="poisson", rate=0.1)


@dataclass(slots=True)
class _Session:
    """The common data of the rows of one session file. start_ns: the session's start in the trace."""

    name: str
    start_ns: int
    requests: Any
    place: str
    blocks: HashBlocks
    closed_loop: bool
    num_bad_thinks: int = 0


def stream_agentic(
    path: str | Path,
    limit: int | None = None,
    arrivals: ArrivalConfig | None = None,
    seed: int = 0,
    closed_loop: bool = True,
) -> StreamedTrace:
    """Reads an archive (.tar, .tar.gz, .tar.zst) or a folder, at most its first `limit` session files.

    arrivals: of the sessions (default: Poisson, one in ten seconds), sampled with `seed`. closed_loop: a request comes
    think_time after the one before it finished; otherwise as long after the session's start as recorded. If the request
    before has no api_time, a recorded think_time may count from an older request. One that is longer than the time
    since the request before arrived is replaced by that time. Memory grows with overlapping sessions, and a little with
    the number of all. Raises TraceError, with archive, file and request, on malformed entries.
    """
    config = arrivals or SESSION_STARTS
    streams(seed)  # rejects a bad seed before any row is read
    num_bad_thinks = 0

    def sessions() -> Iterator[_Session]:
        nonlocal num_bad_thinks
        num_bad_thinks = 0
        starts = instants(config, streams(seed))
        for name, text in islice(archive_files(path, (".json",)), limit):
            session = _session(text, f"{path}:{name}", next(starts), closed_loop)
            yield session
            num_bad_thinks += session.num_bad_thinks

    told = (
        f"sessions start by {config.says()}, seed {seed}: not the file's",
        *idle_notes(config, default=SESSION_STARTS),
    )
    replaced = "think times that do not count from the request before are replaced by the time since it arrived"
    found = "did not count from the request before; the time since it arrived was taken"

    def counted() -> tuple[str, ...]:
        return (*told, f"{count(num_bad_thinks, 'think time')} {found}") if num_bad_thinks else told

    nothing = f"{path}: no requests; expected one JSON file a session, with requests"
    notes = (*told, replaced) if closed_loop else told
    return StreamedTrace("agentic", lambda: _in_order(sessions()), notes, nothing=nothing, counted=counted)


def _in_order(sessions: Iterator[_Session]) -> Iterator[TraceRequest]:
    """Yields the rows of all sessions in order of arrival. sessions: in order of their starts."""
    open_rows: list[tuple[int, int, int, TraceRequest]] = []  # heap by arrival, recorded arrival, row number
    names: set[str] = set()
    num_rows = 0
    for session in sessions:
        while open_rows and open_rows[0][0] < session.start_ns:
            yield heappop(open_rows)[-1]
        newest: dict[str, TraceRequest] = {}  # session or sub-agent -> its newest turn
        for row in _rows(session, session.name, session.start_ns, session.requests, session.place):
            assert row.session_id is not None
            before = newest.get(row.session_id)
            if before is None and row.session_id in names:
                raise refuse(row.place, "id", row.session_id, "a session or sub-agent not used before")
            names.add(row.session_id)
            turn = newest[row.session_id] = check_turn(row, before)
            heappush(open_rows, (turn.arrival_ns, row.arrival_ns, num_rows, turn))
            num_rows += 1
    while open_rows:
        yield heappop(open_rows)[-1]


def _session(text: str, place: str, start_ns: int, closed_loop: bool) -> _Session:
    fields = json_object(text, place)
    name = name_text(present(fields, "id", place), place, "id")
    size = whole_number(fields.get("block_size", SEMANTICS.block_tokens), place, "block_size", 1, 2**20)
    scope = fields.get("hash_id_scope", "local")
    if scope not in ("local", "global"):
        raise refuse(place, "hash_id_scope", scope, "local or global")
    semantics = BlockSemantics(size, SEMANTICS.rounding, "session" if scope == "local" else "global")
    requests = present(fields, "requests", place)
    return _Session(name, start_ns, requests, place, HashBlocks("agentic", semantics), closed_loop)


def _rows(session: _Session, session_id: str, start_ns: int, entries: Any, place: str) -> Iterator[TraceRequest]:
    """Yields the requests of a session or a sub-agent, and those of the sub-agents within."""
    if not isinstance(entries, list):
        raise refuse(place, "requests", entries, "a list of requests")
    turn = 0
    before: dict[str, Any] | None = None
    for number, entry in enumerate(entries, 1):
        where = f"{place}:request {number}"
        if not isinstance(entry, dict):
            raise refuse(where, "requests", entry, "an object")
        at_ns = seconds(present(entry, "t", where), where, "t")
        if entry.get("type") == "subagent":
            agent = name_text(present(entry, "agent_id", where), where, "agent_id")
            nested = present(entry, "requests", where)
            yield from _rows(session, f"{session_id}/{agent}", start_ns + at_ns, nested, where)
            continue
        if before is not None and at_ns < seconds(before["t"], where, "t"):
            raise refuse(where, "t", entry["t"], f"at least {before['t']}, that of the request before")
        think_ns = None if before is None or not session.closed_loop else _think_ns(session, entry, before, where)
        yield _request(session, session_id, turn, start_ns + at_ns, think_ns, entry, where)
        turn += 1
        before = entry


def _request(
    session: _Session, session_id: str, turn: int, at_ns: int, think_ns: int | None, entry: dict[str, Any], where: str
) -> TraceRequest:
    num_prompt = token_count(present(entry, "in", where), where, "in")
    num_output = token_count(present(entry, "out", where), where, "out")
    name = f"{session_id}-t{turn}"
    rest_key = content_key("agentic-rest", name)
    ids = present(entry, "hash_ids", where)
    for field in ("think_time", "api_time"):
        if entry.get(field) is not None:
            seconds(entry[field], where, field)  # checked even if it is not used
    return TraceRequest(
        request_id=name,
        arrival_ns=at_ns,
        prompt=session.blocks.prompt(ids, num_prompt, where, rest_key, session.name),
        output=Span(content_key("agentic-output", name), 0, num_output),
        session_id=session_id,
        turn=turn,
        think_ns=think_ns,
        place=where,
    )


def _think_ns(session: _Session, entry: dict[str, Any], before: dict[str, Any], where: str) -> int:
    """Returns the time from the end of the request before to this request, as far as it is known."""
    since_ns = seconds(entry["t"], where, "t") - seconds(before["t"], where, "t")
    given, took = entry.get("think_time"), before.get("api_time")
    if given is not None and took is not None:
        return seconds(given, where, "think_time")
    if took is not None:
        return max(0, since_ns - seconds(took, where, "api_time"))
    think_ns = since_ns if given is None else seconds(given, where, "think_time")
    if think_ns > since_ns:
        session.num_bad_thinks += 1
        return since_ns
    return think_ns
