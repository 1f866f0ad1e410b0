"""The transformation that labels requests with classes: their tenant, priority and deadline."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from testbed.checks import require
from testbed.errors import ConfigError
from testbed.foreign_text import shown
from testbed.traces.classes import check_class, relative_shares
from testbed.traces.generator_config import overlaid
from testbed.traces.schema import TraceRequest
from testbed.traces.synthesis import content_key
from testbed.traces.transforms.common import S, derived
from testbed.traces.transforms.units import units_of

_KEYS = "{tenant: <text>, share: <number>, priority: <whole number>, deadline_s: <number>}, each optional"


@dataclass(frozen=True, slots=True)
class ClassConfig:
    """A class of requests. What it does not give stays as it is in the trace."""

    tenant: str | None = None
    share: float = 1.0  # of the sessions, relative to the other classes'
    priority: int | None = None  # the lowest is the most urgent
    deadline_s: float | None = None  # after each arrival


def label(trace: S, classes: Sequence[Mapping[str, Any]], seed: int = 0) -> S:
    """Puts each session, conversation, or request outside of them into one of the `classes`, by a hash of its name.

    A class has the keys of ClassConfig. Classes are ranges of the hash, in their order: other shares move what lies
    between the old and the new bounds. The run's seed is not taken for `seed`: the same requests with other labels are
    no replicate.
    """
    require("classes", classes, len(classes) > 0, f"a list of at least one {_KEYS}")
    checked = [_class_of(entry, f"classes[{position}]") for position, entry in enumerate(classes)]
    shares = relative_shares("classes", [item.share for item in checked])
    bounds = [int(share * 2**64) for share in accumulate(shares[:-1])]
    labels = [_labels(item) for item in checked]
    num_labelled = [0] * len(labels)

    def rows() -> Iterator[TraceRequest]:
        unit_of = units_of(trace)
        num_labelled[:] = [0] * len(labels)
        for row in trace:
            number = bisect_right(bounds, content_key("label", seed, *unit_of(row)))
            num_labelled[number] += 1
            yield row._replace(**labels[number])

    told = [[f"{key} {value}" for key, value in entry.items() if value is not None] for entry in classes]
    given = "; ".join(", ".join(words) or "as it is" for words in told)
    note = f"sessions put into classes ({given}) with seed {seed}"
    return derived(
        trace,
        rows,
        note,
        counted=lambda _: f"{note}: {', '.join(f'{num:,}' for num in num_labelled)} requests",
        num_requests=trace.num_requests,
    )


def _class_of(entry: object, where: str) -> ClassConfig:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is {shown(entry)}; it must be {_KEYS}")
    found: ClassConfig = overlaid(ClassConfig(), entry, where)
    require(f"{where}.tenant", found.tenant, found.tenant is None or found.tenant.strip() != "", "not empty, or absent")
    check_class(f"{where}.", found.priority, found.deadline_s)
    return found


def _labels(item: ClassConfig) -> dict[str, Any]:
    """Returns the fields of a row that a class replaces."""
    deadline_ns = None if item.deadline_s is None else round(item.deadline_s * 1e9)
    fields = {"tenant": item.tenant, "priority": item.priority, "deadline_ns": deadline_ns}
    return {name: value for name, value in fields.items() if value is not None}
