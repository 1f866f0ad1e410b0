"""The tape of a real run: all inputs of the core from outside, so that the same decisions can be replayed.

It has, for each step, the instants passed to `plan` and `commit` and every outcome that was not forced; and every
arrival, abort and reset of the prefix cache, with the step that first saw it. JSON lines, written as the run proceeds:
a killed run leaves a usable tape. The prompts themselves are in the run folder's trace.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from testbed.core.commands import Abort, Arrive, Event, Recorder, ResetPrefixes, StepView
from testbed.core.digest import VERSION as DIGEST_VERSION
from testbed.core.outcome import Finished, FinishReason, Outcome, Spans
from testbed.core.request import Request
from testbed.errors import RunFolderError
from testbed.foreign_text import parsed, shown, whole
from testbed.records.schema import decision
from testbed.traces.schema import MAX_NS

VERSION = 1
RESET_PREFIXES = "reset_prefixes"  # the kind of an event
NUM_FIELDS = 5  # recorded fields of an outcome (and fork_stops, if any); log-probabilities do not affect decisions


def tape_names(num_replicas: int) -> list[str]:
    """Returns the file names of the tapes in a run folder, in the order of its replicas."""
    return ["tape.jsonl"] if num_replicas == 1 else [f"tape-{number}.jsonl" for number in range(num_replicas)]


class TapeStep(NamedTuple):
    """One recorded step. decision: its decisions, in the form of decisions.jsonl. looked_ns: when the loop found
    nothing more to plan while the step was in flight; None: never, or not recorded (older tapes)."""

    plan_ns: int
    commit_ns: int
    outcomes: tuple[Outcome, ...] | None
    spans: Spans
    digest: int
    decision: dict[str, Any]
    looked_ns: int | None = None


class TapeEvent(NamedTuple):
    """An event from outside, first seen at the boundary before `step`, at `now_ns`. max_tokens: of an arrival at a live
    loop, `sampling.max_tokens`; the trace has the actual output."""

    kind: str  # arrive, abort, reset_prefixes
    request_id: str  # empty for a reset
    step: int
    now_ns: int
    arrival_ns: int  # arrivals: the intended instant
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Tape:
    """The recording of a run, to be replayed. is_live: whether its loop had an open inbox (a live caller, a fleet)."""

    steps: tuple[TapeStep, ...]
    events: tuple[TapeEvent, ...]
    is_live: bool = False

    @property
    def last_ns(self) -> int:
        """The last instant on the tape, of a commit or an event."""
        steps = max((step.commit_ns for step in self.steps), default=0)
        return max(steps, max((event.now_ns for event in self.events), default=0))


class TapeWriter(Recorder):
    """Records a run, with one line for each event and step; flushed at each step."""

    def __init__(self, path: Path, *, is_live: bool = False) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._is_live = is_live
        live = {"is_live": True} if is_live else {}
        self._write({"kind": "tape", "version": VERSION, "digest_version": DIGEST_VERSION, **live})

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        bound = {"max_tokens": request.sampling.max_tokens} if self._is_live else {}
        self._write(
            {
                "kind": "arrive", "id": request.request_id, "step": step, "ns": now_ns,
                "arrival_ns": request.arrival_ns, **bound,
            }
        )  # fmt: skip

    def aborted(self, request_id: str, now_ns: int, step: int) -> None:
        self._write({"kind": "abort", "id": request_id, "step": step, "ns": now_ns})

    def prefixes_reset(self, now_ns: int, step: int) -> None:
        self._write({"kind": RESET_PREFIXES, "step": step, "ns": now_ns})

    def committed(self, step: StepView) -> None:
        outcomes = step.result.outcomes
        looked = {} if step.looked_ns is None else {"looked_ns": step.looked_ns}
        self._write(
            {
                "kind": "step",
                "plan_ns": step.plan_ns,
                "commit_ns": step.end_ns,
                "outcomes": None if outcomes is None else [_fields(outcome) for outcome in outcomes],
                "spans": list(step.result.spans),
                "digest": f"{step.digest:016x}",
                "decision": decision(step),
                **looked,
            }
        )
        self._file.flush()

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        """Not recorded: ends follow from the rest."""

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_tape(path: Path) -> Tape:
    """Reads a tape. An incomplete last line (of a killed run) is left out. Raises RunFolderError for any other file."""
    if not path.is_file():
        raise RunFolderError(
            f"no tape at {path}: only runs with backend=real or backend=vllm have one (of what vLLM's own scheduler "
            "decided there is a case for `testbed conform` instead)"
        )
    steps: list[TapeStep] = []
    events: list[TapeEvent] = []
    is_tape = is_live = False
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise RunFolderError(f"{path} is not a tape: not UTF-8 text (at byte {error.start})") from None
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            item = parsed(json.loads, line)
            kind = item["kind"]
            if kind == "step":
                steps.append(_step(item))
            elif kind == "tape":
                if item["version"] != VERSION:
                    raise RunFolderError(f"{path} is a tape of version {item['version']}; this code reads {VERSION}")
                if item["digest_version"] != DIGEST_VERSION:
                    raise RunFolderError(
                        f"{path} has digests of version {item['digest_version']}, and this code makes version "
                        f"{DIGEST_VERSION}; replay it with the code that its manifest names"
                    )
                is_tape, is_live = True, bool(item.get("is_live"))
            else:
                numbers = (item["step"], item["ns"], item.get("arrival_ns", item["ns"]))
                bound = item.get("max_tokens")
                _check_numbers("step, ns, arrival_ns, max_tokens", [*numbers, *([] if bound is None else [bound])])
                name = "" if kind == RESET_PREFIXES else item["id"]
                events.append(TapeEvent(kind, name, *numbers, bound))
        except (KeyError, TypeError, ValueError) as error:
            if number == len(lines):
                break
            raise RunFolderError(f"{path}:{number}: not a line of a tape ({error})") from None
    if not is_tape:
        raise RunFolderError(f"{path} is not a tape: the line that says so and gives the version is missing")
    return Tape(tuple(steps), tuple(events), is_live)


def _step(item: dict[str, Any]) -> TapeStep:
    outcomes, numbers = item["outcomes"], (item["plan_ns"], item["commit_ns"], *item["spans"])
    _check_numbers("plan_ns, commit_ns, spans", numbers)
    looked_ns = item.get("looked_ns")
    if looked_ns is not None:
        _check_numbers("looked_ns", [looked_ns])
    if item["commit_ns"] < item["plan_ns"] or len(item["spans"]) != len(Spans.FIELDS):
        raise ValueError(f"a step ends after its plan, and has {len(Spans.FIELDS)} spans; it has {shown(numbers)}")
    return TapeStep(
        item["plan_ns"],
        item["commit_ns"],
        None if outcomes is None else tuple(_outcome(*fields) for fields in outcomes),
        Spans(*item["spans"]),
        int(item["digest"], 16),
        item["decision"],
        looked_ns,
    )


def _check_numbers(names: str, numbers: Iterable[Any]) -> None:
    for number in numbers:
        if not whole(0, MAX_NS)(number):
            raise ValueError(f"{names} are whole numbers, from 0 to {MAX_NS:,}; one is {shown(number)}")


def _fields(outcome: Outcome) -> list[Any]:
    return [*outcome.values()[:NUM_FIELDS], *([outcome.fork_stops] if outcome.fork_stops else [])]


def _outcome(
    seq_id: int,
    tokens: list[int],
    stop: str | None,
    forks: list[int],
    dropped: bool,
    fork_stops: list[str | None] | tuple[()] = (),
) -> Outcome:
    stops = tuple(None if one is None else FinishReason(one) for one in fork_stops)
    reason = None if stop is None else FinishReason(stop)
    return Outcome(seq_id, tuple(tokens), reason, tuple(forks), dropped, fork_stops=stops)


class TapeInbox:
    """Gives the loop the events of a tape at the same step boundaries as in the recorded run.

    make_request: returns the request for an id and a recorded arrival instant.
    """

    def __init__(self, tape: Tape, make_request: Callable[[str, int], Request]) -> None:
        self._events = tape.events
        self._open_until_ns = tape.last_ns if tape.is_live else -1
        self._next = self._now_ns = 0
        self._make_request = make_request

    @property
    def is_open(self) -> bool:
        """True for a live tape, until the last instant on it."""
        return self._now_ns < self._open_until_ns

    def due(self, now_ns: int) -> list[Event]:
        self._now_ns = now_ns
        events: list[Event] = []
        while self._next < len(self._events) and self._events[self._next].now_ns <= now_ns:
            event = self._events[self._next]
            self._next += 1
            if event.kind == RESET_PREFIXES:
                events.append(ResetPrefixes())
            elif event.kind == "abort":
                events.append(Abort(event.request_id))
            else:
                request = self._make_request(event.request_id, event.arrival_ns)
                if event.max_tokens is not None:
                    request = request.replace(sampling=replace(request.sampling, max_tokens=event.max_tokens))
                events.append(Arrive(request))
        return events

    def next_ns(self) -> int | None:
        return self._events[self._next].now_ns if self._next < len(self._events) else None

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        """Does nothing: the events that followed an end are on the tape."""
