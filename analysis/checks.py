"""What must be true of every run's records, simulated or real: checked from requests and steps against each other.

    littles_law      The time-average number in the system is the arrival rate times the mean sojourn, L = lambda W
                     (Little, 1961). L is integrated over the counts that each step recorded; lambda W over the
                     requests' own instants. Both are sums of ns, and must be equal to the ns; so must the counts at
                     each step's plan. A request enters at the first boundary at or after its arrival, and not later.
    work_conserved   The tokens that the steps computed are those that the requests needed: prompt - cached + output - 1
                     + recomputed. The tokens that the steps emitted are those that the requests got.
    never_idle       No time lies between two steps while a request is in the system (work conservation of queueing
                     theory). Of a simulated run: from its arrival on; else from the boundary that first saw it, as a
                     real engine's clock oversleeps and a replay takes its boundaries from the tape.

Each check is {"holds": True, False or None, "why": what is wrong, or why it does not apply; None where it holds, ...}.
Only the columns of `testbed.records` are read. All arithmetic is on int64 and vectorised: 100,000 steps take
milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.frames import BoolArray, IntArray, texts, whole

CHECKS = ("littles_law", "work_conserved", "never_idle")
NAMES = {
    "littles_law": "Little's law",
    "work_conserved": "conservation of work",
    "never_idle": "no idle engine while requests are in the system",
}
COMPLETED = ("stop", "length")
REQUEST_COLUMNS = (
    "arrival_ns", "num_prompt_tokens", "num_output_tokens", "num_token_steps", "num_preemptions",
    "num_recomputed_tokens",
)  # that are never null # fmt: skip
STEP_COLUMNS = (
    "start_ns", "end_ns", "num_decode_tokens", "num_prefill_tokens", "num_emitted", "num_running", "num_waiting",
    "num_swapped", "num_cached_tokens", "num_preempted", "num_ignored",
)  # fmt: skip
_NEVER = np.iinfo(np.int64).max
_LOW_BITS = 20

Check = dict[str, Any]


def run_checks(requests: pd.DataFrame, steps: pd.DataFrame, manifest: Mapping[str, Any]) -> dict[str, Check]:
    """All checks of one run, by name; of a fleet, of each replica by itself. The columns are `testbed.records`'."""
    frame = requests[requests["queued_ns"].notna()]
    from_arrival = manifest.get("backend") == "sim" and manifest.get("cost") != "recorded"
    started = frame[frame["first_scheduled_ns"].notna()]  # what was aborted at once may have met no step
    both = (of["replica"].dropna() for of in (steps, started) if "replica" in of.columns)
    replicas = sorted({int(number) for column in both for number in column.unique()})
    if len(replicas) < 2:
        checks = _check_engine(frame, steps, from_arrival)
    else:
        parts = {}
        for replica in replicas:
            own = steps[steps["replica"] == replica].sort_values("start_ns", kind="stable")
            parts[f"replica {replica}"] = _check_engine(frame[frame["replica"] == replica], own, from_arrival)
        checks = {name: _merged({part: of[name] for part, of in parts.items()}) for name in CHECKS}
    _add_means(checks["littles_law"], frame, steps)
    return checks


def _check_engine(requests: pd.DataFrame, steps: pd.DataFrame, from_arrival: bool) -> dict[str, Check]:
    """All checks of one engine."""
    why = _unfit(requests, steps)
    if not why:
        records = _Records.of(requests, steps)
        why = records.unfit()
    if why:
        return {name: _verdict(None, why) for name in CHECKS}
    return {
        "littles_law": _littles_law(records),
        "work_conserved": _work_conserved(records),
        "never_idle": _never_idle(records, from_arrival),
    }


def _merged(checks: Mapping[str, Check]) -> Check:
    """One check of several replicas, by name: the worst verdict, and the sums of what was counted."""
    verdicts = [check["holds"] for check in checks.values()]
    holds = False if False in verdicts else None if None in verdicts else True
    why = "; ".join(
        f"{name}: {check['why']}" for name, check in checks.items() if check["holds"] is holds and not holds
    )
    sums: dict[str, Any] = {}
    for check in checks.values():
        for key, value in check.items():
            if key not in ("holds", "why"):
                sums[key] = sums[key] + value if key.startswith(("ns_", "num_")) and key in sums else value
    return _verdict(holds, why or None, **sums)


def _add_means(check: Check, requests: pd.DataFrame, steps: pd.DataFrame) -> None:
    """L, lambda and W of what Little's law compared."""
    if "num_requests" in check:
        first_ns = min(int(whole(requests, "arrival_ns").min()), int(whole(steps, "start_ns").min()))
        duration_ns = int(whole(steps, "end_ns").max()) - first_ns
        check["mean_in_system"] = check["ns_in_system_by_steps"] / duration_ns
        check["arrival_rate_per_s"] = check["num_requests"] / (duration_ns / 1e9)
        check["mean_sojourn_s"] = check["ns_in_system_by_requests"] / check["num_requests"] / 1e9


def _unfit(requests: pd.DataFrame, steps: pd.DataFrame) -> str:
    """Why there is nothing to check; empty: there is something."""
    if not len(steps):
        return "not applicable: no step was recorded"
    if not len(requests):
        return "not applicable: no request reached the scheduler"
    nulls = [name for name in STEP_COLUMNS if steps[name].isna().any()]
    nulls += [name for name in REQUEST_COLUMNS if requests[name].isna().any()]
    return f"not applicable: {', '.join(nulls)} not recorded" if nulls else ""


def failures(checks: Mapping[str, Check]) -> list[str]:
    """A sentence on each check that does not hold."""
    return [f"CHECK FAILED: {NAMES[name]}: {checks[name]['why']}" for name in CHECKS if checks[name]["holds"] is False]


def outline(checks: Mapping[str, Check]) -> str:
    """All verdicts in one line."""
    said = {True: "holds", False: "FAILS", None: "not applicable"}
    return ", ".join(f"{NAMES[name]}: {said[checks[name]['holds']]}" for name in CHECKS)


@dataclass(frozen=True, slots=True)
class _Records:
    """The columns that checks read: int64 `[num_requests]` (of those that reached the scheduler) and `[num_steps]`."""

    arrival: IntArray
    queued: IntArray
    scheduled: IntArray  # _NEVER: it was not
    first_token: IntArray  # _NEVER: there is none
    finish: IntArray  # _NEVER: unfinished
    completed: BoolArray
    prompt: IntArray
    output: IntArray
    token_steps: IntArray
    cached: IntArray
    preemptions: IntArray
    recomputed: IntArray
    steps: pd.DataFrame
    start: IntArray
    end: IntArray
    busy_before: IntArray  # total length of the steps before each

    @classmethod
    def of(cls, frame: pd.DataFrame, steps: pd.DataFrame) -> _Records:
        start, end = whole(steps, "start_ns"), whole(steps, "end_ns")
        return cls(
            arrival=whole(frame, "arrival_ns"),
            queued=whole(frame, "queued_ns"),
            scheduled=whole(frame, "first_scheduled_ns", _NEVER),
            first_token=whole(frame, "first_token_ns", _NEVER),
            finish=whole(frame, "finish_ns", _NEVER),
            completed=np.isin(texts(frame, "finish_reason"), COMPLETED),
            prompt=whole(frame, "num_prompt_tokens"),
            output=whole(frame, "num_output_tokens"),
            token_steps=whole(frame, "num_token_steps"),
            cached=whole(frame, "num_cached_tokens", 0),
            preemptions=whole(frame, "num_preemptions"),
            recomputed=whole(frame, "num_recomputed_tokens"),
            steps=steps,
            start=start,
            end=end,
            busy_before=np.cumsum(end - start) - (end - start),
        )

    def unfit(self) -> str:
        """Why the steps' times cannot be checked; empty: they can."""
        if (self.start[1:] < self.end[:-1]).any() or (self.end <= self.start).any():
            return "not applicable: steps overlap or last no time, so they are not those of one engine"
        return ""

    @property
    def has_groups(self) -> bool:
        """Whether some request grew several sequences: they emit together."""
        return bool((self.output != self.token_steps).any())

    def column(self, name: str) -> IntArray:
        """A step column `[num_steps]`."""
        return whole(self.steps, name)

    def busy(self, instants: IntArray) -> IntArray:
        """How much of the time up to each instant lay within steps, ns."""
        index = np.searchsorted(self.start, instants, side="right") - 1
        known = np.maximum(index, 0)
        inside = np.minimum(instants, self.end[known]) - self.start[known]
        return np.where(index >= 0, self.busy_before[known] + inside, 0)

    def in_system(self) -> IntArray:
        """Requests in the system at each step's plan, by their own instants: queued <= t < finish."""
        queued, finish = np.sort(self.queued), np.sort(self.finish)
        return np.asarray(
            np.searchsorted(queued, self.start, side="right") - np.searchsorted(finish, self.start, side="right")
        )


def _verdict(holds: bool | None, why: str | None, **numbers: Any) -> Check:
    return {"holds": holds, "why": why, **numbers}


# --- Little's law ---


def _littles_law(records: _Records) -> Check:
    """Counts by steps against sojourns by requests; within steps, as no step's count speaks of the time between."""
    # a request that is ignored leaves the queues with the plan, and the system with that plan's commit
    names = ("num_running", "num_waiting", "num_swapped", "num_ignored")
    by_steps: IntArray = np.stack([records.column(name) for name in names]).sum(axis=0)
    by_requests = records.in_system()
    length = records.end - records.start
    steps_ns = _product_sum(by_steps, length)
    sojourn = records.busy(records.finish) - records.busy(records.queued)
    requests_ns = _product_sum(np.ones_like(sojourn), sojourn)
    numbers = {
        "num_requests": int(sojourn.size),
        "num_steps": int(by_steps.size),
        "ns_in_system_by_steps": steps_ns,
        "ns_in_system_by_requests": requests_ns,
    }
    late = _seen_late(records)
    if late:
        return _verdict(False, late, **numbers)
    has_groups = records.has_groups
    wrong = np.flatnonzero(by_steps < by_requests if has_groups else by_steps != by_requests)
    if wrong.size:
        first = int(wrong[0])
        why = (
            f"{wrong.size} of {by_steps.size} steps count another number of requests than are in the system; the first "
            f"is row {first} of steps.parquet, at {records.start[first] / 1e9:.6f} s: {by_steps[first]} by the step, "
            f"{by_requests[first]} by the requests"
        )
        return _verdict(False, why, **numbers)
    if has_groups:
        return _verdict(None, "not applicable: steps count every sequence of a parallel or beam request", **numbers)
    if steps_ns != requests_ns:
        why = f"requests spent {requests_ns} ns in steps by their own instants, and {steps_ns} ns by the steps' counts"
        return _verdict(False, why, **numbers)
    return _verdict(True, None, **numbers)


def _seen_late(records: _Records) -> str:
    """What is wrong with the boundary at which requests were first seen; empty: nothing."""
    passed = np.searchsorted(records.start, records.arrival) != np.searchsorted(records.start, records.queued)
    wrong = int((passed | (records.queued < records.arrival)).sum())
    return f"{wrong} requests entered before their arrival, or after a step that could have seen them" if wrong else ""


def _product_sum(first: IntArray, second: IntArray) -> int:
    """sum(first * second), exact: counts times ns may exceed 64 bits."""
    high, low = second >> _LOW_BITS, second & ((1 << _LOW_BITS) - 1)
    return (int((first * high).sum()) << _LOW_BITS) + int((first * low).sum())


# --- conservation of work ---


def _work_conserved(records: _Records) -> Check:
    """Tokens that steps computed and emitted against what the requests needed and got."""
    computed = int(records.column("num_prefill_tokens").sum() + records.column("num_decode_tokens").sum())
    emitted, got = int(records.column("num_emitted").sum()), int(records.output.sum())
    numbers: dict[str, Any] = {"num_computed_tokens": computed, "num_emitted_tokens": emitted}
    if emitted != got:
        return _verdict(False, f"steps emitted {emitted} tokens, and requests got {got}", **numbers)
    if records.has_groups:
        why = "not applicable: the sequences of a parallel or beam request share what is computed of its prompt"
        return _verdict(None, why, **numbers)
    least, most = _needed(records)
    numbers |= {"num_needed_tokens_least": least, "num_needed_tokens_most": most}
    if not least <= computed <= most:
        needed = f"{least}" if least == most else f"from {least} to {most}"
        return _verdict(False, f"steps computed {computed} tokens, and requests needed {needed}", **numbers)
    return _verdict(True, None, **numbers)


def _needed(records: _Records) -> tuple[int, int]:
    """Bounds on the tokens that the requests' work took; equal unless the records leave something open.

    Open is how far a request came that was cut short (aborted, ignored after a start, unfinished) without having
    emitted, or while it recomputed; and what a request that was preempted before its first token found in the cache,
    when it came back, beyond what it had computed itself.
    """
    ground = records.prompt - records.cached + records.output - 1  # each token but the newest, once
    full = ground + records.recomputed
    is_started = records.scheduled != _NEVER
    has_output = records.output > 0
    is_plain = records.completed | (has_output & (records.preemptions == 0))
    least = np.where(is_plain, full, np.where(has_output, ground, 0))
    most = np.where(is_plain | has_output, full, np.maximum(full, 0))
    skipped = _skipped_at_most(records)
    return int(least[is_started].sum()) - skipped, int(most[is_started].sum())


def _skipped_at_most(records: _Records) -> int:
    """Most tokens that neither a first admission found cached nor anyone computed for the request that needed them.

    Once a request has emitted, all its known tokens but the newest have been computed, and the cache can give it back
    no others. So only a preemption before the first token can be followed by a larger hit.
    """
    resumed_hits = int(records.column("num_cached_tokens").sum() - records.cached.sum())
    if resumed_hits <= 0:
        return 0
    preempted_before = np.concatenate(([0], np.cumsum(records.column("num_preempted"))))
    first = preempted_before[np.searchsorted(records.start, records.scheduled)]
    last = preempted_before[np.searchsorted(records.start, records.first_token)]
    may_skip = (records.preemptions > 0) & (last > first)
    return min(resumed_hits, int((records.prompt - records.cached - 1)[may_skip].sum()))


# --- the engine is never idle while work waits ---


def _never_idle(records: _Records, from_arrival: bool) -> Check:
    """Time in the system that no step covers, summed over requests."""
    enter = records.arrival if from_arrival else records.queued
    leave = np.where(records.finish == _NEVER, np.maximum(enter, records.end[-1]), records.finish)
    idle = (leave - enter) - (records.busy(leave) - records.busy(enter))
    num_waiting = int((idle != 0).sum())
    numbers = {"since": "arrival" if from_arrival else "queued", "num_requests_idle": num_waiting}
    if num_waiting:
        worst = int(np.argmax(np.abs(idle)))
        why = (
            f"no step ran while {num_waiting} requests were in the system, up to {idle[worst] / 1e9:.6f} s for one: "
            "the policy idled, or steps are missing"
        )
        return _verdict(False, why, **numbers)
    return _verdict(True, None, **numbers)
