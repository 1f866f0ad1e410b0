"""A user's own metric of reports, in a file outside the package. docs/extending.md runs it; a test keeps that true."""

from __future__ import annotations

from analysis.load import Run


def ttft_per_prompt_token(run: Run, quantile: float = 0.99) -> float:
    """A quantile of TTFT over the length of the prompt, in seconds per token: who sends little should not wait long."""
    return float((run.requests.ttft_s / run.requests.num_prompt_tokens).quantile(quantile))
