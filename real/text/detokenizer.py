"""Token ids to text, piece by piece: the pieces concatenate to what the tokenizer makes of the whole.

A piece never ends within a character, except the last. Two ways, by what the tokenizer's decoder does:

- byte-level BPE (Qwen, Llama 3, OPT) joins the bytes of its tokens, so a UTF-8 decoder fed with them is exact;
- others (SentencePiece: leading spaces, byte fallback) decode a token differently at the start of a text than within
  one. Each push decodes a short window twice, without and with the new tokens, and takes the difference.

Both cost the same for each token, however long the text is. The tokenizers library's DecodeStream is not used: it
raises where one bad byte spoils a run of which it has shown a part, holds bytes that fit no character without end and
decodes all of them again for each token, and cannot give the rest at the end.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from functools import cache
from typing import Protocol

REPLACEMENT = "\ufffd"  # what decoders put in the place of bytes that are no character
CONTEXT_TOKENS = 4  # decoded before the new ones, so that they are within a text
MAX_HELD_TOKENS = 4  # a character has at most four bytes: later tokens do not mend it


class Detokenizer(Protocol):
    """The text of one sequence."""

    def push(self, token: int) -> str:
        """One more token; the text that it settles, perhaps none."""
        ...

    def pending(self) -> str:
        """What `finish` would give now, where it may already be text. An incomplete character is none."""
        ...

    def finish(self) -> str:
        """The rest, an incomplete character included. Nothing is pushed after it."""
        ...


class ByteDetokenizer:
    """For decoders that join the bytes of their tokens. bytes_of: empty for a token without text."""

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
    """For any decoder. is_silent: the token gives no text. is_byte: it stands for one byte (byte fallback).

    Bytes are held until another token ends their run: one byte that fits no character makes the decoder give up on all
    of the run.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_silent: Callable[[int], bool],
        is_byte: Callable[[int], bool],
    ) -> None:
        self._decode = decode
        self._is_silent = is_silent
        self._is_byte = is_byte
        self._window: list[int] = []
        self._num_released = 0  # tokens of the window whose text was given
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


@cache
def byte_level_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes its tokens in -> the byte that each stands for.

    Printable bytes of Latin-1 are themselves; the others follow, in order, from U+0100 on (GPT-2, Radford et al. 2019).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}
