"""Why requests waited, as frames. They need a run with record.explain=true, or the copy that `testbed explain --keep`
makes of another run.

    stretches(run, request_id)   one request from its arrival to its end, without gaps: state, cause, other requests
    waits(run)                   every wait of every request, by cause
    preemptions(run)             every preemption: the victim, the request that needed its blocks, the cost

Each takes a `Run` or its folder, and raises RunFolderError with a message of one line.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, fields
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import pandas as pd

from analysis.explain.decisions import decided_steps
from analysis.explain.following import Follower, Stretch
from analysis.explain.taking import Taker
from analysis.explain.waiting import Engine, Life, Preempted, WaitRow
from analysis.load import Run, load_run, read_frame
from testbed.errors import RunFolderError

REQUEST_FACTS = (  # columns of requests.parquet; token instants are not needed
    "request_id", "tenant", "priority", "replica", "num_prompt_tokens", "num_output_tokens", "num_token_steps",
    "num_cached_tokens", "num_preemptions", "num_recomputed_tokens", "finish_reason", "finish_message", "arrival_ns",
    "queued_ns", "first_scheduled_ns", "first_token_ns", "finish_ns", "first_sent_ns", "last_sent_ns", "ttft_s",
    "tpot_s", "e2e_s",
)  # fmt: skip
PREEMPTED = [field.name for field in fields(Preempted) if field.name != "left"]
_ROWS = 1 << 16  # rows that are Python objects at a time
Source = Run | str | os.PathLike[str]


class Told:
    """The results of one pass over a run's decisions. requests: REQUEST_FACTS. follower: of request `request_id`.
    takers: with `within_s`, of the requests that arrived in [from, to), seconds; `is_asked` says which these are.
    explained: whether the causes of preemptions are required, which record.decisions alone does not record."""

    def __init__(
        self,
        source: Source,
        request_id: str | None = None,
        within_s: tuple[float, float] | None = None,
        *,
        explained: bool = True,
    ) -> None:
        self.run = source if isinstance(source, Run) else load_run(source)
        if request_id is not None:
            refuse_unknown(self.run, request_id)
        self.requests = read_frame(self.run.path / "requests.parquet", REQUEST_FACTS)
        low, high = within_s or (0.0, math.inf)
        self.is_asked = (self.requests["arrival_ns"] / 1e9).between(low, high, inclusive="left")
        self.follower: Follower | None = None
        self.takers: list[Taker] = []
        self._waits: list[pd.DataFrame] = []
        self._preempted: list[Preempted] = []
        engines = self._engines(request_id, with_takers=within_s is not None)
        for step in decided_steps(self.run, explained=explained):
            if (engine := engines.get(step.replica)) is not None:
                engine.take(step)
                if len(engine.rows) >= _ROWS:
                    self._flush(engine)
        for engine in engines.values():
            engine.close()
            self._flush(engine)
            self._preempted += engine.preempted

    @cached_property
    def waits(self) -> pd.DataFrame:
        return pd.concat(self._waits or [_frame([])], ignore_index=True)

    @property
    def preemptions(self) -> pd.DataFrame:
        rows = [[getattr(one, name) for name in PREEMPTED] for one in self._preempted]
        whole = dict.fromkeys(("back_ns", "caught_up_ns"), "Int64")
        frame = pd.DataFrame(rows, columns=PREEMPTED).astype(whole)
        return frame.sort_values("at_ns", kind="stable", ignore_index=True)

    @property
    def slowest(self) -> pd.DataFrame:
        """Of the requests asked for that got a token, the slowest 1 % by TTFT."""
        known = self.requests[self.is_asked & self.requests["ttft_s"].notna()]
        return known.sort_values("ttft_s", ascending=False, kind="stable").head(math.ceil(len(known) / 100))

    def _engines(self, request_id: str | None, *, with_takers: bool) -> dict[int, Engine]:
        lives: dict[int, list[Life]] = {}
        row: Any
        for row in self.requests.itertuples():
            queued_ns, finish_ns = (None if ns is pd.NA else int(ns) for ns in (row.queued_ns, row.finish_ns))
            life = Life(row.request_id, queued_ns or 0, finish_ns, int(row.num_prompt_tokens))
            lives.setdefault(int(row.replica), []).append(life)
        if with_takers:
            asked, slow = (
                dict(zip(frame["request_id"], frame[instant], strict=True))
                for frame, instant in ((self.requests[self.is_asked], "arrival_ns"), (self.slowest, "first_token_ns"))
            )
            self.takers = [Taker(replica, own, asked, slow) for replica, own in lives.items()]
            return dict(zip(lives, self.takers, strict=True))
        if request_id is None:
            return {replica: Engine(replica, own) for replica, own in lives.items()}
        replica, life = next((of, life) for of, own in lives.items() for life in own if life.request_id == request_id)
        self.follower = Follower(replica, lives[replica], life, int(self.run.manifest["block_size"]))
        return {replica: self.follower}

    def _flush(self, engine: Engine) -> None:
        if engine.rows:
            self._waits.append(_frame(engine.rows))
        engine.rows = []


def waits(source: Source) -> pd.DataFrame:
    """One row for each cause of each wait: `analysis.explain.waiting.WaitRow`. Times in ns, on the run's clock.

    The `ns` of a wait's rows add up to its end_ns - start_ns. The waits of a request do not overlap.
    """
    return Told(source).waits


def preemptions(source: Source) -> pd.DataFrame:
    """One row for each preemption, by time: `analysis.explain.waiting.Preempted`. Times in ns, on the run's clock."""
    return Told(source).preemptions


def stretches(source: Source, request_id: str) -> pd.DataFrame:
    """The stretches (`following.Stretch`) of one request, one row each; they cover [queued_ns, finish_ns]."""
    follower = Told(source, request_id).follower
    assert follower is not None
    names = [field.name for field in fields(Stretch)]
    return pd.DataFrame([asdict(one) for one in follower.stretches()], columns=names)


def _frame(rows: list[WaitRow]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(WaitRow._fields))


def refuse_unknown(run: Run, request_id: str) -> None:
    """Raises RunFolderError, which names the nearest ids, if the run has no such request."""
    known = read_frame(run.path / "requests.parquet", ["request_id"])["request_id"].tolist()
    if request_id not in known:
        begins = [name for name in known if str(name).startswith(request_id)]  # vLLM appends to ids
        near = begins[:3] or get_close_matches(request_id, known, n=3, cutoff=0.0)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise RunFolderError(f"{run.path} has no request {request_id!r} among its {len(known):,}{hint}")
