"""The key of a cached content, by which evictions remember what they evicted."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from testbed.blocks.eviction import LRU
from testbed.core.sequence import Sequence
from testbed.policies.context import PolicyContext
from testbed.policies.oracle import NoOracle
from tests.testbed.core_kit import make_blocks, make_request, make_scheduler
from tests.testbed.stepping import add, drain


class Noting(LRU):
    """Notes the key of each content, by (its block, depth), as it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[tuple[int, int], int | None] = {}

    def add(self, block: int, depth: int, last_step: int) -> None:
        self.keys[block, depth] = self.context.content_key(block, depth)
        super().add(block, depth, last_step)

    def bind(self, context: PolicyContext) -> None:
        self.context = context


def test_a_content_has_one_key_whichever_block_holds_it_and_whenever() -> None:
    """Listed or not: nobody asks for the first prefix before it is evicted, the second time somebody does."""
    policy = Noting()
    blocks = make_blocks(num_blocks=8, eviction=policy)
    scheduler = make_scheduler("prefill_first", blocks=blocks)
    policy.bind(PolicyContext(blocks, scheduler.limits, NoOracle(), None, 0))

    def keys_of(name: str, prompt: Seq[int], salt: str = "") -> list[int | None]:
        policy.keys.clear()
        add(scheduler, make_request(name, prompt, 1, salt=salt))
        drain(scheduler)
        assert all(blocks.prefixes.gpu.cache.content_of[block] is not None for block, _ in policy.keys)
        return [key for (_, _), key in sorted(policy.keys.items(), key=lambda item: item[0][1])]

    prompt = range(9)
    keys, places = keys_of("a", prompt), set(policy.keys)
    assert len(set(keys)) == 2
    assert None not in keys
    assert keys_of("other", range(50, 70))[:1] != keys[:1]
    scheduler.reset_prefixes()
    assert keys_of("another", range(50, 70))[:1] != keys[:1]
    blocks.hand_out_in(blocks.prefixes.gpu.pool.free[:])  # the last first
    assert blocks.lookup(Sequence(90, make_request("x", prompt), 100)).num_tokens == 0, "evicted"
    assert keys_of("b", prompt) == keys
    assert set(policy.keys) != places, "in other blocks"
    assert keys_of("longer", range(14))[:2] == keys
    assert not set(keys_of("salted", prompt, salt="s")) & set(keys)
    assert PolicyContext(make_blocks(), scheduler.limits, NoOracle(), None, 0).content_key(0, 0) is None
