"""What a finished run is judged by, given anew: `slo` and `report` decide nothing, so the run need not be repeated."""

from __future__ import annotations

import os
from pathlib import Path

from experiments.configuration.config import JUDGING, RunConfig
from experiments.configuration.saved import read_manifest, saved_config
from experiments.runs.run_folder import as_yaml, write_json


def restate(folder: Path, config: RunConfig, command: str, given: dict[str, str] | None) -> bool:
    """Whether the run in the folder stated another SLO or question than `config` does; it now states this one, and that
    the command made it, which gives all that decides the run as the run's own did. given: Origin.given."""
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
    write_json(folder / "manifest.json", read_manifest(folder) | {"command": command, "given": given})
    write_json(folder / "summary.json", load_run(folder).summarise())
    return True
