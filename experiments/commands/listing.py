"""Prints the options of `testbed list` and the summary of a run: plain text, one line per item."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from experiments.configuration.saved import read_manifest
from experiments.console import from_here
from experiments.runs.run import RunResult
from testbed.errors import ConfigError
from testbed.foreign_text import unknown
from testbed.traces.transforms import TRANSFORMS
from testbed.wording import count

DESCRIPTIONS = {
    "backend": {
        "sim": "a SimPy model prices each step",
        "real": "the engine runs a model on CUDA or the CPU",
        "vllm": "vLLM runs it, with the scheduler that is chosen (docs/vllm.md)",
    },
    "trace": {
        "synthetic": "generated: arrivals, lengths, sessions, users, shared prompts, RAG, agents, tenants",
        "azure": "Azure LLM inference trace, 2023 or 2024 CSV (trace.path)",
        "burstgpt": "BurstGPT CSV (trace.path)",
        "mooncake": "Mooncake JSONL with hash_ids (trace.path)",
        "bailian": "Qwen/Bailian JSONL with hash_ids (trace.path)",
        "sharegpt": "ShareGPT JSON (trace.path, trace.tokenizer)",
        "servegen": "ServeGen clients, requests drawn by trace.seed (trace.path: archive or folder)",
        "lengths": "CSV of prompt and output lengths; arrivals by trace.arrival, trace.rate, ... (trace.path)",
        "agentic": "agentic coding sessions as JSON, with sub-agents (trace.path: archive or folder)",
        "jsonl": "our own schema as JSON lines (trace.path)",
        "csv": "our own schema as CSV (trace.path)",
        "parquet": "our own schema as Parquet, or a frozen trace (trace.path)",
    },
    "sampling": {
        "default": "greedy; sampling.temperature, top_p and others change it (docs/sampling.md)",
        "recommended": "by the model's generation_config.json, as vLLM does for requests that do not say",
    },
    "cost": {
        "roofline": "from the model's shape and the device's data sheet",
        "tables": "operators looked up in measured tables of the device, else the roofline (cost.path; docs/tables.md)",
        "calibrated": "a fit to measured steps (cost.path; Qwen3 0.6B, 8B on H100, H200 and 30B-A3B on H200 have one)",
        "linear": "coefficients in seconds, given",
        "constant": "every step takes cost.step_s seconds",
        "recorded": "the tape of a real run (cost.run)",
    },
}


def print_listing(only: str | None, own: str | None = None) -> None:
    """Prints the options of a group, or of all. own: a folder of the user's own options."""
    from experiments.configuration import policies
    from experiments.configuration.config import register
    from experiments.configuration.options import options
    from experiments.configuration.overrides import library_of, with_searched

    register()
    folders = library_of(with_searched([] if own is None else [f"--config-dir={own}"])).folders
    groups: dict[str, Iterable[tuple[str, str]]] = {
        "backend": DESCRIPTIONS["backend"].items(),
        "scheduler": _described("scheduler", options("scheduler")),
        **{
            group: [(name, _first_line(maker)) for name, maker in named.items()]
            for group, named in policies.POLICIES.items()
        },
        "trace": DESCRIPTIONS["trace"].items(),
        "transform": [(name, _first_line(transform.apply)) for name, transform in TRANSFORMS.items()],
        "model": _described("model", options("model")),
        "device": _described("device", options("device")),
        "sampling": DESCRIPTIONS["sampling"].items(),
        "cost": DESCRIPTIONS["cost"].items(),
        "experiment": _described("experiment", options("experiment")),
    }
    if only is not None and only not in groups:
        raise ConfigError(unknown(f"there is no group {only!r}", only, list(groups)))
    for group, rows in groups.items():
        if only in (None, group):
            print(group)
            yours = [file for folder in folders for file in sorted((folder / group).glob("[!.]*.yaml"))]
            for name, text in [*rows, *((file.stem, _described_in(file)) for file in yours)]:
                print(f"  {name:<24} {text}".rstrip())


def _described(group: str, names: list[str]) -> list[tuple[str, str]]:
    """Returns (name, description) of options that are YAML files."""
    folder = files("experiments.conf") / group
    return [(name, _described_in(folder / f"{name}.yaml")) for name in names]


def _described_in(file: Traversable) -> str:
    """Returns the first comment line of an option's file."""
    lines = file.read_bytes().decode(errors="replace").splitlines()
    return next((line[2:] for line in lines if line.startswith("# ") and "@package" not in line), "")


def _first_line(maker: Any) -> str:
    """Returns the first line of a docstring, read from the source file: compiled classes and functions have none."""
    source = Path(__file__).parents[2] / f"{maker.__module__.replace('.', '/')}.py"
    nodes = ast.parse(source.read_text(encoding="utf-8")).body
    defined = [node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    (own,) = [node for node in defined if node.name == maker.__name__]
    return (ast.get_docstring(own) or "").partition("\n")[0]


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


_FEW = 0.5  # of the rate offered: below it, both are told


def print_summary(result: RunResult) -> None:
    summary = result.summary
    print(_what(result.manifest, result.config["backend"].get("decides")))
    ended = ", ".join(f"{count} {reason}" for reason, count in summary["finish_reasons"].items() if count)
    print(f"requests     {summary['num_requests']:,} sent: {ended or 'none'}")
    if summary["num_unfinished"] < summary["num_requests"]:
        _print_numbers(summary)
    probe = (summary["replay"] or {}).get("probe")
    if probe is not None:
        print(clock_line(probe))
    for note in result.notes:
        print(f"note         {note}")
    is_kept = read_manifest(result.folder).get("created") == result.manifest["created"]  # or the one before it is
    print(f"{result.status:<12} {from_here(result.folder) if is_kept else 'not kept'}")


def _print_numbers(summary: dict[str, Any]) -> None:
    throughput = summary["throughput"]
    if throughput["output_tokens_per_s"] is not None:
        served, offered = throughput["requests_per_s"], throughput["offered_per_s"] or 0.0
        of = f" (of {_rate(offered)} offered)" if served < _FEW * offered else ""
        rates = f"{_rate(served)} req/s{of}, {_rate(throughput['output_tokens_per_s'])} output tok/s"
        is_part = throughput["offered_per_s"] is not None and not summary["num_in_warmup"]
        print(f"throughput   {rates} {'in the first' if is_part else 'over'} {throughput['duration_s']:,.4g} s")
    for label, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s")):
        values = summary[key]
        times = ", ".join(f"{name} {_time(values[name.lower()])}" for name in ("mean", "P50", "P99"))
        print(f"{label:<12} {times if values['count'] + values['num_censored'] else 'no request has one'}")
    hit, preemptions = summary["prefix_hit_rate"], summary["preemptions"]["total"]
    hits = "-" if hit is None else f"{hit:.1%}"
    print(f"cache        {hits} of prompt tokens hit, {count(preemptions, 'preemption')}")
    if summary["slo"] is not None:
        kept, goodput = summary["slo"]["attainment"], summary["slo"]["goodput_per_s"]
        if kept is not None:
            print(f"SLO          kept by {kept:.2%} of requests, goodput {goodput:.4g} req/s")
    if (deadlines := summary["deadlines"]) is not None:
        print(f"deadlines    {deadlines['num_met']:,} of {deadlines['num']:,} met ({deadlines['met']:.2%})")
    replicas = summary["replicas"]
    if replicas is not None:
        uneven, done = replicas["imbalance"]["computed_tokens"], "computed"
        if uneven is None:  # steps were not recorded
            uneven, done = replicas["imbalance"]["requests"], "was sent"
        said = "nothing came" if uneven is None else f"the busiest {done} {uneven:.3g} times the mean"
        print(f"replicas     {replicas['num']} by {replicas['router']}: {said}")


def clock_line(probe: dict[str, Any]) -> str:
    """Returns a line about the probe that scaled the run's time; see ProbeScaledClock.describe."""
    slow, probe_ns = probe["slowness"], probe["probe_ns"]
    return (
        f"clock        scaled by a probe: its {probe_ns / 1e6:.3g} ms took {slow['p50']:.2f} times as long (P10 "
        f"{slow['p10']:.2f}, P90 {slow['p90']:.2f}); for runs to compare: backend.pace=probe_scaled "
        f"backend.probe_ns={probe_ns}"
    )


def _what(manifest: dict[str, Any], decides: str | None) -> str:
    """Returns a line with the model, device, scheduler and trace of a run, and for a simulation the cost model.
    decides: whose scheduler decided in vLLM; "vllm" is vLLM's own."""
    on, trace = f"{manifest['model']} on {manifest['device']}", manifest["trace"]["name"]
    own = " (vLLM's own)" if decides == "vllm" else ""
    by = f"scheduler={manifest['scheduler']}{own}, trace {trace}"
    if manifest["backend"] == "sim":
        error = manifest["cost_error"]
        errs = f" (left-out steps: {error['median']:.1%} off, P90 {error['p90']:.1%})" if error else ""
        return f"simulated    {on}, cost={manifest['cost']}{errs}, {by}"
    return f"measured     {on}{', in vLLM' if manifest['backend'] == 'vllm' else ''}, {by}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "not reached"
    return f"{seconds * 1e3:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"
