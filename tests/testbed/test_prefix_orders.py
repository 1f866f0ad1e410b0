"""Queue orders by shared prefixes: longest prefix first, depth first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import testbed.policies.orders as orders
from testbed.core.sequence import Sequence
from tests.testbed.core_kit import make_blocks
from tests.testbed.orders_kit import bound, cache, caching, drain, emit, make_seq, pushed

# --- longest prefix first ---


def test_lpm_serves_the_longest_hit_first_and_ties_by_arrival() -> None:
    seqs = [make_seq(seq_id, 200) for seq_id in range(5)]
    blocks = caching(*(seqs[seq_id].tokens[:num_cached] for seq_id, num_cached in ((1, 64), (2, 128), (3, 64))))
    assert drain(pushed(bound(orders.longest_prefix(), blocks=blocks), *seqs)) == [2, 1, 3, 0, 4]


def test_lpm_finds_what_the_block_manager_has_cached() -> None:
    blocks = make_blocks(num_blocks=64, block_size=4)
    done = make_seq(0, 40)
    blocks.admit(done, 40, blocks.lookup(done))
    blocks.prefixes.publish(done, 40)
    blocks.free(done)
    queue = bound(orders.longest_prefix(duplicate_tokens=0), blocks=blocks)
    cold, warm, warmer = make_seq(1, 40), make_seq(2, range(10)), make_seq(3, range(30))
    assert drain(pushed(queue, cold, warm, warmer)) == [3, 2, 1]
    salted = make_seq(4, range(30), salt="other")
    assert drain(pushed(queue, cold, salted, warm)) == [2, 1, 4]


def test_lpm_is_first_come_first_served_over_its_window() -> None:
    seqs = [make_seq(seq_id, 100) for seq_id in range(4)]
    queue = bound(orders.longest_prefix(max_waiting=3), blocks=caching(seqs[2].tokens[:64]))
    pushed(queue, *seqs)
    assert queue.head(1).seq_id == 0
    assert all(seq.chain is None for seq in seqs), "beyond the window nothing is looked up"
    queue.remove(queue.head(1))
    assert queue.head(1).seq_id == 1, "the step goes on as it began"
    assert queue.head(2).seq_id == 2, "at the next step three wait"


def test_lpm_looks_up_once_a_step() -> None:
    blocks = caching()
    seqs = [make_seq(seq_id, 100) for seq_id in range(5)]
    queue = pushed(bound(orders.longest_prefix(), blocks=blocks), *seqs)
    assert queue.head(1).seq_id == 0
    cache(blocks, seqs[4].tokens[:64])
    queue.remove(queue.head(1))
    assert queue.head(1).seq_id == 1, "what is cached meanwhile is seen by the next step"
    assert queue.head(2).seq_id == 4
    cache(blocks, seqs[3].tokens[:80])
    assert queue.head(2).seq_id == 4
    queue.push(make_seq(9))
    assert queue.head(2).seq_id == 3, "who comes is placed among all, looked up anew"


def test_lpm_defers_duplicates_of_a_prefix_until_the_next_step() -> None:
    shared = list(range(50))
    blocks = caching()
    queue = bound(orders.longest_prefix(duplicate_tokens=50), blocks=blocks)
    other = [9, *shared[1:]]
    pushed(queue, make_seq(0, [*shared, 1]), make_seq(1, shared), make_seq(2, other), make_seq(3, [*shared, 3]))
    assert queue.head(1).seq_id == 0
    queue.remove(queue.head(1))
    assert queue.head(1).seq_id == 2, "who shares what is computed in this step goes behind"
    cache(blocks, shared[:48])
    assert drain(queue, 2) == [1, 3, 2]


@pytest.mark.parametrize(
    ("num_shared", "num_cached", "salt", "order"),
    [
        (32, 0, "", [0, 2, 1]),
        (31, 0, "", [0, 1, 2]),
        (32, 32, "", [0, 2, 1]),  # hits of both; as SGLang, a hit of the very threshold still counts as little
        (64, 33, "", [0, 1, 2]),
        (32, 0, "other", [0, 1, 2]),
    ],
)
def test_lpm_thresholds_are_sglangs(num_shared: int, num_cached: int, salt: str, order: list[int]) -> None:
    shared = list(range(-num_shared, 0))
    prompts = [*shared, *range(40)], [*shared, *range(50, 90)], [*range(1000, 1080)]
    blocks = caching(*(prompt[:num_cached] for prompt in prompts), block_size=1)
    seqs = [make_seq(seq_id, prompt, salt=salt if seq_id == 1 else "") for seq_id, prompt in enumerate(prompts)]
    assert drain(pushed(bound(orders.longest_prefix(), blocks=blocks), *seqs)) == order


def test_lpm_without_prefix_caching_is_first_come_first_served() -> None:
    shared = list(range(50))
    queue = bound(orders.longest_prefix(), blocks=make_blocks(caching=False))
    first, again, other = make_seq(0, [*shared, 1]), make_seq(1, [*shared, 2]), make_seq(2, 40)
    assert drain(pushed(queue, first, again, other)) == [0, 1, 2], "no step computes what a duplicate could hit"


def test_lpm_does_not_see_tokens_that_are_still_to_come() -> None:
    first, second = make_seq(0, range(20), 30), make_seq(1, range(20), 30)  # equal outputs too, none emitted yet
    assert drain(pushed(bound(orders.longest_prefix()), first, second, make_seq(2, 9))) == [0, 1, 2]


# --- depth first ---


def test_depth_first_serves_the_heavier_subtree_first_and_a_nodes_own_ones_last() -> None:
    a, b, c = [1] * 4, [2] * 4, [3] * 4
    seqs = [
        make_seq(0, [9] * 4),
        make_seq(1, a),
        make_seq(2, [*a, *b]),
        make_seq(3, [*a, *c]),
        make_seq(4, [*a, *c, *b]),
    ]
    assert drain(pushed(bound(orders.depth_first(tree="waiting")), *seqs)) == [4, 3, 2, 1, 0]


def walk(seqs: list[Sequence], depth: int) -> list[int]:
    """The definition, block by block."""
    own = [seq.seq_id for seq in seqs if seq.num_prompt_tokens // 4 == depth]
    children: dict[tuple[int, ...], list[Sequence]] = {}
    for seq in seqs:
        if seq.num_prompt_tokens // 4 > depth:
            children.setdefault(tuple(seq.tokens[depth * 4 : depth * 4 + 4]), []).append(seq)
    ids: list[int] = []
    for child in sorted(children.values(), key=lambda child: (-len(child), child[0].seq_id)):
        ids += walk(child, depth + 1)
    return ids + own


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=20))
def test_depth_first_is_a_walk_of_the_prefix_tree(paths: list[list[int]]) -> None:
    seqs = [make_seq(seq_id, [block for block in path for _ in range(4)]) for seq_id, path in enumerate(paths)]
    assert drain(pushed(bound(orders.depth_first(tree="waiting")), *seqs)) == walk(seqs, 0)


def test_depth_first_through_the_cached_tree_knows_hits_alone() -> None:
    a, b, c, d, e = ([token] * 4 for token in range(5))
    prompts = [*e, *e, *e], [*a, *b, *e], [*d, *e, *e], [*a, *c, *e], [*e, *e, *e]
    seqs = [make_seq(seq_id, prompt) for seq_id, prompt in enumerate(prompts)]
    blocks = caching([*a, *b], [*d], [*a, *c])
    assert drain(pushed(bound(orders.depth_first(tree="cached"), blocks=blocks), *seqs)) == [1, 3, 2, 0, 4]
    assert drain(pushed(bound(orders.depth_first(tree="cached")), *seqs)) == [0, 1, 2, 3, 4]
    assert drain(pushed(bound(orders.depth_first(tree="waiting")), *seqs)) == [0, 4, 1, 3, 2], (
        "through the waiting ones"
    )


def test_depth_first_keeps_salts_apart_and_takes_long_chains_of_prefixes() -> None:
    seqs = [make_seq(0, [1] * 8), make_seq(1, [1] * 8, salt="s"), make_seq(2, [1] * 12, salt="s")]
    assert drain(pushed(bound(orders.depth_first(tree="waiting")), *seqs)) == [2, 1, 0]
    nested = [make_seq(seq_id, [1] * 4 * (seq_id + 1)) for seq_id in range(1500)]
    assert drain(pushed(bound(orders.depth_first(max_waiting=2000, tree="waiting")), *nested)) == list(
        range(1499, -1, -1)
    )


def test_depth_first_follows_a_sequence_that_comes_back_longer() -> None:
    queue = bound(orders.depth_first(tree="waiting"))
    a, b, c = [1] * 4, [0] * 4, [2] * 4
    apart, twin, seq, other = (make_seq(i, path) for i, path in enumerate(([*a, *c], [*a, *b], [*a, *b[:3]], c)))
    pushed(queue, apart, twin, seq, other)
    assert queue.head(1) is apart, "it has one block in common with each of two"
    queue.remove(seq)
    emit(seq, 1)
    assert [*seq.tokens] == [*twin.tokens]
    queue.push_preempted(seq)  # before all others, and yet behind who came before it
    assert drain(queue, 2) == [1, 2, 0, 3]
