"""What the runs of a study say of it themselves: question, baseline, margin (`report.*`) and SLO (`slo.*`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis.load import Run
from analysis.measures.metrics import SLO
from testbed.errors import RunFolderError


def stated(runs: Sequence[Run], name: str) -> Any:
    """`report.<name>` of those runs that state it; None: of none. RunFolderError where they state several."""
    found: dict[str, Any] = {}
    for run in runs:
        value = run.flat_config.get(f"report.{name}")
        if value not in (None, "", []):
            found.setdefault(repr(value), value)
    if len(found) > 1:
        raise RunFolderError(f"the runs state several report.{name}: {', '.join(found)}; say which with --{name}")
    return next(iter(found.values()), None)


def check_warm_up(runs: Sequence[Run]) -> None:
    """Raises RunFolderError where runs that are compared leave out starts of different lengths, or all of one."""
    found = sorted({float(run.flat_config.get("report.warmup_s") or 0.0) for run in runs})
    again = "give every command of the sweep"
    if len(found) > 1:
        raise RunFolderError(
            f"the runs leave out different starts (report.warmup_s: {', '.join(f'{value:g}' for value in found)}); "
            f"{again} the same: what is done is not run again"
        )
    if empty := [run for run in runs if run.summary.get("num_in_warmup") and not run.summary["num_requests"]]:
        raise RunFolderError(
            f"report.warmup_s={found[0]:g} leaves out all requests of {empty[0].path} ({len(empty)} of {len(runs)} "
            f"runs); {again} a smaller one: what is done is not run again"
        )


def stated_slo(runs: Sequence[Run]) -> SLO | None:
    """The same of the SLO."""
    found = list(dict.fromkeys(run.slo for run in runs if run.slo is not None))
    if len(found) > 1:
        raise RunFolderError(
            f"the runs state {len(found)} different SLOs ({found[0]}, {found[1]}); say which with --slo"
        )
    return found[0] if found else None
