"""Checks files of cases. Prints a line for each case: `ok`, or the first step that differs, with both sides."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from experiments.configuration.options import options
from experiments.conform.cases import Case, read_cases
from experiments.conform.replay import Mismatch, differing_fields, replay_case
from experiments.conform.systems import SYSTEMS
from testbed.core.state import SequenceState
from testbed.errors import ConfigError, TraceError
from testbed.foreign_text import unknown


def check_files(files: Sequence[Path], case_name: str | None = None, preset: str | None = None) -> int:
    """Prints the result of each case, then `N passed, M failed`; returns the exit status.

    case_name: check only this case. preset: used for every case instead of the one that mirrors its system. Raises
    TraceError for a malformed file or an unknown system, ConfigError for an unknown case or preset.
    """
    cases = [case for file in files for case in read_cases(file)]
    if case_name is not None:
        names = [case.name for case in cases]
        if case_name not in names:
            raise ConfigError(_unknown_case(files, case_name, names))
        cases = [case for case in cases if case.name == case_name]
    _check_choices(cases, preset)
    num_failed = 0
    for case in tqdm(cases, desc="conform", disable=None, leave=False):
        system = SYSTEMS[case.system]
        mismatch = replay_case(case, system, preset or system.preset)
        num_failed += mismatch is not None
        with tqdm.external_write_mode():
            print(f"ok {case.name}: {len(case.steps)} steps" if mismatch is None else _failure(case, mismatch))
    print(f"{len(cases) - num_failed} passed, {num_failed} failed")
    return 1 if num_failed else 0


def _unknown_case(files: Sequence[Path], name: str, names: list[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, names, n=3, cutoff=0.5) or names[:3]
    where = " ".join(map(str, files))
    return f"{where}: no case {name!r} among {len(names)}; close to it: {', '.join(near)}"


def _check_choices(cases: list[Case], preset: str | None) -> None:
    """Raises TraceError for unknown systems and ConfigError for unknown presets, before anything runs."""
    presets = options("scheduler")
    for case in cases:
        if case.system not in SYSTEMS:
            raise TraceError(unknown(f"{case.place}: system is {case.system!r}", case.system, list(SYSTEMS)))
        wanted = preset or SYSTEMS[case.system].preset
        if wanted not in presets:
            what = f"there is no preset {wanted!r}" + ("" if preset else f", which mirrors {case.system}")
            raise ConfigError(unknown(what, wanted, presets) + "; choose another by --preset")


# --- a case that failed ---


def _failure(case: Case, mismatch: Mismatch) -> str:
    if mismatch.num_agreeing is None:
        return f"FAILED {case.name}: {mismatch.reason}"
    lines = [
        f"FAILED {case.name}: {mismatch.num_agreeing} of {len(case.steps)} steps agree; "
        f"step {mismatch.number} at second {mismatch.second}: {mismatch.reason}"
    ]
    lines += _sides(mismatch)
    lines += [f"  {key:<25} {json.dumps(value)}" for key, value in mismatch.context.items() if value]
    lines += _live_table(mismatch)
    return "\n".join(lines)


def _sides(mismatch: Mismatch) -> list[str]:
    """Returns a line for each compared field; differing fields are marked and shown with both sides."""
    recorded, decided = mismatch.recorded, mismatch.decided
    if recorded is None or decided is None:
        side, decision = ("recorded", recorded) if recorded is not None else ("ours", decided)
        return [f"* {key:<25} {side:<8} {json.dumps(value)}" for key, value in (decision or {}).items()]
    differing = differing_fields(recorded, decided)
    lines = []
    for key, value in recorded.items():
        if key in decided:
            lines.append(f"{'*' if key in differing else ' '} {key:<25} recorded {json.dumps(value)}")
            if key in differing:
                lines.append(f"  {'':<25} {'ours':<8} {json.dumps(decided[key])}")
    return lines


def _live_table(mismatch: Mismatch) -> list[str]:
    """Returns a table of our unfinished sequences that are not waiting, or that either side of the step names."""
    named: set[str] = set()
    for decision in (mismatch.recorded, mismatch.decided):
        for value in (decision or {}).values():
            if isinstance(value, dict | list):
                named.update(value)
    shown = [seq for seq in mismatch.live if seq.state is not SequenceState.WAITING or seq.request_id in named]
    num_hidden = len(mismatch.live) - len(shown)
    if not shown:
        return []
    lines = [f"  {'request':>9} {'state':<9} {'computed':>8} {'known':>8} {'prompt':>8}   (tokens, ours, now)"]
    for seq in shown:
        counts = (seq.num_computed_tokens, seq.num_tokens, seq.num_prompt_tokens)
        state = seq.state.name.lower()
        lines.append(f"  {seq.request_id:>9} {state:<9} " + " ".join(f"{count:>8}" for count in counts))
    if num_hidden:
        lines.append(f"  and {num_hidden} more that wait")
    return lines
