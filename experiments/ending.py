"""What a run says when it is over: notes on its numbers, and in one line why it ended early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments import build
from experiments.config import RunConfig
from experiments.engines import RunRecords
from experiments.names import device_of_run
from experiments.replay_log import warnings_of
from experiments.run_folder import describe_failure, describe_kept


def notes_of(config: RunConfig, manifest: dict[str, Any]) -> tuple[str, ...]:
    """What whoever reads the run's numbers should know of them."""
    notes = [*warnings_of(manifest), *manifest["trace"]["notes"], *build.unused_settings(config)]
    is_auto = config.is_real and config.raw["backend"].get("device") != "cpu"
    if is_auto and config.device.kind == "cuda" and device_of_run(str(manifest["device"])) == "cpu":
        notes.append(
            f"it ran on {manifest['device']}; a policy that asks what a step costs is told of device="
            f"{config.device.name}: set device=cpu"
        )
    if config.record.profiled_steps is not None and config.record.profiled_steps[0] >= manifest["num_steps"]:
        notes.append(
            f"record.profile={config.record.profile} traced nothing: the run had {manifest['num_steps']} steps"
        )
    if manifest["status"] == "complete" and manifest["num_unsent"]:
        notes.append(
            f"{manifest['num_unsent']} turns were never sent: an earlier turn of their session was ignored or aborted"
        )
    return tuple(notes)


def reason_of(failure: BaseException) -> str:
    """As manifest.json has it."""
    return "interrupted" if isinstance(failure, KeyboardInterrupt) else describe_failure(failure)


def failure_message(failure: BaseException, folder: Path, manifest: dict[str, Any], records: RunRecords) -> str:
    total = manifest["trace"]["num_requests"]
    after = f"after {records.num_finished} of {'an unknown number of' if total is None else total} requests"
    if isinstance(failure, KeyboardInterrupt):
        return f"interrupted {after}; {describe_kept(folder)}"
    return f"failed {after}: {reason_of(failure)}; {describe_kept(folder)}"
