"""`testbed calibrate`: a profile of the real engine, and a cost model fitted to it."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from testbed.errors import ConfigError, RunFolderError


def main(arguments: list[str]) -> int:
    """Returns the exit status. Raises TestbedError in one line."""
    parser = argparse.ArgumentParser("testbed calibrate", description="Prices for the simulator from measured steps.")
    commands = parser.add_subparsers(dest="command", required=True)
    fit = commands.add_parser("fit", help="fit cost=calibrated to a profile, cross-validate, write the fit")
    fit.add_argument("profile", type=Path, help="a profile's .parquet (docs/cost-models.md)")
    fit.add_argument("--out", type=Path, help="where to write the fit (.json), for cost.path")
    fit.add_argument("--folds", type=int, default=5, help="of the cross-validation (5)")
    measure = commands.add_parser("profile", help="run the real engine over varied loads and write what steps took")
    measure.add_argument("overrides", nargs="*", help="key=value pairs, as of `testbed run`")
    measure.add_argument("--out", type=Path, required=True, help="where to write the profile (.parquet)")
    measure.add_argument("--requests", type=int, default=24, help="of the largest load (24)")
    for command in (fit, measure):
        command.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    options = parser.parse_args(arguments)
    if options.out is not None and options.out.exists() and not options.overwrite:
        raise RunFolderError(f"{options.out} exists; choose another --out or pass --overwrite")
    return _fit(options) if options.command == "fit" else _profile(options, arguments)


def _fit(options: argparse.Namespace) -> int:
    from experiments.calibrate import describe
    from sim.cost.calibration import calibrate
    from sim.cost.calibration_file import save_calibration
    from testbed.profiles import read_profile

    if not 2 <= options.folds <= 20:
        raise ConfigError(f"--folds is {options.folds}; it must be from 2 to 20")
    calibration = calibrate(read_profile(options.profile), options.folds)
    print(describe(calibration))
    if options.out is not None:
        save_calibration(calibration, options.out)
        print(f"wrote {options.out}; use it with cost=calibrated cost.path={options.out}")
    return 0


def _profile(options: argparse.Namespace, arguments: list[str]) -> int:
    from experiments.calibrate import profile
    from experiments.compose import compose_config
    from testbed.profiles import write_profile

    if options.requests < 4:
        raise ConfigError(f"--requests is {options.requests}; it must be at least 4")
    config = compose_config(["backend=real", *options.overrides])
    if not config.is_real:
        raise ConfigError("only the real engine can be profiled: leave backend out, or set backend=real")
    measured = profile(config, num_requests=options.requests, command=shlex.join(["testbed", "calibrate", *arguments]))
    write_profile(options.out, *measured)
    num_shapes = len({step.shape for step in measured.steps})
    print(f"wrote {options.out}: {len(measured.steps):,} steps of {num_shapes:,} shapes on {measured.manifest.device}")
    return 0
