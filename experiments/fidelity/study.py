"""A study of which only aggregates are public: its runs, their workloads as traces, measured and predicted values.

The file is a JSON list of runs (docs/fidelity.md has the fields). Each stage of a run sends `duration x rate` requests,
at random instants or evenly. A prompt is a system prompt and a question, either unique or one of a given number. Every
output has output_len tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from analysis.load import Run
from analysis.reading.frames import numbers
from experiments.configuration.names import choice
from experiments.fidelity.fields import Fields, real
from testbed.errors import TraceError
from testbed.foreign_text import nearest
from testbed.traces.arrange import arrange
from testbed.traces.draws import stream
from testbed.traces.readers.fields import refuse
from testbed.traces.schema import Span, Trace, TraceRequest
from testbed.traces.synthesis import content_key

METRICS = {
    "e2e_mean": "E2E mean", "ttft_mean": "TTFT mean", "itl_mean": "ITL mean", "tpot_mean": "TPOT mean",
    "e2e_p90": "E2E P90", "e2e_p99": "E2E P99", "ttft_p90": "TTFT P90", "ttft_p99": "TTFT P99",
}  # fmt: skip
OURS = "this simulator"  # its name among the predictors; rows of --beside add a comma and their overrides
MAX_REQUESTS = 2_000_000  # of a run, as a simulation keeps all of them in memory
ARRIVALS = ("exponential", "even")  # gaps within a stage: random and scaled to fill it, or all equal
WHOLE = "all"  # the part of the whole run, next to its stages
_RECOMMENDED_SINCE = (0, 8)  # vLLM uses the checkpoint's sampling parameters that a request does not set
_ASYNC_SINCE = (0, 14)  # vLLM plans ahead by default
_SORTS_UNTIL = (0, 20)  # top_k and top_p use a sort, or kernels that take as long
_MAX_CAPTURED = 512  # tokens of a step that vLLM captures by default, unless 2 x max_num_seqs is smaller
_COUNTS = (  # settings whose fields have the names of the keys
    "device.tensor_parallel_size", "scheduler.max_num_seqs", "scheduler.max_num_batched_tokens", "cache.block_size",
    "cache.num_gpu_blocks",
)  # fmt: skip
_SHARED = ("num_unique_system_prompts", "num_users_per_system_prompt")  # without them all prompts are unique
_READ = {  # the fields of a run, of its workload and of a stage
    "": {"name", "model", "device", "engine", "dtype", "workload", "measured_ms", "predicted_ms",
         *(key.partition(".")[2] for key in _COUNTS)},
    "workload.": {"system_prompt_len", "question_len", "output_len", "stages", "arrivals", *_SHARED},
    "workload.stages.": {"duration", "rate"},
}  # fmt: skip
_SAID = {*METRICS} - {"tpot_mean"}  # what a part's measured values may be; TPOT is computed from others
_OTHER_METRIC = re.compile(r"(e2e|ttft|itl|tpot)_(mean|median|std|min|max|p\d+)")  # known elsewhere, and not misspelt
_MISSPELT = 0.85  # similarity (difflib) from which an unknown field is taken for a misspelt one
RECORDED = ["record.steps=false", "record.token_times=false"]  # the means need neither
Parts = dict[str, dict[str, float]]  # "all", "stage0", ... -> metric -> ms


class Stage(NamedTuple):
    start_s: float
    duration_s: float
    rate: float  # requests per second

    @property
    def num_requests(self) -> int:
        return round(self.duration_s * self.rate)

    def instants_s(self, arrivals: str, seed: int, name: str) -> list[float]:
        """The instants at which its requests are sent, all within the stage. name: of the stream of random numbers."""
        if arrivals == "even":
            shares = np.arange(self.num_requests) / self.num_requests
        else:
            sums = np.cumsum(stream(seed, name).standard_exponential(self.num_requests))
            shares = sums / sums[-1]  # the last request ends the stage
        return [self.start_s + self.duration_s * share for share in shares.tolist()]


class Prompts(NamedTuple):
    """The prompts of a run: `num_prompts` different ones in turn, each with the next of the system prompts."""

    num_system_tokens: int
    num_question_tokens: int
    num_systems: int
    num_prompts: int

    def of(self, run: str, request: int) -> tuple[Span, Span]:
        """The prompt of the run's request with this index."""
        return (
            Span(content_key(run, "system", request % self.num_systems), 0, self.num_system_tokens),
            Span(content_key(run, "question", request % self.num_prompts), 0, self.num_question_tokens),
        )


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One run of a study. settings: the engine's settings in the file, as overrides."""

    name: str
    place: str
    settings: tuple[str, ...]
    engine: str
    stages: tuple[Stage, ...]
    arrivals: str
    prompts: Prompts
    num_output_tokens: int
    measured_ms: Parts
    predicted_ms: dict[str, Parts]
    unread: tuple[str, ...]  # fields that are not read

    @property
    def parts(self) -> tuple[str, ...]:
        return (WHOLE, *(f"stage{number}" for number in range(len(self.stages))))

    @property
    def num_gaps(self) -> float | None:
        """The number of gaps in the client's stream, by the measured means: fewer than tokens - 1 if chunks had several
        tokens. None if there are no gaps, or ITL is unknown."""
        known = self.measured_ms[WHOLE]
        if self.num_output_tokens < 2 or not known.get("itl_mean"):
            return None
        return (known["e2e_mean"] - known["ttft_mean"]) / known["itl_mean"]


def read_study(values: list[Any], file: Path, given: list[str]) -> list[StudyRun]:
    """The runs of a study. given: the user's overrides. Raises TestbedError with a message of one line."""
    if not values:
        raise TraceError(f"{file}: an empty list; expected at least one run")
    return [_run(value, f"{file}: run {number + 1}", given) for number, value in enumerate(values)]


def check_names(runs: Iterable[StudyRun]) -> None:
    places: dict[str, str] = {}
    for run in runs:
        if run.name in places:
            raise refuse(run.place, "name", run.name, f"a name not used before (first at {places[run.name]})")
        places[run.name] = run.place


def trace_of(run: StudyRun, seed: int) -> Trace:
    """The workload as a trace; request ids are `stage<n>-<i>`. seed: of the arrival instants."""
    rows: list[TraceRequest] = []
    for number, stage in enumerate(run.stages):
        for i, instant_s in enumerate(stage.instants_s(run.arrivals, seed, f"{run.name} {number}")):
            prompt = run.prompts.of(run.name, len(rows))
            output = Span(content_key(run.name, number, i, "output"), 0, run.num_output_tokens)
            rows.append(TraceRequest(f"stage{number}-{i}", round(instant_s * 1e9), prompt, output))
    return arrange(run.name, rows)


def means(simulated: Run, run: StudyRun) -> Parts:
    """The study's metrics of a simulated run, ms, by stage of arrival. Mean ITL over all gaps equals mean TPOT, as all
    outputs have the same length; outputs of one token have neither."""
    frame = simulated.requests
    stage = frame["request_id"].str.partition("-")[0].to_numpy()
    ttft, tpot, e2e = (numbers(frame, f"{name}_s") for name in ("ttft", "tpot", "e2e"))
    found: Parts = {}
    for part in run.parts:
        mine = np.ones(len(frame), dtype=bool) if part == WHOLE else stage == part
        found[part] = {}
        if run.num_output_tokens > 1:
            found[part] = dict.fromkeys(("tpot_mean", "itl_mean"), 1e3 * float(tpot[mine].mean()))
        for name, values in (("ttft", ttft[mine]), ("e2e", e2e[mine])):
            found[part][f"{name}_mean"] = 1e3 * float(values.mean())
            for level in (90, 99):
                found[part][f"{name}_p{level}"] = 1e3 * float(np.quantile(values, level / 100))
    return found


def _run(value: Any, place: str, given: list[str]) -> StudyRun:
    run = Fields.of(value, place, "run")
    name = run.name("name")
    place = f"{place} ({name})"
    run = replace(run, place=place)
    work = run.within("workload")
    num_systems, num_users = (MAX_REQUESTS if work.get(name) is None else work.whole(name) for name in _SHARED)
    tokens = work.count("system_prompt_len"), work.count("question_len")
    prompts = Prompts(*tokens, num_systems, num_systems * num_users)
    num_output = work.count("output_len")
    stages = _stages(work)
    arrivals = "exponential" if work.get("arrivals") is None else str(work.values["arrivals"])
    if arrivals not in ARRIVALS:
        raise refuse(place, "workload.arrivals", arrivals, f"one of {', '.join(ARRIVALS)}")
    measured = _parts(run.within("measured_ms"), num_output)
    for part in (WHOLE, *(f"stage{number}" for number in range(len(stages)))):
        if part not in measured:
            raise TraceError(f"{place}: field 'measured_ms' has no {part!r}; expected 'all' and each stage")
    for part, known in measured.items():
        if known["e2e_mean"] < known["ttft_mean"]:
            raise refuse(
                place, f"measured_ms.{part}.e2e_mean", known["e2e_mean"],
                f"at least ttft_mean, {known['ttft_mean']:g}: a request ends after its first token",
            )  # fmt: skip
        if num_output > 1 and known.get("itl_mean") == 0:
            raise TraceError(
                f"{place}: field 'measured_ms.{part}.itl_mean' is 0, between {num_output} tokens; expected a mean "
                "above 0, or leave it out"
            )
    predicted: dict[str, Parts] = {}
    if run.get("predicted_ms"):
        others = run.within("predicted_ms")
        for who in others.values:
            if who.startswith(OURS):
                raise refuse(place, "predicted_ms", who, f"another name: rows of {OURS!r} are simulated here")
            predicted[who] = _parts(others.within(who), num_output)
    engine = str(run.get("engine") or "an unnamed engine")
    settings = tuple(_settings(run, engine, given))
    return StudyRun(
        name, place, settings, engine, stages, arrivals, prompts, num_output, measured, predicted, _unread(run)
    )


def _unread(run: Fields) -> tuple[str, ...]:
    """The fields that are not read. Raises TraceError if one looks like a misspelt one that is."""
    work, measured = run.within("workload"), run.within("measured_ms").values
    parts = {WHOLE, *(f"stage{number}" for number in range(len(work.values["stages"])))}
    objects = [("", run.values), ("workload.", work.values)]
    objects += [("workload.stages.", stage) for stage in work.listed("stages")]
    objects += [(f"measured_ms.{part}.", metrics) for part, metrics in measured.items() if part in parts]
    found = []
    for at, values in objects:
        known = _READ.get(at, _SAID)
        for name in (name for name in values if name not in known):
            meant = "" if _OTHER_METRIC.fullmatch(name) else nearest(name, sorted(known), _MISSPELT)
            if meant:
                raise TraceError(f"{run.place}: unknown field {at + name!r}; {meant}Correct it, or leave it out")
            found.append(f"{at}{name}")
    found += [f"measured_ms.{part}" for part in measured if part not in parts]
    return tuple(dict.fromkeys(found))


def _settings(run: Fields, engine: str, given: list[str]) -> list[str]:
    model = str(run.required("model", "a Hugging Face name"))
    device = str(run.required("device", "the device's name"))
    settings = choice("model", model, run.place, given) + choice("device", device, run.place, given)
    named = re.match(r"\s*vllm.*?(\d+)\.(\d+)", engine, re.IGNORECASE)
    version = (0, 0) if named is None else (int(named[1]), int(named[2]))
    settings.append(f"scheduler={'vllm_v1_async' if version >= _ASYNC_SINCE else 'vllm_v1'}")
    if version >= _RECOMMENDED_SINCE:
        settings += ["sampling=recommended", f"cost.filtering={'sort' if version <= _SORTS_UNTIL else 'select'}"]
    if run.get("dtype") is not None:
        settings.append(f"model.dtype={run.values['dtype']}")
    given_counts = {key: key.partition(".")[2] for key in _COUNTS}
    counts = {key: run.whole(field) for key, field in given_counts.items() if run.get(field) is not None}
    settings += [f"{key}={num}" for key, num in counts.items()]
    captured = min(_MAX_CAPTURED, 2 * counts.get("scheduler.max_num_seqs", _MAX_CAPTURED))
    return [*settings, f"cost.max_captured_tokens={captured}"]


def _stages(work: Fields) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    place, start_s, num_requests = work.place, 0.0, 0.0
    for number, item in enumerate(work.listed("stages")):
        field = f"workload.stages[{number}]"
        stage = Fields.of(item, place, field, f"{field}.")
        length = stage.duration_s("duration")
        stages.append(Stage(start_s, length, real(stage.get("rate"), place, f"{field}.rate", 1e-6, "a rate above 0")))
        num = length * stages[-1].rate  # not rounded yet, as the rate may be absurdly large
        if round(num) < 1:
            raise TraceError(
                f"{place}: field '{field}' sends no request ({length:g} s at {stages[-1].rate:g} a second); expected "
                "one or more, or leave the stage out"
            )
        num_requests += num
        if num_requests > MAX_REQUESTS:
            raise TraceError(
                f"{place}: field 'workload.stages' sends {num_requests:,.0f} requests; expected at most "
                f"{MAX_REQUESTS:,} a run"
            )
        start_s += length
    if not stages:
        raise TraceError(f"{place}: field 'workload.stages' is empty; expected at least one stage")
    return tuple(stages)


def _parts(parts: Fields, num_output: int) -> Parts:
    """The metrics of each part, ms. TPOT is computed from mean E2E and TTFT, as all outputs have the same length."""
    found: Parts = {}
    for part in parts.values:
        known = parts.within(part)
        metrics = {name: 1e3 * known.duration_s(name, 1e-3) for name in METRICS if known.get(name) is not None}
        if num_output > 1 and {"e2e_mean", "ttft_mean"} <= metrics.keys():
            metrics["tpot_mean"] = (metrics["e2e_mean"] - metrics["ttft_mean"]) / (num_output - 1)
        missing = [name for name in ("e2e_mean", "ttft_mean") if name not in metrics]
        if missing:
            name = f"{parts.prefix}{part}"
            raise TraceError(f"{parts.place}: field {name!r} lacks {missing[0]!r}; expected its mean in ms")
        found[str(part)] = metrics
    return found
