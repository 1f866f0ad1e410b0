"""docs/analysis.md says what is in the files, and its Python runs."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from matplotlib import pyplot

from analysis.load import flatten
from experiments import simulate
from tests.analysis.schema_page import PAGE, TABLES, columns, written

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_has_every_column_as_the_schema_has_it() -> None:
    assert written(TEXT) == TEXT, "python -m tests.analysis.schema_page writes it again"
    assert all(meaning for table in TABLES.values() for _, _, meaning in columns(table)), "a column without a meaning"


def test_the_page_has_every_key_of_a_summary_and_no_other(tmp_path: Path) -> None:
    trace = {"name": "synthetic", "rate": 50, "num_requests": 90, "num_tenants": 2, "deadline_s": 1.0}
    one = simulate(trace, slo={"ttft_s": 0.5}, folder=tmp_path / "one")
    fleet = simulate(trace, backend={"num_replicas": 2}, folder=tmp_path / "fleet")
    few = simulate({"name": "synthetic", "num_requests": 3}, folder=tmp_path / "few")
    keys = {key for run in (one, fleet, few) for key in flatten(run.summary)}
    table = TEXT.partition("\n## summary.json")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    said = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    assert not [key for key in keys if not any(fnmatchcase(key, name) for name in said)]
    of_real_runs = {"replay.*"}
    assert not [name for name in said - of_real_runs if not any(fnmatchcase(key, name) for key in keys)]


def test_the_pages_python_runs_and_draws_every_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.+?)```", TEXT, re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    pyplot.close("all")  # what a later test draws must not go into them
    assert (tmp_path / "figures" / "load.pdf").is_file()
    pictures = {path.stem for path in (tmp_path / "figures").glob("*.svg")}
    assert pictures == set(re.findall(r'"figures/(\w+)"', TEXT))
    printed = capsys.readouterr().out.splitlines()
    example = TEXT.partition("Each prints five lines:\n\n```\n")[2].partition("```")[0].splitlines()
    assert [line.split()[0] for line in printed[:10]] == [line.split()[0] for line in example]
