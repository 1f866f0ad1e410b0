"""The checks of one engine (see `analysis.measures.checks`), summed up while its steps are read in order of time.

A request takes memory only while it is in the system, for sums over the steps until it entered. The requests' instants
are looked up in windows (`analysis.reading.timeline.Instants`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from analysis.reading.request_columns import RequestColumns, Requests
from analysis.reading.rows import IntArray, exact_sum, product_sum
from analysis.reading.timeline import Instants, StepRun, joined

REQUESTS_READ = (
    "arrival_ns", "num_prompt_tokens", "num_output_tokens", "num_token_steps", "num_preemptions",
    "num_recomputed_tokens",
)  # these are never null # fmt: skip
STEPS_READ = (
    "start_ns", "end_ns", "num_decode_tokens", "num_prefill_tokens", "num_emitted", "num_running", "num_waiting",
    "num_swapped", "num_cached_tokens", "num_preempted", "num_ignored",
)  # fmt: skip
_SUMS = ("num_prefill_tokens", "num_decode_tokens", "num_emitted", "num_cached_tokens", "num_preempted")
_IN_SYSTEM = ("num_running", "num_waiting", "num_swapped", "num_ignored")
_NEVER = np.iinfo(np.int64).max

Check = dict[str, Any]
Judgement = tuple[bool | None, str | None]  # whether it holds; why not, or why that is unknown


def verdict(holds: bool | None, why: str | None, **numbers: Any) -> Check:
    return {"holds": holds, "why": why, **numbers}


class EngineCheck:
    """Checks Little's law, conservation of work and never being idle for one engine's requests and steps.

    requests: those that reached the scheduler.
    """

    def __init__(self, requests: Requests, manifest: Mapping[str, Any]) -> None:
        self._requests = requests
        # the engine may not be idle from a request's arrival on; else from the step boundary that first saw it
        self._from_arrival = manifest.get("backend") == "sim" and manifest.get("cost") != "recorded"
        # a step is planned while the one before it runs, and starts at the end of that one
        self._is_ahead = bool(manifest.get("async_scheduling"))
        # vLLM's own, which takes time between steps, and before a request reaches the scheduler
        self._has_front_end = manifest.get("backend") == "vllm"
        self._frontend_ns = int(manifest.get("frontend_ns") or 0)  # simulated API server time per request
        self.start_ns: int | None = None  # of the first step
        self.end_ns = 0  # of the newest one
        self._num_steps = 0
        self._nulls = [
            name for name in REQUESTS_READ if not all(piece.is_known(name).all() for piece in requests.pieces())
        ]
        self._num_impossible = 0  # steps that end after the next one starts, or not after their own start
        self._first_impossible = (0, 0, 0)  # row, start, end
        self._step_nulls: frozenset[str] = frozenset()
        self._is_fit = not self._nulls and len(requests) > 0  # set to False when steps overlap
        ended = requests.where(lambda piece: piece.is_known("finish_ns"))
        preempted = requests.where(lambda piece: piece.whole("num_preemptions") > 0)
        self._num_open = len(requests) - len(ended)
        self._has_groups = any(
            (piece.whole("num_output_tokens") != piece.whole("num_token_steps")).any() for piece in requests.pieces()
        )
        arrival = _whole("arrival_ns", self._frontend_ns)
        self._enter = Instants(requests, arrival if self._from_arrival else _whole("queued_ns"))
        self._queued = Instants(requests, _whole("queued_ns"), arrival)
        self._finish = Instants(ended, _whole("finish_ns"))
        self._scheduled = Instants(preempted, _whole("first_scheduled_ns"), _uncached)
        self._first_token = Instants(preempted, _whole("first_token_ns"), _uncached)
        # By row. Of requests in the system: minus the time before they entered that no step covers, ns. Of requests
        # that were scheduled and have no token yet: minus the preemptions before they were scheduled.
        self._idle_ns: dict[int, int] = {}
        self._num_between: dict[int, int] = {}
        self._num_idle = 0  # requests with some time in the system that no step covers
        self._worst_idle_ns = 0
        self._may_skip_tokens = 0  # uncached ones of requests with a preemption between first schedule and token
        self._num_late = 0  # requests seen before their arrival, or after a step that could have seen them
        self._last_start_ns = np.iinfo(np.int64).min
        self._num_in_system = 0  # from the requests' instants, at the start of the next steps to be added
        self._sums = dict.fromkeys(_SUMS, 0)
        self._busy_ns = 0  # total length of the steps
        self._busy_at_queued_ns = self._busy_at_finish_ns = 0  # summed over requests
        self._in_system_ns = 0  # counts of the steps times their length
        self._num_wrong = 0
        self._first_wrong: tuple[int, int, int, int] | None = None  # row, start, count by the step, by the requests

    # --- steps ---

    def add(self, run: StepRun) -> None:
        """Adds the steps that follow those added before."""
        self.start_ns = int(run.start[0]) if self.start_ns is None else min(self.start_ns, int(run.start.min()))
        self.end_ns = max(self.end_ns, int(run.end.max()))
        self._step_nulls = run.with_nulls
        impossible = np.flatnonzero((run.following < run.end) | (run.end <= run.start))
        if impossible.size:
            if not self._num_impossible:
                row = int(impossible[0])
                self._first_impossible = self._num_steps + row, int(run.start[row]), int(run.end[row])
            self._num_impossible += impossible.size
            self._is_fit = False
        if self._is_fit:
            self._add_counts(run, self._add_times(run))
            for name in _SUMS:
                self._sums[name] += int(run.columns[name].sum())
            self._busy_ns += int((run.end - run.start).sum())
        self._num_steps += len(run)

    def _add_times(self, run: StepRun) -> IntArray:
        """Adds the requests' instants up to these steps. Returns how many requests are in the system as each starts."""
        by_requests = np.full(len(run), self._num_in_system)
        for at, rows in self._enter.take(run):
            self._pass_idle(rows, self._busy(run, at) - at)
        for at, _, arrival in self._queued.take(run):
            self._busy_at_queued_ns += exact_sum(self._busy(run, at))
            index = np.searchsorted(run.start, at, side="left") - 1
            before = np.where(index >= 0, run.start[np.maximum(index, 0)], self._last_start_ns)
            self._num_late += int(((before >= arrival) | (at < arrival)).sum())
            by_requests += np.searchsorted(at, run.start, side="right")
            self._num_in_system += at.size
        for at, rows in self._finish.take(run):
            busy = self._busy(run, at)
            self._busy_at_finish_ns += exact_sum(busy)
            self._pass_idle(rows, at - busy)
            by_requests -= np.searchsorted(at, run.start, side="right")
            self._num_in_system -= at.size
        preempted = self._sums["num_preempted"] + np.append(0, np.cumsum(run.columns["num_preempted"]))
        for instants, sign in ((self._scheduled, -1), (self._first_token, 1)):
            for at, rows, uncached in instants.take(run):
                num = preempted[np.searchsorted(run.start, at, side="left")]
                self._may_skip_tokens += int(uncached[joined(self._num_between, rows, sign * num) > 0].sum())
        self._last_start_ns = int(run.start[-1])
        return by_requests

    def _pass_idle(self, rows: IntArray, idle_ns: IntArray) -> None:
        """Adds the time that no step covers: before a request finished, or (negative) before it entered."""
        idle = joined(self._idle_ns, rows, idle_ns)
        self._num_idle += int((idle != 0).sum())
        worst = int(idle[np.argmax(np.abs(idle))])
        if abs(worst) > abs(self._worst_idle_ns):
            self._worst_idle_ns = worst

    def _busy(self, run: StepRun, at: IntArray) -> IntArray:
        """The time within steps up to each instant, ns."""
        length = run.end - run.start
        index = np.searchsorted(run.start, at, side="right") - 1
        known = np.maximum(index, 0)
        inside = np.minimum(at, run.end[known]) - run.start[known]
        return np.where(index >= 0, self._busy_ns + (np.cumsum(length) - length)[known] + inside, self._busy_ns)

    def _add_counts(self, run: StepRun, by_requests: IntArray) -> None:
        # a request that is ignored leaves the queues with the plan, and the system with that plan's commit
        by_steps: IntArray = np.stack([run.columns[name] for name in _IN_SYSTEM]).sum(axis=0)
        self._in_system_ns += product_sum(by_steps, run.end - run.start)
        wrong = np.flatnonzero(by_steps < by_requests if self._has_groups else by_steps != by_requests)
        self._num_wrong += wrong.size
        if wrong.size and self._first_wrong is None:
            row = int(wrong[0])
            counts = int(by_steps[row]), int(by_requests[row])
            self._first_wrong = self._num_steps + row, int(run.start[row]), *counts

    # --- verdicts ---

    def verdicts(self) -> tuple[Check, Check, Check]:
        """The verdicts on Little's law, conservation of work and never idle. Call it after the last step."""
        holds, why = self._unfit()
        if why:
            return verdict(holds, why), verdict(holds, why), verdict(holds, why)
        return self._littles_law(), self._work_conserved(), self._never_idle()

    def _unfit(self) -> Judgement:
        """Why there is nothing to check (None), or why the steps cannot be those of one engine (False), so that no sum
        is meaningful. Without a reason the checks apply."""
        if not self._num_steps:
            return None, "not applicable: no step was recorded"
        if not len(self._requests):
            return None, "not applicable: no request reached the scheduler"
        nulls = [name for name in STEPS_READ if name in self._step_nulls] + self._nulls
        if nulls:
            return None, f"not applicable: {', '.join(nulls)} not recorded"
        if not self._num_impossible:
            return None, None
        row, start_ns, end_ns = self._first_impossible
        return False, (
            f"{self._num_impossible} of {self._num_steps} steps overlap the one after, or last no time; an engine "
            f"takes one step at a time: the records contradict themselves. The first is row {row} of its steps in "
            f"steps.parquet, from {start_ns} ns to {end_ns} ns"
        )

    def _littles_law(self) -> Check:
        """Compares counts by steps with sojourns by requests, only within steps, as counts do not cover gaps."""
        requests_ns = self._busy_at_finish_ns + self._num_open * self._busy_ns - self._busy_at_queued_ns
        numbers: dict[str, Any] = {
            "num_requests": len(self._requests),
            "num_steps": self._num_steps,
            "ns_in_system_by_steps": self._in_system_ns,
            "ns_in_system_by_requests": requests_ns,
        }
        return verdict(*self._counts_agree(self._in_system_ns, requests_ns), **numbers)

    def _counts_agree(self, steps_ns: int, requests_ns: int) -> Judgement:
        if self._is_ahead:
            why = "asynchronous scheduling: a step's counts are of its plan, while the one before ran"
            return None, f"not applicable: {why}"
        if self._has_front_end:
            return None, "not applicable: vLLM's front end stands between a request's arrival and the scheduler"
        if self._num_late:
            late = "requests entered before their arrival, or after a step that could have seen them"
            return False, f"{self._num_late} {late}"
        if self._first_wrong is not None:
            row, start_ns, by_steps, by_requests = self._first_wrong
            return False, (
                f"{self._num_wrong} of {self._num_steps} steps count another number of requests than are in the "
                f"system; the first is row {row} of its steps in steps.parquet, at {start_ns / 1e9:.6f} s: {by_steps} "
                f"by the step, {by_requests} by the requests"
            )
        if self._has_groups:
            return None, "not applicable: steps count every sequence of a parallel or beam request"
        if steps_ns != requests_ns:
            own = f"requests spent {requests_ns} ns in steps by their own instants"
            return False, f"{own}, and {steps_ns} ns by steps' counts"
        return True, None

    def _work_conserved(self) -> Check:
        """Compares the tokens that steps computed and emitted with those that the requests needed and got."""
        computed = self._sums["num_prefill_tokens"] + self._sums["num_decode_tokens"]
        emitted = self._sums["num_emitted"]
        got = self._requests.sum(lambda piece: piece.whole("num_output_tokens").sum())
        numbers: dict[str, Any] = {"num_computed_tokens": computed, "num_emitted_tokens": emitted}
        if emitted != got:
            return verdict(False, f"steps emitted {emitted} tokens, and requests got {got}", **numbers)
        if self._has_groups:
            why = "not applicable: the sequences of a parallel or beam request share what is computed of its prompt"
            return verdict(None, why, **numbers)
        least, most = self._needed()
        numbers |= {"num_needed_tokens_least": least, "num_needed_tokens_most": most}
        most += self._num_in_flight()
        if not least <= computed <= most:
            needed = f"{least}" if least == most else f"from {least} to {most}"
            return verdict(False, f"steps computed {computed} tokens, and requests needed {needed}", **numbers)
        return verdict(True, None, **numbers)

    def _num_in_flight(self) -> int:
        """The most tokens computed for requests that ended while a step in flight had them: one for each of these."""
        if self._is_ahead:
            return len(self._requests)
        if not self._has_front_end:
            return 0
        return int(self._requests.sum(lambda piece: piece.reasons.among(("abort",)).sum()))

    def _needed(self) -> tuple[int, int]:
        """Bounds on the tokens that had to be computed for the requests; equal unless the records leave them open.

        Two things may be open. One is the progress of a request that was cut short (aborted, ignored after a start,
        unfinished) before it emitted, or while it recomputed. The other is the cache hit of a resumed request that was
        preempted before its first token: it may exceed what the request had computed itself.
        """
        least, most = map(sum, zip(*[_needed(piece) for piece in self._requests.pieces()], strict=True))
        # Such tokens were neither cached at the first admission nor computed for this request. Once a request has
        # emitted, all its tokens so far except the newest have been computed for it, and a cache hit can only return
        # these. So only a preemption before the first token can be followed by a larger hit.
        cached = self._requests.sum(lambda piece: piece.whole("num_cached_tokens").sum())
        resumed_hits = self._sums["num_cached_tokens"] - cached
        return least - min(max(resumed_hits, 0), self._may_skip_tokens), most

    def _never_idle(self) -> Check:
        """Checks that steps cover the time in the system of every request."""
        still_ns = [max(self.end_ns - self._busy_ns + until_ns, 0) for until_ns in self._idle_ns.values()]
        num_idle = self._num_idle + sum([ns > 0 for ns in still_ns])
        numbers = {"since": "arrival" if self._from_arrival else "queued", "num_requests_idle": num_idle}
        if self._has_front_end:
            return verdict(None, "not applicable: vLLM's front end takes time between steps", **numbers)
        if num_idle:
            worst_ns = max([self._worst_idle_ns, *still_ns], key=abs)
            why = (
                f"no step ran while {num_idle} requests were in the system, up to {worst_ns / 1e9:.6f} s for "
                "one: the policy idled, or steps are missing"
            )
            return verdict(False, why, **numbers)
        return verdict(True, None, **numbers)


def _whole(name: str, later_ns: int = 0) -> Callable[[RequestColumns], IntArray]:
    """Reads a column of instants, plus `later_ns`; null becomes `_NEVER`."""
    return lambda piece: piece.whole(name, _NEVER - later_ns) + later_ns


def _uncached(requests: RequestColumns) -> IntArray:
    """The tokens of each request that must be computed before its first one, without the last prompt token."""
    return requests.whole("num_prompt_tokens") - requests.whole("num_cached_tokens") - 1


def _needed(requests: RequestColumns) -> tuple[int, int]:
    """The least and most tokens computed for these requests, before hits after preemptions (`EngineCheck._needed`)."""
    output, preemptions = requests.whole("num_output_tokens"), requests.whole("num_preemptions")
    ground = _uncached(requests) + output  # each token except the newest, once
    full = ground + requests.whole("num_recomputed_tokens")
    is_started = requests.is_known("first_scheduled_ns")
    has_output = output > 0
    is_plain = requests.is_completed | (has_output & (preemptions == 0))
    least = np.where(is_plain, full, np.where(has_output, ground, 0))
    most = np.where(is_plain | has_output, full, np.maximum(full, 0))
    return int(least[is_started].sum()), int(most[is_started].sum())
