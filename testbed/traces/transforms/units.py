"""What is kept, drawn and moved together: a session, a conversation that only its contents show, a single request.

Files of hash blocks without sessions (Mooncake) have conversations all the same: a turn's prompt begins with the blocks
of the turn before it. A block that more than MAX_TURNS different blocks follow is a prompt that conversations share, as
the system's; the first block behind the last such one names the conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

from testbed.traces.schema import Span, TraceRequest, TraceSource

MAX_TURNS = 16  # of the published conversation file, one block has more followers, and has thousands; the next one 11
_MIN_BLOCKS = 4  # of some prompt: fewer parts are a system prompt and a question

Unit = tuple[str, str]
UnitOf = Callable[[TraceRequest], Unit]


def units_of(trace: TraceSource) -> UnitOf:
    """Says to what a row of the trace belongs. Goes through the trace once; holds the blocks that others follow."""
    followers: dict[int, set[int]] = {}  # of a block: up to one more than MAX_TURNS
    block_tokens = most_blocks = 0
    for row in trace:
        if row.session_id is not None or len(row.prompt) < 2:
            continue
        keys = _keys(row)
        lengths = {part.num_tokens for part in row.prompt[:-1]}
        if not keys or len(lengths | ({block_tokens} if block_tokens else set())) > 1:
            return session_of  # no blocks of one size
        block_tokens, most_blocks = max(lengths), max(most_blocks, len(keys))
        for before, key in pairwise(keys):
            known = followers.setdefault(before, set())
            if len(known) <= MAX_TURNS:
                known.add(key)
    if most_blocks < _MIN_BLOCKS:
        return session_of
    return partial(_conversation, {key for key, known in followers.items() if len(known) > MAX_TURNS})


def _keys(row: TraceRequest) -> list[int]:
    """Of the blocks of a prompt; none if it is not of blocks."""
    keys = [part.key for part in row.prompt if isinstance(part, Span) and part.start == 0]
    return keys if len(keys) == len(row.prompt) else []


def session_of(row: TraceRequest) -> Unit:
    """Its session, or itself outside sessions."""
    return ("request", row.request_id) if row.session_id is None else ("session", row.session_id)


def _conversation(shared: set[int], row: TraceRequest) -> Unit:
    if row.session_id is not None or len(row.prompt) < 2:
        return session_of(row)
    keys = _keys(row)
    behind = [index + 1 for index, key in enumerate(keys[:-1]) if key in shared]
    return "conversation", str(keys[behind[-1] if behind else 0])


def contents_of(rows: Iterable[TraceRequest], unit_of: UnitOf) -> set[int]:
    """Keys of the contents that several units have in common."""
    owner: dict[int, Unit] = {}
    common: set[int] = set()
    for row in rows:
        mine = unit_of(row)
        for part in row.prompt:
            if isinstance(part, Span) and owner.setdefault(part.key, mine) != mine:
                common.add(part.key)
    return common
