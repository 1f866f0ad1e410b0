"""Prompts given as hash ids, one for each block of tokens: equal ids are blocks of equal tokens.

Formats differ in what an id means; each reader declares its BlockSemantics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from testbed.traces.readers.fields import refuse, whole_number
from testbed.traces.schema import Part, Span
from testbed.traces.synthesis import content_key

_MAX_KEPT = 1 << 18  # spans in the cache of blocks; it is cleared when it is full


@dataclass(frozen=True, slots=True)
class BlockSemantics:
    """The meaning of a format's hash ids.

    block_tokens: tokens of a block. rounding: of the number of ids: "ceil" (the last block may be partial), "floor"
    (the tokens after the last whole block have no id), "either" (it differs from row to row). scope: an id has the same
    meaning in the whole file ("global"), or only within one session ("session").
    """

    block_tokens: int
    rounding: Literal["ceil", "floor", "either"]
    scope: Literal["global", "session"]

    def counts(self, num_tokens: int) -> tuple[int, ...]:
        """Returns the numbers of ids that a prompt of `num_tokens` may have."""
        num_full, num_rest = divmod(num_tokens, self.block_tokens)
        up = num_full + (num_rest > 0)
        return {"ceil": (up,), "floor": (num_full,), "either": (up, num_full)}[self.rounding]


class HashBlocks:
    """Converts hash ids to spans; equal ids share content. `namespace` separates the ids of different sources.

    An id is one content of block_tokens tokens; a partial last block is the beginning of it. So equal runs of ids give
    equal tokens for any block size of the engine, and common prefixes are exact to the token.
    """

    def __init__(self, namespace: str, semantics: BlockSemantics) -> None:
        self.semantics = semantics
        self._namespace = namespace
        self._full: dict[tuple[str, int] | int, Span] = {}  # cache: (session and) id -> span of a whole block

    def prompt(self, ids: Any, num_tokens: int, place: str, rest_key: int, session: str = "") -> tuple[Part, ...]:
        """Returns the parts of a prompt of `num_tokens` whose blocks are `ids`.

        Tokens without an id are a separate content with the key `rest_key`. session: of the ids, if the scope is
        "session". Raises TraceError if the number of ids does not fit the rounding, or an id is not a whole number.
        """
        size = self.semantics.block_tokens
        num_full, num_rest = divmod(num_tokens, size)
        counts = self.semantics.counts(num_tokens)
        if not isinstance(ids, list) or len(ids) not in counts:
            raise refuse(
                place,
                "hash_ids",
                ids if not isinstance(ids, list) else f"a list of {len(ids)}",
                f"{counts[0]} ids, one for each block of {size} of {num_tokens} tokens ({self.semantics.rounding})",
            )
        own = session if self.semantics.scope == "session" else ""
        parts: list[Part] = [self._block(block_id, own, place) for block_id in ids[:num_full]]
        if num_rest:
            key = self._block(ids[num_full], own, place).key if len(ids) > num_full else rest_key
            parts.append(Span(key, 0, num_rest))
        return tuple(parts)

    def _block(self, block_id: Any, session: str, place: str) -> Span:
        key = (session, block_id) if session else block_id
        span = self._full.get(key) if type(block_id) is int else None  # true equals 1, and is no id
        if span is None:
            number = whole_number(block_id, place, "hash_ids", -(2**63), 2**64, "whole numbers from -2**63 to 2**64")
            if len(self._full) >= _MAX_KEPT:
                self._full.clear()
            name = (self._namespace, session, number) if session else (self._namespace, number)
            span = self._full[key] = Span(content_key(*name), 0, self.semantics.block_tokens)
        return span
