"""Files of prompts of `testbed generate`: text a line, or JSON a line with parameters of its own."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from testbed.core.sampling import SamplingParams
from testbed.errors import RequestError, TraceError
from testbed.foreign_text import parsed, unknown
from testbed.traces.readers.fields import refuse_half_characters

PROMPT_KEYS = ("id", "prompt", "prompt_token_ids", "cache_salt", "priority")
SAMPLING_KEYS = tuple(item.name for item in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt of the command line or of a file. sampling: what its row says differently. place: for messages."""

    prompt: Any
    sampling: dict[str, Any]
    place: str
    id: str | None = None


def read_prompts_file(file: Path) -> list[Asked]:
    """Prompts of a .txt (one a line) or a .jsonl file; `-` is standard input, as .txt. Empty lines are passed over.

    Raises RequestError naming file and line.
    """
    try:
        lines = sys.stdin.read().splitlines() if str(file) == "-" else file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is not UTF-8 text (at byte {error.start})") from None
    except OSError as error:
        raise RequestError(f"--prompts-file {file} cannot be read: {error.strerror}") from None
    rows = [(f"{file}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if file.suffix in (".jsonl", ".json"):
        return [_json_row(place, line) for place, line in rows]
    return [Asked(line, {}, place) for place, line in rows]


def _json_row(place: str, line: str) -> Asked:
    try:
        row = parsed(json.loads, line)
    except ValueError as error:
        raise RequestError(f"{place}: not JSON ({error})") from None
    try:
        refuse_half_characters(row, place)
    except TraceError as error:
        raise RequestError(str(error)) from None
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise RequestError(f"{place}: expected an object with prompt or prompt_token_ids")
    for key in row:
        if key not in (*PROMPT_KEYS, *SAMPLING_KEYS):
            raise RequestError(unknown(f"{place}: unknown key {key!r}", key, (*PROMPT_KEYS, *SAMPLING_KEYS)))
    if not row.get("prompt") and not row.get("prompt_token_ids"):
        raise RequestError(f"{place}: the prompt is empty; give prompt or prompt_token_ids")
    prompt = {key: row[key] for key in PROMPT_KEYS[1:] if key in row}
    return Asked(prompt, {key: row[key] for key in SAMPLING_KEYS if key in row}, place, row.get("id"))
