"""Follows one request step by step: its state, the cause of each wait, the queue's head, and who held KV blocks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from heapq import nlargest

from analysis.explain.decisions import DecidedStep
from analysis.explain.taking import Holding
from analysis.explain.waiting import IN_FLIGHT, NEVER_FITS, Life

NUM_NAMED = 3  # other requests that are named


@dataclass(slots=True)
class Stretch:
    """Consecutive steps in which a request was in the same state for the same cause.

    state: waiting, swapped, prefill, recompute, decode, or stalled (it is running, but the step computes none of it).
    cause: the steps' `blocked_by` (waiting), `swapped_out`, `prefills` or `not_scheduled` (stalled), empty (computed).
    ahead: while it waits, the heads of the queue, in order. Only itself: it was the head. Empty: unknown, as no request
    was admitted later.
    """

    first_step: int
    last_step: int
    start_ns: int
    end_ns: int
    state: str
    cause: str
    ahead: tuple[str, ...] = ()
    num_steps: int = 1
    num_tokens: int = 0  # computed for this request
    num_wanted: int = 0  # tokens so far, which must be computed or found in the cache
    least_free_blocks: int = 0
    most_free_blocks: int = 0
    num_other_prefill_tokens: int = 0  # prefill tokens of other requests
    slowed_ns: int = 0  # length of the steps that had such tokens
    num_slowed: int = 0  # number of these steps
    holders: tuple[tuple[str, int], ...] = ()  # (id, KV blocks) of the requests that held most at its end
    takers: tuple[tuple[str, int], ...] = ()  # (id, tokens) of the requests that got most, if more than 1

    def extend(self, later: Stretch) -> None:
        self.last_step, self.end_ns, self.holders = later.last_step, later.end_ns, later.holders or self.holders
        self.ahead = tuple(dict.fromkeys(self.ahead + later.ahead))
        for name in ("num_steps", "num_tokens", "num_other_prefill_tokens", "slowed_ns", "num_slowed"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.least_free_blocks = min(self.least_free_blocks, later.least_free_blocks)
        self.most_free_blocks = max(self.most_free_blocks, later.most_free_blocks)
        self.takers = tuple((Counter(dict(self.takers)) + Counter(dict(later.takers))).items())


class Follower(Holding):
    """An engine with the stretches of one of its requests. Held blocks are estimated from the computed tokens."""

    def __init__(self, replica: int, lives: list[Life], life: Life, block_size: int) -> None:
        super().__init__(replica, lives)
        self._life, self._block_size = life, block_size
        self._stretches: list[Stretch] = []  # one for each step
        self._numbers: dict[int, Stretch] = {}  # the waiting ones, by index of the step
        self._most_computed = 0

    def take(self, step: DecidedStep) -> None:
        self._last_until(step.start_ns)
        super().take(step)
        self._most_computed = max(self._most_computed, self.held.get(self._life.request_id, 0))

    def note(self, step: DecidedStep) -> None:
        life = self._life
        is_over = life.finish_ns is not None and life.finish_ns <= step.start_ns
        if life.queued_ns <= step.plan_ns and not is_over:
            if not self._stretches and life.queued_ns < step.start_ns:
                early = Stretch(step.step, step.step, life.queued_ns, step.start_ns, "waiting", IN_FLIGHT, num_steps=0)
                self._stretches.append(early)
            self._note(step)

    def close(self) -> None:
        life, horizon = self._life, max([self._end_ns, *(ns for ns, _ in self._ends)])
        self._last_until(horizon)
        super().close()
        if not self._stretches:
            end_ns = max(horizon if life.finish_ns is None else life.finish_ns, life.queued_ns)
            self._stretches.append(Stretch(-1, -1, life.queued_ns, end_ns, "waiting", IN_FLIGHT))

    def head(self, name: str, index: int) -> None:
        if index in self._numbers:
            self._numbers[index].ahead = (name,)

    def stretches(self) -> list[Stretch]:
        """The stretches in order of time, without gaps; consecutive ones with the same state and cause are merged."""
        merged: list[Stretch] = []
        own = (self._life.request_id,)
        for one in self._stretches:
            before = merged[-1] if merged else None
            alike = before is not None and (before.state, before.cause) == (one.state, one.cause)
            if before is not None and alike and (before.ahead == own) == (one.ahead == own):
                before.extend(one)
            elif one.end_ns > one.start_ns:
                merged.append(one)
        return merged

    def _last_until(self, now_ns: int) -> None:
        if self._stretches and self._stretches[-1].end_ns < 0:
            last, finish_ns = self._stretches[-1], self._life.finish_ns
            last.end_ns = now_ns if finish_ns is None else min(now_ns, finish_ns)
            if last.num_other_prefill_tokens:
                last.slowed_ns, last.num_slowed = last.end_ns - last.start_ns, 1

    def _note(self, step: DecidedStep) -> None:
        name = self._life.request_id
        state, cause = self._state(step)
        num_tokens = step.scheduled.get(name, 0)
        others = step.num_prefill_tokens - (num_tokens if state in ("prefill", "recompute") else 0)
        one = Stretch(
            step.step, step.step, step.start_ns, -1, state, cause, num_tokens=num_tokens,
            num_wanted=max(self._life.num_prompt_tokens, self._most_computed + 1),
            least_free_blocks=step.free_blocks, most_free_blocks=step.free_blocks, num_other_prefill_tokens=others,
        )  # fmt: skip
        if state in ("waiting", "swapped", "stalled"):
            holders = nlargest(NUM_NAMED, ((num, who) for who, num in self.held.items() if who != name))
            one.holders = tuple((who, math.ceil(num / self._block_size)) for num, who in holders if num)
            takers = nlargest(NUM_NAMED, ((num, who) for who, num in step.scheduled.items() if num > 1))
            one.takers = tuple((who, num) for num, who in takers)
        if state == "waiting" and cause != NEVER_FITS:  # what it waits for then is its own end, whoever was the head
            self._numbers[self.index] = one
        self._stretches.append(one)

    def _state(self, step: DecidedStep) -> tuple[str, str]:
        name = self._life.request_id
        if (wait := self.waits.get(name)) is not None:
            return "swapped" if wait.kind == "swap" else "waiting", wait.label or self.cause
        if name not in step.scheduled:
            return "stalled", "prefills" if step.num_prefill_tokens else "not_scheduled"
        former = self.last.get(name)
        if former is not None and former.cost_ns and former.caught_up_ns in (None, step.end_ns):
            return "recompute", ""
        return "prefill" if self._most_computed < self._life.num_prompt_tokens else "decode", ""
