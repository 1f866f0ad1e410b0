"""`testbed trace`: what it prints and writes, and the one line that it gives for a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.cli import main

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{i // 60:02}:{i % 60:02}.5,{i + 1},{i % 9 + 2}\n" for i in range(300)
)


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE)
    return file


def say(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    assert main(["trace", *map(str, arguments)]) == status
    captured = capsys.readouterr()
    return captured.out if status == 0 else captured.err


def test_inspect_prints_what_is_in_a_trace(capsys: pytest.CaptureFixture[str], azure: Path) -> None:
    out = say(capsys, "inspect", "azure", azure)
    assert out == say(capsys, "azure", azure), "the short form"
    assert out.startswith("azure: 300 requests in 299.0 s, fingerprint ")
    for part in ("1 per s, CV of gaps 0.00", "dispersion", "P50", "P90", "P99", "shared prefixes 0.0%"):
        assert part in out
    assert "requests" in say(capsys, "azure", azure, "--limit", 5)


def test_inspect_tells_of_sessions_tenants_and_batches(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "chat.jsonl"
    say(capsys, "synthesise", out, "num_requests=60", "max_turns=4", "num_tenants=2", "arrival=all_at_once")
    told = say(capsys, "jsonl", out)
    assert "sessions" in told
    assert "closed-loop turns" in told
    assert "tenants         2: tenant-" in told
    assert "all at one instant" in told
    rows = [{"arrival_time": i // 5, "prompt_tokens": 3, "output_tokens": 2} for i in range(50)]
    (tmp_path / "batched.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "82% of arrivals at the instant of the one before; trace.transforms=[{name: spread}]" in say(
        capsys, "jsonl", tmp_path / "batched.jsonl"
    )


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst", "t.parquet"])
def test_a_converted_trace_has_the_same_fingerprint(
    capsys: pytest.CaptureFixture[str], azure: Path, tmp_path: Path, name: str
) -> None:
    out = say(capsys, "convert", "azure", azure, tmp_path / name)
    digest = out.split()[-1]
    assert digest in say(capsys, "auto", tmp_path / name)
    assert digest in say(capsys, "azure", azure)
    assert "exists; choose another file or pass --overwrite" in say(
        capsys, "convert", "azure", azure, tmp_path / name, status=1
    )


def test_what_is_read_is_not_written_over(capsys: pytest.CaptureFixture[str], azure: Path, tmp_path: Path) -> None:
    before = azure.read_bytes()
    say(capsys, "convert", "azure", azure, own := tmp_path / "own.jsonl")
    same = say(capsys, "convert", "jsonl", own, own, "--overwrite", status=1)
    assert f"{own} is what is read; choose another file" in same
    frozen = tmp_path / "t.parquet"
    say(capsys, "freeze", frozen, "trace=azure", f"path={azure}")
    kept = frozen.read_bytes()
    again = ("freeze", frozen, "--overwrite")
    assert "is what is read" in say(capsys, *again, "trace=parquet", f"path={frozen}", status=1)
    merged = f"transforms=[{{name: merge, path: {frozen}, format: parquet, label: b}}]"
    assert "is what is read" in say(capsys, *again, "trace=azure", f"path={azure}", merged, status=1)
    bad = tmp_path / "bad.csv"
    bad.write_text(azure.read_text() + "no row\n")
    say(capsys, *again, "trace=azure", f"path={bad}", "stream=true", status=1)
    assert (azure.read_bytes(), frozen.read_bytes()) == (before, kept)
    hidden, beside = tmp_path / ".a.jsonl", tmp_path / ".b.jsonl"
    hidden.write_bytes(before)
    beside.write_text("keep me")
    there = {*tmp_path.iterdir(), tmp_path / "a.jsonl", tmp_path / "b.jsonl"}
    say(capsys, "convert", "azure", hidden, tmp_path / "a.jsonl")
    say(capsys, "convert", "azure", azure, tmp_path / "b.jsonl")
    assert (hidden.read_bytes(), beside.read_text(), {*tmp_path.iterdir()}) == (before, "keep me", there)


def test_a_frozen_trace_runs_as_the_trace_that_it_was(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = [
        "trace.num_requests=40",
        "trace.max_turns=3",
        "trace.transforms=[{name: thin, fraction: 0.7}]",
        "seed=3",
    ]
    say(capsys, "freeze", tmp_path / "t.parquet", *settings)
    runs = {
        "first": settings,
        "streamed": [*settings, "trace.stream=true"],
        "frozen": ["trace=parquet", f"trace.path={tmp_path / 't.parquet'}", "seed=3"],
        "frozen_streamed": ["trace=parquet", f"trace.path={tmp_path / 't.parquet'}", "seed=3", "trace.stream=true"],
    }
    manifests = []
    for name, overrides in runs.items():
        assert main(["run", *overrides, f"hydra.run.dir={tmp_path / name}"]) == 0
        manifests.append(json.loads((tmp_path / name / "manifest.json").read_text()))
    for key in ("fingerprint", "num_requests"):
        assert len({manifest["trace"][key] for manifest in manifests}) == 1
    assert len({manifest["digest"] for manifest in manifests}) == 1
    assert {manifest["num_unsent"] for manifest in manifests} == {0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspct", "x"], "there is no trace command or format 'inspct'; did you mean 'inspect'?"),
        (["inspect", "azur", "x"], "there is no trace format 'azur'; did you mean 'azure'?"),
        (["azure", "nowhere.csv"], "nowhere.csv: does not exist"),
        (["azure", "x", "--limit", "0"], "--limit is 0; it must be at least 1"),
        (["azure", "x", "--tokenizer", "t"], "--tokenizer goes with sharegpt only"),
        (["azure", "x", "--block-size", "0"], "--block-size is 0"),
        (["convert", "azure", "x", "out.txt"], "out.txt: unknown extension; name it .jsonl (.gz"),
        (["freeze", "out.jsonl"], "out.jsonl: a trace is frozen to a Parquet file"),
        (["synthesise", "out.jsonl", "rat=3"], "unknown key 'trace.rat'; did you mean 'trace.rate'?"),
        (["synthesise", "out.jsonl", "rate=0"], "trace.rate is 0"),
        (["synthesise", "out.jsonl", "rate=1" + 400 * "0"], "0...: it must be a number that fits a float"),
        (
            ["synthesise", "out.jsonl", "turn_prompt.value=6"],
            "trace.turn_prompt is given whole, as in 'trace.turn_prompt={value: …}'",
        ),
        (
            ["synthesise", "out.jsonl", "transforms=[{name: set_rate, rate: 2}]"],
            "trace.transforms[0] (set_rate) lacks 'by'; choose by: thin (keeps all times, and leaves whole",
        ),
        (["synthesise", "out.jsonl", "rate"], "'rate' is no key=value"),
        (["freeze", "out.parquet", "trace=azure"], "trace=azure needs trace.path=<file>"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    error = say(capsys, *arguments, status=1)
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_streamed_trace_with_a_bad_row_keeps_what_was_served_before(
    capsys: pytest.CaptureFixture[str], azure: Path, tmp_path: Path
) -> None:
    lines = AZURE.splitlines()
    lines[200] = "2023-11-16 18:03:19.5,-4,3"
    azure.write_text("\n".join(lines))
    for stream in ("true", "false"):
        run = ["run", "trace=azure", f"trace.path={azure}", f"hydra.run.dir={tmp_path / stream}"]
        assert main([*run, f"trace.stream={stream}"]) == 1
        error = capsys.readouterr().err
        assert "azure.csv:201: field 'ContextTokens' is '-4'; expected a whole number of tokens" in error
        assert "partial results" not in error, "a file is gone through before anything runs"
    for number in range(4):  # sessions are read as they begin
        asked = [{"t": i, "in": 64, "out": 3 if number < 3 else -1, "hash_ids": [i], "api_time": 1} for i in range(60)]
        (tmp_path / "sessions").mkdir(exist_ok=True)
        (tmp_path / "sessions" / f"{number}.json").write_text(json.dumps({"id": f"s{number}", "requests": asked}))
    run = ["run", "trace=agentic", f"trace.path={tmp_path / 'sessions'}", f"hydra.run.dir={tmp_path / 'run'}"]
    assert main([*run, "trace.stream=true", "trace.rate=0.001"]) == 1
    error = capsys.readouterr().err
    assert "3.json:request 1: field 'out' is -1; expected a whole number of tokens" in error
    assert "partial results kept in" in error
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["status"], manifest["trace"]["fingerprint"], manifest["num_unsent"]) == ("partial", None, None)
    assert manifest["num_sent"] > 100
