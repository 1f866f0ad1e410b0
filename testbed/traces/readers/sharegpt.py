"""ShareGPT: conversations as text. Knows no tokenizer: the caller gives one, as lengths in tokens are never guessed.

JSON: a list of `{"id", "conversations": [{"from": "human" | "gpt", "value": text}, ...]}`. There are no arrival times.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from testbed.errors import TraceError
from testbed.traces.readers.fields import present, refuse, refuse_half_characters
from testbed.traces.readers.json_list import json_items
from testbed.traces.readers.open_text import existing_file
from testbed.traces.schema import Part, TokenIds, TraceRequest
from testbed.traces.stream import StreamedTrace
from testbed.wording import count

Tokenizer = Callable[[str], Sequence[int]]
_HUMAN, _MODEL = ("human", "user"), ("gpt", "chatgpt", "bard", "assistant", "bing")


def stream_sharegpt(
    path: str | Path, limit: int | None = None, tokenizer: Tokenizer | None = None, max_turns: int | None = None
) -> StreamedTrace:
    """Reads the conversations of a file (plain, .gz, .zst), at most `limit` of them and `max_turns` of each.

    A turn's prompt is the conversation before it plus the new question; its output is the recorded answer. All first
    turns arrive at 0, and later turns when the turn before has finished (think time 0). Use testbed.traces.transforms
    for other arrivals. Conversations without a question and its answer are left out and counted in the notes. Raises
    TraceError without a tokenizer, or if the file has another format.
    """
    existing_file(path)
    if tokenizer is None:
        raise TraceError(
            f"{path}: ShareGPT holds text, and token counts are not guessed; "
            "set trace.tokenizer to a local folder with a tokenizer; where that is no key, convert the file first: "
            "testbed trace convert sharegpt <file> <out>.jsonl --tokenizer <folder>"
        )
    num_read = num_skipped = 0

    def rows() -> Iterator[TraceRequest]:
        nonlocal num_read, num_skipped
        num_read = num_skipped = 0
        for position, chat in enumerate(json_items(path, "conversations")):
            if num_read - num_skipped == limit:
                break
            place = f"{path}:conversation {position + 1}"
            refuse_half_characters(chat, place)
            made = _rows(position, _turns(chat, place)[:max_turns], tokenizer, place)
            num_read += 1
            num_skipped += not made
            yield from made

    def counted() -> list[str]:
        return (
            [f"{count(num_skipped, 'conversation')} without a question and its answer left out"] if num_skipped else []
        )

    nothing = f"{path}: no requests; expected a conversation with a question and its answer"
    notes = ("conversations without a question and its answer are left out",)
    return StreamedTrace("sharegpt", rows, notes, nothing=nothing, counted=counted)


def _turns(chat: Any, place: str) -> list[tuple[str, str]]:
    """Returns (question, answer) pairs from the start, up to the first message that breaks the alternation."""
    if not isinstance(chat, dict):
        raise TraceError(f'{place}: found a JSON {type(chat).__name__}; expected {{"id", "conversations"}}')
    messages = present(chat, "conversations", place)
    if not isinstance(messages, list):
        raise refuse(place, "conversations", messages, 'a list of {"from", "value"}')
    said: list[tuple[str, str]] = []
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("from", "value")):
            raise refuse(place, "conversations", message, '{"from": "human" or "gpt", "value": a string}')
        said.append((message["from"], message["value"]))
    if said and said[0][0] not in _HUMAN:
        said = said[1:]  # a system message, or the tail of an earlier part
    turns = []
    for (asker, question), (answerer, answer) in zip(said[::2], said[1::2], strict=False):
        if asker not in _HUMAN or answerer not in _MODEL:
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
