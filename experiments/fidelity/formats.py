"""Determines the format of a measured file, by its content or from --format, and reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments.fidelity import aiperf, guidellm, request_log, servingsim, study, vllm_bench
from experiments.fidelity.fields import csv_columns, json_value
from experiments.fidelity.measured import MeasuredRun
from experiments.fidelity.study import StudyRun
from testbed.errors import ConfigError, TraceError
from testbed.foreign_text import unknown
from testbed.traces.readers.open_text import existing_file, read_pieces

Reader = Callable[[str, Path], list[MeasuredRun]]  # all runs of a file; TraceError has one line
STUDY, RUN_FOLDER, REQUEST_LOG = "study", "run-folder", "request-log"
READERS: dict[str, Reader] = {
    "vllm-bench": vllm_bench.read_vllm_bench,
    "aiperf": aiperf.read_aiperf,
    "guidellm": guidellm.read_guidellm,
    "llmservingsim": servingsim.read_servingsim,
    "llmservingsim-bench": servingsim.read_servingsim_bench,
    REQUEST_LOG: request_log.read_request_log,
}
_MARKS: tuple[tuple[str, set[str]], ...] = (  # a file with these columns, or fields of its first object, has the format
    ("guidellm", {"benchmarks"}),
    ("aiperf", {"metadata", "metrics"}),
    ("llmservingsim-bench", {*servingsim.BENCH_FIELDS}),
    ("llmservingsim", {"queuing_delay", "TTFT", "arrival"}),
    *((REQUEST_LOG, {name}) for name in ("arrival_s", "ttft_s", "ttft_ms")),  # what else it lacks, its reader names
    (REQUEST_LOG, {"arrival_time", "prompt_tokens"}),
    *(("vllm-bench", {name}) for name in ("ttfts", "itls", "input_lens", "mean_ttft_ms", "request_throughput")),
)
FORMATS = (*READERS, STUDY, RUN_FOLDER)


class Files(NamedTuple):
    """The content of the files: runs with their requests, and runs of which only aggregates are known."""

    measured: list[MeasuredRun]
    study: list[StudyRun]


def read_files(
    files: list[Path],
    given: list[str],
    format_name: str | None = None,
    of_logs: Mapping[str, Any] = MappingProxyType({}),
) -> Files:
    """Reads each file in its format. given: the user's overrides. of_logs: `columns` and `where` of logs of one's own.
    Raises TestbedError with a message of one line."""
    found, names = Files([], []), []
    readers = READERS | {REQUEST_LOG: partial(request_log.read_request_log, **of_logs)}
    for file in files:
        text = "".join(read_pieces(existing_file(file, "a measured run")))
        name = format_name or recognise(text) or (REQUEST_LOG if of_logs else None)
        names.append(name)
        if name == STUDY:
            values = json_value(text, str(file))
            if not isinstance(values, list):
                raise TraceError(
                    f"{file}: found a JSON {type(values).__name__}; expected a list of runs, as a study is"
                )
            found.study.extend(study.read_study(values, file, given))
        elif name in readers:
            found.measured.extend(readers[name](text, file))
        elif name is None:
            raise TraceError(
                f"{file}: not recognised; say with --format what it is: {', '.join(FORMATS)} (of a log of your own: "
                "trace.columns={ttft_s: <its name>, …})"
            )
        else:
            raise TraceError(f"{file}: --format {name} is of folders; expected {', '.join((*READERS, STUDY))}")
    if of_logs and REQUEST_LOG not in names:
        raise ConfigError(f"trace.{next(iter(of_logs))} is for logs of your own (--format {REQUEST_LOG}); leave it out")
    study.check_names(found.study)
    return found


def check_format(name: str | None) -> None:
    if name is not None and name not in FORMATS:
        raise TraceError(unknown(f"--format is {name!r}", name, FORMATS))


def recognise(text: str) -> str | None:
    """The format of a file's text; None if it is not recognised."""
    start = text.lstrip()[:1]
    if start == "[":
        return STUDY
    names = set(_first_object(text)) if start == "{" else set(csv_columns(text))
    return next((name for name, marks in _MARKS if marks <= names), None)


def _first_object(text: str) -> dict[str, Any]:
    """The JSON object in the first line or in the whole text; empty if there is none."""
    for part in (text.lstrip().splitlines()[0], text):
        try:
            found = json.loads(part)
        except (ValueError, RecursionError):
            continue
        return found if isinstance(found, dict) else {}
    return {}
