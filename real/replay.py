"""How well a replay kept to the times of its trace, and the host's time in its steps: numbers for a run's manifest.

An arrival during a step is seen at the step's end, by design: that is its boundary wait. Any further delay between its
due time and the step boundary that saw it is lag, an error of the replay: a sleep that was too long, or a process that
got no core. Waiting for a core also makes steps slower, which is not in the lag. Needs no torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from testbed.core.commands import Recorder, StepView
from testbed.core.outcome import Spans
from testbed.core.request import Request

MAX_LAG_NS = 10_000_000  # a replay keeps pace if 99 % of its arrivals lag by less
MAX_CORE_WAIT = 0.2  # above this share, the machine was too busy for the times of a run to be useful
_SCHEDULED = Path("/proc/thread-self/schedstat")  # ns on a core, ns runnable but without a core


class ReplayLag(Recorder):
    """Records lag and boundary wait of every arrival, in 16 bytes each."""

    def __init__(self) -> None:
        self._lag_ns = array("q")
        self._boundary_ns = array("q")
        self._last_commit_ns = 0

    @classmethod
    def of_all(cls, lags: Iterable[ReplayLag]) -> ReplayLag:
        """Returns the arrivals of several engines together."""
        together = cls()
        for one in lags:
            together._lag_ns += one._lag_ns
            together._boundary_ns += one._boundary_ns
        return together

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        due_ns = request.arrival_ns
        free_ns = max(due_ns, self._last_commit_ns)  # the earliest time at which it could be seen
        self._boundary_ns.append(free_ns - due_ns)
        self._lag_ns.append(now_ns - free_ns)

    def committed(self, step: StepView) -> None:
        self.step_ended(step.end_ns)

    def step_ended(self, now_ns: int) -> None:
        self._last_commit_ns = now_ns

    def describe(self) -> dict[str, Any]:
        """Returns numbers for the manifest, in seconds; null without arrivals."""
        return {
            "num_arrivals": len(self._lag_ns),
            "num_late": self._num_late,
            "max_lag_s": MAX_LAG_NS / 1e9,
            "lag_s": _distribution(self._lag_ns),
            "boundary_wait_s": _distribution(self._boundary_ns),
        }

    @property
    def _num_late(self) -> int:
        return sum(1 for lag_ns in self._lag_ns if lag_ns > MAX_LAG_NS)

    def notes(self) -> list[str]:
        """Returns one line if more than 1 % of the arrivals were late, else none."""
        if 100 * self._num_late <= len(self._lag_ns):
            return []
        worst_ns = max(self._lag_ns)
        return [
            f"REPLAY LAG: {self._num_late:,} of {len(self._lag_ns):,} arrivals were seen more than "
            f"{MAX_LAG_NS / 1e6:.0f} ms after they were due although no step ran (at most "
            f"{worst_ns / 1e6:.1f} ms): this machine did not keep pace; replay on an idle one"
        ]


class HostTimes:
    """Sums the host's times over the steps of a run, whether or not the device computes meanwhile."""

    PARTS = ("schedule_s", "prepare_s", "launch_s", "exposed_s", "step_s")

    def __init__(self) -> None:
        self._num_steps = 0
        self._sums_ns = dict.fromkeys(self.PARTS, 0)

    def stepped(self, launch_ns: int, length_ns: int, spans: Spans) -> None:
        """launch_ns: from the end of preparing until the backend returned. length_ns: as in `StepLog`."""
        self._num_steps += 1
        exposed_ns = max(0, length_ns - spans.swap_ns - spans.forward_ns - spans.sample_ns)
        parts = spans.schedule_ns, spans.prepare_ns, launch_ns, exposed_ns, length_ns
        for name, ns in zip(self.PARTS, parts, strict=True):
            self._sums_ns[name] += ns

    def describe(self) -> dict[str, Any]:
        """Returns for the manifest the mean seconds per step, and the share of the steps' time in which the device did
        not work on them. Numbers are null without steps."""
        num, sums = self._num_steps, self._sums_ns
        return {
            "num_steps": num,
            **{name: ns / num / 1e9 if num else None for name, ns in sums.items()},
            "exposed_share": sums["exposed_s"] / sums["step_s"] if sums["step_s"] else None,
        }


class CoreWait:
    """How long the thread that created it was runnable but had no core, as counted by Linux."""

    def __init__(self) -> None:
        self._before = _scheduled_ns()

    def share(self) -> float | None:
        """Returns the share of its runnable time since then in which it had no core; None if it is not counted."""
        after = _scheduled_ns()
        if self._before is None or after is None:
            return None
        ran_ns, waited_ns = after[0] - self._before[0], after[1] - self._before[1]
        return waited_ns / (ran_ns + waited_ns) if ran_ns + waited_ns else None


def core_wait_notes(share: float | None) -> list[str]:
    """Returns one line if a run waited long for cores, else none."""
    if share is None or share <= MAX_CORE_WAIT:
        return []
    return [
        f"BUSY MACHINE: for {100 * share:.0f} % of the time in which it could have run, this run waited for a core; "
        "its times are longer than on an idle machine: run it on one before comparing it"
    ]


def _scheduled_ns() -> tuple[int, int] | None:
    try:
        ran, waited, _ = _SCHEDULED.read_text().split()
    except (OSError, ValueError):
        return None
    return int(ran), int(waited)


def _distribution(values_ns: Sequence[int]) -> dict[str, float | None]:
    """Returns mean, P99 (the smallest value that 99 % do not exceed) and maximum, in seconds."""
    if not values_ns:
        return {"mean": None, "p99": None, "max": None}
    ordered = sorted(values_ns)
    p99 = ordered[-(-99 * len(ordered) // 100) - 1]
    return {"mean": sum(ordered) / len(ordered) / 1e9, "p99": p99 / 1e9, "max": ordered[-1] / 1e9}
