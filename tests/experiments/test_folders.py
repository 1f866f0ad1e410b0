"""Which folder a run may write to: a named one, that no other process writes to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from analysis.load import load_run, load_sweep
from experiments import simulate
from experiments.runs.replacing import claimed
from experiments.runs.run_folder import is_locked
from tests.experiments.kit import SHORT, TINY, Say, config_of, manifest_of, write_rows
from tests.experiments.test_sweeps import sweep

HOLDS = """
import sys, time
from pathlib import Path
from experiments.configuration.compose import compose_config
from experiments.runs.replacing import claimed

with claimed(Path(sys.argv[1]), compose_config([])):
    print("claimed", flush=True)
    time.sleep(60)
"""


def test_a_folder_that_another_process_writes_to_is_refused_until_that_process_is_gone(
    tmp_path: Path, say: Say
) -> None:
    arguments = ("run", *TINY, *SHORT, f"hydra.run.dir={tmp_path / 'run'}")
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "claimed\n"
    for more in ((), ("overwrite=true",)):
        said = f"another process is writing to {tmp_path / 'run'}"
        assert say(*arguments, *more).error().startswith(said)
    for command in ("explain", "timeline"):
        said = f"{tmp_path / 'run'}: another process is still writing this run"
        assert say(command, str(tmp_path / "run")).error().startswith(said)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    say(*arguments).success()
    assert not is_locked(tmp_path / "run")


def test_a_run_that_loses_the_race_for_a_folder_leaves_the_other_s_files(tmp_path: Path) -> None:
    config = config_of()
    with claimed(tmp_path / "run", config):
        before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
        with pytest.raises(Exception, match="another process is writing"), claimed(tmp_path / "run", config):
            pass
        assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (["timeline", "run", "--out", "run/manifest.json"], "--out"),
        (["timeline", "run", "--out", "run/summary.json"], "--out"),
        (["trace", "freeze", "run/steps.parquet", "num_requests=2"], "file"),
        (["trace", "synthesise", "run/tape-1.jsonl", "num_requests=2"], "file"),
        (["generate", "--model", "nowhere", "a", "--output", "run/run.log"], "--output"),
        (["tables", "import", "vidur", "--out", "run/requests.parquet"], "--out"),
        (["calibrate", "fit", "nothing.parquet", "--out", "run/config.yaml"], "--out"),
    ],
)
def test_no_command_writes_over_the_files_of_a_run(here: Path, say: Say, command: list[str], key: str) -> None:
    simulate({"num_requests": 2}, folder="run")
    before = {file.name: file.read_bytes() for file in (here / "run").iterdir()}
    (file,) = [word for word in command if word.startswith("run/")]
    told = f"{file} is a file of the run there; choose another {key}"
    assert say(*command, "--overwrite").error() == told
    assert {file.name: file.read_bytes() for file in (here / "run").iterdir()} == before
    (here / "run" / "timeline.json").write_text("an older one")
    say("timeline", "run", "--out", "run/timeline.json", "--overwrite").success()


def test_no_command_writes_through_a_link_to_a_file_of_a_run(here: Path, say: Say) -> None:
    simulate({"num_requests": 2}, folder="run")
    before = Path("run/manifest.json").read_bytes()
    Path("out.jsonl").symlink_to("run/manifest.json")
    said = say("generate", "--model", "nowhere", "a", "--output", "out.jsonl", "--overwrite").error()
    assert said == "out.jsonl is a file of the run there; choose another --output"
    assert Path("run/manifest.json").read_bytes() == before


def test_two_sweeps_into_one_folder_at_once_share_its_points(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments", "run", "-m", *TINY, *SHORT[1:]]
    command += ["trace.num_requests=1500", "seed=range(0,5)", f"hydra.sweep.dir={tmp_path / 's'}"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for said, errors in [process.communicate(timeout=120) for process in both]:
        assert errors == ""
        assert "complete     5 points" in said
    assert len(load_sweep(tmp_path / "s").runs) == 5


def test_a_point_that_another_process_is_running_is_waited_for(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(say, tmp_path / "s", "seed=0,1")
    run = load_sweep(tmp_path / "s").runs[0]
    (run.path / "done").unlink()
    with ExitStack() as other:
        other.enter_context(claimed(run.path, config_of()))
        (run.path / "manifest.json").write_text("{}")
        monkeypatch.setattr("experiments.sweeps.sweep.sleep", lambda _: other.close())
        said = sweep(say, tmp_path / "s", "seed=0,1")
        assert f"another process began {run.path} and did not finish it; the same command runs it" in said.error()


def test_an_empty_folder_of_a_sweep_is_not_the_working_directory(here: Path, say: Say) -> None:
    said = say("run", "-m", *TINY, *SHORT, "seed=0,1", "hydra.sweep.dir=")
    assert "hydra.sweep.dir is empty; name a folder" in said.error()
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("quotes", "name"), [("", "two words"), ("", "words (and), a comma"), ("'", "é=~#1"), ('"', "words (and), a comma")]
)
def test_a_folder_s_name_has_any_characters(tmp_path: Path, say: Say, quotes: str, name: str) -> None:
    folder = tmp_path / name
    value = f"{quotes}{folder}{quotes}"
    say("run", *TINY, *SHORT, f"hydra.run.dir={value}").success()
    assert load_run(folder).is_complete
    again = f"hydra.run.dir={quotes}{folder} again{quotes}"
    say("run", f"from={quotes}{folder}{quotes}", again).success()
    assert manifest_of(tmp_path / f"{name} again")["digest"] == manifest_of(folder)["digest"]
    say("run", "-m", *TINY, *SHORT, "seed=0,1", f"hydra.sweep.dir={quotes}{folder}s{quotes}").success()
    assert len(load_sweep(tmp_path / f"{name}s").runs) == 2


@pytest.mark.parametrize("quotes", ["", "'", '"'])
def test_a_run_in_the_home_folder_is_found(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch, quotes: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"no run at {tmp_path / 'nope'}: " in say("run", f"from={quotes}~/nope{quotes}").error()


@pytest.mark.parametrize("name", ["é.jsonl", "rate=8.jsonl", "rows (1).jsonl", "~/#1.jsonl"])
def test_a_file_s_name_has_any_characters_but_a_comma(here: Path, say: Say, name: str) -> None:
    (here / "~").mkdir()
    write_rows(here / name, [{"arrival_time": 0, "prompt_tokens": 9, "output_tokens": 4}])
    trace = (*TINY, "trace=jsonl", f"trace.path={name}")
    say("run", *trace, "hydra.run.dir=a").success()
    say("run", "-m", *trace, "seed=0,1", "hydra.sweep.dir=b").success()
    assert simulate({"name": "jsonl", "path": name}, folder="c", model="tiny").is_complete
    assert {run.config["trace"]["path"] for run in load_sweep("b").runs} == {name}
    comma = say("run", *TINY, "trace=jsonl", f"trace.path={name},b", "hydra.run.dir=d").error()
    assert "has several values" in comma or "has quotes of its own" in comma


@pytest.mark.parametrize("name", ["manifest.json", "config.yaml"])
@pytest.mark.parametrize(
    "command",
    [("explain", "{}"), ("parity", "{}"), ("run", "from={}"), ("fidelity", "{}"), ("report", "{}"), ("timeline", "{}")],
    ids=lambda command: command[0],
)
def test_every_command_names_what_is_missing_of_a_damaged_folder(
    here: Path,
    say: Say,
    command: tuple[str, str],
    name: str,
) -> None:
    say("run", *TINY, *SHORT, "hydra.run.dir=a").success()
    (here / "a" / name).write_text("{}")
    said = say(*(word.format("a") for word in command))
    if command[0] == "run" and name == "manifest.json":
        assert said.status == 0, "a configuration is enough to run it again"
    else:
        assert f"a/{name}: " in said.error()
        assert "missing; it is damaged" in said.error()


def test_the_folder_of_a_point_that_failed_before_it_began_takes_a_run(tmp_path: Path, say: Say) -> None:
    sweep = ("run", "-m", "seed=0,1", "model=llama3.1_8b", "device.memory_bytes=1000000000")
    assert say(*sweep, f"hydra.sweep.dir={tmp_path / 's'}").status == 1
    point = next((tmp_path / "s").glob("*/manifest.json")).parent
    say("run", *TINY, *SHORT, f"hydra.run.dir={point}").success()
