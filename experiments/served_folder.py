"""The run folder that a vLLM of one's own leaves as it serves under this testbed's scheduler: records, tape, trace."""

from __future__ import annotations

import json
import os
from array import array
from datetime import datetime
from pathlib import Path
from typing import Any

from analysis.load import Run
from experiments.config import RunConfig
from experiments.environment import describe_machine
from experiments.observe.importing import manifest_in_vllm
from experiments.run_folder import MODEL_FOLDER, TRACE_FILE, claim, refuse_overwrite, write_json
from testbed import compiled
from testbed.core.outcome import Finished, FinishReason
from testbed.core.request import Request
from testbed.core.scheduler import Scheduler
from testbed.records.recorder import RunRecorder
from testbed.records.recorders import NoRecords, together
from testbed.records.schema import decision
from testbed.records.tape import TapeWriter
from testbed.traces.arrange import arrange
from testbed.traces.fingerprint import fingerprint
from testbed.traces.readers.own import read_jsonl
from testbed.traces.schema import Span, TokenIds, Trace, TraceRequest
from testbed.traces.serialize import row_to_json, write_jsonl

_BOUNDS = "of requests that had not ended, outputs are as long as they had leave for"


class _Trace(NoRecords):
    """trace.jsonl, a row for each request as it comes, with as many tokens of output as it has leave for; in the end
    with those that came."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w", encoding="utf-8")
        self._num = 0
        self._outputs: dict[str, array[int]] = {}
        self._cancelled_ns: dict[str, int] = {}  # after their arrivals

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        self._num += 1
        row = TraceRequest(
            request.request_id, request.arrival_ns, (TokenIds(array("i", request.prompt_token_ids)),),
            Span(self._num, 0, request.sampling.max_tokens or 1), priority=request.priority,
            cache_salt=request.cache_salt or None,
        )  # fmt: skip
        self._file.write(json.dumps(row_to_json(row), separators=(",", ":")) + "\n")
        self._file.flush()

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        for one in finished:
            name = one.request.request_id
            if len(one.output_token_ids):
                self._outputs[name] = array("i", one.output_token_ids)
            if one.reason is FinishReason.ABORT:
                self._cancelled_ns[name] = max(1, now_ns - one.request.arrival_ns)

    def close(self) -> None:
        self._file.close()

    def finish(self) -> Trace | None:
        """Writes what came of the requests; the whole trace, or None of none."""
        self.close()
        if not self._num:
            return None
        rows = [
            row._replace(
                output=row.output if (output := self._outputs.get(row.request_id)) is None else TokenIds(output),
                cancel_after_ns=self._cancelled_ns.get(row.request_id),
                place="",
            )
            for row in read_jsonl(self._path)
        ]
        trace, written = arrange(self._path.name, rows), self._path.with_suffix(".tmp")
        write_jsonl(trace, written)
        os.replace(written, self._path)
        return trace


class ServedFolder:
    """A run folder that is written as vLLM serves. A killed engine leaves one whose tape can be replayed."""

    def __init__(
        self, folder: Path, config: RunConfig, scheduler: Scheduler, said: dict[str, Any], unpriced: str
    ) -> None:
        self._folder, self._config, self._scheduler = folder.absolute(), config, scheduler
        refuse_overwrite(self._folder, overwrite=False, key="out", allow=None)
        raw = config.raw
        raw["trace"]["path"] = str(self._folder / TRACE_FILE)
        if raw["model"].get("path"):  # else it has no price here
            raw["model"]["path"] = str(self._folder / MODEL_FOLDER)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / MODEL_FOLDER).mkdir(exist_ok=True)
        write_json(self._folder / MODEL_FOLDER / "config.json", said["model"]["hf_config"])
        claim(self._folder, config)
        self._recorder = RunRecorder(self._folder)
        self._tape = TapeWriter(self._folder / "tape.jsonl", decision, is_live=True)
        self._trace = _Trace(self._folder / TRACE_FILE)
        self._all = together([self._recorder, self._tape, self._trace])
        self.arrived, self.aborted = self._all.arrived, self._all.aborted
        self.committed, self.ended = self._all.committed, self._all.ended
        self.prefixes_reset = self._all.prefixes_reset
        self._manifest = self._describe(said) | {"unpriced": unpriced or None}
        write_json(self._folder / "manifest.json", self._manifest)

    def finish(self) -> None:
        """vLLM shuts down: the folder is closed."""
        self._recorder.close()
        self._tape.close()
        is_whole, scheduler, prefixes = not self._scheduler.has_work, self._scheduler, self._scheduler.blocks.prefixes
        trace = self._trace.finish()
        self._manifest |= {
            "status": "complete" if is_whole else "partial",
            "trace": {
                "name": TRACE_FILE, "num_requests": 0 if trace is None else trace.num_requests,
                "fingerprint": None if trace is None else fingerprint(trace),
                "notes": [] if is_whole else [_BOUNDS],
            },
            "num_steps": scheduler.num_steps,
            "num_sent": self._recorder.num_sent,
            "prefix_cache": {
                "queried_tokens": prefixes.num_queried_tokens, "hit_tokens": prefixes.num_hit_tokens
            },
            "digest": f"{scheduler.digest:016x}",
        }  # fmt: skip
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
