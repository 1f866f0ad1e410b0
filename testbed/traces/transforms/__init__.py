"""Transformations of traces: pure functions from a trace to another, whose notes state what was changed.

A whole Trace gives a Trace. A StreamedTrace gives a StreamedTrace, whose rows are changed during iteration. `spread`,
`restart`, `jitter`, `bootstrap` and `copies` need whole traces; `merge` returns a stream. Parameters out of range raise
ConfigError. A result without requests raises TraceError (for a stream: during iteration). `pipeline` applies a list of
transformations by name.
"""

from testbed.traces.transforms.combination import merge, repeat
from testbed.traces.transforms.labels import label
from testbed.traces.transforms.pipeline import TRANSFORMS, apply_all, check_steps
from testbed.traces.transforms.resampling import bootstrap, copies, jitter
from testbed.traces.transforms.selection import keep, keep_within, limit, sample_sessions, thin, window
from testbed.traces.transforms.sizes import clip_lengths, scale_lengths
from testbed.traces.transforms.timing import restart, scale_rate, set_rate, shift, speed_up, spread

__all__ = [
    "TRANSFORMS",
    "apply_all",
    "bootstrap",
    "check_steps",
    "clip_lengths",
    "copies",
    "jitter",
    "keep",
    "keep_within",
    "label",
    "limit",
    "merge",
    "repeat",
    "restart",
    "sample_sessions",
    "scale_lengths",
    "scale_rate",
    "set_rate",
    "shift",
    "speed_up",
    "spread",
    "thin",
    "window",
]
