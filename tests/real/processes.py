"""Which ranks a process has started, and whether they are gone. Linux only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path


def ranks_of(process: int) -> list[int]:
    """Its children that run as ranks; one that has ended and was not waited for is none."""
    listed = Path(f"/proc/{process}/task").glob("*/children")
    return [child for file in listed for child in map(int, file.read_text().split()) if _is_rank(child)]


def _is_rank(process: int) -> bool:
    return is_running(process) and b"real.parallel.worker" in Path(f"/proc/{process}/cmdline").read_bytes()


def is_running(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def assert_gone(processes: Sequence[int], within_s: float = 15.0) -> None:
    deadline = time.monotonic() + within_s
    while left := [process for process in processes if is_running(process)]:
        assert time.monotonic() < deadline, f"processes {left} are still there"
        time.sleep(0.05)
