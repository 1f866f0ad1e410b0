"""Usage over time, from the step records: KV usage, queue lengths, busy share, and where the time went.

The counts of a step are those after its plan. They hold from the step's start to its end and, if work remains, on to
the start of the next step. If no request is in the system between two steps, the engine is idle: nothing runs, waits or
holds a block (cached, unreferenced blocks count as free).

Internal fragmentation is measured where the records determine it: while all that run decode, the slots held minus the
positions attended to are the slots that are reserved and not filled. Sequences that share blocks would count a position
several times, so a run with prefix hits or sequence groups has none.

Sums over steps are of whole numbers (counts times ns), hence exact and independent of the batches; each mean is one
division.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis.reading.request_columns import Requests
from analysis.reading.rows import BoolArray, FloatArray, IntArray, as_rows, product_sum, whole
from analysis.reading.timeline import Instants, StepRun, step_runs

FRAGMENTATION = ("fragmentation", "fragmentation_of_pool")
TIME_PARTS = ("schedule", "prepare", "swap", "forward", "sample")
COUNTS = ("running", "waiting", "swapped")
STEPS_READ = (
    *(f"num_{name}" for name in COUNTS), "num_decode_tokens", "num_prefill_tokens", "free_gpu_blocks",
    "num_decodes", "num_prefills", "decode_context_tokens", "num_preempted", "num_swapped_out", "num_swapped_in",
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


def shares_blocks(requests: Requests) -> bool:
    """Whether sequences may share KV blocks: a prefix was found in the cache, or a request had several sequences."""
    hits = requests.sum(lambda piece: (piece.whole("num_cached_tokens") > 0).sum())
    groups = requests.sum(lambda piece: (piece.whole("num_output_tokens") > piece.whole("num_token_steps")).sum())
    return bool(hits or groups)


class Occupancy:
    """The steps of one engine, summed up over [start_ns, end_ns] as they are read. num_gpu_blocks, block_size: None if
    not known."""

    def __init__(
        self, requests: Requests, num_gpu_blocks: int | None, block_size: int | None, start_ns: int, end_ns: int
    ) -> None:
        self._presence = Presence(requests)
        self._num_gpu_blocks = num_gpu_blocks
        self._block_size = None if shares_blocks(requests) else block_size  # None: no fragmentation
        self._pool_ns = self._held_slots_ns = self._unfilled_ns = 0  # slots times ns, while all that runs decodes
        self._are_shared = False  # more positions than slots: blocks are shared, though no hit was counted
        self.num_preempted = dict.fromkeys(("recompute", "swap"), 0)  # requests, by mode
        self.prefill_ns = self.swap_ns = 0  # of the steps: the share of prefill tokens; swaps of preempted requests
        self._start_ns, self._end_ns = start_ns, end_ns
        self.is_recorded = False  # whether there was any step
        self.num_steps = 0  # steps that ended after start_ns
        self._held_ns = dict.fromkeys((*COUNTS, "blocks"), 0)  # count times ns
        self._least_free: int | None = None  # blocks
        self._tokens = dict.fromkeys(("num_prefill_tokens", "num_decode_tokens"), 0)
        self._busy_ns = 0  # within [start_ns, end_ns]
        self._parts_ns = dict.fromkeys(TIME_PARTS, 0)
        self._other_ns = self._overlap_ns = 0
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
            if self._block_size:
                self._add_slots(run, (self._num_gpu_blocks - free) * self._block_size, held_ns)
            free = free[until > self._start_ns]
            if free.size:
                least = int(free.min())
                self._least_free = least if self._least_free is None else min(self._least_free, least)
        self._busy_ns += int(self._within(run.start, run.end).sum())
        self._add_time_parts(run)
        self._add_preemptions(run, counts)

    def _add_slots(self, run: StepRun, num_slots: IntArray, held_ns: IntArray) -> None:
        """Adds the slots of steps in which everything that runs decodes."""
        columns = run.columns
        decodes = columns["num_decodes"]
        is_known = (decodes > 0) & (decodes == columns["num_running"]) & (columns["num_prefills"] == 0)
        num_slots, held_ns = num_slots[is_known], held_ns[is_known]
        unfilled = num_slots - columns["decode_context_tokens"][is_known]
        self._are_shared |= bool((unfilled < 0).any())
        self._pool_ns += int(held_ns.sum()) * (self._num_gpu_blocks or 0) * (self._block_size or 0)
        self._held_slots_ns += product_sum(num_slots, held_ns)
        self._unfilled_ns += product_sum(np.maximum(unfilled, 0), held_ns)

    def _add_preemptions(self, run: StepRun, counts: BoolArray) -> None:
        columns = {name: column[counts] for name, column in run.columns.items()}
        self.num_preempted["recompute"] += int(columns["num_preempted"].sum())
        self.num_preempted["swap"] += int(columns["num_swapped_out"].sum())
        moves = (columns["num_swapped_out"] > 0) | (columns["num_swapped_in"] > 0)
        self.swap_ns += int(columns["swap_ns"][moves].sum())
        prefills = columns["num_prefill_tokens"]
        share = prefills / np.maximum(prefills + columns["num_decode_tokens"], 1)
        length = columns["end_ns"] - columns["start_ns"]
        self.prefill_ns += int((length * share).astype(np.int64).sum())  # whole ns: equal however steps are batched

    def _within(self, start: IntArray, until: IntArray) -> IntArray:
        """How much of each [start, until) lies within [start_ns, end_ns], ns."""
        inside: IntArray = np.minimum(until, self._end_ns) - np.maximum(start, self._start_ns)
        return np.maximum(inside, 0)

    def _add_time_parts(self, run: StepRun) -> None:
        """Adds where the time of the steps went; of a step that the start of the time base cuts, the same share of each
        part."""
        inside = self._within(run.start, run.end)
        length = np.maximum(run.end - run.start, 1)
        unexplained = inside.copy()
        for name in TIME_PARTS:
            whole_ns = run.columns[f"{name}_ns"]
            part = np.where(inside < length, (whole_ns * (inside / length)).astype(np.int64), whole_ns)
            self._parts_ns[name] += int(part.sum())
            unexplained -= part
        self._other_ns += int(np.maximum(unexplained, 0).sum())
        self._overlap_ns += int(np.maximum(-unexplained, 0).sum())

    @property
    def num_prefill_tokens(self) -> int:
        return self._tokens["num_prefill_tokens"]

    @property
    def num_computed_tokens(self) -> int | None:
        """Tokens that the counted steps computed; None if that was not recorded."""
        return None if self._with_nulls & self._tokens.keys() else sum(self._tokens.values())

    def metrics(self, *, is_recorded: bool) -> dict[str, Any]:
        """The part of a summary that comes from steps. is_recorded: whether steps were recorded. If so, an engine
        without any step was idle all the time; else nothing is known about it."""
        result: dict[str, Any] = {
            "num_steps": self.num_steps if is_recorded else None,
            "kv": dict.fromkeys(("utilisation_mean", "utilisation_peak")) | fragmentation([self]),
            **dict.fromkeys((*(f"mean_{name}" for name in COUNTS), "busy_share", "time_s")),
        }
        duration_ns = self._end_ns - self._start_ns
        if not is_recorded or duration_ns <= 0:
            return result
        if self._num_gpu_blocks and "free_gpu_blocks" not in self._with_nulls:
            peak = 0.0 if self._least_free is None else max(0.0, 1.0 - self._least_free / self._num_gpu_blocks)
            mean = self._held_ns["blocks"] / (self._num_gpu_blocks * duration_ns)
            result["kv"] |= {"utilisation_mean": mean, "utilisation_peak": peak}
        for name in COUNTS:
            if f"num_{name}" not in self._with_nulls:
                result[f"mean_{name}"] = self._held_ns[name] / duration_ns
        result["busy_share"] = self._busy_ns / duration_ns
        result["time_s"] = self._time_s(duration_ns)
        return result

    @property
    def unfilled(self) -> tuple[int, int, int] | None:
        """Slots times ns, while all that runs decodes: those reserved and not filled, those held, those of the pool.
        None if not known."""
        if not self._block_size or self._are_shared or _OF_SLOTS & self._with_nulls:
            return None
        return self._unfilled_ns, self._held_slots_ns, self._pool_ns

    def _time_s(self, duration_ns: int) -> dict[str, float]:
        """Where the time went, in seconds: each part of the steps, `other` (not explained by any part), and `idle`.

        Parts may overlap (transfers during compute); `overlap` is the excess of their sum over the steps' length.
        """
        rest = {"other": self._other_ns, "overlap": self._overlap_ns, "idle": max(duration_ns - self._busy_ns, 0)}
        return {name: ns / 1e9 for name, ns in (self._parts_ns | rest).items()}


_OF_SLOTS = frozenset({"free_gpu_blocks", "num_decodes", "decode_context_tokens"})


def fragmentation(engines: Sequence[Occupancy]) -> dict[str, float | None]:
    """Slots that are reserved and not filled, as a share of those held and of the pools, over all replicas; None if it
    is not known of one, or if they never all decode."""
    known = [one.unfilled for one in engines]
    if None in known:
        return dict.fromkeys(FRAGMENTATION)
    unfilled, held, pool = (sum(values) for values in zip(*(one for one in known if one), strict=True))
    return dict(zip(FRAGMENTATION, (unfilled / held, unfilled / pool) if held else (None, None), strict=True))


def preemption_costs(measured: Sequence[Occupancy], num_recomputed: int) -> dict[str, Any]:
    """Preemptions by mode, and the time that they cost, over the steps of all replicas; None without steps.

    recompute_s: the steps' time, divided equally among the tokens of each step, of the recomputed ones. They are a part
    of the prefill tokens; which ones is not recorded, so a mean over all prefill tokens is taken. swap_s: the transfers
    of the steps that swapped a request out or in.
    """
    names = ("by_recompute", "by_swap", "recompute_s", "swap_s")
    if not any(one.is_recorded for one in measured):
        return dict.fromkeys(names)
    num_prefill = sum(one.num_prefill_tokens for one in measured)
    prefill_s = sum(one.prefill_ns for one in measured) / 1e9
    recompute_s = prefill_s * min(1.0, num_recomputed / num_prefill) if num_prefill else 0.0
    by_mode = [sum(one.num_preempted[mode] for one in measured) for mode in ("recompute", "swap")]
    return dict(zip(names, (*by_mode, recompute_s, sum(one.swap_ns for one in measured) / 1e9), strict=True))
