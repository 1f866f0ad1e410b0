"""What the loop is told, and what it says: events, commands to its driver and their answers, the view of a step, and
who is shown it."""

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
    """KV from before is worth nothing any more: the weights are others, or each measurement begins alike."""


Event = Arrive | Abort | ResetPrefixes


# --- commands ---


@mypyc_attr(free_list_len=1)
class WaitUntil(Value):
    """Nothing to do before `until_ns`; None means until the inbox wakes the loop.

    After each commit the loop of an open inbox waits until that very instant: events of others may come with it.
    is_stuck: it goes round in circles, as far as it can tell; only an event would change that.
    """

    FIELDS: ClassVar = ("until_ns", "is_stuck")
    __slots__ = FIELDS

    def __init__(self, until_ns: int | None, is_stuck: bool = False) -> None:
        self.until_ns = until_ns
        self.is_stuck = is_stuck


@mypyc_attr(free_list_len=1)
class Execute(Value):
    """Launch the plan, if there is one, behind those in flight; then answer with the result of the oldest in flight.

    is_ahead: answer once it is launched, without a result: the next step is planned while it runs.
    """

    FIELDS: ClassVar = ("plan", "is_ahead")
    __slots__ = FIELDS

    def __init__(self, plan: BatchPlan | None, is_ahead: bool = False) -> None:
        self.plan = plan
        self.is_ahead = is_ahead


@mypyc_attr(free_list_len=1)
class Resume(Value):
    """The driver's answer to a command: the time, and a result if it waited for one, or one came during a wait."""

    FIELDS: ClassVar = ("now_ns", "result")
    __slots__ = FIELDS

    def __init__(self, now_ns: int, result: StepResult | None = None) -> None:
        self.now_ns = now_ns
        self.result = result


# --- what watches see ---


@mypyc_attr(free_list_len=1)
class StepView(Value):
    """What a recorder is shown of a committed step: decisions from the plan, state after the plan, result after it.
    Made with the plan; its result, digest and emitters come with the commit.

    digest_bytes: after the step, the highest byte first. emitters: the sequences that emitted, once for each token, in
    the order scheduled. free_gpu_blocks: after the plan, before its commit; evictable ones count as free. looked_ns:
    when, with this step in flight, the loop first found nothing more to plan, if it did.
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
        """When it was committed."""
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
    """Sees everything that happens in the loop, and changes nothing. It keeps nothing; a subclass keeps what it says.
    No protocol: the loop tells it of each step, and compiled code calls a class of ours at once."""

    def arrived(self, request: Request, now_ns: int, step: int) -> None: ...
    def aborted(self, request_id: str, now_ns: int, step: int) -> None: ...
    def prefixes_reset(self, now_ns: int, step: int) -> None: ...
    def committed(self, step: StepView) -> None: ...
    def ended(self, finished: list[Finished], now_ns: int) -> None: ...
