"""Chrome's Trace Event Format (Perfetto, chrome://tracing): events are written immediately, and none is kept.

Does not know runs. The format is described in "Trace Event Format" (Google, 2016), as the object with `traceEvents`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO


@dataclass(frozen=True, slots=True)
class Track:
    """A thread of a process. Its tid is unique in the file, as viewers treat equal tids as one thread."""

    pid: int
    number: int  # below 100

    @property
    def place(self) -> str:
        return f'"pid":{self.pid},"tid":{self.pid * 100 + self.number}'


class ChromeTrace:
    """Writes events. Instants and lengths are given in ns; the file has microseconds with three decimals."""

    def __init__(self, file: TextIO, description: Mapping[str, Any]) -> None:
        self.num_events = 0  # events written, without the names of processes and tracks
        self._file = file
        file.write(f'{{"displayTimeUnit":"ms","otherData":{_json(description)},"traceEvents":[')
        self._separator = "\n"

    def close(self) -> None:
        self._file.write("\n]}\n")

    def name_process(self, pid: int, name: str) -> None:
        """Names a process. Processes are shown in the order of their pids."""
        for what, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": pid})):
            self._write(f'"ph":"M","name":"{what}","pid":{pid},"args":{_json(args)}')

    def name_track(self, track: Track, name: str) -> None:
        """Names a track. The tracks of a process are shown in the order of their numbers."""
        for what, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": track.number})):
            self._write(f'"ph":"M","name":"{what}",{track.place},"args":{_json(args)}')

    def slice(self, track: Track, name: str, start_ns: int, end_ns: int, args: Mapping[str, Any] | None = None) -> None:
        """Writes a slice from start to end. The slices of a track must follow each other or be nested."""
        self._event("X", name, track.place, start_ns, f',"dur":{_microseconds(end_ns - start_ns)}', args)

    def instant(self, track: Track, name: str, at_ns: int, args: Mapping[str, Any]) -> None:
        self._event("i", name, track.place, at_ns, ',"s":"t"', args)

    def counter(self, pid: int, name: str, at_ns: int, values: Mapping[str, int]) -> None:
        """Writes the values of the counters of one name; each keeps its value until the next one."""
        self._event("C", name, f'"pid":{pid}', at_ns, "", values)

    def begin(self, pid: int, key: str, name: str, at_ns: int, args: Mapping[str, Any] | None = None) -> None:
        """Starts an asynchronous slice. The slices of one key must be nested."""
        self._asynchronous("b", pid, key, name, at_ns, args)

    def mark(self, pid: int, key: str, name: str, at_ns: int, args: Mapping[str, Any]) -> None:
        """Writes an instant within the asynchronous slices of a key."""
        self._asynchronous("n", pid, key, name, at_ns, args)

    def end(self, pid: int, key: str, name: str, at_ns: int) -> None:
        self._asynchronous("e", pid, key, name, at_ns, None)

    def _asynchronous(
        self, phase: str, pid: int, key: str, name: str, at_ns: int, args: Mapping[str, Any] | None
    ) -> None:
        more = f',"cat":"request","id2":{{"local":{_json(key)}}}'  # local, so shown in its process
        self._event(phase, name, Track(pid, 1).place, at_ns, more, args)

    def _event(self, phase: str, name: str, place: str, at_ns: int, more: str, args: Mapping[str, Any] | None) -> None:
        what = "" if args is None else f',"args":{_json(args)}'
        self._write(f'"ph":"{phase}","name":{_json(name)},{place},"ts":{_microseconds(at_ns)}{more}{what}')
        self.num_events += 1

    def _write(self, fields: str) -> None:
        self._file.write(f"{self._separator}{{{fields}}}")
        self._separator = ",\n"


def _microseconds(ns: int) -> str:
    """Microseconds with three decimals; exact up to 2**53 ns, which is 104 days."""
    return f"{ns / 1000:.3f}"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
