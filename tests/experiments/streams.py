"""Runs a configuration and keeps what chance decided in it, by request, apart from what the policies made of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from experiments.configuration.config import RunConfig
from experiments.runs import run
from experiments.wiring import build
from testbed.core.commands import Recorder
from testbed.core.outcome import Finished
from testbed.core.request import Request
from testbed.core.sequence import Sequence
from tests.experiments.kit import manifest_of


@dataclass
class Observer(Recorder):
    """What was seen; every dict is by request id."""

    arrivals: list[str] = field(default_factory=list)  # in the order in which they came
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
    oracle: Any = None
    _ends_ns: dict[tuple[str, int], int] = field(default_factory=dict)

    # --- a recorder ---

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        name = request.request_id
        self.arrivals.append(name)
        self.token_ids[name] = list(request.prompt_token_ids)
        self.output_ids[name] = list(request.forced_output or ())
        self.tenants[name] = request.tenant
        self.sampling_seeds[name] = request.sampling.seed
        before = self._ends_ns.get((request.session_id or "", (request.turn or 0) - 1))
        if before is None:
            self.open_arrivals_ns[name] = request.arrival_ns
        else:
            self.thinks_ns[name] = request.arrival_ns - before

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        for item in finished:
            request = item.request
            self._ends_ns[request.session_id or "", request.turn or 0] = now_ns
            self.outputs[request.request_id] = [list(one.token_ids) for one in item.completions]


class WatchedQueue:
    """A queue order, and an observer that is shown what comes to it: what do the policies believe of it?"""

    def __init__(self, order: Any, observer: Observer) -> None:
        self._order = order
        self._observer = observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._order, name)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._order)

    def push(self, seq: Sequence) -> None:
        self._order.push(seq)
        rank = getattr(self._order, "rank", None)
        self._observer.ranks[seq.request_id] = None if rank is None else rank(seq, 0)[0]
        self._observer.predictions[seq.request_id] = self._observer.oracle.predict(seq)


def observe(config: RunConfig, folder: Path) -> Observer:
    """Runs `config` with an observer beside its recorders and its queue."""
    observer = Observer()
    made, joined = build.make_policy, run.together

    def make_policy(kind: str, value: Any) -> Any:
        policy = made(kind, value)
        if kind == "scheduler.oracle":
            observer.oracle = policy
        return WatchedQueue(policy, observer) if kind == "scheduler.queue_order" else policy

    def together(recorders: Iterable[Recorder]) -> Recorder:
        return joined([*recorders, observer])

    with patch.object(build, "make_policy", make_policy), patch.object(run, "together", together):
        result = run.execute(config, folder)
    assert result.exit_status == 0, result.message
    manifest = manifest_of(folder)
    observer.digest, observer.fingerprint = manifest["digest"], manifest["trace"]["fingerprint"]
    return observer
