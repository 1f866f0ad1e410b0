"""The command line of `testbed fidelity`: reads the inputs, prints and writes the results."""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from analysis.load import Run, load_sweep, relative, swept_keys
from analysis.naming import labels_of, level_names
from experiments.configuration.overrides import refuse_repeated, with_searched
from experiments.console import Parser, as_markdown
from experiments.fidelity import comparing, study_report
from experiments.fidelity.comparing import compare, comparison_lines, metric_name
from experiments.fidelity.fitting import Fitted, fit_study, parse_names
from experiments.fidelity.formats import FORMATS, RUN_FOLDER, check_format, read_files
from experiments.fidelity.loads import Load, file_loads, folder_load
from experiments.fidelity.measured import MeasuredRun
from experiments.fidelity.outputs import (
    FIGURE,
    FITTED,
    RESULT,
    RUNS,
    TEXT,
    check_page,
    refuse_inside,
    renewed,
    write_page,
)
from experiments.fidelity.simulating import by_key, check_overrides, variant
from experiments.fidelity.study import WHOLE, StudyRun
from experiments.fidelity.study_report import beside, check_study, page_lines, scores, simulate_study, study_lines
from experiments.runs.run_folder import refuse_existing, write_json
from testbed.errors import ConfigError, TraceError
from testbed.output import written

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def main(arguments: list[str]) -> int:
    arguments = with_searched(arguments)
    options = _parser().parse_intermixed_args(arguments)
    options.arguments = arguments
    options.command = shlex.join(["testbed", "fidelity", *arguments])
    inputs = [Path(item) for item in options.inputs if "=" not in item or Path(item).exists()]
    given = [item for item in options.inputs if "=" in item and not Path(item).exists()]
    refuse_repeated(given)
    overrides = by_key(given)
    _check(options, inputs, overrides)
    folders = [path for path in inputs if path.is_dir()]
    read = read_files([path for path in inputs if not path.is_dir()], overrides, options.format)
    if read.study and (read.measured or folders):
        raise ConfigError("a study has only aggregates: compare it by itself, not beside measured requests")
    if options.out is not None:
        for name in (RUNS, FITTED):
            refuse_inside(inputs, options.out / name)
    whole = nullcontext() if options.out is None else renewed(options.out, overwrite=options.overwrite)
    with whole, TemporaryDirectory(prefix="testbed-") as scratch:
        if read.study:
            text = _study(read.study, overrides, options)
        else:
            runs = Path(scratch, RUNS) if options.out is None else options.out / RUNS
            text = _loads(read.measured, folders, overrides, options, runs, Path(scratch, "fit"))
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "testbed fidelity", description="Simulate measured runs again, and print and draw how far the simulator is off."
    )
    parser.add_argument(
        "inputs", nargs="*", metavar="measured|key=value",
        help="run folders and files (docs/fidelity.md); then overrides, as of `testbed run`",
    )  # fmt: skip
    parser.add_argument("--format", help=f"of the files, where their content does not say it: {', '.join(FORMATS)}")
    parser.add_argument(
        "--fit",
        metavar="host,kernels,link,frontend",
        help="fit one or two of these to the first half of each run (of a study: of its stages); judge on the second",
    )
    parser.add_argument(
        "--beside", action="append", default=[], metavar="OVERRIDES",
        help="of a study: simulate it again with these (quoted), a row beside the others; may be repeated",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder for fidelity.json, fidelity.md, the figure and the runs")
    parser.add_argument(
        "--page", type=Path, help="document whose marked part is replaced by the result (docs/fidelity.md)"
    )
    parser.add_argument("--overwrite", action="store_true", help="write into --out although it exists")
    return parser


def _check(options: argparse.Namespace, inputs: list[Path], overrides: list[str]) -> None:
    """Raises TestbedError for mistakes in the command line itself."""
    if not inputs:
        raise ConfigError(
            "testbed fidelity wants at least one measured run: a file, or a run folder (docs/fidelity.md)"
        )
    check_overrides(overrides)
    for words in options.beside:
        variant(words)
    check_format(options.format)
    options.names = parse_names(options.fit)
    check_page(options.page)
    refuse_existing(options.out, options.overwrite)
    for path in inputs:
        if not path.exists():
            raise TraceError(f"{path} does not exist; expected a measured run: a file, or a run folder")
        if path.suffix == ".parquet":
            raise TraceError(f"{path} is one table of a run; give the run's folder: {path.parent}")


def _loads(
    files: list[MeasuredRun], folders: list[Path], overrides: list[str], options: argparse.Namespace, runs: Path,
    scratch: Path,
) -> str:  # fmt: skip
    """Compares measured requests, writes the outputs, and returns the text to print."""
    from analysis.plots.fidelity_plots import fidelity_figure

    if options.beside:
        raise ConfigError("--beside goes with a study; compare measured requests once with each configuration")
    names = [run.name for run in files]
    if (doubled := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise ConfigError(f"two measured files are called {doubled!r}; give them different names")
    loads = [*file_loads(files, overrides, runs), *_folder_loads(folders, overrides, runs, options.format, names)]
    found = compare(loads, overrides, options.names, runs, scratch, options.command)
    lines = comparison_lines(found)
    text = "\n".join(lines)
    if options.page is not None:
        write_page(options.page, options.arguments, lines)
    if options.out is not None:
        panels = {one.load.name: (one.errors, one.noise, one.matched) for one in found.loads}
        _write(options, text, comparing.as_json(found), fidelity_figure(panels, metric_name))
        text += f"\n\nwrote {options.out / TEXT}, {FIGURE}.png; the runs: testbed report {options.out / RUNS}"
    return text


def _folder_loads(
    folders: list[Path], overrides: list[str], runs: Path, format_name: str | None, taken: list[str]
) -> list[Load]:
    """The loads of run folders, and of all runs in a folder of runs. taken: names that others have."""
    if folders and format_name not in (None, RUN_FOLDER):
        raise ConfigError(f"{folders[0]} is a folder, and --format says {format_name}; give the file itself")
    found: dict[str, Run] = {}  # by the name of the folder in the output
    paths: set[Path] = set()  # a sweep and one of its points may both be given
    for folder in folders:
        for run in load_sweep(folder).runs:
            if run.path.resolve() in paths:
                continue
            paths.add(run.path.resolve())
            inside = relative(run.path, folder)
            name = folder.resolve().name + ("" if inside == "." else "-" + inside.replace("/", "-"))
            numbered = (f"{name}~{number}" for number in itertools.count(2))
            found[next(place for place in itertools.chain([name], numbered) if place not in (*found, *taken))] = run
    points = {place: run for place, run in found.items() if run.manifest.get("swept")}
    labels = labels_of(
        [(run.flat_config, Path(place)) for place, run in points.items()], swept_keys(list(points.values()))
    )
    if len(points) == 1:
        labels = [level_names(run.manifest["swept"]) for run in points.values()]
    names = dict(zip(found, found, strict=True)) | dict(zip(points, labels, strict=True))
    shared = {name for name, num in Counter(names.values()).items() if num > 1}
    loads: list[Load] = []
    for place, run in found.items():
        name = place if names[place] in shared else names[place]
        loads.append(folder_load(run, name, place, runs, loads, overrides))
    return loads


def _study(runs: list[StudyRun], overrides: list[str], options: argparse.Namespace) -> str:
    """Compares a study, writes the outputs, and returns the text to print."""
    from analysis.plots.fidelity_plots import study_figure

    check_study(runs, overrides, options.beside)
    fits: list[Fitted] = []
    if options.names:
        runs, fits = fit_study(runs, options.names, overrides, options.beside, options.command)
    runs = beside(runs, overrides, options.beside, options.command)
    found = simulate_study(runs, overrides, options.command)
    text = "\n".join(study_lines(found, fits))
    if options.page is not None:
        write_page(options.page, options.arguments, page_lines(found, fits))
    if options.out is not None:
        signed = {one.run.name: (one.ours_ms[WHOLE], one.run.measured_ms[WHOLE]) for one in found}
        errors = {f"{row.who} ({row.num_runs})": row.errors for row in scores(found, WHOLE)}
        _write(options, text, study_report.as_json(found, fits), study_figure(signed, errors, study_report.NAMES))
        text += f"\n\nwrote {options.out / TEXT}, {FIGURE}.png"
    return text


def _write(options: argparse.Namespace, text: str, result: dict[str, Any], figure: Figure) -> None:
    from analysis.plots.style import save

    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / RESULT, {"command": options.command, **result})
    with written(out / TEXT) as file:
        file.write(f"# Fidelity\n\n`{options.command}`\n\n{as_markdown([text])}\n\n![errors]({FIGURE}.png)\n")
    save(figure, out / FIGURE)
