"""The latencies of a request in requests.parquet: from instants in integer ns to seconds.

Instants of tokens are those at the client, if the run has a simulated API server. `analysis.measures.metrics` applies
the same definitions to whole columns.
"""

from __future__ import annotations


def ttft_s(arrival_ns: int, first_ns: int) -> float:
    """Returns the time to the first token, from the intended arrival, in seconds."""
    return (first_ns - arrival_ns) / 1e9


def tpot_s(first_ns: int, last_ns: int, num_token_steps: int) -> float | None:
    """Returns the mean time per output token after the first one, in seconds. Tokens that a group emits in one step
    count as one; None for fewer than two."""
    return (last_ns - first_ns) / (num_token_steps - 1) / 1e9 if num_token_steps > 1 else None


def e2e_s(arrival_ns: int, end_ns: int) -> float:
    """Returns the time from the intended arrival to the end, in seconds. end_ns: the finish, or the last token if that
    comes later. Only a completed request has one (schema.COMPLETED)."""
    return (end_ns - arrival_ns) / 1e9
