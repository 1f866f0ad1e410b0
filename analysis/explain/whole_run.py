"""A summary of all waits of a run: by cause, by preemption, and the requests with the worst latencies."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.explain.frames import Told
from analysis.explain.request import CAUSES, REASONS, SENT_FIRST, SENT_LAST, behind_ns, computed_again, times, were
from analysis.explain.slowest import slowest_and_takers, when_worst
from analysis.format import count, listing, seconds, share
from analysis.load import Run
from testbed.errors import ConfigError

WORST, FEW = 10, 3  # requests of a list
_NAMED = 5


def explain_run(run: Run, folder: Path | None = None, from_s: float = 0.0, to_s: float = math.inf) -> str:
    """A text on why the requests waited that arrived in [from_s, to_s): the answer in a few lines, then causes,
    preemptions, worst requests. folder: of which `run` is a repetition, and that is explained; None: its own. Raises
    ConfigError if none arrived then."""
    told, folder = Told(run, within_s=(from_s, to_s)), folder or run.path
    if not told.is_asked.any() and len(told.requests):
        last_s = told.requests["arrival_ns"].max() / 1e9
        raise ConfigError(f"no request of {folder} arrived then: the last came at {last_s:g} s")
    requests = told.requests[told.is_asked].set_index("request_id")
    waits, preemptions = (
        frame[frame["request_id"].isin(requests.index)].reset_index(drop=True)
        for frame in (told.waits, told.preemptions)
    )
    ends = (told.waits["end_ns"], told.requests["finish_ns"].dropna())
    last_ns = max((int(column.max()) for column in ends if len(column)), default=0)
    requests["end_ns"] = requests["finish_ns"].fillna(last_ns).astype("int64")
    requests["life_ns"] = (requests["end_ns"] - requests["queued_ns"].astype("int64")).clip(lower=0)
    requests["wait_ns"] = waits.groupby("request_id")["ns"].sum().reindex(requests.index, fill_value=0)
    sums = waits.groupby(["request_id", "cause"], observed=True)["ns"].sum().reset_index()
    main = sums.sort_values("ns", ascending=False).drop_duplicates("request_id").set_index("request_id")["cause"]
    requests["cause"] = main.reindex(requests.index)  # the cause with the longest wait
    lost = _lost_ns(preemptions, requests["end_ns"])
    return "\n".join(
        [*_answer(requests, waits, preemptions, lost), *_longest(requests, folder),
         *when_worst(run, folder, from_s, to_s), *slowest_and_takers(told), "",
         *_by_cause(waits, len(requests)), *_preempted(preemptions), *_worst(requests)]
    )  # fmt: skip


def _lost_ns(preemptions: pd.DataFrame, end_ns: pd.Series[int]) -> pd.Series[int]:
    """The time lost by each preemption: until the request had caught up, was preempted again, or ended."""
    frame = preemptions.sort_values(["request_id", "at_ns"])
    until = frame["caught_up_ns"].fillna(frame["request_id"].map(end_ns).astype("Int64")).astype("int64")
    again = frame.groupby("request_id")["at_ns"].shift(-1)
    ends: pd.Series[int] = again.fillna(until).astype("int64").clip(upper=until)
    return ends - frame["at_ns"]


def _answer(requests: pd.DataFrame, waits: pd.DataFrame, preemptions: pd.DataFrame, lost: pd.Series[int]) -> list[str]:
    life, total, num = int(requests["life_ns"].sum()), int(waits["ns"].sum()), len(requests)
    sums = waits.groupby("cause")["ns"].sum().sort_values(ascending=False)
    causes = [f"{share(ns / total)} for {CAUSES.get(str(cause), str(cause))}" for cause, ns in sums.head(3).items()]
    first = f"{count(num, 'request')} waited {seconds(total / 1e9)} in all, {share(total / max(1, life))} of their time"
    first += " in the system"
    lines = [f"{first}: {listing(causes)}." if total else f"{count(num, 'request')}, and none waited in the queue."]
    if len(preemptions):
        modes = listing([f"{n:,} by {mode}" for mode, n in preemptions["mode"].value_counts().items()])
        gone, num_victims = int(lost.sum()), preemptions["request_id"].nunique()
        lines.append(
            f"{count(len(preemptions), 'preemption')} ({modes}) of {count(num_victims, 'request')} cost "
            f"{seconds(gone / 1e9)} until all were where they had been, {share(gone / life)} of their time in the "
            f"system; {computed_again(int(preemptions['recomputed_tokens'].sum()))}."
        )
    else:
        lines.append("Nobody was preempted.")
    return lines


def _longest(requests: pd.DataFrame, folder: Path) -> list[str]:
    """A line on the request that waited longest, with the command that explains it; none if none waited."""
    worst = str(requests["wait_ns"].idxmax())
    if not requests["wait_ns"].any():
        return []
    why, command = _one_line(requests.loc[worst]), shlex.join(["testbed", "explain", str(folder), worst])
    return [f"Longest in all: {worst} {why}; `{command}`."]


def _by_cause(waits: pd.DataFrame, num_requests: int) -> list[str]:
    if not len(waits):
        return []
    table = waits.groupby("cause").agg(ns=("ns", "sum"), head=("head_ns", "sum"), who=("request_id", "nunique"))
    rows = [f"{'waiting for':<44}{'s':>11}{'share':>8}{'at the head s':>15}{'requests':>10}"]
    for cause, row in table.sort_values("ns", ascending=False).iterrows():
        part, name = row["ns"] / waits["ns"].sum(), CAUSES.get(str(cause), str(cause))
        rows.append(f"{name:<44}{row['ns'] / 1e9:>11.4g}{part:>8.1%}{row['head'] / 1e9:>15.4g}{row['who']:>10,.0f}")
    mean = seconds(waits["ns"].sum() / num_requests / 1e9)
    return [*rows, f"What was not at the head of the queue waited behind it. Mean over all requests: {mean}.", ""]


def _preempted(preemptions: pd.DataFrame) -> list[str]:
    if not len(preemptions):
        return []
    reason = preemptions["why"].map(REASONS | {"unknown": "a request that the log does not name"})
    named = preemptions["for_request_id"].fillna(reason)
    whose = named.where(named != preemptions["request_id"], "itself")
    counts = preemptions["request_id"].value_counts(sort=False).sort_values(ascending=False, kind="stable")
    again = int((counts > 1).sum())
    more = f"{again:,} {were(again)} preempted more than once."
    lines = [more if again else "Nobody was preempted twice."]
    for name, num in counts.head(_NAMED).items():
        own = whose[preemptions["request_id"] == name].value_counts()
        num_told = len(own) if len(own) <= 4 else 3
        told = [f"{who} ({n})" for who, n in own.head(num_told).items()]
        told += [f"{len(own) - num_told} others"] * (len(own) > num_told)
        lines.append(f"- {name}, {times(int(num))}, for {listing(told)}")
    if again > _NAMED:
        lines.append(f"- and {again - _NAMED:,} more")
    chain = _longest_chain(preemptions)
    if len(chain) > 2:
        shown = f"{' yielded to '.join(chain[:8])}{' …' if len(chain) > 8 else ''}"
        lines.append(f"Longest chain: {shown} ({len(chain) - 1} preemptions).")
    return [*lines, ""]


def _longest_chain(preemptions: pd.DataFrame) -> list[str]:
    """The longest chain of requests in which each was preempted for the next, which was itself preempted later."""
    found: dict[str, list[str]] = {}  # from one of each request's later preemptions on: the longest
    longest: list[str] = []
    for name, whose in zip(preemptions["request_id"][::-1], preemptions["for_request_id"][::-1], strict=True):
        if isinstance(whose, str) and whose != name:
            found[name] = max([name, *found.get(whose, [whose])][:1000], found.get(name, []), key=len)
            longest = max(found[name], longest, key=len)
    return longest


def _worst(requests: pd.DataFrame) -> list[str]:
    """The few worst requests by E2E and by TTFT, and the ten worst by waiting; no list if the ones before have all."""
    per_token = requests["wait_ns"] / 1e9 / requests["num_output_tokens"].clip(lower=1)
    ranks = (
        ("E2E", requests["e2e_s"], FEW, SENT_LAST, "ended by stop or length"),
        ("TTFT", requests["ttft_s"], FEW, SENT_FIRST, "got a token"),
        ("waiting per output token", per_token, WORST, None, ""),
    )
    lines: list[str] = []
    named: set[object] = set()
    for title, values, most, sent, which in ranks:
        worst = values[values > 0].sort_values(ascending=False, kind="stable").head(most)
        if named >= {*worst.index}:
            continue  # the same requests again
        named |= {*worst.index}
        num, num_of = values.count(), len(values)
        of = f", of the {num:,} of {count(num_of, 'request')} that {which}" if num < num_of else ""
        lines.append(f"Worst {title}{of}:")
        for name, value in worst.items():
            row = requests.loc[str(name)]
            late_ns = 0 if sent is None else behind_ns(row, *sent)
            late = f", {seconds(late_ns / 1e9)} of it for the front end to send it" if late_ns else ""
            lines.append(f"- {name}: {seconds(value)}{late}; {_one_line(row)}")
    return lines


def _one_line(row: Any) -> str:
    """How long a request waited, and mostly for what."""
    wait, life, num = int(row["wait_ns"]), int(row["life_ns"]), int(row["num_preemptions"])
    if not wait:
        tokens = f"{row['num_prompt_tokens']:,} prompt and {count(row['num_output_tokens'], 'output token')}"
        text = f"did not wait in the queue: {tokens}"
    else:
        cause = CAUSES.get(str(row["cause"]), str(row["cause"]))
        text = f"waited {seconds(wait / 1e9)} ({share(wait / max(1, life))}), mostly for {cause}"
    return text + (f"; preempted {times(num)}" if num else "")
