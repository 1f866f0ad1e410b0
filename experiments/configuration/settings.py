"""Settings that belong to no single component: where a trace comes from, what is recorded. One dataclass a group."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from sim.backend import SchedulerTime
from testbed.checks import choose, require, require_whole, require_whole_or_null
from testbed.errors import ConfigError

FORCED = ("tokens", "lengths", "nothing")  # what a replay forces of recorded outputs
MAX_SEED = 2**63 - 1  # as tables hold it
GONE = {  # keys that there were, and why they are not needed any more; in older folders they are passed over
    "backend.fast_forward": "is gone: every step is planned by itself, and as fast in the compiled core",
}


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """The `trace` group: a file (or, for `synthetic`, a generator's options), and what is done to its rows.

    Applied in this order: limit (rows read), window, rate, lengths, then `transforms` one by one.
    """

    name: str = "jsonl"
    path: str | None = None
    limit: int | None = None  # read at most this many rows
    start_s: float = 0.0  # the window's start, on the trace's clock
    end_s: float | None = None  # the window's end; null: the trace's
    rate_scale: float = 1.0  # 2 means twice the request rate: arrivals are divided by it
    max_prompt_tokens: int | None = None  # longer prompts are cut
    max_output_tokens: int | None = None  # longer outputs are cut
    vocab_size: int | None = None  # of synthetic tokens; null: the model's
    transforms: tuple[Any, ...] = ()  # [{name: thin, fraction: 0.5}, ...] in order; `testbed list transform` names them
    seed: int | None = None  # of all that is drawn for the trace; null: the run's
    stream: bool | None = None  # row by row instead of whole in memory; null: where the trace is long
    forced: str = "tokens"  # what a replay forces of recorded outputs: tokens, lengths, nothing

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
class MooncakeTraceConfig(TraceConfig):
    """Beside what every file has."""

    spread_batches: bool = False  # the published timestamps come in batches of about 3 s: spread each evenly


@dataclass(frozen=True, slots=True)
class ShareGPTTraceConfig(TraceConfig):
    """Its texts become tokens."""

    tokenizer: str | None = None  # a local folder with a tokenizer
    max_turns: int | None = None  # of each conversation


@dataclass(frozen=True, slots=True)
class SyntheticTraceConfig(TraceConfig):
    """Beside the generator's own keys."""

    lengths_from: str | None = None  # a trace file: lengths of kind "empirical" are drawn from its rows, as pairs
    lengths_format: str = "auto"  # of that file: any trace format; auto: our own schema, by extension


@dataclass(frozen=True, slots=True)
class AgenticTraceConfig(TraceConfig):
    """Beside `arrival` and what else says how sessions start. limit: sessions read."""

    rate: float = 0.1  # sessions started per second
    closed_loop: bool = True  # a request comes after the one before finished; false: when it was recorded


@dataclass(frozen=True, slots=True)
class RecordConfig:
    decisions: bool = False  # decisions.jsonl, one line a step
    explain: bool = False  # decisions.jsonl, and in it for whom each preemption was (docs/explain.md)
    token_times: bool = True  # every token's instant in requests.parquet
    steps: bool = True  # a row for each step in steps.parquet; without, the summary has nothing of steps
    operators: bool = False  # operators.json: where the time went, by operator (`testbed costs`)
    status_s: float | None = None  # a status line every so many seconds of the run's clock: standard error, run.log
    profile: str | None = None  # first:last, steps of the real engine in torch's profiler: profile.json.gz

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """First and last; None: none."""
        if self.profile is None:
            return None
        found = re.fullmatch(r"(\d+):(\d+)", self.profile)
        if found is None or int(found[1]) > int(found[2]):
            raise ConfigError(
                f"record.profile is {self.profile!r}; it must be first:last, the steps to trace, as 100:120, or null"
            )
        return int(found[1]), int(found[2])

    def __post_init__(self) -> None:
        _ = self.profiled_steps  # raises for what is no pair of steps
        if self.explain and not self.steps:
            raise ConfigError(
                "record.explain=true tells of steps, and record.steps is false: no wait could be told; leave one out"
            )
        every_s = self.status_s
        is_known = every_s is None or 0 < every_s <= 1e9
        require("record.status_s", every_s, is_known, "above 0 and at most 1e9, or null (no status lines)")


@dataclass(frozen=True, slots=True)
class SloConfig:
    """The `slo` group: limits that a request must keep, all at once, in seconds; null: none. They decide nothing: the
    summary, reports and `testbed capacity` judge by them."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    itl_max_s: float | None = None  # the longest gap between two tokens
    attainment: float = 0.99  # share of requests that must keep them: `testbed capacity`

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "e2e_s", "itl_max_s"):
            limit = getattr(self, name)
            require(f"slo.{name}", limit, limit is None or limit > 0, "above 0 s, or null (no limit)")
        require("slo.attainment", self.attainment, 0 < self.attainment < 1, "above 0 and below 1, as 0.99")

    @property
    def limits(self) -> dict[str, float]:
        """Those that are set."""
        named = {name: getattr(self, name) for name in ("ttft_s", "tpot_s", "e2e_s", "itl_max_s")}
        return {name: limit for name, limit in named.items() if limit is not None}


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """The `report` group: what a study asks, and how `testbed report` answers."""

    question: str = ""
    baseline: str | None = None  # the arm that the others are compared with; null: the first
    margin: float = 0.02  # relative change that counts as none
    replicates: tuple[str, ...] = ()  # keys of the trace whose values are replicates and no loads: [trace.transforms]
    warmup_s: float = 0.0  # from the first arrival: requests that come in it count in no latency, and it in no rate

    def __post_init__(self) -> None:
        require("report.warmup_s", self.warmup_s, 0 <= self.warmup_s <= 1e9, "seconds, 0 to 1e9")
        require("report.margin", self.margin, 0 < self.margin < 1, "above 0 and below 1, as 0.02 for 2 %")
        for key in self.replicates:
            if not key.startswith("trace."):
                raise ConfigError(
                    f"report.replicates has {key!r}; a replicate is another trace: name keys of the trace"
                )


@dataclass(frozen=True, slots=True)
class SimConfig:
    """The `backend=sim` group. The simulator's prices are the `cost` group's."""

    name: str = "sim"
    num_replicas: int = 1  # engines, each with a scheduler and blocks of its own
    router: Any = "round_robin"  # which replica serves a request: a name, or {_target_: a class of yours}
    swap_overlap: bool = False  # swaps run on the PCIe link beside the computation; else they are a part of the step
    replicas_per_link: int = 1  # replicas that share one PCIe link, with swap_overlap
    schedule_ns: int = 0  # the scheduler's own time on the CPU, in each step before the device starts
    schedule_ns_per_seq: int = 0  # the same, for each sequence in the step
    schedule_ns_per_1k_tokens: int = 0  # the same, for each 1,024 tokens of their contexts
    frontend_ns: int = 0  # from a request's arrival until the engine has it: HTTP, tokenising
    frontend_ns_per_token: int = 0  # to send a token to its client, one after the other: detokenising, HTTP

    def __post_init__(self) -> None:
        for name, least, most in (
            ("num_replicas", 1, 10_000),
            ("replicas_per_link", 1, 10_000),
            ("schedule_ns", 0, 10**15),
            ("schedule_ns_per_seq", 0, 10**12),
            ("schedule_ns_per_1k_tokens", 0, 10**12),
            ("frontend_ns", 0, 10**15),
            ("frontend_ns_per_token", 0, 10**9),
        ):
            require_whole(f"backend.{name}", getattr(self, name), least, most)
        if self.replicas_per_link > self.num_replicas:
            raise ConfigError(
                f"backend.replicas_per_link is {self.replicas_per_link}, and there are {self.num_replicas} replicas; "
                "raise backend.num_replicas, or lower it"
            )

    @property
    def scheduler_time(self) -> SchedulerTime:
        return SchedulerTime(self.schedule_ns, self.schedule_ns_per_seq, self.schedule_ns_per_1k_tokens)


@dataclass(frozen=True, slots=True)
class RecordedConfig:
    """`cost=recorded`: durations and outcomes of a real run's tape."""

    run: str | None = None  # the real run's folder

    def __post_init__(self) -> None:
        if self.run is None:
            raise ConfigError("cost=recorded needs cost.run=<folder of a real run>")


@dataclass(frozen=True, slots=True)
class TensorParallelConfig:
    """The `device` group, beside the device's own data."""

    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        require_whole("device.tensor_parallel_size", self.tensor_parallel_size, 1)
