"""`testbed trace`: what it prints and writes, and the one line that it gives for a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.experiments.kit import Say

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{i // 60:02}:{i % 60:02}.5,{i + 1},{i % 9 + 2}\n" for i in range(300)
)


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE)
    return file


@pytest.fixture
def trace(say: Say) -> Say:
    return lambda *arguments: say("trace", *map(str, arguments))


def test_inspect_prints_what_is_in_a_trace(trace: Say, azure: Path) -> None:
    out = trace("inspect", "azure", azure).success()
    assert out == trace("azure", azure).success(), "the short form"
    assert out.startswith("azure: 300 requests in 299.0 s, fingerprint ")
    for part in ("1 per s, CV of gaps 0.00", "dispersion", "P50", "P90", "P99", "shared prefixes 0.0%"):
        assert part in out
    assert "requests" in trace("azure", azure, "--limit", 5).success()


def test_inspect_tells_of_sessions_tenants_and_batches(trace: Say, tmp_path: Path) -> None:
    out = tmp_path / "chat.jsonl"
    trace("synthesise", out, "num_requests=60", "max_turns=4", "num_tenants=2", "arrival=all_at_once").success()
    told = trace("jsonl", out).success()
    assert "sessions" in told
    assert "closed-loop turns" in told
    assert "tenants         2: tenant-" in told
    assert "all at one instant" in told
    named = [{"arrival_time": i, "prompt_tokens": 3, "tenant": name} for i, name in enumerate(("a, b", "c", None, "c"))]
    (tmp_path / "named.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
    assert "tenants         2: c 50%, 'a, b' 25%, none 25%" in trace("jsonl", tmp_path / "named.jsonl").success()
    rows = [{"arrival_time": i // 5, "prompt_tokens": 3, "output_tokens": 2} for i in range(50)]
    (tmp_path / "batched.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        "82% of arrivals at the instant of the one before; trace.transforms=[{name: spread}]"
        in trace("jsonl", tmp_path / "batched.jsonl").success()
    )


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst", "t.parquet"])
def test_a_converted_trace_has_the_same_fingerprint(trace: Say, azure: Path, tmp_path: Path, name: str) -> None:
    out = trace("convert", "azure", azure, tmp_path / name).success()
    digest = out.split()[-1]
    assert digest in trace("auto", tmp_path / name).success()
    assert digest in trace("azure", azure).success()
    assert (
        "exists; choose another file or pass --overwrite" in trace("convert", "azure", azure, tmp_path / name).error()
    )


def test_what_is_read_is_not_written_over(trace: Say, azure: Path, tmp_path: Path) -> None:
    before = azure.read_bytes()
    trace("convert", "azure", azure, own := tmp_path / "own.jsonl").success()
    same = trace("convert", "jsonl", own, own, "--overwrite").error()
    assert f"{own} is what is read; choose another file" in same
    frozen = tmp_path / "t.parquet"
    trace("freeze", frozen, "trace=azure", f"path={azure}").success()
    kept = frozen.read_bytes()
    again = ("freeze", frozen, "--overwrite")
    assert "is what is read" in trace(*again, "trace=parquet", f"path={frozen}").error()
    merged = f"transforms=[{{name: merge, path: {frozen}, format: parquet, label: b}}]"
    assert "is what is read" in trace(*again, "trace=azure", f"path={azure}", merged).error()
    bad = tmp_path / "bad.csv"
    bad.write_text(azure.read_text() + "no row\n")
    trace(*again, "trace=azure", f"path={bad}", "stream=true").error()
    assert (azure.read_bytes(), frozen.read_bytes()) == (before, kept)
    hidden, beside = tmp_path / ".a.jsonl", tmp_path / ".b.jsonl"
    hidden.write_bytes(before)
    beside.write_text("keep me")
    there = {*tmp_path.iterdir(), tmp_path / "a.jsonl", tmp_path / "b.jsonl"}
    trace("convert", "azure", hidden, tmp_path / "a.jsonl").success()
    trace("convert", "azure", azure, tmp_path / "b.jsonl").success()
    assert (hidden.read_bytes(), beside.read_text(), {*tmp_path.iterdir()}) == (before, "keep me", there)


def test_a_frozen_trace_runs_as_the_trace_that_it_was(trace: Say, say: Say, tmp_path: Path) -> None:
    thin = "trace.transforms=[{name: thin, fraction: 0.7}]"
    settings = ["trace.num_requests=40", "trace.max_turns=3", thin, "seed=3"]
    trace("freeze", tmp_path / "t.parquet", *settings).success()
    runs = {
        "first": settings,
        "streamed": [*settings, "trace.stream=true"],
        "frozen": ["trace=parquet", f"trace.path={tmp_path / 't.parquet'}", "seed=3"],
        "frozen_streamed": ["trace=parquet", f"trace.path={tmp_path / 't.parquet'}", "seed=3", "trace.stream=true"],
    }
    manifests = []
    for name, overrides in runs.items():
        say("run", *overrides, f"hydra.run.dir={tmp_path / name}").success()
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
        (["synthesise", "out.jsonl", "turn_prompt.value=6"],
         "trace.turn_prompt is given whole, as in 'trace.turn_prompt={value: …}'"),
        (["synthesise", "out.jsonl", "transforms=[{name: set_rate, rate: 2}]"],
         "trace.transforms[0] (set_rate) lacks 'by'; choose by: thin (keeps all times, and leaves whole"),
        (["synthesise", "out.jsonl", "rate"], "'rate' is no key=value"),
        (["freeze", "out.parquet", "trace=azure"], "trace=azure needs trace.path=<file>"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    trace: Say,
    here: Path,
    arguments: list[str],
    message: str,
) -> None:
    error = trace(*arguments).error()
    assert message in error
    assert list(here.iterdir()) == []


def test_a_streamed_trace_with_a_bad_row_keeps_what_was_served_before(say: Say, azure: Path, tmp_path: Path) -> None:
    lines = AZURE.splitlines()
    lines[200] = "2023-11-16 18:03:19.5,-4,3"
    azure.write_text("\n".join(lines))
    for stream in ("true", "false"):
        run = ["run", "trace=azure", f"trace.path={azure}", f"hydra.run.dir={tmp_path / stream}"]
        error = say(*run, f"trace.stream={stream}").error()
        assert "azure.csv:201: field 'ContextTokens' is '-4'; expected a whole number of tokens" in error
        assert "partial results" not in error, "a file is gone through before anything runs"
    for number in range(4):  # sessions are read as they begin
        asked = [{"t": i, "in": 64, "out": 3 if number < 3 else -1, "hash_ids": [i], "api_time": 1} for i in range(60)]
        (tmp_path / "sessions").mkdir(exist_ok=True)
        (tmp_path / "sessions" / f"{number}.json").write_text(json.dumps({"id": f"s{number}", "requests": asked}))
    run = ["run", "trace=agentic", f"trace.path={tmp_path / 'sessions'}", f"hydra.run.dir={tmp_path / 'run'}"]
    error = say(*run, "trace.stream=true", "trace.rate=0.001").error()
    assert "3.json:request 1: field 'out' is -1; expected a whole number of tokens" in error
    assert "partial results kept in" in error
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["status"], manifest["trace"]["fingerprint"], manifest["num_unsent"]) == ("partial", None, None)
    assert manifest["num_sent"] > 100
