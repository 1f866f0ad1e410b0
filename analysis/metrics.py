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

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.checks import run_checks
from analysis.frames import BoolArray, FloatArray, as_frame, json_safe, numbers, texts, token_lists
from analysis.occupancy import run_end_ns
from analysis.replicas import describe_replicas, fleet_step_metrics, split
from analysis.statistics import wilson
from analysis.survival import distribution

SUMMARY_VERSION = 4
COMPLETED = ("stop", "length")
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


def request_metrics(requests: Any) -> pd.DataFrame:
    """One row a request: every latency of this module's definitions in seconds, NaN where it has none.

    Columns: request_id, finish_reason ("unfinished" for null), ttft_s, tpot_s, tpot_incl_first_s, itl_max_s, e2e_s,
    queueing_s, normalised_latency_s (s per output token). The tokens of a group
    that come in one step count as one. E2E is of completed requests only (stop, length).
    """
    frame = as_frame(requests)
    arrival, first = numbers(frame, "arrival_ns"), numbers(frame, "first_token_ns")
    n = numbers(frame, "num_token_steps")  # the sequences of a group emit together
    last, itl_max = _last_token_ns(frame)
    reason = texts(frame, "finish_reason", "unfinished")
    e2e = np.where(np.isin(reason, COMPLETED), numbers(frame, "finish_ns") - arrival, np.nan) / 1e9
    columns = {
        "request_id": texts(frame, "request_id"),
        "finish_reason": reason,
        "ttft_s": (first - arrival) / 1e9,
        "tpot_s": np.where(n >= 2, (last - first) / np.maximum(n - 1, 1), np.nan) / 1e9,
        "tpot_incl_first_s": np.where(n >= 1, (last - arrival) / np.maximum(n, 1), np.nan) / 1e9,
        "itl_max_s": itl_max / 1e9,
        "e2e_s": e2e,
        "queueing_s": (numbers(frame, "first_scheduled_ns") - arrival) / 1e9,
        "normalised_latency_s": np.where(n >= 1, e2e / np.maximum(n, 1), np.nan),
    }
    return pd.DataFrame(columns, index=frame.index)


def itl_pooled(requests: Any) -> FloatArray:
    """Every gap between two tokens of one request, in seconds `[num_gaps]`; empty where token times were not kept."""
    lists = token_lists(as_frame(requests))
    if lists is None or lists[0].size < 2:
        return np.empty(0)
    flat, offsets = lists
    inside = np.ones(flat.size - 1, dtype=bool)
    borders = offsets[1:-1]
    inside[borders[(borders > 0) & (borders < flat.size)] - 1] = False
    return np.asarray(np.diff(flat)[inside] / 1e9, dtype=np.float64)


def _last_token_ns(frame: pd.DataFrame) -> tuple[FloatArray, FloatArray]:
    """Last token's instant and the largest gap, ns, NaN for none; without token times the first follows from TPOT."""
    first, n = numbers(frame, "first_token_ns"), numbers(frame, "num_token_steps")
    missing = np.full(len(frame), np.nan)
    lists = token_lists(frame)
    if lists is None:
        tpot_ns = np.where(n >= 2, numbers(frame, "tpot_s") * 1e9, 0.0)
        return np.where(n >= 1, first + tpot_ns * (n - 1), np.nan), missing
    flat, offsets = lists
    counts = np.diff(offsets)
    has = counts > 0
    last, largest = missing.copy(), missing.copy()
    if has.any():
        last[has] = flat[offsets[1:][has] - 1]
        gaps = np.diff(flat, prepend=flat[0])
        gaps[offsets[:-1][has]] = -1.0  # a first token closes no gap
        largest[has] = np.maximum.reduceat(gaps, offsets[:-1][has])
    return last, np.where(counts >= 2, largest, np.nan)


def meets_slo(metrics: pd.DataFrame, slo: SLO) -> BoolArray:
    """Which rows of `request_metrics` keep every limit `[num_requests]`. One that is not completed keeps none.

    A limit on TPOT or ITL does not bind a request of one token, which has neither.
    """
    met = np.isin(texts(metrics, "finish_reason"), COMPLETED)
    for name, limit in asdict(slo).items():
        if limit is not None:
            value = numbers(metrics, name)
            met &= (value <= limit) | (np.isnan(value) if name in ("tpot_s", "itl_max_s") else False)
    return np.asarray(met, dtype=np.bool_)


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

    Frames are pandas or Arrow, as in `testbed.records`. `warmup_s` drops the requests that arrive in the first seconds
    after the first arrival, and starts the time base there. "checks" (`analysis.checks`) are of the whole run.
    """
    frame, step_frame = as_frame(requests), as_frame(steps)
    end_ns = run_end_ns(frame, step_frame)
    arrival = numbers(frame, "arrival_ns")
    start_ns = (float(np.nanmin(arrival)) if len(frame) else 0.0) + warmup_s * 1e9
    sent = arrival <= end_ns
    counted = sent & (arrival >= start_ns)
    kept = frame[counted]
    duration_s = max(end_ns - start_ns, 0.0) / 1e9
    metrics = request_metrics(kept)
    limits = SLO.parse(slo)
    parts = split(frame, step_frame, manifest)
    of_steps, of_each = fleet_step_metrics(parts, manifest.get("num_gpu_blocks"), start_ns, end_ns)
    result = {
        "summary_version": SUMMARY_VERSION,
        "status": manifest.get("status"),
        "backend": manifest.get("backend"),
        **_counts(metrics),
        "num_not_sent": int((~sent).sum()),
        "num_unsent": manifest.get("num_unsent"),
        "num_in_warmup": int((sent & ~counted).sum()),
        "duration_s": duration_s,
        "time_base": TIME_BASE + (f", without the first {warmup_s:g} s" if warmup_s else ""),
        **_latencies(kept, metrics, end_ns),
        "throughput": _throughput(frame, start_ns, end_ns),
        "slo": None if limits is None else _attainment(metrics, limits, duration_s),
        **_cache_and_preemptions(kept, step_frame, whole_run=not warmup_s),
        "fairness": _fairness(kept, metrics),
        **of_steps,
        "replicas": describe_replicas(split(kept, step_frame, manifest), of_each, manifest, duration_s),
        "checks": run_checks(frame, step_frame, manifest),
    }
    safe: dict[str, Any] = json_safe(result)
    return safe


def _counts(metrics: pd.DataFrame) -> dict[str, Any]:
    reasons = texts(metrics, "finish_reason")
    by_reason = {name: int((reasons == name).sum()) for name in FINISH_REASONS}
    return {
        "num_requests": len(metrics),
        "num_finished": by_reason["stop"] + by_reason["length"],
        "num_unfinished": by_reason["unfinished"],
        "finish_reasons": by_reason,
    }


def _latencies(frame: pd.DataFrame, metrics: pd.DataFrame, end_ns: float) -> dict[str, Any]:
    """Every latency's distribution; what is open at a request's abort or the run's end is censored there."""
    reason = texts(metrics, "finish_reason")
    arrival = numbers(frame, "arrival_ns")
    cut_ns = np.where(reason == "abort", numbers(frame, "finish_ns"), end_ns)
    cut = np.isin(reason, ("abort", "unfinished"))
    waited_s = (cut_ns - arrival) / 1e9
    open_gap_s = (cut_ns - _last_token_ns(frame)[0]) / 1e9
    result = {}
    for name in ("ttft_s", "e2e_s", "queueing_s"):
        value = numbers(metrics, name)
        result[name] = distribution(value, waited_s[np.isnan(value) & cut])
    for name in ("tpot_s", "tpot_incl_first_s", "normalised_latency_s"):
        value = numbers(metrics, name)
        result[name] = distribution(value) | {"num_partial": int((cut & ~np.isnan(value)).sum())}
    largest = numbers(metrics, "itl_max_s")
    result["itl_s"] = distribution(itl_pooled(frame), open_gap_s[cut])
    result["itl_max_s"] = distribution(largest[~cut], np.fmax(largest, open_gap_s)[cut])
    return result


def _throughput(frame: pd.DataFrame, start_ns: float, end_ns: float) -> dict[str, Any]:
    """Completed requests, emitted and prompt tokens per second of the time base, and the rate that was offered.

    A prompt counts when its first token is out, cached tokens included, as serving benchmarks count input tokens.
    """
    duration_s = (end_ns - start_ns) / 1e9
    if duration_s <= 0:
        names = ("requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s", "total_tokens_per_s", "offered_per_s")
        return dict.fromkeys(names)
    completed = np.isin(texts(frame, "finish_reason", "unfinished"), COMPLETED)
    requests = (completed & (numbers(frame, "finish_ns") >= start_ns)).sum()
    started = numbers(frame, "first_token_ns") >= start_ns
    prompt = numbers(frame, "num_prompt_tokens")[started].sum()
    output = numbers(frame, "num_output_tokens")[started].sum()
    lists = token_lists(frame)
    if lists is not None:
        output = (lists[0] >= start_ns).sum()
    arrival = numbers(frame, "arrival_ns")
    inside = arrival[(arrival >= start_ns) & (arrival <= end_ns)]
    window_s = (inside.max() - inside.min()) / 1e9 if inside.size > 1 else 0.0
    return {
        "requests_per_s": requests / duration_s,
        "output_tokens_per_s": output / duration_s,
        "prompt_tokens_per_s": prompt / duration_s,
        "total_tokens_per_s": (prompt + output) / duration_s,
        "offered_per_s": (inside.size - 1) / window_s if window_s > 0 else None,
    }


def _attainment(metrics: pd.DataFrame, slo: SLO, duration_s: float) -> dict[str, Any]:
    """Share of the requests sent that kept every limit, its Wilson interval, and the goodput (requests/s)."""
    met, sent = int(meets_slo(metrics, slo).sum()), len(metrics)
    low, high = wilson(met, sent) if sent else (None, None)
    return {
        "limits": {name: limit for name, limit in asdict(slo).items() if limit is not None},
        "num_met": met,
        "attainment": met / sent if sent else None,
        "attainment_ci95": [low, high],
        "goodput_per_s": met / duration_s if duration_s > 0 else None,
    }


def _cache_and_preemptions(frame: pd.DataFrame, steps: pd.DataFrame, whole_run: bool) -> dict[str, Any]:
    admitted = frame[frame["first_scheduled_ns"].notna()]
    prompt, cached = numbers(admitted, "num_prompt_tokens").sum(), numbers(admitted, "num_cached_tokens").sum()
    preempted = numbers(frame, "num_preemptions")
    recomputed = numbers(frame, "num_recomputed_tokens").sum()
    if whole_run and len(steps):
        computed = numbers(steps, "num_prefill_tokens").sum() + numbers(steps, "num_decode_tokens").sum()
    else:
        computed = prompt - cached + numbers(admitted, "num_output_tokens").sum() + recomputed
    return {
        "prefix_hit_rate": cached / prompt if prompt > 0 else None,
        "preemptions": {
            "total": int(preempted.sum()),
            "requests_share": float((preempted > 0).mean()) if len(frame) else None,
            "recomputed_tokens": int(recomputed),
            "recomputed_share": recomputed / computed if computed > 0 else None,
        },
    }


def _fairness(frame: pd.DataFrame, metrics: pd.DataFrame) -> dict[str, Any] | None:
    """Jain's index over tenants: of the service got (prompt + output tokens) and of the mean normalised latency.

    None with fewer than two tenants. Service is what each got in this run: tenants that ask for less also get less.
    """
    tenant = texts(frame, "tenant", "")
    if len(set(tenant)) < 2:
        return None
    started = frame["first_token_ns"].notna().to_numpy(dtype=bool)
    service = np.where(started, numbers(frame, "num_prompt_tokens"), 0.0) + numbers(frame, "num_output_tokens")
    per_tenant = pd.Series(service).groupby(tenant).sum()
    latency = pd.Series(numbers(metrics, "normalised_latency_s")).groupby(tenant).mean().dropna()
    tokens = np.asarray(per_tenant, dtype=np.float64)
    return {
        "num_tenants": len(per_tenant),
        "jain_service": jain_index(tokens),
        "max_min_service_gap_tokens": float(tokens.max() - tokens.min()),
        "jain_normalised_latency": jain_index(np.asarray(latency, dtype=np.float64)),
    }
