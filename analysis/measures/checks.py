"""Checks that hold for the records of every run, simulated or real: requests and steps must agree with each other.

    littles_law      The time-average number in the system is the arrival rate times the mean sojourn, L = lambda W
                     (Little, 1961). L is integrated over the counts that each step recorded; lambda W over the
                     requests' own instants. Both are sums in ns and must be equal to the ns. So must the counts at
                     each step's plan. A request must enter at the first step boundary at or after its arrival (plus
                     the API server's time, if that is simulated).
                     Not applicable with asynchronous scheduling, where a step is planned while the one before it runs.
                     Not applicable to vLLM, whose API server delays requests; nor is never_idle.
    work_conserved   The tokens that the steps computed are those that the requests needed: prompt - cached + output - 1
                     + recomputed. The tokens that the steps emitted are those that the requests got. With asynchronous
                     scheduling a step may compute one token too many for a request that ended in the step before; in
                     vLLM also for one that was aborted while a step had it.
    never_idle       No time lies between two steps while a request is in the system (work conservation of queueing
                     theory). In a simulated run a request is in the system from its arrival on; else from the boundary
                     that first saw it, as a real engine's clock oversleeps and a replay takes its boundaries from the
                     tape.

If steps of one replica overlap or last no time, the records are contradictory, and every check fails with that reason.

Each check is {"holds": True, False or None, "why": ..., ...}. "why" states what is wrong, or why the check does not
apply (holds is None); it is None if the check holds. Only the columns of `testbed.records.schema` are read. All
arithmetic is on int64 and vectorised. Steps are read once, in batches (`analysis.measures.engine_check`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.measures.engine_check import STEPS_READ, Check, EngineCheck, verdict
from analysis.measures.replicas import of_replica
from analysis.reading.request_columns import Requests
from analysis.reading.rows import Rows, as_rows
from analysis.reading.timeline import replicas_of, step_runs

NAMES = {
    "littles_law": "Little's law",
    "work_conserved": "conservation of work",
    "never_idle": "no idle engine while requests are in the system",
}
CHECKS = tuple(NAMES)


def run_checks(requests: Any, steps: Any, manifest: Mapping[str, Any]) -> dict[str, Check]:
    """All checks of one run, by name. Replicas of a fleet are checked separately. Records are as for `summarise`."""
    step_rows = as_rows(steps)
    seen = Requests.of(requests).where(lambda piece: piece.is_known("queued_ns"))
    replicas = _replicas(seen, step_rows)
    if len(replicas) < 2:
        engines = {0: EngineCheck(seen, manifest)}
    else:
        engines = {number: EngineCheck(seen.where(of_replica(number)), manifest) for number in replicas}
    for number, run in step_runs(step_rows, STEPS_READ, replicas if len(replicas) > 1 else None):
        engines[number].add(run)
    each = {number: dict(zip(CHECKS, engine.verdicts(), strict=True)) for number, engine in engines.items()}
    if len(each) == 1:
        (checks,) = each.values()
    else:
        checks = {name: _merged({number: of[name] for number, of in each.items()}) for name in CHECKS}
    _add_means(checks["littles_law"], seen, list(engines.values()))
    return checks


def _replicas(requests: Requests, steps: Rows) -> list[int]:
    """Every replica that took a step or admitted a request; a request that was aborted at once may have had no step."""
    found = set(replicas_of(steps))
    for piece in requests.pieces():
        started = piece.is_known("first_scheduled_ns") & piece.is_known("replica")
        found |= set(piece.whole("replica")[started].tolist())
    return sorted(found)


def _merged(checks: Mapping[int, Check]) -> Check:
    """Merges one check of several replicas, given by number: the worst verdict, and the sums of the counts."""
    verdicts = [check["holds"] for check in checks.values()]
    holds = False if False in verdicts else None if None in verdicts else True
    why = [f"replica {number}: {check['why']}" for number, check in checks.items() if check["holds"] is holds]
    sums: dict[str, Any] = {}
    for check in checks.values():
        for key, value in check.items():
            if key not in ("holds", "why"):
                sums[key] = sums[key] + value if key.startswith(("ns_", "num_")) and key in sums else value
    return verdict(holds, None if holds else "; ".join(why), **sums)


def _add_means(check: Check, requests: Requests, engines: list[EngineCheck]) -> None:
    """Adds L, lambda and W to the check of Little's law."""
    if "num_requests" in check:
        starts = [engine.start_ns for engine in engines if engine.start_ns is not None]
        arrivals = [int(piece.whole("arrival_ns").min(initial=starts[0])) for piece in requests.pieces()]
        first_ns = min(*arrivals, *starts)
        duration_ns = max(engine.end_ns for engine in engines) - first_ns
        check["mean_in_system"] = check["ns_in_system_by_steps"] / duration_ns
        check["arrival_rate_per_s"] = check["num_requests"] / (duration_ns / 1e9)
        check["mean_sojourn_s"] = check["ns_in_system_by_requests"] / check["num_requests"] / 1e9


def failures(checks: Mapping[str, Check]) -> list[str]:
    """One sentence for each check that fails."""
    return [f"CHECK FAILED: {NAMES[name]}: {checks[name]['why']}" for name in CHECKS if checks[name]["holds"] is False]


def outline(checks: Mapping[str, Check]) -> str:
    said = {True: "holds", False: "FAILS", None: "not applicable"}
    return ", ".join(f"{NAMES[name]}: {said[checks[name]['holds']]}" for name in CHECKS)
