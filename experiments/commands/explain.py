"""`testbed explain`: why did this request wait? Obtains the decisions of a run; `analysis/` interprets them.

Most runs do not record decisions, but they can be recomputed: a simulated run is repeated, the tape of a real run is
replayed, and the decision digest must be the same.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq

from analysis.explain.decisions import DECISIONS_FILE
from analysis.load import Run, load_run, num_replicas
from analysis.reading.rows import read_table
from experiments.commands.app import config_from
from experiments.configuration.settings import RecordConfig
from experiments.console import Parser, folder_named
from experiments.runs.parity import check_parity, num_tapes
from experiments.runs.repeat import repeating
from experiments.runs.run import INTERRUPTED, execute
from experiments.runs.run_folder import refuse_overwrite, refuse_running
from experiments.wiring.engines import RunRecords, fleet_digest
from testbed.core.commands import Recorder, StepView
from testbed.errors import ConfigError, RunFolderError
from testbed.foreign_text import visible


def main(arguments: list[str]) -> int:
    parser = Parser("testbed explain", description="Why did this request wait?")
    parser.add_argument("run", type=folder_named, help="a run folder")
    parser.add_argument("request", nargs="?", help="a request's id; without: all requests in sum")
    parser.add_argument(
        "--keep", type=folder_named, metavar="FOLDER", help="keep the run with its decisions here, for pandas"
    )
    parser.add_argument(
        "--from", type=float, dest="from_s", metavar="S", help="sum up those that came from this second on"
    )
    parser.add_argument("--to", type=float, dest="to_s", metavar="S", help="sum up those that came before this second")
    options = parser.parse_args(arguments)
    if options.request is not None and (options.from_s, options.to_s) != (None, None):
        raise ConfigError("--from and --to choose requests, and one is named; leave out either")
    refuse_running(options.run)
    from analysis.explain.frames import refuse_unknown  # not at the top: pandas is slow to import
    from analysis.explain.request import explain_request
    from analysis.explain.whole_run import explain_run
    from analysis.timelines.export import LATEST_S, Window

    window = Window(options.from_s or 0.0, LATEST_S if options.to_s is None else options.to_s)
    if options.request is not None:
        refuse_unknown(load_run(options.run), options.request)
    with explained(options.run, options.keep) as (run, source):
        if options.request is None:
            to_s = math.inf if options.to_s is None else window.to_s
            text = explain_run(run, options.run, window.from_s, to_s)
        else:
            text = explain_request(run, options.request)
        is_complete = run.is_complete
    print("\n".join(map(visible, text.split("\n"))))  # names of requests are whatever the trace says
    print(f"\nsource       {source}")
    if not is_complete:
        print("partial      the run did not finish: all this is of the steps that it had")
    return 0


@contextmanager
def explained(folder: Path, keep: Path | None = None) -> Iterator[tuple[Run, str]]:
    """Yields the run with its decisions, including the request for which each preemption was made, and their source.

    keep: the folder in which to keep them; None: a temporary one. Raises TestbedError if they cannot be recomputed.
    """
    run = load_run(folder)
    has_steps = pq.read_metadata(run.path / "steps.parquet").num_rows > 0
    has_tape = any(folder.glob("tape*.jsonl"))
    has_decisions = (folder / DECISIONS_FILE).is_file()
    is_explained = run.config.get("record", {}).get("explain") or not (run.is_simulated or has_tape)
    if has_decisions and has_steps and is_explained:
        yield run, f"{folder / DECISIONS_FILE}{'' if keep is None else f'; nothing to keep in {keep}'}"
        return
    if not (run.is_simulated or has_tape):
        missing = "no steps (record.steps=false)" if has_decisions else "no decisions.jsonl"
        raise RunFolderError(
            f"{folder} has {missing} and no tape to replay: who waited for whom is not known; make the run again with "
            "record.explain=true record.steps=true"
        )
    if keep is not None:
        refuse_overwrite(keep, overwrite=False, key="--keep", allow=None)
    with TemporaryDirectory(prefix="testbed-explain-") as scratch:
        target = keep or Path(scratch, "run")
        source = _repeat(run, target) if run.is_simulated else _replay(run, target)
        _lay_over(run, target)
        try:
            yield load_run(target), source if keep is None else f"{source}; kept in {keep}"
        except RunFolderError as error:  # of a file that was copied
            raise RunFolderError(str(error).replace(str(target), str(run.path))) from error


def _repeat(run: Run, target: Path) -> str:
    """Repeats a simulated run and records its decisions. Raises RunFolderError if they differ from the original."""
    num_steps = pq.read_metadata(run.path / "steps.parquet").num_rows
    if not (run.is_complete or num_steps):
        raise RunFolderError(
            f"{run.path} ended early, in its first step or with record.steps=false: there is nothing to explain; "
            f"why it ended: {run.manifest.get('failure') or 'it was killed'}"
        )
    changes = ["record.explain=true", "record.steps=true", "record.operators=false", "record.status_s=null"]
    cut = None if run.is_complete else _Until(num_steps)
    with repeating(run.path):
        result = execute(config_from(run.path, changes), target, command=f"testbed explain {run.path}", watch=cut)
    if result.exit_status == INTERRUPTED:
        raise KeyboardInterrupt
    if run.is_complete:
        if result.status != "complete":
            raise RunFolderError(f"{run.path} cannot be repeated: {result.message}")
        is_same = result.manifest["digest"] == run.manifest["digest"]
    else:  # compare the steps that were recorded
        digests = [read_table(path / "steps.parquet", ["digest"])["digest"] for path in (run.path, target)]
        is_same = len(digests[0]) <= len(digests[1]) and digests[0].equals(digests[1].slice(0, len(digests[0])))
    if not is_same:
        raise RunFolderError(
            f"{run.path} was repeated and decided otherwise: its config.yaml, the code, or a file or class that it "
            "names has changed since, or a policy draws without a seed; make the run again with record.explain=true"
        )
    return f"the run was simulated again: the same decision digest ({run.manifest['digest'] or 'of every step'})"


class _Until(Recorder):
    """Ends a simulation after `num_steps` steps, the number that the incomplete run recorded."""

    def __init__(self, num_steps: int) -> None:
        self._num_left = num_steps

    def committed(self, step: StepView) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            raise RunFolderError("the steps that were recorded are over")


def _replay(run: Run, target: Path) -> str:
    """Replays the tape of a real run and records its decisions. Raises RunFolderError if they differ from the tape."""
    target.mkdir(parents=True, exist_ok=True)
    with closing(RunRecords(RecordConfig(explain=True), target, num_tapes(run.path))) as records:
        reports = [check_parity(run.path, one, replica=number) for number, one in enumerate(records.recorders)]
    for divergence in [report.divergence for report in reports if report.divergence is not None]:
        raise RunFolderError(
            f"{run.path}: its tape, replayed, decides otherwise at step {divergence.step} ({divergence.reason}); "
            "`testbed parity` shows it"
        )
    shutil.copy(run.path / "config.yaml", target)
    digest = fleet_digest([report.digest for report in reports])
    return f"the run's tape was replayed: the same decision digest ({digest})"


def _lay_over(run: Run, target: Path) -> None:
    """Copies the run's own records next to the decisions, with its steps if it recorded them. Replicas are replayed one
    after the other: their replayed steps are kept, as these are in the order of the decisions."""
    names = ["requests.parquet", "manifest.json", "done"]
    is_in_order = run.is_simulated or num_replicas(run) == 1
    names += ["steps.parquet"] if is_in_order and pq.read_metadata(run.path / "steps.parquet").num_rows else []
    for name in names:
        if (run.path / name).exists():
            shutil.copy(run.path / name, target)
