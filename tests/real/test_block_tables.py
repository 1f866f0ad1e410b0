"""The device's block tables are those of the plan, whatever it had before; and it is sent no more than it lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from real.block_tables import DeviceTables, HostTables
from real.staging import Staging, send_array
from tests.real.engine_helpers import row, step_logits, tiny_backend

MAX_SEQS, NUM_BLOCKS = 6, 100
BLOCKS = st.integers(0, NUM_BLOCKS - 1)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Tables:
    """Both sides, as the runner uses them."""

    def __init__(self, capacity: int, width: int, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.host = HostTables(capacity, width)
        self.there = DeviceTables(self.host, self.device)
        self.num_sent = 0

    def gathered(self, wanted: dict[int, list[int]]) -> list[list[int]]:
        """The table of each sequence, as the device has it after this step."""
        rows, new = self.host.update([row(i, [0], table) for i, table in wanted.items()])
        self.num_sent += len(new.blocks)
        longest = max(len(table) for table in wanted.values())
        out = torch.full((len(wanted), longest), -7, dtype=torch.int32, device=self.device)
        self.there.gather(out, *(send_array(array, self.device) for array in (rows, *new)))
        assert out.min() >= 0
        return [own[: len(table)] for own, table in zip(out.tolist(), wanted.values(), strict=True)]


class AnyTables(RuleBasedStateMachine):
    """Sequences whose tables grow, shrink, change in the middle or anew, in steps of any company."""

    @initialize(capacity=st.integers(1, MAX_SEQS), width=st.integers(1, 8))
    def begin(self, capacity: int, width: int) -> None:
        self.tables = Tables(capacity, width)
        self.known: dict[int, list[int]] = {}

    @rule(seq=st.integers(0, MAX_SEQS + 3), table=st.lists(BLOCKS, min_size=1, max_size=12))
    def anew(self, seq: int, table: list[int]) -> None:
        self.known[seq] = table

    @rule(data=st.data(), more=st.lists(BLOCKS, max_size=3))
    def grow(self, data: Any, more: list[int]) -> None:
        """The core's own list, as a plan has it."""
        if self.known:
            self.known[data.draw(st.sampled_from(list(self.known)))] += more

    @rule(data=st.data(), block=BLOCKS)
    def change(self, data: Any, block: int) -> None:
        if self.known:
            table = self.known[data.draw(st.sampled_from(list(self.known)))]
            table[data.draw(st.integers(0, len(table) - 1))] = block

    @rule(data=st.data())
    def end(self, data: Any) -> None:
        if self.known:
            del self.known[data.draw(st.sampled_from(list(self.known)))]

    @rule(data=st.data())
    def step(self, data: Any) -> None:
        if self.known:
            chosen = data.draw(st.lists(st.sampled_from(list(self.known)), min_size=1, unique=True))
            wanted = {seq: self.known[seq] for seq in chosen}
            assert self.tables.gathered(wanted) == list(wanted.values())

    @invariant()
    def places_are_one_sequence_s_each(self) -> None:
        host = self.tables.host
        assert sorted([*host._places.values(), *host._free]) == list(range(len(host.blocks)))


TestAnyTables = AnyTables.TestCase
TestAnyTables.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("device", DEVICES)
def test_only_new_blocks_are_sent(device):
    tables = Tables(2, 16, device)
    one, other = [5, 6, 7], [8, 9]
    counts = []
    for wanted, grow in [({0: one, 1: other}, [3]), ({0: one, 1: other}, []), ({1: other}, [4, 2]), ({1: other}, [])]:
        assert tables.gathered(wanted) == list(wanted.values())
        counts.append(tables.num_sent)
        other += grow
    assert counts == [5, 6, 6, 8]


@pytest.mark.parametrize("device", DEVICES)
def test_a_table_that_changed_otherwise_is_sent_anew(device):
    tables = Tables(2, 16, device)
    table = [5, 6, 7]
    assert tables.gathered({0: table}) == [table]
    table[1] = 50  # a copy on write, in the same list
    assert tables.gathered({0: table}) == [table]
    assert tables.num_sent == 6
    assert tables.gathered({0: [1, 2, 3]}) == [[1, 2, 3]]  # swapped in, or another run's sequence 0
    assert tables.gathered({0: [1, 2]}) == [[1, 2]]


def test_blocks_outside_the_window_are_blocks_that_exist():
    tables = Tables(1, 4)
    rows, new = tables.host.update([row(0, [0], [-1, -1, 9])])
    assert new.blocks.tolist() == [0, 0, 9]
    assert rows.tolist() == [0]


def test_where_all_places_are_taken_those_outside_the_batch_are_forgotten():
    tables = Tables(2, 4)
    assert tables.gathered({0: [1], 1: [2]}) == [[1], [2]]
    assert tables.gathered({1: [2], 2: [3]}) == [[2], [3]]
    assert len(tables.host.blocks) == 2
    assert tables.gathered({0: [1], 1: [2], 2: [3]}) == [[1], [2], [3]]  # more than there is room for
    assert len(tables.host.blocks) == 4


def test_what_never_came_to_the_device_is_sent_again() -> None:
    """A step that ended between the two sides, by Ctrl-C or for want of memory."""
    tables = Tables(2, 4)
    assert tables.gathered({0: [1, 2]}) == [[1, 2]]
    tables.host.update([row(0, [0], [1, 2, 3]), row(1, [0], [7])])  # and no gather follows
    tables.host.forget()
    assert tables.gathered({0: [1, 2, 3, 4], 1: [7]}) == [[1, 2, 3, 4], [7]]


def test_a_step_that_failed_before_its_tables_were_sent_can_be_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    tokens, table = list(range(1, 13)), [5, 9, 7]
    failing, other = tiny_backend(), tiny_backend()
    for engine in (failing, other):
        step_logits(engine, row(0, tokens, table[:2], end=8))
    rest = row(0, tokens, table, start=8)
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "send", full)
        with pytest.raises(torch.OutOfMemoryError):
            step_logits(failing, rest)
    assert torch.equal(step_logits(failing, rest), step_logits(other, rest))
