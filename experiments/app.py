"""`testbed run`: the Hydra app around `experiments.run.execute`."""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from contextlib import redirect_stderr
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from experiments.compose import checked, compose_from, compose_raw, in_one_line, literal
from experiments.config import RunConfig, read_config, register
from experiments.environment import ask_early
from experiments.messages import read_own_options
from experiments.run import INTERRUPTED, RunResult, execute
from experiments.run_folder import TRACE_FILE, named_folder
from testbed.errors import ConfigError, TestbedError


class RunFailedError(TestbedError):
    """A run ended partial, or with requests that could never fit; its folder says more."""


def run_app(arguments: list[str]) -> int:
    """Runs `testbed run <arguments>`; returns the exit status. Raises TestbedError in one line."""
    arguments = [_with_quotes(item) for item in arguments]
    sources = [item for item in arguments if item.startswith("from=")]
    if sources:
        return _run_from(sources[-1][5:], [item for item in arguments if not item.startswith("from=")])
    plain = _plain(arguments)
    if plain is not None:
        config, folder = plain
        _finish(execute(config, folder, command=shlex.join(["testbed", "run", *arguments])))
        return 0
    may_be_sweep = ("-m", "--multirun", "hydra.mode=MULTIRUN")
    if any(item in may_be_sweep or item.startswith("experiment=") for item in arguments):  # an overlay may say so
        from experiments.sweep import run_sweep  # not at the top: a single run needs nothing of it

        read_own_options(arguments)
        if run_sweep(arguments):
            return 0
    register()
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    flags = [item for item in arguments if item in ("-m", "--multirun")]  # argparse wants them before the overrides
    sys.argv = ["testbed run", *flags, *(item for item in arguments if item not in flags)]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us instead of being printed
    try:
        read_own_options(arguments)
        with in_one_line(arguments), redirect_stderr(_WithoutFraming(sys.stderr)):
            hydra.main(version_base="1.3", config_path="conf", config_name="config")(_job)()
    except ValueError as error:
        if not str(error).startswith("Only one of --run"):
            raise
        raise ConfigError("-m, --cfg, --info and --shell-completion ask for different things; give one") from None
    finally:
        sys.argv = before[0]
        if before[1] is None:
            del os.environ["HYDRA_FULL_ERROR"]
    return 0


def _with_quotes(argument: str) -> str:
    """A folder as the shell gives it: Hydra's grammar has neither parentheses nor a comma outside quotes."""
    key, _, value = argument.partition("=")
    is_folder = key in ("hydra.run.dir", "hydra.sweep.dir") and "${" not in value
    return f"{key}={literal(value)}" if is_folder and re.match(r"[^'\"].*[^\w\s./-]", value) else argument


def _plain(arguments: list[str]) -> tuple[RunConfig, Path] | None:
    """Configuration and folder of a single run that asks nothing else of Hydra; None: it is Hydra's to run.

    Hydra's own app composes the configuration twice (once to see whether it is a sweep) and copies it three times.
    """
    keys = [item.partition("=")[0] for item in arguments if "=" in item]
    is_of_hydra = any(key.lstrip("+~").startswith(("-", "hydra")) and key != "hydra.run.dir" for key in keys)
    if len(keys) < len(arguments) or is_of_hydra:
        return None
    ask_early()
    raw = compose_raw(arguments, with_hydra=True)
    of_hydra = raw.pop("hydra")
    job = of_hydra["job"]
    if of_hydra["mode"] not in (None, RunMode.RUN) or of_hydra["callbacks"] or job["env_set"] or job["chdir"]:
        return None  # the configuration itself wants it
    return checked(arguments, RunConfig.from_container(raw)), named_folder("hydra.run.dir", of_hydra["run"]["dir"])


class _WithoutFraming(io.TextIOBase):
    """Standard error without Hydra's line before an error of ours and without usage: one line says it better."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if not text.startswith(("Error executing job with overrides", "usage: ")):
            self._stream.write(text.removeprefix("testbed run: "))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def _job(node: DictConfig) -> dict[str, Any] | None:
    """What only Hydra's own app runs: a run or a point with callbacks, another sweeper, a working folder of its own.

    Of a sweep's failures only the first is raised: each is printed.
    """
    try:
        return _run_point(node)
    except TestbedError as error:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            print(f"failed       {HydraConfig.get().runtime.output_dir}: {error}")
        raise


def _run_point(node: DictConfig) -> dict[str, Any] | None:
    register()  # a launcher may have started this process
    raw = OmegaConf.to_container(node, resolve=True)
    assert isinstance(raw, dict)
    info = HydraConfig.get()
    config = checked(info.overrides.task, RunConfig.from_container({str(key): value for key, value in raw.items()}))
    is_sweep = info.mode is RunMode.MULTIRUN
    named_folder("hydra.sweep.dir" if is_sweep else "hydra.run.dir", info.sweep.dir if is_sweep else info.run.dir)
    folder: Path | None = Path(info.runtime.output_dir)
    if is_sweep:
        folder = _place_of_point(config, Path(info.runtime.output_dir), info.sweep.subdir != ".")
    if folder is None:
        return None
    # a point of a sweep is reproduced by itself: the sweep's own folder and mode would make it job 0 of another
    of_hydra = [] if is_sweep else info.overrides.hydra
    command = shlex.join(["testbed", "run", *of_hydra, *info.overrides.task])
    return _finish(execute(config, folder, command=command))


def _place_of_point(config: RunConfig, folder: Path, is_named: bool) -> Path | None:
    """Where a point is run that Hydra's own app has come to, what is in its way set aside; None: it was run before."""
    from experiments.identity import identity_of
    from experiments.points import Known, holds_another, is_done, refuse_others  # not at the top, as above

    identity = identity_of(config)
    folder = folder if is_named else folder / identity.name
    if config.overwrite:
        return folder
    if is_done(folder, identity):
        print(f"done before  {folder}")
        return None
    refuse_others([folder] if holds_another(folder, config) else [])
    for why, place in Known(folder.parent).make_room(folder, identity):
        print(f"set aside    ({why}): {place}")
    return folder


def _finish(result: RunResult) -> dict[str, Any]:
    """Prints what came out; raises RunFailedError when the exit status must not be 0."""
    from experiments.listing import print_summary

    print_summary(result)
    if result.exit_status:
        error = RunFailedError(result.message)
        error.exit_status = result.exit_status
        if result.exit_status == INTERRUPTED:
            raise KeyboardInterrupt(result.message)
        raise error
    if result.message:
        print(f"note: {result.message}", file=sys.stderr)
    return result.summary


def _with_its_trace(raw: dict[str, Any], source: Path) -> dict[str, Any]:
    """The configuration of a folder that was moved since: a trace that it holds itself is still found."""
    path = raw.get("trace", {}).get("path")
    kept = source.absolute() / TRACE_FILE
    if path is not None and Path(path).name == TRACE_FILE and not Path(path).exists() and kept.exists():
        raw["trace"]["path"] = str(kept)
    return raw


def config_from(source: Path, overrides: list[str]) -> RunConfig:
    """The configuration of a run's folder, checked as any other, with overrides laid over it."""
    return compose_from(_with_its_trace(read_config(source), source), overrides)


def _run_from(source: str, overrides: list[str]) -> int:
    """Repeats the run of a folder, with the overrides laid over its configuration."""
    if not source:
        raise ConfigError("from= needs the folder of a run")
    folder = Path("runs", datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f"))
    kept = []
    for item in overrides:
        key, equals, value = item.partition("=")
        if not equals or key.startswith(("-", "+", "~")):
            raise ConfigError(f"{item!r}: after from=<folder> give plain key=value pairs")
        if key == "hydra.run.dir":
            folder = named_folder(key, value.strip("'\""))
        else:
            kept.append(item)
    config = config_from(Path(source), kept)
    command = shlex.join(["testbed", "run", f"from={source}", *overrides])
    _finish(execute(config, folder, command=command))
    return 0
