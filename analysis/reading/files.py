"""Reads the small files of a run folder, such as config.yaml. Every mistake is a RunFolderError of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from testbed.errors import RunFolderError
from testbed.foreign_text import not_yaml, parsed

_SAID: dict[str, dict[str, type]] = {  # keys that these files have for every run
    "config.yaml": dict.fromkeys(("backend", "scheduler", "cache", "trace"), dict),
    "manifest.json": {"status": str, "backend": str, "trace": dict, "num_gpu_blocks": object},
}
_FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's loader, if PyYAML was built with it


def read_said(file: Path) -> dict[str, Any]:
    """The content of config.yaml or manifest.json. Raises RunFolderError that names the missing keys."""
    tree = read_yaml(file) if file.suffix == ".yaml" else read_json(file)
    missing = [key for key, kind in _SAID[file.name].items() if key not in tree or not isinstance(tree[key], kind)]
    if missing:
        raise RunFolderError(
            f"{file}: {', '.join(missing)} missing; it is damaged: copy it again, or make the run again"
        )
    return tree


def _load(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_FAST)
    except yaml.YAMLError:
        return yaml.safe_load(text)  # its error names the wrong line


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file of a run. Raises RunFolderError if there is none."""
    try:
        tree = parsed(_load, file.read_bytes())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RunFolderError(f"{file}{not_yaml(error)}") from error
    if not isinstance(tree, dict):
        raise RunFolderError(f"{file}: holds no mapping of configuration keys")
    return {str(key): value for key, value in tree.items()}


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a run. Raises RunFolderError if there is none."""
    try:
        tree = parsed(json.loads, file.read_bytes())
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{file}: cannot be read as JSON ({one_line(error)}); make the run again") from error
    if not isinstance(tree, dict):
        raise RunFolderError(f"{file}: is not a JSON object")
    return tree


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the run in `folder`; empty if it cannot be read."""
    try:
        return read_json(folder / "manifest.json")
    except RunFolderError:
        return {}


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
