"""Whether an SLO is kept at a load: the counts of a run, the verdict on them, and over replicates where it is lost.

Attainment is the share of the requests sent that keep every limit (`analysis.measures.slo`). A load is overloaded
if its queue grows, by LIKELY of `analysis.measures.steadiness`. It is also overloaded if fewer than half of the
requests (or of the sessions, if sessions arrive at a rate) are done when nearly all have arrived, as nothing shows then
that the engine keeps up. In an overload latencies depend on the length of the trace: the load fails whatever its
attainment.

The requests of a run queue behind each other. So an interval of the highest rate that keeps the SLO, or of its change
from one policy to another, is over replicates (seeds), and paired by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from analysis.measures.metrics import latency
from analysis.measures.rates import is_within, rated_until_ns
from analysis.measures.slo import SLO, meets_slo
from analysis.measures.statistics import Estimate, mean_t, wilson
from analysis.measures.steadiness import LIKELY, Customers, Waiting, waiting_of
from analysis.measures.turns import turns_of
from analysis.reading.request_columns import RequestColumns, Requests
from analysis.reading.rows import FloatArray


@dataclass(frozen=True, slots=True)
class Load:
    """The counts of one run, or of several at one rate. over: requests that exceed each limit, and unfinished ones.

    If the run was stopped early, num_requests still counts all requests of its trace; num_failed and over are counts up
    to the stop.
    """

    is_whole: bool
    num_requests: int
    num_failed: int
    over: dict[str, int]
    waiting: Waiting = field(default_factory=Waiting)  # requests never scheduled yet; for several runs the sums
    duration_s: float = 0.0  # that goodput is over (`analysis.measures.rates`)
    num_good: int = 0  # requests that ended in that time and kept the SLO
    num_completed: int = 0
    num_customers: int = 0  # what arrives at a rate: requests, or sessions with all their turns
    num_done: int = 0  # customers that had ended when all but the last twentieth had arrived
    arriving_s: float = 0.0  # from the first customer's arrival to the last one's
    stay_s: float | None = None  # mean time from arrival to end, of the customers that ended
    num_later: int = 0  # turns of sessions after another
    num_early: int = 0  # those that arrived before the turn before had ended
    mean_s: Mapping[str, float | None] | None = None  # mean of each latency that the SLO limits, and of E2E

    @property
    def num_met(self) -> int:
        return self.num_requests - self.num_failed

    @property
    def attainment(self) -> float:
        """The share that kept the SLO; an upper bound if the run was stopped early."""
        return self.num_met / self.num_requests if self.num_requests else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the attainment. Too narrow, as it takes requests as independent."""
        return wilson(self.num_met, self.num_requests) if self.num_requests else (0.0, 1.0)

    @property
    def goodput_per_s(self) -> float | None:
        return self.num_good / self.duration_s if self.is_whole and self.duration_s > 0 else None

    @property
    def overload(self) -> str | None:
        """The sign of an overload: "queue" if the queue grows, "undone" if too few are done when nearly all have
        arrived; None if there is no sign."""
        if not self.waiting.num:
            return None
        if self.waiting.grew(self.num_requests, LIKELY):
            return "queue"
        return "undone" if self.num_done < self.num_customers / 2 else None

    def keeps(self, share: float) -> bool | None:
        """Whether the SLO is kept, with `share` as the required attainment; None: stopped before that was certain."""
        if self.attainment < share:
            return False
        return self.overload is None if self.is_whole else None

    def first_failed(self, share: float) -> str | None:
        """The limit that most requests exceed; or the `overload`, if the required `share` of requests keeps the SLO
        nevertheless."""
        if self.attainment >= share or not any(self.over.values()):
            return self.overload
        return max(self.over, key=lambda name: self.over[name])

    def as_row(self) -> dict[str, Any]:
        """A flat row: the counts and the values computed from them."""
        row = asdict(self)
        over, mean_s, waiting = row.pop("over"), row.pop("mean_s") or {}, row.pop("waiting")
        known = {"num_met": self.num_met, "attainment": self.attainment} if self.is_whole else {}
        row |= {"num_met": None, "attainment": None, "goodput_per_s": self.goodput_per_s} | known
        row |= {f"over_{name}": count for name, count in over.items()}
        row |= {f"mean_{name}": value for name, value in mean_s.items()}
        return row | dict(zip(("waiting_q2", "waiting_q3", "waiting_q4"), waiting.num, strict=False))


def max_failed(num_requests: int, share: float) -> int:
    """The largest number of requests that may fail if the required attainment is `share`."""
    num = int(num_requests * (1 - share)) + 1
    while num > 0 and (num_requests - num) / num_requests < share:
        num -= 1
    return num


def count_load(requests: Any, slo: SLO, end_ns: int, *, by_session: bool = False) -> Load:
    """The counts of a complete run that ended then, from request records as `analysis.measures.metrics` takes them.
    by_session: the rate is that of sessions, each with all its turns."""
    columns = RequestColumns.of(requests)
    completed = columns.is_completed
    values = {name: latency(columns, name) for name in (*slo.limited, "e2e_s")}
    over = {name: int((values[name] > slo.limits_of(columns, name)).sum()) for name in slo.limited}
    begin, end = columns.numbers("arrival_ns"), columns.numbers("finish_ns")
    if by_session:
        spans = list(Customers(Requests.of(requests)).spans())
        begin, end = (np.concatenate([span[i] for span in spans]) for i in range(2))
    stay, is_met = (end - begin)[np.isfinite(end)], meets_slo(columns, slo)
    start_ns = int(columns.whole("arrival_ns").min(initial=end_ns))
    until_ns = rated_until_ns(Requests.of(requests), start_ns, end_ns)
    turns = turns_of(requests)
    return Load(
        is_whole=True,
        num_requests=len(columns),
        num_failed=len(columns) - int(is_met.sum()),
        over=over | {"unfinished": int((~completed).sum())},
        waiting=waiting_of(Requests.of(requests)),
        duration_s=(until_ns - start_ns) / 1e9,
        num_good=int((is_met & is_within(columns, start_ns, until_ns)).sum()),
        num_completed=int(completed.sum()),
        num_customers=len(begin),
        num_done=int((end <= _nearly_all(begin)).sum()),
        arriving_s=float(np.ptp(begin)) / 1e9 if len(begin) else 0.0,
        num_later=turns.num,
        num_early=turns.num_early,
        stay_s=float(stay.mean()) / 1e9 if len(stay) else None,
        mean_s={name: None if np.isnan(value).all() else float(np.nanmean(value)) for name, value in values.items()},
    )


def _nearly_all(begin: FloatArray) -> float:
    """The instant by which all but a twentieth have arrived, or all if those came at once (`steadiness.Customers`)."""
    if not len(begin):
        return 0.0
    nearly = float(np.quantile(begin, 0.95))
    return nearly if nearly > begin.min() else float(begin.max())


def pooled(loads: Sequence[Load]) -> Load:
    names = list(dict.fromkeys(name for load in loads for name in load.over))
    whole = [load for load in loads if load.is_whole]
    queues = [load.waiting for load in whole if load.waiting.num]
    num, work = ([getattr(queue, name) for queue in queues] for name in ("num", "work"))
    means = [load.mean_s for load in whole if load.mean_s]
    added = (
        "num_requests", "num_failed", "duration_s", "num_good", "num_completed", "num_customers", "num_done",
        "arriving_s", "num_later", "num_early",
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


# --- the rate at which the SLO is lost ---


@dataclass(frozen=True, slots=True)
class Edge:
    """Where one replicate loses its SLO: between the rates `kept` and `failed`, estimated at `read`."""

    kept: float
    failed: float
    read: float

    @classmethod
    def between(cls, kept: float, failed: float, at_kept: Load, at_failed: Load, share: float) -> Edge:
        """`read`: where a line between both attainments, over the logarithm of the rate, crosses `share`. It is the
        middle if that line is unknown, as the failing run was stopped early or fails by its overload alone."""
        part = 0.5
        if at_failed.is_whole and at_failed.attainment < share:
            part = (at_kept.attainment - share) / (at_kept.attainment - at_failed.attainment)
        return cls(kept, failed, kept * (failed / kept) ** part)

    def times(self, factor: float) -> Edge:
        return Edge(self.kept * factor, self.failed * factor, self.read * factor)


def mean_edge(edges: Sequence[Edge], correlation: float = 0.0) -> Estimate:
    """The logarithm of the replicates' geometric mean: of the rates read, with the interval over replicates, widened
    by what the tested rates leave open. correlation: between the replicates."""
    read, kept, failed = np.log([(edge.read, edge.kept, edge.failed) for edge in edges]).T
    return _over_replicates(read, kept, failed, correlation)


def edge_change(base: Sequence[Edge], other: Sequence[Edge], correlation: float = 0.0) -> Estimate:
    """The mean change from `base` to `other`, paired by replicate, on the scale "log_ratio"; widened as `mean_edge`."""
    pairs = list(zip(base, other, strict=True))
    ratios = [(b.read / a.read, b.kept / a.failed, b.failed / a.kept) for a, b in pairs]
    read, lowest, highest = np.log(ratios).T
    return _over_replicates(read, lowest, highest, correlation)


def _over_replicates(read: FloatArray, lowest: FloatArray, highest: FloatArray, correlation: float) -> Estimate:
    found = mean_t(read, "log_ratio", correlation=correlation)
    low, high = float((read - lowest).mean()), float((highest - read).mean())
    return replace(found, low=found.low - low, high=found.high + high)
