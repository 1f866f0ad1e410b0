"""The metrics, with the field's exact definitions, from request and step records.

Definitions (arrival is the *intended* arrival, so queueing is always included; if a simulated API server takes time to
send tokens, token times are those at the client, except for ITL, which is measured in the engine):
    TTFT                first token - arrival
    TPOT                (last token - first token) / (n - 1), n >= 2: without the first token, as in vLLM's and MLPerf's
                        benchmarks; `tpot_incl_first_s` is (last token - arrival) / n, as in LLMPerf's
    ITL                 each gap between two tokens of a request: pooled over requests (`itl_s`), or the largest of each
                        request (`itl_max_s`)
    E2E                 finish, or the last token if that comes later, - arrival
    lateness            the same end - the request's deadline; negative before it
    queueing            first scheduled - arrival
    normalised latency  E2E / n, n the steps that emitted tokens for the request (Orca and vLLM: E2E / output tokens)
A request that was aborted, or unfinished at the end of the run, is censored at that instant and never dropped silently
(see `survival`). An ignored request (it can never fit) has no latency, but is counted. TPOT of an unfinished request is
that of its tokens so far (`num_partial` is the number of such requests). Attainment is over the requests *sent*, and
the share of deadlines met over those of them that have a deadline. Rates are per second of the time in
which requests come (`rates`): throughput counts completed requests, and goodput those of them that keep the SLO.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.reading.frames import as_frame
from analysis.reading.request_columns import RequestColumns
from analysis.reading.rows import FloatArray

if TYPE_CHECKING:
    import pandas as pd


LATENCIES = (
    "ttft_s", "tpot_s", "tpot_incl_first_s", "itl_max_s", "e2e_s", "lateness_s", "queueing_s", "normalised_latency_s"
)  # fmt: skip


def request_metrics(requests: Any) -> pd.DataFrame:
    """One row for each request, with every latency of this module's definitions in seconds; NaN if it has none.

    Columns: request_id, finish_reason ("unfinished" for null), ttft_s, tpot_s, tpot_incl_first_s, itl_max_s, e2e_s,
    lateness_s, queueing_s, normalised_latency_s (s per emitting step). Tokens that a group emits in one step count as
    one. Only completed requests (stop, length) have an E2E or a lateness.
    """
    import pandas as pd

    frame = as_frame(requests)
    columns = RequestColumns.of(frame)
    texts = {"request_id": columns.codes("request_id").texts(), "finish_reason": columns.reasons.texts()}
    return pd.DataFrame(texts | {name: latency(columns, name) for name in LATENCIES}, index=frame.index)


def latency(requests: RequestColumns, name: str) -> FloatArray:
    """The latency `name` (one of LATENCIES) of each request, seconds `[num_requests]`; NaN if it has none."""
    arrival = requests.numbers("arrival_ns")
    if name == "ttft_s":
        first = _first_at_client_ns(requests)
        had_gone = requests.reasons.among(("abort",)) & (first > requests.numbers("finish_ns"))
        return np.where(had_gone, np.nan, first - arrival) / 1e9
    if name == "queueing_s":
        return (requests.numbers("first_scheduled_ns") - arrival) / 1e9
    if name == "itl_max_s":
        tokens = requests.tokens
        return np.full(len(requests), np.nan) if tokens is None else tokens.largest_gap_ns / 1e9
    finish = requests.numbers("finish_ns")
    end = np.fmax(finish, _at_client_ns(requests, "last_sent_ns", finish))
    completed = np.where(requests.is_completed, end, np.nan)
    if name == "lateness_s":
        return (completed - requests.numbers("deadline_ns")) / 1e9
    n = requests.numbers("num_token_steps")  # not tokens: sequences of a group may emit in one step
    if name in ("e2e_s", "normalised_latency_s"):
        e2e = (completed - arrival) / 1e9
        return e2e if name == "e2e_s" else np.where(n >= 1, e2e / np.maximum(n, 1), np.nan)
    last = _at_client_ns(requests, "last_sent_ns", last_token_ns(requests))
    if name == "tpot_incl_first_s":
        return np.where(n >= 1, (last - arrival) / np.maximum(n, 1), np.nan) / 1e9
    assert name == "tpot_s", name
    return np.where(n >= 2, (last - _first_at_client_ns(requests)) / np.maximum(n - 1, 1), np.nan) / 1e9


def itl_pooled(requests: Any) -> FloatArray:
    """Every gap between two tokens of a request, in seconds `[num_gaps]`; empty if token times were not recorded."""
    gaps = list(RequestColumns.of(requests).gaps_ns())
    return np.concatenate(gaps) / 1e9 if gaps else np.empty(0)


def _at_client_ns(requests: RequestColumns, sent: str, emitted: FloatArray) -> FloatArray:
    """When the token was at the client: as recorded in column `sent`, else when emitted."""
    found = requests.numbers(sent)
    return np.where(np.isnan(found), emitted, found)


def _first_at_client_ns(requests: RequestColumns) -> FloatArray:
    return _at_client_ns(requests, "first_sent_ns", requests.numbers("first_token_ns"))


def last_token_ns(requests: RequestColumns) -> FloatArray:
    """When the engine emitted the last token, ns; NaN for none. Without token times it is computed from TPOT."""
    if requests.tokens is not None:
        return requests.tokens.last_ns
    n, first = requests.numbers("num_token_steps"), requests.numbers("first_token_ns")
    tpot_ns = np.where(n >= 2, requests.numbers("tpot_s") * 1e9, 0.0)
    last = np.where(n >= 1, first + tpot_ns * (n - 1), np.nan)
    return np.where(np.isnan(last), np.nan, np.fmin(last, requests.numbers("finish_ns")))  # TPOT is at the client


def jain_index(values: FloatArray) -> float | None:
    """Jain's index (Jain, Chiu and Hawe, 1984): (sum x)^2 / (n sum x^2), in [1/n, 1]; None if no value is above 0."""
    values = np.asarray(values, dtype=np.float64)
    largest = float(values.max(initial=0.0))
    if largest <= 0.0:
        return None
    scaled = values / largest
    return float(min(1.0, scaled.sum() ** 2 / (scaled.size * (scaled**2).sum())))
