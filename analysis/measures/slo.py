"""An SLO: limits on the latencies of a request, for all requests alike or of a class of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis import format as fmt
from analysis.measures.classes import is_of
from analysis.measures.metrics import latency
from analysis.reading.request_columns import RequestColumns
from analysis.reading.rows import BoolArray, FloatArray, IntArray
from testbed.errors import ConfigError

LIMITS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_max_s": "longest ITL", "e2e_s": "E2E", "lateness_s": "lateness"}
_MAY_LACK = ("tpot_s", "itl_max_s", "lateness_s")  # a request of one token, or without a deadline, has none


@dataclass(frozen=True, slots=True)
class SLO:
    """Limits that a request must keep, in seconds; None is no limit. A request must keep all limits that are set.
    lateness_s: how long after its deadline a request may be complete. classes: the requests of a class have its SLO
    instead; those that are of several have the first one's."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_max_s: float | None = None
    e2e_s: float | None = None
    lateness_s: float | None = None
    classes: tuple[ClassSLO, ...] = ()

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set for requests of no class, by name."""
        return {name: limit for name in LIMITS if (limit := getattr(self, name)) is not None}

    @property
    def limited(self) -> list[str]:
        """The names of the limits that are set, for all or for a class."""
        every = (self, *(item.slo for item in self.classes))
        return [name for name in LIMITS if any(name in slo.limits for slo in every)]

    @classmethod
    def parse(cls, value: SLO | Mapping[str, Any] | None) -> SLO | None:
        """An SLO from an SLO or a mapping of its fields; None without any limit. A class is then a mapping too, of its
        `tenant`, `priority` or both, and of the limits in which it differs. Raises TypeError for unknown names."""
        if isinstance(value, Mapping):
            given = {name: limit for name, limit in value.items() if name != "classes"}
            value = cls(**given, classes=tuple(_class_slo(given, one) for one in value.get("classes") or ()))
        return value if value is not None and value.limited else None

    def of(self, tenant: str | None, priority: int) -> SLO:
        """The SLO of a request."""
        return next((item.slo for item in self.classes if item.has(tenant, priority)), self)

    def num_of_each(self, requests: RequestColumns) -> IntArray:
        """How many requests are of each class `[num_classes]`."""
        return np.bincount(self._class_of(requests), minlength=len(self.classes) + 1)[:-1]

    def limits_of(self, requests: RequestColumns, name: str) -> FloatArray:
        """The limit `name` of each request, seconds `[num_requests]`; NaN for none."""
        every = (*(item.slo for item in self.classes), self)
        return np.array([getattr(slo, name) for slo in every], dtype=np.float64)[self._class_of(requests)]

    def _class_of(self, requests: RequestColumns) -> IntArray:
        """The place in `classes` of each request's class, the first that it is of; their number for none."""
        found = np.full(len(requests), len(self.classes))
        for place, item in reversed([*enumerate(self.classes)]):
            found[item.selects(requests)] = place
        return found

    def __str__(self) -> str:
        named = [f"{item.name}: {_text(item.slo)}" for item in self.classes]
        return "; ".join([_text(self), *named] if self.limits or not named else [*named, "others: no limit"])


@dataclass(frozen=True, slots=True)
class ClassSLO:
    """The SLO of the requests of a tenant ("none": of those that name none), of a priority, or of both."""

    tenant: str | None
    priority: int | None
    slo: SLO

    @property
    def name(self) -> str:
        chosen = {"tenant": self.tenant, "priority": self.priority}
        return " ".join(f"{by} {value}" for by, value in chosen.items() if value is not None)

    def has(self, tenant: str | None, priority: int) -> bool:
        """Whether a request is of this class."""
        return self.tenant in (None, tenant or "none") and self.priority in (None, priority)

    def selects(self, requests: RequestColumns) -> BoolArray:
        """Which requests are of this class `[num_requests]`."""
        selected = np.ones(len(requests), dtype=bool)
        for by, value in (("tenant", self.tenant), ("priority", self.priority)):
            if value is not None:
                selected &= is_of(by, str(value))(requests)
        return selected


def _class_slo(given: Mapping[str, float | None], one: Mapping[str, Any]) -> ClassSLO:
    limits = {name: limit for name, limit in one.items() if name not in ("tenant", "priority")}
    return ClassSLO(one.get("tenant"), one.get("priority"), SLO(**{**given, **limits}))


def _text(slo: SLO) -> str:
    return fmt.listing([f"{LIMITS[name]} ≤ {fmt.seconds(limit)}" for name, limit in slo.limits.items()]) or "no limit"


def meets_slo(requests: Any, slo: SLO) -> BoolArray:
    """Which requests keep every limit `[num_requests]`. A request that is not completed does not.

    A limit on TPOT or ITL does not bind a request of one token, which has neither; one on lateness binds only requests
    that have a deadline. Raises ConfigError for a limit on ITL if the tokens' instants were not recorded.
    """
    columns = RequestColumns.of(requests)
    met = columns.is_completed
    for name in slo.limited:
        value, limit = latency(columns, name), slo.limits_of(columns, name)
        has_none, is_free = np.isnan(value), np.isnan(limit)
        if name == "itl_max_s" and (met & has_none & ~is_free & (columns.whole("num_token_steps") > 1)).any():
            raise ConfigError(
                f"slo.itl_max_s is {np.nanmin(limit):g}, and the run has no token times: no gap between tokens is "
                "known; leave it out, or make the run again with record.token_times=true"
            )
        met &= (value <= limit) | is_free | (has_none if name in _MAY_LACK else False)
    return met
