"""Whether an SLO is kept at a load: what is counted of a run, pooled over replicates, and the verdict on it.

Attainment is the share of the requests sent that keep every limit (`analysis.measures.metrics`). A load is overloaded
if arrivals outrun the engine (`analysis.measures.steadiness`), or if fewer than half of the requests (of the sessions,
where these come at a rate) are done when nearly all have come: nothing shows that the engine keeps up. Then latencies
tell how long the trace is, and the load counts as failed whatever its attainment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from analysis.measures.metrics import SLO, latency, meets_slo
from analysis.measures.statistics import wilson
from analysis.measures.steadiness import Customers, Waiting, waiting_of
from analysis.reading.request_columns import RequestColumns, Requests
from analysis.reading.rows import FloatArray

LIMITS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_max_s": "longest ITL", "e2e_s": "E2E", "unfinished": "unfinished"}


@dataclass(frozen=True, slots=True)
class Load:
    """What is counted of one run, or of several at one rate. over: requests beyond each limit, and unfinished ones.

    Of a run that was stopped early num_requests are those of its trace, num_failed and over those known until then.
    """

    is_whole: bool
    num_requests: int
    num_failed: int
    over: dict[str, int]
    waiting: Waiting = field(default_factory=Waiting)  # never scheduled yet; of several runs sums
    duration_s: float = 0.0  # to the end of the last step
    num_completed: int = 0
    num_customers: int = 0  # what comes at a rate: requests, or sessions with all their turns
    num_done: int = 0  # of those, when all but the last twentieth had come
    arriving_s: float = 0.0  # from the first of them to the last
    stay_s: float | None = None  # in the mean, of those that ended
    mean_s: Mapping[str, float | None] | None = None  # of each latency that the SLO limits, and of E2E

    @property
    def num_met(self) -> int:
        return self.num_requests - self.num_failed

    @property
    def attainment(self) -> float:
        """Of a run that was stopped: at most."""
        return self.num_met / self.num_requests if self.num_requests else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's, at 95 %."""
        return wilson(self.num_met, self.num_requests) if self.num_requests else (0.0, 1.0)

    @property
    def goodput_per_s(self) -> float | None:
        return self.num_met / self.duration_s if self.is_whole and self.duration_s > 0 else None

    @property
    def overload(self) -> str | None:
        """What shows it: "queue" where that grows, "undone" where too few are done when nearly all have come."""
        if not self.waiting.num:
            return None
        if self.waiting.grew(self.num_requests):
            return "queue"
        return "undone" if self.num_done < self.num_customers / 2 else None

    def keeps(self, share: float) -> bool | None:
        """The verdict, `share` being the attainment that is asked for; None: it was stopped before that was certain."""
        if self.attainment < share:
            return False
        return self.overload is None if self.is_whole else None

    def first_failed(self, share: float) -> str | None:
        """The limit that most requests fail; or the `overload`, though `share` of them, which are asked for, keep the
        SLO."""
        if self.attainment >= share or not any(self.over.values()):
            return self.overload
        return max(self.over, key=lambda name: self.over[name])

    def as_row(self) -> dict[str, Any]:
        """Flat, with what follows from the counts."""
        row = asdict(self)
        over, mean_s, waiting = row.pop("over"), row.pop("mean_s") or {}, row.pop("waiting")
        known = {"num_met": self.num_met, "attainment": self.attainment} if self.is_whole else {}
        row |= {"num_met": None, "attainment": None, "goodput_per_s": self.goodput_per_s} | known
        row |= {f"over_{name}": count for name, count in over.items()}
        row |= {f"mean_{name}": value for name, value in mean_s.items()}
        return row | dict(zip(("waiting_q2", "waiting_q3", "waiting_q4"), waiting.num, strict=False))


def max_failed(num_requests: int, share: float) -> int:
    """The most requests that may fail where `share` of them must not."""
    num = int(num_requests * (1 - share)) + 1
    while num > 0 and (num_requests - num) / num_requests < share:
        num -= 1
    return num


def count_load(requests: Any, slo: SLO, duration_s: float, *, by_session: bool = False) -> Load:
    """Of a whole run's request records, as `analysis.measures.metrics` takes them. by_session: what comes at a
    rate is a session, with all its turns."""
    columns = RequestColumns.of(requests)
    completed = columns.is_completed
    values = {name: latency(columns, name) for name in (*slo.limits, "e2e_s")}
    over = {name: int((values[name] > limit).sum()) for name, limit in slo.limits.items()}
    begin, end = columns.numbers("arrival_ns"), columns.numbers("finish_ns")
    if by_session:
        spans = list(Customers(Requests.of(requests)).spans())
        begin, end = (np.concatenate([span[i] for span in spans]) for i in range(2))
    stay = (end - begin)[np.isfinite(end)]
    return Load(
        is_whole=True,
        num_requests=len(columns),
        num_failed=len(columns) - int(meets_slo(columns, slo).sum()),
        over=over | {"unfinished": int((~completed).sum())},
        waiting=waiting_of(Requests.of(requests)),
        duration_s=duration_s,
        num_completed=int(completed.sum()),
        num_customers=len(begin),
        num_done=int((end <= _nearly_all(begin)).sum()),
        arriving_s=float(np.ptp(begin)) / 1e9 if len(begin) else 0.0,
        stay_s=float(stay.mean()) / 1e9 if len(stay) else None,
        mean_s={name: None if np.isnan(value).all() else float(np.nanmean(value)) for name, value in values.items()},
    )


def _nearly_all(begin: FloatArray) -> float:
    """When all but a twentieth have come; where these came at once, all: as `steadiness.Customers` has it."""
    if not len(begin):
        return 0.0
    nearly = float(np.quantile(begin, 0.95))
    return nearly if nearly > begin.min() else float(begin.max())


def pooled(loads: Sequence[Load]) -> Load:
    """Replicates as one."""
    names = list(dict.fromkeys(name for load in loads for name in load.over))
    whole = [load for load in loads if load.is_whole]
    queues = [load.waiting for load in whole if load.waiting.num]
    num, work = ([getattr(queue, name) for queue in queues] for name in ("num", "work"))
    means = [load.mean_s for load in whole if load.mean_s]
    added = (
        "num_requests", "num_failed", "duration_s", "num_completed", "num_customers", "num_done", "arriving_s"
    )  # fmt: skip
    return Load(
        is_whole=len(whole) == len(loads),
        over={name: sum(load.over.get(name, 0) for load in loads) for name in names},
        waiting=Waiting(_summed(num), _summed(work), max((queue.spread for queue in queues), default=1.0)),
        stay_s=_mean([load.stay_s for load in whole]),
        mean_s={name: _mean([mean[name] for mean in means]) for name in means[0]} if means else None,
        **{name: sum(getattr(load, name) for load in loads) for name in added},
    )


def _summed(parts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(float(sum(part)) for part in zip(*parts, strict=True))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
