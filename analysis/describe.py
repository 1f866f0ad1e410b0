"""A run or a sweep in five lines: its configuration, its trace, its results, and what a reader should be warned of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from analysis import format as fmt
from analysis.measures.checks import failures
from analysis.measures.summary import summary_value
from analysis.naming import labels_of, levels_of, naming_keys


class Described(Protocol):
    """The attributes of a run that are described here."""

    @property
    def path(self) -> Path: ...
    @property
    def manifest(self) -> dict[str, Any]: ...
    @property
    def flat_config(self) -> dict[str, Any]: ...
    @property
    def fingerprint(self) -> str | None: ...
    @property
    def summary(self) -> dict[str, Any]: ...
    @property
    def is_complete(self) -> bool: ...


_SHOWN = 5  # values of a swept key that are listed
_RANGED = {"P99 TTFT": "ttft_s.p99", "P99 TPOT": "tpot_s.p99"}


def run_lines(run: Described) -> list[str]:
    manifest, summary = run.manifest, run.summary
    trace, rates, kv = manifest.get("trace") or {}, summary["throughput"], summary["kv"]
    status = "complete" if run.is_complete else "PARTIAL"
    num_replicas = manifest.get("num_replicas") or 1
    fleet = f", {num_replicas} replicas" if num_replicas > 1 else ""
    prices = f", cost={manifest.get('cost')}" if manifest.get("backend") == "sim" else ""
    latencies = [
        f"{title} mean {fmt.seconds(summary[name]['mean'])}, P99 {fmt.seconds(summary[name]['p99'])}"
        for title, name in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"))
    ]
    served = f"{summary['num_finished']:,} of {summary['num_requests']:,} finished, "
    served += f"{fmt.number(rates['requests_per_s'], 'req/s')}, {fmt.number(rates['output_tokens_per_s'], 'tok/s')}"
    if (slo := summary["slo"]) is not None:
        served += f"; SLO kept by {fmt.share(slo['attainment'])}, goodput {fmt.number(slo['goodput_per_s'], 'req/s')}"
    if (summary["steadiness"] or {}).get("is_outrun"):
        served += "; OVERLOADED: more came than was served"
    preemptions = fmt.count(summary["preemptions"]["total"], "preemption")
    failed = "".join(f"; {said}" for said in failures(summary["checks"]))
    return [
        f"run      {run.path} ({status}, {manifest.get('backend')}): {manifest.get('scheduler')}, "
        f"{manifest.get('model')} on {manifest.get('device')}{prices}{fleet}",
        f"trace    {trace.get('name')}, {fmt.count(summary['num_requests'], 'request')}, "
        f"{fmt.number(rates['offered_per_s'], 'req/s')} offered, {fmt.seconds(summary['duration_s'])} long, "
        f"seed {manifest.get('seed')}",
        f"latency  {'; '.join(latencies)}",
        f"served   {served}",
        f"engine   busy {fmt.share(summary['busy_share'])}, KV blocks in use {fmt.share(kv['utilisation_mean'])} "
        f"(at most {fmt.share(kv['utilisation_peak'])}), {preemptions}, "
        f"prefix hits {fmt.share(summary['prefix_hit_rate'])}{failed}",
    ]


def sweep_lines(
    path: Path, runs: Sequence[Described], incomplete: Sequence[tuple[Path, str]], swept: Sequence[str]
) -> list[str]:
    left_out = ""
    if incomplete:
        first, reason = incomplete[0]
        left_out = f"; {len(incomplete)} left out, the first {first}: {reason}"
    num_traces = len({run.fingerprint for run in runs})
    sizes = sorted({run.summary["num_requests"] for run in runs})
    span = f"{sizes[0]:,} to " * (len(sizes) > 1) + fmt.count(sizes[-1], "request")
    return [
        f"sweep    {path}: {fmt.count(len(runs), 'run')}{left_out}",
        f"swept    {_swept(runs, swept)}",
        f"traces   {num_traces}{' different' if num_traces > 1 else ''}, {span}",
        *(f"{title} {_range(runs, swept, number)}" for title, number in _RANGED.items()),
    ]


def _swept(runs: Sequence[Described], swept: Sequence[str]) -> str:
    said = []
    keys = naming_keys([run.flat_config for run in runs], swept)
    for key in keys:
        values = levels_of([run.flat_config.get(key) for run in runs])
        more = f", … ({len(values)})" if len(values) > _SHOWN else ""
        said.append(f"{key} {', '.join(fmt.plain(value) for value in values[:_SHOWN])}{more}")
    num_more = len(swept) - len(keys)
    if num_more:
        said.append(f"and {num_more} {'key that changes' if num_more == 1 else 'keys that change'} with these")
    return "; ".join(said) or "nothing"


def _range(runs: Sequence[Described], swept: Sequence[str], number: str) -> str:
    """The smallest and the largest value with their runs; a run that did not reach the number counts as largest."""
    labels = labels_of([(run.flat_config, run.path) for run in runs], swept)
    values = {label: summary_value(run.summary, number) for label, run in zip(labels, runs, strict=True)}
    ordered = sorted(values, key=lambda label: math.inf if values[label] is None else values[label] or 0.0)
    low, high = (f"{fmt.seconds(values[label])} ({label})" for label in (ordered[0], ordered[-1]))
    return f"from {low} to {high}" if len(ordered) > 1 else low
