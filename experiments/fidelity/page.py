"""A result put into a document: what stands between its marks is replaced, so that one command renews the table."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from experiments.runs.environment import describe_machine, describe_versions
from testbed.errors import ConfigError

BEGIN, END = "<!-- testbed fidelity: begin -->", "<!-- testbed fidelity: end -->"


def check_page(page: Path | None) -> None:
    """Raises ConfigError if the document has no place for the result."""
    if page is None:
        return
    if not page.is_file():
        raise ConfigError(f"--page {page}: no such file; expected a document with the marks {BEGIN} and {END}")
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ConfigError(f"--page {page}: expected the marks {BEGIN} and {END} once each, in this order")


def write_page(page: Path, arguments: Sequence[str], lines: Sequence[str]) -> None:
    """Replaces what stands between the marks. arguments: of the command; its files are named without their folders."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    words = [Path(word).name if Path(word).exists() and word != str(page) else word for word in arguments]
    machine = describe_machine()
    head = [
        f"`{shlex.join(['testbed', 'fidelity', *words])}`, {date.today().isoformat()}, {machine.get('cpu')}, testbed "
        f"{describe_versions()['llm-serving-testbed']}:",
        "",
    ]
    page.write_text("\n".join([before + BEGIN, *head, *lines, END]) + after, encoding="utf-8")
