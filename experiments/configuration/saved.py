"""Reads the configuration and manifest of a run folder, and resolves its relative paths from the current directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from experiments.configuration.config import FILE_KEYS, JUDGING, RunConfig
from experiments.configuration.settings import GONE
from testbed.errors import RunFolderError

MODEL_FOLDER = "model"  # in the folder of an imported vLLM run: the served model's config
TRACE_FILE = "trace.jsonl"  # in the folder of a real run, or of a run whose trace was a Python object

MEASURED = "measured\n"  # content of the file `done` in the copy of a measured run that `testbed fidelity` writes


def is_copy(folder: Path) -> bool:
    """Whether `testbed fidelity` wrote the folder: the records of a measured run, without its trace."""
    done = folder / "done"
    return done.is_file() and done.read_text(errors="replace") == MEASURED


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a run folder; empty if there is none or it cannot be read."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def saved_config(folder: Path) -> dict[str, Any]:
    """Returns the resolved configuration of a run folder as it was when the run started, without keys that no longer
    exist (GONE), unless one names a file. Raises RunFolderError if there is none, or if it is damaged."""
    file = folder / "config.yaml"
    if folder.is_file():
        raise RunFolderError(f"{folder} is a file; name the folder of a run, as {folder.parent}")
    if not file.is_file():
        raise RunFolderError(f"no run at {folder}: config.yaml is missing; name a folder that `testbed run` wrote")
    from analysis.reading.files import read_said  # not at the top: the package imports Arrow, which is slow

    raw = read_said(file)
    device = raw.get("device")
    if isinstance(device, dict) and "attention_packs_heads" in device:  # of older versions
        device["mixed_attention"] = "packed" if device["attention_packs_heads"] else "unpacked"
    for key in GONE:
        group, _, name = key.partition(".")
        if isinstance(raw.get(group), dict) and not isinstance(raw[group].get(name), str):
            raw[group].pop(name, None)
    cost = raw.get("cost")
    if isinstance(cost, dict) and cost.get("name") == "linear" and cost.get("path", "") is None:
        del cost["path"]  # of a file that older versions took
    return raw


def changed_keys(folder: Path, raw: dict[str, Any]) -> list[str]:
    """Returns the keys, but those of `slo` and `report`, whose values in a run folder are others than in `raw`; none if
    its configuration cannot be read."""
    from analysis.load import differing_keys, flatten  # not at the top: as above

    try:
        both = [
            {key: value for key, value in tree.items() if key not in JUDGING} for tree in (saved_config(folder), raw)
        ]
    except RunFolderError:
        return []
    return differing_keys([flatten(tree) for tree in both])


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the saved configuration with file paths that are valid from the current directory. Adds the directory in
    which the run was started to sys.path, so that the user's modules in it can be imported."""
    raw, started_in = saved_config(folder), read_manifest(folder).get("started_in")
    if isinstance(started_in, str) and Path(started_in) != Path.cwd():
        raw = {key: _from_here(value, Path(started_in)) for key, value in raw.items()}
    import_from(started_in)
    for group, name in (("model", MODEL_FOLDER), ("trace", TRACE_FILE)):
        raw[group] = _with_own(raw.get(group), folder.absolute() / name)
    return raw


def import_from(started_in: Any) -> None:
    """Adds the directory in which a run was started, as its manifest has it, to sys.path, unless it is there."""
    if isinstance(started_in, str) and started_in not in sys.path:
        sys.path.append(started_in)


def engine_dtype(saved: dict[str, Any]) -> str | None:
    """Returns the dtype that the saved run's engine was told to compute in; None if it was the model's."""
    dtype = saved["backend"].get("dtype")
    return {"auto": None, "half": "float16", "float": "float32"}.get(dtype, dtype)  # vLLM's words


def unlike_the_engine(saved: dict[str, Any], config: RunConfig) -> str:
    """Returns a note if the saved run's engine computed in another dtype than its simulation; else ""."""
    dtype, own = engine_dtype(saved), config.model.dtype
    if not config.is_simulated or dtype in (None, own) or own == "fp8":  # of weights, whatever the engine computes in
        return ""
    is_of_files = config.model.path is not None
    way = f"model.path a copy of config.json that says {dtype}" if is_of_files else f"model.dtype={dtype}"
    return f"the engine computed in {dtype} (backend.dtype), and is simulated in {own}: give {way}"


def _with_own(group: Any, kept: Path) -> Any:
    """Returns a group whose file is kept in the run folder, with the file's new path if the folder was moved."""
    path = group.get("path") if isinstance(group, dict) else None
    is_moved = path is not None and Path(path).name == kept.name and not Path(path).exists() and kept.exists()
    return group | {"path": str(kept)} if is_moved else group


def _from_here(tree: Any, started_in: Path) -> Any:
    """Returns a configuration in which paths relative to the run's start directory are replaced by full paths."""
    if not isinstance(tree, dict):
        return [_from_here(item, started_in) for item in tree] if isinstance(tree, list) else tree
    named = {key: tree[key] for key in FILE_KEYS if isinstance(tree.get(key), str) and tree[key]}
    there = {key: str(started_in / name) for key, name in named.items() if (started_in / name).exists()}
    return {key: _from_here(value, started_in) for key, value in tree.items()} | there
