"""Decodes token ids incrementally: the concatenated pieces equal the tokenizer's text of all ids.

A piece never ends within a character, except the last. There are two ways, depending on the tokenizer's decoder:

- byte-level BPE (Qwen, Llama 3, OPT) joins the bytes of its tokens, so an incremental UTF-8 decoder is exact;
- others (SentencePiece: leading spaces, byte fallback) decode a token differently at the start of a text than within
  one. Each push decodes a short window without and with the new tokens, and takes the difference.

The cost per token does not depend on the length of the text. The tokenizers library's DecodeStream is not used, for
three reasons. It raises if one bad byte spoils a run of bytes of which it has already returned a part. It holds back
bytes that form no character without limit, and decodes all of them again for each token. It cannot return the rest at
the end.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol

REPLACEMENT = "\ufffd"  # what decoders return for bytes that form no character
CONTEXT_TOKENS = 4  # tokens decoded before the new ones, so that these are within a text
MAX_HELD_TOKENS = 4  # a character has at most four bytes: more tokens cannot complete it


class Detokenizer(Protocol):
    """The text of one sequence."""

    def push(self, token: int) -> str:
        """Adds a token; returns the text that is now final, which can be empty."""
        ...

    def pending(self) -> str:
        """Returns what `finish` would return now, without an incomplete character. It can still change."""
        ...

    def finish(self) -> str:
        """Returns the rest, an incomplete character included. No token can be pushed afterwards."""
        ...


class ByteDetokenizer:
    """For decoders that join the bytes of their tokens. bytes_of: a token's bytes; empty for a token without text."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._bytes_of(token))

    def pending(self) -> str:
        return ""

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For any decoder. is_silent: whether a token has no text. is_byte: whether it is a single byte (byte fallback).

    A run of bytes is held back until another token ends it, because one byte that fits no character makes the decoder
    replace the whole run.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], is_silent: Callable[[int], bool], is_byte: Callable[[int], bool]
    ) -> None:
        self._decode = decode
        self._is_silent = is_silent
        self._is_byte = is_byte
        self._window: list[int] = []
        self._num_released = 0  # tokens of the window whose text was returned
        self._released = ""  # their text

    def push(self, token: int) -> str:
        if self._is_silent(token):
            return ""
        self._window.append(token)
        if self._is_byte(token):
            return ""
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._num_released < MAX_HELD_TOKENS:
            return ""
        piece = text[len(self._released) :]
        self._window = self._window[-CONTEXT_TOKENS:]
        self._num_released = len(self._window)
        self._released = self._decode(self._window)
        return piece

    def pending(self) -> str:
        text = self.finish()
        return "" if text.endswith(REPLACEMENT) else text

    def finish(self) -> str:
        if self._num_released == len(self._window):
            return ""
        return self._decode(self._window)[len(self._released) :]
