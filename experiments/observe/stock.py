"""`backend.decides=vllm`: a trace replayed on vLLM with its own scheduler, observed, into a run folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from experiments import build
from experiments.config import RunConfig
from experiments.observe.importing import Imported, Replayed, import_log
from experiments.observe.log import Sender
from real.driver import CLOCKS, RealTimeClock
from real.vllm.config import VllmConfig
from testbed.core.commands import Abort, Arrive
from testbed.core.interfaces import Inbox
from testbed.core.outcome import Finished, FinishReason
from testbed.core.request import Request
from testbed.errors import ConfigError
from testbed.traces.schema import Trace

LOG_FILE = "observed.jsonl"


def replay_stock(config: RunConfig, trace: Trace, inbox: Inbox, folder: Path, command: str) -> Imported:
    """Runs the trace to its end and makes the folder a run's; after Ctrl-C, of what was finished, and raises it."""
    assert isinstance(config.backend, VllmConfig)
    if config.backend.pace == "as_fast_as_possible":
        raise ConfigError("backend.pace=as_fast_as_possible moves a clock that vLLM's own scheduler does not look at")
    folder.mkdir(parents=True, exist_ok=True)
    backend = build.build_vllm_backend(config, observe=folder / LOG_FILE)
    is_cpu_time = config.backend.pace == "cpu_time"
    sender = Sender([], (time.process_time_ns if is_cpu_time else time.monotonic_ns)())
    stop: KeyboardInterrupt | None = None
    try:
        _serve(backend, inbox, CLOCKS[config.backend.pace](), sender.requests)
    except KeyboardInterrupt as pressed:
        stop = pressed
    finally:
        backend.close()
    pace = {"pace": config.backend.pace, "speed": config.backend.speed, "notes": []}
    imported = import_log(
        folder / LOG_FILE, folder, command=command,
        replayed=Replayed(config, trace, sender, pace, is_cut=stop is not None),
    )  # fmt: skip
    if stop is not None:
        raise stop
    return imported


def _serve(backend: Any, inbox: Inbox, clock: RealTimeClock, sent: list[Request]) -> None:
    """The loop of a server: what is due is added, then vLLM takes a step."""
    live: dict[str, Request] = {}
    clock.start()
    while True:
        for event in inbox.due(clock.now_ns()):
            if isinstance(event, Arrive):
                sent.append(event.request)
                live[event.request.request_id] = event.request
                backend.add(event.request)
            elif isinstance(event, Abort) and live.pop(event.request_id, None) is not None:
                backend.abort(event.request_id)
        if live:
            ended = [live.pop(name) for name in backend.step_alone() if name in live]
            if ended:
                now_ns = clock.now_ns()
                inbox.finished([Finished(request, FinishReason.LENGTH, "", 0, ()) for request in ended], now_ns)
            continue
        next_ns = inbox.next_ns()
        if next_ns is None:
            return
        clock.wait_until(next_ns)
