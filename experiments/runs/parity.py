"""Decision parity: replays a real run's tape in the simulator; every step must make the recorded decisions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.reading.files import read_said
from experiments.configuration.config import RunConfig
from experiments.configuration.saved import read_config
from experiments.wiring import build
from experiments.wiring.foreign import policy_failure
from experiments.wiring.traces import forcing, vocab_size, with_ends
from sim.driver import drive
from sim.recorded_device import RecordedDevice
from testbed.core.commands import Execute, Recorder, Resume, StepView
from testbed.core.plan import BatchPlan
from testbed.core.request import Request
from testbed.core.serve import Loop, serve
from testbed.errors import LivelockError, RunFolderError, TestbedError
from testbed.records.recorders import together
from testbed.records.schema import decision, num_scheduled
from testbed.records.tape import Tape, TapeInbox, read_tape, tape_names
from testbed.traces.fingerprint import fingerprint
from testbed.traces.inbox import to_request
from testbed.traces.readers.own import read_jsonl
from testbed.traces.schema import Trace


class DivergedError(TestbedError):
    """The first step at which the replay's decisions differ. recorded, replayed: both sides; None if one has ended."""

    def __init__(
        self, step: int, recorded: dict[str, Any] | None, replayed: dict[str, Any] | None, reason: str
    ) -> None:
        super().__init__(
            f"the replay diverges from the recorded run at step {step}: {reason}; "
            "cost=recorded needs that run's own scheduler, cache and trace"
        )
        self.step, self.recorded, self.replayed, self.reason = step, recorded, replayed, reason


@dataclass(frozen=True, slots=True)
class ParityReport:
    num_steps: int  # number of equal steps
    digest: int
    divergence: DivergedError | None
    is_cut: bool = False  # the real run ended early: the replay agrees up to the end of its tape
    failure: TestbedError | None = None  # the failure that ended the real run, which the replay repeated


def print_divergence(report: ParityReport) -> None:
    """Prints the first step that differs, field by field."""
    divergence = report.divergence
    assert divergence is not None
    print(f"{report.num_steps} steps agree; step {divergence.step} differs: {divergence.reason}")
    recorded, replayed = divergence.recorded or {}, divergence.replayed or {}
    for key in replayed or recorded:
        left, right = recorded.get(key), replayed.get(key)
        mark = " " if left == right else "*"
        print(f"{mark} {key:<14} recorded {json.dumps(left)}")
        if mark == "*":
            print(f"  {'':<14} replayed {json.dumps(right)}")


class _TapeEndedError(TestbedError):
    """The tape of an interrupted run has ended; the rest of the run is not known."""


def num_tapes(folder: Path) -> int:
    """Returns the number of replicas of a real run; each has a tape. Raises RunFolderError if there is no run."""
    return int(_manifest(folder).get("num_replicas") or 1)


def recorded_inputs(
    folder: Path, config: RunConfig, trace: Trace, replica: int = 0
) -> tuple[_Checker, TapeInbox, build.Pools]:
    """Returns what `cost=recorded` reads from a real run's folder for one replica: what drives the loop and compares,
    the inbox, the pools. trace: that of the whole run. Raises RunFolderError if the run had another trace, model,
    device or number of KV blocks."""
    manifest, num = _manifest(folder), num_tapes(folder)
    file = folder / tape_names(num)[replica]
    tape = read_tape(file)
    recorded, given = manifest["trace"]["fingerprint"], fingerprint(trace)
    if recorded is not None and recorded != given:  # None: a served run that was killed
        raise RunFolderError(
            f"{folder} ran another trace (fingerprint {recorded}, this one's is {given}); replay it as it was: "
            f"{_as_it_was(folder)}"
        )
    num_steps = (manifest if num == 1 else (manifest.get("replicas") or {replica: {}})[replica]).get("num_steps", 0)
    if manifest["status"] == "complete" and len(tape.steps) < num_steps:
        raise RunFolderError(
            f"{file} has {len(tape.steps)} steps, and the run had {num_steps}: its end is lost; run it again, or copy "
            "the whole file"
        )
    pools = build.Pools(manifest["num_gpu_blocks"], manifest["num_cpu_blocks"])
    checker = _Checker(tape, RecordedDevice(tape), is_whole=manifest["status"] == "complete")
    own = RunConfig.from_container(read_config(folder))
    num_blocks = config.cache.num_gpu_blocks
    if num_blocks == own.cache.num_gpu_blocks:
        num_blocks = None
    for key, wanted, had in (
        ("model", config.model.name, own.model.name), ("device", config.device.name, own.device.name),
        ("cache.num_gpu_blocks", num_blocks, pools.num_gpu_blocks),
    ):  # fmt: skip
        if wanted not in (None, had):
            raise RunFolderError(
                f"{key} is {wanted}, and {folder} ran with {had}: leave it out ({_as_it_was(folder)}), or choose "
                "another cost model"
            )
    rows = {row.request_id: row for row in trace.rows}
    num_ids = vocab_size(config)
    sampling = with_ends(config.sampling, manifest.get("end_token_ids") or ())

    def make(request_id: str, arrival_ns: int) -> Request:
        if request_id not in rows:
            raise RunFolderError(f"the tape names request {request_id!r}, which the trace does not have")
        # forced as in the real run: its tape has all other tokens
        return forcing(to_request(rows[request_id], num_ids, arrival_ns, sampling), own.forced)

    return checker, TapeInbox(tape, make), pools


def _as_it_was(folder: Path) -> str:
    """Returns the command that replays a run."""
    return f"testbed run from={folder} backend=sim cost=recorded cost.run={folder}"


def check_parity(folder: Path, *recorders: Recorder, replica: int = 0) -> ParityReport:
    """Replays the tape of a real run, or of one of its replicas, and compares every step. Raises RunFolderError if the
    folder has no such run, TestbedError if a user's class of the run raises before the end of the tape.

    recorders: further recorders of the replay."""
    config = RunConfig.from_container(read_config(folder))
    if config.is_simulated:
        raise RunFolderError(
            f"{folder} is a simulated run; parity replays the tape of a run with backend=real or backend=vllm"
        )
    checker, inbox, pools = recorded_inputs(folder, config, read_jsonl(folder / "trace.jsonl"), replica)
    scheduler = build.build_scheduler(config, pools)
    ended: TestbedError | None = None
    try:
        checker.drive(serve(inbox, scheduler, together([*recorders, checker])))
    except (DivergedError, _TapeEndedError, LivelockError) as error:
        ended = error
    except TestbedError:
        raise
    except (Exception, SystemExit) as error:
        ended = policy_failure(error, config)
        if ended is None:
            raise
    divergence = ended if isinstance(ended, DivergedError) else None
    failure = None if isinstance(ended, DivergedError | _TapeEndedError) else ended
    if failure is not None and not checker.has_ended:
        raise failure
    is_cut = ended is not None and divergence is None
    return ParityReport(checker.num_steps, scheduler.digest, divergence, is_cut, failure)


class _Checker(Recorder):
    """Both the device and a recorder of the replay. Compares each plan before it runs, and after its commit the times,
    the whole decision and the digest.

    is_whole: whether the run that wrote the tape is complete.
    """

    def __init__(self, tape: Tape, device: RecordedDevice, *, is_whole: bool) -> None:
        self.num_steps = 0
        self._tape = tape
        self._device = device
        self._is_whole = is_whole

    def drive(self, loop: Loop) -> None:
        """Runs the loop in the simulator. Raises DivergedError if a decision differs or the loop ends before the tape,
        _TapeEndedError at the end of an interrupted run's tape."""
        drive(loop, self)
        if self.num_steps != len(self._tape.steps):
            recorded = self._tape.steps[self.num_steps]
            raise DivergedError(self.num_steps, recorded.decision, None, "the replay ended before the tape")
        self._refuse_cut()

    def execute(self, command: Execute, now_ns: int) -> Resume:
        plan = command.plan
        if plan is None:
            return self._device.execute(command, now_ns)
        if plan.step >= len(self._tape.steps):
            self._refuse_cut()
            raise DivergedError(plan.step, None, _plan_part(plan), "the tape has ended, the replay goes on")
        recorded, replayed = self._tape.steps[plan.step].decision, _plan_part(plan)
        if any(recorded[key] != value for key, value in replayed.items()):
            raise DivergedError(plan.step, recorded, replayed, "another batch was decided")
        return self._device.execute(command, now_ns)

    def resume(self, until_ns: int | None, now_ns: int) -> Resume | None:
        return self._device.resume(until_ns, now_ns)

    def committed(self, step: StepView) -> None:
        recorded, decided = self._tape.steps[step.plan.step], decision(step)
        for reason, ours, theirs in (
            ("planned at another instant", step.plan_ns, recorded.plan_ns),
            ("committed at another instant", step.end_ns, recorded.commit_ns),
            ("another batch was decided", decided, recorded.decision),
            ("the decision digests differ", step.digest, recorded.digest),
        ):
            if ours != theirs:
                raise DivergedError(step.plan.step, recorded.decision, decided, reason)
        self.num_steps += 1

    @property
    def has_ended(self) -> bool:
        """Whether every step of an interrupted run was replayed."""
        return not self._is_whole and self.num_steps == len(self._tape.steps)

    def _refuse_cut(self) -> None:
        if not self._is_whole:
            num = len(self._tape.steps)
            raise _TapeEndedError(f"the recorded run was interrupted, and its tape ends after {num} steps")


def _plan_part(plan: BatchPlan) -> dict[str, Any]:
    """Returns the fields of a decision that are known from the plan, before the commit."""
    return {
        "step": plan.step,
        "scheduled": num_scheduled(plan),
        "ignored": [item.request_id for item in plan.ignored],
        "cached_tokens": {item.request_id: item.num_cached_tokens for item in plan.admitted},
    }


def _manifest(folder: Path) -> dict[str, Any]:
    file = folder / "manifest.json"
    if not file.is_file():
        raise RunFolderError(f"no run at {folder}: manifest.json is missing; name a folder that `testbed run` wrote")
    return read_said(file)
