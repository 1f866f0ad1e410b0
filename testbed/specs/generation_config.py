"""A checkpoint's `generation_config.json`: how its authors would have tokens drawn. Pure data: no framework."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from testbed.checks import require
from testbed.errors import ConfigError, ModelError
from testbed.foreign_text import parsed
from testbed.specs.model import Recommended

GENERATION_FILE = "generation_config.json"
DEFAULTS: dict[str, float] = asdict(Recommended())  # vLLM's, of each key that is read


def read_json_object(file: Path) -> dict[str, Any]:
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


def recommended(key: str, path: str | None, library: float) -> float:
    """What the checkpoint at `path` (a folder, or its config.json) says of a key, else vLLM's default. library: what is
    known of a model without a path."""
    if path is None:
        return library
    place = Path(path)
    file = (place if place.is_dir() else place.parent) / GENERATION_FILE
    value = read_json_object(file).get(key)
    if value is None:
        return DEFAULTS[key]
    is_whole = isinstance(DEFAULTS[key], int)
    is_good = type(value) is int or (type(value) is float and not is_whole)
    require(f"{file}: {key!r}", value, is_good, "a whole number" if is_whole else "a finite number", ModelError)
    try:
        Recommended(**{key: value})
    except ConfigError as error:
        raise ModelError(f"{file}: {str(error).removeprefix('model.recommended.')}") from None
    number: float = value
    return number
