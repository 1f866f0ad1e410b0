"""What holds for every queue order, whatever its rule."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import testbed.policies.orders as orders
from experiments.configuration.policies import POLICIES
from testbed.errors import ConfigError
from testbed.lazy_heap import MIN_STALE, LazyHeap
from tests.testbed.orders_kit import KEYED, World, bound, drain, play

ALL: dict[str, Callable[[], Any]] = {
    **POLICIES["scheduler.queue_order"],
    **{name: make for name, (make, _) in KEYED.items()},
}


@pytest.mark.parametrize("name", [name for name in ALL if name not in KEYED])
@given(data=st.data())
def test_every_order_keeps_every_sequence_through_any_calls(name: str, data: st.DataObject) -> None:
    queue = bound(ALL[name]())

    def check(world: World) -> None:
        head = queue.head(world.now_ns)
        assert head is queue.head(world.now_ns), "asking changes nothing"
        assert (head is None) == (not world.waiting)
        assert head is None or head.seq_id in world.waiting

    world = play(queue, data, check)
    assert sorted(drain(queue, world.now_ns)) == sorted(world.waiting)


SCRIPT = """
from tests.testbed.orders_kit import bound, drain, make_seq, pushed
from tests.testbed.test_queue_orders import ALL
for name, make in ALL.items():
    seqs = [
        make_seq(i, [j % 3 for j in range(40 + i % 7)] if i % 2 else 40 + i * 7 % 11, 1 + i * 5 % 13,
                 tenant=f"t{i % 5}", priority=i % 4, deadline_ns=i * 37 % 50 or None, arrival_ns=i)
        for i in range(60)
    ]
    print(name, drain(pushed(bound(make()), *seqs), 10**12))
"""


def test_every_order_is_the_same_whatever_the_hash_seed() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == len(ALL)


def test_the_heap_forgets_what_was_removed() -> None:
    heap: LazyHeap[int, str] = LazyHeap()
    for name in range(10):
        heap.put(name, (1000 + name,), "stays")
    for name in range(10, 5000):
        heap.put(name, (name % 7,), "goes")
        heap.remove(name)
        heap.put(0, (name,), "moves")
        assert len(heap._heap) <= 2 * len(heap) + MIN_STALE
    assert len(heap) == 10
    assert heap.first_rank() == (1001,)
    assert list(heap) == ["stays"] * 9 + ["moves"]
    assert 3 in heap
    assert 4999 not in heap
    with pytest.raises(KeyError):
        heap.remove(4999)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: orders.priority(ageing_per_s=-1), r"ageing_per_s is -1; it must be a finite number of at least 0"),
        (lambda: orders.priority(ageing_per_s=float("inf")), "ageing_per_s is inf"),
        (lambda: orders.shortest_job("size"), "by is 'size'; choose one of prompt, output, total, remaining"),
        (lambda: orders.longest_job("size"), "by is 'size'"),
        (lambda: orders.random_order(seed=-1), "seed is -1; it must be from 0 to "),
        (lambda: orders.HighestResponseRatioNext(classes_per_doubling=0), "classes_per_doubling is 0"),
        (lambda: orders.longest_prefix(max_waiting=-1), "max_waiting is -1"),
        (lambda: orders.longest_prefix(duplicate_tokens=1.5), "duplicate_tokens is 1.5"),
        (lambda: orders.depth_first(tree="radix"), "tree is 'radix'; choose one of waiting, cached"),
        (lambda: orders.VirtualTokenCounter(output_weight=-2), "output_weight is -2"),
        (lambda: orders.MultiLevelFeedbackQueue(num_levels=0), "num_levels is 0"),
        (lambda: orders.MultiLevelFeedbackQueue(ratio=1), "ratio is 1"),
        (lambda: orders.MultiLevelFeedbackQueue(promote_after_s=-1), "promote_after_s is -1"),
    ],
)
def test_bad_parameters_are_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^scheduler\.queue_order\.{message}") as caught:
        make()
    assert "\n" not in str(caught.value)


def test_the_bounds_of_parameters_are_values() -> None:
    orders.HighestResponseRatioNext(classes_per_doubling=1)
    orders.HighestResponseRatioNext(classes_per_doubling=1024)
    orders.longest_prefix(max_waiting=0, max_cached_tokens=0, duplicate_tokens=0)
    orders.VirtualTokenCounter(input_weight=0, output_weight=0)
