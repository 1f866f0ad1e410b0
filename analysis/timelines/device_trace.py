"""Draws the torch profile of a run's steps (`record.profile`) on the run's clock, next to the steps of a timeline."""

from __future__ import annotations

import gzip
import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.timelines.chrome_trace import ChromeTrace, Track
from testbed.errors import RunFolderError
from testbed.foreign_text import parsed, shortened

SEEN = frozenset(
    ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy", "gpu_memset",
     "gpu_user_annotation")
)  # fmt: skip
MAX_TRACKS = 99


@dataclass(frozen=True, slots=True)
class Seen:
    """An operator, kernel, copy or range. place: its thread or stream. Instants are on the profiler's clock."""

    name: str
    place: str
    start_ns: int
    end_ns: int


def read_profile(file: Path) -> list[Seen]:
    """The events of a profile. Raises RunFolderError for a file that is no profile."""
    try:
        events = parsed(json.loads, gzip.decompress(file.read_bytes()))["traceEvents"]
        names = {
            (event["pid"], event["tid"]): str(event["args"]["name"])
            for event in events
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        return [_seen(event, names) for event in events if event["ph"] == "X" and event.get("cat") in SEEN]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = shortened(f"{type(error).__name__}: {error}")
        raise RunFolderError(f"{file}: not a profile of steps ({reason}); remove the file") from None


def _seen(event: dict[str, Any], names: Mapping[tuple[Any, Any], str]) -> Seen:
    start_ns = round(event["ts"] * 1000)
    where = names.get((event["pid"], event["tid"]), str(event["tid"]))
    is_device = event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
    place = f"GPU {event['pid']}, {where}" if is_device else f"host, {where}"
    return Seen(str(event["name"]), place, start_ns, start_ns + round(event["dur"] * 1000))


def offset_ns(seen: list[Seen], launched_ns: Mapping[int, int]) -> int | None:
    """The offset from the profiler's clock to the run's, ns: the median over steps that both have; None without any.

    launched_ns: step -> when the run launched it.
    """
    found = []
    for one in seen:
        match = re.fullmatch(r"step (\d+)", one.name)
        if match and one.place.startswith("host") and int(match[1]) in launched_ns:
            found.append(launched_ns[int(match[1])] - one.start_ns)
    return round(statistics.median(found)) if found else None


def draw_profile(
    trace: ChromeTrace, pid: int, name: str, seen: list[Seen], shift_ns: int, window_ns: tuple[int, int]
) -> None:
    """Draws one process with a track for each thread and stream. Events that overlap the window are not cut."""
    low_ns, high_ns = window_ns
    tracks: dict[str, Track] = {}
    trace.name_process(pid, name)
    for one in sorted(seen, key=lambda one: (one.start_ns, -one.end_ns)):
        start_ns, end_ns = one.start_ns + shift_ns, one.end_ns + shift_ns
        if start_ns >= high_ns or end_ns < low_ns or start_ns < 0:
            continue
        if one.place not in tracks:
            if len(tracks) == MAX_TRACKS:
                continue
            tracks[one.place] = Track(pid, len(tracks) + 1)
            trace.name_track(tracks[one.place], one.place)
        trace.slice(tracks[one.place], one.name, start_ns, end_ns)
