"""`testbed calibrate`: the engine's profile and the fits, in one command and apart."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from types import SimpleNamespace

import pytest

from experiments.calibration import calibrate
from experiments.calibration import command as command_line
from experiments.cli import main
from sim.cost.calibration_file import load_calibration
from testbed.errors import ConfigError
from testbed.specs.profiles import read_profile
from tests.experiments.kit import SHORT, TINY, manifest_of
from tests.experiments.test_models_from_files import SHAPE

ENGINE = (*TINY, "cache.block_size=16", "cache.num_cpu_blocks=16", "backend.num_threads=1", "backend.device=cpu")
FAST = ("--quick", "--repeats", "1", "--requests", "0")


def test_one_command_profiles_fits_and_says_how_to_simulate(tmp_path, say):
    pytest.importorskip("torch")
    folder = tmp_path / "calibration"
    said = say("calibrate", *ENGINE, "backend.pace=probe_scaled", *FAST, "--out", str(folder)).success()
    assert "profile      the engine is ready: " in said, "weights may take long, and there is no bar"
    profile = read_profile(folder / "profile.parquet")
    assert profile.manifest.command.startswith("testbed calibrate model=tiny")
    assert profile.manifest.device == "cpu"
    yardstick = f"for runs to compare: backend.pace=probe_scaled backend.probe_ns={profile.manifest.probe_ns}"
    assert yardstick in said
    assert profile.manifest.attention in ("cpu", "torch"), "the kernel, or without a C compiler the reference"
    shapes = {step.shape for step in profile.steps}
    assert max(shape.num_blocks_swapped_out for shape in shapes) == 16
    assert max(shape.num_blocks_copied for shape in shapes) == 8
    assert all(sum(step.spans) <= step.total_ns for step in profile.steps), "on a CPU nothing overlaps"
    assert all(step.spans.schedule_ns > 0 and step.spans.prepare_ns > 0 for step in profile.steps)
    calibration = load_calibration(folder / "calibrated-cost.json")
    assert set(calibration.quality) == {"all", "decode", "prefill", "mixed"}
    for expected in ("relative error of shapes that were left out", "profile.parquet: ", "calibrated-cost.json"):
        assert expected in said
    (command,) = [line for line in said.splitlines() if line.startswith("simulate")]
    caveat, run, words = command.partition("testbed run ")
    assert run, command
    assert ("only to try it out" in caveat) == ("LARGE ERROR" in said), "on a busy host"
    assert main(["run", *shlex.split(words), *SHORT, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    assert manifest_of(tmp_path / "run")["num_gpu_blocks"] == 64
    assert manifest_of(tmp_path / "run")["cost"] == "calibrated"
    again = say("calibrate", *ENGINE, *FAST, "--out", str(folder))
    assert "is not empty; choose another --out or pass --overwrite" in again.error()


def test_a_large_model_on_a_cpu_is_noted_before_its_weights_are_made(tmp_path, say, monkeypatch):
    pytest.importorskip("torch")

    def not_made(*_, **__):
        raise ConfigError("no weights are made here")

    monkeypatch.setattr(command_line, "measure_profile", not_made)
    said = say("calibrate", "model=qwen3_8b", "backend.device=cpu", "--out", str(tmp_path / "fit"))
    assert said.error() == "no weights are made here"
    assert "note         the engine runs on a CPU: qwen3_8b, of 8,19" in said.out


def test_the_simulation_of_an_engine_of_another_dtype_names_it_unless_files_give_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    manifest = SimpleNamespace(device="cpu", dtype="bfloat16", model={"dtype": "float32"})
    measured = SimpleNamespace(profile=SimpleNamespace(manifest=manifest), num_gpu_blocks=64)
    for model, dtype in (("model=tiny", ["model.dtype=bfloat16"]), (f"model.path={tmp_path}", [])):
        given = [model, "backend.dtype=bfloat16", "++backend.num_threads=1", "++cache.num_gpu_blocks=9"]
        words = command_line._simulation(given, measured, [])
        assert words == ["testbed", "run", model, "device=cpu", *dtype, "cache.num_gpu_blocks=64"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--overwrite"], "is a file, and --out names a folder of profile and fit; choose another"),
        (["cost=calibrated"], "that is the fit that `testbed calibrate` makes; leave cost out here"),
    ],
)
def test_what_calibrate_cannot_use_is_refused_before_it_measures(tmp_path, say, more, message):
    file = tmp_path / "out"
    if "--overwrite" in more:
        file.touch()
    said = say("calibrate", *ENGINE, *FAST, *more, "--out", str(file))
    assert message in said.error()
    assert "profile" not in said.out, "nothing was measured"


def test_a_profile_says_what_the_engine_captured_which_a_closed_one_has_released(tmp_path, say, monkeypatch):
    pytest.importorskip("torch")
    from real.backend import RealBackend

    closed: list[RealBackend] = []
    monkeypatch.setattr(RealBackend, "close", lambda self: closed.append(self))
    monkeypatch.setattr(RealBackend, "largest_captured", property(lambda self: (0, 0) if self in closed else (8, 64)))
    file = tmp_path / "profile.parquet"
    say("calibrate", "profile", *ENGINE, *FAST, "--max-seconds", "1", "--out", str(file)).success()
    manifest = read_profile(file).manifest
    assert (manifest.captured_decodes, manifest.captured_tokens, len(closed)) == (8, 64, 1)


@pytest.mark.parametrize("command", [("calibrate",), ("calibrate", "profile")], ids=" ".join)
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, say, monkeypatch, command):
    monkeypatch.setattr(command_line, "measure_profile", lambda *_, **__: pytest.fail("it measured"))
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "calibration" / "profile.parquet"
    assert f"{tmp_path / 'file'}" in say(*command, *ENGINE, *FAST, "--out", str(out)).error()


def test_records_of_a_profile_wait_for_a_launch_where_those_of_a_run_do(monkeypatch, tmp_path, say):
    pytest.importorskip("torch")
    """As a GPU's do, which computes meanwhile; the same steps are measured, one at a time under any preset."""
    from real.late_records import LateRecords
    from real.profiler import grid

    waiting, caught = [], LateRecords.catch_up

    def counted(self):
        waiting.append(len(self._events))
        caught(self)

    monkeypatch.setattr(LateRecords, "catch_up", counted)
    monkeypatch.setattr(calibrate, "_COMPOSITIONS", calibrate._COMPOSITIONS[:1])
    monkeypatch.setattr(grid, "design", lambda *args, whole=grid.design, **kwargs: whole(*args, **kwargs)[::6])
    shapes = []
    for name, late in (("late", True), ("at_once", False)):
        monkeypatch.setattr(calibrate, "computes_beside", lambda config, late=late: late)
        file = tmp_path / f"{name}.parquet"
        few = ("--quick", "--repeats", "1", "--requests", "4")
        asynchronous = ("scheduler=vllm_v1_async", "cache.num_gpu_blocks=256")
        say("calibrate", "profile", *ENGINE, *few, *asynchronous, "--out", str(file)).success()
        steps = read_profile(file).steps
        assert all(sum(step.spans) <= step.total_ns for step in steps), "a step began before the one before had ended"
        assert sum(step.total_ns > 1.8 * sum(step.spans) for step in steps) < len(steps) / 4
        shapes.append(sorted(map(repr, (step.shape for step in steps))))
    assert shapes[0] == shapes[1]
    assert max(waiting) > 0


def test_the_engine_is_profiled_as_one_in_use(monkeypatch, tmp_path, say):
    """Blocks lie anywhere; prompts are computed beside decodes, and while they wait."""
    pytest.importorskip("torch")
    from real.backend import RealBackend

    seen, start = [], RealBackend.start

    def watched(self, plan):
        rows = plan.rows.make()
        seen.append((plan.shape, [list(row.block_table) for row in rows]))
        return start(self, plan)

    monkeypatch.setattr(RealBackend, "start", watched)
    say("calibrate", *ENGINE, *FAST, "--out", str(tmp_path / "c")).success()
    long = [table for _, tables in seen for table in tables if len(table) > 3]
    neighbours = [b - a == 1 for table in long for a, b in pairwise(table)]
    assert sum(neighbours) < 0.1 * len(neighbours)
    shapes = [shape for shape, _ in seen]
    assert any(
        [before.kind, during.kind, after.kind] == ["decode", "prefill", "decode"]
        and after.decode_context_tokens == before.decode_context_tokens + before.num_decodes > 50
        for before, during, after in zip(shapes, shapes[1:], shapes[2:], strict=False)
    ), "those that decode wait"
    assert any(shape.kind == "mixed" for shape in shapes)


def test_an_interrupted_profile_keeps_what_was_measured(tmp_path, say, monkeypatch):
    pytest.importorskip("torch")
    calls = []

    class Bar:
        def __init__(self, desc, unit, total):
            assert total > 20

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def update(self):
            calls.append(1)
            if len(calls) == 7:
                raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "progress", Bar)
    file = tmp_path / "part.parquet"
    said = say("calibrate", "profile", *ENGINE, *FAST, "--out", str(file))
    assert said.status == 130
    assert "the profile is a part: it was interrupted after 7 of" in said.out
    assert len(read_profile(file).steps) >= 7

    calls.clear()
    said = say("calibrate", *ENGINE, *FAST, "--out", str(tmp_path / "too-early"))
    assert said.status == 130
    assert "it was interrupted after 7 of" in said.out
    assert "no fit       the profile has steps of" in said.out
    assert [file.name for file in (tmp_path / "too-early").iterdir()] == ["profile.parquet"]


def test_time_that_is_over_ends_it_too_and_nothing_measured_is_an_error(tmp_path, say):
    pytest.importorskip("torch")
    said = say("calibrate", *ENGINE, *FAST, "--max-seconds", "1e-9", "--out", str(tmp_path / "none"))
    assert said.error() == "nothing was measured: its 1e-09 s were over; raise --max-seconds"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fti"], "`testbed calibrate fti`: expected key=value pairs, or one of fit, profile"),
        (["--repeats", "0"], "--repeats is 0; it must be from 1 to 100"),
        (["--requests", "2"], "--requests is 2; it must be from 4 to 10,000, or 0 for no loads"),
        (["--max-seconds", "abc"], "--max-seconds is 'abc'; it must be a number"),
        (["--repeats", "1.5"], "--repeats is '1.5'; it must be a whole number"),
        (["--max-seconds", "nan"], "--max-seconds is nan; it must be a finite number above 0"),
        (["backend=sim"], "only the real engine can be profiled"),
        (["cache.num_gpu_block=4"], "did you mean 'cache.num_gpu_blocks'?"),
    ],
)
def test_impossible_calibrations_are_one_line(arguments, message, say, tmp_path):
    assert message in say("calibrate", *arguments, "--out", str(tmp_path / "x")).error()
    assert not (tmp_path / "x").exists()


@pytest.mark.gpu
def test_a_gpu_is_profiled_within_its_time_and_its_name_is_the_library_s(tmp_path, say):
    engine = [item for item in ENGINE if item not in ("backend.device=cpu", "backend.num_threads=1")]
    folder = tmp_path / "calibration"
    say("calibrate", *engine, "model.dtype=bfloat16", *FAST, "--max-seconds", "60", "--out", str(folder)).success()
    profile = read_profile(folder / "profile.parquet")
    assert profile.manifest.device != "cpu"
    assert profile.manifest.driver
    assert profile.manifest.captured_decodes > 0
    assert profile.manifest.captured_tokens > 0
    for step in profile.steps:
        spans = step.spans
        assert sum(spans) - spans.swap_ns <= step.total_ns, "only swaps have a stream of their own"
        assert spans.forward_ns > 0
        assert (spans.swap_ns > 0) >= (step.shape.num_blocks_moved > 0)
