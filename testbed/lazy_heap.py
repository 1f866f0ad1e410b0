"""A heap whose elements can be moved and removed. Owns the lazy deletion; knows no sequences, blocks or policies."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

Rank = tuple[int, ...]  # the smallest is first; integers only, so that it is the same on every machine

Name = TypeVar("Name", bound=Hashable)
Item = TypeVar("Item")

MIN_STALE: Final = 64  # with fewer stale entries, compaction costs more than it saves


class LazyHeap(Generic[Name, Item]):
    """Items ordered by rank, each with a unique name; equal ranks are in the order of their `put`.

    put, remove: O(log n) amortised; first: O(1) amortised. A removed or moved item leaves a stale entry in the heap,
    until that comes to the top or the heap is compacted. The heap has at most twice as many entries as items, plus
    MIN_STALE.
    """

    def __init__(self) -> None:
        self._entries: dict[Name, tuple[Rank, int, Name, Item]] = {}
        self._heap: list[tuple[Rank, int, Name, Item]] = []
        self._num_puts = 0

    def put(self, name: Name, rank: Rank, item: Item) -> None:
        """Adds the item, or replaces the item of this name, at this rank."""
        self._num_puts += 1  # unique, so that neither names nor items are ever compared
        entry = (rank, self._num_puts, name, item)
        self._entries[name] = entry
        heappush(self._heap, entry)
        self._compact()

    def remove(self, name: Name) -> None:
        """Removes the item of this name. Raises KeyError if there is none."""
        del self._entries[name]
        self._compact()

    def pop(self) -> Item:
        """Removes and returns the first item. Raises IndexError if there is none."""
        self._settle()
        _, _, name, item = self._heap[0]
        self.remove(name)
        return item

    def first(self) -> Item | None:
        self._settle()
        return self._heap[0][3] if self._heap else None

    def first_rank(self) -> Rank | None:
        self._settle()
        return self._heap[0][0] if self._heap else None

    def __contains__(self, name: Name) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Item]:
        """Iterates over the items by rank; O(n log n)."""
        return (entry[3] for entry in sorted(self._entries.values(), key=lambda entry: entry[:2]))

    def _settle(self) -> None:
        heap, entries = self._heap, self._entries
        while heap:
            known = entries.get(heap[0][2])
            if known is not None and known[1] == heap[0][1]:  # not stale: made by the last `put` of its name
                return
            heappop(heap)

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + MIN_STALE:
            self._heap = list(self._entries.values())
            heapify(self._heap)
