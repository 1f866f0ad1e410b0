"""Queue orders by shared prefixes, after SGLang's `lpm` and `dfs-weight` (managers/schedule_policy.py)."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from mypy_extensions import mypyc_attr
from xxhash import xxh64_intdigest

from testbed.blocks.manager import BlockManager
from testbed.checks import choose, require_whole
from testbed.core.sequence import Sequence
from testbed.foreign_text import Unchecked
from testbed.policies.context import PolicyContext
from testbed.policies.orders.window import WindowedQueue

TREES = ("waiting", "cached")
LEAF: Final = -1  # in place of a depth: the paths of these sequences end at the node


def longest_prefix(
    max_waiting: Unchecked = 128, max_cached_tokens: Unchecked = 32, duplicate_tokens: Unchecked = 32
) -> WindowedQueue:
    """Longest cached prefix first, then order of arrival; first come, first served if more than `max_waiting` wait.

    A duplicate goes behind all others for this step: a sequence with at most `max_cached_tokens` cached tokens whose
    first `duplicate_tokens` tokens equal those of an earlier one. By the next step that one will have computed them.
    duplicate_tokens 0: no duplicates. SGLang keeps ties in the order of the last step; here they are by arrival.
    Without prefix caching nothing will be hit, so it is first come, first served, as in SGLang.
    """
    return WindowedQueue(LongestPrefix(max_cached_tokens, duplicate_tokens), max_waiting)


def depth_first(max_waiting: Unchecked = 128, tree: Unchecked = "cached") -> WindowedQueue:
    """Depth first through a tree of prefixes: children with more waiting sequences first, a node's own sequences last.

    tree: `cached`: only the prefixes that are cached now (SGLang's `dfs-weight`); sequences without a hit are in order
    of arrival. `waiting`: the common prefixes of the waiting sequences, in whole blocks, cached or not (the order of
    SGLang's paper). Its weights change with the queue, so it may leave a subtree early and find fewer hits. Of equal
    weights, the subtree of the oldest sequence comes first. First come, first served if more than `max_waiting` wait;
    SGLang has no such limit here.
    """
    return WindowedQueue(DepthFirst(choose("scheduler.queue_order.tree", tree, TREES)), max_waiting)


@mypyc_attr(allow_interpreted_subclasses=True)
class LongestPrefix:
    """The arrangement of `longest_prefix`. One cache lookup for each waiting sequence."""

    asks = ("prefixes",)

    def __init__(self, max_cached_tokens: Unchecked, duplicate_tokens: Unchecked) -> None:
        self._max_cached_tokens = require_whole("scheduler.queue_order.max_cached_tokens", max_cached_tokens, 0)
        self._duplicate_tokens = require_whole("scheduler.queue_order.duplicate_tokens", duplicate_tokens, 0)
        self._blocks: BlockManager | None = None

    def bind(self, context: PolicyContext) -> None:
        self._blocks = context.blocks

    def arrange(self, waiting: list[Sequence]) -> list[Sequence]:
        assert self._blocks is not None, "bind comes before the first head"
        if self._blocks.prefixes.source is None:
            return waiting
        ranked: list[tuple[int, int, Sequence]] = []
        deferred: list[Sequence] = []
        beginnings: set[tuple[str, tuple[int, ...]]] = set()  # tested for membership only, never iterated
        for seq in waiting:
            num_cached = self._blocks.lookup(seq).num_tokens
            if num_cached <= self._max_cached_tokens and 0 < self._duplicate_tokens <= seq.num_tokens:
                # two sequences have this many tokens in common exactly if these are equal: no tree is needed
                beginning = self._blocks.prefixes.salt_of(seq), tuple(seq.known_tokens(0, self._duplicate_tokens))
                if beginning in beginnings:
                    deferred.append(seq)
                    continue
                beginnings.add(beginning)
            ranked.append((-num_cached, seq.seq_id, seq))
        ranked.sort()  # ids are unique, so sequences are never compared
        return [seq for _, _, seq in ranked] + deferred


@mypyc_attr(allow_interpreted_subclasses=True)
class DepthFirst:
    """The arrangement of `depth_first`. A sequence's path is a list in which equal numbers mean equal prefixes."""

    asks = ("prefixes",)

    def __init__(self, tree: Unchecked) -> None:
        self._tree = tree
        self._blocks: BlockManager | None = None
        self._paths: dict[int, list[int]] = {}

    def bind(self, context: PolicyContext) -> None:
        self._blocks = context.blocks

    def arrange(self, waiting: list[Sequence]) -> list[Sequence]:
        self._paths = {seq.seq_id: self._path(seq) for seq in waiting}
        ordered: list[Sequence] = []
        subtrees = [(sorted(waiting, key=lambda seq: seq.seq_id), 0)]  # still to be visited, the next one last
        while subtrees:
            seqs, depth = subtrees.pop()
            if len(seqs) == 1 or depth == LEAF:
                ordered += seqs
                continue
            own: list[Sequence] = []
            children: dict[int, list[Sequence]] = {}
            for seq in seqs:
                path = self._paths[seq.seq_id]
                (children.setdefault(path[depth], []) if len(path) > depth else own).append(seq)
            subtrees.append((own, LEAF))
            lightest_first = sorted(children.values(), key=lambda child: (len(child), -child[0].seq_id))
            subtrees += [(child, self._branching(child, depth + 1)) for child in lightest_first]
        return ordered

    def _branching(self, seqs: list[Sequence], depth: int) -> int:
        """Returns the first depth at which the paths, equal up to `depth`, differ or one of them ends."""
        paths = [self._paths[seq.seq_id] for seq in seqs]
        first = paths[0]
        depths = range(depth, min(map(len, paths)))
        return depth + bisect_left(depths, True, key=lambda at: any(path[at] != first[at] for path in paths))

    def _path(self, seq: Sequence) -> list[int]:
        assert self._blocks is not None, "bind comes before the first head"
        if self._tree == "cached":
            return self._blocks.lookup(seq).blocks
        size = self._blocks.block_size
        path = self._paths.get(seq.seq_id, [])  # it stays valid: tokens are only appended
        key = path[-1] if path else xxh64_intdigest(self._blocks.prefixes.salt_of(seq).encode())
        for start in range(len(path) * size, seq.num_tokens - size + 1, size):
            key = xxh64_intdigest(seq.known_tokens(start, start + size).tobytes(), seed=key)
            path.append(key)
        return path
