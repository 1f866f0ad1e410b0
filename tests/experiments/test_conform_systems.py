"""What the systems mean by the fields of their logs, read off our plans made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from experiments.conform.systems import SYSTEMS, DecisionReader
from testbed.core.plan import Admission, BatchPlan, BatchShape, Ignored, Preemption, PreemptionMode, ScheduledSequence
from testbed.core.request import GREEDY
from testbed.made_rows import MadeRows


class Plans:
    """Makes plans of rows (request, start, tokens, is the last known token computed) and reads them as a system's."""

    def __init__(self, system: str, *, prefix_caching: bool = True) -> None:
        blocks = SimpleNamespace(block_size=4, num_free_blocks=5, num_free_cpu_blocks=6)
        scheduler: Any = SimpleNamespace(blocks=blocks, num_waiting=1, num_swapped=2)
        self._reader = DecisionReader(SYSTEMS[system], scheduler, prefix_caching=prefix_caching)

    def read(self, *rows: tuple[str, int, int, bool], **fields: Any) -> dict[str, Any]:
        scheduled = tuple(
            ScheduledSequence(int(request_id), start, num_tokens, (), samples, True, (), GREEDY)
            for request_id, start, num_tokens, samples in rows
        )
        made = BatchPlan(0, BatchShape(0, 0, (), 0), MadeRows(scheduled), **fields)
        num_scheduled = [(request_id, num_tokens) for request_id, _, num_tokens, _ in rows]
        plan: Any = SimpleNamespace(**made.as_dict(), scheduled=scheduled, num_scheduled=num_scheduled)
        return self._reader.after_plan(3, plan)


def admitted(request_id: str, num_cached_tokens: int = 0, *, is_resumed: bool = False) -> Admission:
    return Admission(int(request_id), request_id, num_cached_tokens, is_resumed)


def victim(request_id: str, mode: PreemptionMode) -> Preemption:
    return Preemption(int(request_id), request_id, mode, 1)


def test_v1_names_hits_of_first_admissions_only() -> None:
    decided = Plans("vllm_v1_0.8.5").read(
        ("0", 9, 1, True),
        ("1", 8, 4, True),
        ("2", 4, 4, True),
        admitted=(admitted("1", 8), admitted("2", 4, is_resumed=True)),
    )
    assert list(decided["scheduled"].items()) == [("0", 1), ("1", 4), ("2", 4)]
    assert decided["cached_tokens"] == {"1": 8}


def test_v0_counts_the_hit_of_an_admission_as_scheduled_and_repeats_it() -> None:
    plans = Plans("vllm_v0_0.8.5")
    first = plans.read(("1", 8, 4, False), admitted=(admitted("1", 8),))
    assert first["scheduled"] == {"1": 12}
    assert first["cached_tokens"] == {"1": 8}
    second = plans.read(("1", 12, 3, True))
    assert second["scheduled"] == {"1": 3}
    assert second["cached_tokens"] == {"1": 8}
    third = plans.read(("1", 15, 1, True))
    assert third["scheduled"] == {"1": 1}
    assert third["cached_tokens"] == {}


def test_v0_counts_a_prompt_that_is_cached_whole_as_a_whole() -> None:
    """8 tokens are 2 blocks; both are hit, and the eighth token is computed again."""
    decided = Plans("vllm_v0_0.8.5").read(("1", 7, 1, True), admitted=(admitted("1", 7),))
    assert decided["scheduled"] == {"1": 8}
    assert decided["cached_tokens"] == {"1": 8}


def test_v0_names_no_hits_without_a_cache_and_forgets_those_of_a_victim() -> None:
    without = Plans("vllm_v0_0.8.5", prefix_caching=False).read(("1", 0, 4, True), admitted=(admitted("1"),))
    assert without["cached_tokens"] == {}
    plans = Plans("vllm_v0_0.8.5")
    plans.read(("1", 8, 4, False), admitted=(admitted("1", 8),))
    plans.read(("2", 3, 1, True), preempted=(victim("1", PreemptionMode.RECOMPUTE),))
    again = plans.read(("1", 4, 9, True), admitted=(admitted("1", 4, is_resumed=True),))
    assert again["scheduled"] == {"1": 13}
    assert again["cached_tokens"] == {"1": 4}


def test_v0_chunked_lists_the_kinds_of_rows_apart() -> None:
    """The one-token rest of a prefill is a prefill, not a decode."""
    plans = Plans("vllm_v0_chunked_0.8.5")
    plans.read(("3", 0, 4, False), ("4", 0, 4, False), admitted=(admitted("3"), admitted("4")))
    plans.read(("1", 5, 1, True), preempted=(victim("4", PreemptionMode.SWAP),))
    decided = plans.read(
        ("1", 6, 1, True),
        ("3", 4, 1, True),
        ("2", 8, 1, True),
        ("4", 4, 2, True),
        ("5", 0, 6, False),
        admitted=(admitted("5"),),
        swap_in=((0, 1), (1, 2)),
        swapped_in=("2", "4"),
    )
    assert list(decided["scheduled"].items()) == [("5", 6), ("3", 1), ("4", 2), ("1", 1), ("2", 1)]
    assert decided["cached_tokens"] == {"5": 0, "3": 0, "4": 0}
    assert decided["num_blocks_swapped_in"] == 2


def test_a_group_that_decodes_counts_its_members_and_shared_blocks_once_in_0_2_7() -> None:
    pairs = ((1, 11), (2, 12), (1, 11))
    for system, num_blocks in (("vllm_v0_classic_0.2.7", 2), ("vllm_v0_0.8.5", 3)):
        plans = Plans(system)
        assert plans.read(("1", 0, 9, True), admitted=(admitted("1"),))["scheduled"] == {"1": 9}
        decided = plans.read(("1", 9, 1, True), ("1", 9, 1, True), ("1", 9, 1, True), swap_out=pairs)
        assert decided["scheduled"] == {"1": 3}
        assert decided["num_blocks_swapped_out"] == num_blocks


def test_nano_vllm_names_where_each_sequence_of_a_prefill_batch_starts() -> None:
    plans = Plans("nano_vllm")
    first = plans.read(("1", 4, 8, False), admitted=(admitted("1", 4),))
    assert (first["is_prefill"], first["cached_tokens"]) == (True, {"1": 4})
    second = plans.read(("1", 12, 1, True), ("2", 0, 3, True), admitted=(admitted("2"),))
    assert (second["is_prefill"], second["cached_tokens"]) == (True, {"1": 12, "2": 0})
    third = plans.read(("1", 13, 1, True), ("2", 3, 1, True))
    assert (third["is_prefill"], third["cached_tokens"]) == (False, {})


def test_sets_of_requests_are_sorted_by_number_and_counters_are_read() -> None:
    decided = Plans("vllm_v0_0.8.5").read(
        preempted=(
            victim("10", PreemptionMode.RECOMPUTE),
            victim("9", PreemptionMode.RECOMPUTE),
            victim("8", PreemptionMode.SWAP),
        ),
        ignored=(Ignored(12, "12", "too long"), Ignored(3, "3", "too long")),
        copies=((1, 2), (1, 3)),
    )
    assert decided["step"] == 3
    assert decided["preempted"] == ["9", "10"]
    assert decided["swapped_out"] == ["8"]
    assert decided["ignored"] == ["3", "12"]
    assert decided["num_blocks_copied"] == 2
    assert [decided[key] for key in ("free_blocks", "free_cpu_blocks", "num_waiting", "num_swapped")] == [5, 6, 1, 2]
