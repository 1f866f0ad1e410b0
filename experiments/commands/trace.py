"""`testbed trace`: inspects, converts, synthesises and freezes traces. Owns the printed output of these commands."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from analysis.progress import progress, progressing
from experiments.console import Parser
from experiments.runs.run_folder import is_same_file, refuse_existing, writing
from testbed.checks import require_whole
from testbed.errors import ConfigError, RunFolderError
from testbed.foreign_text import unknown, visible
from testbed.traces.frozen import freeze_trace
from testbed.traces.readers import READERS, open_trace
from testbed.traces.readers.open_text import format_suffix
from testbed.traces.readers.own import OWN
from testbed.traces.readers.own_log import check_columns, check_where
from testbed.traces.schema import TraceSource
from testbed.traces.serialize import write_jsonl
from testbed.traces.stream import CountedTrace
from testbed.traces.summary import WINDOWS_S, TraceSummary, summarise
from testbed.wording import count

USAGE = """usage: testbed trace <command> ...

  inspect <format> <file>               what is in a trace
  convert <format> <file> <out>         to our own schema: .jsonl (.gz, .zst) or .parquet by the name of <out>
  synthesise <out> [key=value ...]      writes a generated trace: trace=synthetic, keys as of `testbed run`
  freeze <out>.parquet [key=value ...]  any trace of `testbed run`, drawn and transformed, as one Parquet file
  <format> <file>                       the same as inspect

formats: """
_FORMATS = (*READERS, "auto")


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE + ", ".join(_FORMATS))
        return 0
    name, rest = arguments[0], arguments[1:]
    if name in _FORMATS:
        name, rest = "inspect", arguments
    commands: dict[str, Callable[[list[str]], int]] = {
        "inspect": _inspect, "convert": _convert, "synthesise": partial(_from_overrides, "synthesise"),
        "freeze": partial(_from_overrides, "freeze"),
    }  # fmt: skip
    if name not in commands and Path(name).is_file():
        raise ConfigError(f"{name} is a file; say of what format: testbed trace inspect auto {shlex.join([name])}")
    if name not in commands:
        raise ConfigError(unknown(f"there is no trace command or format {name!r}", name, [*commands, *_FORMATS]))
    return commands[name](rest)


def _inspect(arguments: list[str]) -> int:
    says = "What is in a trace: counts, arrivals, lengths, sessions, shared prefixes."
    parser = Parser("testbed trace inspect", description=says)
    _add_source(parser)
    parser.add_argument("--block-size", type=int, default=16, help="of the engine, for shared prefixes (16)")
    options = parser.parse_args(arguments)
    require_whole("--block-size", options.block_size, 1)
    trace = _open(options)
    summary = summarise(progressing(trace, "inspect", "req", trace.num_requests))
    print_summary(trace.name, summary, trace.notes, options.block_size)
    return 0


def _convert(arguments: list[str]) -> int:
    says = "Write a trace in our own schema; it is read back with the same fingerprint."
    parser = Parser("testbed trace convert", description=says)
    _add_source(parser)
    parser.add_argument("out", type=Path, help="a new .jsonl (.gz, .zst) or .parquet")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    options = parser.parse_args(arguments)
    _check_out(options.out, options.overwrite, [options.file])
    _write(_open(options), options.out)
    return 0


def _from_overrides(name: str, arguments: list[str]) -> int:
    from experiments.configuration.compose import compose_config
    from experiments.configuration.overrides import refuse_repeated, with_searched
    from experiments.wiring.traces import build_source

    is_frozen = name == "freeze"
    says = "Write any trace, drawn and transformed, as one Parquet file that both backends read (trace=parquet)."
    parser = Parser(f"testbed trace {name}", description=says if is_frozen else "Write a generated trace.")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as of `testbed run`; trace. may be left out")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    options = parser.parse_intermixed_args(with_searched(arguments))
    if is_frozen and options.out.suffix != ".parquet":
        raise ConfigError(f"{options.out}: a trace is frozen to a Parquet file; name it <out>.parquet")
    overrides = [_in_trace_group(item) for item in options.overrides]
    refuse_repeated(overrides)
    config = compose_config(overrides if is_frozen else ["trace=synthetic", *overrides])
    others = [step["path"] for step in config.trace.transforms if "path" in step]
    _check_out(options.out, options.overwrite, [path for path in (config.trace.path, *others) if path])
    _write(build_source(config), options.out)
    return 0


def _in_trace_group(override: str) -> str:
    """Returns `rate=8` as `trace.rate=8`. Keys of other groups, and trace=<format>, are unchanged."""
    from experiments.configuration.config import GROUPS

    if "=" not in override:
        raise ConfigError(f"{override!r} is no key=value; give keys as of `testbed run`, such as rate=8 or seed=1")
    is_place = override.startswith("hydra.searchpath=")  # --config-dir
    head = override.split("=", 1)[0].lstrip("+~").split(".", 1)[0]
    return override if head in (*GROUPS, "seed", "experiment") or is_place else f"trace.{override}"


def _write(trace: TraceSource, out: Path) -> None:
    """Writes the trace in the format given by the file's extension, and prints a line about the result."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with writing(out):
        num, digest = _write_to(trace, out)
    print(f"{out}: {count(num, 'request')}, fingerprint {digest}")
    for note in trace.notes:
        print(f"  note: {note}")


def _write_to(trace: TraceSource, out: Path) -> tuple[int, str]:
    """Writes the trace to a file; returns the number of requests and the fingerprint."""
    if out.suffix == ".parquet":
        info = freeze_trace(trace, out, lambda rows: progressing(rows, "freeze", "req", trace.num_requests))
        return info.num_requests, info.fingerprint
    with progress("write", "req", trace.num_requests) as bar:
        counted = CountedTrace(trace, lambda row: bar.update())
        write_jsonl(counted, out)
    return counted.num_read, str(counted.fingerprint)


def print_summary(name: str, summary: TraceSummary, notes: Iterable[str], block_size: int) -> None:
    num, duration = summary.num_requests, summary.duration_s
    print(f"{name}: {count(num, 'request')} in {duration:,.1f} s, fingerprint {summary.fingerprint}")
    for line in (*_arrival_lines(summary), *_length_lines(summary), *_sharing_lines(summary, block_size)):
        print(f"  {line}")
    for note in notes:
        print(f"  note: {note}")


def _arrival_lines(summary: TraceSummary) -> Iterator[str]:
    rate, cv = summary.rate, summary.gap_cv
    if rate is None:
        yield f"arrivals        {len(summary.arrivals_s):,}, all at one instant"
        return
    kind = "" if cv is None else f", CV of gaps {cv:.2f}"
    yield f"arrivals        {rate:.4g} per s{kind}"
    dispersions = [(window, summary.dispersion(window)) for window in WINDOWS_S]
    known = ", ".join(f"{window:g} s {value:.3g}" for window, value in dispersions if value is not None)
    if known:
        yield f"dispersion      of counts per {known} (Poisson: 1)"
    if summary.batches.note is not None:
        yield f"batches         {summary.batches.note}"


def _length_lines(summary: TraceSummary) -> Iterator[str]:
    import numpy as np

    known = summary.outputs[summary.outputs > 0]
    for label, values in (("prompt tokens", summary.prompts), ("output tokens", known)):
        if not len(values):
            continue
        p50, p90, p99 = np.percentile(values, (50, 90, 99))
        spread = f"P50 {p50:,.0f}, P90 {p90:,.0f}, P99 {p99:,.0f}, max {values.max():,}"
        yield f"{label:<15} {values.sum():,}: mean {values.mean():,.0f}, {spread}"
    if summary.num_free_outputs:
        yield f"free outputs    {count(summary.num_free_outputs, 'request')}: the model decides (a real engine only)"
    if len(known) > 2 and known.std() and summary.prompts.std() and len(known) == len(summary.prompts):
        correlation = np.corrcoef(np.log(summary.prompts), np.log(known))[0, 1]
        yield f"correlation     {correlation:+.2f} of log prompt and log output length"


def _sharing_lines(summary: TraceSummary, block_size: int) -> Iterator[str]:
    if summary.turns:
        num = sum(summary.turns.values())
        total = sum(turns * count for turns, count in summary.turns.items())
        closed = summary.num_requests - len(summary.arrivals_s)
        yield (
            f"sessions        {num:,} with {total / num:.3g} turns on average, at most {max(summary.turns)}; "
            f"{count(closed, 'closed-loop turn')}"
        )
    if summary.tenants:
        ranked = sorted(summary.tenants.items(), key=lambda item: -item[1])
        shares = [(repr(name) if "," in name else visible(name), num) for name, num in ranked[:5]]
        if num_without := summary.num_requests - sum(summary.tenants.values()):
            shares.append(("none", num_without))
        named = ", ".join(f"{name} {num / summary.num_requests:.0%}" for name, num in shares)
        yield f"tenants         {len(ranked)}: {named}{', …' if len(ranked) > 5 else ''}"
    if summary.num_cancelled:
        yield f"cancelled       {count(summary.num_cancelled, 'request')} cancelled some time after arrival"
    yield (
        f"shared prefixes {summary.shared():.1%} of prompt tokens with an infinite cache "
        f"({summary.shared(block_size):.1%} in whole blocks of {block_size})"
    )


def _open(options: argparse.Namespace) -> TraceSource:
    if options.format not in _FORMATS:
        raise ConfigError(unknown(f"there is no trace format {options.format!r}", options.format, _FORMATS))
    more: dict[str, Any] = {}
    if options.tokenizer is not None:
        from experiments.wiring.traces import load_tokenizer

        if options.format != "sharegpt":
            raise ConfigError(f"--tokenizer goes with sharegpt only, not with {options.format}; leave it out")
        more["tokenizer"] = load_tokenizer(options.tokenizer)
    for name, check in (("columns", check_columns), ("where", check_where)):
        text = getattr(options, name)
        if text is None:
            continue
        from experiments.configuration.grammar import parsed  # not at the top: seldom needed

        if options.format not in OWN:
            raise ConfigError(f"--{name} goes with {', '.join(OWN)}, not with {options.format}")
        more[name] = parsed(f"trace.{name}={text}").value()
        check(more[name])
    if options.limit is not None:
        require_whole("--limit", options.limit, 1)
    from experiments.wiring.traces import reading

    with reading():
        return open_trace(options.format, options.file, options.limit, **more)


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("format", help=", ".join(_FORMATS))
    parser.add_argument("file", type=Path)
    parser.add_argument("--limit", type=int, help="read at most this many rows")
    parser.add_argument(
        "--columns", help="csv, jsonl, parquet: as trace.columns, '{arrival_time: <its name there>, …}'"
    )
    parser.add_argument(
        "--where", help="csv, jsonl, parquet: as trace.where, '{<a name there>: <value or list>, …}': the rows to keep"
    )
    parser.add_argument("--tokenizer", help="sharegpt: a local folder with a tokenizer")


def _check_out(out: Path, overwrite: bool, sources: list[Any]) -> None:
    if format_suffix(out) not in (".jsonl", ".parquet") or out.name.endswith((".parquet.gz", ".parquet.zst")):
        raise ConfigError(f"{out}: unknown extension; name it .jsonl (.gz or .zst behind it) or .parquet")
    refuse_existing(out, overwrite, "file")
    if any(is_same_file(out, Path(source)) for source in sources):
        raise RunFolderError(f"{out} is what is read; choose another file")
