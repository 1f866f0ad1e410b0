"""docs/examples/my_policies.py as docs/extending.md names it, and that docs/policies.md names every policy."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from experiments.configuration.options import options
from experiments.configuration.policies import GROUPS
from testbed.blocks.config import KVRules
from tests.experiments.kit import TINY, decisions_of, say, table_of, write_rows

DOCS = Path(__file__).parents[2] / "docs"
TIGHT = ("cache.num_gpu_blocks=10", "scheduler.max_num_batched_tokens=16")


def documented_commands() -> list[list[str]]:
    """The `testbed run` commands of docs/extending.md, without `testbed`."""
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / "extending.md").read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("testbed run")]


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The directory of the examples is the present one."""
    monkeypatch.chdir(DOCS / "examples")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    yield
    sys.modules.pop("my_policies", None)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Eight requests at once, of two tenants (the last two are `chat`): prompts of 20, 19, … tokens, outputs of 9."""
    return write_rows(
        tmp_path / "rows.jsonl",
        [
            {
                "request_id": f"r{i}",
                "arrival_time": 0,
                "prompt_tokens": 20 - i,
                "output_tokens": 9,
                "tenant": "chat" if i > 5 else "batch",
            }
            for i in range(8)
        ],
    )


class Ran:
    """A run of the eight requests, small enough for the pool of ten blocks of 4 tokens to run out."""

    def __init__(self, capsys: pytest.CaptureFixture[str], rows: Path, *arguments: str) -> None:
        folder = rows.parent / "run"
        said = say(
            capsys, "run", *arguments, *(key for key in (*TINY, *TIGHT) if not _names(key, arguments)), "trace=jsonl",
            f"trace.path={rows}", "record.decisions=true", f"hydra.run.dir={folder}", "overwrite=true",
        )  # fmt: skip
        assert said.status == 0, said.err
        self.decisions = decisions_of(folder)
        table = table_of(folder)
        assert set(table["finish_reason"].to_pylist()) == {"length"}
        starts = table.sort_by("first_scheduled_ns")
        self.starts = starts["request_id"].to_pylist()

    def num_events(self, kind: str) -> int:
        return sum(len(line[kind]) for line in self.decisions)


def _names(key: str, arguments: tuple[str, ...]) -> bool:
    """Whether the arguments set this key otherwise."""
    return any(argument.partition("=")[0] == key.partition("=")[0] for argument in arguments)


@pytest.mark.parametrize("arguments", documented_commands(), ids=lambda words: words[-1].partition("=")[0])
def test_a_documented_command_runs_as_it_stands(
    examples: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]
) -> None:
    said = say(capsys, *arguments, f"hydra.run.dir={tmp_path / 'run'}")
    assert said.status == 0, said.err


def test_an_order_that_is_a_key(examples: None, capsys: pytest.CaptureFixture[str], rows: Path) -> None:
    one = "scheduler.max_num_seqs=1"
    ran = Ran(capsys, rows, one, "scheduler.queue_order={_target_: my_policies.shortest_prompt_first}")
    assert ran.starts == [f"r{i}" for i in reversed(range(8))]


def test_an_order_from_scratch(examples: None, capsys: pytest.CaptureFixture[str], rows: Path) -> None:
    """The tenants take turns while both have requests; then the other's follow in order of arrival."""
    one = "scheduler.max_num_seqs=1"
    ran = Ran(capsys, rows, one, "scheduler.queue_order={_target_: my_policies.TenantsInTurn}")
    assert ran.starts == ["r0", "r6", "r1", "r7", "r2", "r3", "r4", "r5"]


def test_an_admission(examples: None, capsys: pytest.CaptureFixture[str], rows: Path) -> None:
    """No step runs two of the six of one tenant."""
    roomy, cap = "cache.num_gpu_blocks=64", "scheduler.admission={_target_: my_policies.TenantCap, max_requests: 1}"
    ran = Ran(capsys, rows, roomy, cap)
    tenants = [["chat" if name in ("r6", "r7") else "batch" for name in line["scheduled"]] for line in ran.decisions]
    assert all(len(set(names)) == len(names) for names in tenants)
    free = Ran(capsys, rows, roomy)
    assert len(free.decisions) < len(ran.decisions)


def test_a_victim_and_a_mode(examples: None, capsys: pytest.CaptureFixture[str], rows: Path) -> None:
    victim = "scheduler.victim={_target_: my_policies.CheapestToRecompute}"
    by_recompute = Ran(capsys, rows, victim, "scheduler.preemption=recompute")
    assert by_recompute.num_events("preempted") > 0
    for min_blocks, swaps in ((1, True), (1000, False)):
        mode = f"scheduler.preemption={{_target_: my_policies.SwapWhatIsLarge, min_blocks: {min_blocks}}}"
        ran = Ran(capsys, rows, victim, mode, "cache.num_cpu_blocks=40")
        assert (ran.num_events("swapped_out") > 0) is swaps
        assert (ran.num_events("preempted") > 0) is not swaps


def test_an_eviction(examples: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """4 blocks of 4 tokens. `a` (8 tokens) leaves its blocks 0 and 1, `b` (3 tokens) none. `c` needs 3 of the 4 blocks:
    two are free, one is evicted. `d`, as `a`, finds the first block if the deeper one went."""
    prompts = {"a": range(8), "b": range(20, 23), "c": range(30, 40), "d": range(8)}
    rows = write_rows(
        tmp_path / "rows.jsonl",
        [
            {"request_id": name, "arrival_time": i, "prompt_token_ids": [*tokens], "output_tokens": 1}
            for i, (name, tokens) in enumerate(prompts.items())
        ],
    )
    ran = Ran(capsys, rows, "cache.num_gpu_blocks=4", "cache.eviction={_target_: my_policies.DeepestFirst}")
    assert {name: hit for line in ran.decisions for name, hit in line["cached_tokens"].items()}["d"] == 4


def test_an_oracle(examples: None, capsys: pytest.CaptureFixture[str], rows: Path) -> None:
    """Shortest output first by the oracle: `chat` before `batch` if it is said to be short, after it if long."""
    for chat, first in ((1, ["r6", "r7"]), (50, ["r0", "r1"])):
        oracle = f"scheduler.oracle={{_target_: my_policies.ByTenant, lengths: {{chat: {chat}, batch: 10}}}}"
        order = "scheduler.queue_order={_target_: testbed.policies.orders.shortest_job, by: output}"
        assert Ran(capsys, rows, oracle, order, "scheduler.max_num_seqs=1").starts[:2] == first
    for said in ("0", "-5", "1.5"):
        oracle = f"scheduler.oracle={{_target_: my_policies.ByTenant, lengths: {{chat: {said}, batch: 10}}}}"
        path = ("trace=jsonl", f"trace.path={rows}", f"hydra.run.dir={rows.parent / 'bad'}", "overwrite=true")
        error = say(capsys, "run", *TINY, *path, oracle, order).error()
        assert f"scheduler.oracle: ByTenant predicts {said} for request " in error
        assert "a whole number of tokens, at least 1, or None" in error


def test_a_whole_composition(examples: None, capsys: pytest.CaptureFixture[str], rows: Path) -> None:
    """A request that is in a step for the first time, or again until its prompt is computed, is a prefill."""
    for max_prefills in (1, 3):
        ran = Ran(
            capsys, rows, "cache.num_gpu_blocks=64", "scheduler.max_num_batched_tokens=64",
            f"scheduler.composition={{_target_: my_policies.FewPrefills, max_prefills: {max_prefills}}}",
        )  # fmt: skip
        assert max(sum(num > 1 for num in line["scheduled"].values()) for line in ran.decisions) == max_prefills
    swapping = ("scheduler.preemption=swap", "cache.num_cpu_blocks=40")
    ran = Ran(capsys, rows, "scheduler.composition={_target_: my_policies.FewPrefills}", *swapping)
    assert ran.num_events("swapped_in") == ran.num_events("swapped_out") > 0


def test_the_list_of_policies_is_complete() -> None:
    """docs/policies.md names every policy, preset and KV rule, with every value that a rule may have."""
    text = (DOCS / "policies.md").read_text()
    named = {name for group in GROUPS.values() for name in group} | set(options("scheduler"))
    for rule in fields(KVRules):
        named |= {rule.name, *get_args(get_type_hints(KVRules)[rule.name])}
    assert [name for name in sorted(named) if f"`{name}`" not in text] == []
    assert [key for key in GROUPS if f"`{key}`" not in text] == []
