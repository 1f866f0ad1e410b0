"""What a run's maker asked for, as manifest.json keeps it: reports tell by it what was chosen, and in which order.

Owns the words of a command line as data. Must not know what the keys mean, or what becomes of a run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from experiments.configuration.config import JUDGING, RunConfig
from experiments.configuration.saved import read_manifest, saved_config
from experiments.runs.run_folder import as_yaml, claim, has_run, locked, write_json
from testbed.errors import RunFolderError


@dataclass(frozen=True, slots=True)
class Origin:
    """given: key -> value, as they were typed. sweep, swept, point: the sweep's command, the keys that it varies, and
    the run's place there.

    None: not known, or no sweep.
    """

    given: dict[str, str] | None = None
    sweep: str | None = None
    swept: dict[str, str] | None = None
    point: int | None = None

    @classmethod
    def of(cls, overrides: Iterable[str]) -> Origin:
        """Of the overrides of a command (of another run: after that run's own, `kept_in`)."""
        return cls(_by_key(overrides))

    @classmethod
    def of_point(cls, overrides: Iterable[str], sweep: str, swept: Iterable[str], point: int) -> Origin:
        return cls(_by_key(overrides), sweep, _by_key(swept), point)

    def moved(self, by: int) -> Origin:
        return replace(self, point=None if self.point is None else self.point + by)

    def state(self, folder: Path, command: str) -> None:
        """Says so of a finished run, which an earlier command had made in another place of its sweep."""
        manifest = read_manifest(folder)
        if manifest != (now := manifest | asdict(self) | {"command": command}):
            write_json(folder / "manifest.json", now)

    def say_failed(self, folder: Path, config: RunConfig, why: str, command: str) -> None:
        """Leaves word of a run that did not begin: reports then tell of it, and it is made as if nothing were there.
        Where nothing can be written, or another run is, nothing is left."""
        with suppress(OSError, RunFolderError), locked(folder):  # why it failed is what its caller says
            if not has_run(folder):
                claim(folder, config)
                said = {"status": "failed", "failure": why, "command": command, "started_in": os.getcwd()}
                write_json(folder / "manifest.json", said | asdict(self))


UNKNOWN = Origin()


def end_of_others(sweep: Path, mine: set[Path]) -> int:
    """Where the places of finished points end there that are not among `mine`: what extends them comes after."""
    others = (file.parent for file in sweep.glob("*/done") if file.parent not in mine)
    places = [read_manifest(folder).get("point") for folder in others]
    return max((place + 1 for place in places if place is not None), default=0)


def kept_in(folder: Path) -> list[str]:
    """What the run there was given, as overrides; of a run that does not say, nothing."""
    given = read_manifest(folder).get("given")
    return [f"{key}={value}" for key, value in given.items()] if isinstance(given, dict) else []


def _by_key(overrides: Iterable[str]) -> dict[str, str]:
    pairs = (item.lstrip("+~").partition("=") for item in overrides if "=" in item and not item.startswith("-"))
    return {key: value for key, _, value in pairs if key.partition("/")[0].partition(".")[0] != "hydra"}


def restate(folder: Path, config: RunConfig, command: str, origin: Origin) -> bool:
    """Gives anew what a finished run is judged by: `slo` and `report` decide nothing, so it need not be repeated.

    Whether the run in the folder stated another SLO or question than `config` does; it now states this one, and that
    the command made it, which gives all that decides the run as the run's own did."""
    file = folder / "config.yaml"
    if as_yaml({group: config.raw[group] for group in JUDGING}) in file.read_text():
        return False
    kept = saved_config(folder)
    if all(kept.get(group) == config.raw[group] for group in JUDGING):
        return False
    from analysis.load import load_run  # not at the top: Arrow is slow to import

    temporary = file.with_suffix(".tmp")
    temporary.write_text(as_yaml(kept | {group: config.raw[group] for group in JUDGING}))
    os.replace(temporary, file)
    said = {"command": command, "given": origin.given, "sweep": origin.sweep}
    write_json(folder / "manifest.json", read_manifest(folder) | said)
    write_json(folder / "summary.json", load_run(folder).summarise())
    return True
