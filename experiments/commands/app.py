"""`testbed run`: reads the command line and calls `experiments.runs.run.execute`. Sweeps: experiments/sweeps/sweep.py.

A single run that uses only our own options is composed directly, like sweep points, capacity searches and runs from
Python. A run that needs more of Hydra (its flags and keys, overlays, interpolation) is a job of Hydra's app.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig

from experiments.configuration.compose import check_values, compose_config, compose_from, hydra_app, in_one_line
from experiments.configuration.config import RunConfig, register
from experiments.configuration.grammar import is_text, literal, parsed, quoted, readable
from experiments.configuration.on_device import slow_engine
from experiments.configuration.options import OVERLAYS
from experiments.configuration.overrides import (
    file_of_swept,
    for_hydra,
    is_sweep,
    refuse_repeated,
    refuse_swept,
    searched,
    with_searched,
    with_swept,
)
from experiments.configuration.saved import is_copy, read_config, read_manifest, unlike_the_engine
from experiments.console import UsageError, go_on_unheard
from experiments.runs.environment import ask_early
from experiments.runs.origin import Origin, kept_in
from experiments.runs.repeat import measured_anew, repeating, same_decisions
from experiments.runs.run import INTERRUPTED, FailedError, RunResult, execute
from experiments.runs.run_folder import check_priced, named_folder
from experiments.wiring.own_reports import check_reports
from hydra_plugins.testbed_sweeper import PointsSweeper
from testbed.errors import ConfigError, RunFolderError
from testbed.foreign_text import nearest
from testbed.routing.config import FLEET_KEYS


def run_app(arguments: list[str]) -> int:
    """Runs `testbed run <arguments>` and returns the exit status. Raises TestbedError with a one-line message."""
    for item in arguments:
        if any(0xDC80 <= ord(letter) <= 0xDCFF for letter in item):  # surrogates: bytes that could not be decoded
            raise ConfigError(f"{item!r} is not UTF-8; give it in that encoding, in a UTF-8 locale")
    arguments = [one for item in with_searched(arguments) for one in _apart(_with_quotes(item))]
    refuse_repeated(arguments)
    sources = [item for item in arguments if item.startswith("from=")]
    if sources:
        return _run_from(sources[-1][5:], [item for item in arguments if not item.startswith("from=")])
    ask_early()
    flags, overrides = _split(arguments)
    if not flags and not any(map(_is_hydras, overrides)):
        return _run_alone(overrides)
    sweeps, keys, job, composed = False, None, _Job(overrides), overrides
    if not _UNCHECKED.intersection(item.partition("=")[0] for item in flags):
        sweeps = any(item in _SWEEPS for item in arguments) or is_sweep(overrides)
        if sweeps and not any(item in _SWEEPS for item in flags):
            flags.append("-m")  # before Hydra composes: it rejects several values of `experiment` without this flag
        swept = with_swept(overrides) if sweeps else overrides
        with file_of_swept(swept):
            keys = check_values(swept, is_sweep=sweeps)
        composed = for_hydra(overrides, keys)
    _check_hydras(overrides)
    register()
    Plugins.instance().register(PointsSweeper)  # Hydra's plugin search does not find it in an editable installation
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["testbed run", *flags, *composed]  # argparse wants flags first
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us instead of being printed
    try:
        with in_one_line(overrides, keys), redirect_stderr(cast(TextIO, _WithoutFraming(sys.stderr))):
            if {*flags} <= {*_SWEEPS}:
                _run_hydras("MULTIRUN" if sweeps else "RUN", composed, job)
            else:  # most of these flags show something instead
                hydra.main(version_base="1.3", config_path="pkg://experiments.conf", config_name="config")(job)()
    finally:
        sys.argv = before[0]
        if before[1] is None:
            del os.environ["HYDRA_FULL_ERROR"]
    return 0


def _run_hydras(mode: str, overrides: list[str], job: _Job) -> None:
    """Runs the job as `hydra.main` does, which composes the configuration once more to find out the mode."""
    given = [item for item in overrides if item not in ("hydra.mode=RUN", "hydra.mode=MULTIRUN")]
    with hydra_app() as app:
        (app.run if mode == "RUN" else app.multirun)("config", job, [*given, f"hydra.mode={mode}"])


def _apart(argument: str) -> list[str]:
    """Returns hydra={run: {dir: a}} as hydra.run={dir: a}, which Hydra knows as a key of its own; else the argument."""
    value = parsed(argument).value() if argument.lstrip("+").startswith("hydra={") else None
    return [f"hydra.{key}={literal(one)}" for key, one in value.items()] if isinstance(value, dict) else [argument]


def _check_hydras(overrides: Sequence[str]) -> None:
    """Raises ConfigError for what Hydra refuses with a stack trace: hydra=<one value>, and variables that are not set
    in hydra.job.env_copy."""
    for item in map(parsed, overrides):
        if item.key_or_group == "hydra":
            raise ConfigError(f"{item.input_line}: name one of Hydra's keys, as hydra.sweep.dir=<folder>")
        if item.key_or_group not in ("hydra.job", "hydra.job.env_copy") or item.is_sweep_override():
            continue
        value = item.value()
        if item.key_or_group == "hydra.job":
            value = value.get("env_copy", []) if isinstance(value, dict) else []
        if not isinstance(value, list):
            raise ConfigError(f"{item.input_line}: write out the list of variables, as [HOME,USER]")
        for name in value:
            if str(name) not in os.environ:
                raise ConfigError(f"hydra.job.env_copy names {name!r}, which is not set; set it, or leave it out")


def _is_hydras(override: str) -> bool:
    """Whether an override needs Hydra's app: it does more than set one of our keys or choose one of our options."""
    key = override.partition("=")[0]
    return (key.lstrip("+~").startswith(("hydra", OVERLAYS)) and key != RUN_DIR) or "@" in key or "${" in override


def _run_alone(overrides: list[str]) -> int:
    folder, of_hydra, kept = _placed(overrides)
    command = shlex.join(["testbed", "run", *of_hydra, *kept])
    _finish(_execute(compose_config(kept), folder, command, kept))
    return 0


def _execute(config: RunConfig, folder: Path, command: str, given: list[str]) -> RunResult:
    check_reports(config)
    for said in slow_engine(config):
        print(f"note         {said}", flush=True)
    return execute(config, folder, command=command, origin=Origin.of(given))


def _placed(overrides: list[str]) -> tuple[Path, list[str], list[str]]:
    """Returns the run folder, the overrides that set it, and all other overrides."""
    of_hydra = [item for item in overrides if item.partition("=")[0] == RUN_DIR]
    folder = Path("runs", datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f"))
    for item in of_hydra:
        folder = named_folder(RUN_DIR, parsed(item).value())
    return folder, of_hydra, [item for item in overrides if item not in of_hydra]


RUN_DIR = "hydra.run.dir"
_OF_SWEEPS = ("hydra.sweep", "hydra/sweep", "hydra.launcher", "hydra/launcher")
_SWEEPS = ("-m", "--multirun", "hydra.mode=MULTIRUN")
_PRIMARY = ("--config-path", "-cp", "--config-name", "-cn")  # choose another primary configuration: rejected
_WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--info", "-i", "--experimental-rerun")
_UNCHECKED = {"--shell-completion", "-sc"}  # their key=value pairs are not keys of the configuration
_ACTIONS = ("-m", "--multirun", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")
_FLAGS = (  # Hydra's
    *("--help", "--hydra-help", "--version", "--resolve", "--run", "--config-dir"), *_PRIMARY, *_WITH_VALUE, *_ACTIONS
)  # fmt: skip


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns Hydra's flags with their values, and the overrides. Raises ConfigError for unknown flags and for flags
    that exclude each other."""
    flags: list[str] = []
    overrides: list[str] = []
    for item in arguments:
        is_value = bool(flags) and flags[-1] in _WITH_VALUE and "=" not in item
        (flags if item.startswith("-") or is_value else overrides).append(item)
        name = item.partition("=")[0]
        if name.startswith("--") and not any(flag.startswith(name) for flag in _FLAGS):  # abbreviations are accepted
            hint = nearest(name, _FLAGS) or "settings are key=value, the folder is hydra.run.dir=<folder>; "
            raise UsageError(f"unrecognized arguments: {item}; {hint}`testbed run --help` lists what there is")
    if others := [item for item in flags if item.partition("=")[0] in _PRIMARY]:
        raise ConfigError(
            f"{others[0]}: a run has one configuration; options of your own, as experiment/mine.yaml, go into a folder "
            "that --config-dir names"
        )
    actions = [item for item in flags if item.partition("=")[0] in _ACTIONS]
    if len(actions) > 1:
        raise ConfigError(f"{' and '.join(actions)} ask for different things; give one")
    return flags, overrides


def _with_quotes(argument: str) -> str:
    """Quotes an argument from the shell for Hydra's grammar, which allows few characters outside quotes. In a folder
    name a comma does not sweep and digits are not a number. Expands ~, which the shell expands only at the beginning
    of a word."""
    key, equals, value = argument.partition("=")
    if key in (RUN_DIR, "hydra.sweep.dir") and equals:
        named_folder(key, value.strip("'\""))
        if value[0] not in "'\"[{" and "${" not in value and value != "null":
            value = os.path.expanduser(value)
            return f"{key}={value}" if is_text(f"{key}={value}", value) else f"{key}={quoted(value)}"
    return argument if argument.startswith(("-", "from=")) else readable(argument)


class _WithoutFraming:
    """Standard error without the line that Hydra prints before an error, and without its usage text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if not text.startswith(("Error executing job with overrides", "usage: ")):
            self._stream.write(text.removeprefix("testbed run: "))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@dataclass(frozen=True)
class _Job:
    """What Hydra calls for a single run. Ours is the only sweeper: it calls nothing for a point. overrides: as the
    command has them."""

    overrides: list[str]

    @property
    def of_hydra(self) -> list[str]:
        return [item for item in self.overrides if re.match(r"\+*hydra[./]", item)]

    @property
    def of_run(self) -> list[str]:
        return [item for item in self.overrides if item not in self.of_hydra]

    def __call__(self, node: DictConfig) -> dict[str, Any]:
        info = HydraConfig.get()
        folder = Path(info.runtime.output_dir)
        try:
            if info.mode is RunMode.MULTIRUN:
                raise ConfigError(
                    "the points of a sweep are found by hydra/sweeper=testbed alone: leave another one out"
                )
            return _run_once(node, folder, self.of_hydra, self.of_run)
        finally:
            with suppress(OSError):
                folder.rmdir()  # Hydra made it; remove it if it is empty


def _run_once(node: DictConfig, folder: Path, of_hydra: list[str], given: list[str]) -> dict[str, Any]:
    if stray := next((key for key in map(str, node) if key.startswith("hydra/")), ""):
        raise ConfigError(f"{stray} is no group of Hydra's own, nor one in a folder of --config-dir; leave it out")
    if of_sweeps := [item for item in of_hydra if parsed(item).key_or_group.startswith(_OF_SWEEPS)]:
        print(f"note: without effect on a single run: {', '.join(of_sweeps)}; -m makes it a sweep", file=sys.stderr)
    refuse_swept(own := [*searched(of_hydra), *given])
    return _finish(_execute(compose_config(own), folder, shlex.join(["testbed", "run", *of_hydra, *given]), given))


def _finish(result: RunResult) -> dict[str, Any]:
    """Prints the result. Raises FailedError if the exit status must not be 0."""
    from experiments.commands.listing import print_summary

    try:
        print_summary(result)
        print(end="", flush=True)
    except BrokenPipeError:  # `| head`: the verdict is still to come
        go_on_unheard()
    if result.exit_status == INTERRUPTED:
        raise KeyboardInterrupt(result.message)
    if result.exit_status:
        raise FailedError(result.message, result.exit_status)
    if result.message:
        print(f"note: {result.message}", file=sys.stderr)
    return result.summary


def config_from(source: Path, overrides: list[str]) -> RunConfig:
    """Returns the configuration of a run folder with overrides applied, checked like any other configuration."""
    if is_copy(source) and {"trace", "trace.path"}.isdisjoint(item.partition("=")[0] for item in overrides):
        raise RunFolderError(
            f"{source} has a measured run's records, and no trace: repeat its simulation, which has both: testbed run "
            f"from={shlex.quote(str(source.parent / 'simulated'))}"
        )
    saved = read_config(source)
    added = [
        *_replicas_of(saved["backend"], overrides),
        *_pool_of(source, saved, overrides),
        *_speed_of(saved, overrides),
    ]
    config = compose_from(saved, [*overrides, *added])
    check_priced(source, config, overrides)
    if said := unlike_the_engine(saved, config):
        print(f"note: {said}", file=sys.stderr)
    return config


def _pool_of(source: Path, saved: dict[str, Any], overrides: list[str]) -> list[str]:
    """Returns an override that gives a simulation the KV blocks that the saved real engine had, unless they are given,
    or the simulation is of another model, device or cache."""
    is_real = saved["backend"].get("name") == "real" and "backend=sim" in overrides
    is_other = any(item.startswith(("model", "device", "cache")) for item in overrides)
    if not is_real or is_other or saved["cache"].get("num_gpu_blocks") is not None:
        return []
    num_blocks = read_manifest(source).get("num_gpu_blocks")
    return [f"cache.num_gpu_blocks={num_blocks}"] if num_blocks else []


def _speed_of(saved: dict[str, Any], overrides: list[str]) -> list[str]:
    """Returns an override that gives a simulation the speed of the saved replay as a transform of the trace, unless the
    trace is another, its transforms are given, or the tape is replayed, which has the arrivals of the run."""
    speed, keys = saved["backend"].get("speed", 1.0), [item.partition("=")[0] for item in overrides]
    is_given = any(key in ("trace", "trace.name", "trace.path") or key.startswith("trace.transforms") for key in keys)
    is_tape = {"cost=recorded", "cost.name=recorded"}.intersection(overrides)
    if "backend=sim" not in overrides or speed == 1 or is_given or is_tape:
        return []
    if "transforms" not in saved["trace"]:  # of a class of the user's own
        print(f"note: simulated at speed 1 and not {speed:g}: a trace of your own has no transforms", file=sys.stderr)
        return []
    faster = [*saved["trace"]["transforms"], {"name": "speed_up", "factor": speed}]
    return [f"trace.transforms={literal(faster)}"]


def _replicas_of(saved: dict[str, Any], overrides: list[str]) -> list[str]:
    """Returns overrides that keep the saved replicas and their router when the backend changes, unless given."""
    keys = [item.partition("=")[0] for item in overrides]
    if not {"backend=sim", "backend=real"}.intersection(overrides) or saved.get("num_replicas", 1) == 1:
        return []
    names = [name for name in FLEET_KEYS if f"backend.{name}" not in keys]
    return [f"backend.{name}={literal(saved[name])}" for name in names]


def _run_from(source: str, overrides: list[str]) -> int:
    """Repeats the run of a folder with overrides applied to its configuration."""
    source = str(parsed(f"from={source}").value()) if source.startswith(("'", '"')) else source
    source = os.path.expanduser(source)
    if not source:
        raise ConfigError("from= needs the folder of a run")
    for item in overrides:
        key, equals, _ = item.partition("=")
        if not equals or key.startswith(("-", "+", "~")):
            raise ConfigError(f"{item!r}: after from=<folder> give plain key=value pairs")
        if key == OVERLAYS:
            raise ConfigError(f"from= and {item} both say what is run; leave one out")
        if key == RUN_DIR and "${" in item:
            raise ConfigError(f"{item}: after from=<folder> a folder's name is plain text; write it out")
        if parsed(item).is_sweep_override():
            raise ConfigError(f"{item} has several values, and from=<folder> repeats one run: give one of them")
    folder, _, kept = _placed(overrides)
    config, before = config_from(Path(source), kept), read_manifest(Path(source))
    is_changed = any(not item.startswith("overwrite=") for item in kept)
    if not is_changed and (said := measured_anew(Path(source), before, config)):
        print(said, flush=True)
    command = shlex.join(["testbed", "run", f"from={source}", *overrides])
    is_other = any(item.startswith("trace") for item in kept)  # then it is not the run that has a wrong trace
    with nullcontext() if is_other else repeating(Path(source)):
        result = _execute(config, folder, command, [*kept_in(Path(source)), *kept])
    is_moved = all(item.startswith(("overwrite=", "trace.path=")) for item in kept)
    if is_moved and (said := same_decisions(Path(source), before, result.manifest)):
        print(said)
    _finish(result)
    return 0
