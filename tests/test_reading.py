"""A house that can be read: files and functions of the core stay small, and what is gone stays gone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.source_tree import FILES, ROOMS, ROOT, relative, tree_of

SMALL = [path for path in FILES if path.parent in (ROOT / "testbed" / "core", ROOT / "testbed" / "blocks")]
APART = (  # tables and seams
    "testbed/core/sampling.py", "testbed/core/interfaces.py", "testbed/core/commands.py",
    "testbed/blocks/eviction.py", "testbed/blocks/interfaces.py",
)  # fmt: skip


def num_lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


@pytest.mark.parametrize("path", SMALL, ids=relative)
def test_a_file_of_the_core_is_read_in_one_sitting_and_a_function_at_a_glance(path: Path) -> None:
    assert num_lines(path) <= 300
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)]
    assert not [f"{node.name}, line {node.lineno}" for node in functions if (node.end_lineno or 0) - node.lineno >= 50]


def test_the_core_stays_small() -> None:
    """With comments, docstrings and blank lines; 4,470 when it had two ways of doing each thing."""
    counts = {relative(path): num_lines(path) for path in SMALL}
    assert set(APART) < set(counts)
    assert sum(count for name, count in counts.items() if name not in APART) <= 3720


GONE = (
    r"fast.?forward", r"is_time_dependent", r"price_decodes", r"plan\.num_steps", r"shape_of\b", r"later_spans",
    r"RunSpans", r"DecodeBatch", r"\blent\b", r"\blend\b", r"lone_?prefix", r"(add|pop)_run\b", r"\bsteps_of\b",
    r"durations_ns", r"seq\.num_slots", r"record_decisions", r"plan\.each\(", r"acyclic=",  # docs/compiled.md
)  # fmt: skip
REFUSES = '"backend.fast_forward": "is gone'  # the one line that says why nobody needs it any more


@pytest.mark.parametrize("room", ROOMS)
def test_what_is_gone_stays_gone(room: str) -> None:
    """There is one way of doing each thing: a plan is one step, and each block is counted by itself."""
    gone = re.compile("|".join(GONE), re.IGNORECASE)
    files = [path for path in sorted((ROOT / room).rglob("*")) if path.suffix in (".py", ".yaml")]
    assert len(files) > 5, "nothing was looked at"
    lines = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if gone.search(line) and REFUSES not in line
    ]
    assert not lines, lines
