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
            lru.add_all(run, owner)
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
            runs = lru.pop_runs(num)
            blocks = [block for run, _ in runs for block in run]
            assert blocks == line[:num], seed
            assert all(owner_of[block] is owner for run, owner in runs for block in run), seed
            del line[:num]
            outside += blocks
        assert len(lru) == len(line), seed
    assert lru.pop_all(len(line)) == line, seed
