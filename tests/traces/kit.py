"""Small traces and files for tests, and the published files, where the user has them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import TraceError
from testbed.traces.arrange import arrange
from testbed.traces.readers import read_trace
from testbed.traces.schema import Span, Trace, TraceRequest

S = 10**9


def plain(*arrivals_s: float) -> Trace:
    """Requests r0, r1, … of 8 tokens, which share nothing, and 4 of output."""
    rows = [TraceRequest(f"r{i}", round(at * S), (Span(i, 0, 8),), Span(i, 8, 4)) for i, at in enumerate(arrivals_s)]
    return arrange("plain", rows)


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_bytes(text.encode())
    return file


def json_lines(*rows: Mapping[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def check_refused(form: str, file: Path | str, message: str, **options: Any) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(form, file, **options)


def published(name: str) -> Path:
    file = Path(os.environ.get("TESTBED_TRACES") or "") / name
    if "TESTBED_TRACES" not in os.environ or not file.is_file():
        pytest.skip(f"set TESTBED_TRACES to a folder with {name}")
    return file
