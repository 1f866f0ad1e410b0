"""Judges the quality of replicates by the requests that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from analysis import format as fmt
from analysis.comparison.sharing import common_share, drawn_by, has_new_arrivals
from analysis.load import Run

_HARDLY = 0.05  # share of common requests up to which replicates are good
_MOSTLY = 0.75  # and above which they are poor

Level = Literal["good", "fair", "poor"]


def shared(runs: Sequence[Run]) -> tuple[Level, str]:
    """The best level that replicates of one load can have, given the requests that they share, and the reason."""
    share = common_share(runs)
    if share == 1:
        return "poor", " of the same requests: how the result hangs on exact arrivals, and nothing of other traces"
    if share <= _HARDLY:
        return "good", ""
    configs = [run.flat_config for run in runs]
    which, but = f"each shares {fmt.share(share)} of another's requests", ""
    if "bootstrap" in drawn_by(configs):
        which = "all are drawn from the same requests"
        but = "" if has_new_arrivals(configs) else ", but not for the arrivals, which are the same in all"
    return "poor" if share > _MOSTLY else "fair", f": {which}, and intervals are widened for that{but}"
