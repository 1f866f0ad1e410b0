"""The command line of `testbed calibrate`: profiles the real engine and fits its step times."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from experiments.calibration.calibrate import (
    FIT_FILE,
    PROFILE_FILE,
    QUICK,
    Extent,
    Measurement,
    describe,
    fit_and_save,
    measure_profile,
)
from experiments.commands.listing import clock_line
from experiments.configuration.compose import compose_config
from experiments.configuration.on_device import slow_engine
from experiments.configuration.overrides import refuse_repeated, with_searched
from experiments.configuration.saved import read_manifest
from experiments.console import Parser
from experiments.runs.run import INTERRUPTED
from experiments.runs.run_folder import refuse_existing, require_writable
from experiments.wiring.build_engine import real_packages
from sim.cost.calibrated import Quality
from sim.cost.calibration import calibrate
from sim.cost.calibration_file import save_calibration
from sim.cost.config import CalibratedConfig
from testbed.checks import require, require_whole
from testbed.errors import ConfigError, ProfileError, RunFolderError
from testbed.records.schema import POOR_FIT
from testbed.specs.profiles import Profile, read_profile, write_profile


def main(arguments: list[str]) -> int:
    arguments = with_searched(arguments)
    command = arguments[0] if arguments and arguments[0] in _COMMANDS else "all"
    options = _parser(command).parse_intermixed_args(arguments if command == "all" else arguments[1:])
    if command != "all":
        refuse_existing(options.out, options.overwrite)
    return _COMMANDS.get(command, _all)(options, shlex.join(["testbed", "calibrate", *arguments]))


def _parser(command: str) -> argparse.ArgumentParser:
    name = "testbed calibrate" if command == "all" else f"testbed calibrate {command}"
    parser = Parser(
        name,
        description={
            "all": "Profile the real engine, fit cost=calibrated to it, write both into a folder.",
            "profile": "Run the real engine over a grid of steps and ordinary loads; write what steps took.",
            "fit": "Fit cost=calibrated to a profile, cross-validate, write the fit.",
        }[command],
        epilog="Parts of it: `testbed calibrate profile`, `testbed calibrate fit`." if command == "all" else None,
    )
    if command == "fit":
        parser.add_argument("profile", type=Path, help="a profile's .parquet (docs/calibration.md)")
        parser.add_argument("--out", type=Path, help="where to write the fit (.json), for cost.path")
        parser.add_argument("--folds", type=int, default=5, help="of the cross-validation (5)")
    else:
        parser.add_argument("overrides", nargs="*", help="key=value pairs, as of `testbed run`")
        parser.add_argument("--quick", action="store_true", help="a coarse grid, each step twice, small loads")
        parser.add_argument("--repeats", type=int, help="of each step of the grid (3; quick: 2)")
        parser.add_argument("--requests", type=int, help="of the largest ordinary load; 0: none (24; quick: 10)")
        parser.add_argument("--max-seconds", type=float, help="end then, with what there is (540)")
        parser.add_argument(
            "--out", type=Path, required=command == "profile",
            help="where to write the profile (.parquet)" if command == "profile"
            else "folder of profile and fit (runs/calibration-<model>-<time>)",
        )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    return parser


def _fit(options: argparse.Namespace, command: str) -> int:
    require_whole("--folds", options.folds, 2, 20)
    calibration = calibrate(_profile_at(options.profile), options.folds)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        save_calibration(calibration, options.out)
    print(describe(calibration))
    _doubt(quality := calibration.quality["all"])
    if options.out is not None:
        print(f"wrote {options.out}; use it {_caveat(quality)}with cost=calibrated cost.path={options.out}")
    return 0


def _profile_at(file: Path) -> Profile:
    """Reads a profile. Raises ProfileError if there is none, with the reason if a run in vLLM could not write one."""
    why = None if file.exists() else read_manifest(file.parent).get("no_profile")
    if why:
        raise ProfileError(f"no profile at {file}: the run there left none ({why})")
    return read_profile(file)


def _profile(options: argparse.Namespace, command: str) -> int:
    measurement = _measure(options, command, _extent(options), options.out.parent)
    write_profile(options.out, *measurement.profile)
    print(_written(options.out, measurement.profile))
    return _ending(measurement)


def _all(options: argparse.Namespace, command: str) -> int:
    for item in options.overrides:
        if "=" not in item:
            raise ConfigError(f"`testbed calibrate {item}`: expected key=value pairs, or one of {', '.join(_COMMANDS)}")
    extent = _extent(options)
    folder: Path = options.out or _default_folder(options.overrides)
    if folder.is_file():
        raise RunFolderError(f"{folder} is a file, and --out names a folder of profile and fit; choose another")
    if folder.exists() and any(folder.iterdir()) and not options.overwrite:
        raise RunFolderError(f"{folder} is not empty; choose another --out or pass --overwrite")
    measurement = _measure(options, command, extent, folder)
    file = folder / PROFILE_FILE
    write_profile(file, *measurement.profile)  # before the fit, which may reject an incomplete profile
    print(_written(file, measurement.profile))
    try:
        fitted = fit_and_save(measurement.profile, folder)
    except ProfileError as error:
        if not (status := _ending(measurement)):
            raise
        print(f"no fit       {error}")
        return status
    print(describe(fitted.calibration))
    print(f"fit          {folder / FIT_FILE}")
    _doubt(quality := fitted.calibration.quality["all"])
    simulation = shlex.join(_simulation(options.overrides, measurement, fitted.overrides))
    print(f"simulate     {_caveat(quality)}{simulation}")
    return _ending(measurement)


_COMMANDS: dict[str, Callable[[argparse.Namespace, str], int]] = {"fit": _fit, "profile": _profile}


def _default_folder(overrides: list[str]) -> Path:
    name = compose_config(["backend=real", *overrides]).model.name
    return Path("runs", f"calibration-{name}-{time.strftime('%Y-%m-%d-%H-%M-%S')}")


def _extent(options: argparse.Namespace) -> Extent:
    """The extent from the options. Raises ConfigError for invalid values."""
    given = {"repeats": options.repeats, "num_requests": options.requests, "max_s": options.max_seconds}
    known = {name: value for name, value in given.items() if value is not None}
    extent = replace(QUICK if options.quick else Extent(), **known)
    require_whole("--repeats", extent.repeats, 1, 100)
    if extent.num_requests:
        require_whole("--requests", extent.num_requests, 4, 10_000, also=", or 0 for no loads")
    require("--max-seconds", extent.max_s, extent.max_s > 0, "a finite number above 0")
    return extent


def _measure(options: argparse.Namespace, command: str, extent: Extent, folder: Path) -> Measurement:
    """Measures a profile. folder: where it will be written. Raises ConfigError if there is no real engine to measure,
    or no step was measured."""
    refuse_repeated(options.overrides)
    config = compose_config(["backend=real", *options.overrides])
    if not config.is_real:
        raise ConfigError("only the real engine can be profiled: leave backend out, or set backend=real")
    if isinstance(config.cost, CalibratedConfig) and config.cost.path is None:
        raise ConfigError(
            "cost=calibrated: that is the fit that `testbed calibrate` makes; leave cost out here, and give the fit to "
            "`testbed run` as cost.path"
        )
    require_writable(folder)
    with real_packages("testbed calibrate"):
        import_module("real.backend")
    for said in slow_engine(config):
        print(f"note         {said}", flush=True)
    weights_gb = config.model.weight_bytes(config.tensor_parallel_size) / 1e9
    print(
        f"profile      {config.model.name}, {weights_gb:.3g} GB of weights: they are made or read first, then steps "
        f"are measured for at most {extent.max_s:.0f} s (--max-seconds)",
        flush=True,
    )
    measurement = measure_profile(config, extent, command=command, say=partial(print, flush=True))
    if not measurement.profile.steps:
        raise ConfigError(f"nothing was measured: {measurement.profiled.ended_by}; raise --max-seconds")
    return measurement


def _written(file: Path, profile: Profile) -> str:
    num_shapes = len({step.shape for step in profile.steps})
    return f"wrote {file}: {len(profile.steps):,} steps of {num_shapes:,} shapes on {profile.manifest.device}"


def _is_poor(quality: Quality) -> bool:
    """Whether the fit is too far off to compare policies by it."""
    return quality.median > POOR_FIT


def _caveat(quality: Quality) -> str:
    return "(only to try it out: with this error it compares no policies) " * _is_poor(quality)


def _doubt(quality: Quality) -> None:
    if not _is_poor(quality):
        return
    noise = "" if quality.noise is None else f", and repeats of one shape differ by {quality.noise:.0%}"
    print(
        "note         LARGE ERROR: steps left out of the calibrated fit are "
        f"{quality.median:.0%} off in the median{noise}; measure again while nothing else uses the machine "
        "or its GPU (backend.pace=probe_scaled on a shared CPU)"
    )


def _ending(measurement: Measurement) -> int:
    """Prints the clock, and a note if the profile is incomplete; returns the exit status."""
    profiled = measurement.profiled
    if measurement.clock is not None:
        print(clock_line(measurement.clock))
    if profiled.ended_by is None:
        return 0
    print(
        f"note         the profile is a part: {profiled.ended_by} after {profiled.num_units:,} of "
        f"{profiled.num_wanted:,} episodes, which came in random order"
    )
    return INTERRUPTED if profiled.is_interrupted else 0


def _simulation(overrides: list[str], measurement: Measurement, fitted: list[str]) -> list[str]:
    """The command that simulates the profiled engine with the fitted cost model."""
    manifest = measurement.profile.manifest
    is_of_files = compose_config(["backend=real", *overrides]).model.path is not None  # then they give the dtype
    dtype = [] if is_of_files or manifest.dtype == manifest.model["dtype"] else [f"model.dtype={manifest.dtype}"]
    fixed = [f"device={manifest.device}", *dtype, *fitted, f"cache.num_gpu_blocks={measurement.num_gpu_blocks}"]
    made = dict.fromkeys(fixed)
    keys = {item.partition("=")[0] for item in made}
    given = {item: item.lstrip("+").partition("=")[0] for item in overrides}
    kept = [item for item, key in given.items() if not key.startswith("backend") and key not in keys]
    return ["testbed", "run", *kept, *made]
