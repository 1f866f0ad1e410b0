"""The run folder that a user's vLLM server writes while this testbed's scheduler runs in it: records, tape, trace."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from analysis.load import Run
from experiments.configuration.config import RunConfig
from experiments.configuration.saved import MODEL_FOLDER, TRACE_FILE
from experiments.runs.environment import describe_machine
from experiments.runs.in_vllm import manifest_in_vllm
from experiments.runs.run_folder import claim, describe_failure, refuse_overwrite, write_json
from experiments.wiring.engines import describe_engine
from testbed import compiled
from testbed.core.commands import Recorder, StepView
from testbed.core.outcome import Finished, FinishReason
from testbed.core.request import Request
from testbed.core.scheduler import Scheduler
from testbed.records.recorder import RunRecorder
from testbed.records.recorders import together
from testbed.records.tape import TapeWriter
from testbed.traces.arrange import arrange
from testbed.traces.fingerprint import fingerprint
from testbed.traces.readers.own import read_jsonl
from testbed.traces.schema import Part, Span, TokenIds, Trace, TraceRequest
from testbed.traces.serialize import row_to_json, write_jsonl

_BOUNDS = "of requests that had not ended, outputs are as long as they had leave for"


class _Trace(Recorder):
    """Writes trace.jsonl: a row for each request as it arrives, with an output of its maximum length. At the end each
    row gets the actual output. Until then outputs are in an unnamed temporary file, as an engine may serve for days."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w", encoding="ascii")
        self._num = self._num_bytes = 0  # completely written rows, and their bytes
        self._ended = TemporaryFile(dir=path.parent)  # noqa: SIM115  as long as the engine lives
        self._outputs: dict[str, tuple[int, int]] = {}  # request id -> offset and bytes of its output in that file
        self._cancelled_ns: dict[str, int] = {}  # request id -> time from arrival to abort

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        self._num += 1
        row = TraceRequest(
            request.request_id, request.arrival_ns, (TokenIds(array("i", request.prompt_token_ids)),),
            Span(self._num, 0, request.sampling.max_tokens or 1), priority=request.priority,
            cache_salt=request.cache_salt or None,
        )  # fmt: skip
        num_bytes = self._file.write(json.dumps(row_to_json(row), separators=(",", ":")) + "\n")
        self._file.flush()
        self._num_bytes += num_bytes

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        for one in finished:
            name = one.request.request_id
            if len(one.output_token_ids):
                output = array("i", one.output_token_ids).tobytes()
                self._outputs[name] = self._ended.tell(), len(output)
                self._ended.write(output)
            if one.reason is FinishReason.ABORT:
                self._cancelled_ns[name] = max(1, now_ns - one.request.arrival_ns)

    def close(self) -> None:
        """Closes the file and removes a row that a full disk truncated: the tape is replayed with complete rows."""
        if not self._file.closed:
            with suppress(OSError):
                self._file.close()
            os.truncate(self._path, self._num_bytes)

    def finish(self) -> Trace | None:
        """Writes the trace with the actual outputs and returns it; None if there were no requests."""
        self.close()
        if not self._num:
            return None
        rows = [
            row._replace(output=self._output(row), cancel_after_ns=self._cancelled_ns.get(row.request_id), place="")
            for row in read_jsonl(self._path)
        ]
        trace = arrange(self._path.name, rows)
        write_jsonl(trace, self._path)
        return trace

    def _output(self, row: TraceRequest) -> Part | None:
        if row.request_id not in self._outputs:
            return row.output
        begin, num_bytes = self._outputs[row.request_id]
        self._ended.seek(begin)
        return TokenIds(array("i", self._ended.read(num_bytes)))


class ServedFolder(Recorder):
    """A run folder that is written while vLLM serves. If the engine is killed, the tape in it can still be replayed.

    If the folder can no longer be written, serving continues and `say` gets a message.
    """

    def __init__(
        self, folder: Path, config: RunConfig, scheduler: Scheduler, said: dict[str, Any], unpriced: str,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._folder, self._config, self._scheduler, self._say = folder.absolute(), config, scheduler, say
        self._lost: OSError | None = None  # the error after which nothing more is written
        refuse_overwrite(self._folder, overwrite=False, key="out", allow=None)
        raw = config.raw
        raw["trace"]["path"] = str(self._folder / TRACE_FILE)
        if raw["model"].get("path"):  # else its steps cannot be priced
            raw["model"]["path"] = str(self._folder / MODEL_FOLDER)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / MODEL_FOLDER).mkdir(exist_ok=True)
        write_json(self._folder / MODEL_FOLDER / "config.json", said["model"]["hf_config"])
        claim(self._folder, config)
        self._recorder = RunRecorder(self._folder)
        self._tape = TapeWriter(self._folder / "tape.jsonl", is_live=True)
        self._trace = _Trace(self._folder / TRACE_FILE)
        self._records = together([self._recorder, self._trace, self._tape])  # a tape's requests need rows in the trace
        self._manifest = self._describe(said) | {"unpriced": unpriced or None}
        write_json(self._folder / "manifest.json", self._manifest)

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        self._tell(self._records.arrived, request, now_ns, step)

    def aborted(self, request_id: str, now_ns: int, step: int) -> None:
        self._tell(self._records.aborted, request_id, now_ns, step)

    def prefixes_reset(self, now_ns: int, step: int) -> None:
        self._tell(self._records.prefixes_reset, now_ns, step)

    def launched(self, step: StepView) -> None:
        self._tell(self._records.launched, step)

    def committed(self, step: StepView) -> None:
        self._tell(self._records.committed, step)

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        self._tell(self._records.ended, finished, now_ns)

    def _tell(self, method: Callable[..., None], *given: Any) -> None:
        """Calls a method of the records unless an earlier write failed."""
        if self._lost is None:
            try:
                method(*given)
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Stops recording after a write error; keeps the records so far, if the files can be closed."""
        self._lost = error
        self._say(f"nothing more is recorded in {self._folder}: {describe_failure(error)}; serving goes on")
        for close in (self._recorder.close, self._tape.close, self._trace.close):
            with suppress(OSError):
                close()
        self.failed(error)

    def failed(self, error: BaseException) -> None:
        """Writes the error that ended the loop or the recording into the manifest, if possible."""
        self._manifest |= {
            "failure": describe_failure(error), "num_steps": self._scheduler.num_steps,
            "num_sent": self._recorder.num_sent,
        }  # fmt: skip
        with suppress(OSError):
            write_json(self._folder / "manifest.json", self._manifest)

    def finish(self) -> None:
        """Completes the folder when vLLM shuts down."""
        self._tell(self._finish)

    def _finish(self) -> None:
        self._recorder.close()
        self._tape.close()
        scheduler = self._scheduler
        is_whole = not scheduler.has_work and "failure" not in self._manifest
        trace = self._trace.finish()
        self._manifest |= {
            "status": "complete" if is_whole else "partial",
            "trace": {
                "name": TRACE_FILE, "num_requests": 0 if trace is None else trace.num_requests,
                "fingerprint": None if trace is None else fingerprint(trace),
                "notes": [] if is_whole else [_BOUNDS],
            },
        } | describe_engine(scheduler, self._recorder.num_sent)  # fmt: skip
        write_json(self._folder / "manifest.json", self._manifest)
        if trace is not None:
            write_json(self._folder / "summary.json", Run(self._folder, self._config.raw, self._manifest).summarise())
        if is_whole:
            (self._folder / "done").write_text(f"{scheduler.digest:016x}\n")

    def _describe(self, said: dict[str, Any]) -> dict[str, Any]:
        config, core = self._config, compiled.current()
        return manifest_in_vllm(said, config, "scheduler_cls=real.vllm.TestbedScheduler") | {
            "status": "partial", "created": datetime.now().astimezone().isoformat(timespec="seconds"),
            "core": core.mode, "compiler": core.why if core.mode == "compiled" else None,
            "machine": describe_machine(), "model": Path(said["model"]["name"]).name, "attention": "vllm",
            "trace": {"name": TRACE_FILE, "num_requests": None, "fingerprint": None, "notes": [_BOUNDS]},
            "num_steps": 0, "num_sent": 0, "prefix_cache": None,
        }  # fmt: skip
