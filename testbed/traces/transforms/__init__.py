"""Transformations of traces: pure functions from a trace to another, each of which says in the notes what it did.

They take a whole Trace, which gives a Trace, or a StreamedTrace, which gives one: rows are then changed as they are
asked for. `spread`, `with_arrivals`, `restart`, `jitter`, `bootstrap` and `merge` need the whole. Parameters out of
range raise ConfigError; a result without requests raises TraceError (of a stream: when its rows are asked for).
`pipeline` applies a list of them by name.
"""

from testbed.traces.transforms.combination import merge, merge_streams, repeat
from testbed.traces.transforms.pipeline import TRANSFORMS, apply_all, check_steps
from testbed.traces.transforms.resampling import bootstrap, jitter
from testbed.traces.transforms.selection import keep, keep_within, limit, sample_sessions, thin, window
from testbed.traces.transforms.sizes import clip_lengths, scale_lengths
from testbed.traces.transforms.timing import (
    restart,
    scale_rate,
    set_rate,
    shift,
    speed_up,
    spread,
    stretch_to,
    time_warp,
    with_arrivals,
)

__all__ = [
    "TRANSFORMS",
    "apply_all",
    "bootstrap",
    "check_steps",
    "clip_lengths",
    "jitter",
    "keep",
    "keep_within",
    "limit",
    "merge",
    "merge_streams",
    "repeat",
    "restart",
    "sample_sessions",
    "scale_lengths",
    "scale_rate",
    "set_rate",
    "shift",
    "speed_up",
    "spread",
    "stretch_to",
    "thin",
    "time_warp",
    "window",
    "with_arrivals",
]
