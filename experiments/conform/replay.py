"""Feeds one case to a scheduler, one step per virtual second, and finds the first step with another decision."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.configuration.compose import compose_config, to_overrides
from experiments.configuration.config import RunConfig
from experiments.configuration.own_class import told
from experiments.conform.cases import SECOND_NS, Case, Decision
from experiments.conform.systems import DecisionReader, System
from experiments.wiring.build import build_scheduler, simulated_pools
from testbed.core.outcome import StepResult
from testbed.core.plan import BatchPlan
from testbed.core.scheduler import Scheduler
from testbed.core.sequence import Sequence
from testbed.errors import TestbedError
from testbed.policies.compositions.unified import Unified

CACHE_KEYS = ("block_size", "num_gpu_blocks", "num_cpu_blocks", "prefix_caching", "watermark")  # others: `scheduler`


def case_config(preset: str, config: dict[str, Any], options: Mapping[str, Any] | None = None) -> RunConfig:
    """Returns the preset's configuration with the case's settings. options: of vLLM V1's composition. Raises
    ConfigError."""
    settings = case_settings(preset, config, options)
    if config.get("max_model_len") is not None:  # no model runs: give it as many positions as the case needs
        settings["model"] = {"max_position_embeddings": config["max_model_len"]}
    return compose_config(to_overrides(settings))


def case_settings(preset: str, config: dict[str, Any], options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the settings of scheduler and cache by a case. null keeps the preset's value; without num_cpu_blocks
    there is no host pool."""
    given = {key: value for key, value in config.items() if value is not None}
    scheduler = {key.removesuffix("_mode"): value for key, value in given.items() if key not in CACHE_KEYS}
    cache = {"num_cpu_blocks": 0} | {key: value for key, value in given.items() if key in CACHE_KEYS}
    budget, threshold = given.get("max_num_batched_tokens"), scheduler.get("long_prefill_token_threshold", 0)
    if budget is not None and threshold > budget and preset in ("vllm_v1", "vllm_v1_async", "vllm_v1_0_8"):
        scheduler["long_prefill_token_threshold"] = budget  # a larger one has no effect in vLLM and is an error here
    if preset == "vllm_v0_chunked":  # logged without vLLM's front end, which rejects prompts longer than the model
        scheduler["kv_rules"] = {"length_limit": "chunk"}
    return {"scheduler": {"name": preset, **scheduler, **composition_of(options or {})}, "cache": cache}


def composition_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scheduler keys that select vLLM V1's composition with these options; empty without options."""
    return {"composition": {"_target_": f"{Unified.__module__}.{Unified.__qualname__}", **options}} if options else {}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A case that failed.

    num_agreeing: equal steps; None if the case never began. number: the step that differs; with another one in flight
    there is one more before it. second: the virtual second in which it was planned. recorded, decided: both sides; None
    for a side without this step. context: other fields of our plan. live: our unfinished sequences.
    """

    reason: str
    num_agreeing: int | None = None
    number: int | None = None
    second: int | None = None
    recorded: Decision | None = None
    decided: Decision | None = None
    context: dict[str, Any] = field(default_factory=dict)
    live: list[Sequence] = field(default_factory=list)


class Feed:
    """Feeds a case's requests to a scheduler in virtual time: one step per second, idle seconds skipped."""

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
        """Returns the next plan that is not empty; None if nothing can be scheduled and no request will arrive."""
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
        """Commits the oldest plan in flight. All outputs are forced, so the result is only the end time of the step."""
        self._disturb()
        self.num_committed += 1
        end_ns = (self.second + 1) * SECOND_NS
        self.scheduler.commit(StepResult(end_ns), end_ns)

    def _disturb(self) -> None:
        """Applies the aborts and resets that are due. A request that is aborted before it arrives is never added."""
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
    """Runs the preset on the case; returns None if every decision is as recorded.

    An exception in our scheduler makes this case fail, with the reason in one line; other cases still run.
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
    def __init__(self, case: Case, feed: Feed, reader: DecisionReader) -> None:
        self.recorded: Decision | None = None
        self._case = case
        self._feed = feed
        self._reader = reader
        self._num_agreeing = 0
        self._number = 0  # of the step that is compared
        self._plan: BatchPlan | None = None
        self._in_flight: deque[tuple[Decision, Decision]] = deque()  # equal after the plan: (recorded, decided)

    def run(self) -> Mismatch | None:
        for number, recorded in enumerate(self._case.steps):
            if found := self._commit_until(recorded.get("committed", number)) or self._step(number, recorded):
                return found
        if found := self._commit_until(len(self._case.steps)):
            return found
        self.recorded, self._number = None, len(self._case.steps)
        self._plan = self._feed.next_plan()
        if self._plan is not None:
            decided = self._reader.after_plan(self._feed.second, self._plan)
            return self.mismatch("the log has ended, our scheduler goes on", None, decided)
        if self._feed.scheduler.has_work:
            return self.mismatch("the log has ended, our scheduler has requests that it can never run", None, None)
        return None

    def _commit_until(self, num_steps: int) -> Mismatch | None:
        """Commits until `num_steps` steps are committed, or no plan is in flight."""
        while self._in_flight and self._num_agreeing < num_steps:
            (self.recorded, decided), self._number = self._in_flight.popleft(), self._num_agreeing
            self._feed.commit()
            decided |= self._reader.after_commit()
            if differing := differing_fields(self.recorded, decided):
                return self.mismatch(f"differing after the commit: {', '.join(differing)}", self.recorded, decided)
            self._num_agreeing += 1
        return None

    def _step(self, number: int, recorded: Decision) -> Mismatch | None:
        self.recorded, self._number = recorded, number
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
        live = self._feed.scheduler.unfinished()
        second = self._feed.second if decided is None else decided["step"]
        context = self._context()
        return Mismatch(reason, self._num_agreeing, self._number, second, recorded, decided, context, live)

    def _context(self) -> dict[str, Any]:
        """Returns fields of our plan that are not compared, to show with a mismatch."""
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
    """Returns the fields that both sides have and that differ. The order of `scheduled` matters."""
    both = [key for key in recorded if key in decided]
    is_other_order = list(recorded.get("scheduled", ())) != list(decided.get("scheduled", ()))
    return [key for key in both if recorded[key] != decided[key] or (key == "scheduled" and is_other_order)]


def _describe(error: Exception) -> str:
    """Describes an exception of our scheduler in one line, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{told(error)}{where}"
