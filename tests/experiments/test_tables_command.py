"""`testbed tables`: what is written, printed, drawn and refused."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from experiments.tables import aiconfigurator
from experiments.tables.doubts import MAX_DOUBTS, checked
from experiments.tables.llmservingsim import read as read_llmservingsim
from testbed.errors import ConfigError
from testbed.specs.operator_tables import check_rows, read_operator_tables
from tests.experiments import tables_on_the_spot as spot
from tests.experiments.kit import Say


@pytest.fixture
def tables(say: Say) -> Say:
    return lambda *arguments: say("tables", *map(str, arguments))


def test_an_absent_package_is_one_line(tables: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiconfigurator, "find_spec", lambda name: None)
    for arguments in (
        ("list",),
        ("show", "h200"),
        ("import", "aiconfigurator", "--device", "h200", "--out", "x.parquet"),
    ):
        said = tables(*arguments).error()
        assert "not installed; install the extra: pip install '.[tables]' in the repository" in said


def test_import_writes_one_file_and_says_what_it_doubts(installed: Path, tmp_path: Path, tables: Say) -> None:
    out = tmp_path / "h200.parquet"
    said = tables("import", "aiconfigurator", "--device", "h200", "--out", out).success()
    assert said.startswith(f"{out}: 30 points of h200 (NVIDIA H200)\n  doubt: ")
    written = read_operator_tables(out)
    assert written.rows.num_rows == 30
    assert len(written.doubts) <= MAX_DOUBTS
    again = tables("import", "aiconfigurator", "--device", "h200", "--out", out).error()
    assert "exists; choose another --out or pass --overwrite" in again
    tables("import", "aiconfigurator", installed, "--device", "h200", "--out", out, "--overwrite").success()
    listed = tables("list", out).success()
    assert "h200 (NVIDIA H200): 30 points" in listed
    assert any(line.split()[:4] == ["vllm", "0.24.0", "gemm", "16"] for line in listed.splitlines())
    assert "doubt: attention_prefill: all 3 points are whole prompts" in listed


def test_list_says_what_the_package_covers(installed: Path, tables: Say) -> None:
    lines = [line.split(maxsplit=4) for line in tables("list").success().splitlines()]
    names = "gemm, attention_prefill, attention_decode, all_reduce, all_gather"
    assert lines[1:] == [["gb200", "vllm", "0.24.0", "30", names], ["h200", "vllm", "0.24.0", "30", names]]


def test_show_has_the_ranges_of_each_operator(installed: Path, tables: Say) -> None:
    said = tables("show", "h200").success()
    assert "gemm: 16 points, bfloat16, fp8_block" in said
    assert "m               1 to 8 (4 sizes)" in said
    assert "all_gather" not in tables("show", "h200", "--operator", "gemm").success()
    assert "no operator 'gem'; did you mean 'gemm'" in tables("show", "h200", "--operator", "gem").error()


def test_show_draws_each_operator_beside_the_data_sheet(
    installed: Path, tmp_path: Path, tables: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = tables("show", "h200", "--plot", tmp_path / "figures" / "h200").success().splitlines()[-10:]
    assert [Path(line).name for line in drawn[:2]] == ["h200-gemm.png", "h200-gemm.svg"]
    assert all(Path(line).stat().st_size > 5_000 for line in drawn)
    monkeypatch.setattr("analysis.plots.style.save", lambda figure, stem: (f"{stem}.png", f"{stem}.svg"))
    one = spot.llmservingsim(tmp_path / "there")
    tables("import", "llmservingsim", one, "--out", tmp_path / "l.parquet").success()
    drawn = (
        tables("show", tmp_path / "l.parquet", "--plot", tmp_path / "l", "--model", "qwen3_8b").success().splitlines()
    )
    assert sum(line.endswith(".png") for line in drawn) == 6
    drawn = tables("show", "h200", "--operator", "gemm", "--plot", tmp_path / "one.png").success().splitlines()[-2:]
    assert [Path(line).name for line in drawn] == ["one-gemm.png", "one-gemm.svg"]


def test_show_checks_the_model_without_a_figure_too(installed: Path, tables: Say) -> None:
    assert "--model is 'qwen3_8'; did you mean" in tables("show", "h200", "--model", "qwen3_8").error()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lisst",), "no command `testbed tables lisst`; did you mean 'list'"),
        (("import", "vidurr", "--out", "x.parquet"), "no source 'vidurr'; did you mean 'vidur'"),
        (("import", "splitwise", "--out", "x.parquet"), "times whole steps and requests, of which no operator's time"),
        (("import", "vidur", "--out", "x.csv"), r"x\.csv: operator tables are a Parquet file"),
        (("import", "vidur", "--out", "x.parquet"), "no folder is given; give that of vidur's files"),
        (("import", "vidur", "/absent", "--out", "x.parquet"), "there is no folder /absent"),
        (("import", "vidur", ".", "--model", "tiny", "--out", "x.parquet"), "--model goes with llmservingsim only"),
        (("import", "aiconfigurator", "--out", "x.parquet"), "choose one with --device"),
        (("import", "aiconfigurator", "/absent", "--device", "h200", "--out", "x.parquet"), "it has no folder `data`"),
        (("list", "absent.parquet"), r"no operator tables at absent\.parquet"),
    ],
)
def test_a_mistake_is_one_line(tables: Say, arguments: tuple[str, ...], message: str) -> None:
    assert re.search(message, tables(*arguments).error())


def test_it_says_what_it_can(say: Say, tables: Say) -> None:
    assert "import <source>" in tables().success()
    assert "tables list" in say("--help").success()


# --- the published tables, where the user has them ---


def test_the_packages_tables_of_an_h200_load_within_a_second() -> None:
    try:
        aiconfigurator.systems_folder()
    except ConfigError:
        pytest.skip("install aiconfigurator-core, the extra `tables`")
    aiconfigurator.load("h100")  # what is imported once
    began = time.process_time()
    tables = aiconfigurator.load("h200")
    assert time.process_time() - began < 1.0
    check_rows(tables.rows, "h200")
    assert tables.rows.num_rows > 100_000
    assert len(checked(tables, None).doubts) <= MAX_DOUBTS


def test_the_published_tables_of_llmservingsim_are_read_whole() -> None:
    folder = Path(os.environ.get("TESTBED_OPERATORS") or "") / "llmservingsim" / "RTX4090"
    if "TESTBED_OPERATORS" not in os.environ or not folder.is_dir():
        pytest.skip("set TESTBED_OPERATORS to a folder with llmservingsim/RTX4090")
    tables = read_llmservingsim(folder)
    check_rows(tables.rows, "it")
    assert tables.rows.num_rows == 10_091
