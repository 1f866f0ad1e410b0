"""One rate of one policy under one seed: its run, and the file that keeps what came out."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from analysis.load import load_run
from analysis.measures.capacity import Load, count_load
from analysis.measures.metrics import SLO
from experiments.capacity.watch import SloWatch
from experiments.configuration.config import JUDGING, RunConfig
from experiments.runs.run import INTERRUPTED, execute
from experiments.runs.run_folder import write_json
from testbed.errors import TestbedError


def run_point(
    raw: dict[str, Any], slo: SLO, max_failed: int | None, file: Path, num_requests: int, scratch: str
) -> None:
    """Simulates (or runs) it and writes the file, whole. max_failed: the run ends when more have failed; None: never.
    num_requests: of its trace, where the run was stopped before it knew. scratch: a folder for the run's own.

    Raises TestbedError in one line, KeyboardInterrupt.
    """
    watch = None if max_failed is None else SloWatch(slo, max_failed)
    with TemporaryDirectory(dir=scratch) as folder:
        result = execute(RunConfig.from_container(raw), Path(folder), command="testbed capacity", watch=watch)
        if result.exit_status == INTERRUPTED:
            raise KeyboardInterrupt
        if watch is not None and watch.is_lost:
            num = result.manifest["trace"]["num_requests"] or num_requests
            load = Load(False, num, watch.num_failed, watch.over)
        elif result.status != "complete":
            raise TestbedError(result.manifest.get("failure") or result.message)  # the folder is not kept
        else:
            load = count_load(load_run(result.folder).requests, slo, result.summary["duration_s"])
    notes = list(result.manifest.get("cost_notes") or [])
    known = {"fingerprint": result.manifest["trace"]["fingerprint"], "digest": result.manifest.get("digest")}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"load": asdict(load), "max_failed": max_failed, "notes": notes, **known})


def read_point(file: Path, max_failed: int | None) -> Load | None:
    """What the file holds; None if there is none, or one that was stopped where more is wanted."""
    if not file.exists():
        return None
    stored = json.loads(file.read_text())
    load = Load(**stored["load"] | {"waiting": tuple(stored["load"]["waiting"])})
    return load if load.is_whole or stored["max_failed"] == max_failed else None


def point_name(raw: dict[str, Any]) -> str:
    """Of the file: a hash of the configuration that is run."""
    decides = {key: value for key, value in raw.items() if key not in JUDGING or key == "slo"}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
