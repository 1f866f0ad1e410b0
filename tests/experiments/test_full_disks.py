"""A disk that is full, and a file that may not grow, are one line; what was written stays."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from analysis.load import load_run
from experiments import cli, simulate
from experiments.fidelity.outputs import BEGIN, END, RESULT, renewed, write_page
from experiments.runs.run_folder import write_json, writing
from testbed.errors import RunFolderError
from testbed.output import whole_file
from testbed.records import parquet, tape
from testbed.records.parquet import ParquetFile
from testbed.records.tables import RowTable
from testbed.specs.operator_tables import OperatorTables, read_operator_tables, write_operator_tables
from testbed.specs.profiles import read_profile, write_profile
from tests.cost.profiling import manifest
from tests.cost.test_operator_tables import mixed_tables
from tests.cost.test_profiles import STEPS
from tests.experiments.kit import REAL, TINY, Say, manifest_of, table_of
from tests.experiments.test_bad_input import GOOD, run


class FullDisk:
    """A method that works `after` times, and then finds the disk full."""

    def __init__(self, method: Callable[..., Any], after: int) -> None:
        self.method, self.left = method, after

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.method(instance, *arguments)

        return call


def test_of_a_real_run_whose_records_found_the_disk_full_the_tape_writes_them(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")

    with monkeypatch.context() as patched:
        patched.setattr(ParquetFile, "write", FullDisk(ParquetFile.write, after=0))
        error = run(say, tmp_path, [GOOD], *REAL).error()
    assert "the disk is full" in error
    (command,) = re.findall(r"cannot be read; `testbed (run [^`]+)` writes them anew from its tape", error)
    said = say(*command.split(), f"hydra.run.dir={tmp_path / 'restored'}")
    assert "the recorded run was interrupted, and its tape ends after" in said.error()
    restored = load_run(tmp_path / "restored")
    assert not restored.is_complete
    assert restored.requests.finish_reason.tolist() == ["length"]


@pytest.mark.parametrize("place", ["ParquetFile.write", "ParquetFile.close", "TapeWriter.committed"])
def test_a_full_disk_is_one_line_and_what_was_written_stays(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    owner = tape.TapeWriter if place.startswith("Tape") else parquet.ParquetFile
    if owner is tape.TapeWriter:
        pytest.importorskip("torch")
    name = place.partition(".")[2]
    monkeypatch.setattr(owner, name, FullDisk(getattr(owner, name), after=9 if name == "committed" else 0))
    more = REAL if owner is tape.TapeWriter else ()
    rows = [{**GOOD, "arrival_time": i / 10, "output_tokens": 5} for i in range(6)]
    error = run(say, tmp_path, rows, *more).error()
    assert f"the disk is full ({tmp_path / 'run'}" in error
    if name != "committed":
        assert f"its records in {tmp_path / 'run'} cannot be read; run it again with overwrite=true" in error
    else:
        assert f"partial results kept in {tmp_path / 'run'}" in error
        load_run(tmp_path / "run")
    manifest = manifest_of(tmp_path / "run")
    assert manifest["status"] == "partial"
    assert not (tmp_path / "run" / "done").exists()
    if name == "committed":
        assert table_of(tmp_path / "run", "steps").num_rows >= 9
        assert "of 6 requests" in error


def test_a_sweep_that_cannot_keep_an_outcome_names_its_folder(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.sweeps.points.Board.say", FullDisk(lambda *_: None, after=0))
    error = say("run", "-m", *TINY, "trace.num_requests=2", "seed=0,1", f"hydra.sweep.dir={tmp_path}").error()
    assert f"the disk is full ({tmp_path}); free some space" in error


def test_a_temporary_file_that_cannot_be_made_is_told_as_its_target(tmp_path: Path) -> None:
    for code, file, told in (
        (errno.EACCES, "tmp1", "out.csv"),
        (errno.EMFILE, "tmp1", "tmp1"),
        (errno.EACCES, "closed/manifest.json", "closed/manifest.json"),  # is read, in a folder that may not be seen
    ):
        with pytest.raises(OSError, match=rf"/{told}'"), writing(tmp_path / "out.csv"):
            raise OSError(code, "Permission denied", str(tmp_path / file))
    with pytest.raises(OSError, match="memory") as failed, writing(tmp_path / "out.csv"):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")  # of a process that was to be started
    assert failed.value.filename is None


def test_a_full_disk_at_the_very_end_is_no_whole_run(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Any, target: Any) -> None:
        if str(target).endswith("summary.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    replace = os.replace
    monkeypatch.setattr("experiments.runs.run_folder.os.replace", full)
    error = run(say, tmp_path, [GOOD]).error()
    assert "the disk is full" in error
    assert not (tmp_path / "run" / "done").exists()
    assert not list((tmp_path / "run").glob(".*"))


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (["run", *TINY, "trace.num_requests=300", "hydra.run.dir=other"], "other"),
        (["timeline", "run", "--out", "big.json"], "big.json"),
        (["report", "run", "--out", "page.html"], "page.html"),
        (["trace", "synthesise", "big.parquet", "trace.num_requests=3000"], "big.parquet"),
    ],
)
def test_a_file_that_grows_beyond_its_limit_is_named(tmp_path: Path, command: list[str], file: str) -> None:
    simulate({"num_requests": 40}, folder=tmp_path / "run")
    limited = f"ulimit -f 4; exec {shlex.join([sys.executable, '-m', 'experiments', *command])}"
    done = subprocess.run(["bash", "-c", limited], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1
    assert "File too large for this shell or file system (" in told[0]
    assert "raise the limit (ulimit -f) and run again" in told[0]
    assert file in told[0]
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("page*")), "a report is written whole or not at all"


def test_a_file_that_could_not_be_written_says_so_again_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    with ThreadPoolExecutor(1) as worker:
        table = RowTable(tmp_path / "t.parquet", {"a": "int64"}, worker, 1)
        full = FullDisk(lambda *_: None, after=0).__get__(None, object)
        monkeypatch.setattr(table._file._writer, "write_batch", full)
        table.append((1,))
        worker.submit(int).result()  # it has tried
        for attempt in (lambda: table.append((1,)), table.close):
            with pytest.raises(OSError, match=r"t\.parquet") as caught:
                attempt()
            assert caught.value.errno == errno.ENOSPC


def test_what_is_replaced_by_a_whole_file_is_as_it_was_after_a_failure(tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    out.write_text("mine")
    out.chmod(0o600)
    with pytest.raises(OSError, match="No space") as failed, whole_file(out):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert failed.value.filename == str(out)
    assert out.read_text() == "mine"
    with whole_file(out) as part:
        part.write_text("new")
    assert (out.read_text(), out.stat().st_mode & 0o777) == ("new", 0o600)
    assert os.listdir(tmp_path) == ["page.md"]


def test_of_two_that_write_a_file_at_once_the_last_ones_stays_whole(tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl.gz"
    with whole_file(out) as one:
        with whole_file(out) as other:
            one.write_text("one")
            other.write_text("other")
        assert out.read_text() == "other"
        with pytest.raises(ValueError, match="of ours"), whole_file(out):
            raise ValueError("of ours")
    assert (out.read_text(), one.name[-9:]) == ("one", ".jsonl.gz")
    assert os.listdir(tmp_path) == [out.name]


def test_a_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(out := tmp_path / "trace.jsonl")
    reader = os.open(out, os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(out) as file:
        file.write_text("rows")
    assert os.read(reader, 9) == b"rows"
    os.close(reader)
    assert out.is_fifo()
    assert os.listdir(tmp_path) == [out.name]


@pytest.mark.parametrize("name", ["manifest.json", "tables.parquet", "profile.parquet"])
def test_a_writer_does_not_lose_its_file_to_another_that_writes_there_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file, rows = tmp_path / name, mixed_tables().rows
    write, read = {
        "manifest.json": (lambda who: write_json(file, {"who": who}), lambda: json.loads(file.read_text())["who"]),
        "tables.parquet": (
            lambda who: write_operator_tables(file, OperatorTables("h100", who, rows), ""),
            lambda: read_operator_tables(file).device_description,
        ),
        "profile.parquet": (
            lambda who: write_profile(file, manifest(device_description=who), STEPS),
            lambda: read_profile(file).manifest.device_description,
        ),
    }[name]
    waiting = ["other"]

    def others_between(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            done = method(*given, **more)
            if waiting:
                write(waiting.pop())
                assert read() == "other"
            return done

        return call

    monkeypatch.setattr(pq, "write_table", others_between(pq.write_table))
    monkeypatch.setattr(Path, "write_text", others_between(Path.write_text))
    write("one")
    assert read() == "one"
    assert os.listdir(tmp_path) == [name]


def test_a_figure_on_a_full_disk_is_named_and_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    from analysis.plots.style import save

    figure = Figure()
    figure.subplots()
    save(figure, tmp_path / "bars")
    old = (tmp_path / "bars.png").read_bytes()

    def full(self: Figure, file: Path, **more: Any) -> None:
        file.write_bytes(b"\x89PNG")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(OSError, match=r"/bars\.png'"):
        save(figure, tmp_path / "bars")
    assert (tmp_path / "bars.png").read_bytes() == old
    assert sorted(os.listdir(tmp_path)) == ["bars.png", "bars.svg"]


def test_a_document_that_gets_a_comparison_is_whole_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, link = tmp_path / "mine.md", tmp_path / "link.md"
    page.write_text(f"mine\n{BEGIN}\n{END}\n")
    link.symlink_to(page)
    with monkeypatch.context() as patched:
        patched.setattr("os.replace", FullDisk(lambda *_: None, after=0).__get__(None, object))
        with pytest.raises(OSError, match=r"/mine\.md'"):
            write_page(link, [], ["new"])
    assert page.read_text() == f"mine\n{BEGIN}\n{END}\n"
    write_page(link, [], ["new"])
    assert link.is_symlink()
    assert "\nnew\n" in page.read_text()


def _fail_as_the_disk_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathlib.Path.rename", FullDisk(Path.rename, after=0))
    raise OSError(errno.ENOSPC, "No space left on device")


def test_earlier_comparisons_are_there_again_if_they_cannot_even_be_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (run_there := out / "runs" / "chat" / "simulated").mkdir(parents=True)
    (out / RESULT).write_text("earlier")
    write_json(run_there / "manifest.json", {"command": "testbed fidelity a"})
    make = Path.mkdir

    def full(self: Path, **more: Any) -> None:
        if self.name == "chat":  # there is room for the file beside it
            raise OSError(errno.ENOSPC, "No space left on device")
        make(self, **more)

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.mkdir", full)
        with pytest.raises(OSError, match="No space"), renewed(out, overwrite=True):
            pass
    assert (out / RESULT).read_text() == "earlier"
    assert (run_there / "manifest.json").exists()
    assert os.listdir(tmp_path) == ["out"]
    told = r"out: its earlier outputs are in .*; move them back \(No space"
    with pytest.raises(RunFolderError, match=told), renewed(out, overwrite=True):
        _fail_as_the_disk_fills(monkeypatch)
    (aside,) = tmp_path.glob(".out-*")
    assert (aside / RESULT).read_text() == "earlier"


def test_a_run_whose_files_cannot_be_made_prints_no_stack_trace(tmp_path: Path) -> None:
    """Arrow's writers are given up then; they close themselves as they go, and print that this failed again."""
    script = f"""
import errno
from experiments import cli
from experiments.runs import run
from testbed.records import parquet

def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

run.write_json = full
parquet.pq.ParquetWriter.close = full
raise SystemExit(cli.main(["run", *{TINY!r}, "trace.num_requests=2", "hydra.run.dir={tmp_path / "run"}"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "compiled core" not in line] == [
        f"error: the disk is full ({tmp_path / 'run'}); free some space and run again"
    ]


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_failure(tmp_path: Path, closed: str) -> None:
    command = shlex.join([sys.executable, "-m", "experiments", "run", "trace.num_requests=2"])
    done = subprocess.run(["bash", "-c", f"exec {command} hydra.run.dir=run {closed}"], cwd=tmp_path, check=False)
    assert done.returncode == 0
    assert (tmp_path / "run" / "done").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_sweep_whose_output_finds_the_disk_full_says_so_once(tmp_path: Path) -> None:
    arguments = ["run", "-m", "trace.num_requests=300", "seed=0,1", f"hydra.sweep.dir={tmp_path}"]
    command = f"exec {shlex.join([sys.executable, '-u', '-m', 'experiments', *arguments])} > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the disk is full" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(list(tmp_path.glob("*/done"))) == 2


@pytest.mark.parametrize("words", ["can't start new thread", "Unknown error: Failed to launch worker thread: busy"])
def test_too_few_threads_are_one_line(say: Say, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    def refused(arguments: list[str]) -> int:
        raise RuntimeError(words)

    monkeypatch.setitem(cli.COMMANDS, "list", refused)
    assert f"{words}; raise the limit of threads and processes (ulimit -u)" in say("list").error()
