"""LRU's line of runs gives blocks up as a plain list of blocks would, whatever is removed from its middle."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.blocks.eviction import LRU


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_runs_are_given_up_in_the_order_of_their_blocks(seed: int) -> None:
    rng = random.Random(seed)
    lru, line, outside = LRU(), [], list(range(60))
    owner_of: dict[int, object] = {}
    for _ in range(80):
        action = rng.randrange(4)
        if action == 0 and outside:
            run = [outside.pop(rng.randrange(len(outside))) for _ in range(rng.randint(1, len(outside)))]
            owner = rng.choice((None, object()))
            lru.add_run(run[::-1], owner)
            line += run
            owner_of |= dict.fromkeys(run, owner)
        elif action == 1 and outside:
            block = outside.pop()
            lru.add(block, 0, -1)
            line.append(block)
            owner_of[block] = None
        elif action == 2 and line:
            block = line.pop(rng.randrange(len(line)))
            lru.remove(block)
            outside.append(block)
        elif line:
            num = rng.randint(0, len(line))
            for block in _pop(lru, num, owner_of):
                assert block == line.pop(0), seed
                outside.append(block)
        assert len(lru) == len(line), seed
        assert lru.blocks() == line, seed
    assert [lru.pop() for _ in line] == line, seed


def _pop(lru: LRU, num_blocks: int, owner_of: dict[int, object]) -> list[int]:
    """So many blocks in the order in which they are given up."""
    popped: list[int] = []
    while len(popped) < num_blocks:
        blocks, owner = lru.pop_run(num_blocks - len(popped))
        assert all(owner_of[block] is owner for block in blocks)
        popped += blocks[::-1]
    return popped
