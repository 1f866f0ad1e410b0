"""Sentences on when TTFT was worst, where the slowest requests' TTFT went, and who took what others waited for."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.explain.frames import Told
from analysis.explain.request import CAUSES
from analysis.explain.taking import BLOCKS, BUDGET
from analysis.explain.waiting import IN_FLIGHT
from analysis.format import count, listing, seconds, share
from analysis.load import Run
from analysis.measures.classes import classes_of
from analysis.measures.over_time import OverTime
from analysis.reading.request_columns import Requests

_NAMED = 3  # requests that took most
_MUCH = 0.1  # of the waiting: who took what was waited for is said from here on


def when_worst(run: Run, folder: Path, from_s: float, to_s: float) -> list[str]:
    """P99 TTFT within [from_s, to_s) against the others; for the whole run its worst stretch, if there is one, with the
    command that explains it. folder: the run's."""
    ttft = OverTime(run.counted, "ttft_s")
    inside = ttft.within(from_s, to_s)
    if inside.all():
        if (worst := ttft.worst()) is None:
            return []
        from_s, to_s, own, other, num = worst
        which = f", the worst of {num} such stretches" if num > 1 else ""
        words = ["testbed", "explain", str(folder), "--from", f"{from_s:g}", "--to", f"{to_s:g}"]
        more = f"; `{shlex.join(words)}`"
    else:
        own, other = (ttft.quantile(chosen, 0.99) for chosen in (inside, ~inside))
        which = more = ""
    until = "on" if to_s == math.inf else f"to {to_s:g} s"
    first, second = ("not reached" if math.isinf(p99) else seconds(p99) for p99 in (own, other))
    said = f"P99 TTFT was {first} for those that arrived from {from_s:g} s {until}{which}, {second} for the others"
    return [] if math.isnan(own + other) else [f"{said}{more}."]


def slowest_and_takers(told: Told) -> list[str]:
    """Where the TTFT of the slowest requests went; then for each much-waited-for thing who took it meanwhile."""
    facts = told.requests.set_index("request_id")
    by = (classes_of(Requests.of(told.requests)) or ("", []))[0]
    facts["class"] = "" if not by else by + " " + facts[by].fillna("none").astype(str)
    asked, slow = facts[told.is_asked.to_numpy()], facts.loc[told.slowest["request_id"]]
    waited = _waited(told, asked)
    lines = [_split(told, slow)] if len(slow) else []
    for cause in sorted((*BUDGET, *BLOCKS, IN_FLIGHT), key=lambda one: -waited.get(one, 0)):
        taken = pd.Series({name: num for one in told.takers for name, num in one.taken.get(cause, {}).items()})
        if waited.get(cause, 0) > _MUCH * sum(waited.values()) and taken.sum() > 0:
            what = "the blocks in use" if cause in BLOCKS else "the tokens computed"
            when = f"While others waited for {CAUSES[cause]}"
            when = "In the steps that ran when requests came" if cause == IN_FLIGHT else when
            lines.append(f"{when}, {_takers(taken / taken.sum(), facts, what)}.")
    return lines


def _waited(told: Told, requests: pd.DataFrame, until: str | None = None) -> dict[str, int]:
    """By cause the ns that these requests waited since their arrival. until: only waits that ended by this instant."""
    waits = told.waits[told.waits["request_id"].isin(requests.index)]
    if until is not None:
        waits = waits[waits["end_ns"] <= waits["request_id"].map(requests[until])]
    waited = {str(cause): int(ns) for cause, ns in waits.groupby("cause")["ns"].sum().items()}
    waited[IN_FLIGHT] = waited.get(IN_FLIGHT, 0) + int((requests["queued_ns"] - requests["arrival_ns"]).sum())
    return waited


def _split(told: Told, slow: pd.DataFrame) -> str:
    """One sentence: the mean TTFT of the slowest requests, and its parts. They add up to it."""
    waited = _waited(told, slow, "first_token_ns")
    late_ns, queued_ns = waited.pop(IN_FLIGHT), sum(waited.values())
    engine_ns = int((slow["first_token_ns"] - slow["arrival_ns"]).sum())
    own_ns = sum(ns for one in told.takers for ns in one.own_ns.values())
    ran_ns = engine_ns - late_ns - queued_ns
    total_ns = slow["ttft_s"].sum() * 1e9
    mean, late, queued, ran, own, others, sent = (
        seconds(float(ns) / len(slow) / 1e9) if ns > 0.5 else ""
        for ns in (total_ns, late_ns, queued_ns, ran_ns, own_ns, ran_ns - own_ns, total_ns - engine_ns)
    )
    parts = [f"{late} until the step that ran at arrival had ended"] * bool(late)
    parts += [f"{queued} in the queue"] * bool(queued)
    by_tokens = f"estimated by tokens: {own} for the own prompt, {others} for others in the same steps"
    parts.append(f"{ran} in the steps up to the first token ({by_tokens if others else 'alone'})")
    parts += [f"{sent} in the front end"] * bool(sent)
    which = f"request by TTFT, {_named(slow.iloc[0])}," if len(slow) == 1 else f"1 % by TTFT ({_some(slow)})"
    return f"The slowest {which} took {mean}{' in the mean' * (len(slow) > 1)}: {listing(parts)}."


def _some(slow: pd.DataFrame) -> str:
    own = [f"{num:,} of {name}" for name, num in slow["class"].value_counts().items() if name]
    return count(len(slow), "request") + (f", {listing(own, 3)}" if own else "")


def _takers(shares: pd.Series[float], facts: pd.DataFrame, what: str) -> str:
    """shares: of what was taken, by request."""
    shares = shares.sort_values(ascending=False, kind="stable")
    named = [_named(facts.loc[name]) for name in shares.index[:_NAMED]]
    if len(shares) <= _NAMED:
        return f"{_parts(dict(zip(named, shares, strict=True)))} of {what}"
    by_class = shares.groupby(facts["class"].reindex(shares.index)).sum().sort_values(ascending=False).head(_NAMED)
    of = f"{_parts(by_class)} of {what}; half" if by_class.index[0] else f"half of {what}"
    half = shares.index[: int((shares.cumsum() < 0.5 - 1e-9).sum()) + 1]
    prompts, usual = (f"{facts.loc[names, 'num_prompt_tokens'].median():,.0f}" for names in (half, facts.index))
    whose = f"{count(len(half), 'request')} ({prompts} prompt tokens in the median; of all requests {usual})"
    return f"{of} went to {whose}, most to {listing(named)}"


def _parts(parts: Mapping[str, float] | pd.Series[float]) -> str:
    return listing([f"{who} took {share(part)}" for who, part in parts.items()])


def _named(row: Any) -> str:
    about = [row["class"]] * bool(row["class"]) + [count(row["num_prompt_tokens"], "prompt token")]
    return f"{row.name} ({', '.join(about)})"
