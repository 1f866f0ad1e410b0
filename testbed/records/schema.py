"""The schema of a run's records: `recorder.py` writes them, `analysis/` reads them.

A run folder holds:
    config.yaml        the resolved configuration
    manifest.json      what made the run: code and package versions, device, seed, trace fingerprint, decision digest
    requests.parquet   REQUEST_COLUMNS, one row a request, unfinished ones included
    steps.parquet      STEP_COLUMNS, one row a step; no rows with record.steps=false
    summary.json       the headline numbers (analysis.measures.summary.summarise)
    decisions.jsonl    with record.decisions=true: one line a step; record.explain=true explains preemptions
    operators.json     with record.operators=true: the time by operator (testbed/records/operators.py)
    tape.jsonl         of engines, if our scheduler decided; tape-0.jsonl, … with several replicas
    trace.jsonl        the requests, beside a tape; and of a trace that was given in Python
    profile.json.gz    with record.profile: steps of a real run in torch's profiler
    run.log            the log
    done               written last: the folder is complete
    .replaced          the run in whose place this one is written, until this one is complete
Instants are int64 ns on the run's clock (0 is the start of the run); durations derived from them are seconds.
"""

from __future__ import annotations

from typing import Any

from testbed.core.commands import StepView
from testbed.core.outcome import FinishReason
from testbed.core.plan import BatchPlan, PreemptionMode

RUN_FILES = ("config.yaml", "manifest.json", "requests.parquet", "steps.parquet")  # without them a folder is not a run
REPLACED = ".replaced"
STEP_TRACE_FILE = "profile.json.gz"

REQUEST_COLUMNS: dict[str, str] = {
    "request_id": "string",  # unique within the run
    "session_id": "string",  # null outside sessions
    "turn": "int32",  # null outside sessions
    "tenant": "string",  # null: none was named
    "priority": "int32",  # from the trace; smaller is more urgent
    "deadline_ns": "int64",  # arrival + the trace's deadline; null: none
    "replica": "int32",  # the replica that served it; 0 if there is only one
    "num_prompt_tokens": "int32",  # cached ones included
    "num_output_tokens": "int32",  # emitted so far, by all of its sequences
    "num_token_steps": "int32",  # steps that emitted them: fewer if sequences of a group emit together
    "num_cached_tokens": "int32",  # prefix tokens found in the cache at the first admission
    "num_preemptions": "int32",  # by recompute and by swap, until its last token; members of a group count once
    "num_recomputed_tokens": "int64",  # computed again after a preemption; tokens found in the cache do not count
    "finish_reason": "string",  # stop, length, abort, ignored; null: unfinished when the run ended (censored)
    "finish_message": "string",  # why it was ignored or aborted; null: no message
    "arrival_ns": "int64",  # intended arrival
    "queued_ns": "int64",  # the step boundary that first saw it
    "first_scheduled_ns": "int64",  # the plan that admitted it first; null: never
    "first_token_ns": "int64",  # the commit that emitted its first token; null: none
    "finish_ns": "int64",  # when it left the engine, for any reason; null: unfinished when the run ended
    "token_ns": "list<int64>",  # the instant of every step that emitted; null with record.token_times=false
    "first_sent_ns": "int64",  # its client has the first token (backend.frontend_ns_per_token); null: at the commit
    "last_sent_ns": "int64",  # its client has the newest token; both may be later than an abort
    "ttft_s": "double",  # first token at the client - intended arrival
    "tpot_s": "double",  # (last - first token) / (n - 1), n the steps that emitted, at the client; null for n < 2
    "e2e_s": "double",  # finish, or last token at the client - intended arrival; null unless it ended by stop or length
}

STEP_COLUMNS: dict[str, str] = {
    "replica": "int32",  # the replica of the step; 0 if there is only one. Rows of several are mixed, each in its order
    "step": "int64",  # counted by each replica separately
    "start_ns": "int64",  # the instant given to plan, or the end of the step that was in flight then
    "end_ns": "int64",  # the instant given to commit
    "num_decodes": "int32",  # decode rows: one token each of a sequence whose prompt is computed
    "num_prefills": "int32",  # prefill rows (whole prompts or chunks)
    "num_decode_tokens": "int32",  # computed by decode rows
    "num_prefill_tokens": "int32",  # computed by prefill rows; those found in the prefix cache are not
    "decode_context_tokens": "int64",  # positions that the decode rows attend to, summed
    "num_emitted": "int32",  # emitted tokens
    "num_running": "int32",  # after the plan
    "num_waiting": "int32",  # after the plan, those preempted by recompute included
    "num_swapped": "int32",  # after the plan, sequences swapped out to the CPU; a group counts once
    "free_gpu_blocks": "int32",  # after the plan, before its commit; cached and evictable ones count as free
    "free_cpu_blocks": "int32",  # after the plan
    "num_admitted": "int32",  # sequences taken from the waiting queue, preempted ones included
    "num_cached_tokens": "int32",  # prefix tokens found for the sequences admitted in this step
    "num_preempted": "int32",  # requests preempted by recompute
    "num_swapped_out": "int32",  # requests preempted by swap
    "num_swapped_in": "int32",  # sequences that came back from the CPU; a group that goes together counts once
    "num_ignored": "int32",  # sequences that ended as ignored; likewise
    "blocked_by": "string",  # why the head of the queue was not admitted; null: nothing kept it out
    "schedule_ns": "int64",  # the core's decision; the parts may overlap, and the rest of a step is idle time
    "prepare_ns": "int64",  # inputs of the batch, launches, other host time of each step
    "swap_ns": "int64",  # block transfers and copies
    "forward_ns": "int64",  # the model
    "sample_ns": "int64",  # logits to tokens
    "digest": "uint64",  # the running decision digest after this step
}

COMPLETED = (FinishReason.STOP.value, FinishReason.LENGTH.value)

# `cost_error.median` of a manifest up to which a fit is good, and above which it is poor
GOOD_FIT, POOR_FIT = 0.05, 0.15

MANIFEST_KEYS = (
    "status",  # complete, partial (interrupted or failed), failed (a sweep point that did not start: no records)
    "failure",  # why it is not complete; null if it is
    "backend",  # sim, real, vllm
    "created",  # ISO time
    "wall_s",  # wall clock of the run
    "code_version",
    "identity",  # hashes of its inputs: {config, files: {path: }, classes: {module: }, code, version}
    "versions",  # {package: version}
    "core",  # compiled, interpreted
    "compiler",  # of a compiled core: mypyc 2.4.1, gcc 12.2.0
    "machine",  # {platform, cpu, num_cores, gpu}
    "command",  # the command line of the run
    "started_in",  # the working directory of the command; relative paths in it and in the configuration start there
    "given",  # {key: value} of the command's overrides, as typed; null: not known
    "sweep",  # the command of its sweep; null: no sweep, or not a sweep of this testbed
    "swept",  # those of the overrides that its sweep varies; null: no sweep
    "point",  # its number in the sweep, from 0 on; null: no sweep
    "measured_trace",  # trace settings of the measured run that `testbed fidelity` repeats; null: config.yaml has them
    "seed",
    "end_token_ids",  # that end the outputs that the model ends, besides sampling.stop_token_ids; real runs only
    "trace",  # {name, num_requests, fingerprint, differ_in, is_closed_loop, notes, sent_fingerprint: as it is replayed}
    "model",  # name
    "tensor_parallel_size",
    "scheduler",  # name
    "victim_of_auto",  # the victim choice for which scheduler.victim=auto stands; null: another one is named
    "async_scheduling",  # whether a step was planned while the one before it ran
    "frontend_ns",  # time from a request's arrival until it reaches the engine; simulated runs only
    "frontend_ns_per_token",  # time to send one token to its client; simulated runs only
    "device",  # name
    "attention",  # provider, real runs only
    "attention_reasons",  # {provider: why it was chosen or not}, real runs only
    "weights",  # safetensors, or dummy: random; real runs only
    "cost",  # cost model, simulated runs only
    "cost_fit",  # {file, digest}: the file of a calibrated fit, and xxh64 of it, 16 hex digits; null: none
    "cost_error",  # {median, p90}: errors of steps left out of a calibrated fit; null: another cost model, or factors
    "cost_kernels",  # what the roofline's efficiencies and floors are: measured, estimated; null: another cost model
    "cost_shares",  # {measured, scaled, roofline}: shares of the time by source; null: another cost model than tables
    "cost_notes",  # on step times not measured, not compared, or known to policies; on a KV pool larger than the GPU
    "num_extrapolated_steps",
    "estimator",  # predicts the times of recompute and swap for policies, in simulated and real runs
    "num_gpu_blocks",
    "num_cpu_blocks",
    "block_size",
    "num_replicas",
    "router",  # name; null if there is one replica
    "num_steps",  # of all replicas
    "num_sent",  # requests that reached the scheduler
    "num_unsent",  # rows that did not: turns after one that was ignored or aborted, or cut off by a partial run's end
    "num_cut_outputs",  # outputs of a given length, cut by the model's; not known for vLLM's own scheduler
    "num_cut_output_tokens",  # the tokens that are missing from them
    "prefix_cache",  # {queried_tokens, hit_tokens} of first admissions
    "digest",  # final decision digest, 16 hex digits; of several replicas: xxh64 over theirs, in order, 8 bytes each
    "replay",  # {pace, speed, lag of arrivals, notes}, real runs only
    "host",  # the host's part of the steps, as means over all steps; real runs only
    "notes",  # what a reader of its numbers should know, as told at its end; null: not told then
    "replicas",  # {num_steps, num_sent, prefix_cache, digest} of each; null if there is one
)


def num_scheduled(plan: BatchPlan) -> dict[str, int]:
    """Returns the tokens computed by each request, in the order scheduled, summed over the request's sequences."""
    tokens: dict[str, int] = {}
    for request_id, count in plan.num_scheduled:
        tokens[request_id] = tokens.get(request_id, 0) + count
    return tokens


def decision(step: StepView) -> dict[str, Any]:
    """Returns one line of decisions.jsonl: the decisions of a step, with ids in the order scheduled."""
    plan = step.plan
    return {
        "step": plan.step,
        "time_s": step.plan_ns / 1e9,
        "scheduled": num_scheduled(plan),
        "preempted": _requests(plan, PreemptionMode.RECOMPUTE),
        "swapped_out": _requests(plan, PreemptionMode.SWAP),
        "swapped_in": list(plan.swapped_in),
        "ignored": [item.request_id for item in plan.ignored],
        "cached_tokens": {item.request_id: item.num_cached_tokens for item in plan.admitted},
        "free_blocks": step.free_gpu_blocks,
        "free_cpu_blocks": step.free_cpu_blocks,
    }


def explanation(plan: BatchPlan, before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    """Returns what record.explain=true adds to the line of a step that preempts, or that resumes preempted requests.

    preempted_for: by victim, the request that needed its blocks to grow; null: the victim yielded to the head of the
    queue; "": a reset of the prefix cache; an empty object: not known.
    lost_tokens: the victim's computed tokens (kept if it is swapped out). recomputed_tokens: tokens that will be
    computed again; below 0 if the request was preempted again before they were. before, after: recomputed tokens so
    far, by request, before and after this step.
    """
    if not (plan.preempted or after):
        return {}
    lost: dict[str, int] = {}
    for item in plan.preempted:
        lost[item.request_id] = lost.get(item.request_id, 0) + item.num_computed_tokens
    growers = zip(plan.preempted, plan.preempted_for, strict=False)  # not known for a log of vLLM
    return {
        "preempted_for": {item.request_id: name for item, name in growers},
        "lost_tokens": lost,
        "recomputed_tokens": {name: num - before[name] for name, num in after.items() if num != before[name]},
    }


def _requests(plan: BatchPlan, mode: PreemptionMode) -> list[str]:
    """Returns the ids of the requests that were preempted in this mode, each once."""
    return list(dict.fromkeys(item.request_id for item in plan.preempted if item.mode is mode))
