"""Who took what others waited for, and how long the steps were that computed the prompts of some requests.

A step's length is not recorded by request: a request's own part of it is its share of the step's tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from analysis.explain.decisions import DecidedStep
from analysis.explain.waiting import IN_FLIGHT, Engine, Life

BLOCKS = ("kv_blocks",)
BUDGET = ("token_budget", "partial_prefills")


class Holding(Engine):
    """An engine with the computed tokens of every request on the GPU; what holds of a step is noted before it runs."""

    def __init__(self, replica: int, lives: list[Life]) -> None:
        super().__init__(replica, lives)
        self.held: dict[str, int] = {}
        self._away: dict[str, int] = {}  # computed tokens of swapped-out requests

    def take(self, step: DecidedStep) -> None:
        super().take(step)
        self.note(step)
        self._hold(step)

    def note(self, step: DecidedStep) -> None:
        """For subclasses: called for each step, when it is known who waits."""

    def _hold(self, step: DecidedStep) -> None:
        for name, mode in step.victims.items():
            num_tokens = self.held.pop(name, 0)
            if mode == "swap":
                self._away[name] = num_tokens
        for name in step.swapped_in:
            self.held[name] = self._away.pop(name, 0)
        self.held.update(step.admitted)
        for name, num_tokens in step.scheduled.items():
            self.held[name] = self.held.get(name, 0) + num_tokens
        for name in [name for name in self.held if (self._finish_ns.get(name) or step.end_ns + 1) <= step.end_ns]:
            del self.held[name]


class Taker(Holding):
    """An engine with who took what while some requests waited for it.

    asked: arrival (ns) of the requests that count as waiting; slow: those whose prompts are followed, with the instant
    of their first token (ns).
    """

    def __init__(self, replica: int, lives: list[Life], asked: Mapping[str, int], slow: Mapping[str, int]) -> None:
        super().__init__(replica, lives)
        self.taken: dict[str, dict[str, float]] = {}  # cause -> request -> tokens; of blocks: held tokens x ns
        self.own_ns = dict.fromkeys(slow, 0.0)  # its share of the steps up to its first token
        own = {life.request_id for life in lives}
        self._asked, self._slow = asked, slow
        self._coming = deque(sorted(ns for name, ns in asked.items() if name in own))
        self._early: dict[str, None] = {}  # slow requests that run and have no token

    def note(self, step: DecidedStep) -> None:
        if self.cause in BUDGET + BLOCKS and self._is_waiting():
            self._count(self.cause, step)
        while self._coming and self._coming[0] < step.start_ns:
            self._coming.popleft()
        if self._coming and self._coming[0] < step.end_ns:
            self._count(IN_FLIGHT, step)
        self._early |= {name: None for name in step.admitted if self._slow.get(name, 0) > step.start_ns}
        num_tokens = sum(step.scheduled.values()) if self._early else 0
        for name in self._early:
            if num := step.scheduled.get(name, 0):
                self.own_ns[name] += (step.end_ns - step.start_ns) * num / num_tokens
        self._early = {name: None for name in self._early if self._slow[name] > step.end_ns}

    def _is_waiting(self) -> bool:
        return any(name in self._asked and not wait.label for name, wait in self.waits.items())

    def _count(self, cause: str, step: DecidedStep) -> None:
        """Counts who had what others waited for: the step's tokens, or the blocks while it ran."""
        taken, length_ns = self.taken.setdefault(cause, {}), step.end_ns - step.start_ns
        for name, num in (self.held if cause in BLOCKS else step.scheduled).items():
            taken[name] = taken.get(name, 0.0) + (num * length_ns if cause in BLOCKS else num)
