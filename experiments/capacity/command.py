"""The command line of `testbed capacity`: runs the searches, prints and writes the results as text."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from analysis.comparison.compare import Comparison
from analysis.comparison.wording import interval_text, verdict_text
from analysis.measures.capacity import Load
from analysis.measures.slo import LIMITS
from analysis.measures.statistics import mean_of_all
from analysis.measures.turns import Turns, squeezed_by, squeezed_note
from analysis.reading.frames import json_safe
from analysis.reports.load_cautions import DRAINED
from experiments.capacity.arms import beyond_names
from experiments.capacity.found import DOES_NOT_FIT, Capacity, Found, Replicate
from experiments.capacity.search import MAX_DOUBLINGS
from experiments.capacity.study import find_capacity
from experiments.configuration.config import RunConfig
from experiments.configuration.overrides import refuse_repeated, with_searched
from experiments.console import Parser, as_markdown, folder_named, table
from experiments.runs.environment import describe_versions
from experiments.runs.run import FailedError
from experiments.runs.run_folder import write_json
from testbed.output import written

RESULT, TEXT, FIGURE, TABLE = "capacity.json", "capacity.md", "capacity", "points.csv"
SHORT = 10  # a run is short if all requests (or sessions) arrive within this many times the duration of one
SPARE = 2  # how many times that is advised, as in a longer run one lasts longer
NEARLY = 0.75  # of the advised length, with which fleets are compared without a note, for the same reason
UNLIKE = 0.1  # how far from the capacity, relatively, the rate may be at which its requests arrive
OF_MEANS = (
    "a capacity is the mean of the seeds': at it those of lower capacity are overloaded, so the attainment there may "
    "be below the SLO's; the low end of the range of seeds is the rate for all of them (docs/capacity.md)"
)
OVERLOAD = {"queue": "the queue grows", "undone": "fewer than half are done when nearly all have come"}
OF_ONE_SEED = (
    "one seed: the interval takes requests as independent, which they are not as they queue, so it is too narrow and "
    "tells no policies apart"
)


def main(arguments: list[str]) -> int:
    arguments = with_searched(arguments)
    options = _parser().parse_intermixed_args(arguments)
    refuse_repeated(options.overrides)
    folder: Path = options.out or Path("capacity", time.strftime("%Y-%m-%d"), time.strftime("%H-%M-%S"))
    if any(re.match(r"\+*backend=(?!sim$)", item) for item in options.overrides):
        print("note: an engine runs each of some ten rates in its own time, one after the other", file=sys.stderr)
    try:
        found = find_capacity(
            *options.overrides, folder=folder, tolerance=options.tolerance, jobs=options.jobs, whole=options.whole
        )
    except KeyboardInterrupt:
        into = [] if options.out else ["--out", str(folder)]
        again = shlex.join(["testbed", "capacity", *arguments, *into])
        raise KeyboardInterrupt(f"interrupted; the points that were done are kept, go on with: {again}") from None
    differing = beyond_names([one.arm for one in found.found])
    said = [f"note: the policies differ beyond their names, in {differing}"] if differing else []
    said += [f"note: {sentence}" for one in found.found for sentence in warnings(one)]
    said += [f"note: {sentence}" for sentence in _of_fleets(found.found)]
    if len(found.seeds) == 1:
        advice = dict.fromkeys(one.arm.replicates for one in found.found)
        said.append(f"note: {OF_ONE_SEED}; {'; '.join(advice)}")
    elif any(min(one.attainments, default=1.0) < one.arm.share for one in found.found):
        said.append(f"note: {OF_MEANS}")
    terms = dict.fromkeys(_terms(one) for one in found.found)  # a line for each different one
    tables = [policies_table(found.found, found.unfit), *([_changes(found)] if found.changes else [])]
    trust = [f"trust in {one.about}: {one.level} ({one.why})" for one in found.trust]
    lines = [*terms, *(line for text in tables for line in ("", text)), "", *trust, "", *said]
    if found.tolerance < options.tolerance:
        lines.append(f"note: {folder} has the brackets of --tolerance {found.tolerance:g}, finer than asked for")
    _write(found, lines, shlex.join(["testbed", "capacity", *arguments]))
    print("\n".join(lines))
    print(f"\nwrote {folder / TEXT}, {RESULT}, {FIGURE}.png, {TABLE}")
    missing = [f"{name} {DOES_NOT_FIT}: {reason}" for name, reason in found.unfit.items()]
    missing += [reason for one in found.found if (reason := without_capacity(one))]
    if missing:
        raise FailedError(missing[0] + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "testbed capacity",
        description="The highest request rate at which each policy keeps its SLO (docs/capacity.md).",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value",
        help="as of `testbed run`; several values (scheduler=a,b) are policies, of seed replicates; slo.ttft_s, "
        "slo.tpot_s, slo.e2e_s, slo.itl_max_s, slo.lateness_s: the limits, slo.attainment (0.99): who must keep them; "
        "trace.rate (or trace.rate_scale, or num of the transformation copies): where to start",
    )  # fmt: skip
    parser.add_argument("--tolerance", type=float, default=0.02, help="how close the rates kept and failed are (0.02)")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at once (1)")
    parser.add_argument("--whole", action="store_true", help="stop no simulation early; the capacities are the same")
    parser.add_argument(
        "--out", type=folder_named, help="folder; one of the same search goes on (capacity/<date>/<time>)"
    )
    return parser


def _write(found: Capacity, lines: list[str], command: str) -> None:
    from analysis.plots.capacity_plots import rate_curves
    from analysis.plots.style import save

    out = found.folder
    changes = {change.arm: change for change in found.changes}
    result = {
        "tolerance": found.tolerance,
        "seeds": list(found.seeds),
        "version": describe_versions()["llm-serving-testbed"],
        "baseline": found.baseline,
        "policies": json_safe([_row(one, changes.get(one.arm.name)) for one in found.found]),
        "unfit": dict(found.unfit),
        "trust": [one._asdict() for one in found.trust],
    }
    write_json(out / RESULT, result)
    with written(out / TABLE) as file:
        found.points.to_csv(file, index=False)
    with written(out / TEXT) as file:
        file.write(f"# Capacity\n\n`{command}`\n\n{as_markdown(lines)}\n\n![goodput and attainment]({FIGURE}.png)\n")
    units = " or ".join(dict.fromkeys(one.arm.unit for one in found.found))
    curves = {
        one.arm.name: [(value * one.arm.per_value, load) for value, load in one.tried if load.is_whole]
        for one in found.found
    }
    capacities = {one.arm.name: one.capacity for one in found.found}
    intervals = {one.arm.name: one.interval for one in found.found}
    save(rate_curves(curves, capacities, intervals, {one.arm.share for one in found.found}, units), out / FIGURE)


# --- results as text ---


def _row(found: Found, change: Comparison | None) -> dict[str, Any]:
    """The results of a policy: its capacity with its interval over seeds, each seed's, and what fails above it.

    change: of the capacity from the baseline's.
    """
    at, share = found.at_kept, found.arm.share
    low, high = found.interval or (None, None)
    return {
        "policy": found.arm.name,
        "capacity": found.capacity,
        "unit": found.arm.unit,
        "num_gpus": found.arm.num_gpus or None,
        "setting": _setting(found),
        "failed_at": found.rate(found.bracket.failed),
        "ci95_low": low,
        "ci95_high": high,
        "attainment": mean_of_all(found.attainments),
        "attainment_wilson95": at.interval if at is not None and len(found.replicates) == 1 else None,
        "fails_first": found.fails_first,
        "goodput_per_s": None if at is None else at.goodput_per_s,
        "num_requests": None if at is None else at.num_requests,
        "seeds": [
            {
                "seed": one.seed,
                "capacity": found.rate(one.bracket.kept) or 0.0,
                "failed_at": found.rate(one.bracket.failed),
                "attainment": None if (load := one.at(found.bracket.kept)) is None else load.attainment,
                "highest_kept": found.rate(one.extreme(share, kept=True)),
                "lowest_failed": found.rate(one.extreme(share, kept=False)),
            }
            for one in found.replicates
        ],
        "change": None if change is None else _change_row(change),
        "reason": without_capacity(found),
        "warnings": warnings(found),
    }


def _change_row(change: Comparison) -> dict[str, Any]:
    value, low, high = (None,) * 3 if change.estimate is None else change.estimate.percent()
    return {
        "percent": value,
        "ci95_low": low,
        "ci95_high": high,
        "p_holm": change.p_corrected,
        "verdict": change.verdict,
    }


def policies_table(found: Sequence[Found], unfit: Collection[str] = ()) -> str:
    """The table of capacities, a row for each policy. unfit: the names of those that do not fit on their device."""
    has_seeds = len(found[0].replicates) > 1
    spread = ("95 % over seeds", "range of seeds") if has_seeds else ()
    wilson = () if has_seeds else ("95 % (Wilson)",)
    headers = ("policy", "capacity", *spread, "fails at", "attainment", *wilson, "fails first", "goodput")
    rows = [_cells(one) for one in found]
    if any(one.arm.per_value != 1 for one in found):
        headers = (*headers, "setting")
        rows = [(*row, _setting(one) or "–") for row, one in zip(rows, found, strict=True)]
    if len({one.arm.num_gpus for one in found}) > 1:
        headers = (*headers[:2], "GPUs", "per GPU", *headers[2:])
        rows = [(*row[:2], *_per_gpu(one), *row[2:]) for row, one in zip(rows, found, strict=True)]
    rows += [(name, DOES_NOT_FIT, *["–"] * (len(headers) - 2)) for name in unfit]
    return table(headers, rows, numbers=False)


def _per_gpu(found: Found) -> tuple[str, str]:
    num = found.arm.num_gpus
    return (str(num), found.capacity_text(num)) if num else ("–", "–")


def _setting(found: Found) -> str | None:
    """The setting that has the policy's capacity as its rate; None if there is none."""
    kept = found.bracket.kept
    return None if kept is None else f"{found.arm.rate_key}={kept:.4g}"


def _cells(found: Found) -> tuple[str, ...]:
    at, failed, shares = found.at_kept, found.rate(found.bracket.failed), found.attainments
    spread, told = [], [_range(shares, ".2%")]
    if len(found.replicates) > 1:
        each = [] if found.is_below else [found.rate(one.bracket.kept) or 0.0 for one in found.replicates]
        spread = [_range(found.interval or (), ".4g"), _range(each, ".4g")]
        told = [f"{sum(shares) / len(shares):.2%} ({told[0]})" if shares else "–"]
    else:
        told.append(_range(() if at is None else at.interval, ".2%"))
    goodput = None if at is None else at.goodput_per_s
    return (
        found.arm.name,
        found.capacity_text(),
        *spread,
        "–" if failed is None else f"{failed:.4g}",
        *told,
        _fails_first(found),
        "–" if goodput is None else f"{goodput:.4g} req/s",
    )


def _range(values: Sequence[float], form: str) -> str:
    """The least and the largest value, once if they are written alike; a dash if there are none."""
    ends = dict.fromkeys(f"{end:{form}}" for end in (min(values), max(values))) if values else ["–"]
    return " to ".join(ends)


def _changes(found: Capacity) -> str:
    headers = (f"capacity against {found.baseline}", f"change, 95 % over {len(found.seeds)} paired seeds", "verdict")
    rows = [(one.arm, interval_text(one) or "–", verdict_text(one, found.margin)) for one in found.changes]
    return table(headers, rows, numbers=False)


def _fails_first(found: Found) -> str:
    """The limit that most requests exceed, with their share if that is known."""
    first, above = found.fails_first, found.at_failed
    if above is None or first is None:
        return "–"
    if first in OVERLOAD:
        return OVERLOAD[first]
    return LIMITS.get(first, first) + (f" ({above.over[first] / above.num_requests:.2%})" if above.is_whole else "")


def without_capacity(found: Found) -> str:
    """Why there is no capacity, in one line; empty if there is one."""
    lacking = [one for one in found.replicates if None in one.bracket]
    return _without_capacity(found, lacking[0]) if lacking else ""


def _without_capacity(found: Found, one: Replicate) -> str:
    arm, at = found.arm, one.at_failed
    who = arm.name + (f" with seed={one.seed}" if len(found.replicates) > 1 else "")
    if at is None:
        highest = found.rate(one.bracket.kept)
        return (
            f"{who} keeps its SLO at every rate up to {highest:.4g} {arm.unit} ({2**MAX_DOUBLINGS} times "
            f"{arm.rate_key}): the trace is too short to overload it, or the limits too wide; raise "
            "trace.num_requests (or trace.limit), or tighten slo.*"
        )
    name, num = at.first_failed(arm.share), at.num_requests
    if name is None or name in OVERLOAD:
        reason = OVERLOAD[name or "queue"]
    elif name == "unfinished":
        reason = f"{at.over[name]} of {num} requests do not finish: they can never fit, or were cancelled"
    else:
        mean = "" if at.mean_s is None or at.mean_s[name] is None else f", with a mean of {at.mean_s[name]:.4g} s"
        limit = "by class" if arm.slo.classes else f"{getattr(arm.slo, name):g} s"
        many = f"{at.over[name]} of {num}" if at.is_whole else "too many"
        reason = f"{many} requests are over slo.{name} ({limit}{mean})"
    failed = one.bracket.failed
    lowest = found.rate(failed)
    remedy = "widen the limit, or take a faster device or shorter requests"
    if name == "undone":
        remedy = "give a longer trace (trace.num_requests, trace.limit)"
    if name == "unfinished":
        remedy = "give them more KV blocks (cache.num_gpu_blocks, a device with more memory) or take shorter requests"
    if failed is not None and found.is_crowded(one):
        lower = f"start lower, as {arm.rate_key}={failed / 2:g}"
        return (
            f"{who} has a capacity below {lowest:.4g} {arm.unit}, the lowest rate tried: {reason}; {lower}, or {remedy}"
        )
    return f"{who} has capacity 0: even at {lowest:.4g} {arm.unit}, where requests hardly meet, {reason}; {remedy}"


def warnings(found: Found) -> list[str]:
    arm, at, said = found.arm, found.at_kept, []
    for one in found.replicates:
        kept, failed = (found.rate(one.extreme(arm.share, kept=kept)) for kept in (True, False))
        if kept is not None and failed is not None and kept > failed:
            said.append(
                f"{kept:.4g} {arm.unit} is kept although {failed:.4g} is not (seed={one.seed}): attainment does not "
                "fall with the rate here; give more requests or seeds"
            )
    if at is not None:
        by, turns = squeezed_by(arm.at(found.bracket.kept or arm.start, 0)["trace"]), Turns(at.num_later, at.num_early)
        if (note := squeezed_note(by, turns, is_closed_loop=arm.is_of_sessions)) is not None:
            said.append(f"{note}, whose number can be searched (docs/capacity.md)")
        num, arriving_s = _mean_trace(found, at)
        who = "sessions begin" if arm.is_of_sessions else "requests arrive"
        offered = (at.num_customers - len(found.replicates)) / max(at.arriving_s, 1e-9)
        if abs(offered / found.capacity - 1) > UNLIKE:
            said.append(
                f"at the capacity of {found.capacity:.4g} {arm.unit} the {who} at {offered:.4g} {arm.unit} in fact: "
                f"the trace is too short for the mean rate of its arrivals, or {arm.rate_key} moves only a part of them"
            )
        if at.stay_s is not None and arriving_s < SHORT * at.stay_s:
            said.append(
                f"the run is short: at capacity the {who} within {arriving_s:.3g} s, and one lasts {at.stay_s:.3g} s; "
                "overload hardly shows, goodput lacks what ends later, and a longer run may have another capacity; "
                f"give at least {_enough(found):,} requests (trace.num_requests, trace.limit)"
            )
        if arm.is_of_sessions and at.goodput_per_s and at.arriving_s < DRAINED * at.duration_s:
            until_s, met = at.duration_s / len(found.replicates), at.num_met / max(at.arriving_s, 1e-9)
            said.append(
                f"goodput is {at.goodput_per_s:.4g} req/s, and {met:.4g} req/s keep the SLO at the capacity: it is "
                f"over the {until_s:.3g} s in which requests come, and sessions begin in the first {arriving_s:.3g} s "
                "only; from then on ever fewer have turns left; more sessions help"
            )
        if at.overload == "queue":
            excess = at.waiting.excess(at.num_requests)
            said.append(
                f"at the capacity of {found.capacity:.4g} {arm.unit} the queue of all seeds together still grows, by "
                f"{excess:.1%} of the requests: a longer trace has a capacity nearer to "
                f"{found.capacity * (1 - excess):.3g}; give more requests"
            )
        if (allowed := num * (1 - arm.share)) < 5:
            said.append(f"{int(allowed + 1e-9)} of {num:g} requests may fail: a few requests decide; give more")
        if at.over.get("unfinished"):
            said.append(f"{at.over['unfinished']} of {at.num_requests} requests do not finish, and count as failed")
    return [f"{arm.name}: {sentence}" for sentence in (*said, *found.notes)]


def _mean_trace(found: Found, at: Load) -> tuple[float, float]:
    """The requests of a seed's trace at the capacity, and the seconds within which they (or their sessions) arrive."""
    return at.num_requests / len(found.replicates), at.arriving_s / len(found.replicates)


def _enough(found: Found) -> int:
    """The requests of a trace that is not short at the capacity, to two digits; 0 if that is unknown."""
    if (at := found.at_kept) is None or at.stay_s is None:
        return 0
    num, arriving_s = _mean_trace(found, at)
    return math.ceil(float(f"{SPARE * SHORT * at.stay_s * num / max(arriving_s, 1e-9):.2g}"))


def _of_fleets(found: Sequence[Found]) -> list[str]:
    """A sentence if policies with more GPUs than others have traces that are too short to compare them."""
    fleets = {one.arm.num_gpus for one in found}
    each = {one.arm.num_requests[0] / num for one in found if (num := one.arm.num_gpus)}
    enough = math.ceil(max(fleets) * max(_enough(one) / (one.arm.num_gpus or 1) for one in found))
    if len(fleets) < 2 or len(each) < 2 or all(one.arm.num_requests[0] >= NEARLY * enough for one in found):
        return []
    return [
        "the more GPUs a policy has, the fewer requests of its trace come to each, which overloads it later and lets "
        f"it look better; to compare, give all of them at least {enough:,} requests (trace.num_requests, trace.limit)"
    ]


def _terms(found: Found) -> str:
    arm, config = found.arm, RunConfig.from_container(found.arm.raw)
    num = f"{arm.num_requests[0]:,} requests" + (f", {len(arm.num_requests)} seeds" * (len(arm.num_requests) > 1))
    if arm.is_of_sessions and (at := found.at_kept) is not None:
        num += f"; capacity counts sessions, of {at.num_requests / at.num_customers:.3g} requests in the mean, and "
        num += "goodput requests"
    names = f"{config.raw['backend']['name']}, {config.model.name} on {config.device.name}"
    names += f", cost {config.cost_name}" if config.is_simulated else ""
    trace = config.raw["trace"].get("_target_", config.trace.name)
    return f"{arm.slo} for {100 * arm.share:.4g} % of the requests; {names}, trace {trace} ({num})"
