"""A single run, by itself and as a job of Hydra's app: its configuration, its flags, and what it leaves."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from analysis.load import load_run
from experiments.cli import main
from experiments.configuration.compose import compose_config
from experiments.runs.progress import Progress
from tests.experiments.kit import SHORT, TINY, Say, manifest_of, option

RUN = ["trace.num_requests=3", "trace.rate=2.5", "cache.num_gpu_blocks=500", "scheduler=vllm_v0", "seed=3"]


def test_it_is_the_same_by_itself_and_as_a_job_of_hydra_s_and_from_python(tmp_path: Path) -> None:
    commands = []
    for name, job in (("alone", ()), ("job", ("hydra.job.name=one",))):
        place = f"hydra.run.dir={tmp_path / name}"
        assert main(["run", *RUN, *job, place]) == 0
        assert (tmp_path / name / "done").exists()
        assert yaml.safe_load((tmp_path / name / "config.yaml").read_text()) == compose_config(RUN).raw
        commands.append(shlex.split(manifest_of(tmp_path / name)["command"]))
        assert commands[-1] == ["testbed", "run", *job, place, *RUN]
    assert manifest_of(tmp_path / "alone")["identity"] == manifest_of(tmp_path / "job")["identity"]
    assert manifest_of(tmp_path / "alone")["given"] == manifest_of(tmp_path / "job")["given"]


@pytest.mark.parametrize("arguments", [(), ("hydra.job.name=one",), ("-m",)], ids=" ".join)
def test_no_key_needs_to_be_given(here: Path, say: Say, arguments: tuple[str, ...]) -> None:
    say("run", *arguments).success()
    (manifest,) = here.glob("*/*/*/**/manifest.json")
    assert manifest_of(manifest.parent)["given"] == {}


@pytest.mark.parametrize(
    ("place", "told"),
    [("", "is empty"), ("''", "is empty"), ("null", "is null"), ("[a]", "is no text"), ("???", "is no text")],
)
def test_a_place_that_is_no_name_is_refused(here: Path, say: Say, place: str, told: str) -> None:
    assert f"hydra.run.dir {told}; name a folder" in say("run", f"hydra.run.dir={place}").error()
    assert not list(here.iterdir())


@pytest.mark.parametrize("name", ["1.10", "2026_11_26", "true", "glob(*)", "a,b", "it's", "back\\slash", "é\\'"])
def test_a_folder_has_the_name_that_was_given(here: Path, say: Say, name: str) -> None:
    assert say("run", *RUN, f"hydra.run.dir={name}").out.endswith(f"complete     {name}\n")
    assert [folder.name for folder in here.iterdir()] == [name]
    (here / name).rename(here / "first")
    say(*shlex.split(manifest_of(here / "first")["command"])[1:]).success()
    assert (here / name / "done").exists()


def test_a_tilde_is_the_home(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    say("run", *RUN, "hydra.run.dir=~/run").success()
    assert (tmp_path / "run" / "done").exists()


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "run.log", "steps.parquet", "timeline.json"])
def test_a_file_that_is_no_run_s_is_not_written_over(tmp_path: Path, say: Say, name: str) -> None:
    (tmp_path / name).write_text("mine")
    error = say("run", *RUN, f"hydra.run.dir={tmp_path}").error()
    assert f"{tmp_path / name} is no run's, and a run there would write over it; choose another" in error
    assert (tmp_path / name).read_text() == "mine"
    say("run", *RUN, f"hydra.run.dir={tmp_path}", "overwrite=true").success()


def test_an_empty_log_is_what_is_left_of_a_run_that_was_killed_at_once(tmp_path: Path, say: Say) -> None:
    (tmp_path / "run.log").touch()
    say("run", *RUN, f"hydra.run.dir={tmp_path}").success()


def test_after_from_one_run_is_named_plainly(tmp_path: Path, say: Say) -> None:
    say("run", *RUN, f"hydra.run.dir={tmp_path / 'a'}").success()
    source = f"from={tmp_path / 'a'}"
    error = say("run", source, f"hydra.run.dir={tmp_path}/x-${{seed}}").error()
    assert "a folder's name is plain text" in error
    assert "seed=1,2 has several values, and from=<folder> repeats one" in say("run", source, "seed=1,2").error()
    file = f"{source}/config.yaml"
    assert "config.yaml is a file; name the folder of a run, as" in say("run", file).error()


def test_a_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    command = ["sh", "-c", 'rmdir "$PWD"; exec "$0" -m experiments run', sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run(command, cwd=tmp_path / "gone", env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (1, "error: the current directory was removed; change to another\n")


def test_a_place_may_be_forced(tmp_path: Path, say: Say) -> None:
    say("run", *RUN, f"++hydra.run.dir={tmp_path / 'run'}").success()
    assert (tmp_path / "run" / "done").exists()


def test_hydra_s_own_flags_work(say: Say) -> None:
    said = say("run", *RUN, "--cfg", "job", "--package", "trace")
    assert yaml.safe_load(said.out) == compose_config(RUN).raw["trace"]


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path, say: Say) -> None:
    assert "cache.block_size is 0" in say("run", "cache.block_size=0", f"hydra.run.dir={tmp_path / 'a'}").error()
    assert not list(tmp_path.iterdir())


def test_the_command_of_a_run_repeats_what_its_texts_hold(tmp_path: Path, say: Say) -> None:
    text = "report.question='what is \\${seed} of ${model.name}?'"
    say("run", *TINY, *SHORT, text, f"hydra.run.dir={tmp_path / 'a'}").success()
    manifest = manifest_of(tmp_path / "a")
    assert text in shlex.split(manifest["command"])
    assert load_run(tmp_path / "a").config["report"]["question"] == "what is ${seed} of tiny?"


@pytest.mark.parametrize(
    "key", ["hydra.sweep.dir=elsewhere", "++hydra.sweep.dir=x", "hydra.sweep={dir:x}", "hydra/launcher=joblib"]
)
def test_what_only_sweeps_read_is_told_of_a_single_run(tmp_path: Path, say: Say, key: str) -> None:
    said = say("run", *RUN, f"hydra.run.dir={tmp_path / 'one'}", key)
    assert (said.status, said.err) == (0, f"note: without effect on a single run: {key}; -m makes it a sweep\n")
    swept = say("run", "-m", *RUN, f"hydra.sweep.dir={tmp_path / 'many'}")
    assert (swept.status, swept.err) == (0, "")


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (
            "hydra.job.env_copy=[PATH,NOBODY_SET_IT]",
            " names 'NOBODY_SET_IT', which is not set; set it, or leave it out",
        ),
        ("hydra.job={env_copy:[NOBODY]}", " names 'NOBODY', which is not set; set it, or leave it out"),
        ("hydra.job.env_copy=${seed}", "=${seed}: write out the list of variables, as [HOME,USER]"),
    ],
)
def test_a_variable_that_a_job_shall_have_is_set(tmp_path: Path, say: Say, key: str, told: str) -> None:
    said = say("run", *RUN, f"hydra.run.dir={tmp_path / 'one'}", key)
    assert (said.status, said.err) == (1, f"error: hydra.job.env_copy{told}\n")
    assert not (tmp_path / "one").exists()


SWEPT = "the experiment sweeps seed: `testbed run -m` makes all runs; for one, give each a value"


def test_an_overlay_s_sweep_without_its_mode_says_what_is_missing(tmp_path: Path, say: Say) -> None:
    option(tmp_path, "experiment/mine", "# @package _global_\nhydra: {sweeper: {params: {seed: '0,1'}}}\n")
    run = ("run", f"--config-dir={tmp_path}", "experiment=mine", f"hydra.run.dir={tmp_path / 'a'}")
    assert say(*run).error() == SWEPT


def test_where_there_is_no_terminal_a_long_run_says_how_far_it_is(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("run", *TINY, "trace.num_requests=20", f"hydra.run.dir={tmp_path / 'a'}")
    assert " requests in " not in say(*run).err
    monkeypatch.setattr(Progress, "LINE_S", 0.0)
    said = say(*run, "overwrite=true").err
    assert re.search(r"^sim: \d+ of 20 requests in 0 s, [\d,]+ req/s, 0 s left$", said, re.MULTILINE), said
    slow = Progress(8, "real")
    slow._num = 1
    assert slow._line(40.0) == "real: 1 of 8 requests in 40 s, 0.025 req/s, 280 s left"


@pytest.mark.parametrize(("rate", "is_told"), [(8, False), (200, True)])
def test_a_rate_that_is_far_below_what_was_offered_stands_beside_it(
    tmp_path: Path, say: Say, rate: int, is_told: bool
) -> None:
    load = ("model=llama3.1_8b", f"trace.rate={rate}", "trace.num_requests=100")
    said = say("run", *load, f"hydra.run.dir={tmp_path / 'run'}").success()
    found = re.search(r"^throughput   [\d.]+ req/s(.*), [\d,]+ output tok/s in the first", said, re.MULTILINE)
    assert found is not None
    assert (found[1] == " (of 232.6 offered)") is is_told
