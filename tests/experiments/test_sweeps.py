"""A sweep runs every point, survives a failing one, and is resumed by the same command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.load import load_sweep
from experiments.messages import options
from tests.experiments.kit import SHORT, TINY, Said, manifest_of, say

POINTS = "seed=0,1,2"


def sweep(capsys: pytest.CaptureFixture[str], folder: Path, *more: str) -> Said:
    return say(capsys, "run", "-m", *TINY, *SHORT, f"hydra.sweep.dir={folder}", *more)


def stamps(folder: Path) -> dict[str, int]:
    return {str(file.relative_to(folder)): file.stat().st_mtime_ns for file in folder.rglob("done")}


def test_every_point_is_run_with_its_own_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = sweep(capsys, tmp_path / "s", POINTS, "scheduler=unified,decode_first")
    assert said.status == 0, said.err
    runs = load_sweep(tmp_path / "s").runs
    assert sorted((run.manifest["scheduler"], run.manifest["seed"]) for run in runs) == [
        (scheduler, seed) for scheduler in ("decode_first", "unified") for seed in range(3)
    ]


def test_the_same_command_again_runs_nothing_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(capsys, tmp_path / "s", POINTS)
    before = stamps(tmp_path / "s")
    said = sweep(capsys, tmp_path / "s", POINTS)
    assert said.status == 0
    assert said.out.count("done before") == 3
    assert stamps(tmp_path / "s") == before


def test_a_partial_point_is_set_aside_and_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(capsys, tmp_path / "s", POINTS)
    point = tmp_path / "s" / "1"
    digest = manifest_of(point)["digest"]
    (point / "done").unlink()
    (point / "manifest.json").write_text(json.dumps(manifest_of(point) | {"status": "partial"}))
    before = stamps(tmp_path / "s")
    said = sweep(capsys, tmp_path / "s", POINTS)
    assert said.status == 0
    assert (tmp_path / "s" / "1.partial-1" / "requests.parquet").is_file(), "nothing is lost"
    assert manifest_of(point)["digest"] == digest
    after = stamps(tmp_path / "s")
    assert {name: after[name] for name in before} == before
    assert len(load_sweep(tmp_path / "s").runs) == 3


def test_a_point_that_was_killed_before_its_manifest_is_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(capsys, tmp_path / "s", POINTS)
    for name in ("done", "manifest.json", "summary.json"):
        (tmp_path / "s" / "2" / name).unlink()
    assert sweep(capsys, tmp_path / "s", POINTS).status == 0
    assert (tmp_path / "s" / "2" / "done").is_file()


def test_a_failing_point_stops_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = sweep(capsys, tmp_path / "s", "cache.block_size=4,600,8")
    assert "cache.block_size is 600" in said.error()
    assert said.status == 1
    assert {run.config["cache"]["block_size"] for run in load_sweep(tmp_path / "s").runs} == {4, 8}


def test_two_failing_points_are_both_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = sweep(capsys, tmp_path / "s", "cache.block_size=600,4,700")
    assert said.status == 1
    assert "cache.block_size is 600" in said.error()
    failed = [line for line in said.out.splitlines() if line.startswith("failed ")]
    assert [("600" in line, "700" in line) for line in failed] == [(True, False), (False, True)]
    assert all(str(tmp_path / "s") in line for line in failed)


def test_a_point_with_ignored_requests_fails_the_sweep_and_keeps_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = sweep(capsys, tmp_path / "s", "scheduler.max_model_len=16,128")
    assert "could never fit" in said.error()
    assert len(load_sweep(tmp_path / "s").runs) == 2


def test_another_configuration_in_the_same_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(capsys, tmp_path / "s", POINTS)
    before = stamps(tmp_path / "s")
    error = sweep(capsys, tmp_path / "s", POINTS, "cache.block_size=8").err
    assert "another configuration" in error
    assert stamps(tmp_path / "s") == before
    assert sweep(capsys, tmp_path / "s", POINTS, "cache.block_size=8", "overwrite=true").status == 0


def test_an_unknown_key_fails_before_the_first_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cache.block_size" in sweep(capsys, tmp_path / "s", "cache.blok_size=4,8").error()
    assert not list(tmp_path.rglob("manifest.json"))


def test_the_flag_may_stand_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = say(capsys, "run", *TINY, *SHORT, f"hydra.sweep.dir={tmp_path / 's'}", "--multirun", "seed=0,1")
    assert said.status == 0, said.err
    assert len(load_sweep(tmp_path / "s").runs) == 2


def test_points_run_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    sweep(capsys, tmp_path / "basic", POINTS)
    said = sweep(capsys, tmp_path / "joblib", POINTS, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    assert said.status == 0, said.err
    digests = {run.manifest["seed"]: run.manifest["digest"] for run in load_sweep(tmp_path / "basic").runs}
    assert {run.manifest["seed"]: run.manifest["digest"] for run in load_sweep(tmp_path / "joblib").runs} == digests


def test_a_failing_point_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    more = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    said = sweep(capsys, tmp_path / "s", "cache.block_size=4,600,8", *more)
    assert said.status == 1
    assert "cache.block_size is 600" in said.err
    assert "Traceback" not in said.err + said.out
    assert len(load_sweep(tmp_path / "s").runs) == 2


STUDIES = {  # what each overlay sweeps beside the seed
    "admission": 4, "batch_composition": 5, "chunk_budget": 5, "preemption": 3, "prefix_caching": 4, "queue_order": 6,
    "watermark": 5,
}  # fmt: skip


@pytest.mark.parametrize(("study", "num_arms"), STUDIES.items())
def test_a_classic_study_is_one_command_and_its_report_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], study: str, num_arms: int
) -> None:
    short = (f"experiment={study}", "trace.num_requests=12", "seed=0", f"hydra.sweep.dir={tmp_path / 's'}")
    said = say(capsys, "run", *short)
    assert said.status == 0, said.err
    runs = load_sweep(tmp_path / "s").runs
    assert len(runs) == num_arms
    (question,) = {run.config["report"]["question"] for run in runs}
    assert say(capsys, "report", str(tmp_path / "s"), "--out", str(tmp_path / "r.html")).status == 0
    assert question in (tmp_path / "r.md").read_text()


def test_every_study_that_is_shipped_is_tried() -> None:
    assert set(options("experiment")) == {*STUDIES, "demo", "demo_real"}
