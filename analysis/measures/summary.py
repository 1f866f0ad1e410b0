"""The headline numbers of one run, summed up over pieces of its requests and batches of its steps.

The definitions are those of `analysis.measures.metrics`. A request that was aborted, or unfinished when the run ended,
is censored at that instant (see `survival`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from analysis.measures.checks import run_checks
from analysis.measures.classes import classes_of, is_of
from analysis.measures.fairness import fairness
from analysis.measures.metrics import last_token_ns, latency
from analysis.measures.occupancy import Occupancy, preemption_costs, run_end_ns
from analysis.measures.rates import is_within, rated_until_ns, throughput
from analysis.measures.replicas import describe_replicas, fleet_step_metrics, measure, split
from analysis.measures.slo import SLO, meets_slo
from analysis.measures.statistics import wilson
from analysis.measures.steadiness import steadiness
from analysis.measures.survival import Pool, Values, distribution, pooled_distributions
from analysis.reading.frames import json_safe
from analysis.reading.request_columns import RequestColumns, Requests
from analysis.reading.rows import BoolArray, FloatArray, as_rows

SUMMARY_VERSION = 25  # another one with every change below: `Run.summary` then sums up older runs anew
FINISH_REASONS = ("stop", "length", "abort", "ignored", "unfinished")
TIME_BASE = "from the first arrival to the end of the last step"
_NEVER = np.iinfo(np.int64).max


def summarise(
    requests: Any,
    steps: Any,
    manifest: Mapping[str, Any],
    slo: SLO | Mapping[str, float | None] | None = None,
    warmup_s: float = 0.0,
) -> dict[str, Any]:
    """The headline numbers of one run, nested, JSON-safe; None means "not reached" or "not recorded".

    Records are a pandas frame, an Arrow table or `analysis.reading.rows.Rows` of a file (`testbed.records.schema`).
    Memory does not grow with the steps, and with the requests only by a few numbers for each session and for each
    request that was cut short; all quantiles are exact. `warmup_s` drops the requests that arrive within that time
    after the first arrival, and starts the time base there. Rates (`analysis.measures.rates`) count what ends or is
    emitted from then on, of any request. "steadiness" and "checks" are of the whole run.
    """
    everything, step_rows = Requests.of(requests), as_rows(steps)
    end_ns = run_end_ns(everything, step_rows)
    first_ns = min(int(piece.whole("arrival_ns").min(initial=_NEVER)) for piece in everything.pieces())
    start_ns = (first_ns if len(everything) else 0) + round(warmup_s * 1e9)
    sent = everything.where(lambda piece: piece.whole("arrival_ns") <= end_ns)
    kept = sent.where(lambda piece: piece.whole("arrival_ns") >= start_ns)
    until_ns = rated_until_ns(kept, start_ns, end_ns)
    limits = SLO.parse(slo)
    parts = split(everything, manifest)
    measured = measure(parts, step_rows, manifest, start_ns, end_ns)
    of_steps, of_each = fleet_step_metrics(measured)
    computed = None if warmup_s or not step_rows.num_rows else [one.num_computed_tokens for one in measured]
    result = {
        "summary_version": SUMMARY_VERSION,
        "status": manifest.get("status"),
        "backend": manifest.get("backend"),
        **_counts(kept),
        "num_not_sent": len(everything) - len(sent),
        "num_unsent": manifest.get("num_unsent"),
        "num_in_warmup": len(sent) - len(kept),
        "duration_s": max(end_ns - start_ns, 0) / 1e9,
        "time_base": TIME_BASE + (f", without the first {warmup_s:g} s" if warmup_s else ""),
        **_latencies(kept, end_ns),
        "throughput": throughput(everything, start_ns, until_ns),
        "slo": None if limits is None else _attainment(everything, len(kept), limits, start_ns, until_ns),
        "deadlines": _deadlines(kept),
        **_cache_and_preemptions(kept, computed, measured),
        "classes": _by_class(everything, kept, limits, start_ns, end_ns),
        "fairness": fairness(kept, end_ns),
        **of_steps,
        "host_share": _host_share(of_steps["time_s"]),
        "steadiness": steadiness(sent),
        "replay": manifest.get("replay"),
        "replicas": describe_replicas(
            split(kept, manifest), [throughput(part, start_ns, until_ns) for part in parts], measured, of_each, manifest
        ),
        "checks": run_checks(everything, step_rows, manifest),
    }
    safe: dict[str, Any] = json_safe(result)
    return safe


def summary_value(summary: Mapping[str, Any], path: str) -> float | None:
    """The number at a dotted path of a summary (its last key may have dots); None if it is absent or not reached."""
    value: Any = summary
    while path and isinstance(value, Mapping):
        key, _, rest = (path, "", "") if path in value else path.partition(".")
        value, path = value.get(key), rest
    return float(value) if not path and isinstance(value, int | float) and not isinstance(value, bool) else None


def _host_share(time_s: Mapping[str, float] | None) -> float | None:
    """The share of the steps' time in which the device neither moves blocks nor computes: host time not hidden."""
    if time_s is None:
        return None
    device_s = time_s["swap"] + time_s["forward"] + time_s["sample"]
    length_s = device_s + time_s["schedule"] + time_s["prepare"] + time_s["other"] - time_s["overlap"]
    return max(0.0, length_s - device_s) / length_s if length_s > 0 else None


def _counts(requests: Requests) -> dict[str, Any]:
    by_reason = dict.fromkeys(FINISH_REASONS, 0)
    for piece in requests.pieces():
        for name in FINISH_REASONS:
            by_reason[name] += int(piece.reasons.among((name,)).sum())
    return {
        "num_requests": len(requests),
        "num_finished": by_reason["stop"] + by_reason["length"],
        "num_unfinished": by_reason["unfinished"],
        "finish_reasons": by_reason,
    }


_CENSORED_AT_END = ("ttft_s", "e2e_s", "queueing_s")
_PARTIAL = ("tpot_s", "tpot_incl_first_s", "normalised_latency_s")
Samples = dict[str, tuple[FloatArray, FloatArray]]  # by latency: observed (NaN: none) and censored values


def _latencies(requests: Requests, end_ns: int) -> dict[str, Any]:
    """The distribution of every latency; latencies still open at a request's abort or the run's end are censored there.

    Gaps are always pooled (`Pool`), and all latencies if there are several pieces, so that no piece's values are kept.
    """
    samples: Samples = {}
    censored: dict[str, list[FloatArray]] = {}
    num_partial = dict.fromkeys(_PARTIAL, 0)
    for piece in requests.pieces():
        samples, cut = samples_of(piece, end_ns)
        for name, (observed, bounds) in samples.items():
            censored.setdefault(name, []).append(bounds)
            if name in num_partial:
                num_partial[name] += int((~np.isnan(observed[cut])).sum())

    def passes() -> Iterator[tuple[str, Iterable[Values]]]:
        for piece in requests.pieces():
            if not requests.is_one_piece:
                for name, (observed, _) in samples_of(piece, end_ns)[0].items():
                    yield name, [observed[~np.isnan(observed)]]
            yield "itl_s", piece.gaps_ns()

    result: dict[str, Any] = dict.fromkeys(samples)
    if requests.is_one_piece:
        result |= {name: distribution(*values) for name, values in samples.items() if name != "itl_s"}
        censored = {"itl_s": censored["itl_s"]}
    pools = {name: Pool(np.concatenate(parts), 1e9 if name == "itl_s" else 1.0) for name, parts in censored.items()}
    result |= pooled_distributions(pools, passes)
    for name, num in num_partial.items():
        result[name] = result[name] | {"num_partial": num}
    return result


def samples_of(requests: RequestColumns, end_ns: int) -> tuple[Samples, BoolArray]:
    """The requests' latencies, and which requests were cut short. "itl_s" has only the censored gaps, in ns."""
    cut = requests.reasons.among(("abort", "unfinished"))
    aborted = requests.reasons.among(("abort",))
    cut_ns = np.where(aborted, requests.numbers("finish_ns"), float(end_ns))[cut]
    waited_s = (cut_ns - requests.numbers("arrival_ns")[cut]) / 1e9
    open_gap_ns = cut_ns - last_token_ns(requests)[cut]
    if requests.tokens is None:  # of gaps of which none was recorded the open ones say nothing
        open_gap_ns = np.full_like(open_gap_ns, np.nan)
    none = np.empty(0)
    samples: Samples = {}
    for name in _CENSORED_AT_END:
        value = latency(requests, name)
        samples[name] = value, waited_s[np.isnan(value[cut])]
    samples |= {name: (latency(requests, name), none) for name in _PARTIAL}
    samples["itl_s"] = none, open_gap_ns
    largest = latency(requests, "itl_max_s")
    samples["itl_max_s"] = largest[~cut], np.fmax(largest[cut], open_gap_ns / 1e9)
    return samples, cut


def _attainment(requests: Requests, num_sent: int, slo: SLO, start_ns: int, until_ns: int) -> dict[str, Any]:
    """Attainment: the share of the requests sent since start_ns that kept every limit, with its Wilson interval.
    Goodput: the requests that throughput counts and that kept every limit, per second."""
    duration_s = (until_ns - start_ns) / 1e9
    num_met = num_good = 0
    num_of_each = np.zeros(len(slo.classes), dtype=np.int64)
    for piece in requests.pieces():
        is_met = meets_slo(piece, slo)
        num_of_each += slo.num_of_each(piece)
        num_met += int(is_met[piece.whole("arrival_ns") >= start_ns].sum())
        num_good += int((is_met & is_within(piece, start_ns, until_ns)).sum())
    low, high = wilson(num_met, num_sent) if num_sent else (None, None)
    return {
        "limits": slo.limits,
        "classes": [
            {"name": item.name, "limits": item.slo.limits, "num_requests": num}
            for item, num in zip(slo.classes, num_of_each.tolist(), strict=True)
        ]
        or None,
        "num_met": num_met,
        "attainment": num_met / num_sent if num_sent else None,
        "attainment_ci95": [low, high],
        "goodput_per_s": num_good / duration_s if duration_s > 0 else None,
    }


def _deadlines(requests: Requests) -> dict[str, Any] | None:
    """The share of deadlines that were met, with its Wilson interval; None if no request has one."""
    num = requests.sum(lambda piece: piece.is_known("deadline_ns").sum())
    if not num:
        return None
    num_met = requests.sum(lambda piece: (latency(piece, "lateness_s") <= 0).sum())
    return {"num": num, "num_met": num_met, "met": num_met / num, "met_ci95": list(wilson(num_met, num))}


def _by_class(
    everything: Requests, kept: Requests, slo: SLO | None, start_ns: int, end_ns: int
) -> dict[str, Any] | None:
    """Some headline numbers of each class; None if there are no classes. Names come last, as they may have dots."""
    if (found := classes_of(kept)) is None:
        return None
    by, names = found
    latencies, nums, kept_slo, met = {}, {}, {}, {}
    for name in names:
        mine = kept.where(is_of(by, name))
        latencies[name], nums[name] = _latencies(mine, end_ns), len(mine)
        if (deadlines := _deadlines(mine)) is not None:
            met[name] = deadlines["met"]
        if slo is not None:
            sent = everything.where(is_of(by, name))
            kept_slo[name] = _attainment(sent, len(mine), slo, start_ns, start_ns)["attainment"]
    told = {
        metric: {which: {name: latencies[name][metric][which] for name in names} for which in ("mean", "p99")}
        for metric in ("ttft_s", "tpot_s", "e2e_s")
    }
    return {"by": by, "num_requests": nums, **told, "attainment": kept_slo or None, "deadlines_met": met or None}


def _cache_and_preemptions(
    requests: Requests, num_computed: list[int | None] | None, measured: list[Occupancy]
) -> dict[str, Any]:
    """num_computed: tokens that each replica's steps computed; None: use the requests' counts, for a part of a run."""
    admitted = requests.where(lambda piece: piece.is_known("first_scheduled_ns"))
    prompt = admitted.sum(lambda piece: piece.numbers("num_prompt_tokens").sum())
    cached = admitted.sum(lambda piece: piece.numbers("num_cached_tokens").sum())
    recomputed = requests.sum(lambda piece: piece.whole("num_recomputed_tokens").sum())
    num_preempted = requests.sum(lambda piece: (piece.whole("num_preemptions") > 0).sum())
    if num_computed is None:
        emitted = admitted.sum(lambda piece: np.maximum(piece.whole("num_output_tokens") - 1, 0).sum())
        computed = prompt - cached + emitted + recomputed  # nobody attends to a last token: it is not computed
    else:
        known = [tokens for tokens in num_computed if tokens is not None]
        computed = sum(known) if len(known) == len(num_computed) else 0
    return {
        "prefix_hit_rate": cached / prompt if prompt > 0 else None,
        "preemptions": {
            "total": requests.sum(lambda piece: piece.whole("num_preemptions").sum()),
            "requests_share": num_preempted / len(requests) if len(requests) else None,
            "recomputed_tokens": recomputed,
            "recomputed_share": recomputed / computed if computed > 0 else None,
            **preemption_costs(measured, int(recomputed)),
        },
    }
