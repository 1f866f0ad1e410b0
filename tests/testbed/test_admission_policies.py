"""Admission policies: worked-out numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.blocks.config import KVRules
from testbed.core.request import SamplingParams
from testbed.errors import ConfigError
from testbed.policies.admission import (
    All,
    FuturePeak,
    MaxRunningRequests,
    MaxRunningTokens,
    MaxUtilization,
    NoEvict,
    Watermark,
    final_num_tokens,
)
from testbed.policies.context import PolicyContext, bind
from testbed.policies.oracle import NoOracle
from tests.testbed.admission_kit import LIMITS, Says, bound, compute, forked, make_pool, make_seq
from tests.testbed.core_kit import make_blocks, make_limits, make_request, make_scheduler
from tests.testbed.stepping import add, steps

# --- what they share ---

EVERY = {
    "watermark": Watermark,
    "no_evict": NoEvict,
    "max_utilization": MaxUtilization,
    "future_peak": FuturePeak,
    "max_running_tokens": lambda: MaxRunningTokens(1),
    "max_running_requests": lambda: MaxRunningRequests(1),
    "all": lambda: All([NoEvict(), FuturePeak()]),
}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("num_seqs", [1, 3])
def test_whatever_the_pool_has_room_for_may_run_alone(name: str, num_seqs: int) -> None:
    """It declares more than the pool holds, yet may end sooner; refused, it would be ended as ignored."""
    policy = bound(EVERY[name](), make_pool(10))
    assert policy.allows(make_seq(0, 36, max_tokens=400, num_seqs=num_seqs), [])


@pytest.mark.parametrize("answer", [None, 1, "no"])
def test_a_rule_of_a_list_that_answers_neither_true_nor_false_is_an_error(answer: Any) -> None:
    """Compiled or not: None held back all requests without a word, and 1 admitted them, where it was not compiled."""
    rule: Any = SimpleNamespace(allows=lambda seq, running: answer)
    with pytest.raises(TypeError, match="not True or False"):
        All([rule]).allows(make_seq(0), [])


# --- how long a sequence is taken to be ---


@pytest.mark.parametrize(
    ("max_tokens", "predicted", "emitted", "expected"),
    [
        (8, None, 0, 18),  # as declared
        (8, 5, 0, 15),  # the oracle's word counts
        (8, 9, 0, 19),  # also above what is declared: a forced output may be longer
        (None, None, 0, 512),  # nothing is known: the model's length
        (9999, None, 0, 512),
        (None, 9999, 0, 512),
        (8, 5, 7, 18),  # it has outlived the prediction: at least one more token
    ],
)
def test_the_expected_length(max_tokens: int | None, predicted: int | None, emitted: int, expected: int) -> None:
    seq = make_seq(0, 10, max_tokens, num_output_tokens=emitted)
    assert final_num_tokens(seq, LIMITS, Says({} if predicted is None else {0: predicted})) == expected


def test_one_token_is_always_emitted_even_at_the_models_length() -> None:
    seq = make_seq(0, 512)
    assert final_num_tokens(seq, LIMITS, None) == 513


# --- no_evict ---


@pytest.mark.parametrize(("max_tokens", "is_allowed"), [(20, True), (21, False)])
def test_no_evict_reserves_what_running_sequences_still_lack(max_tokens: int, is_allowed: bool) -> None:
    """10 blocks of 4. The running one ends with 15 slots, 4 blocks, of which it has 2: of 8 free, 6 are left."""
    policy = bound(NoEvict(), make_pool(10, num_free=8))
    running = make_seq(0, 8, max_tokens=8, num_blocks=2)
    assert policy.allows(make_seq(1, 5, max_tokens=max_tokens), [running]) is is_allowed  # 24 slots, or 25


@pytest.mark.parametrize(("num_unreferenced", "is_allowed"), [(0, True), (1, False)])
def test_no_evict_needs_no_block_twice_that_a_running_sequence_holds(num_unreferenced: int, is_allowed: bool) -> None:
    """A cached block that nobody references is one of the free ones: taking it costs a block as well."""
    blocks = make_pool(10)
    first = compute(blocks, make_seq(0, 8, max_tokens=8))
    running = first
    if num_unreferenced:
        running = compute(blocks, make_seq(2, 8, max_tokens=8))
        blocks.free(first)
    candidate = make_seq(1, max_tokens=21, prompt=[*first.tokens[:4], 7])
    hit = blocks.lookup(candidate)
    assert (blocks.num_free_blocks, hit.num_tokens, hit.num_unreferenced) == (8, 4, num_unreferenced)
    assert bound(NoEvict(), blocks).allows(candidate, [running]) is is_allowed


def test_no_evict_by_the_oracle_reserves_less() -> None:
    blocks, running = make_pool(10, num_free=8), make_seq(0, 8, max_tokens=8, num_blocks=2)
    candidate = make_seq(1, 5, max_tokens=400)
    assert not bound(NoEvict(), blocks, Says({1: 20})).allows(candidate, [running])
    assert bound(NoEvict(reserve="oracle"), blocks, Says({1: 20})).allows(candidate, [running])


@pytest.mark.parametrize(
    ("max_tokens", "predicted", "is_allowed"), [(400, 20, False), (20, 400, True), (None, 20, True), (None, 400, False)]
)
def test_no_evict_may_go_by_the_oracle_where_nothing_is_declared(max_tokens, predicted, is_allowed) -> None:
    blocks, running = make_pool(10, num_free=8), make_seq(0, 8, max_tokens=8, num_blocks=2)
    policy = bound(NoEvict(reserve="declared_else_oracle"), blocks, Says({1: predicted}))
    assert policy.allows(make_seq(1, 5, max_tokens=max_tokens), [running]) is is_allowed


@pytest.mark.parametrize(("num_free", "is_allowed"), [(7, True), (6, False)])
def test_no_evict_reserves_for_every_member_of_a_group(num_free: int, is_allowed: bool) -> None:
    """6 + 4 tokens make 9 slots: 3 blocks, of which the prompt's one full block is shared. 1 + 3 x 2 = 7."""
    blocks = make_pool(20, num_free=num_free)
    done = make_seq(0, 8, max_tokens=1, num_blocks=2)  # needs nothing more
    assert bound(NoEvict(), blocks).allows(make_seq(1, 6, max_tokens=4, num_seqs=3), [done]) is is_allowed


@pytest.mark.parametrize(("num_free", "is_allowed"), [(5, True), (4, False)])
def test_no_evict_counts_the_copies_that_a_parted_group_has_yet_to_make(num_free: int, is_allowed: bool) -> None:
    """Three members share 2 blocks, the second partly filled: 7 in the end, so 5 are lacking, 2 of them for copies."""
    members = forked(*(make_seq(seq_id, 6, num_output_tokens=1, num_seqs=3) for seq_id in (0, 1, 2)))
    for member in members:
        member.block_table = [4, 5]
    blocks = make_pool(20, num_free=num_free + 1)
    assert bound(NoEvict(), blocks).allows(make_seq(3, 1, max_tokens=4), [members[0]]) is is_allowed  # needs 1


def test_no_evict_counts_lookahead_slots() -> None:
    running = make_seq(0, 8, max_tokens=1, num_blocks=3)
    for lookahead, is_allowed in ((0, True), (1, False)):  # 24 slots, or 25
        policy = bound(NoEvict(), make_pool(10, num_free=6, lookahead=lookahead))
        assert policy.allows(make_seq(1, 5, max_tokens=20), [running]) is is_allowed


def test_no_evict_refuses_what_it_cannot_reserve_by() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.admission\.reserve is 'guess'; choose one of declared, oracle"):
        NoEvict(reserve="guess")
    with pytest.raises(ConfigError, match=r"reserve is 'oracle', but scheduler\.oracle is none; choose"):
        bound(NoEvict(reserve="oracle"), make_pool(10))


# --- max_utilization ---


@pytest.mark.parametrize(("num_free", "is_allowed"), [(3, True), (2, False)])
def test_max_utilization_keeps_a_token_for_each_running_sequence(num_free: int, is_allowed: bool) -> None:
    """The first has its 9th token to compute and 8 slots, the second has room: one block beside the prompt's two."""
    running = [
        make_seq(0, 8, 400, num_output_tokens=1, num_blocks=2),
        make_seq(1, 8, 400, num_output_tokens=1, num_blocks=3),
    ]
    policy = bound(MaxUtilization(), make_pool(20, num_free=num_free))
    assert policy.allows(make_seq(2, 8, 400), running) is is_allowed


def test_max_utilization_lets_an_unfinished_prompt_have_its_blocks() -> None:
    running = [make_seq(0, 16, num_blocks=2)]  # two blocks of its prompt are still to come
    policy = bound(MaxUtilization(), make_pool(20, num_free=3))
    assert policy.allows(make_seq(1, 4), running)
    assert not policy.allows(make_seq(1, 5), running)


# --- future_peak ---


@pytest.mark.parametrize(("block_size", "peak"), [(1, 26), (4, 7)])
def test_future_peak_is_the_largest_sum_over_those_still_running(block_size: int, peak: int) -> None:
    """Tokens now and to come: 4 + 8, 10 + 5, 6 + 3. As the last token's KV is not computed, the use is

    in the 8th step 4 + 7 = 11; in the 5th (4 + 4) + (10 + 4) = 22; in the 3rd 6 + 12 + 8 = 26,
    in blocks of 4: 3; 2 + 4 = 6; 2 + 3 + 2 = 7.
    """
    seqs = [make_seq(0, 10, 5), make_seq(1, 4, 8), make_seq(2, 6, 3)]
    policy = bound(FuturePeak(), make_pool(peak, block_size=block_size))
    assert policy.peak_blocks(seqs) == peak
    assert policy.allows(seqs[2], seqs[:2])
    assert not bound(FuturePeak(), make_pool(peak - 1, block_size=block_size)).allows(seqs[2], seqs[:2])


def test_future_peak_leaves_the_reserved_share_free() -> None:
    seqs = [make_seq(0, 10, 5), make_seq(1, 4, 8), make_seq(2, 6, 3)]  # a peak of 26 tokens
    for num_blocks, is_allowed in ((28, True), (27, False)):  # a tenth, rounded down, is 2
        policy = bound(FuturePeak(reserved=0.1), make_pool(num_blocks, block_size=1))
        assert policy.allows(seqs[2], seqs[:2]) is is_allowed


def test_future_peak_believes_the_oracle() -> None:
    seqs = [make_seq(0, 10, 400), make_seq(1, 4, 400), make_seq(2, 6, 400)]
    assert bound(FuturePeak(), make_pool(26, block_size=1), Says({0: 5, 1: 8, 2: 3})).peak_blocks(seqs) == 26


def test_future_peak_counts_a_groups_prompt_once() -> None:
    """The group of the no_evict test: 7 blocks in the end, and so alone at its peak."""
    policy = bound(FuturePeak(), make_pool(20))
    assert policy.peak_blocks([make_seq(0, 6, max_tokens=4, num_seqs=3)]) == 7


@pytest.mark.parametrize("reserved", [-0.1, 1.0])
def test_future_peak_refuses_a_share_that_is_none(reserved: float) -> None:
    with pytest.raises(ConfigError, match=rf"scheduler\.admission\.reserved is {reserved}; it must be in \[0, 1\)"):
        FuturePeak(reserved)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8),
    block_size=st.integers(1, 20),
    lookahead=st.integers(0, 3),
)
def test_future_peak_equals_that_of_running_step_by_step(
    sizes: list[tuple[int, int]], block_size: int, lookahead: int
) -> None:
    seqs = [make_seq(index, prompt, output) for index, (prompt, output) in enumerate(sizes)]
    policy = bound(FuturePeak(), make_pool(0, block_size=block_size, lookahead=lookahead))
    use = [
        sum(-(-(prompt + done + lookahead) // block_size) for prompt, output in sizes if output > done)
        for done in range(40)
    ]
    assert policy.peak_blocks(seqs) == max(use)


# --- caps ---


def test_a_cap_on_running_tokens_counts_a_groups_prompt_once() -> None:
    members = forked(*(make_seq(seq_id, 10, num_output_tokens=2, num_seqs=2) for seq_id in (0, 1)))
    assert MaxRunningTokens(21).allows(make_seq(2, 7), [members[0]])  # 10 + 2 + 2 + 7
    assert not MaxRunningTokens(20).allows(make_seq(2, 7), [members[0]])


def test_a_cap_on_running_requests_counts_requests_not_sequences() -> None:
    running = [make_seq(0, 4, request_id="a"), make_seq(1, 4, request_id="a"), make_seq(2, 4, request_id="b")]
    assert MaxRunningRequests(3).allows(make_seq(3, 4, request_id="c"), running)
    assert not MaxRunningRequests(2).allows(make_seq(3, 4, request_id="c"), running)
    assert MaxRunningRequests(2).allows(make_seq(3, 4, request_id="a"), running)


@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_a_cap_below_one_is_refused(value: Any) -> None:
    for rule, key in ((MaxRunningTokens, "max_tokens"), (MaxRunningRequests, "max_requests")):
        with pytest.raises(ConfigError, match=rf"scheduler\.admission\.{key} is {value}; it must be .*at least 1"):
            rule(value)


def test_all_asks_every_rule() -> None:
    running = [make_seq(0, 8, max_tokens=8, num_blocks=2)]
    policy = bound(All([MaxRunningRequests(2), NoEvict()]), make_pool(10, num_free=8))
    assert policy.allows(make_seq(1, 5, max_tokens=20), running)
    assert not policy.allows(make_seq(1, 5, max_tokens=21), running)
    assert not policy.allows(make_seq(1, 5), [*running, make_seq(2, 1, max_tokens=1, num_blocks=1)])
    with pytest.raises(ConfigError, match=r"of is \[\]; list admission rules"):
        All([])


@given(
    sizes=st.lists(st.tuples(st.integers(1, 80), st.integers(1, 30)), min_size=2, max_size=6),
    window=st.none() | st.integers(2, 12),
    budget=st.integers(6, 90),
    num_blocks=st.integers(28, 40),
)
def test_no_evict_keeps_its_promise_behind_a_window_whatever_the_chunks(
    sizes: list[tuple[int, int]], window: int | None, budget: int, num_blocks: int
) -> None:
    """A chunk is held in addition to the window while it is computed. The pool holds the largest request."""
    limits, by_chunk = make_limits(budget=budget, model_len=128), KVRules(allocate="chunk")
    blocks = make_blocks(num_blocks=num_blocks, caching=False, rules=by_chunk, sliding_window=window)
    admission = NoEvict()
    bind(admission, PolicyContext(blocks, limits, NoOracle(), None, 0))
    scheduler = make_scheduler(blocks=blocks, limits=limits, admission=admission)
    for index, (prompt, output) in enumerate(sizes):
        add(scheduler, make_request(f"r{index}", prompt, output, sampling=SamplingParams(max_tokens=output)))
    for plan, _ in steps(scheduler):
        assert not plan.is_empty
        assert not plan.preempted
