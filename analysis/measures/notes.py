"""Notes on the numbers of runs, and how those of many runs are told: one of each kind, the worst.

Knows the notes of a manifest and how bad each is, but not who prints it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

BUSY = "BUSY MACHINE"
_SIZES = {  # of notes in a manifest, by the words before their colon: (section, part, whole), as in the manifest
    "EXTRAPOLATED STEP TIMES": (None, "num_extrapolated_steps", "num_steps"),
    "REPLAY LAG": ("replay", "num_late", "num_arrivals"),
    BUSY: ("host", "core_wait_share", None),
}
_UNLIKE = 0.1  # how far from trace.rate, relatively, the rate may be at which requests came


class Note(NamedTuple):
    """A note. kind: equal for notes that say the same with other numbers. size: the larger, the worse; None: not
    known."""

    text: str
    kind: str
    size: float | None = None

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of_text(cls, text: str) -> Note:
        """A note of which only the sentence is known: its kind is the sentence without its numbers, except in names."""
        return cls(text, re.sub(r"(?<![\w.])\d[\d.,]*(?![\w])", "…", text))


class Told(NamedTuple):
    """A note of one kind, for all `num`. where: the run that made it. rank: why this one stands for them: "worst",
    "first" if no sizes are known, "" if all have the same text."""

    note: Note
    where: str
    num: int
    rank: str


def told(notes: Iterable[tuple[str, Note]]) -> list[Told]:
    """One note of each kind, in the order of first occurrence. notes: (the run that made it, the note)."""
    kinds: dict[str, list[tuple[str, Note]]] = {}
    for where, note in notes:
        kinds.setdefault(note.kind, []).append((where, note))
    found = []
    for those in kinds.values():
        where, note = max(those, key=lambda one: one[1].size or 0.0)  # of equals the first
        rank = "" if len({text for _, (text, *_) in those}) == 1 else "first" if note.size is None else "worst"
        found.append(Told(note, where, len(those), rank))
    return found


def price_notes(manifest: Mapping[str, Any]) -> list[Note]:
    """The notes on a run's simulated step times, of which some are outside of a profile, filled in or never compared,
    and on a KV pool that the GPU could not hold."""
    return [_in_manifest(text, manifest) for text in manifest.get("cost_notes") or ()]


def replay_notes(manifest: Mapping[str, Any]) -> list[Note]:
    """The notes on a run's measured times: the machine did not keep up, or was busy."""
    return [_in_manifest(text, manifest) for text in (manifest.get("replay") or {}).get("notes") or ()]


def doubts_of(manifest: Mapping[str, Any]) -> list[Note]:
    return price_notes(manifest) + replay_notes(manifest)


def rate_notes(trace: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """A note if a generated trace of single requests is too short for the mean rate of bursts or of a day. trace: its
    settings."""
    unchanged = {"name": "synthetic", "max_turns": 1, "tenants": [], "transforms": [], "limit": None, "start_s": 0.0}
    unchanged |= {"end_s": None, "rate_scale": 1.0}
    is_plain = all(trace.get(key) == value for key, value in unchanged.items()) and not trace["agent"]["max_calls"]
    offered = summary["throughput"]["offered_per_s"]
    if not is_plain or offered is None or trace["arrival"] not in ("gamma", "mmpp", "diurnal"):
        return []
    if abs(offered / trace["rate"] - 1) <= _UNLIKE:
        return []
    return [
        f"{offered:.4g} requests a second came: trace.rate={trace['rate']:g} is the mean of trace.arrival="
        f"{trace['arrival']} over all time, for which this trace is too short"
    ]


def _in_manifest(text: str, manifest: Mapping[str, Any]) -> Note:
    kind = text.partition(":")[0]
    if kind not in _SIZES:
        return Note(text, kind)
    section, part, whole = _SIZES[kind]
    numbers = manifest if section is None else manifest.get(section) or {}
    size = numbers.get(part)
    return Note(text, kind, size if whole is None or not size else size / numbers[whole])
