"""Token synthesis: the token at position j of a synthetic content. Owns the content keys and the generator.

The generator is counter-based: the token at position j of content `key` is a pure function of (key, j, vocab_size). So
equal prefixes are equal tokens, different contents differ, any slice can be made without the rest, and nothing is
stored. It is splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014) at an
arbitrary counter. Its upper 32 bits are scaled to the vocabulary by multiplication (Lemire, 2019: no division; the bias
is below vocab_size / 2**32). It uses integer arithmetic only, so tokens are the same on every machine.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from testbed.traces.schema import Part, Span, TokenIds

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)
_CHUNK_TOKENS = 1 << 18  # limits the generator's temporaries to a few MB, which fit into the processor's cache
MAX_VOCAB_SIZE = 2**31 - 1


def content_key(*parts: str | int) -> int:
    """Returns the 64-bit key of a content's name: xxhash64 over an unambiguous encoding of `parts`.

    ("ab", "c") and ("a", "bc") differ, and so do "1" and 1. The key is the same on every machine and in every process.
    """
    return int(xxhash.xxh64_intdigest(b"".join(map(_encoded, parts))))


def _encoded(part: str | int) -> bytes:
    raw = part.encode() if isinstance(part, str) else b"%d" % part
    return struct.pack("<cI", b"s" if isinstance(part, str) else b"i", len(raw)) + raw


_NUMBER_HEADS = tuple(struct.pack("<cI", b"i", num_digits) for num_digits in range(24))  # of 64-bit numbers


def numbered_keys(*parts: str | int) -> Callable[[int], int]:
    """Returns a function: i -> content_key(*parts, i). For many contents of a kind: it encodes `parts` only once."""
    head = b"".join(map(_encoded, parts))
    digest = xxhash.xxh64_intdigest

    def key_of(number: int) -> int:
        raw = b"%d" % number
        return digest(head + _NUMBER_HEADS[len(raw)] + raw)

    return key_of


def materialize(parts: Iterable[Part], vocab_size: int) -> array[int]:
    """Returns the tokens of all parts, one after the other. About 0.6 ms for 100,000 synthetic tokens.

    Synthetic tokens are below vocab_size; explicit ids are not changed. Raises ValueError for an impossible vocabulary
    or span.
    """
    _check(vocab_size)
    tokens: array[int] = array("i")
    spans: list[Span] = []  # neighbours are synthesised together: a prompt may be hundreds of short blocks
    num_pending = 0
    for part in parts:
        if isinstance(part, TokenIds):
            _append(tokens, spans, vocab_size)
            spans, num_pending = [], 0
            tokens.extend(part.ids)
            continue
        if part.length < 0 or part.start < 0:
            raise ValueError(f"{part} is impossible: start and length must be 0 or above")
        for piece in _pieces(part):
            spans.append(piece)
            num_pending += piece.length
            if num_pending >= _CHUNK_TOKENS:
                _append(tokens, spans, vocab_size)
                spans, num_pending = [], 0
    _append(tokens, spans, vocab_size)
    return tokens


def heads(spans: Sequence[Span], num_tokens: int, vocab_size: int) -> list[array[int]]:
    """Returns the first `num_tokens` tokens of each span, or all if it is shorter, made in one pass: the time of a pass
    hardly depends on the number of spans. Raises ValueError for an impossible vocabulary.
    """
    _check(vocab_size)
    origins = np.array([(key + start * _GOLDEN) & _MASK for key, start, _ in spans], dtype=np.uint64)
    states = origins[:, None] + _counters(num_tokens)  # [num_spans, num_tokens]
    tokens: array[int] = array("i")
    tokens.frombytes(_mixed(states.ravel(), vocab_size))
    ends = [num_tokens * index + min(num_tokens, span.length) for index, span in enumerate(spans)]
    return [tokens[num_tokens * index : end] for index, end in enumerate(ends)]


def _check(vocab_size: int) -> None:
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size is {vocab_size}; it must be 1 to {MAX_VOCAB_SIZE}")


def _pieces(span: Span) -> Iterable[Span]:
    """Returns the span in pieces of at most _CHUNK_TOKENS."""
    if span.length <= _CHUNK_TOKENS:
        return (span,)
    key, start, length = span
    return (Span(key, start + done, min(_CHUNK_TOKENS, length - done)) for done in range(0, length, _CHUNK_TOKENS))


def _append(tokens: array[int], spans: list[Span], vocab_size: int) -> None:
    """Appends the tokens of `spans` to `tokens`, all in one vectorised pass."""
    total = sum(span.length for span in spans)
    if total == 0:
        return
    # state of position j: key + (j + 1) * golden, mod 2**64
    if len(spans) == 1:
        state = _counters(total) + np.uint64((spans[0].key + spans[0].start * _GOLDEN) & _MASK)  # [num_tokens]
    else:
        origins: list[int] = []
        done = 0
        for key, start, length in spans:
            origins.append((key + (start - done) * _GOLDEN) & _MASK)
            done += length
        lengths = [span.length for span in spans]
        state = _counters(total) + np.repeat(np.array(origins, dtype=np.uint64), lengths)
    tokens.frombytes(_mixed(state, vocab_size))


def _mixed(state: NDArray[np.uint64], vocab_size: int) -> memoryview:
    """Returns the bytes of the tokens of these states. Overwrites the states."""
    scratch = state >> _S30
    np.bitwise_xor(state, scratch, state)
    np.multiply(state, _M1, state)
    np.right_shift(state, _S27, scratch)
    np.bitwise_xor(state, scratch, state)
    np.multiply(state, _M2, state)
    np.right_shift(state, _S31, scratch)
    np.bitwise_xor(state, scratch, state)
    np.right_shift(state, _S32, state)
    np.multiply(state, np.uint64(vocab_size), state)
    np.right_shift(state, _S32, state)
    return state.astype(np.intc).data.cast("B")


_table: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)


def _counters(num: int) -> NDArray[np.uint64]:
    """Returns (j + 1) * golden for j < num, a view of a table that grows up to 2 * _CHUNK_TOKENS entries (4 MB)."""
    global _table
    if num > len(_table):
        size = min(2 * _CHUNK_TOKENS, max(1 << 14, 1 << num.bit_length()))
        _table = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return _table[:num]
