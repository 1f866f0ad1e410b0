"""Messages at the end of a run: notes on its numbers, and one line about why it ended early."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.configuration.config import RunConfig
from experiments.configuration.names import device_of_run
from experiments.configuration.settings import NO_DEADLINES
from experiments.runs.run_folder import describe_failure, describe_kept
from experiments.wiring import build, costs, foreign, unused
from sim.cost.config import RooflineConfig
from testbed import compiled
from testbed.core.plan import BlockedBy
from testbed.wording import count

if TYPE_CHECKING:
    from analysis.measures.notes import Note

_HELD = re.compile(r"blocked by (\w+) while nothing runs")  # a reason given by testbed.core.scheduler
_SETTINGS = {  # settings that can keep the head of the queue from being admitted
    BlockedBy.KV_BLOCKS: "cache.num_gpu_blocks or scheduler.watermark",
    BlockedBy.TOKEN_BUDGET: "scheduler.max_num_batched_tokens",
    BlockedBy.MAX_NUM_SEQS: "scheduler.max_num_seqs",
    BlockedBy.PARTIAL_PREFILLS: "scheduler.max_num_partial_prefills or scheduler.max_long_partial_prefills",
    BlockedBy.PREEMPTION: "scheduler.preemption",
    BlockedBy.SWAPPED_FIRST: "scheduler.preemption or cache.num_cpu_blocks",
    BlockedBy.BATCH: "scheduler.composition",
}


def notes_of(config: RunConfig, manifest: dict[str, Any], summary: dict[str, Any], folder: Path) -> tuple[Note, ...]:
    """Returns the notes that a reader of the run's numbers needs."""
    from analysis.measures.checks import failures  # not at the top: Arrow is slow to import
    from analysis.measures.notes import Note, doubts_of, rate_notes
    from analysis.measures.replicas import routing_notes
    from analysis.measures.steadiness import outrun_note

    failed = failures(summary["checks"])
    of_load = [outrun_note(summary), _of_turns(config, manifest, folder)]
    sized = [*(note for note in of_load if note is not None), *doubts_of(manifest)]
    notes = [
        *routing_notes(summary),
        *manifest["trace"]["notes"],
        *unused.unused_settings(config, manifest.get("swept") or ()),
        *(rate_notes(config.raw["trace"], summary) if config.is_simulated else []),  # replays may be sped up
    ]
    notes += unused.overruled(config, manifest.get("given") or {})
    if config.forced == "nothing" and any("output" in note for note in manifest["trace"]["notes"]):
        notes.append("trace.forced=nothing: sampling.max_tokens bounds outputs, no setting of the trace")
    notes += unused.without_classes(config, manifest["trace"]["differ_in"])
    notes += [*_of_step_times(config, manifest), *foreign.unseeded_notes(config)]
    is_priced = config.is_simulated and isinstance(config.cost, RooflineConfig)
    takes_memory = config.cache.num_gpu_blocks is None and config.device.kind != "cpu"
    is_counted = is_priced or (config.is_simulated and takes_memory)
    if is_counted and (counted := costs.quantised_otherwise(config.model)):
        how = "are priced, and take memory," if is_priced else "take memory"
        notes.append(f"{counted}: they {how} as {config.model.dtype}")
    notes += _of_fp8(config)
    if compiled.current().mode == "interpreted" and os.environ.get(compiled.VARIABLE) != "0":
        notes.append(f"the core ran {compiled.current()}, several times slower (docs/compiled.md)")
    if config.record.profiled_steps is not None and config.record.profiled_steps[0] >= manifest["num_steps"]:
        notes.append(
            f"record.profile={config.record.profile} traced nothing: the run had {manifest['num_steps']} steps"
        )
    if manifest["status"] == "complete" and manifest["num_unsent"]:
        notes.append(
            f"{count(manifest['num_unsent'], 'turn')} never sent: an earlier turn of the session was ignored or aborted"
        )
    if num := manifest.get("num_cut_outputs"):  # not known for runs of vLLM's own scheduler
        limit = "the model's length" if config.scheduler.max_model_len is None else config.scheduler.max_model_len
        notes.append(
            f"{num:,} of {manifest['num_sent']:,} outputs were cut, by {manifest['num_cut_output_tokens']:,} tokens in "
            f"all: prompt and output reach scheduler.max_model_len ({limit}). Raise it, or take shorter ones"
        )
    if config.slo.of("lateness_s") and summary["deadlines"] is None:
        notes.append(NO_DEADLINES)
    notes += [
        f"slo.classes names {item['name']}, and no request is of it{' but not of one before it' if place else ''} "
        "(docs/traces.md#classes-of-requests)"
        for place, item in enumerate((summary["slo"] or {}).get("classes") or ())
        if not item["num_requests"]
    ]
    notes += without_numbers(config, summary)
    return *map(Note.of_text, failed), *sized, *map(Note.of_text, notes)


def _of_turns(config: RunConfig, manifest: dict[str, Any], folder: Path) -> Note | None:
    """Returns a note if a setting squeezes sessions whose turns have recorded instants."""
    from analysis.measures.turns import squeezed_by, squeezed_note, turns_of
    from analysis.reading.rows import FileRows

    if not (by := squeezed_by(config.raw["trace"], config.speed)):
        return None
    turns = turns_of(FileRows(folder / "requests.parquet"))
    return squeezed_note(by, turns, is_closed_loop=manifest["trace"]["is_closed_loop"])


def _of_fp8(config: RunConfig) -> list[str]:
    """Returns a note on how 8-bit weights are multiplied, which differs between engines."""
    if config.model.dtype != "fp8":
        return []
    if config.raw["backend"]["name"] == "real":
        return ["FP8 weights: backend=real saves memory with them, not time (docs/models.md)"]
    if not (config.is_simulated and isinstance(config.cost, RooflineConfig)):
        return []
    if config.cost.multiplies_fp8(config.device):
        how = "in FP8, with activations quantised before (w8a8), as vLLM on this device"
    else:
        how = "at 16 bits (w8a16), one byte read for each"
    return [f"FP8 weights are multiplied {how}; cost.fp8_gemms chooses; backend=real has w8a16 (docs/models.md)"]


def _of_step_times(config: RunConfig, manifest: dict[str, Any]) -> Iterator[str]:
    """Yields notes on step times that were not measured where it ran: the run's, or those that a policy asks for."""
    made_up = "no data sheet gives a CPU's; `testbed calibrate` measures them"
    if config.is_simulated and manifest["cost"] == "roofline" and manifest["device"] == "cpu":
        yield f"the step times are made up: {made_up}"
    if not (config.is_real and build.may_ask(config, "estimator")):
        return
    is_auto = config.raw["backend"].get("device") != "cpu"
    if is_auto and config.device.kind == "cuda" and device_of_run(str(manifest["device"])) == "cpu":
        yield (
            f"it ran on {manifest['device']}, and step times that a policy may ask for are those of device="
            f"{config.device.name}: set device=cpu"
        )
    if isinstance(config.cost, RooflineConfig) and config.device.kind == "cpu":
        yield f"step times that a policy may ask for are made up: {made_up} (cost=calibrated cost.path=…)"


def without_numbers(config: RunConfig, summary: dict[str, Any]) -> list[str]:
    """Returns a note if every request was sent within the warm-up."""
    if summary["num_requests"] or not summary["num_in_warmup"]:
        return []
    left = f"report.warmup_s={config.report.warmup_s:g} leaves out all {count(summary['num_in_warmup'], 'request')}"
    return [f"{left}, so there are no numbers: lower it, or take a longer trace"]


def ignored_message(config: RunConfig, num_requests: int, ignored: Sequence[tuple[str, str]], is_given: bool) -> str:
    """Returns the message about ignored requests. ignored: (request id, reason), at least one. Distinguishes requests
    that can never fit from those that were held back. is_given: the trace was given whole (a measured run's, or an
    object in Python), so that no setting changes it."""
    groups: dict[str, list[tuple[str, str]]] = {}  # by BlockedBy; "": too large
    for item in ignored:
        held = _HELD.match(item[1])
        groups.setdefault("" if held is None else held[1], []).append(item)
    said = [
        f"{len(items)} of {num_requests} requests {'were held back while nothing ran' if by else 'could never fit'} "
        f"and ended as 'ignored' (first: {items[0][0]!r}: {items[0][1]})"
        for by, items in groups.items()
    ]
    hints = "; ".join(_hint(config, by, is_given) for by in groups)
    rest = "; the other results are complete" if len(ignored) < num_requests else ""
    if config.allow_ignored:
        hints = hints.replace(", raise", " or raise")
    else:
        hints += ", or accept it with allow_ignored=true"
    return f"{'; '.join(said)}{rest}. {hints}"


def _hint(config: RunConfig, blocked_by: str, is_given: bool) -> str:
    if not blocked_by:
        of_output = "sampling.max_tokens" if config.forced == "nothing" else "trace.max_output_tokens"
        cut = f"Cut them with trace.max_prompt_tokens or {of_output}"
        return f"{'Leave them out' if is_given else cut}, raise the limit"
    if blocked_by != BlockedBy.ADMISSION:
        return f"Change what held them back: {_SETTINGS[BlockedBy(blocked_by)]}"
    named = config.scheduler.admission
    policy = named if isinstance(named, str) else named["_target_"]
    return f"Let scheduler.admission={policy} allow a request that is alone"


def reason_of(failure: BaseException, folder: Path) -> str:
    """Returns the reason for a run's failure, as in manifest.json."""
    return "interrupted" if isinstance(failure, KeyboardInterrupt) else describe_failure(failure, folder)


def failure_message(failure: BaseException, folder: Path, manifest: dict[str, Any], num_finished: int) -> str:
    total = manifest["trace"]["num_requests"]
    after = f"after {num_finished} of {'an unknown number of' if total is None else total} requests"
    if isinstance(failure, KeyboardInterrupt):
        return f"interrupted {after}; {describe_kept(folder)}"
    return f"failed {after}: {reason_of(failure, folder)}; {describe_kept(folder)}"
