"""ShareGPT: conversations as text. Knows no tokenizer: one is handed in, as lengths in tokens are never guessed.

JSON: a list of `{"id", "conversations": [{"from": "human" | "gpt", "value": text}, ...]}`. There are no arrival times.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from testbed.errors import TraceError
from testbed.traces.arrange import arrange
from testbed.traces.readers.fields import json_reason, refuse
from testbed.traces.readers.open_text import existing_file, read_lines
from testbed.traces.schema import Part, TokenIds, Trace, TraceRequest

Tokenizer = Callable[[str], Sequence[int]]
_HUMAN, _MODEL = ("human", "user"), ("gpt", "chatgpt", "bard", "assistant", "bing")


def read_sharegpt(
    path: str | Path, limit: int | None = None, tokenizer: Tokenizer | None = None, max_turns: int | None = None
) -> Trace:
    """Reads the conversations of a file (plain, .gz, .zst), at most `limit` of them and `max_turns` of each.

    A turn's prompt is all that was said before it and the new question; its output is the recorded answer. The first
    turns all arrive at 0, later ones when the turn before has finished (think time 0): give them arrivals and think
    times with testbed.traces.transforms. Conversations without a question and its answer are left out and counted.
    Raises TraceError without a tokenizer, or on a file of another shape.
    """
    existing_file(path)
    if tokenizer is None:
        raise TraceError(
            f"{path}: ShareGPT holds text, and token counts are not guessed; "
            "set trace.tokenizer to a local folder with a tokenizer"
        )
    rows: list[TraceRequest] = []
    num_skipped = num_read = 0
    for position, chat in enumerate(_conversations(path)):
        if limit is not None and num_read == limit:
            break
        place = f"{path}:conversation {position + 1}"
        turns = _turns(chat, place)[:max_turns]
        if not turns:
            num_skipped += 1
            continue
        num_read += 1
        rows.extend(_rows(position, turns, tokenizer, place))
    if not rows:
        raise TraceError(f"{path}: no requests; {num_skipped} conversations, none with a question and its answer")
    notes = [f"{num_skipped} conversations without a question and its answer were left out"] if num_skipped else []
    return arrange("sharegpt", rows, notes)


def _conversations(path: str | Path) -> list[Any]:
    text = "\n".join(line for _, line in read_lines(path))
    try:
        chats = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}:{error.lineno}: not JSON: {error.msg}; expected a list of conversations") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not JSON: {json_reason(error)}; expected a list of conversations") from None
    if not isinstance(chats, list):
        raise TraceError(f"{path}: found a JSON {type(chats).__name__}; expected a list of conversations")
    return chats


def _turns(chat: Any, place: str) -> list[tuple[str, str]]:
    """(question, answer) pairs from the start, up to the first message that breaks the alternation."""
    messages = chat.get("conversations") if isinstance(chat, dict) else None
    if not isinstance(messages, list):
        raise refuse(place, "conversations", messages, 'a list of {"from", "value"}')
    said: list[tuple[str, str]] = []
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("from", "value")):
            raise refuse(place, "conversations", message, '{"from": "human" or "gpt", "value": a text}')
        said.append((message["from"], message["value"]))
    if said and said[0][0] not in _HUMAN:
        said = said[1:]  # a system message, or the tail of an earlier part
    turns = []
    for (asker, question), (answerer, answer) in zip(said[::2], said[1::2], strict=False):
        if asker not in _HUMAN or answerer not in _MODEL or not question or not answer:
            break
        turns.append((question, answer))
    return turns


def _rows(chat: int, turns: list[tuple[str, str]], tokenizer: Tokenizer, place: str) -> list[TraceRequest]:
    rows: list[TraceRequest] = []
    history: tuple[Part, ...] = ()
    for turn, (question, answer) in enumerate(turns):
        asked, answered = TokenIds(array("i", tokenizer(question))), TokenIds(array("i", tokenizer(answer)))
        if not asked.ids or not answered.ids:
            break
        rows.append(
            TraceRequest(
                request_id=f"sharegpt-{chat}-{turn}",
                arrival_ns=0,
                prompt=(*history, asked),
                output=answered,
                session_id=f"sharegpt-{chat}",
                turn=turn,
                think_ns=0 if turn else None,
                place=place,
            )
        )
        history = (*history, asked, answered)
    return rows
