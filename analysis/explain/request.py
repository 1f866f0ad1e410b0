"""Explains one request's waits in sentences with numbers, and in a table."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pandas as pd

from analysis.explain.following import NUM_NAMED, Stretch
from analysis.explain.frames import Told
from analysis.explain.waiting import IN_FLIGHT, NEVER_FITS, Preempted
from analysis.format import count, listing, seconds, share
from analysis.load import Run, num_replicas

CAUSES = {
    "kv_blocks": "KV blocks", "token_budget": "the token budget of a step", "max_num_seqs": "max_num_seqs",
    "partial_prefills": "the limit on partial prefills", "preemption": "steps that preempted, and so admit nothing",
    "swapped_first": "swapped-out sequences, which come first", "admission": "the admission policy",
    "batch": "the batch that ran: its last member, or its next decode",
    IN_FLIGHT: "the step in flight when it came",
    NEVER_FITS: "its own end: it could never fit", "swapped_out": "room to be swapped in",
    "unsaid": "a reason that no step names",
}  # fmt: skip
REASONS = {"queue_order": "the order of the queue", "reset": "a reset of the prefix cache"}  # why a preemption happened
MAX_SENTENCES, MAX_ROWS = 8, 30
SENT_FIRST, SENT_LAST = ("first_sent_ns", "first_token_ns"), ("last_sent_ns", "finish_ns")  # at client, in engine
_WAITS = ("waiting", "swapped")
_OF_BLOCKS = ("kv_blocks", "swapped_out", "preemption")


def explain_request(run: Run, request_id: str) -> str:
    """A text on why the request waited: the answer in three lines, then its history in sentences and as a table."""
    told = Told(run, request_id)
    assert told.follower is not None
    stretches = told.follower.stretches()
    row = told.requests[told.requests["request_id"] == request_id].iloc[0]
    preempted = [one for one in told.follower.preempted if one.request_id == request_id]
    waits = [one for one in stretches if one.state in _WAITS]
    named = sorted(sorted(waits, key=_ns, reverse=True)[:MAX_SENTENCES], key=lambda one: one.start_ns)
    lines = _answer(request_id, stretches, waits, preempted, row, run)
    lines += ["", *_arrival(row, run), *(f"- {_wait(one, row, run)}" for one in named)]
    if len(waits) > len(named):
        rest = sum(map(_ns, waits)) - sum(map(_ns, named))
        lines.append(f"- {count(len(waits) - len(named), 'shorter wait')}, {seconds(rest / 1e9)} in all")
    lines += [*_admission(row), *(f"- {_preemption(one)}" for one in preempted), *_pace(stretches), _ending(row)]
    return "\n".join([*lines, "", *_table(stretches, request_id)])


def _answer(
    name: str, stretches: list[Stretch], waits: list[Stretch], preempted: list[Preempted], row: Any, run: Run
) -> list[str]:
    total, life = sum(map(_ns, waits)), sum(map(_ns, stretches))
    if not life:
        return [f"{name} ended at the instant that first saw it: it neither waited nor ran."]
    if not total:
        first = f"{name} did not wait in the queue: the first step that saw it admitted it, and "
        first += "a step that preempted it took it back at once." if preempted else "none preempted it."
        lines = [first, f"All of its {seconds(life / 1e9)} in the system it ran."]
        return [*lines, _preempted(preempted, life)] if preempted else lines
    by_cause: Counter[str] = Counter()
    for one in waits:
        by_cause[one.cause] += _ns(one)
    causes = by_cause.most_common()
    said = listing([f"{seconds(ns / 1e9)} for {CAUSES[cause]}" for cause, ns in causes[:3]])
    more = f", and {count(len(causes) - 3, 'more cause')}" if len(causes) > 3 else ""
    first = f"{name} waited {seconds(total / 1e9)} of its {seconds(life / 1e9)} in the system ({share(total / life)}): "
    longest = max(waits, key=_ns)
    where = f"Its longest stretch of waiting for one cause: {_wait(longest, row, run)}."
    return [f"{first}{said}{more}{_place(name, waits)}.", where, _preempted(preempted, life)]


def _place(name: str, waits: list[Stretch]) -> str:
    """How much of the waiting was behind others in the queue, and how much at its head."""
    ahead = {other for one in waits for other in one.ahead} - {name}
    at_head = sum(_ns(one) for one in waits if one.ahead == (name,))
    behind = sum(_ns(one) for one in waits if one.ahead and one.ahead != (name,))
    whom = next(iter(ahead)) if len(ahead) == 1 else f"{len(ahead):,} others"
    parts = [f"{seconds(behind / 1e9)} behind {whom}"] if behind else []
    parts += [f"{seconds(at_head / 1e9)} at the head of the queue"] if at_head else []
    return f" ({listing(parts)})" if parts else ""


def _preempted(preempted: list[Preempted], life: int) -> str:
    if not preempted:
        return "It was never preempted."
    whose = list(dict.fromkeys(_whose(one) for one in preempted))
    named = whose if len(whose) < 5 else [*whose[:3], f"{len(whose) - 3} others"]
    away = sum((one.back_ns or one.at_ns) - one.at_ns for one in preempted)
    again = count(sum(one.recomputed_tokens for one in preempted), "token")
    return (
        f"It was preempted {times(len(preempted))}, for {listing(named)}: "
        f"{seconds(away / 1e9)} until it ran again ({share(away / life)} of its time), {again} computed again."
    )


def _wait(one: Stretch, row: Any, run: Run) -> str:
    """One stretch of a wait: how long, when, for what, behind which request, and which requests held the resource."""
    first, last = one.first_step, one.last_step
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    is_head, cause = one.ahead == (row["request_id"],), CAUSES.get(one.cause, one.cause)
    text = f"{seconds(_ns(one) / 1e9)} from {_at(one.start_ns)} ({steps}) "
    if one.ahead and not is_head:
        text += f"behind {_some(one.ahead)} at the head of the queue, which waited for {cause}"
    else:
        text += f"{'at the head of the queue, ' if is_head else ''}for {cause}"
    if one.cause in (IN_FLIGHT, NEVER_FITS):
        return text
    if one.cause in _OF_BLOCKS:
        low, high = one.least_free_blocks, one.most_free_blocks
        needed = math.ceil(one.num_wanted / int(run.manifest["block_size"]))
        text += f": {low if low == high else f'{low} to {high}'} {were(high)} free"
        if is_head and one.cause == "kv_blocks":
            text += f", its {count(one.num_wanted, 'token')} {'fills' if one.num_wanted == 1 else 'fill'} {needed}"
            text += f" and {_reserve(run)} stays free" if low >= needed else ""
    if one.cause in ("token_budget", "partial_prefills") and one.takers:
        takers = sorted(one.takers, key=lambda item: -item[1])[:NUM_NAMED]
        return text + "; most of it went to " + listing([f"{name} ({num:,} tokens)" for name, num in takers])
    holders = listing([f"{name} ({num})" for name, num in one.holders])
    return text + (f"; most blocks were held by {holders}" if holders else "")


def _reserve(run: Run) -> str:
    """What an admission leaves free: the watermark, with its number of blocks if the configuration tells it, or what
    the running requests may need soon."""
    cache, scheduler = (run.config.get(key) or {} for key in ("cache", "scheduler"))
    share = scheduler.get("watermark") if cache.get("watermark") is None else cache["watermark"]
    if share is None:
        return "the watermark, or room to grow,"
    num_of = run.manifest["num_gpu_blocks"] + (scheduler.get("kv_rules") or {}).get("watermark_extra_blocks", 0)
    num = int(share * num_of)
    return f"the watermark ({count(num, 'block')}), or room to grow," if num else "room to grow"


def _arrival(row: Any, run: Run) -> list[str]:
    late = int(row["queued_ns"]) - int(row["arrival_ns"])
    where = f" by replica {row['replica']}" if num_replicas(run) > 1 else ""
    seen = f"seen{where} {seconds(late / 1e9)} later, at the next step boundary" if late else f"seen{where} at once"
    return [f"Arrived at {_at(row['arrival_ns'])} with {count(row['num_prompt_tokens'], 'prompt token')}; {seen}."]


def _admission(row: Any) -> list[str]:
    if pd.isna(row["first_scheduled_ns"]):
        return ["Never admitted."]
    hit = f"{int(row['num_cached_tokens']):,} of {count(row['num_prompt_tokens'], 'token')} found in the prefix cache"
    return [f"First admitted at {_at(row['first_scheduled_ns'])}: {hit}."]


def _preemption(one: Preempted) -> str:
    kept = "moved to the CPU" if one.mode == "swap" else "lost"
    text = f"preempted by {one.mode} in step {one.step} at {_at(one.at_ns)}, for {_whose(one)}; "
    text += f"{count(one.lost_tokens, 'token')} {kept}"
    if one.back_ns is None:
        return text + "; it did not run again"
    text += f"; ran again {seconds((one.back_ns - one.at_ns) / 1e9)} later"
    if one.mode == "swap":
        return text + f"; both swaps took about {seconds(one.cost_ns / 1e9)} (its share of these steps' swap time)"
    if not one.recomputed_tokens:
        return text + "; nothing was computed again"
    text += f"; {computed_again(one.recomputed_tokens)}, about {seconds(one.cost_ns / 1e9)} (its share of "
    text += "these steps, by tokens)"
    if one.caught_up_ns is None:
        return text
    return text + f", and was where it had been after {seconds((one.caught_up_ns - one.at_ns) / 1e9)}"


def computed_again(num: int) -> str:
    return f"{count(num, 'token')} {were(num)} computed again"


def were(num: int) -> str:
    return "was" if num == 1 else "were"


def times(num: int) -> str:
    return "once" if num == 1 else f"{num:,} times"


def _whose(one: Preempted) -> str:
    if one.for_request_id is None:
        return REASONS.get(one.why, "a request that its log does not name")
    return "its own growth" if one.for_request_id == one.request_id else f"the growth of {one.for_request_id}"


def _pace(stretches: list[Stretch]) -> list[str]:
    decodes, lines = [one for one in stretches if one.state == "decode"], []
    num_steps, ns = sum(one.num_steps for one in decodes), sum(map(_ns, decodes))
    if num_steps:
        text = f"Decoded in {count(num_steps, 'step')}, {seconds(ns / num_steps / 1e9)} each"
        num_slowed, slowed = sum(one.num_slowed for one in decodes), sum(one.slowed_ns for one in decodes)
        if 0 < num_slowed < num_steps:
            plain, mean = (ns - slowed) / (num_steps - num_slowed), slowed / num_slowed
            tokens = sum(one.num_other_prefill_tokens for one in decodes)
            took = f"{seconds(mean / 1e9)} against {seconds(plain / 1e9)}"
            slower = seconds((mean - plain) * num_slowed / 1e9)
            text += (
                f"; {num_slowed:,} of them also computed {count(tokens, 'token')} of others' prompts and took {took}: "
            )
            text += f"about {slower} in all (the means' difference)"
        lines.append(text + ".")
    for cause, why in (("prefills", "computed others' prompts"), ("not_scheduled", "had no room for it")):
        stalled = [one for one in stretches if (one.state, one.cause) == ("stalled", cause)]
        if stalled:
            num, ns = sum(one.num_steps for one in stalled), sum(map(_ns, stalled))
            steps = f"{num:,} steps" if num > 1 else "one step"
            they = "they" if num > 1 else "it"
            lines.append(f"It ran, but {steps} ({seconds(ns / 1e9)}) computed nothing of it: {they} {why}.")
    return lines


def _ending(row: Any) -> str:
    if pd.isna(row["finish_ns"]):
        return "It had not ended when the run was interrupted."
    message = f" ({row['finish_message']})" if isinstance(row["finish_message"], str) else ""
    times = [f"{name} {seconds(row[key])}" for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"))
             if not pd.isna(row[key])]  # fmt: skip
    emitted = f"after {count(row['num_output_tokens'], 'output token')}"
    how = f"{row['finish_reason']}{message} {emitted}"
    told = f"Ended at {_at(row['finish_ns'])} as {how}: {', '.join(times) or 'no token'}."
    first_ns, last_ns = (behind_ns(row, sent, done) for sent, done in (SENT_FIRST, SENT_LAST))
    if max(first_ns, last_ns):
        late = [
            f"its {which} token {seconds(ns / 1e9)}" for which, ns in (("first", first_ns), ("last", last_ns)) if ns
        ]
        told += f" The front end brought it {listing(late)} after the engine had made it."
    return told


def behind_ns(row: Any, sent: str, done: str) -> int:
    """The time between an event in the engine (`done`) and its token at the client (`sent`), ns; 0 if unknown."""
    if pd.isna(row[sent]) or pd.isna(row[done]) or row["finish_reason"] == "abort":
        return 0
    return max(0, int(row[sent]) - int(row[done]))


def _table(stretches: list[Stretch], name: str) -> list[str]:
    head = f"{'from step':>9} {'to step':>8} {'from s':>10} {'to s':>10} {'state':<9} {'cause':<15} who"
    rows = [
        f"{one.first_step:>9} {one.last_step:>8} {one.start_ns / 1e9:>10.4f} {one.end_ns / 1e9:>10.4f} {one.state:<9} "
        f"{one.cause or '-':<15} {_who(one, name)}".rstrip()
        for one in stretches
    ]
    if len(rows) > MAX_ROWS:
        half, left_out = MAX_ROWS // 2, len(rows) - MAX_ROWS
        rows = [*rows[:half], f"{'…':>9} {left_out:,} more: analysis.explain.frames.stretches has all", *rows[-half:]]
    return [head, *rows]


def _who(one: Stretch, name: str) -> str:
    if one.state in ("prefill", "recompute", "decode"):
        return count(one.num_tokens, "token")
    ahead = "at the head" if one.ahead == (name,) else f"behind {_some(one.ahead)}" if one.ahead else ""
    if one.state == "stalled":
        ran = ", ".join(f"{who} {num:,} tokens" for who, num in one.takers[:NUM_NAMED])
    else:
        ran = ", ".join(f"{who} {count(num, 'block')}" for who, num in one.holders)
    return "; ".join(filter(None, (ahead, ran)))


def _some(names: tuple[str, ...]) -> str:
    return f"{names[0]} … {names[-1]} ({len(names)} requests)" if len(names) > 3 else listing(list(names))


def _ns(one: Stretch) -> int:
    return one.end_ns - one.start_ns


def _at(ns: Any) -> str:
    return f"{int(ns) / 1e9:.4f} s"
