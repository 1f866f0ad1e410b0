"""Reads an observer's log: requests, and steps with their plans, emitted tokens and ended requests."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from experiments.observe.lines import check_header, check_line
from testbed.core.request import Request
from testbed.errors import RunFolderError, TraceError
from testbed.foreign_text import shortened, shown
from testbed.traces.readers.fields import json_object
from testbed.traces.readers.open_text import DamagedError, existing_file, read_lines
from testbed.wording import count

Place = tuple[int, int]  # numbers of steps planned and committed before an event
_CURE = "take the log as vLLM left it, or record another"
_SESSION = "streaming sessions"  # the observer's name: such a request ends and is added again at each turn


@dataclass(slots=True)
class ObservedRequest:
    """One request. arrival_ns, queued_ns: when the front end and the scheduler received it, on the log's clock."""

    name: str
    number: int  # in the order in which the scheduler received requests
    place: Place
    arrival_ns: int
    queued_ns: int
    prompt: array[int] | int  # token ids, or their number
    max_tokens: int | None
    priority: int
    salt: str
    skips_cache: bool = False  # whether it uses no prefix-cache hits
    unknown: str = ""  # features that it uses and that this testbed does not have
    output: list[int] = field(default_factory=list)  # emitted token ids; zeros if only their number is known
    reason: str | None = None
    ended_ns: int | None = None
    aborted: Place | None = None

    @property
    def wanted(self) -> list[int]:
        """The emitted tokens; for an aborted request padded with zeros to max_tokens, as it could have continued."""
        if self.aborted is None or self.max_tokens is None:
            return self.output
        return self.output + [0] * (self.max_tokens - len(self.output))


class Sender(NamedTuple):
    """What only the sender of the requests knows: our requests in the order sent, and `origin_ns`, the instant of the
    observer's clock at which the run's clock started."""

    requests: list[Request]
    origin_ns: int


class ObservedStep(NamedTuple):
    """One step. began_ns, planned_ns: start and end of the plan; taken_ns, end_ns: start and end of the commit.
    admitted: request -> number of tokens already computed at its admission."""

    scheduled: dict[str, int]
    admitted: dict[str, int]
    preempted: tuple[str, ...]
    num_committed: int
    num_running: int
    num_waiting: int
    free_blocks: int
    began_ns: int
    planned_ns: int
    taken_ns: int
    end_ns: int
    emitted: dict[str, list[int]]
    ended: dict[str, str]
    free_after: int


class Reset(NamedTuple):
    """A reset of the prefix cache. preempts: whether it preempted all running requests."""

    place: Place
    preempts: bool


@dataclass(slots=True)
class ObservedLog:
    """A whole log. header: its first line. steps: those that were committed. is_cut: a replay of ours that ended early.
    num_open: requests that had not ended at the end of the log; they count as aborted there. left_out: the kind of
    each request that cannot be a row of a trace; such requests are removed from the steps."""

    header: dict[str, Any]
    requests: dict[str, ObservedRequest]
    steps: list[ObservedStep]
    resets: tuple[Reset, ...]
    is_cut: bool = False
    num_open: int = 0
    is_in_order: bool = True  # whether requests of equal priority were added in strictly increasing order of arrival
    left_out: tuple[str, ...] = ()
    was_in_flight: bool = False  # whether a plan was in flight at the end of the log
    contradiction: str = ""  # evidence of a missing line to which no later line refers

    @property
    def open_note(self) -> str:
        return f"{count(self.num_open, 'request')} not ended where the log ends: counted as aborted then"

    @property
    def note(self) -> str:
        """A text about the requests that were left out; empty if there are none."""
        if not self.left_out:
            return ""
        return f"{count(len(self.left_out), 'request')} left out: {', '.join(sorted(set(self.left_out)))}"


def read_log(file: Path, sender: Sender | None = None) -> ObservedLog:
    """Reads a log. Ignores a truncated last line, the unreadable rest of a truncated compressed file, and plans that
    were in flight at the end. Raises RunFolderError with the first invalid line."""
    reader: _Reader | None = None
    bad: RunFolderError | None = None
    try:
        for number, line in read_lines(existing_file(file, "an observer's log")):
            if bad is not None:
                raise bad  # it was not the last one
            place = f"{file}:{number}"
            try:
                fields = json_object(line, place)
                if reader is None:
                    reader = _Reader(check_header(fields, place), sender)
                else:
                    reader.take(fields)
            except TraceError as error:
                bad = RunFolderError(f"{error}; an observer's log has one JSON object on each line")
            except (AttributeError, TypeError, ValueError) as error:
                raise RunFolderError(
                    f"{place}: not a line of an observer's log ({shortened(error)}); {_CURE}"
                ) from None
            except KeyError as error:
                raise RunFolderError(
                    f"{place}: not a line of an observer's log: it has no {error.args[0]!r}; {_CURE}"
                ) from None
    except DamagedError as error:
        bad = RunFolderError(str(error))
    except TraceError as error:
        raise RunFolderError(str(error)) from None
    if reader is None:
        raise bad or RunFolderError(f"{file} is empty; an observer's log begins with a line about its engine")
    return reader.log()


class _Reader:
    def __init__(self, header: dict[str, Any], sender: Sender | None) -> None:
        self._header = header
        self._sender = sender
        # times count from the log's header, or from the start of the sender's clock
        self._zero_ns = int(header["ns"]) if sender is None else sender.origin_ns
        self._unix_ns = int(header["unix_ns"]) - int(header["ns"]) + self._zero_ns
        self._names: dict[str, str] = {}  # vLLM's id -> our name; without a sender the same, or numbered
        self._num_before: Counter[str] = Counter()  # repetitions of each of vLLM's ids
        self._requests: dict[str, ObservedRequest] = {}
        self._left_out: dict[str, str] = {}  # name -> kind of request
        self._plans: dict[int, dict[str, Any]] = {}
        self._steps: list[ObservedStep] = []
        self._resets: list[Reset] = []
        self._max_model_len = int(header["config"]["max_model_len"])
        self._running: set[str] = set()
        self._num_live = 0
        self._contradiction = ""
        self._last_ns = 0
        self._last_unix_ns: dict[int, int] = {}  # by priority
        self._is_in_order = True

    def take(self, fields: dict[str, Any]) -> None:
        kind = fields["kind"]
        check_line(kind, fields)
        if fields["ns"] < self._last_ns:
            raise ValueError("its instant is before that of the line before it")
        self._last_ns = fields["ns"]
        if kind == "add":
            self._add(fields)
        elif kind == "plan":
            self._plan(fields)
        elif kind == "commit":
            self._commit(fields)
        elif kind == "abort":
            request = self._requests[self._name(fields["id"])]
            if request.reason is None:
                self._num_live -= 1
                request.aborted = int(fields["plans"]), int(fields["commits"])
                request.reason, request.ended_ns = "abort", self._at(fields["ns"])
        elif kind == "reset_prefix_cache":
            if fields.get("is_reset", True):  # False: vLLM did not reset it, as requests held blocks
                self._resets.append(Reset((int(fields["plans"]), int(fields["commits"])), bool(fields["preempts"])))
        else:
            raise ValueError(f"a line of kind {shown(kind)}")

    def _plan(self, fields: dict[str, Any]) -> None:
        num_planned = len(self._steps) + len(self._plans)
        if (fields["step"], fields["committed"]) != (num_planned, len(self._steps)):
            raise ValueError(f"it is step {fields['step']}, and {num_planned} are before it: a line is missing")
        plan = fields | {
            "scheduled": self._named(fields["scheduled"]), "admitted": self._named(fields["admitted"]),
            # vLLM also lists requests that a reset preempted and that were aborted before this plan: left out
            "preempted": tuple([n for n in map(self._name, fields["preempted"]) if self._requests[n].reason is None]),
        }  # fmt: skip
        self._plans[num_planned] = plan
        self._contradiction = self._contradiction or self._contradicted(num_planned, plan)
        if strays := {*plan["preempted"], *plan["admitted"]} - {*plan["scheduled"], *self._running}:
            raise ValueError(f"it has {min(strays)!r}, which did not run")
        self._running = (self._running - {*plan["preempted"]}) | {*plan["scheduled"]}

    def _contradicted(self, step: int, plan: dict[str, Any]) -> str:
        """Returns what in the plan contradicts the lines before it. A preemption for more KV blocks always leaves at
        least one sequence running."""
        num = plan["num_running"] + plan["num_waiting"]
        if num != self._num_live:
            return f"in step {step} vLLM had {num} requests, and {self._num_live} by its lines before: one is missing"
        ran = {name for name in self._running if self._requests[name].reason is None}
        is_reset = any(one.place[0] == step and one.preempts for one in self._resets)
        if ran and ran <= {*plan["preempted"]} and not is_reset:
            return f"step {step} preempted all that ran, as only a reset of the prefix cache does: its line is missing"
        return ""

    def _at(self, ns: Any) -> int:
        """Returns an instant on the log's clock."""
        return max(0, int(ns) - self._zero_ns)

    def _add(self, fields: dict[str, Any]) -> None:
        vllm_id, prompt, queued_ns = fields["id"], fields["prompt"], self._at(fields["ns"])
        before = self._names.get(vllm_id)
        if before is not None and (self._requests[before].reason is None or self._left_out.get(before) == _SESSION):
            self._left_out.setdefault(before, _SESSION)
            return
        number = len(self._requests)
        name, arrival_ns = self._free_name(vllm_id), int(fields["arrival_unix_ns"]) - self._unix_ns
        if self._sender is not None:
            name, arrival_ns = self._sender.requests[number].request_id, self._sender.requests[number].arrival_ns
        self._names[vllm_id] = name
        prompt = array("i", prompt) if isinstance(prompt, list) else int(prompt)
        num_prompt, max_tokens = len(prompt) if isinstance(prompt, array) else prompt, fields["max_tokens"]
        if num_prompt > self._max_model_len:
            raise ValueError(
                f"its prompt has {num_prompt} tokens, and a request of vLLM's {self._max_model_len} at most"
            )
        if max_tokens is not None:
            max_tokens = min(max_tokens, max(1, self._max_model_len - num_prompt))
        self._requests[name] = ObservedRequest(
            name, number, (int(fields["plans"]), int(fields["commits"])), min(max(0, arrival_ns), queued_ns), queued_ns,
            prompt, max_tokens, min(max(int(fields["priority"]), 1 - 2**31), 2**31 - 1), str(fields["salt"]),
            bool(fields.get("skips_cache", False)), str(fields.get("unknown", "")),
        )  # fmt: skip
        self._num_live += 1
        if not prompt or fields.get("unknown") == _SESSION:
            self._left_out[name] = str(fields.get("unknown") or "empty prompts")
        priority, unix_ns = int(fields["priority"]), int(fields["arrival_unix_ns"])
        self._is_in_order &= self._last_unix_ns.get(priority, -1) < unix_ns
        self._last_unix_ns[priority] = unix_ns

    def _free_name(self, vllm_id: str) -> str:
        """Returns vLLM's id, or the next free name (id~2): the id of an ended request may be used again."""
        name = vllm_id
        while name in self._requests:
            self._num_before[vllm_id] += 1
            name = f"{vllm_id}~{self._num_before[vllm_id] + 1}"
        return name

    def _commit(self, fields: dict[str, Any]) -> None:
        if fields["step"] != len(self._steps):
            raise ValueError(
                f"it ends step {fields['step']}, and no line before it ends step {len(self._steps)}: one is missing"
            )
        if fields["step"] not in self._plans:
            raise ValueError(f"it ends step {fields['step']}, and no line before it plans that step: one is missing")
        plan = self._plans.pop(fields["step"])
        emitted = self._named(fields["emitted"])
        for name, tokens in emitted.items():
            if isinstance(tokens, int) and tokens > self._max_model_len:
                raise ValueError(
                    f"it has {tokens} tokens of {name!r}, and a request of vLLM's {self._max_model_len} at most"
                )
            emitted[name] = tokens if isinstance(tokens, list) else [0] * tokens
            self._requests[name].output += emitted[name]
        ended = self._named(fields["ended"])
        for name, reason in ended.items():
            request = self._requests[name]
            if request.reason is None:
                self._num_live -= 1
                request.reason, request.ended_ns = reason, self._at(fields["ns"])
        self._steps.append(
            ObservedStep(
                plan["scheduled"], plan["admitted"], plan["preempted"], int(plan["committed"]),
                int(plan["num_running"]), int(plan["num_waiting"]), int(plan["free_blocks"]),
                self._at(plan["began_ns"]), self._at(plan["ns"]), self._at(fields["began_ns"]), self._at(fields["ns"]),
                emitted, ended, int(fields["free_blocks"]),
            )
        )  # fmt: skip

    def _named(self, by_id: dict[str, Any]) -> dict[str, Any]:
        return {self._name(vllm_id): value for vllm_id, value in by_id.items()}

    def _name(self, vllm_id: str) -> str:
        if vllm_id not in self._names:
            raise ValueError(f"no line before it adds request {shown(vllm_id)}: one is missing")
        return self._names[vllm_id]

    def log(self) -> ObservedLog:
        requests, steps = self._requests, self._steps
        still = [one for one in requests.values() if one.reason is None]
        last: Place = (len(steps), len(steps))  # plans in flight are left out: places after the last commit move to it
        for one in still if self._sender is None else ():
            one.reason, one.aborted = "abort", last
            one.ended_ns = max(steps[-1].end_ns if steps else 0, one.queued_ns)
        for one in requests.values():
            one.place = min(one.place, last)
            one.aborted = None if one.aborted is None else min(one.aborted, last)
        if self._left_out:
            requests = {name: request for name, request in requests.items() if name not in self._left_out}
            steps = [_of_these(step, requests) for step in steps]
        num_open = sum(one.name in requests for one in still)
        return ObservedLog(
            self._header,
            requests,
            steps,
            tuple([one._replace(place=min(one.place, last)) for one in self._resets]),
            num_open=num_open,
            is_in_order=self._is_in_order,
            left_out=tuple(self._left_out.values()), was_in_flight=bool(self._plans),
            contradiction=self._contradiction,
        )  # fmt: skip


def _of_these(step: ObservedStep, requests: dict[str, ObservedRequest]) -> ObservedStep:
    def kept(by_name: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in by_name.items() if name in requests}

    return step._replace(
        scheduled=kept(step.scheduled), admitted=kept(step.admitted), emitted=kept(step.emitted),
        ended=kept(step.ended), preempted=tuple([name for name in step.preempted if name in requests]),
    )  # fmt: skip
