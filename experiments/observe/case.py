"""Turns an observed run into a case for `testbed conform`: configuration, requests and decisions in its format."""

from __future__ import annotations

import re
from typing import Any

from experiments.observe.log import ObservedLog, ObservedRequest, ObservedStep
from experiments.runs.in_vllm import USUAL
from real.vllm import SPAN, is_known
from testbed.core.request import Request
from testbed.wording import count

_ALIKE = (  # settings with the same name in cases and logs
    "block_size", "num_gpu_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "prefix_caching"
)  # fmt: skip
_FULL_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")


def case_of(log: ObservedLog, name: str) -> dict[str, Any]:
    """Returns the case as one object of a file of cases. Its request ids number the requests in the order received."""
    requests = log.requests
    first: set[str] = set()
    steps = [_step(number, step, requests, first, is_ahead=_is_ahead(log)) for number, step in enumerate(log.steps)]
    if log.was_in_flight and _is_ahead(log):  # another plan, which is left out, held blocks at this commit
        del steps[-1]["free_blocks_after_commit"]
    aborts = [
        {"request_id": str(one.number), "planned": one.aborted[0], "committed": one.aborted[1]}
        for one in sorted(requests.values(), key=lambda one: one.ended_ns or 0)  # keeps the order at equal places
        if one.aborted is not None
    ]
    return {
        "case": name,
        "system": system_of(log),
        "config": config_of(log),
        "requests": [_request(one) for one in requests.values()],
        "aborts": aborts,
        "resets": [{"planned": one.place[0], "committed": one.place[1]} for one in log.resets],
        "steps": steps,
    }


def config_of(log: ObservedLog) -> dict[str, Any]:
    """Returns the settings of vLLM's scheduler and cache, as a case has them."""
    config = log.header["config"]
    return {name: config[name] for name in _ALIKE} | {
        "queue_order": config["policy"],
        "long_prefill_token_threshold": config["long_prefill_token_threshold"] or 0,
        "watermark": config["watermark"] or 0.0,
        "async_scheduling": _is_ahead(log),
    }


def system_of(log: ObservedLog) -> str:
    """Returns the entry of experiments/conform/systems.py. Versions with the same rules use the newest one's entry."""
    found = re.match(r"0\.(\d+)", str(log.header["vllm"]))
    minor = 33 if found is None else int(found[1])
    rule = "0.30" if minor < 31 else "0.32" if minor < 33 else "0.33"
    return f"vllm_v1_{rule}" + ("_async" if _is_ahead(log) else "")


def why_no_case(log: ObservedLog) -> str:
    """Returns why the log cannot be compared step by step; empty if it can."""
    config = log.header["config"]
    if log.left_out:
        return log.note
    if not is_known(str(log.header["vllm"])):
        return f"vLLM {log.header['vllm']} is outside of {SPAN}, whose decisions the presets mirror"
    if log.header["unknown"]:
        return f"vLLM ran with {', '.join(log.header['unknown'])}, which this testbed has not"
    if config["num_kv_cache_groups"] != 1:
        return f"vLLM had {config['num_kv_cache_groups']} groups of KV caches, this testbed has one"
    for spec in config.get("kv_cache_specs", ()):
        if spec not in _FULL_ATTENTION:
            return f"vLLM's KV cache was of a {spec}, the preset's is of full attention"
    for name, usual in USUAL.items():
        if config.get(name) not in (usual, None):
            return f"vLLM ran with {name}={config[name]}, which the preset has not"
    if asked := next((one.unknown for one in log.requests.values() if one.unknown), ""):
        return f"a request asked for {asked}, which this testbed has not"
    if config["policy"] == "priority" and not log.is_in_order:
        return "requests came in another order than that of their arrivals, by which vLLM's priorities go"
    if log.header["device"]["pipeline_parallel_size"] != 1:
        return "pipeline parallelism plans several batches at a time"
    if num := sum(one.preempts and one.place[0] > one.place[1] for one in log.resets):
        often = f"what ran lost its KV to a reset {count(num, 'time')} with a step in flight"
        return f"{often}: vLLM drops its tokens, we do not"
    if log.contradiction:
        return log.contradiction
    if config["prefix_caching"] and any(isinstance(one.prompt, int) for one in log.requests.values()):
        return "prefix caching was on, and the log has lengths in place of token ids"
    if log.is_cut:
        return "the run did not finish"
    return ""


def _is_ahead(log: ObservedLog) -> bool:
    return bool(log.header["config"]["async_scheduling"])


def _request(one: ObservedRequest) -> dict[str, Any]:
    prompt = [one.number + 1] * one.prompt if isinstance(one.prompt, int) else one.prompt.tolist()
    return {
        "request_id": str(one.number),
        "arrival_step": one.place[0],
        "prompt_token_ids": prompt,
        "output_token_ids": one.wanted or [0],
        "max_tokens": one.max_tokens,
        "priority": one.priority,
        "cache_salt": one.salt,
        "skips_prefix_cache": one.skips_cache,
    }


def _step(
    number: int, step: ObservedStep, requests: dict[str, ObservedRequest], first: set[str], *, is_ahead: bool
) -> dict[str, Any]:
    def id_of(name: str) -> str:
        return str(requests[name].number)

    decision: dict[str, Any] = {"step": number}
    if is_ahead:
        decision["committed"] = step.num_committed
    hits = {id_of(name): start for name, start in step.admitted.items() if name not in first}
    first.update(step.admitted)
    return decision | {
        "scheduled": {id_of(name): tokens for name, tokens in step.scheduled.items()},
        "preempted": [id_of(name) for name in step.preempted],
        "cached_tokens": hits,
        "free_blocks": step.free_blocks,
        "free_blocks_after_commit": step.free_after,
        "num_waiting": step.num_waiting,
    }


def request_of(one: ObservedRequest) -> Request:
    prompt = [0] * one.prompt if isinstance(one.prompt, int) else one.prompt
    return Request(
        one.name, prompt, arrival_ns=one.arrival_ns, forced_output=one.output or [0], priority=one.priority,
        cache_salt=one.salt,
    )  # fmt: skip
