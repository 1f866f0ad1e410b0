"""Usage over time, from the step records: KV usage, queue lengths, busy share, and where the time went.

The counts of a step are those after its plan. They hold from the step's start to its end and, if work remains, on to
the start of the next step. If no request is in the system between two steps, the engine is idle: nothing runs, waits or
holds a block (cached, unreferenced blocks count as free).

Sums over steps are of whole numbers (counts times ns), hence exact and independent of the batches; each mean is one
division.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.reading.request_columns import Requests
from analysis.reading.rows import BoolArray, FloatArray, IntArray, as_rows, product_sum, whole
from analysis.reading.timeline import Instants, StepRun, step_runs

TIME_PARTS = ("schedule", "prepare", "swap", "forward", "sample")
COUNTS = ("running", "waiting", "swapped")
STEP_COLUMNS = (
    *(f"num_{name}" for name in COUNTS), "num_decode_tokens", "num_prefill_tokens", "free_gpu_blocks",
    *(f"{name}_ns" for name in TIME_PARTS),
)  # fmt: skip


def run_end_ns(requests: Any, steps: Any) -> int:
    """The end of the last step; without steps the last instant of any request. 0 for an empty run."""
    if ends := [int(whole(array).max()) for (array,) in as_rows(steps).batches(["end_ns"]) if len(array)]:
        return max(ends)
    names = ("arrival_ns", "first_token_ns", "finish_ns")
    pieces = Requests.of(requests).pieces()
    return max(0, *(int(piece.whole(name).max(initial=0)) for piece in pieces for name in names))


class Presence:
    """Whether any request is in the system at an instant, by the requests' own instants."""

    def __init__(self, requests: Requests) -> None:
        self._seen = Instants(requests, lambda piece: np.maximum(piece.whole("queued_ns"), piece.whole("arrival_ns")))
        ended = requests.where(lambda piece: piece.is_known("finish_ns"))
        self._finish = Instants(ended, lambda piece: piece.whole("finish_ns"))

    def at(self, instants_ns: IntArray) -> BoolArray:
        """Whether any is, at each of `instants_ns`: after the finishes and the arrivals at that instant."""
        return self._seen.num_until(instants_ns) > self._finish.num_until(instants_ns)


def hold_until(run: StepRun, presence: Presence) -> IntArray:
    """The instant until which each step's counts hold, ns; from then to the next step all counts are zero."""
    return np.where(presence.at(run.end), np.maximum(run.following, run.end), run.end)


def spans(requests: Any, steps: Any) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The intervals for which each step's counts hold: (start ns, until ns, next step's start ns), each `[num_steps]`.

    The counts hold from `start` to `until`; from there to the next start all counts are zero.
    """
    presence = Presence(Requests.of(requests))
    parts = [(run.start, hold_until(run, presence), run.following) for _, run in step_runs(as_rows(steps), (), None)]
    start, until, following = (np.concatenate(part).astype(np.float64) for part in zip(*parts, strict=True))
    return start, until, following


class Occupancy:
    """The steps of one engine, summed up over [start_ns, end_ns] as they are read."""

    def __init__(self, requests: Requests, num_gpu_blocks: int | None, start_ns: int, end_ns: int) -> None:
        self._presence = Presence(requests)
        self._num_gpu_blocks = num_gpu_blocks
        self._start_ns, self._end_ns = start_ns, end_ns
        self.is_recorded = False  # whether there was any step
        self.num_steps = 0  # steps that ended after start_ns
        self._held_ns = dict.fromkeys((*COUNTS, "blocks"), 0)  # count times ns
        self._least_free: int | None = None  # blocks
        self._tokens = dict.fromkeys(("num_prefill_tokens", "num_decode_tokens"), 0)
        self._busy_ns = 0  # within [start_ns, end_ns]
        self._parts_ns = dict.fromkeys(TIME_PARTS, 0)
        self._length_ns = self._other_ns = self._overlap_ns = 0
        self._with_nulls: frozenset[str] = frozenset()

    def add(self, run: StepRun) -> None:
        """Adds the steps that follow those added before."""
        self.is_recorded |= len(run) > 0
        counts = run.end > self._start_ns
        self.num_steps += int(counts.sum())
        self._with_nulls = run.with_nulls
        for name in self._tokens:
            self._tokens[name] += int(run.columns[name][counts].sum())
        until = hold_until(run, self._presence)
        held_ns = self._within(run.start, until)
        for name in COUNTS:
            self._held_ns[name] += product_sum(run.columns[f"num_{name}"], held_ns)
        if self._num_gpu_blocks:
            free = run.columns["free_gpu_blocks"]
            self._held_ns["blocks"] += product_sum(self._num_gpu_blocks - free, held_ns)
            free = free[until > self._start_ns]
            if free.size:
                least = int(free.min())
                self._least_free = least if self._least_free is None else min(self._least_free, least)
        self._busy_ns += int(self._within(run.start, run.end).sum())
        self._add_time_parts(run)

    def _within(self, start: IntArray, until: IntArray) -> IntArray:
        """How much of each [start, until) lies within [start_ns, end_ns], ns."""
        inside: IntArray = np.minimum(until, self._end_ns) - np.maximum(start, self._start_ns)
        return np.maximum(inside, 0)

    def _add_time_parts(self, run: StepRun) -> None:
        inside = (run.end > self._start_ns) & (run.start < self._end_ns)
        length = (run.end - run.start)[inside]
        unexplained = length.copy()
        for name in TIME_PARTS:
            part = run.columns[f"{name}_ns"][inside]
            self._parts_ns[name] += int(part.sum())
            unexplained -= part
        self._length_ns += int(length.sum())
        self._other_ns += int(np.maximum(unexplained, 0).sum())
        self._overlap_ns += int(np.maximum(-unexplained, 0).sum())

    @property
    def num_computed_tokens(self) -> int | None:
        """Tokens that the counted steps computed; None if that was not recorded."""
        return None if self._with_nulls & self._tokens.keys() else sum(self._tokens.values())

    def metrics(self, *, is_recorded: bool) -> dict[str, Any]:
        """The part of a summary that comes from steps. is_recorded: whether steps were recorded. If so, an engine
        without any step was idle all the time; else nothing is known about it."""
        result: dict[str, Any] = {
            "num_steps": self.num_steps,
            "kv": {"utilisation_mean": None, "utilisation_peak": None},
            **dict.fromkeys((*(f"mean_{name}" for name in COUNTS), "busy_share", "time_s")),
        }
        duration_ns = self._end_ns - self._start_ns
        if not is_recorded or duration_ns <= 0:
            return result
        if self._num_gpu_blocks and "free_gpu_blocks" not in self._with_nulls:
            peak = 0.0 if self._least_free is None else max(0.0, 1.0 - self._least_free / self._num_gpu_blocks)
            mean = self._held_ns["blocks"] / (self._num_gpu_blocks * duration_ns)
            result["kv"] = {"utilisation_mean": mean, "utilisation_peak": peak}
        for name in COUNTS:
            if f"num_{name}" not in self._with_nulls:
                result[f"mean_{name}"] = self._held_ns[name] / duration_ns
        result["busy_share"] = self._busy_ns / duration_ns
        result["time_s"] = self._time_s(duration_ns)
        return result

    def _time_s(self, duration_ns: int) -> dict[str, float]:
        """Where the time went, in seconds: each part of the steps, `other` (not explained by any part), and `idle`.

        Parts may overlap (transfers during compute); `overlap` is the excess of their sum over the steps' length.
        """
        rest = {"other": self._other_ns, "overlap": self._overlap_ns, "idle": max(duration_ns - self._length_ns, 0)}
        return {name: ns / 1e9 for name, ns in (self._parts_ns | rest).items()}
