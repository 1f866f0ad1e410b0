"""Runs a configuration and keeps what chance decided in it, by request, apart from what the policies made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from experiments import build, run
from experiments.config import RunConfig
from testbed.core.outcome import Finished
from testbed.core.request import Request
from tests.experiments.kit import manifest_of


@dataclass
class Observer:
    """What was seen; every dict is by request id."""

    arrived: list[str] = field(default_factory=list)  # in the order in which they came
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    output_ids: dict[str, list[int]] = field(default_factory=dict)
    tenants: dict[str, str | None] = field(default_factory=dict)
    open_arrivals_ns: dict[str, int] = field(default_factory=dict)
    thinks_ns: dict[str, int] = field(default_factory=dict)  # of closed-loop turns: arrival - end of the turn before
    sampling_seeds: dict[str, int | None] = field(default_factory=dict)
    outputs: dict[str, list[list[int]]] = field(default_factory=dict)
    ranks: dict[str, Any] = field(default_factory=dict)  # in a queue by key
    predictions: dict[str, int | None] = field(default_factory=dict)
    digest: str = ""
    fingerprint: str = ""
    scheduler: Any = None
    oracle: Any = None
    _ends_ns: dict[tuple[str, int], int] = field(default_factory=dict)

    def note(self, request: Request) -> None:
        name = request.request_id
        self.arrived.append(name)
        self.token_ids[name] = list(request.prompt_token_ids)
        self.output_ids[name] = list(request.forced_output or ())
        self.tenants[name] = request.tenant
        self.sampling_seeds[name] = request.sampling.seed
        before = self._ends_ns.get((request.session_id or "", (request.turn or 0) - 1))
        if before is None:
            self.open_arrivals_ns[name] = request.arrival_ns
        else:
            self.thinks_ns[name] = request.arrival_ns - before

    def added(self, request: Request) -> None:
        """After the scheduler has it: what the policies believe of it."""
        for seq in self.scheduler.unfinished():
            if seq.request.request_id == request.request_id:
                key = getattr(self.scheduler._core.queue, "_key", None)
                self.ranks[request.request_id] = None if key is None else key(seq)[0]
                self.predictions[request.request_id] = self.oracle.predict(seq)

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        for item in finished:
            request = item.request
            self._ends_ns[request.session_id or "", request.turn or 0] = now_ns
            self.outputs[request.request_id] = [list(output) for output in item.outputs]


def observe(config: RunConfig, folder: Path) -> Observer:
    """Runs `config` with an observer between it and its scheduler."""
    observer = Observer()
    made = build.make_policy
    wired = build.build_scheduler

    def make_policy(kind: str, value: Any) -> Any:
        policy = made(kind, value)
        if kind == "scheduler.oracle":
            observer.oracle = policy
        return policy

    def build_scheduler(*args: Any, **kwargs: Any) -> Any:
        scheduler = observer.scheduler = wired(*args, **kwargs)
        add = scheduler.add

        def noted(request: Request) -> None:
            observer.note(request)
            add(request)
            observer.added(request)

        scheduler.add = noted
        return scheduler

    class Recorders(run.Recorders):
        def ended(self, finished: list[Finished], now_ns: int) -> None:
            observer.ended(finished, now_ns)
            super().ended(finished, now_ns)

    with (
        patch.object(build, "make_policy", make_policy),
        patch.object(build, "build_scheduler", build_scheduler),
        patch.object(run, "Recorders", Recorders),
    ):
        result = run.execute(config, folder)
    assert result.exit_status == 0, result.message
    manifest = manifest_of(folder)
    observer.digest, observer.fingerprint = manifest["digest"], manifest["trace"]["fingerprint"]
    return observer
