"""Notes about settings that have no effect in a run: arms that differ only in one of them are the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from experiments.configuration.config import RunConfig
from experiments.configuration.policies import make_policy, shipped_name
from experiments.configuration.settings import SyntheticTraceConfig
from experiments.wiring.build import may_ask
from experiments.wiring.costs import unlike_the_library, unread_settings, without_effect
from real.vllm.config import VllmConfig
from sim.config import SimConfig
from sim.cost.config import ConstantConfig, LinearConfig, RooflineConfig
from testbed.blocks.config import CacheConfig
from testbed.composites import declared
from testbed.policies.compositions.decode_first import DecodeFirst
from testbed.routing.config import FleetConfig


def unused_settings(config: RunConfig, swept: Collection[str] = ()) -> list[str]:
    """Returns a note about each changed setting that has no effect. swept: the keys by which the run's neighbours in a
    sweep differ from it."""
    backend, scheduler, drawn = config.backend, config.scheduler, config.sampling
    composition = make_policy("scheduler.composition", scheduler.composition)
    named = scheduler.composition if isinstance(scheduler.composition, str) else type(composition).__name__
    with_composition = f"scheduler.composition={named}"
    unread = [name for name in ("budget", "chunks_fill_blocks") if name not in declared(composition, "own_rules", ())]
    notes = without_effect("scheduler.kv_rules", scheduler.kv_rules, unread, with_composition)
    notes += _unasked(config, swept)
    if drawn.temperature == 0.0 or drawn.beam_width:
        idle = "temperature=0, which is greedy" if drawn.temperature == 0.0 else "beam_width, which draws nothing"
        notes += without_effect("sampling", drawn, ("top_p", "top_k", "min_p"), f"sampling.{idle}")
    is_ours = isinstance(backend, FleetConfig)
    is_set = config.cache.gpu_memory_utilization != CacheConfig().gpu_memory_utilization
    if config.cache.num_cpu_blocks is not None:
        notes += without_effect("cache", config.cache, ("swap_space_gib",), "cache.num_cpu_blocks")
    if is_ours and config.cache.num_gpu_blocks is not None:
        notes += without_effect("cache", config.cache, ("gpu_memory_utilization",), "cache.num_gpu_blocks")
    elif is_ours and config.device.kind == "cpu" and is_set:
        notes.append("cache.gpu_memory_utilization has no effect on a CPU; set cache.num_gpu_blocks")
    if not isinstance(backend, SimConfig):
        if config.cost != RooflineConfig() and not may_ask(config, "estimator"):
            notes.append(f"cost={config.cost_name} has no effect on measured times")
    else:
        notes += unread_settings(config) + _unswapped(config, backend, swept)
        of_ends = ("stop_token_ids", "ignore_eos", "min_tokens", "logit_bias", "seed")
        notes += without_effect("sampling", drawn, of_ends, "backend=sim, whose outputs are those of the trace")
        if drawn.max_tokens is not None:
            notes.append(
                "sampling.max_tokens ends no output of a simulation, as the trace gives their lengths: cut them with "
                "trace.max_output_tokens. Only policies that go by a request's own limit read it"
            )
        if config.record.profile is not None:
            notes.append("record.profile has no effect in a simulation, which has no operators to trace")
    if isinstance(config.trace, SyntheticTraceConfig) and config.trace.lengths_from is None:
        notes += without_effect("trace", config.trace, ("lengths_format",), "trace.lengths_from=null")
    if isinstance(backend, VllmConfig) and backend.decides == "vllm":
        unwritten = ("token_times", "steps", "operators", "status_s", "check")
        why = "backend.decides=vllm, whose records are made from vLLM's log"
        notes += without_effect("record", config.record, unwritten, why)
    if isinstance(backend, FleetConfig) and backend.num_replicas == 1:
        names = ("router", "router_period_ns") if isinstance(backend, SimConfig) else ("router",)
        notes += without_effect("backend", backend, names, "backend.num_replicas=1")
    unused = declared(composition, "unused_limits", ())
    if type(composition) is DecodeFirst and scheduler.max_num_partial_prefills == 1:
        of_several = ("long_prefill_token_threshold", "max_long_partial_prefills")
        notes += without_effect("scheduler", scheduler, of_several, "scheduler.max_num_partial_prefills=1")
    return notes + without_effect("scheduler", scheduler, unused, with_composition)


def _unasked(config: RunConfig, swept: Collection[str]) -> list[str]:
    """Returns notes about an oracle and an estimator that no policy asks, here or in the sweep, and about what goes by
    prefixes where none are cached."""
    chosen, notes = config.scheduler, []
    if not config.cache.prefix_caching:
        without = "cache.prefix_caching=false"
        notes += without_effect("cache", config.cache, ("eviction", "isolate_tenants"), without)
        key, choice = "scheduler.queue_order", chosen.queue_order
        if "prefixes" in declared(make_policy(key, choice), "asks", ()):
            notes.append(f"{_said(key, choice)} is first come, first served with {without}")
    if {"scheduler.queue_order", "scheduler.admission", "scheduler.victim"}.isdisjoint(swept):
        why = "a queue order, an admission and a victim that ask for no lengths"
        notes += [] if may_ask(config, "oracle") else without_effect("scheduler", chosen, ("oracle",), why)
    if {"scheduler", "scheduler.preemption", "cache.eviction"}.isdisjoint(swept):
        why = "policies that ask for no step times"
        notes += [] if may_ask(config, "estimator") else without_effect("scheduler", chosen, ("estimator",), why)
    return notes


def _unswapped(config: RunConfig, backend: SimConfig, swept: Collection[str]) -> list[str]:
    """Returns notes about settings of swaps where no step of the sweep can swap, or none overlaps with computation."""
    chosen, is_alone = config.scheduler, config.sampling.num_seqs == 1
    mode = shipped_name("scheduler.preemption", chosen.preemption)
    is_other = isinstance(chosen.composition, dict) or any(key.startswith(("scheduler", "sampling")) for key in swept)
    if is_other or not is_alone or mode not in ("recompute", "auto"):
        by = "backend.swap_overlap=false"
        return [] if backend.swap_overlap else without_effect("backend", backend, ("replicas_per_link",), by)
    why = f"scheduler.preemption={mode}, which swaps {'nothing' if mode == 'recompute' else 'only groups of sequences'}"
    notes = without_effect("backend", backend, ("swap_overlap", "replicas_per_link"), why)
    links = ["host_link_latency_ns"]
    if not config.device.is_over_pcie or config.tensor_parallel_size == 1:  # else ranks meet over it
        links.append("host_link_bytes_per_s")
    changed = unlike_the_library(config.device, links) if isinstance(config.cost, RooflineConfig) else []
    return notes + [f"device.{name} has no effect with {why}" for name in changed]


def overruled(config: RunConfig, given: Mapping[str, str]) -> list[str]:
    """Returns a note about each setting that a command gives, and that another one overrules. given: key -> value."""
    notes = []
    if "model" in given and "model.path" in given and config.model.path is not None:
        notes.append(f"model={given['model']} has no effect with model.path, whose files give the whole model")
    if "scheduler.watermark" in given and config.cache.watermark is not None:
        notes.append("scheduler.watermark has no effect with cache.watermark, which overrules it")
    if "device" in given and config.is_simulated and isinstance(config.cost, ConstantConfig | LinearConfig):
        memory = "" if config.cache.num_gpu_blocks is not None else ": its memory alone counts, for the KV blocks"
        notes.append(f"device={given['device']} does not change the step times of cost={config.cost_name}{memory}")
    return notes


_ALIKE = {  # a field of ClassFields -> what is so if no two requests differ in it
    "priority": "all requests have one priority",
    "tenant": "all requests have one tenant, or none",
    "deadline": "all requests have one deadline after arrival, or none",
}


def without_classes(config: RunConfig, differ_in: list[str] | None) -> list[str]:
    """Returns notes about policies that go by a field in which no two requests differ. differ_in: as in a manifest's
    trace; None: not known."""
    goes_by = {}
    for name in ("queue_order", "victim"):
        key, choice = f"scheduler.{name}", getattr(config.scheduler, name)
        if choice != "auto":  # a victim choice that goes by what the queue order goes by
            goes_by[_said(key, choice)] = declared(make_policy(key, choice), "goes_by", "")
    if config.cache.isolate_tenants and config.cache.prefix_caching:
        goes_by["cache.isolate_tenants=true"] = "tenant"
    return [
        f"{setting} tells no requests apart here: {_ALIKE[field]}; trace.tenants, or "
        "trace.transforms=[{name: label, classes: …}], gives them classes"
        for setting, field in goes_by.items()
        if differ_in is not None and field and field not in differ_in
    ]


def _said(key: str, choice: Any) -> str:
    """Returns the setting of a policy: `key=name`, or with its class."""
    return f"{key}={shipped_name(key, choice) or choice['_target_']}"
