"""The plain commands: list, trace, report, bench, demo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis.load import load_run
from experiments.bench import simulator
from experiments.calibration import calibrate
from experiments.cli import main
from experiments.configuration.options import options
from experiments.demo import command as demo_real
from experiments.runs.environment import describe_versions
from experiments.runs.parity import DivergedError, ParityReport
from experiments.runs.run import FailedError
from testbed import compiled
from testbed.errors import TestbedError
from tests.experiments.kit import SHORT, TINY, Say, manifest_of, option, write_rows


@pytest.mark.parametrize("stream", ["true", "false"])
def test_arrivals_in_batches_are_told_of_in_the_run_and_its_manifest(tmp_path: Path, say: Say, stream: str) -> None:
    moon = [{"timestamp": at, "input_length": 5, "output_length": 2, "hash_ids": [at]} for at in (0, 0, 0, 3000, 3000)]
    file = write_rows(tmp_path / "m.jsonl", moon)
    read = ("trace=mooncake", f"trace.path={file}", f"trace.stream={stream}")
    said = say("run", *TINY, *read, f"hydra.run.dir={tmp_path / 'run'}")
    (note,) = manifest_of(tmp_path / "run")["trace"]["notes"]
    assert note.startswith("75% of arrivals at the instant of the one before; trace.transforms=[{name: spread}] spread")
    assert note in said.out
    spread = ("trace.transforms=[{name: spread}]", f"hydra.run.dir={tmp_path / 'spread'}")
    say("run", *TINY, *read, *spread).success()
    assert "75%" not in str(manifest_of(tmp_path / "spread")["trace"]["notes"])


def test_bursts_and_days_that_a_trace_is_too_short_for_are_told_of(tmp_path: Path, say: Say) -> None:
    small = ("trace.num_requests=60", "trace.rate=40", "trace.prompt.value=9", "trace.prompt.max_tokens=20")
    for arrival, is_noted in (("diurnal", True), ("poisson", False)):  # a day begins at night
        run = (f"trace.arrival={arrival}", "trace.output.max_tokens=9", f"hydra.run.dir={tmp_path / arrival}")
        said = say("run", *TINY, *small, *run)
        assert ("trace.rate=40 is the mean of trace.arrival=diurnal over all time" in said.out) is is_noted


def test_list_has_a_line_on_each_option(say: Say) -> None:
    out = say("list").out
    for group in ("scheduler", "trace", "model", "device", "cost", "experiment"):
        for name in options(group):
            lines = [line for line in out.splitlines() if line.split()[:1] == [name]]
            assert lines, f"{group}={name} is not listed"
            assert all(len(line.split()) > 2 for line in lines), f"{group}={name} is not described"


def test_list_of_one_group_and_of_none(say: Say) -> None:
    out = say("list", "cost").out
    assert "constant" in out
    assert "h100" not in out
    assert "device" in say("list", "devise").error()


def test_list_has_the_options_of_a_folder_of_ones_own(tmp_path: Path, say: Say) -> None:
    option(tmp_path, "cost/mine", "# By the phase of the moon.\n_target_: moon.Price\n")
    said = say("list", "cost", "--config-dir", str(tmp_path)).out
    assert said.splitlines()[-1].split(maxsplit=1) == ["mine", "By the phase of the moon."]
    assert "mine" not in say("list", "device", "--config-dir", str(tmp_path)).out
    assert "--config-dir is 'nowhere'; name a folder" in say("list", "--config-dir", "nowhere").error()


def test_trace_says_what_is_in_a_file(tmp_path: Path, say: Say) -> None:
    rows = [{"arrival_time": float(i), "prompt_tokens": 10, "output_tokens": 5} for i in (0, 2, 1)]
    said = say("trace", "jsonl", str(write_rows(tmp_path / "t.jsonl", rows))).success()
    assert "3 requests in 2.0 s" in said
    assert "out of order" in said


def test_trace_of_one_row_of_closed_loops_only_and_of_unknown_formats(tmp_path: Path, say: Say) -> None:
    path = write_rows(tmp_path / "t.jsonl", [{"arrival_time": 5, "prompt_tokens": 10}])
    assert "1 request in 0.0 s" in say("trace", "jsonl", str(path)).out
    assert "jsonl" in say("trace", "jsnol", str(path)).error()
    assert "t.jsonl" in say("trace", "azure", str(path)).error()
    assert "limit" in say("trace", "jsonl", str(path), "--limit", "0").error()


@pytest.mark.usefixtures("unrendered")
def test_report_of_runs_and_sweeps(tmp_path: Path, say: Say) -> None:
    more = (*TINY, *SHORT, f"hydra.sweep.dir={tmp_path / 's'}")
    say("run", "-m", *more, "scheduler=unified,decode_first", "seed=0,1").success()
    page = tmp_path / "page.html"
    said = say("report", str(tmp_path / "s"), "--out", str(page), "--title", "A <title>").success()
    assert str(page) in said
    text = page.read_text()
    assert "A &lt;title&gt;" in text
    assert "decode_first" in text
    assert 'src="http' not in text
    assert "--overwrite" in say("report", str(tmp_path / "s"), "--out", str(page)).error()
    say("report", str(tmp_path / "s"), "--out", str(page), "--overwrite").success()
    assert "nowhere" in say("report", str(tmp_path / "nowhere"), "--out", str(tmp_path / "b.html")).error()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("report", ""), "a name on the command line is empty"),
        (("report", "runs", "--slo", "ttft_s=1,ttft_s=2"), "gives one limit twice"),
        (("report", "runs", "--out", ""), "a name on the command line is empty"),
        (("report", "runs", "--baseline", ""), "a name on the command line is empty"),
        (("explain", " "), "a name on the command line is empty"),
        (("explain", "runs", "--keep", ""), "a name on the command line is empty"),
        (("timeline", "runs", ""), "a name on the command line is empty"),
        (("timeline", "runs", "--steps", "1:2", "--from", "0"), "--steps and --from or --to are two windows"),
        (("timeline", "runs", "--steps", "1:2", "--to", "3"), "--steps and --from or --to are two windows"),
    ],
)
def test_what_says_nothing_or_two_things_is_refused(
    say: Say, here: Path, arguments: tuple[str, ...],
    said: str,
) -> None:  # fmt: skip
    (here / "runs").mkdir()
    assert said in say(*arguments).error()


def test_bench_prints_what_the_scheduler_and_the_simulator_do_in_a_second(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"OUTPUT_TOKENS": 8, "NUM_SEQS": 32, "QUEUE_LENGTHS": (10,), "POOL_SIZES": (4000,)}.items():
        monkeypatch.setattr(f"experiments.bench.core.{name}", value)
    said = say("bench", "core", "--repeats", "1").success()
    assert "steps/s" in said
    assert compiled.describe() in said.splitlines()[0]
    monkeypatch.setattr("experiments.bench.simulator.POINT_REQUESTS", 60)
    shapes = simulator._shapes
    monkeypatch.setattr(simulator, "_shapes", lambda num_prefills: shapes(num_prefills)[:100])
    said = say("bench", "simulator", "--repeats", "1", "--rows", "60", "--requests", "90").success()
    assert "requests/s" in said
    for case in ("start-up: 1 request", "Azure-like, 60 ", "Azure-like, 60, interpreted", "generated, 90"):
        assert case in said
    assert "did you mean 'core'" in say("bench", "cor").error()
    assert "no file" in say("bench", "simulator", "--trace", "nowhere.csv").error()
    with pytest.raises(TestbedError, match=r"^trace.rate is 'x'; it must be a number$"):
        simulator._measure(["trace.rate=x"], {})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("core", "--repeats", "0"), "--repeats is 0; it must be at least 1"),
        (("simulator", "--repeats", "-1"), "--repeats is -1; it must be at least 1"),
        (("simulator", "--rows", "0"), "--rows is 0; it must be at least 2"),
        (("simulator", "--requests", "-5"), "--requests is -5; it must be at least 0"),
        (("observer", "--running", "4", "0"), "--running is 0; it must be at least 1"),
        (("observer", "--steps", "2001"), "--steps is 2001; the model has room for 2000"),
        (("observer",), "testbed bench observer runs in vLLM's environment: docs/vllm.md"),
    ],
)
def test_a_bench_of_less_than_nothing_is_refused(say: Say, arguments: tuple[str, ...], words: str) -> None:
    assert say("bench", *arguments).error() == words


def test_help(capsys: pytest.CaptureFixture[str], say: Say) -> None:
    assert "testbed <command>" in say("--help").out
    with pytest.raises(SystemExit):
        say("run", "--help")
    page = capsys.readouterr().out
    assert "hydra.run.dir" in page
    assert "device: a100, b200" in page  # and no schema that only files build on


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("report", "a", "--outt", "x"),
            "unrecognized arguments: --outt x; did you mean '--out'? `testbed report --help`",
        ),
        (("explain", "a", "--kep=x"), "unrecognized arguments: --kep=x; did you mean '--keep'? `testbed explain"),
        (("run", "--multirn"), "unrecognized arguments: --multirn; did you mean '--multirun'? `testbed run --help`"),
        (("run", "--scheduler", "orca"), "unrecognized arguments: --scheduler; settings are key=value, the folder is "),
        (("timeline",), "the following arguments are required: run"),
        (("capacity", "--jobs", "abc"), "--jobs is 'abc'; it must be a whole number"),
        (("demo", "foo"), "unrecognized arguments: foo; `testbed demo --help`"),
        (("generate", "--model", "tiny", "--max-tokens", "abc"), "--max-tokens is 'abc'; it must be a whole number"),
    ],
)
def test_every_command_refuses_its_arguments_in_one_line(say: Say, arguments: tuple[str, ...], said: str) -> None:
    refused = say(*arguments)
    assert refused.error().startswith(said)
    assert refused.status == 2


def test_the_version_is_one_line(say: Say) -> None:
    assert say("--version").out == describe_versions()["llm-serving-testbed"] + "\n"
    env = os.environ | {"GIT_DIR": "/nowhere"}  # as git sets it for a hook of another repository
    told = subprocess.run([sys.executable, "-m", "experiments", "--version"], env=env, capture_output=True, text=True)
    assert told.stdout == say("--version").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("sweep",), "there is no command 'sweep'; a sweep is `testbed run -m key=a,b`"),
        (("reprot",), "there is no command 'reprot'; did you mean 'report'? valid: run, "),
        (("compare",), "there is no command 'compare'; valid: run, "),  # nothing is near
        (("report", "afile"), "afile: a file; give a run folder"),
        (("report", ".", "--out", "/dev/null"), "/dev/null is a device or a pipe, and a report is several files; "),
        (("capacity", "slo.ttft_s=1", "--out", "afile"), "afile is no folder; choose another folder"),
        (("report", "nothere", "--out", "there.html"), "nothere: no such folder"),
        (("trace", "afile"), "afile is a file; say of what format: testbed trace inspect auto afile"),
        (("run", "trace.rate=1,2"), "trace.rate=1,2 has several values: add -m to run each of them, or put them in "),
        (("run", "trace=jsonl", "trace.path=afile"), "afile:1: not JSON: Unterminated string starting at column 7"),
        (("run", "scheduler.victim={_target_: bad_syntax.X}"), "scheduler.victim: cannot make 'bad_syntax.X': /"),
        (("run", "scheduler.victim={_target_: string.capword}"),
         "scheduler.victim: cannot make 'string.capword': string has no 'capword'; did you mean 'capwords'?"),
        (("run", "scheduler.victim={_target_: leaves.X}"), "scheduler.victim: 'leaves.X' ends Python (SystemExit 3)"),
        (("run", "scheduler.victim={_target_: nowhere.X}"),
         "scheduler.victim: cannot make 'nowhere.X': there is no module 'nowhere' in "),
        (("run", "scheduler.victim={_target_: inside.needy.X}"),
         "scheduler.victim: cannot make 'inside.needy.X': there is no module 'not_installed'; install it, or"),
        (("run", "cost=recorded", "cost.run=."), "no run at .: manifest.json is missing; name a folder that `testbed"),
        (("run", "from=."), "no run at .: config.yaml is missing; name a folder that `testbed run` wrote"),
        (("run", "cost=calibrated", "cost.path=."), "cost.path: . is a folder; name its calibration file; `testbed "),
        (("run", "cost=calibrated", "cost.path=afile"), "cost.path: afile is not JSON: Invalid control"),
        (("run", "cost=tables", "cost.path=."), ". is a folder, not a file; `testbed tables import` writes one"),
        (("run", "scheduler.victim={_target_: queue.X}"),
         "scheduler.victim: 'queue' is a module that is there already ("),
    ],
)  # fmt: skip
def test_a_mistake_is_called_what_it_is(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    say: Say,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.syspath_prepend(here)
    (here / "afile").write_text('{"a": "b\n')
    (here / "bad_syntax.py").write_text("def x(:\n")
    (here / "leaves.py").write_text("raise SystemExit(3)\n")
    (here / "there.html").touch()
    (here / "inside").mkdir()
    (here / "inside" / "needy.py").write_text("import not_installed\n")
    (here / "queue.py").write_text("class X: ...\n")
    error = say(*arguments).error()
    assert error.startswith(said)
    assert "installed?" not in error


def test_an_unknown_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["run", "-xy"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: unrecognized arguments: -xy\n"


def test_the_demo_of_a_machine_with_a_gpu_is_not_scaled_by_a_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    paces = []
    for device in ("cpu", "cuda"):
        monkeypatch.setattr("real.device.resolve_device", lambda name, of=device: SimpleNamespace(type=of))
        paces.append([one for one in demo_real._real_overrides(tmp_path, quick=True) if "pace" in one])
    assert paces == [["backend.pace=probe_scaled"], []]
    run: Any = SimpleNamespace(manifest={"replay": {"probe": None}})
    assert demo_real._scaled_by({"a policy": [run]}) == ""


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
def test_the_demo_makes_its_report(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two policies, one seed: the road of `make demo` from profile to page, not its numbers."""
    pytest.importorskip("torch")
    profile, overrides, run_point = demo_real.profile, demo_real._real_overrides, demo_real.run_point
    grid, loads = calibrate._grid, calibrate._loads
    few: dict[str, Any] = {
        "experiments.demo.command.SCHEDULERS": {"prefill_first": None, "decode_first": 512},
        "experiments.demo.command.WATERMARKS": (0.0,),
        "experiments.demo.command.CACHING": (True,),
        "experiments.demo.command.SEEDS": (0,),
        "experiments.demo.command.OTHER_RATES": (),
        "experiments.demo.command.run_point": lambda point, folder: run_point(
            [*point, "trace.num_requests=40"], folder
        ),
        "experiments.demo.command.too_noisy": lambda noise, is_scaled: ["The machine was too noisy."],
        "experiments.demo.command.RATE_SCALES": (4.0,),
        "experiments.demo.command.profile": lambda config, extent: profile(
            config, replace(extent, repeats=1, num_requests=2, max_s=300.0)
        ),
        "experiments.calibration.calibrate._grid": lambda *measured: grid(*measured)[::8],
        "experiments.calibration.calibrate._loads": lambda *measured: loads(*measured)[:1],
        "experiments.demo.command._real_overrides": lambda model, quick: [
            *overrides(model, quick=quick),
            "trace.limit=6",
            "trace.max_output_tokens=16",
        ],
    }
    for name, value in few.items():
        monkeypatch.setattr(name, value)
    said = say("demo", "--quick", "--out", str(tmp_path / "demo")).success()
    text = (tmp_path / "demo" / "report.html").read_text()
    assert str(tmp_path / "demo" / "report.html") in said
    first, real, last = (said.index(f"\n{word}") for word in ("report ", "replaying ", "checked "))
    assert first < real < last < said.rindex("\nreport "), "a page without the real engine comes first"
    assert "replayed    The machine was too noisy.\n" in said
    decisions = re.search(r"Every decision of 4 real runs replayed through the simulator: identical, \d+ steps", said)
    assert decisions
    assert decisions[0] in text
    other = DivergedError(7, None, None, "a mutant")
    monkeypatch.setattr("experiments.demo.command.check_parity", lambda folder: ParityReport(7, 0, other))
    with pytest.raises(FailedError, match=r"otherwise at step 7: see `testbed parity .*real/pre"):
        demo_real.same_decisions([load_run(next((tmp_path / "demo" / "real").glob("prefill*")))])
    assert "data:image/" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "not empty" in say("demo", "--quick", "--out", str(tmp_path / "demo")).error()
