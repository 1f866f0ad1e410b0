"""The command line of `testbed fidelity`: reads the inputs, prints and writes the results."""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.load import Run, load_sweep, relative, swept_keys
from analysis.naming import labels_of, level_names
from experiments.configuration.overrides import refuse_repeated, with_searched
from experiments.console import Parser, as_markdown
from experiments.fidelity import comparing, study_report
from experiments.fidelity.comparing import compare, comparison_lines, metric_name
from experiments.fidelity.fitting import parse_names
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
from experiments.fidelity.request_log import log_settings
from experiments.fidelity.simulating import by_key, check_overrides, variant
from experiments.fidelity.study import METRICS, OURS, WHOLE, StudyRun
from experiments.fidelity.study_report import arms_of, fit_study, page_lines, scores, simulate_study, study_lines
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
    of_logs, overrides = log_settings(by_key(given))
    _check(options, inputs, overrides)
    folders = [path for path in inputs if path.is_dir()]
    read = read_files([path for path in inputs if not path.is_dir()], overrides, options.format, of_logs)
    if read.study and (read.measured or folders):
        raise ConfigError("a study has only aggregates: compare it by itself, not beside measured requests")
    if options.out is not None:
        for name in (RUNS, FITTED):
            refuse_inside(inputs, options.out / name)
    whole = nullcontext() if options.out is None else renewed(options.out, overwrite=options.overwrite)
    with whole, TemporaryDirectory(prefix="testbed-") as scratch:
        if read.study:
            found = _study(read.study, overrides, options)
        else:
            runs = Path(scratch, RUNS) if options.out is None else options.out / RUNS
            found = _loads(read.measured, folders, overrides, options, runs, Path(scratch, "fit"))
        text = "\n".join(found.lines)
        if options.page is not None:
            write_page(options.page, options.arguments, found.page)
        if options.out is not None:
            _write(options, text, found)
            text += f"\n\nwrote {options.out / TEXT}, {RESULT}, {FIGURE}.png"
            text += "" if read.study else f"; the runs: testbed report {options.out / RUNS}"
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


class _Found(NamedTuple):
    """A result. lines: printed; page: those of them for --page. values: for fidelity.json. draw: makes the figure."""

    lines: list[str]
    page: list[str]
    values: dict[str, Any]
    draw: Callable[[], Figure]


def _loads(
    files: list[MeasuredRun], folders: list[Path], overrides: list[str], options: argparse.Namespace, runs: Path,
    scratch: Path,
) -> _Found:  # fmt: skip
    """Compares measured requests."""
    from analysis.plots.fidelity_plots import fidelity_figure

    if options.beside:
        raise ConfigError("--beside goes with a study; compare measured requests once with each configuration")
    names = [run.name for run in files]
    if (doubled := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise ConfigError(f"two measured files are called {doubled!r}; give them different names")
    loads = [*file_loads(files, overrides, runs), *_folder_loads(folders, overrides, runs, options.format, names)]
    found = compare(loads, overrides, options.names, runs, scratch, options.command)
    lines = comparison_lines(found)
    panels = {one.load.name: (one.errors, one.noise, one.matched) for one in found.loads}
    return _Found(lines, lines, comparing.as_json(found), lambda: fidelity_figure(panels, metric_name))


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


def _study(runs: list[StudyRun], overrides: list[str], options: argparse.Namespace) -> _Found:
    from analysis.plots.fidelity_plots import study_figure

    arms = arms_of(runs, overrides, options.beside)
    fits = fit_study(runs, arms, options.names, options.command) if options.names else []
    found = simulate_study(runs, arms, fits, options.command)

    def draw() -> Figure:
        signed = {one.run.name: one.errors(OURS, WHOLE) for one in found}
        errors = {f"{row.who} ({row.num_runs})": row.errors for row in scores(found, WHOLE)}
        return study_figure(signed, errors, METRICS)

    return _Found(study_lines(found, fits), page_lines(found, fits), study_report.as_json(found, fits), draw)


def _write(options: argparse.Namespace, text: str, found: _Found) -> None:
    from analysis.plots.style import save

    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / RESULT, {"command": options.command, **found.values})
    with written(out / TEXT) as file:
        file.write(f"# Fidelity\n\n`{options.command}`\n\n{as_markdown([text])}\n\n![errors]({FIGURE}.png)\n")
    save(found.draw(), out / FIGURE)
