"""A user's own plot of reports, in a file outside the package. docs/extending.md runs it; a test keeps that true."""

from __future__ import annotations

from matplotlib import pyplot
from matplotlib.axes import Axes

from analysis.comparison.arms import named
from analysis.load import Sweep


def ttft_by_prompt(sweep: Sweep, max_tokens: int = 4000) -> Axes:
    """TTFT of each request against the length of its prompt."""
    _, axes = pyplot.subplots()
    for name, run in named(sweep).items():
        requests = run.requests[run.requests.num_prompt_tokens <= max_tokens]
        axes.plot(requests.num_prompt_tokens, requests.ttft_s, ".", label=name)
    axes.set(xlabel="prompt tokens", ylabel="TTFT, s", yscale="log")
    axes.legend()
    return axes
