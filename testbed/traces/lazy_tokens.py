"""Token ids that are made when they are first read. Knows their number, and not what they mean.

The simulator schedules by lengths, and reads tokens only to find prefixes that requests share: it never reads most
tokens of a trace.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import overload


class LazyTokens(Seq[int]):
    """Token ids. make: returns all of them. head: the first ones, made already; slices within it do not call `make`.

    Equal to an array, or to LazyTokens, with the same ids.
    """

    __slots__ = ("_head", "_make", "_num_tokens", "_tokens")

    def __init__(self, num_tokens: int, make: Callable[[], array[int]], head: array[int] | None = None) -> None:
        self._num_tokens = num_tokens
        self._make = make
        self._head = head
        self._tokens: array[int] | None = None

    def all(self) -> array[int]:
        """Returns all tokens, made at the first call."""
        if self._tokens is None:
            self._tokens = self._make()
            assert len(self._tokens) == self._num_tokens, "as many tokens as were promised"
        return self._tokens

    def __len__(self) -> int:
        return self._num_tokens

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> array[int]: ...
    def __getitem__(self, index: int | slice) -> int | array[int]:
        if isinstance(index, slice) and self._head is not None and index.start is index.step is None:
            stop = index.stop
            if stop is not None and 0 <= stop <= len(self._head):
                return self._head[:stop]
        return self.all()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.all())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazyTokens):
            return self.all() == other.all()
        return self.all() == other if isinstance(other, array) else NotImplemented

    def __repr__(self) -> str:
        return f"LazyTokens({self._num_tokens})" if self._tokens is None else repr(self._tokens)
