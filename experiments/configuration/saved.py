"""What the folder of a run says of it: its configuration, as it was started and as its files are found from here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from experiments.configuration.config import FILE_KEYS
from experiments.configuration.settings import GONE
from testbed.errors import RunFolderError

MODEL_FOLDER = "model"  # of a run of a model that vLLM served
TRACE_FILE = "trace.jsonl"  # of a real run, and of a run whose trace was handed over in Python


def read_manifest(folder: Path) -> dict[str, Any]:
    """What the run there says of itself; nothing where it does not."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def saved_config(folder: Path) -> dict[str, Any]:
    """The resolved configuration of a run's folder, as it was when the run was started. Raises RunFolderError if there
    is none, or it is damaged."""
    file = folder / "config.yaml"
    if folder.is_file():
        raise RunFolderError(f"{folder} is a file; name the folder of a run, as {folder.parent}")
    if not file.is_file():
        raise RunFolderError(f"no run at {folder}: config.yaml is missing; name a folder that `testbed run` wrote")
    from analysis.reading.files import read_said  # not at the top: the package imports Arrow, which is slow

    raw = read_said(file)
    for key in GONE:
        group, _, name = key.partition(".")
        if isinstance(raw.get(group), dict):
            raw[group].pop(name, None)
    return raw


def read_config(folder: Path) -> dict[str, Any]:
    """The same, its files as they are found from here; modules that lay where it was started are found from now on."""
    raw, started_in = saved_config(folder), read_manifest(folder).get("started_in")
    if isinstance(started_in, str) and Path(started_in) != Path.cwd():
        raw = {key: _from_here(value, Path(started_in)) for key, value in raw.items()}
        if started_in not in sys.path:
            sys.path.append(started_in)
    for group, name in (("model", MODEL_FOLDER), ("trace", TRACE_FILE)):
        raw[group] = _with_own(raw.get(group), folder.absolute() / name)
    return raw


def _with_own(group: Any, kept: Path) -> Any:
    """A group whose file the folder itself keeps, which was moved since."""
    path = group.get("path") if isinstance(group, dict) else None
    is_moved = path is not None and Path(path).name == kept.name and not Path(path).exists() and kept.exists()
    return group | {"path": str(kept)} if is_moved else group


def _from_here(tree: Any, started_in: Path) -> Any:
    """The files of a configuration that are named from where its run was started, for whoever stands elsewhere."""
    if not isinstance(tree, dict):
        return [_from_here(item, started_in) for item in tree] if isinstance(tree, list) else tree
    named = {key: tree[key] for key in FILE_KEYS if isinstance(tree.get(key), str) and tree[key]}
    there = {key: str(started_in / name) for key, name in named.items() if (started_in / name).exists()}
    return {key: _from_here(value, started_in) for key, value in tree.items()} | there
