"""Units that are kept, sampled and moved together: a session, a conversation found by its contents, a single request.

Files of hash blocks without sessions (Mooncake) contain conversations, too: a turn's prompt begins with the blocks of
the turn before it. A block that is followed by more than MAX_TURNS different blocks belongs to a prompt that
conversations share, such as a system prompt. The first block after the last shared one identifies the conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

from testbed.traces.schema import Span, TraceRequest, TraceSource

MAX_TURNS = 16  # in the published conversation file one block has thousands of followers; the next has 11
_MIN_BLOCKS = 4  # in the longest prompt: fewer parts can be a system prompt and a question

Unit = tuple[str, str]
UnitOf = Callable[[TraceRequest], Unit]


def units_of(trace: TraceSource) -> UnitOf:
    """Returns a function: row -> its unit. Iterates over the trace once; holds the blocks that others follow."""
    followers: dict[int, set[int]] = {}  # block -> the different blocks after it, up to MAX_TURNS + 1
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
    """Returns the keys of a prompt's blocks; none if the prompt does not consist of blocks."""
    keys = [part.key for part in row.prompt if isinstance(part, Span) and part.start == 0]
    return keys if len(keys) == len(row.prompt) else []


def session_of(row: TraceRequest) -> Unit:
    """Returns the session of a row; outside sessions the request itself."""
    return ("request", row.request_id) if row.session_id is None else ("session", row.session_id)


def _conversation(shared: set[int], row: TraceRequest) -> Unit:
    if row.session_id is not None or len(row.prompt) < 2:
        return session_of(row)
    keys = _keys(row)
    behind = [index + 1 for index, key in enumerate(keys[:-1]) if key in shared]
    return "conversation", str(keys[behind[-1] if behind else 0])


def contents_of(rows: Iterable[TraceRequest], unit_of: UnitOf) -> set[int]:
    """Returns the keys of the contents that several units share."""
    owner: dict[int, Unit] = {}
    common: set[int] = set()
    for row in rows:
        mine = unit_of(row)
        for part in row.prompt:
            if isinstance(part, Span) and owner.setdefault(part.key, mine) != mine:
                common.add(part.key)
    return common
