"""The tables of docs/analysis.md: `python -m tests.analysis.schema_page` writes them from testbed/records/schema.py."""

from __future__ import annotations

import re
from pathlib import Path

from testbed.records import schema

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "analysis.md"
TABLES = {"requests": "REQUEST_COLUMNS", "steps": "STEP_COLUMNS"}


def columns(table: str) -> list[tuple[str, str, str]]:
    """(name, type, meaning) of each column, as the schema's source has them, one a line."""
    source = (ROOT / "testbed" / "records" / "schema.py").read_text(encoding="utf-8")
    body = source.partition(f"{table}: dict[str, str] = {{")[2].partition("\n}")[0]
    found = re.findall(r'^    "(\w+)": "([^"]+)",(?:  # (.+))?$', body, re.MULTILINE)
    assert {name: kind for name, kind, _ in found} == getattr(schema, table)
    return found


def unit(name: str) -> str:
    if name.endswith(("_ns", "_s")):
        return name.rpartition("_")[2]
    if "tokens" in name or name == "num_emitted":
        return "tokens"
    return "blocks" if "blocks" in name else "count" if name.startswith("num_") else ""


def rows(table: str) -> str:
    lines = [f"| `{name}` | {kind} | {unit(name)} | {meaning} |" for name, kind, meaning in columns(table)]
    return "\n".join(["| column | type | unit | meaning |", "|---|---|---|---|", *lines])


def written(page: str) -> str:
    """The page with its tables as they should be: each follows its mark, up to an empty line."""
    for name, table in TABLES.items():
        page, num = re.subn(rf"(<!-- {name} -->\n)(?:\|.*\n)*", lambda mark, of=table: mark[1] + rows(of) + "\n", page)
        assert num == 1, f"docs/analysis.md has no single <!-- {name} -->"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
