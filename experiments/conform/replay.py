"""Feeds one case to a scheduler, a step a virtual second, and finds the first step that it decides otherwise."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from experiments.configuration.compose import compose_config, to_overrides
from experiments.configuration.config import RunConfig
from experiments.conform.cases import SECOND_NS, Case, Decision
from experiments.conform.systems import DecisionReader, System
from experiments.wiring.build import build_scheduler, simulated_pools
from testbed.core.outcome import StepResult
from testbed.core.plan import BatchPlan
from testbed.core.scheduler import Scheduler
from testbed.errors import TestbedError
from testbed.policies.compositions.unified import Unified

CACHE_KEYS = ("block_size", "num_gpu_blocks", "num_cpu_blocks", "prefix_caching", "watermark")  # the others: scheduler


def case_config(preset: str, config: dict[str, Any], options: Mapping[str, Any] | None = None) -> RunConfig:
    """The preset with what the case sets; null leaves the preset's value, and no host pool. options: of vLLM V1's
    composition. Raises ConfigError."""
    given = {key: value for key, value in config.items() if value is not None}
    scheduler = {key.removesuffix("_mode"): value for key, value in given.items() if key not in CACHE_KEYS}
    cache = {"num_cpu_blocks": 0} | {key: value for key, value in given.items() if key in CACHE_KEYS}
    budget, threshold = given.get("max_num_batched_tokens"), scheduler.get("long_prefill_token_threshold", 0)
    if budget is not None and threshold > budget and preset in ("vllm_v1", "vllm_v1_async", "vllm_v1_0_8"):
        scheduler["long_prefill_token_threshold"] = budget  # a larger one never binds there, and is refused here
    if preset == "vllm_v0_chunked":  # logged without the front end, which refuses prompts longer than the model
        scheduler["kv_rules"] = {"length_limit": "chunk"}
    scheduler |= composition_of(options or {})
    settings: dict[str, Any] = {"scheduler": {"name": preset, **scheduler}, "cache": cache}
    if "max_model_len" in given:  # no model is run: its positions are as many as the case needs
        settings["model"] = {"max_position_embeddings": given["max_model_len"]}
    return compose_config(to_overrides(settings))


def composition_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """What a scheduler's configuration says of vLLM V1's composition with these options; none: the preset's own."""
    return {"composition": {"_target_": f"{Unified.__module__}.{Unified.__qualname__}", **options}} if options else {}


class LiveRequest(NamedTuple):
    """How far an unfinished sequence was when the step had been planned or committed. Counts are in tokens."""

    request_id: str
    state: str
    num_computed_tokens: int
    num_tokens: int
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A case that failed.

    num_agreeing: steps before the one that differs; None if the case never began. second: when that one was planned.
    recorded, decided: both sides, None where one has no such step. context: what else our plan says. live: our
    unfinished sequences.
    """

    reason: str
    num_agreeing: int | None = None
    second: int | None = None
    recorded: Decision | None = None
    decided: Decision | None = None
    context: dict[str, Any] = field(default_factory=dict)
    live: list[LiveRequest] = field(default_factory=list)


class Feed:
    """Requests of a case on virtual time: one step a second, idle seconds skipped."""

    def __init__(self, case: Case, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.second = -1  # of the latest plan
        self.num_planned = self.num_committed = 0
        self.arrived: list[str] = []  # added for the latest plan
        self._requests = case.requests
        self._aborts, self._resets = deque(case.aborts), deque(case.resets)
        self._aborted: set[str] = set()
        self._num_arrived = 0

    def next_plan(self) -> BatchPlan | None:
        """The next plan that is not empty; None when nothing can be done and nothing will arrive."""
        self.arrived = []
        self.second += 1
        while True:
            self._arrive()
            self._disturb()
            if self.scheduler.has_work:
                plan = self.scheduler.plan(self.second * SECOND_NS)
                if not plan.is_empty:
                    self.num_planned += 1
                    return plan
            if self._num_arrived == len(self._requests):
                return None
            self.second = self._requests[self._num_arrived].arrival_ns // SECOND_NS

    def commit(self) -> None:
        """The oldest plan in flight. Every output is forced, so there is nothing to say but when the step ended."""
        self._disturb()
        self.num_committed += 1
        end_ns = (self.second + 1) * SECOND_NS
        self.scheduler.commit(StepResult(end_ns), end_ns)

    def _disturb(self) -> None:
        """What was aborted or reset by now. What is gone before the next plan looks at it never arrives."""
        now = self.num_planned, self.num_committed
        while self._aborts and self._aborts[0][:2] <= now:
            request_id = self._aborts.popleft()[2]
            self._aborted.add(request_id)
            self.scheduler.abort(request_id, max(0, self.second) * SECOND_NS)
        while self._resets and self._resets[0] <= now:
            self._resets.popleft()
            self.scheduler.reset_prefixes()

    def _arrive(self) -> None:
        for request in self._requests[self._num_arrived :]:
            if request.arrival_ns > self.second * SECOND_NS:
                return
            self._num_arrived += 1
            if request.request_id not in self._aborted:
                self.scheduler.add(request)
                self.arrived.append(request.request_id)


def replay_case(case: Case, system: System, preset: str) -> Mismatch | None:
    """Runs the preset on the case; None if it decides every step as recorded.

    A case that breaks our scheduler fails with the reason in one line: others may still pass.
    """
    try:
        config = case_config(preset, case.config, system.options if preset == system.preset else None)
        scheduler = build_scheduler(config, simulated_pools(config))
    except TestbedError as error:
        return Mismatch(str(error))
    reader = DecisionReader(system, scheduler, prefix_caching=config.cache.prefix_caching)
    comparison = _Comparison(case, Feed(case, scheduler), reader)
    try:
        return comparison.run()
    except Exception as error:  # noqa: BLE001  a bug is this case's result, not the end of the other cases
        return comparison.mismatch(_describe(error), comparison.recorded, None)


class _Comparison:
    """One case on its way through our scheduler."""

    def __init__(self, case: Case, feed: Feed, reader: DecisionReader) -> None:
        self.recorded: Decision | None = None
        self._case = case
        self._feed = feed
        self._reader = reader
        self._num_agreeing = 0
        self._plan: BatchPlan | None = None
        self._in_flight: deque[tuple[Decision, Decision]] = deque()  # planned alike so far: recorded, decided

    def run(self) -> Mismatch | None:
        for number, recorded in enumerate(self._case.steps):
            if found := self._commit_until(recorded.get("committed", number)) or self._step(recorded):
                return found
        if found := self._commit_until(len(self._case.steps)):
            return found
        self.recorded = None
        self._plan = self._feed.next_plan()
        if self._plan is not None:
            decided = self._reader.after_plan(self._feed.second, self._plan)
            return self.mismatch("the log has ended, our scheduler goes on", None, decided)
        if self._feed.scheduler.has_work:
            return self.mismatch("the log has ended, our scheduler has requests that it can never run", None, None)
        return None

    def _commit_until(self, num_steps: int) -> Mismatch | None:
        """Commits until so many steps are committed, or all that are planned."""
        while self._in_flight and self._num_agreeing < num_steps:
            self.recorded, decided = self._in_flight.popleft()
            self._feed.commit()
            decided |= self._reader.after_commit()
            if differing := differing_fields(self.recorded, decided):
                return self.mismatch(f"differing after the commit: {', '.join(differing)}", self.recorded, decided)
            self._num_agreeing += 1
        return None

    def _step(self, recorded: Decision) -> Mismatch | None:
        self.recorded = recorded
        self._plan = plan = self._feed.next_plan()
        if plan is None:
            what = "can do nothing with what is left" if self._feed.scheduler.has_work else "has finished everything"
            return self.mismatch(f"the log goes on, our scheduler {what}", recorded, None)
        decided = self._reader.after_plan(self._feed.second, plan)
        if differing := differing_fields(recorded, decided):
            return self.mismatch(f"differing after the plan: {', '.join(differing)}", recorded, decided)
        self._in_flight.append((recorded, decided))
        return None

    def mismatch(self, reason: str, recorded: Decision | None, decided: Decision | None) -> Mismatch:
        live = [
            LiveRequest(seq.request.request_id, seq.state.name.lower(), seq.num_computed_tokens, seq.num_tokens,
                        seq.num_prompt_tokens)
            for seq in self._feed.scheduler.unfinished()
        ]  # fmt: skip
        return Mismatch(reason, self._num_agreeing, self._feed.second, recorded, decided, self._context(), live)

    def _context(self) -> dict[str, Any]:
        """What our plan says beside the compared fields."""
        arrived, plan = {"arrived": self._feed.arrived}, self._plan
        if plan is None:
            return arrived
        return arrived | {
            "admitted": {
                item.request_id: {"cached": item.num_cached_tokens, "resumed": item.is_resumed}
                for item in plan.admitted
            },
            "swapped_in": list(plan.swapped_in),
            "ignored": {item.request_id: item.reason for item in plan.ignored},
            "blocked_by": plan.blocked_by,
        }


def differing_fields(recorded: Decision, decided: Decision) -> list[str]:
    """Fields that both sides have and that differ. What was scheduled is compared in order."""
    both = [key for key in recorded if key in decided]
    is_other_order = list(recorded.get("scheduled", ())) != list(decided.get("scheduled", ()))
    return [key for key in both if recorded[key] != decided[key] or (key == "scheduled" and is_other_order)]


def _describe(error: Exception) -> str:
    """An exception of our scheduler in one line: what, and where it was raised."""
    message = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}{': ' if message else ''}{message}{where}"
