"""Settings that belong to no single component: the trace's source, records, SLOs, reports. One dataclass per group."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from testbed.checks import MAX_SEED, choose, require, require_type, require_whole, require_whole_or_null
from testbed.errors import ConfigError
from testbed.foreign_text import shown

FORCED = ("tokens", "lengths", "nothing")  # what a replay forces: the recorded tokens, only their number, nothing
GONE = {  # removed keys, and why they are no longer needed
    "backend.fast_forward": "is gone: every step is planned by itself, and as fast in the compiled core",
    "cost.profile": "is gone: `testbed calibrate fit <profile>.parquet --out <fit>.json` makes what cost.path takes",
    "device.attention_packs_heads": "is gone: device.mixed_attention=packed says true, unpacked false",
    "device.path": "is gone: a device of your own is my_conf/device/mine.yaml, as --config-dir=my_conf device=mine",
}

PROFILED = "PROFILED STEPS"  # begins the note that record.profile has spoilt times


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """The `trace` group: a file (or, for `synthetic`, a generator's options), and the changes made to its rows.

    Applied in this order: limit (rows read), window, rate, lengths, then `transforms` one by one.
    """

    name: str = "jsonl"
    path: str | None = None
    limit: int | None = None  # read at most this many rows
    start_s: float = 0.0  # the window's start, on the trace's clock
    end_s: float | None = None  # the window's end; null: the trace's end
    rate_scale: float = 1.0  # 2 means twice the request rate: arrival times are divided by it
    max_prompt_tokens: int | None = None  # longer prompts are cut
    max_output_tokens: int | None = None  # longer outputs are cut
    vocab_size: int | None = None  # vocabulary of synthetic tokens; null: the model's
    transforms: tuple[Any, ...] = ()  # [{name: thin, fraction: 0.5}, ...] in order; `testbed list transform` names them
    seed: int | None = None  # of everything that is drawn at random for the trace; null: the run's seed
    stream: bool | None = None  # read row by row instead of whole into memory; null: only long traces
    forced: str = "tokens"  # what a replay forces: recorded tokens, only their number (lengths), or nothing

    def __post_init__(self) -> None:
        choose("trace.forced", self.forced, FORCED)
        for name in ("limit", "max_prompt_tokens", "max_output_tokens", "vocab_size"):
            require_whole_or_null(f"trace.{name}", getattr(self, name), 1)
        require("trace.rate_scale", self.rate_scale, self.rate_scale > 0, "a finite number above 0")
        if not 0 <= self.start_s < math.inf or not (self.end_s is None or self.start_s < self.end_s < math.inf):
            raise ConfigError(
                f"trace.start_s is {self.start_s} and trace.end_s is {self.end_s}; the window must start at 0 or later "
                "and end after its start"
            )
        require_whole_or_null("trace.seed", self.seed, 0, MAX_SEED)
        if self.transforms:
            from testbed.traces.transforms import check_steps  # not at the top: most traces have none

            check_steps(self.transforms)


@dataclass(frozen=True, slots=True)
class OwnTraceConfig(TraceConfig):
    """Keys of `trace=csv`, `jsonl` and `parquet`, in addition to those of every trace file."""

    columns: Any = None  # {our field: its name in the file}, as {arrival_time: ts}; null: they have our names
    where: Any = None  # {name in the file: value or values}, as {status: 200}: other rows are left out; null: none is

    def __post_init__(self) -> None:
        TraceConfig.__post_init__(self)
        if self.columns is not None or self.where is not None:
            from testbed.traces.readers.own_log import check_columns, check_where  # not at the top: most have neither

            check_columns({} if self.columns is None else self.columns)
            check_where({} if self.where is None else self.where)


@dataclass(frozen=True, slots=True)
class MooncakeTraceConfig(TraceConfig):
    """Keys of `trace=mooncake`, in addition to those of every trace file."""

    spread_batches: bool = False  # spread arrivals evenly: the published timestamps come in batches of about 3 s


@dataclass(frozen=True, slots=True)
class ShareGPTTraceConfig(TraceConfig):
    """Keys of `trace=sharegpt`, whose texts are tokenized, in addition to those of every trace file."""

    tokenizer: str | None = None  # a local folder with a tokenizer
    max_turns: int | None = None  # of each conversation


@dataclass(frozen=True, slots=True)
class SyntheticTraceConfig(TraceConfig):
    """Keys of `trace=synthetic`, in addition to those of the generator."""

    lengths_from: str | None = None  # a trace file: prompt and output lengths of kind "empirical" are its rows' pairs
    lengths_format: str = "auto"  # of that file: any trace format; auto: one that its fields tell, else our own schema


@dataclass(frozen=True, slots=True)
class AgenticTraceConfig(TraceConfig):
    """Keys of `trace=agentic`, in addition to ArrivalConfig, which sets how sessions start. limit: sessions read."""

    rate: float = 0.1  # sessions started per second
    closed_loop: bool = True  # a request arrives after the one before has finished; false: at its recorded time


@dataclass(frozen=True, slots=True)
class RecordConfig:
    decisions: bool = False  # decisions.jsonl, one line per step
    explain: bool = False  # decisions.jsonl, with the request for which each preemption was made (docs/explain.md)
    token_times: bool = True  # the time of every token in requests.parquet
    steps: bool = True  # a row per step in steps.parquet; false: the summary has no data about steps
    operators: bool = False  # operators.json: time by operator (`testbed costs`)
    status_s: float | None = None  # interval of status lines, in seconds of the run's clock: standard error, run.log
    check: bool = False  # the scheduler's invariants after every step, not only at the end: slow (docs/extending.md)
    profile: Any = None  # first:last, steps of the real engine to trace with torch's profiler: profile.json.gz

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """The first and last step to profile; None: no steps."""
        if self.profile is None:
            return None
        found = re.fullmatch(r"(\d+):(\d+)", str(self.profile))
        if found is None or int(found[1]) > int(found[2]):
            expected = "first:last, the steps to trace, as record.profile=100:120, or null"
            raise ConfigError(f"record.profile is {self.profile!r}; it must be {expected}")
        return int(found[1]), int(found[2])

    def __post_init__(self) -> None:
        _ = self.profiled_steps  # raises an error if it is not a pair of steps
        if self.explain and not self.steps:
            raise ConfigError(
                "record.explain=true tells of steps, and record.steps is false: no wait could be told; leave one out"
            )
        every_s = self.status_s
        is_known = every_s is None or 0 < every_s <= 1e9
        require("record.status_s", every_s, is_known, "above 0 and at most 1e9, or null (no status lines)")


NO_DEADLINES = (
    "slo.lateness_s limits no request, as none has a deadline; give them some by trace.deadline_s or, for any trace, "
    "by the transformation label (docs/traces.md)"
)


@dataclass(frozen=True, slots=True)
class SloConfig:
    """The `slo` group: limits in seconds, all of which a request must keep; null: no limit. A request of a class keeps
    that class's instead (the first's, of several). They do not change a run: only the summary, reports and `testbed
    capacity` use them."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    itl_max_s: float | None = None  # the longest gap between two tokens
    lateness_s: float | None = None  # the end after the request's deadline, if it has one; 0: deadlines are met
    classes: tuple[Any, ...] = ()  # other limits of a tenant or priority: [{tenant: chat, ttft_s: 0.2}, ...]
    attainment: float = 0.99  # share of requests that must keep the limits, for `testbed capacity`

    def __post_init__(self) -> None:
        check_limits("slo", {name: getattr(self, name) for name in SLO_LIMITS})
        for position, item in enumerate(self.classes):
            _check_class(f"slo.classes[{position}]", item)
        require("slo.attainment", self.attainment, 0 < self.attainment < 1, "above 0 and below 1, as 0.99")

    @property
    def stated(self) -> dict[str, Any]:
        """What is limited, as `analysis.measures.slo.SLO.parse` takes it."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "attainment"}

    def of(self, name: str) -> list[float]:
        """The values of the limit `name`, for all requests and for classes."""
        given = [getattr(self, name), *(item.get(name) for item in self.classes)]
        return [limit for limit in given if limit is not None]


SLO_LIMITS = tuple(item.name for item in fields(SloConfig) if item.name.endswith("_s"))


def check_limits(group: str, limits: Mapping[str, Any]) -> None:
    for name, limit in limits.items():
        require_type(f"{group}.{name}", limit, float | None)
        if name == "lateness_s":
            is_known, expected = limit is None or limit >= 0, "at least 0 s (0: by the deadline), or null (no limit)"
        else:
            is_known, expected = limit is None or limit > 0, "above 0 s, or null (no limit)"
        require(f"{group}.{name}", limit, is_known, expected)


def _check_class(where: str, item: object) -> None:
    expected = "a mapping with a tenant, a priority or both, and limits, as {tenant: chat, ttft_s: 0.2}"
    if not isinstance(item, Mapping):
        raise ConfigError(f"{where} is {shown(item)}; it must be {expected}")
    given = dict(item)
    for key in given:
        choose(f"a key of {where}", key, ("tenant", "priority", *SLO_LIMITS))
    tenant, priority = given.pop("tenant", None), given.pop("priority", None)
    require(where, item, (tenant, priority) != (None, None) and len(given) > 0, expected)
    require_type(f"{where}.tenant", tenant, str | None)
    require(f"{where}.tenant", tenant, tenant is None or tenant.strip() != "", "not empty (none: requests without one)")
    require_type(f"{where}.priority", priority, int | None)
    check_limits(where, given)


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """The `report` group: the question of a study, and how `testbed report` answers it."""

    question: str = ""
    baseline: str | None = None  # the arm that the others are compared with; null: the first
    margin: float = 0.02  # relative differences below this count as equal
    replicates: tuple[str, ...] = ()  # trace keys whose values are replicates, not different loads: [trace.transforms]
    warmup_s: float = 0.0  # from the first arrival: excluded from rates, and its arrivals from latencies
    metrics: tuple[Any, ...] = ()  # compared, and told first: [queueing_s.p99, {_target_: mine.slow, better: lower}]
    plots: tuple[Any, ...] = ()  # of your own: [{_target_: mine.waiting, num_bins: 30}, ...]

    def __post_init__(self) -> None:
        require("report.warmup_s", self.warmup_s, 0 <= self.warmup_s <= 1e9, "seconds, 0 to 1e9")
        require("report.margin", self.margin, 0 < self.margin < 1, "above 0 and below 1, as 0.02 for 2 %")
        for key in self.replicates:
            if not str(key).startswith("trace."):
                raise ConfigError(
                    f"report.replicates has {key!r}; a replicate is another trace: name keys of the trace"
                )
        for plot in self.plots:
            if not isinstance(plot, dict) or not isinstance(plot.get("_target_"), str):
                raise ConfigError(f"report.plots has {shown(plot)}; name a plot as {{_target_: mine.waiting}}")
        for metric in self.metrics:
            if not isinstance(metric.get("_target_") if isinstance(metric, dict) else metric, str):
                raise ConfigError(
                    f"report.metrics has {shown(metric)}; name a key of the summary, as queueing_s.p99, or one of your "
                    "own, as {_target_: mine.share_slow}"
                )


@dataclass(frozen=True, slots=True)
class TensorParallelConfig:
    """Keys of the `device` group in addition to those of DeviceSpec."""

    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        require_whole("device.tensor_parallel_size", self.tensor_parallel_size, 1)
