"""The `testbed` command line. Only `run` uses Hydra's grammar. A user's mistake is reported in one line."""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from experiments import refuse_windows
from experiments.console import Parser, folder_named, go_on_unheard, open_closed_streams, take_any_character, words
from experiments.runs.collector import THRESHOLD
from testbed.errors import ConfigError, TestbedError

USAGE = """usage: testbed <command> ...

  run [key=value ...]          one run, or with -m a sweep (Hydra); `testbed run --help` lists the keys
  run from=<folder>            repeat a run; more key=value pairs change it
  list [group]                 what there is to choose from
  parity <run folder>          replay a real run's tape through the simulator and compare every decision
  conform <cases file> …       run a preset on decisions that a real scheduler logged, and compare every step
  observe import <log>         make a run folder of what vLLM's own scheduler did (docs/vllm.md)
  generate --model <folder> "..."  text from a local model; --model tiny needs none
  capacity [key=value ...]     the highest request rate at which each policy keeps slo.* (docs/capacity.md)
  report <folder> ...          one HTML page about runs or sweeps
  timeline <run> [<run>]       a run, or two of one trace side by side, for Perfetto (docs/timeline.md)
  explain <run folder> [<request>]  why did this request wait; without one, the same in sum (docs/explain.md)
  costs <run folder>           where the time of a run went, by operator (record.operators=true)
  calibrate [key=value ...]    profile the real engine and fit the simulator's prices to it (`profile`, `fit`: apart)
  fidelity <measured> ...      simulate measured runs again, request by request: signed errors (docs/fidelity.md)
  tables list                  measured operator tables: what there is; `testbed tables` also imports and draws them
  trace inspect <format> <file>  what is in a trace; `testbed trace` also converts, synthesises and freezes
  bench [core|simulator|engine|host|…] how fast scheduler, simulator and engine are
  demo                         the ablation, the replay on the real engine, and the report of `make demo`
"""


_NO_THREAD = ("can't start new thread", "Failed to launch worker thread")  # as Python and Arrow say it


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current directory was removed; change to another") from None


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    open_closed_streams()
    take_any_character()
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        from experiments.runs.environment import describe_versions

        print(describe_versions()["llm-serving-testbed"])
        return 0
    try:
        refuse_windows(ConfigError)
        if (here := _here()) not in sys.path:
            sys.path.append(here)  # a user's own policies are there; last, so that an analysis.py there hides nothing
        if name not in COMMANDS:
            from testbed.foreign_text import unknown

            if name == "sweep":
                raise ConfigError("there is no command 'sweep'; a sweep is `testbed run -m key=a,b`")
            raise ConfigError(unknown(f"there is no command {name!r}", name, list(COMMANDS)))
        command = COMMANDS[name]
        from experiments.runs.interrupt import ended_as_interrupted

        with ended_as_interrupted():
            status = int((import_module(command).main if isinstance(command, str) else command)(rest))
        print(end="", flush=True)  # flush inside this try: a closed pipe is no error
        return status
    except TestbedError as error:
        print(*(f"error: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt as stop:
        print(f"error: {str(stop) or 'interrupted'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        go_on_unheard()
        return 0
    except (OSError, MemoryError) as error:
        from experiments.runs.run_folder import describe_failure

        print(f"error: {describe_failure(error)}", file=sys.stderr)
        return 1
    except Exception as error:
        if not any(said in str(error) for said in _NO_THREAD):
            raise
        print(f"error: {error}; raise the limit of threads and processes (ulimit -u), or end some", file=sys.stderr)
        return 1


def _run(arguments: list[str]) -> int:
    # objects made at start-up stay alive, so collections during it would free nothing
    gc.set_threshold(10 * THRESHOLD, *gc.get_threshold()[1:])
    from experiments.commands.app import run_app

    status = run_app(arguments)
    gc.freeze()  # no collection of the remaining objects at exit
    return status


def _list(arguments: list[str]) -> int:
    from experiments.commands.listing import print_listing

    parser = Parser("testbed list", description="What there is to choose from, a line each.")
    parser.add_argument("group", nargs="?", help="only this group")
    parser.add_argument("--config-dir", help="a folder of your own options, which are listed too")
    options = parser.parse_args(arguments)
    print_listing(options.group, options.config_dir)
    return 0


def _parity(arguments: list[str]) -> int:
    from experiments.runs.parity import check_parity, num_tapes, print_divergence

    parser = Parser("testbed parity", description="Replay a real run's tape, compare every decision.")
    parser.add_argument("run", type=folder_named, help="a run folder made with backend=real or backend=vllm")
    options = parser.parse_args(arguments)
    num = num_tapes(options.run)
    for replica in range(num):
        report = check_parity(options.run, replica=replica)
        who = f"replica {replica} " if num > 1 else ""
        if report.divergence is not None:
            print(who, end="")
            print_divergence(report)
            return 1
        until = "; the run was interrupted there" if report.is_cut else ""
        until = until if report.failure is None else f"; there the run failed: {report.failure}"
        print(f"{who}identical: {report.num_steps} steps, decision digest {report.digest:016x}{until}")
    if num > 1:
        print("each replica was sent what it was sent then: the router's choices are not replayed")
    return 0


def _conform(arguments: list[str]) -> int:
    from experiments.conform import check_files

    parser = Parser(
        "testbed conform", description="Run presets on decisions that real schedulers logged, compare every step."
    )
    parser.add_argument(
        "files", type=Path, nargs="+", help="cases, one JSON object a line (.jsonl, .jsonl.gz): docs/conform.md"
    )
    parser.add_argument("--case", help="only the case of this name")
    parser.add_argument("--preset", help="this preset instead of the one that mirrors the case's system")
    options = parser.parse_args(arguments)
    return check_files(options.files, options.case, options.preset)


def _report(arguments: list[str]) -> int:
    from analysis.reports.report import report_from_folders
    from experiments.runs.run_folder import refuse_existing, writing
    from experiments.sweeps.points import say_killed
    from experiments.wiring.own_reports import given_metrics, given_plots, stated_metrics, stated_plots

    parser = Parser("testbed report", description="One self-contained HTML page about runs or sweeps.")
    parser.add_argument("folders", nargs="+", type=folder_named, help="run or sweep folders")
    parser.add_argument("--out", type=folder_named, default=Path("report.html"), help="where to write it (report.html)")
    parser.add_argument("--title", help="the page's title")
    stated = "else as the runs state it:"
    parser.add_argument("--question", help=f"what the study asks; {stated} report.question")
    parser.add_argument(
        "--baseline", type=words, help=f"the arm that the others are compared with; {stated} report.baseline"
    )
    parser.add_argument(
        "--slo", action="append", help=f"ttft_s=0.5,tpot_s=0.05 (also e2e_s, itl_max_s, lateness_s); {stated} slo.*"
    )
    parser.add_argument("--margin", type=float, help=f"relative change that counts as none; {stated} report.margin")
    parser.add_argument(
        "--plot", action="append", type=words, default=[],
        help=f"a plot of your own: mine.waiting, or {{_target_: mine.waiting, num_bins: 30}}; {stated} report.plots",
    )  # fmt: skip
    parser.add_argument(
        "--metric", action="append", type=words, default=[],
        help=f"compare, and tell first: queueing_s.p99, or {{_target_: mine.share_slow}}; {stated} report.metrics",
    )  # fmt: skip
    parser.add_argument("--fail-if", action="append", default=[], help="exit with 3 at a change: 'ttft_s.mean>5%%'")
    parser.add_argument("--overwrite", action="store_true", help="replace the page if it exists")
    options = parser.parse_args(arguments)
    plots, metrics = given_plots(options.plot), given_metrics(options.metric)
    out = options.out if options.out.suffix else options.out.with_suffix(".html")
    if out.suffix != ".html":
        raise ConfigError(f"--out is {options.out}; a report is an .html file, with a .md and pictures beside it")
    for folder in options.folders:
        if not folder.exists():
            raise ConfigError(f"{folder}: no such folder")
    if options.out.exists() and not options.out.is_file() and not options.out.is_dir():
        raise ConfigError(f"{options.out} is a device or a pipe, and a report is several files; choose another --out")
    for written in (out, out.with_suffix(".md")):
        refuse_existing(written, options.overwrite)
    if options.margin is not None and not 0 < options.margin < 1:
        raise ConfigError(f"--margin is {options.margin}; it must lie between 0 and 1, as 0.02 for 2 %")
    for folder in options.folders:
        say_killed(folder)
    with writing(out):
        page = report_from_folders(
            options.folders, out, title=options.title, baseline=options.baseline, question=options.question,
            slo=_limits(options.slo and ",".join(options.slo)), margin=options.margin,
            command=shlex.join(["testbed", "report", *arguments]),
            plots=(lambda _: plots) if plots else stated_plots,
            metrics=(lambda _: metrics) if metrics else stated_metrics, fail_if=options.fail_if,
        )  # fmt: skip
    print(page)
    return 0


def _limits(text: str | None) -> dict[str, float] | None:
    """Returns the limits given by --slo. Raises ConfigError if the text is invalid."""
    from analysis.measures.slo import LIMITS
    from experiments.configuration.settings import check_limits
    from testbed.checks import choose

    if text is None:
        return None
    try:
        given = [item.partition("=") for item in text.split(",")]
        limits = {name: float(value) for name, _, value in given}
        for name in limits:
            choose("a limit of --slo", name, LIMITS)
        if len(limits) == len(given):
            check_limits("slo", limits)
            return limits
    except ValueError:
        raise ConfigError(f"--slo is {text!r}; expected limits in seconds, as ttft_s=0.5,tpot_s=0.05") from None
    raise ConfigError(f"--slo is {text!r}, which gives one limit twice; give each once, as ttft_s=0.5,tpot_s=0.05")


def _timeline(arguments: list[str]) -> int:
    from analysis.timelines.export import LATEST_S, Window, write_timeline
    from experiments.runs.run_folder import refuse_existing, refuse_running, writing

    parser = Parser("testbed timeline", description="A run as a timeline that opens in Perfetto.")
    parser.add_argument("run", type=folder_named, help="a run folder")
    parser.add_argument("other", nargs="?", type=folder_named, help="another of the same trace, side by side with it")
    parser.add_argument("--from", type=float, dest="from_s", metavar="S", help="draw from this second on")
    parser.add_argument("--to", type=float, dest="to_s", metavar="S", help="draw up to this second")
    parser.add_argument("--steps", type=_steps, metavar="FIRST:LAST", help="draw these steps of each replica instead")
    parser.add_argument(
        "--out", type=folder_named, help="the file, .json or .json.gz (timeline.json in the run's folder)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    options = parser.parse_args(arguments)
    if options.out is not None and not options.out.name.endswith((".json", ".json.gz")):
        raise ConfigError(f"--out is {options.out}; a timeline is a .json or .json.gz file")
    refuse_existing(options.out, options.overwrite)
    seconds = [option for option in (options.from_s, options.to_s) if option is not None]
    if options.steps is not None and seconds:
        raise ConfigError("--steps and --from or --to are two windows; give one")
    low = 0.0 if options.from_s is None else options.from_s
    window = Window(low, LATEST_S if options.to_s is None else options.to_s, options.steps)
    folders = [options.run] if options.other is None else [options.run, options.other]
    for folder in folders:
        refuse_running(folder)
    with writing(options.out or options.run):
        drawn = write_timeline(folders, options.out, window, overwrite=options.overwrite)
    print(drawn)
    return 0


def _steps(text: str) -> tuple[int, int]:
    try:
        first, last = text.split(":")
        return int(first), int(last)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST, two step numbers such as 100:200") from None


def _costs(arguments: list[str]) -> int:
    from analysis.measures.operators import format_operators, load_operators

    parser = Parser("testbed costs", description="Where the time of a run went, by operator.")
    parser.add_argument("run", type=folder_named, help="a run folder made with record.operators=true")
    print(format_operators(load_operators(parser.parse_args(arguments).run)))
    return 0


# the function of each command, or the module whose `main` it is: returns the exit status, raises TestbedError
COMMANDS: dict[str, Callable[[list[str]], int] | str] = {
    "run": _run,
    "list": _list,
    "parity": _parity,
    "conform": _conform,
    "observe": "experiments.observe",
    "generate": "experiments.commands.generate",
    "capacity": "experiments.capacity.command",
    "report": _report,
    "timeline": _timeline,
    "costs": _costs,
    "explain": "experiments.commands.explain",
    "calibrate": "experiments.calibration.command",
    "fidelity": "experiments.fidelity.command",
    "tables": "experiments.tables",
    "trace": "experiments.commands.trace",
    "bench": "experiments.bench",
    "demo": "experiments.demo.command",
}


if __name__ == "__main__":
    sys.exit(main())
