"""Applies a configured list of transformations by name. Owns the names and their parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

from testbed.checks import MAX_SEED, require_type, require_whole
from testbed.errors import ConfigError, TestbedError, TraceError
from testbed.foreign_text import nearest, shown, unknown
from testbed.traces.arrivals import ArrivalConfig
from testbed.traces.schema import Span, Trace, TraceRequest, TraceSource
from testbed.traces.stream import StreamedTrace, whole
from testbed.traces.synthesis import content_key
from testbed.traces.transforms import combination, labels, resampling, selection, sizes, timing

Step = Mapping[str, Any]
OpenTrace = Callable[[str, str, int], TraceSource]  # (format, path, seed of what the format samples) -> trace


@dataclass(frozen=True, slots=True)
class Transform:
    """One entry of TRANSFORMS. apply: (trace, **parameters) -> trace; `testbed list` shows its docstring's first line.

    is_streamed: whether it takes streamed traces. draws: what the seed decides: which "units" stay (set_rate only with
    by=thin), new "starts", … ways: parameter that has no default, as the user has to choose -> its values -> what each
    keeps. settings: the class of the keys that `apply` takes as keyword arguments.
    """

    apply: Callable[..., TraceSource]
    is_streamed: bool = True
    draws: str = ""
    ways: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    settings: type | None = None

    def parameters(self) -> dict[str, Parameter]:
        """Returns the parameters that a configuration may set, by name."""
        settings = {} if self.settings is None else signature(self.settings, eval_str=True).parameters
        _, *own = signature(self.apply, eval_str=True).parameters.items()
        return {**settings, **{name: item for name, item in own if item.kind is not Parameter.VAR_KEYWORD}}


def _arrivals(trace: Trace, seed: int = 0, **settings: Any) -> Trace:
    """Gives new starts to all sessions, by `arrival`, `rate`, …; later turns move with the start."""
    try:
        return timing.restart(trace, ArrivalConfig(**settings), seed)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("trace.")) from None


def _merge(
    trace: Any, path: str, format: str = "auto", label: str | None = None, share_content: bool = False
) -> TraceSource:
    """Adds the trace at `path` (in `format`), with its ids and tenants under `label`."""
    raise AssertionError("apply_all opens the other trace")


TRANSFORMS: dict[str, Transform] = {
    "scale_rate": Transform(timing.scale_rate),
    "speed_up": Transform(timing.speed_up),
    "set_rate": Transform(timing.set_rate, draws="units", ways={"by": timing.WAYS}),
    "thin": Transform(selection.thin, draws="units"),
    "sample_sessions": Transform(selection.sample_sessions, draws="units"),
    "shift": Transform(timing.shift),
    "spread": Transform(timing.spread, is_streamed=False),
    "arrivals": Transform(_arrivals, is_streamed=False, draws="starts", settings=ArrivalConfig),
    "jitter": Transform(resampling.jitter, is_streamed=False, draws="jitter"),
    "bootstrap": Transform(resampling.bootstrap, is_streamed=False, draws="bootstrap"),
    "window": Transform(selection.window),
    "limit": Transform(selection.limit),
    "filter": Transform(selection.keep_within),
    "label": Transform(labels.label, draws="labels"),
    "scale_lengths": Transform(sizes.scale_lengths),
    "clip_lengths": Transform(sizes.clip_lengths),
    "copies": Transform(resampling.copies, is_streamed=False, draws="jitter"),
    "repeat": Transform(combination.repeat),
    "merge": Transform(_merge),
}

_IDLE_ALONE = ("window", "scale_lengths", "clip_lengths")  # without a parameter they change nothing


def apply_all(trace: TraceSource, steps: Iterable[Step], open_trace: OpenTrace, seed: int = 0) -> TraceSource:
    """Returns the trace after all `steps`, in their order. A step is {"name": one of TRANSFORMS, <parameter>: value}.

    A streamed trace stays streamed if the step allows it; otherwise it is made whole. seed: for random steps without a
    seed (0 for `label`), and for what merged formats sample, apart from all else. A step that samples the same thing
    with the same seed as an earlier step gets different random numbers; otherwise it would keep all units that the
    earlier step kept. Raises ConfigError, with the step, for an unknown name or parameter, or a value out of range.
    """
    num_drawn: Counter[tuple[str, int]] = Counter()
    for position, step in enumerate(steps):
        where = f"trace.transforms[{position}]"
        transform, values = _checked(step, where)
        told = f"{where} ({step['name']}): "
        if transform.draws and (transform.apply is not timing.set_rate or values.get("by") == "thin"):
            run_seed = 0 if transform.draws == "labels" else seed  # requests with other labels are no replicate
            drawn = (transform.draws, values.get("seed", run_seed))
            values["seed"] = content_key("again", drawn[1], num_drawn[drawn]) if num_drawn[drawn] else drawn[1]
            num_drawn[drawn] += 1
        given = trace
        try:
            if transform.apply is _merge:
                num_drawn["merged", seed] += 1
                own_seed = content_key("merged", seed, num_drawn["merged", seed]) >> 1  # as trace.seed may be
                trace = _merge_with(trace, values, open_trace, own_seed, told)
            else:
                given = trace if transform.is_streamed else whole(trace)
                trace = transform.apply(given, **values)
        except ConfigError as error:
            raise _told(error, told) from None
        except TraceError as error:  # of a whole trace: what the step made; of a stream: what its source has
            raise (_told(error, told) if isinstance(given, Trace) else error) from None
        if isinstance(trace, StreamedTrace):
            trace = _telling(trace, told)
    return trace


def _told(error: TestbedError, told: str) -> TestbedError:
    """Returns the error with the step in front, unless its message begins with a setting of the trace."""
    return error if str(error).startswith("trace.") else type(error)(f"{told}{error}")


def _telling(trace: StreamedTrace, told: str) -> StreamedTrace:
    """Returns the stream with the step named in the errors that its iteration raises."""

    def rows() -> Iterator[TraceRequest]:
        try:
            yield from trace
        except ConfigError as error:
            raise _told(error, told) from None

    return trace.derived(rows, None, trace.num_requests)


def check_steps(steps: Iterable[Step]) -> None:
    """Raises ConfigError at the first step with an unknown name or parameter, or a value that no trace allows."""
    for position, step in enumerate(steps):
        where = f"trace.transforms[{position}]"
        transform, values = _checked(step, where)
        trace = StreamedTrace("", _unread) if transform.is_streamed else _SMALLEST
        try:
            if transform.apply is not _merge:
                transform.apply(trace, **values)
        except ConfigError as error:
            raise _told(error, f"{where} ({step['name']}): ") from None
        except (_UnreadError, TraceError):
            continue  # the parameters were checked before; other faults depend on the trace itself


class _UnreadError(Exception):
    """A transformation that is only checked has begun to read rows."""


def _unread() -> Iterator[TraceRequest]:
    raise _UnreadError


_SMALLEST = Trace("", (TraceRequest("", 0, (Span(0, 0, 1),), None),))  # for transformations of whole traces


def _merge_with(trace: TraceSource, values: dict[str, Any], open_trace: OpenTrace, seed: int, told: str) -> TraceSource:
    try:
        other = open_trace(values.get("format", "auto"), values["path"], seed)
    except TraceError as error:
        raise TraceError(f"{told}{error}") from None
    label = values.get("label") or other.name
    if label == trace.name:
        raise ConfigError(f"label is {label!r}, which is the name of the first trace; set another label")
    both = {trace.name: trace, label: other}
    share = values.get("share_content", False)
    merged = combination.merge(both, share)
    return whole(merged) if isinstance(trace, Trace) else merged


def _checked(step: Step, where: str) -> tuple[Transform, dict[str, Any]]:
    names = list(TRANSFORMS)
    if not isinstance(step, Mapping) or "name" not in step:
        raise ConfigError(
            f"{where} is {shown(step)}; it must be {{name: <one of {', '.join(names)}>, <parameter>: <value>, …}}"
        )
    name = step["name"]
    if name not in TRANSFORMS:
        raise ConfigError(unknown(f"{where}.name is {name!r}", str(name), names))
    transform = TRANSFORMS[name]
    known = transform.parameters()
    values = {key: value for key, value in step.items() if key != "name"}
    for key, value in values.items():
        if key not in known:
            valid = ", ".join(known) or "none"
            raise ConfigError(f"unknown key '{where}.{key}'; {nearest(str(key), list(known))}{name} has: {valid}")
        require_type(f"{where}.{key}", value, known[key].annotation)
        if key == "seed":
            require_whole(f"{where}.seed", value, 0, MAX_SEED)
    if name in _IDLE_ALONE and all(value is None for value in values.values()):
        raise ConfigError(f"{where} ({name}) changes nothing as it is; it has: {', '.join(known)}")
    missing = [key for key, item in known.items() if item.default is Parameter.empty and key not in values]
    if missing:
        ways = transform.ways.get(missing[0], {})
        choice = " or ".join(f"{missing[0]}: {way} (keeps {kept})" for way, kept in ways.items())
        hint = f"choose {choice}" if choice else f"it has: {', '.join(known)}"
        raise ConfigError(f"{where} ({name}) lacks {missing[0]!r}; {hint}")
    return transform, values
