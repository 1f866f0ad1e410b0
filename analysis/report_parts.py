"""What a report is made of, and what is gathered while it is built."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from analysis import style
from analysis.arms import Arm, Pair
from analysis.compare import Comparison
from analysis.first_screen import Compared
from analysis.load import relative
from analysis.metrics import SLO

DEFAULT_MARGIN = 0.02
_MAX_SVG_BYTES = 400_000


@dataclass(frozen=True)
class ReportInput:
    """What a report is made of. `arms` may span seeds and loads; `commands` default to those in the manifests."""

    arms: Sequence[Arm]
    pairs: Sequence[Pair] = ()
    title: str = "Ablation report"
    question: str = ""
    baseline: str | None = None  # an arm's name; the first arm by default
    slo: SLO | Mapping[str, float | None] | None = None
    margin: float = DEFAULT_MARGIN  # relative change that counts as none
    replicated: Sequence[str] = ()  # keys of the trace whose values are replicates and no loads
    commands: Sequence[str] = ()
    command: str = ""  # that made the report
    notes: Sequence[str] = ()  # limits that only the author knows
    cautions: Sequence[str] = ()  # what a reader must know first
    incomplete: Sequence[tuple[Path, str]] = ()  # folders left out, and why


class Plot(NamedTuple):
    title: str
    caption: str
    data_uri: str
    file: str  # the PNG, relative to the report


@dataclass
class Sections:
    """What is gathered while a report is built."""

    out: Path
    findings: list[str] = field(default_factory=list)
    ablation: list[Any] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be compared

    def plot(self, figure: Any, name: str, title: str, caption: str) -> Plot:
        png, svg = style.save(figure, self.out.with_name(f"{self.out.stem}_files") / name)
        small = svg.stat().st_size <= _MAX_SVG_BYTES
        kind, data = ("svg+xml", svg.read_bytes()) if small else ("png", png.read_bytes())
        uri = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        return Plot(title, caption, uri, relative(png, self.out.parent))
