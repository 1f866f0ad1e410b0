"""A checkpoint's `generation_config.json`: how its authors would have tokens drawn. Pure data: no framework."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from testbed.checks import require
from testbed.errors import ModelError
from testbed.foreign_text import parsed
from testbed.specs.model import Recommended

GENERATION_FILE = "generation_config.json"
_VLLM = asdict(Recommended())


def read_generation_config(file: Path) -> dict[str, Any]:
    """What the file says; nothing where there is none. Raises ModelError for a file that is damaged."""
    if not file.is_file():
        return {}
    try:
        values = parsed(json.loads, file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{file} holds no JSON object")
    return values


def recommended(key: str, path: str | None, otherwise: Any) -> Any:
    """What the checkpoint at `path` (a folder, or its config.json) says of a key. otherwise: for no path, where a model
    of the library speaks; a checkpoint that is silent leaves vLLM's default."""
    if path is None:
        return otherwise
    folder = Path(path)
    file = (folder if folder.is_dir() else folder.parent) / GENERATION_FILE
    value = read_generation_config(file).get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(f"{file}: {key!r}", value, value is None or is_number, "a number", ModelError)
    return _VLLM[key] if value is None else value
