"""A point: one rate of one policy under one seed. Runs it, stops it when its SLO is lost, and stores the result."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from analysis.load import flatten, load_run
from analysis.measures.capacity import Load, count_load
from analysis.measures.occupancy import run_end_ns
from analysis.measures.slo import SLO
from analysis.measures.steadiness import Waiting
from analysis.reading.files import read_json
from analysis.reading.rows import FileRows
from analysis.reports.trust import Source
from experiments.configuration.config import JUDGING, RunConfig
from experiments.runs.run import INTERRUPTED, execute
from experiments.runs.run_folder import write_json
from testbed.core.commands import Recorder, StepView
from testbed.core.outcome import Finished
from testbed.core.request import Request
from testbed.core.sequence import Sequence
from testbed.errors import RunFolderError, TestbedError
from testbed.records.latencies import e2e_s, tpot_s, ttft_s
from testbed.records.schema import COMPLETED


class LostError(TestbedError):
    """The required attainment cannot be reached any more."""


@dataclass(slots=True)
class _Open:
    """A request that has not ended; instants in ns, -1: not yet."""

    arrival: int
    slo: SLO
    first: int = -1
    last: int = -1
    largest_gap: int = 0
    has_failed: bool = False


class SloWatch(Recorder):
    """A `Recorder` that raises LostError when more than `max_failed` requests have failed.

    A request has failed as soon as that is certain: its first token is overdue, or it ended beyond a limit. The
    arithmetic is that of `analysis.measures.slo`, so a request that fails here fails there, too. TPOT of a group of
    sequences is not checked here. Single tokens are only checked if there is a limit on gaps, as they are many.
    """

    def __init__(self, slo: SLO, max_failed: int) -> None:
        self.over: dict[str, int] = {}
        self.num_failed = 0
        self.is_lost = False
        self._slo, self._max_failed = slo, max_failed
        self._has_gaps = "itl_max_s" in slo.limited
        self._open: dict[str, _Open] = {}
        self._without_token: dict[str, _Open] = {}
        self._due: dict[float, deque[_Open]] = {}  # by limit on TTFT, in order of arrival; some may have a token
        self._end_ns = 0  # of the last step

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        one = _Open(request.arrival_ns, slo := self._slo.of(request.tenant, request.priority))
        self._open[request.request_id] = self._without_token[request.request_id] = one
        if slo.ttft_s is not None:
            self._due.setdefault(slo.ttft_s, deque()).append(one)

    def committed(self, step: StepView) -> None:
        self._end_ns = now = step.end_ns
        if self._without_token:
            for seq in step.emitters:
                if (one := self._without_token.pop(seq.request_id, None)) is not None:
                    one.first = now
        if self._has_gaps:
            self._measure_gaps(step.emitters, now)
        for limit, due in self._due.items():
            while due and (due[0].first >= 0 or ttft_s(due[0].arrival, now) > limit):
                one = due.popleft()
                if ttft_s(one.arrival, one.first if one.first >= 0 else now) > limit:
                    self._fail(one, "ttft_s")
        self._raise_if_lost()

    def _measure_gaps(self, emitters: list[Sequence], now: int) -> None:
        for seq in emitters:
            one = self._open[seq.request_id]
            if one.last >= 0:
                one.largest_gap = max(one.largest_gap, now - one.last)
            one.last = now

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        for item in finished:
            one = self._open.pop(item.request.request_id)
            slo = one.slo
            self._without_token.pop(item.request.request_id, None)
            if item.reason.value not in COMPLETED:
                self._fail(one, "unfinished")
                continue
            num = item.num_output_tokens if item.request.sampling.num_seqs == 1 else 0
            tpot = tpot_s(one.first, self._end_ns, num)
            if slo.tpot_s is not None and tpot is not None and tpot > slo.tpot_s:
                self._fail(one, "tpot_s")
            if slo.itl_max_s is not None and one.largest_gap / 1e9 > slo.itl_max_s:
                self._fail(one, "itl_max_s")
            if slo.e2e_s is not None and e2e_s(one.arrival, now_ns) > slo.e2e_s:
                self._fail(one, "e2e_s")
            deadline = item.request.deadline_ns
            if slo.lateness_s is not None and deadline is not None and (now_ns - deadline) / 1e9 > slo.lateness_s:
                self._fail(one, "lateness_s")
        self._raise_if_lost()

    def _fail(self, one: _Open, limit: str) -> None:
        self.over[limit] = self.over.get(limit, 0) + 1
        self.num_failed += not one.has_failed
        one.has_failed = True

    def _raise_if_lost(self) -> None:
        if self.num_failed > self._max_failed:
            self.is_lost = True
            raise LostError(f"{self.num_failed} requests have failed the SLO, and {self._max_failed} may")


def run_point(
    raw: dict[str, Any], slo: SLO, max_failed: int | None, file: Path, num_requests: int, by_session: bool, scratch: str
) -> None:
    """Simulates (or runs) a point and writes its file. max_failed: the run is stopped when more have failed; None:
    never. num_requests: of its trace, used if the run was stopped before it counted them. by_session: see `count_load`.
    scratch: a folder for the run's temporary folder.

    Raises TestbedError with a message of one line, or KeyboardInterrupt.
    """
    config = RunConfig.from_container(raw)
    sends_late = getattr(config.backend, "frontend_ns_per_token", 0)  # then tokens reach clients later
    watch = None if max_failed is None or sends_late else SloWatch(slo, max_failed)
    with TemporaryDirectory(dir=scratch) as folder:
        result = execute(config, Path(folder), command="testbed capacity", watch=watch, has_summary=False)
        if result.exit_status == INTERRUPTED:
            raise KeyboardInterrupt
        if watch is not None and watch.is_lost:
            num = result.manifest["trace"]["num_requests"] or num_requests
            load = Load(False, num, watch.num_failed, watch.over)
        elif result.status != "complete":
            raise TestbedError(result.manifest.get("failure") or result.message)  # the folder is deleted
        else:
            run = load_run(result.folder)
            end_ns = run_end_ns(run.requests, FileRows(run.path / "steps.parquet"))
            load = count_load(run.requests, slo, end_ns, by_session=by_session)
    is_outside = bool(result.manifest.get("num_extrapolated_steps"))  # the first note says so, and so does the source
    notes = list(result.manifest.get("cost_notes") or [])[is_outside:]
    source = Source.of(result.manifest, flatten(config.raw)) if config.is_simulated else None
    known = {"fingerprint": result.manifest["trace"]["fingerprint"], "digest": result.manifest.get("digest")}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"load": asdict(load), "max_failed": max_failed, "notes": notes, "source": source, **known})


def read_point(file: Path, max_failed: int | None) -> Load | None:
    """The load in the file; None if there is no file, or if its run was stopped early under another `max_failed`.
    Raises RunFolderError if it holds no point."""
    if not file.exists():
        return None
    try:
        stored = read_json(file)
        num, work, spread = stored["load"]["waiting"]
        load = Load(**stored["load"] | {"waiting": Waiting(tuple(num), tuple(work), spread)})
        most, _ = stored["max_failed"], stored["notes"]
        if not 0 <= load.num_failed <= load.num_requests:
            raise ValueError
    except (RunFolderError, KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{file} is damaged; delete it: the same command then runs this rate again") from error
    return load if load.is_whole or most == max_failed else None


def point_name(raw: dict[str, Any]) -> str:
    """The name of a point's file: a hash of the configuration that is run."""
    decides = {key: value for key, value in raw.items() if key not in JUDGING or key == "slo"}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
