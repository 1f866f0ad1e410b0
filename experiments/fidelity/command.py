"""The command line of `testbed fidelity`: which inputs, what is printed and written."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from experiments.fidelity.fields import json_value, read_text
from experiments.fidelity.simulating import check_overrides
from experiments.fidelity.study import FIELDS, StudyRun, read_study
from experiments.run_folder import write_json
from testbed.errors import ConfigError, RunFolderError

RESULT, TEXT = "fidelity.json", "fidelity.md"


def main(arguments: list[str]) -> int:
    """Returns the exit status. Raises TestbedError in one line."""
    options = _parser().parse_args(arguments)
    command = shlex.join(["testbed", "fidelity", *arguments])
    measured = [Path(item) for item in options.inputs if "=" not in item or Path(item).exists()]
    overrides = [item for item in options.inputs if "=" in item and not Path(item).exists()]
    if not measured:
        raise ConfigError(
            "testbed fidelity wants at least one measured run: a file, or a run folder (docs/fidelity.md)"
        )
    check_overrides(overrides)
    if options.out is not None and options.out.exists() and not options.overwrite:
        raise RunFolderError(f"{options.out} exists; choose another --out or pass --overwrite")
    return _study(_study_runs(measured, overrides), overrides, options, command)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "testbed fidelity", description="Simulate measured runs again, and print and draw how far the simulator is off."
    )
    parser.add_argument(
        "inputs", nargs="*", metavar="measured|key=value",
        help="run folders and files (docs/fidelity.md); then overrides, as of `testbed run`",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder for fidelity.json, fidelity.md and the figure")
    parser.add_argument("--overwrite", action="store_true", help="write into --out although it exists")
    return parser


def _study_runs(measured: list[Path], overrides: list[str]) -> list[StudyRun]:
    runs = []
    for file in measured:
        values = json_value(read_text(file), str(file))
        if not isinstance(values, list) or not all(isinstance(v, dict) and set(FIELDS) <= v.keys() for v in values):
            raise ConfigError(f"{file}: not a study: expected a list of runs with {' and '.join(FIELDS)}")
        runs += read_study(values, file, overrides)
    return runs


def _study(runs: list[StudyRun], overrides: list[str], options: argparse.Namespace, command: str) -> int:
    from experiments.fidelity.study_report import as_json, simulate_study
    from experiments.fidelity.study_text import study_lines

    found = simulate_study(runs, overrides, command)
    text = "\n".join(study_lines(found))
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / RESULT, {"command": command, **as_json(found)})
        (options.out / TEXT).write_text(f"# Fidelity\n\n`{command}`\n\n{text}\n")
        print(f"wrote {options.out / TEXT}")
    return 0
