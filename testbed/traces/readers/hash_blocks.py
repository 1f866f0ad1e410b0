"""Prompts given as hash ids, one for each block of tokens: equal ids are equal blocks, down to their tokens."""

from __future__ import annotations

from typing import Any

from testbed.traces.readers.fields import refuse, whole_number
from testbed.traces.schema import Part, Span
from testbed.traces.synthesis import content_key


class HashBlocks:
    """Turns hash ids into spans, sharing what is shared. `namespace` keeps the ids of two sources apart.

    An id that stands for a block of `block_tokens` is one content: a partial last block is its beginning. So equal
    runs of ids give equal tokens whatever block size the engine has, and the common prefix is kept to the token.
    """

    def __init__(self, namespace: str, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._namespace = namespace
        self._full: dict[int, Span] = {}  # one object for each block, however often it occurs

    def prompt(self, ids: Any, num_tokens: int, place: str, rest_key: int) -> tuple[Part, ...]:
        """The parts of a prompt of `num_tokens` whose blocks are `ids`.

        The number of ids is that of blocks rounded up (the last is partial), or rounded down: then the tokens after
        the last block are content of their own, keyed `rest_key`. Raises TraceError otherwise.
        """
        size = self.block_tokens
        num_full, num_rest = divmod(num_tokens, size)
        if not isinstance(ids, list) or len(ids) not in (num_full, num_full + bool(num_rest)):
            raise refuse(
                place,
                "hash_ids",
                ids if not isinstance(ids, list) else f"a list of {len(ids)}",
                f"{num_full + bool(num_rest)} ids, one for each block of {size} of {num_tokens} tokens",
            )
        parts: list[Part] = [self._block(block_id, place) for block_id in ids[:num_full]]
        if num_rest:
            key = self._block(ids[num_full], place).key if len(ids) > num_full else rest_key
            parts.append(Span(key, 0, num_rest))
        return tuple(parts)

    def _block(self, block_id: Any, place: str) -> Span:
        span = self._full.get(block_id) if isinstance(block_id, int) else None
        if span is None:
            number = whole_number(block_id, place, "hash_ids", -(2**63), 2**64, "whole numbers")
            span = self._full[number] = Span(content_key(self._namespace, number), 0, self.block_tokens)
        return span
