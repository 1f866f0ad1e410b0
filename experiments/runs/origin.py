"""The command that made a run, as kept in manifest.json. Reports use it to find which settings were chosen, and in
which order.

Owns the key=value pairs of a command line as data. Does not know what the keys mean, or how a run ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments.configuration.config import JUDGING, RunConfig
from experiments.configuration.saved import read_manifest, saved_config
from experiments.runs.run_folder import as_yaml, claim, has_run, locked, write_json
from testbed.errors import RunFolderError
from testbed.output import whole_file


@dataclass(frozen=True, slots=True)
class Origin:
    """The settings of a command, and of what it repeats. given: key -> value, as typed. sweep, swept, point: the
    sweep's command, the keys that it varies with their values, and the run's place in it. measured_trace: the settings
    of the trace of the measured run that this one repeats, by which a report tells loads apart.

    None: not known, no sweep, or no measured run.
    """

    given: dict[str, str] | None = None
    sweep: str | None = None
    swept: dict[str, str] | None = None
    point: int | None = None
    measured_trace: dict[str, Any] | None = None

    @classmethod
    def of(cls, overrides: Iterable[str]) -> Origin:
        """Returns the origin for a command's overrides. For `from=`, those of the old run (`kept_in`) come first."""
        return cls(_by_key(overrides))

    @classmethod
    def of_point(cls, overrides: Iterable[str], sweep: str, swept: Iterable[str], point: int) -> Origin:
        return cls(_by_key(overrides), sweep, _by_key(swept), point)

    def moved(self, by: int) -> Origin:
        return replace(self, point=None if self.point is None else self.point + by)

    def state(self, folder: Path, command: str) -> None:
        """Writes this origin into the manifest of a finished run, which may be a point of an earlier command."""
        manifest = read_manifest(folder)
        if manifest != (now := manifest | asdict(self) | {"command": command}):
            write_json(folder / "manifest.json", now)

    def say_failed(self, folder: Path, config: RunConfig, why: str, command: str) -> None:
        """Records in the folder that a run failed before it began, for reports; a later command makes the run as if the
        folder were empty. Writes nothing if the folder holds another run or cannot be written."""
        with suppress(OSError, RunFolderError), locked(folder):  # the caller reports the failure itself
            if not has_run(folder):
                claim(folder, config)
                said = {"status": "failed", "failure": why, "command": command, "started_in": os.getcwd()}
                write_json(folder / "manifest.json", said | asdict(self))


UNKNOWN = Origin()


def end_of_others(sweep: Path, mine: set[Path]) -> int:
    """Returns the first place after all finished points of the sweep that are not in `mine`; new points begin there."""
    others = (file.parent for file in sweep.glob("*/done") if file.parent not in mine)
    places = [read_manifest(folder).get("point") for folder in others]
    return max((place + 1 for place in places if place is not None), default=0)


def kept_in(folder: Path) -> list[str]:
    """Returns the settings given to the run in the folder, as overrides; empty if its manifest does not have them."""
    given = read_manifest(folder).get("given")
    return [f"{key}={value}" for key, value in given.items()] if isinstance(given, dict) else []


def _by_key(overrides: Iterable[str]) -> dict[str, str]:
    pairs = (item.lstrip("+~").partition("=") for item in overrides if "=" in item and not item.startswith("-"))
    return {key: value for key, _, value in pairs if key.partition("/")[0].partition(".")[0] != "hydra"}


def restate(folder: Path, config: RunConfig, command: str, origin: Origin) -> bool:
    """Updates the groups by which a finished run is judged: `slo` and `report` do not change a run.

    Returns whether they differ from those of `config`. If so, writes the new ones, the command and its settings into
    the folder, and a new summary. The command must set everything else as the run's own command did."""
    file = folder / "config.yaml"
    _, found, rest = file.read_text().partition(as_yaml({group: config.raw[group] for group in JUDGING}))
    if found and not rest.startswith(" "):  # else the list that comes last goes on
        return False
    kept = saved_config(folder)
    if all(kept.get(group) == config.raw[group] for group in JUDGING):
        return False
    from analysis.load import load_run  # not at the top: Arrow is slow to import

    with whole_file(file) as part:
        part.write_text(as_yaml(kept | {group: config.raw[group] for group in JUDGING}))
    said = {"command": command, "given": origin.given, "sweep": origin.sweep}
    write_json(folder / "manifest.json", read_manifest(folder) | said)
    write_json(folder / "summary.json", load_run(folder).summarise())
    return True
