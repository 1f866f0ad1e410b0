"""`testbed tables`: imports, lists, shows and draws operator tables, the measured kernel times of one device."""

from __future__ import annotations

import argparse
import shlex
from datetime import UTC, datetime
from pathlib import Path

from experiments.console import Parser
from testbed.errors import ConfigError
from testbed.foreign_text import unknown, visible
from testbed.specs.operator_tables import OperatorTables, read_operator_tables, write_operator_tables

USAGE = """usage: testbed tables <command> ...

  import <source> [<dir>] --out <file>.parquet   one file of measured operators; sources: aiconfigurator (the installed
                                                 package), llmservingsim <dir>, vidur <dir>, own <file>.csv
  list [<file>]                                  what the installed package covers, or what a file holds
  show <file or device> [--operator gemm] [--plot <stem>]   ranges of each operator; figures beside the data sheet
"""
SOURCES = ("aiconfigurator", "llmservingsim", "vidur", "own")
_CONFIG_DIR = "a folder of your own options, with device/<name>.yaml"
_NOT_OPERATORS = {
    "splitwise": "splitwise's perf_model.csv times whole steps and requests, of which no operator's time can be made"
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    commands = {"import": _import, "list": _list, "show": _show}
    name, rest = arguments[0], arguments[1:]
    if name not in commands:
        raise ConfigError(unknown(f"there is no command `testbed tables {name}`", name, list(commands)))
    return commands[name](rest)


def _import(arguments: list[str]) -> int:
    parser = Parser("testbed tables import", description="Measured operators as one Parquet file.")
    parser.add_argument("source", help=", ".join(SOURCES))
    parser.add_argument(
        "folder", nargs="?", type=Path, help="of the source's files, or your own CSV; aiconfigurator finds its own"
    )
    parser.add_argument("--device", help="its name in the device library (testbed list device), or in --config-dir")
    parser.add_argument("--config-dir", help=_CONFIG_DIR)
    parser.add_argument("--model", help="llmservingsim: its name in the model library, where meta.yaml's is not there")
    parser.add_argument("--engine", help="aiconfigurator: vllm (default), sglang, trtllm")
    parser.add_argument("--version", help="aiconfigurator: of the engine (the newest)")
    parser.add_argument("--out", type=Path, required=True, help="a new .parquet")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    options = parser.parse_args(arguments)
    if options.out.suffix != ".parquet":
        raise ConfigError(f"{options.out}: operator tables are a Parquet file; name it <out>.parquet")
    from experiments.runs.run_folder import refuse_existing, writing

    refuse_existing(options.out, options.overwrite)
    from experiments.tables.devices import device_spec
    from experiments.tables.doubts import checked
    from experiments.tables.summary import doubt_lines

    tables = _read_source(options)
    tables = checked(tables, device_spec(tables.device, options.config_dir))
    command = shlex.join(["testbed", "tables", "import", *arguments])
    with writing(options.out):
        write_operator_tables(options.out, tables, command, date=datetime.now(UTC).isoformat(timespec="seconds"))
    print(f"{options.out}: {tables.rows.num_rows:,} points of {tables.device} ({tables.device_description})")
    for line in doubt_lines(tables):
        print(line)
    return 0


def _read_source(options: argparse.Namespace) -> OperatorTables:
    from experiments.tables.devices import device_spec

    if options.source in _NOT_OPERATORS:
        raise ConfigError(f"{_NOT_OPERATORS[options.source]}; see docs/tables.md")
    if options.source not in SOURCES:
        raise ConfigError(unknown(f"there is no source {options.source!r}", options.source, SOURCES))
    for name, owner in (("model", "llmservingsim"), ("engine", "aiconfigurator"), ("version", "aiconfigurator")):
        if getattr(options, name) is not None and options.source != owner:
            raise ConfigError(f"--{name} goes with {owner} only, not with {options.source}; leave it out")
    if options.source == "aiconfigurator":
        from experiments.tables.aiconfigurator import load

        if options.device is None:
            raise ConfigError(
                "aiconfigurator has tables of many devices; choose one with --device (testbed tables list)"
            )
        return load(options.device, options.engine or "vllm", options.version, systems=options.folder)
    if options.source == "own":
        from experiments.tables import own

        if options.folder is None or options.device is None:
            raise ConfigError("own needs a CSV and the device that was measured: own <file>.csv --device <name>")
        if device_spec(options.device, options.config_dir) is None:
            raise ConfigError(
                f"--device is {visible(options.device)!r}, which is none of `testbed list device`; one of your own is "
                "device/<name>.yaml in a folder for --config-dir"
            )
        return own.read(options.folder, options.device)
    if options.folder is None or not options.folder.is_dir():
        where = "no folder is given" if options.folder is None else f"there is no folder {options.folder}"
        raise ConfigError(f"{where}; give that of {options.source}'s files")
    from experiments.tables import llmservingsim, vidur

    if options.source == "vidur":
        return vidur.read(options.folder, options.device)
    return llmservingsim.read(options.folder, options.device, options.model)


def _list(arguments: list[str]) -> int:
    from experiments.tables.summary import coverage_lines, doubt_lines, engine_lines

    parser = Parser("testbed tables list", description="Which tables there are.")
    parser.add_argument("file", nargs="?", type=Path, help="of `testbed tables import`; without: the installed package")
    options = parser.parse_args(arguments)
    if options.file is None:
        from experiments.tables.aiconfigurator import coverage

        print(*coverage_lines(coverage()), sep="\n")
        return 0
    tables = read_operator_tables(options.file)
    print(*engine_lines(tables), *doubt_lines(tables), sep="\n")
    return 0


def _show(arguments: list[str]) -> int:
    from experiments.tables.devices import device_spec, entry
    from experiments.tables.summary import range_lines
    from experiments.tables.terms import term_lines
    from testbed.specs.operator_tables import OPERATORS

    parser = Parser("testbed tables show", description="What tables hold: ranges, and figures.")
    parser.add_argument("tables", help="a file of `testbed tables import`, or a device that the package covers")
    parser.add_argument("--operator", help=", ".join(OPERATORS))
    parser.add_argument("--model", help="draw the shapes of this model of the library (llama3.1_8b)")
    parser.add_argument("--config-dir", help=_CONFIG_DIR)
    parser.add_argument("--plot", type=Path, metavar="STEM", help="writes STEM-<operator>.png and .svg")
    options = parser.parse_args(arguments)
    model = entry("model", options.model or "llama3.1_8b")
    tables = _open(options.tables)
    spec = device_spec(tables.device, options.config_dir)
    there = [name for name in OPERATORS if tables.select(name).num_rows]
    if options.operator is not None and options.operator not in there:
        raise ConfigError(unknown(f"{options.tables} has no operator {options.operator!r}", options.operator, there))
    operators = there if options.operator is None else [options.operator]
    print(*range_lines(tables, operators), sep="\n")
    if options.operator is None:
        print(*term_lines(tables, spec), sep="\n")
    if options.plot is not None:
        from experiments.tables.figures import draw

        stem = options.plot.with_suffix("") if options.plot.suffix in (".png", ".svg") else options.plot
        for path in draw(tables, operators, model, spec, stem):
            print(path)
    return 0


def _open(name: str) -> OperatorTables:
    """The tables of a file, or of a device in the installed package."""
    if Path(name).suffix == ".parquet" or Path(name).is_file():
        return read_operator_tables(name)
    from experiments.tables.aiconfigurator import load

    return load(name)
