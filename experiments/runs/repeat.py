"""What `testbed run from=<folder>` says of the run that it repeats: what can be the same again, and what was."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.configuration.config import RunConfig
from testbed.errors import TraceError


@contextmanager
def repeating(source: Path) -> Iterator[None]:
    """Context in which an error of the trace names the run in `source`, which says where the trace was, and the way to
    say where it is."""
    try:
        yield
    except TraceError as error:
        raise TraceError(
            f"{source} cannot be run again: {error}; bring the file back, or say where it is: testbed run "
            f"from={shlex.quote(str(source))} trace.path=…"
        ) from None


def measured_anew(source: Path, before: dict[str, Any], config: RunConfig) -> str:
    """Returns a line if a measured run is executed on an engine again, whose step times no second run has; else "".
    before: its manifest."""
    if config.is_simulated or before.get("backend") == "sim":
        return ""
    return (
        f"measures     {source} again: step times are new, and decisions may differ with them (to repeat the recorded "
        f"ones: testbed parity {source}; to simulate: backend=sim)"
    )


def same_decisions(source: Path, before: dict[str, Any], after: dict[str, Any]) -> str:
    """Returns a line on whether a repetition, of which the trace's file may lie elsewhere, decided as the run in
    `source` did. before, after: their manifests; "" if either is not complete."""
    if not before.get("status") == after["status"] == "complete" or None in (before["digest"], after["digest"]):
        return ""
    if before["digest"] == after["digest"]:
        return f"repeated     {source}: the same decisions, digest {after['digest']}"
    why = "the code or a file has changed" if after["backend"] == "sim" else "other step times"
    if (before.get("trace") or {}).get("fingerprint") != after["trace"]["fingerprint"]:
        why = "its trace is another"
    return f"repeated     {source}: other decisions ({why}), digest {after['digest']} and not {before['digest']}"
