"""The interface of the serving loop: events, commands to a driver and its answers, recorders and what they see."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from mypy_extensions import mypyc_attr

from testbed.core.outcome import Finished, Spans, StepResult
from testbed.core.plan import BatchPlan
from testbed.core.request import Request
from testbed.core.sequence import Sequence
from testbed.core.value import Value

# --- events ---


class Arrive(NamedTuple):
    request: Request


class Abort(NamedTuple):
    request_id: str


class ResetPrefixes(NamedTuple):
    """Discards all KV computed so far, for example after a change of weights or between two measurements."""


Event = Arrive | Abort | ResetPrefixes


# --- commands ---


@mypyc_attr(free_list_len=1)
class WaitUntil(Value):
    """The loop has nothing to do before `until_ns`; None: it waits until its inbox receives an event.

    With an open inbox the loop also waits after each Execute, until that same instant, for events that arrive then.
    is_stuck: in a livelock (`Thrash`), which only a new event can end.
    """

    FIELDS: ClassVar = ("until_ns", "is_stuck")
    __slots__ = FIELDS

    def __init__(self, until_ns: int | None, is_stuck: bool = False) -> None:
        self.until_ns = until_ns
        self.is_stuck = is_stuck


@mypyc_attr(free_list_len=1)
class Execute(Value):
    """Launch the plan, if there is one, after those in flight; then answer with the result of the oldest in flight.

    is_ahead: answer as soon as the plan is launched, without a result; the next step is planned while it runs.
    """

    FIELDS: ClassVar = ("plan", "is_ahead")
    __slots__ = FIELDS

    def __init__(self, plan: BatchPlan | None, is_ahead: bool = False) -> None:
        self.plan = plan
        self.is_ahead = is_ahead


@mypyc_attr(free_list_len=1)
class Resume(Value):
    """The driver's answer to a command: the time, and a result if one was requested or a step ended during a wait."""

    FIELDS: ClassVar = ("now_ns", "result")
    __slots__ = FIELDS

    def __init__(self, now_ns: int, result: StepResult | None = None) -> None:
        self.now_ns = now_ns
        self.result = result


# --- recording ---


@mypyc_attr(free_list_len=1)
class StepView(Value):
    """A step as recorders see it: plan, the scheduler's state after it and, once committed, result, digest, emitters.

    digest_bytes: the decision digest, big-endian. emitters: the sequences that emitted, one entry per token, in the
    order scheduled. Counts are those after the plan, before its commit; evictable blocks count as free. looked_ns: when
    the loop first found nothing more to plan while this step was in flight; None: never.
    """

    FIELDS: ClassVar = (
        "plan", "plan_ns", "result", "digest_bytes", "emitters", "num_running", "num_waiting", "num_swapped",
        "free_gpu_blocks", "free_cpu_blocks", "looked_ns",
    )  # fmt: skip
    __slots__ = FIELDS

    def __init__(
        self, plan: BatchPlan, plan_ns: int, result: StepResult, digest_bytes: bytes, emitters: list[Sequence],
        num_running: int, num_waiting: int, num_swapped: int, free_gpu_blocks: int, free_cpu_blocks: int,
        looked_ns: int | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.plan_ns, self.result, self.digest_bytes = plan, plan_ns, result, digest_bytes
        self.emitters, self.num_running, self.num_waiting = emitters, num_running, num_waiting
        self.num_swapped, self.free_gpu_blocks, self.free_cpu_blocks = num_swapped, free_gpu_blocks, free_cpu_blocks
        self.looked_ns = looked_ns

    @property
    def end_ns(self) -> int:
        """When the step ended, in ns; it is committed at this instant."""
        return self.result.end_ns

    @property
    def spans(self) -> Spans:
        return self.result.spans

    @property
    def digest(self) -> int:
        """The decision digest after the step."""
        return int.from_bytes(self.digest_bytes, "big")


@mypyc_attr(allow_interpreted_subclasses=True)
class Recorder:
    """Observes the events and steps of the loop, and changes nothing. This base class ignores all of them.
    Not a Protocol: the loop calls it in every step, and a call through a class is faster in compiled code."""

    def arrived(self, request: Request, now_ns: int, step: int) -> None: ...
    def aborted(self, request_id: str, now_ns: int, step: int) -> None: ...
    def prefixes_reset(self, now_ns: int, step: int) -> None: ...
    def launched(self, step: StepView) -> None: ...
    def committed(self, step: StepView) -> None: ...
    def ended(self, finished: list[Finished], now_ns: int) -> None: ...
