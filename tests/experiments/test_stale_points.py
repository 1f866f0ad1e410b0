"""A point is what it was made from: one that was made from something else is set aside and run again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from analysis.load import load_sweep
from experiments.runs import environment, identity
from experiments.runs.identity import identity_of
from tests.experiments.kit import SHORT, TINY, Said, Say, config_of, manifest_of, option, write_rows
from tests.experiments.test_sweeps import sweep

InFolder = Callable[..., str]
ROWS = [{"arrival_time": 0.01 * n, "prompt_tokens": 8 + n, "output_tokens": 3} for n in range(6)]
ORDER = "from testbed.policies.orders import KeyedQueue\nfrom stale_helpers import sign\n\n\n"
ORDER += "def mine():\n    return KeyedQueue(lambda seq: (sign * seq.num_prompt_tokens, seq.seq_id))\n"


def of_file(file: Path) -> tuple[str, ...]:
    return ("trace=jsonl", f"trace.path={file}")


@pytest.fixture
def in_folder(here: Path, monkeypatch: pytest.MonkeyPatch, say: Say) -> InFolder:
    """Runs a sweep in a folder of the user's, and returns what it says: modules there are imported anew."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def swept(*arguments: str) -> str:
        for name in ("stale_mine", "stale_helpers"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(str(here))
        return say("run", "-m", *TINY, *SHORT, "hydra.sweep.dir=s", *arguments).success()

    return swept


def test_a_changed_trace_file_runs_its_points_again(tmp_path: Path, say: Say) -> None:
    file, folder = write_rows(tmp_path / "t.jsonl", ROWS), tmp_path / "s"
    arguments = ("-m", *TINY, "seed=0,1", *of_file(file))
    say("run", *arguments, f"hydra.sweep.dir={folder}").success()
    before = {run.path for run in load_sweep(folder).runs}
    fingerprints = {run.fingerprint for run in load_sweep(folder).runs}
    write_rows(file, ROWS[:4])
    said = say("run", *arguments, f"hydra.sweep.dir={folder}")
    assert f"set aside    2 points (stale: the file {file} changed)" in said.out
    assert "done before" not in said.out
    after = load_sweep(folder)
    assert not {run.path for run in after.runs} & before
    assert not {run.fingerprint for run in after.runs} & fingerprints
    assert not after.incomplete, "what is set aside is mixed into nothing"
    assert len(list(folder.glob(".stale/*/requests.parquet"))) == 2, "nothing is lost"
    assert "done before  2 of 2" in say("run", *arguments, f"hydra.sweep.dir={folder}").out


def test_a_changed_class_runs_its_points_again_also_where_it_only_imports_what_changed(
    tmp_path: Path, in_folder: InFolder
) -> None:
    (tmp_path / "stale_mine.py").write_text(ORDER)
    (tmp_path / "stale_helpers.py").write_text("sign = 1\n")
    (tmp_path / "unrelated.py").write_text("")
    arguments = ("scheduler.queue_order={_target_: stale_mine.mine},fcfs",)
    assert "complete     2 points" in in_folder(*arguments)
    (tmp_path / "unrelated.py").write_text("x = 1\n")
    assert "done before  2 of 2" in in_folder(*arguments)
    (tmp_path / "stale_helpers.py").write_text("sign = -1\n")
    said = in_folder(*arguments)
    assert "set aside    1 point (stale: the class file stale_helpers.py changed)" in said
    assert "done before  1 of 2" in said
    (tmp_path / "stale_mine.py").write_text("# again\n" + ORDER)
    assert "set aside    1 point (stale: the class file stale_mine.py changed)" in in_folder(*arguments)


def test_changed_code_runs_every_point_again(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(say, tmp_path / "s", "seed=0,1")
    monkeypatch.setattr(identity, "source_hash", lambda: "another")
    said = sweep(say, tmp_path / "s", "seed=0,1")
    assert "set aside    2 points (stale: the testbed's code changed)" in said.out
    assert {run.manifest["identity"]["code"] for run in load_sweep(tmp_path / "s").runs} == {"another"}


def test_a_changed_default_runs_its_points_again(tmp_path: Path, say: Say) -> None:
    """Its configuration is another, but the command is the same."""

    def swept(watermark: float, *more: str) -> Said:
        option(tmp_path / "conf", "cache/mine", f"defaults: [default, _self_]\nwatermark: {watermark}\n")
        return sweep(say, tmp_path / "s", "cache=mine", "seed=0,1", "--config-dir", str(tmp_path / "conf"), *more)

    swept(0.0).success()
    said = swept(0.1, "slo.ttft_s=0.1")
    assert "set aside    2 points (stale: the defaults changed: cache.watermark): " in said.out
    assert {run.config["cache"]["watermark"] for run in load_sweep(tmp_path / "s").runs} == {0.1}
    assert "done before  2 of 2" in swept(0.1).out


def test_installed_code_is_the_code_of_its_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plugins lie elsewhere once it is installed."""
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    hash_now = environment.source_hash.__wrapped__
    (tmp_path / "experiments" / "plugins").mkdir(parents=True)
    (tmp_path / "experiments" / "cli.py").write_text("1")
    installed = hash_now()
    (tmp_path / "experiments" / "plugins" / "sweeper.py").write_text("2")
    assert hash_now() == installed
    (tmp_path / "experiments" / "cli.py").write_text("3")
    assert hash_now() != installed


def test_a_run_of_which_nobody_knows_what_made_it_is_no_finished_point(tmp_path: Path, say: Say) -> None:
    sweep(say, tmp_path / "s", "seed=0")
    (run,) = load_sweep(tmp_path / "s").runs
    kept = {key: value for key, value in manifest_of(run.path).items() if key != "identity"}
    (run.path / "manifest.json").write_text(json.dumps(kept))
    assert "it does not say what it was made from" in sweep(say, tmp_path / "s", "seed=0").out
    assert "identity" in manifest_of(run.path)


def test_the_identity_leaves_out_what_decides_nothing_and_how_the_command_behaves() -> None:
    one = identity_of(config_of())
    assert identity_of(config_of(slo__ttft_s=1.0, report__question="?", overwrite=True, points_per_job=3)) == one
    others = [config_of(seed=1), config_of(cache__block_size=8), config_of(record__decisions=True)]
    assert len({identity_of(config).name for config in others} | {one.name}) == 4


@pytest.mark.parametrize("given", [str, lambda file: [str(file)], lambda file: {"deep": [{"down": str(file)}]}])
def test_files_that_a_class_is_given_count_wherever_they_stand(tmp_path: Path, given: Callable[[Path], Any]) -> None:
    (tmp_path / "a.csv").write_text("1")
    config = config_of(cost={"_target_": "sim.cost.constant.ConstantCost", "table": given(tmp_path / "a.csv")})
    before = identity_of(config)
    assert list(before.files) == [str(tmp_path / "a.csv")]
    assert before.classes == {}, "this package's own classes count as its code"
    (tmp_path / "a.csv").write_text("2 ")
    after = identity_of(config)
    assert (after.config, after.name[:12]) == (before.config, before.name[:12])
    assert after.name != before.name
    assert after.changes_since({"identity": asdict(before)}) == f"the file {tmp_path / 'a.csv'} changed"


@pytest.mark.parametrize(
    ("name", "is_cut"),
    [("requests.parquet", True), ("steps.parquet", True), ("requests.parquet", False), ("config.yaml", False)],
)
def test_a_finished_point_whose_files_are_damaged_is_run_again(
    tmp_path: Path, say: Say, name: str, is_cut: bool
) -> None:
    sweep(say, tmp_path / "s", "seed=0,1")
    file = load_sweep(tmp_path / "s").runs[0].path / name
    file.write_bytes(file.read_bytes()[:-9]) if is_cut else file.unlink()
    if not is_cut:
        assert "the run ended, and its files were deleted since" in say("report", str(file.parent)).error()
    said = sweep(say, tmp_path / "s", "seed=0,1", "slo.ttft_s=0.1")
    assert "set aside    1 point (damaged): " in said.out
    assert "done before  1 of 2" in said.out
    found = load_sweep(tmp_path / "s")
    assert (len(found.runs), found.incomplete) == (2, ())
