"""A user's own class, in the user's own file, plugs in by `_target_`; nothing in the repository knows of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.experiments.kit import SHORT, TINY, decisions_of, manifest_of, say, table_of, write_rows

MINE = '''
from collections import OrderedDict
from testbed.blocks.eviction import LRU
from testbed.plan import Spans
from testbed.policies.compositions.unified import Unified
from testbed.policies.queue_order import FCFS
from testbed.traces.readers.own import row_from_fields
from testbed.traces.schema import Trace

SEEN = []

class OneAtATime:
    """Computes one token a step."""
    def __init__(self, budget=1):
        self.budget = budget
    def compose(self, step):
        step.token_budget = self.budget
        Unified().compose(step)

class LastComeFirst(FCFS):
    def head(self, now_ns):
        waiting = list(self)
        return max(waiting, key=lambda seq: seq.seq_id) if waiting else None

class Eldest:
    def choose(self, running):
        SEEN.append("victim")
        return next(iter(running.values()))

class Watched(LRU):
    def __init__(self):
        super().__init__()
        SEEN.append("eviction")

class Slow:
    """A microsecond a token, and a step of base_us."""
    def __init__(self, base_us):
        if base_us < 0:
            raise ValueError("base_us is negative")
        self.base_us = base_us
    def price(self, shape):
        return Spans(forward_ns=1000 * (self.base_us + shape.num_tokens))

def my_trace(num):
    rows = [{"request_id": f"mine-{i}", "arrival_time": i * 0.001, "prompt_tokens": 5, "output_tokens": 2}
            for i in range(num)]
    return Trace("mine", tuple(row_from_fields(row, f"row {i}") for i, row in enumerate(rows)))
'''


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of the user's with `mine.py` in it, the present one."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    yield tmp_path
    sys.modules.pop("mine", None)


BURST = (*TINY, *SHORT, "trace.arrival=all_at_once", "record.decisions=true", "hydra.run.dir=run")


def test_a_composition(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = say(capsys, "run", *BURST, "scheduler.composition={_target_: mine.OneAtATime}")
    assert said.status == 0, said.err
    assert {sum(line["scheduled"].values()) for line in decisions_of(home / "run")} == {1}


def test_its_parameters(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = say(capsys, "run", *BURST, "scheduler.composition={_target_: mine.OneAtATime, budget: 3}")
    assert said.status == 0, said.err
    assert max(sum(line["scheduled"].values()) for line in decisions_of(home / "run")) == 3


def test_a_queue_order(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("scheduler.queue_order={_target_: mine.LastComeFirst}", "scheduler.max_num_seqs=1")
    assert say(capsys, "run", *BURST, *more).status == 0
    first = [name for line in decisions_of(home / "run") for name in line["cached_tokens"]]
    assert first == table_of(home / "run")["request_id"].to_pylist()
    starts = table_of(home / "run").sort_by("first_scheduled_ns")["request_id"].to_pylist()
    assert starts == sorted(starts, key=lambda name: int("".join(filter(str.isdigit, name))), reverse=True)


def test_a_victim_and_an_eviction(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("scheduler.victim={_target_: mine.Eldest}", "cache.eviction={_target_: mine.Watched}")
    tight = ("cache.num_gpu_blocks=9", "trace.output={kind: uniform, min_tokens: 8, max_tokens: 12}")
    said = say(capsys, "run", *BURST, *more, *tight, "trace.num_requests=12")
    assert said.status == 0, said.err
    assert {"victim", "eviction"} <= set(sys.modules["mine"].SEEN)


def test_a_cost_model_and_a_trace_of_a_folder_of_ones_own(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for group, text in (("cost", "_target_: mine.Slow\nbase_us: 7\n"), ("trace", "_target_: mine.my_trace\nnum: 4\n")):
        (home / "conf" / group).mkdir(parents=True)
        (home / "conf" / group / "ours.yaml").write_text(text)
    arguments = ("--config-dir", "conf", *TINY, "cost=ours", "trace=ours", "hydra.run.dir=run")
    said = say(capsys, "run", *arguments)
    assert said.status == 0, said.err
    steps = table_of(home / "run", "steps").to_pylist()
    for step in steps:
        num_tokens = step["num_decode_tokens"] + step["num_prefill_tokens"]
        assert step["end_ns"] - step["start_ns"] == 1000 * (7 + num_tokens)
    assert table_of(home / "run")["request_id"].to_pylist() == [f"mine-{i}" for i in range(4)]
    assert manifest_of(home / "run")["trace"]["name"] == "mine"
    assert say(capsys, "run", "from=run", "hydra.run.dir=again").status == 0
    assert manifest_of(home / "again")["digest"] == manifest_of(home / "run")["digest"]
    error = say(capsys, "run", *arguments, "cost.base_us=-1", "overwrite=true").error()
    assert "mine.Slow" in error
    assert "base_us is negative" in error


@pytest.mark.parametrize(
    ("target", "named"),
    [("mine.Nothing", "Nothing"), ("nowhere.Thing", "nowhere"), ("mine", "mine"), ("mine.Slow", "base_us")],
)
def test_what_cannot_be_made_is_one_line(
    home: Path, capsys: pytest.CaptureFixture[str], target: str, named: str
) -> None:
    error = say(capsys, "run", *BURST, f"scheduler.victim={{_target_: {target}}}").error()
    assert "scheduler.victim" in error
    assert named in error
    assert not (home / "run" / "manifest.json").exists()


def test_the_documented_examples_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/extending.md, as it stands."""
    examples = Path(__file__).parents[2] / "docs" / "examples"
    monkeypatch.chdir(examples)
    trace = write_rows(
        tmp_path / "t.jsonl", [{"arrival_time": 0, "prompt_tokens": n, "output_tokens": 3} for n in (9, 4)]
    )
    said = say(
        capsys, "run", *TINY, "trace=jsonl", f"trace.path={trace}", f"hydra.run.dir={tmp_path / 'run'}",
        "scheduler.queue_order={_target_: my_policies.ShortestPromptFirst}",
        "scheduler.victim={_target_: my_policies.LeastProgress}", "scheduler.max_num_seqs=1",
    )  # fmt: skip
    sys.modules.pop("my_policies", None)
    assert said.status == 0, said.err
    assert table_of(tmp_path / "run")["request_id"].to_pylist() == ["1", "0"]
