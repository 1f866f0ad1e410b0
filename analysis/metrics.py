"""The metrics, with the field's exact definitions, from request and step records.

Definitions (arrival is the *intended* arrival, so queueing is always inside):
    TTFT                first token - arrival
    TPOT                (last token - first token) / (n - 1), n >= 2: without the first token, as vLLM's and MLPerf's
                        benchmarks; `tpot_incl_first` is (last token - arrival) / n, as LLMPerf's
    ITL                 each gap between two tokens of a request: pooled over requests (`itl_s`), or the largest of each
                        request (`itl_max_s`)
    E2E                 finish - arrival
    queueing            first scheduled - arrival
    normalised latency  E2E / output tokens (Orca, vLLM)
A request that was aborted or is unfinished is censored at that instant and never dropped in silence (see `survival`);
an ignored one (it can never fit) has no latency and is counted. TPOT of an unfinished request is that of its tokens so
far (`num_partial` says how many). Attainment is over the requests *sent*. Rates are per second of the time base, which
the summary states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.checks import run_checks
from analysis.frames import as_frame, json_safe
from analysis.occupancy import run_end_ns
from analysis.pooled import pooled_distribution
from analysis.replicas import describe_replicas, fleet_step_metrics, measure, split
from analysis.request_columns import RequestColumns
from analysis.rows import BoolArray, Codes, FloatArray, as_rows
from analysis.statistics import wilson
from analysis.survival import distribution

if TYPE_CHECKING:
    import pandas as pd

SUMMARY_VERSION = 6
FINISH_REASONS = ("stop", "length", "abort", "ignored", "unfinished")
TIME_BASE = "from the first arrival to the end of the last step"


@dataclass(frozen=True, slots=True)
class SLO:
    """Limits that one request must keep, in seconds; None is no limit. All given ones must hold at once."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_max_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, value: SLO | Mapping[str, float | None] | None) -> SLO | None:
        """An SLO from itself or a mapping of its fields; None where no limit is set. Unknown names raise TypeError."""
        slo = value if isinstance(value, SLO) or value is None else cls(**value)
        return slo if slo is not None and any(limit is not None for limit in asdict(slo).values()) else None


LATENCIES = (
    "ttft_s", "tpot_s", "tpot_incl_first_s", "itl_max_s", "e2e_s", "queueing_s", "normalised_latency_s"
)  # fmt: skip


def request_metrics(requests: Any) -> pd.DataFrame:
    """One row a request: every latency of this module's definitions in seconds, NaN where it has none.

    Columns: request_id, finish_reason ("unfinished" for null), ttft_s, tpot_s, tpot_incl_first_s, itl_max_s, e2e_s,
    queueing_s, normalised_latency_s (s per output token). The tokens of a group
    that come in one step count as one. E2E is of completed requests only (stop, length).
    """
    import pandas as pd

    frame = as_frame(requests)
    columns = RequestColumns.of(frame)
    texts = {"request_id": columns.codes("request_id").texts(), "finish_reason": columns.reasons.texts()}
    return pd.DataFrame(texts | {name: latency(columns, name) for name in LATENCIES}, index=frame.index)


def latency(requests: RequestColumns, name: str) -> FloatArray:
    """One of LATENCIES of each request, seconds `[num_requests]`; NaN where it has none."""
    arrival = requests.numbers("arrival_ns")
    if name == "ttft_s":
        return (requests.numbers("first_token_ns") - arrival) / 1e9
    if name == "queueing_s":
        return (requests.numbers("first_scheduled_ns") - arrival) / 1e9
    if name == "itl_max_s":
        tokens = requests.tokens
        return np.full(len(requests), np.nan) if tokens is None else tokens.largest_gap_ns / 1e9
    n = requests.numbers("num_token_steps")  # the sequences of a group emit together
    if name in ("e2e_s", "normalised_latency_s"):
        e2e = np.where(requests.is_completed, requests.numbers("finish_ns") - arrival, np.nan) / 1e9
        return e2e if name == "e2e_s" else np.where(n >= 1, e2e / np.maximum(n, 1), np.nan)
    last = _last_token_ns(requests)
    if name == "tpot_incl_first_s":
        return np.where(n >= 1, (last - arrival) / np.maximum(n, 1), np.nan) / 1e9
    assert name == "tpot_s", name
    first = requests.numbers("first_token_ns")
    return np.where(n >= 2, (last - first) / np.maximum(n - 1, 1), np.nan) / 1e9


def itl_pooled(requests: Any) -> FloatArray:
    """Every gap between two tokens of one request, in seconds `[num_gaps]`; empty where token times were not kept."""
    gaps = list(RequestColumns.of(requests).gaps_ns())
    return np.concatenate(gaps) / 1e9 if gaps else np.empty(0)


def _last_token_ns(requests: RequestColumns) -> FloatArray:
    """Last token's instant, ns, NaN for none; without token times it follows from TPOT."""
    if requests.tokens is not None:
        return requests.tokens.last_ns
    n, first = requests.numbers("num_token_steps"), requests.numbers("first_token_ns")
    tpot_ns = np.where(n >= 2, requests.numbers("tpot_s") * 1e9, 0.0)
    return np.where(n >= 1, first + tpot_ns * (n - 1), np.nan)


def meets_slo(requests: Any, slo: SLO) -> BoolArray:
    """Which requests of the records keep every limit `[num_requests]`. One that is not completed keeps none.

    A limit on TPOT or ITL does not bind a request of one token, which has neither.
    """
    columns = RequestColumns.of(requests)
    met = columns.is_completed
    for name, limit in asdict(slo).items():
        if limit is not None:
            value = latency(columns, name)
            met &= (value <= limit) | (np.isnan(value) if name in ("tpot_s", "itl_max_s") else False)
    return met


def jain_index(values: FloatArray) -> float | None:
    """Jain's index (Jain, Chiu and Hawe, 1984): (sum x)^2 / (n sum x^2), in [1/n, 1]; None for no service at all."""
    values = np.asarray(values, dtype=np.float64)
    largest = float(values.max(initial=0.0))
    if largest <= 0.0:
        return None
    scaled = values / largest
    return float(min(1.0, scaled.sum() ** 2 / (scaled.size * (scaled**2).sum())))


def summarise(
    requests: Any,
    steps: Any,
    manifest: Mapping[str, Any],
    slo: SLO | Mapping[str, float | None] | None = None,
    warmup_s: float = 0.0,
) -> dict[str, Any]:
    """The headline numbers of one run, nested, JSON-safe; None means "not reached" or "not recorded".

    Records are a pandas frame, an Arrow table or `analysis.rows.Rows` of a file (`testbed.records.schema`); memory does
    not grow with the steps, and by some columns with the requests. `warmup_s` drops the requests that arrive in the
    first seconds after the first arrival, and starts the time base there. "checks" (`analysis.checks`) are of the
    whole run.
    """
    everything, step_rows = RequestColumns.of(requests), as_rows(steps)
    end_ns = run_end_ns(everything, step_rows)
    arrival = everything.whole("arrival_ns")
    start_ns = (int(arrival.min()) if arrival.size else 0) + round(warmup_s * 1e9)
    sent = arrival <= end_ns
    counted = sent & (arrival >= start_ns)
    kept = everything.where(counted)
    duration_s = max(end_ns - start_ns, 0) / 1e9
    limits = SLO.parse(slo)
    measured = measure(split(everything, manifest), step_rows, manifest.get("num_gpu_blocks"), start_ns, end_ns)
    of_steps, of_each = fleet_step_metrics(measured, duration_s)
    computed = None if warmup_s or not step_rows.num_rows else [one.num_computed_tokens for one in measured]
    result = {
        "summary_version": SUMMARY_VERSION,
        "status": manifest.get("status"),
        "backend": manifest.get("backend"),
        **_counts(kept.reasons),
        "num_not_sent": int((~sent).sum()),
        "num_unsent": manifest.get("num_unsent"),
        "num_in_warmup": int((sent & ~counted).sum()),
        "duration_s": duration_s,
        "time_base": TIME_BASE + (f", without the first {warmup_s:g} s" if warmup_s else ""),
        **_latencies(kept, end_ns),
        "throughput": _throughput(everything, start_ns, end_ns),
        "slo": None if limits is None else _attainment(kept, limits, duration_s),
        **_cache_and_preemptions(kept, computed),
        "fairness": _fairness(kept),
        **of_steps,
        "host_share": _host_share(of_steps["time_s"]),
        "replay": manifest.get("replay"),
        "replicas": describe_replicas(split(kept, manifest), measured, of_each, manifest, duration_s),
        "checks": run_checks(everything, step_rows, manifest),
    }
    safe: dict[str, Any] = json_safe(result)
    return safe


def _host_share(time_s: Mapping[str, float] | None) -> float | None:
    """The share of the steps' time in which the device neither moves blocks nor computes: the host's, not hidden."""
    if time_s is None:
        return None
    device_s = time_s["swap"] + time_s["forward"] + time_s["sample"]
    length_s = device_s + time_s["schedule"] + time_s["prepare"] + time_s["other"] - time_s["overlap"]
    return max(0.0, length_s - device_s) / length_s if length_s > 0 else None


def _counts(reasons: Codes) -> dict[str, Any]:
    by_reason = {name: int(reasons.among((name,)).sum()) for name in FINISH_REASONS}
    return {
        "num_requests": reasons.codes.size,
        "num_finished": by_reason["stop"] + by_reason["length"],
        "num_unfinished": by_reason["unfinished"],
        "finish_reasons": by_reason,
    }


def _latencies(requests: RequestColumns, end_ns: int) -> dict[str, Any]:
    """Every latency's distribution; what is open at a request's abort or the run's end is censored there."""
    cut = requests.reasons.among(("abort", "unfinished"))
    aborted = requests.reasons.among(("abort",))
    cut_ns = np.where(aborted, requests.numbers("finish_ns"), float(end_ns))[cut]
    waited_s = (cut_ns - requests.numbers("arrival_ns")[cut]) / 1e9
    open_gap_ns = cut_ns - _last_token_ns(requests)[cut]
    result = {}
    for name in ("ttft_s", "e2e_s", "queueing_s"):
        value = latency(requests, name)
        result[name] = distribution(value, waited_s[np.isnan(value[cut])])
    for name in ("tpot_s", "tpot_incl_first_s", "normalised_latency_s"):
        value = latency(requests, name)
        result[name] = distribution(value) | {"num_partial": int((~np.isnan(value[cut])).sum())}
    result["itl_s"] = pooled_distribution(requests.gaps_ns, open_gap_ns)
    largest = latency(requests, "itl_max_s")
    result["itl_max_s"] = distribution(largest[~cut], np.fmax(largest[cut], open_gap_ns / 1e9))
    return result


def _throughput(requests: RequestColumns, start_ns: int, end_ns: int) -> dict[str, Any]:
    """Completed requests, emitted and prompt tokens per second of the time base, and the rate that was offered.

    A prompt counts when its first token is out, cached tokens included, as serving benchmarks count input tokens.
    """
    duration_s = (end_ns - start_ns) / 1e9
    if duration_s <= 0:
        names = ("requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s", "total_tokens_per_s", "offered_per_s")
        return dict.fromkeys(names)
    completed = (requests.is_completed & (requests.numbers("finish_ns") >= start_ns)).sum()
    started = requests.numbers("first_token_ns") >= start_ns
    prompt = requests.whole("num_prompt_tokens")[started].sum()
    output = requests.whole("num_output_tokens")[started].sum()
    if requests.tokens is not None and start_ns > requests.tokens.earliest_ns:
        output = requests.num_tokens_since(start_ns)
    arrival = requests.whole("arrival_ns")
    inside = arrival[(arrival >= start_ns) & (arrival <= end_ns)]
    window_s = (inside.max() - inside.min()) / 1e9 if inside.size > 1 else 0.0
    return {
        "requests_per_s": completed / duration_s,
        "output_tokens_per_s": output / duration_s,
        "prompt_tokens_per_s": prompt / duration_s,
        "total_tokens_per_s": (prompt + output) / duration_s,
        "offered_per_s": (inside.size - 1) / window_s if window_s > 0 else None,
    }


def _attainment(requests: RequestColumns, slo: SLO, duration_s: float) -> dict[str, Any]:
    """Share of the requests sent that kept every limit, its Wilson interval, and the goodput (requests/s)."""
    met, sent = int(meets_slo(requests, slo).sum()), len(requests)
    low, high = wilson(met, sent) if sent else (None, None)
    return {
        "limits": {name: limit for name, limit in asdict(slo).items() if limit is not None},
        "num_met": met,
        "attainment": met / sent if sent else None,
        "attainment_ci95": [low, high],
        "goodput_per_s": met / duration_s if duration_s > 0 else None,
    }


def _cache_and_preemptions(requests: RequestColumns, num_computed: list[int | None] | None) -> dict[str, Any]:
    """num_computed: tokens that each replica's steps computed; None: as the requests tell, of a part of the run."""
    admitted = requests.is_known("first_scheduled_ns")
    prompt = requests.numbers("num_prompt_tokens")[admitted].sum()
    cached = requests.numbers("num_cached_tokens")[admitted].sum()
    preempted, recomputed = requests.whole("num_preemptions"), requests.whole("num_recomputed_tokens").sum()
    computed = prompt - cached + requests.whole("num_output_tokens")[admitted].sum() + recomputed
    if num_computed is not None:
        known = [tokens for tokens in num_computed if tokens is not None]
        computed = sum(known) if len(known) == len(num_computed) else 0
    return {
        "prefix_hit_rate": cached / prompt if prompt > 0 else None,
        "preemptions": {
            "total": int(preempted.sum()),
            "requests_share": float((preempted > 0).mean()) if len(requests) else None,
            "recomputed_tokens": int(recomputed),
            "recomputed_share": recomputed / computed if computed > 0 else None,
        },
    }


def _fairness(requests: RequestColumns) -> dict[str, Any] | None:
    """Jain's index over tenants: of the service got (prompt + output tokens) and of the mean normalised latency.

    None with fewer than two tenants. Service is what each got in this run: tenants that ask for less also get less.
    """
    tenants = requests.codes("tenant")
    if np.count_nonzero(np.bincount(tenants.codes)) < 2:
        return None
    started = requests.is_known("first_token_ns")
    service = np.where(started, requests.whole("num_prompt_tokens"), 0) + requests.whole("num_output_tokens")
    tokens = np.array([part.sum() for part in _by_label(tenants, service)], dtype=np.float64)
    value = latency(requests, "normalised_latency_s")
    known = [part[~np.isnan(part)] for part in _by_label(tenants, value)]
    means = np.array([math.fsum(part) / part.size for part in known if part.size])
    return {
        "num_tenants": tokens.size,
        "jain_service": jain_index(tokens),
        "max_min_service_gap_tokens": float(tokens.max() - tokens.min()),
        "jain_normalised_latency": jain_index(means),
    }


def _by_label(codes: Codes, values: Any) -> Iterator[Any]:
    """The values of each label that occurs, labels in alphabetical order."""
    order = np.argsort(codes.codes, kind="stable")
    present, first = np.unique(codes.codes[order], return_index=True)
    parts = dict(zip(present.tolist(), np.split(values[order], first[1:]), strict=True))
    for number in sorted(parts, key=codes.labels.__getitem__):
        yield parts[number]
