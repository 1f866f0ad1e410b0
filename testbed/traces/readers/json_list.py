"""Reads a file with one JSON list item by item, as such a file may be larger than the memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testbed.errors import TraceError
from testbed.traces.readers.fields import json_reason
from testbed.traces.readers.open_text import read_pieces

_BETWEEN = re.compile(r"[ \t\r\n]*")
_MAX_TOKEN = 12  # longest token that the end of a piece may cut: a literal, an escape of two surrogates


def json_items(path: str | Path, items: str) -> Iterator[Any]:
    """Yields the items of the list in a file (plain, .gz, .zst). items: their name in messages.

    Raises TraceError, with the line, if the file is not a JSON list.
    """
    text = _Text(path, f"expected a list of {items}")
    first = text.next_character()
    if first != "[":
        kinds = {"{": "a JSON object", '"': "a JSON text", "": "nothing"}
        raise text.error(f"found {kinds.get(first, repr(first))}")
    text.pass_character()
    number, character = 0, text.next_character()
    while character != "]":
        number += 1
        yield text.value(number)
        character = text.next_character()
        if character == ",":
            text.pass_character()
        elif character != "]":
            what = f"found {character!r} after an item" if character else "the list does not end"
            raise text.error(f"not JSON: {what}")
    text.pass_character()
    if character := text.next_character():
        raise text.error(f"not JSON: found {character!r} after the list")


class _Text:
    """The text of a file, read from its beginning on; text that was parsed is dropped."""

    def __init__(self, path: str | Path, expected: str) -> None:
        self._path = path
        self._expected = expected
        self._pieces = read_pieces(path)
        self._text = ""
        self._position = 0
        self._num_lines = 0  # ended before `_text`
        self._decoder = json.JSONDecoder()

    def next_character(self) -> str:
        """Skips white space and returns the next character, without passing it; empty at the end of the file."""
        while True:
            between = _BETWEEN.match(self._text, self._position)
            assert between is not None, "it may be empty"
            self._position = between.end()
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._read(1):
                return ""

    def pass_character(self) -> None:
        self._position += 1

    def value(self, number: int) -> Any:
        """Returns the next JSON value. number: of the item, for messages."""
        self.next_character()
        while True:
            try:
                value, self._position = self._decoder.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                is_cut = error.pos + _MAX_TOKEN >= len(self._text) or error.msg.startswith("Unterminated string")
                if is_cut and self._read(len(self._text) - self._position):  # doubles the text: few retries
                    continue
                raise self.error(
                    f"item {number} is not JSON: {error.msg.removesuffix(' starting at')}", error.pos
                ) from None
            except (ValueError, RecursionError) as error:
                raise self.error(f"item {number} is not JSON: {json_reason(error)}") from None
            return value

    def error(self, reason: str, position: int | None = None) -> TraceError:
        before = self._text[: self._position if position is None else position]
        return TraceError(f"{self._path}:{self._num_lines + before.count(chr(10)) + 1}: {reason}; {self._expected}")

    def _read(self, num_characters: int) -> bool:
        """Adds at least `num_characters` to the text, or what is left of the file. False: nothing was left."""
        kept, more = self._text[self._position :], []
        num_read = 0
        for piece in self._pieces:
            more.append(piece)
            num_read += len(piece)
            if num_read >= num_characters:
                break
        if not more:
            return False
        self._num_lines += self._text.count("\n", 0, self._position)
        self._text, self._position = "".join([kept, *more]), 0
        return True
