"""Limits that changes must keep, as 'ttft_s.mean>5%': they are read off the comparisons of a report's tables."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from analysis import format as fmt
from analysis.comparison.compare import Comparison
from analysis.comparison.effects import Compared
from analysis.comparison.wording import has_bounds, interval_text
from testbed.errors import ConfigError, RunFolderError, TestbedError
from testbed.foreign_text import nearest, visible

_MAX_NAMED = 3  # arms
_GATE = re.compile(r"\s*(.+?)\s*([<>])\s*([-+]?\d+(?:\.\d*)?)\s*(%|points?)\s*")


class GateError(TestbedError):
    """Changes are beyond a limit, though the report is written. The message has a line for each."""

    exit_status = 3


class Gate(NamedTuple):
    """The changes of a metric that fail. key: its path in the summary. bound: in percent of the baseline's value, or of
    a share in points."""

    text: str
    key: str
    is_above: bool
    bound: float
    is_of_share: bool

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Raises ConfigError if the text is no limit."""
        if (found := _GATE.fullmatch(text)) is None:
            raise ConfigError(
                f"--fail-if {visible(text)!r}: expected in quotes a key of the summary, > or <, and a change in "
                "percent, or in points of a share, as 'ttft_s.mean>5%', or 'slo.attainment<-2points'"
            )
        key, sign, bound, unit = found.groups()
        return cls(text, key, sign == ">", float(bound), unit != "%")

    def fails(self, row: Comparison) -> bool | None:
        """Whether the whole interval of the change lies beyond the limit; None without one in the limit's unit."""
        if (ends := _ends(row)) is None or row.metric.is_share != self.is_of_share:
            return None
        is_beyond = ends[0] > self.bound if self.is_above else ends[1] < self.bound
        return is_beyond and row.verdict != "inside the engine's noise"


def _ends(row: Comparison) -> tuple[float, float] | None:
    """The interval of a change in percent, or of a share in points; None without one. An arm with a value of 0, which
    none can be below, is at -100 %."""
    estimate, base = row.estimate, row.base
    if estimate is None or base is None:
        return None
    if row.verdict == "identical":
        return 0.0, 0.0
    if row.value == 0 and not row.metric.is_share:
        return -100.0, -100.0
    if not has_bounds(row):
        return None
    if estimate.scale == "log_ratio":
        return estimate.percent()[1:]
    unit = 1.0 if row.metric.is_share else base
    low, high = (100 * end / unit if unit else math.copysign(math.inf, end) for end in (estimate.low, estimate.high))
    return low, high


class _Row(NamedTuple):
    """An arm's change from the baseline, over all requests or in a class ("": all)."""

    group: Compared
    of_class: str
    change: Comparison

    def __str__(self) -> str:
        where = f" at {self.group.load}" * bool(self.group.load) + f" for {self.of_class}" * bool(self.of_class)
        against = f"{self.change.arm} against {self.group.arms[0].name}{where}"
        return f"{against}: {self.change.metric.label} {interval_text(self.change)}"


def check(
    gates: Sequence[Gate], groups: Sequence[Compared], arms: Sequence[str], page: Path, *, num_left_out: int = 0
) -> None:
    """Raises GateError if a change is beyond a limit; else RunFolderError if a limit cannot be judged of an arm, or of
    runs that failed. arms: the names of all. page: the report. num_left_out: runs that failed or did not end."""
    rows = [
        _Row(group, name, row)
        for group in groups for name, those in {"": group.rows, **group.classes}.items() for row in those
    ]  # fmt: skip
    failed, unjudged = [], []
    for gate in gates:
        of_key = [row for row in rows if row.change.metric.path == gate.key]
        failed += [f"{page}: {row}, beyond {gate.text!r}" for row in of_key if gate.fails(row.change)]
        if why := _unjudged(gate, of_key, rows, arms):
            unjudged.append(f"{page}: {gate.text!r} cannot be judged{why}")
    if gates and num_left_out:
        unjudged.append(f"{page}: {fmt.count(num_left_out, 'run')} failed or did not end, which no limit judges")
    if failed:
        raise GateError("\n".join(failed + unjudged))
    if unjudged:
        raise RunFolderError("\n".join(unjudged))


def _unjudged(gate: Gate, of_key: Sequence[_Row], rows: Sequence[_Row], arms: Sequence[str]) -> str:
    """Why a limit cannot be judged of some arms, or of none; else "". of_key: the changes that it is about."""
    if not rows:
        return ": nothing is compared"
    if not of_key:
        near = nearest(gate.key, dict.fromkeys(row.change.metric.path for row in rows))
        more = "--slo gives it" if gate.key.startswith("slo.") else "--metric adds a key of the summary"
        return f": {visible(gate.key)} is not compared; {near}{more}"
    if (is_share := of_key[0].change.metric.is_share) != gate.is_of_share:
        return f": changes of {gate.key} are in {'points' if is_share else 'percent'}"
    bases = {row.group.arms[0].name for row in rows}
    lacking = [arm for arm in arms if arm not in bases and all(row.change.arm != arm for row in of_key)]
    lacking += [row.change.arm for row in of_key if gate.fails(row.change) is None]
    names = fmt.names(list(dict.fromkeys(lacking)), _MAX_NAMED)
    return f" of {names}: not comparable, or no interval, which more replicates (seeds) give" if names else ""
