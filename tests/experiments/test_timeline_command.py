"""`testbed timeline` on runs of the simulator and the real engine. What is drawn: tests/analysis."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.analysis.chrome_events import read
from tests.experiments.kit import REAL, SHORT, TINY, Say, decisions_of

CROWDED = ("cache.num_gpu_blocks=14", "cache.num_cpu_blocks=40", "scheduler=vllm_v0", "scheduler.preemption=swap")


def run(say: Say, folder: Path, *more: str) -> Path:
    say("run", *TINY, *SHORT, "record.decisions=true", *more, f"hydra.run.dir={folder}").success()
    return folder


def test_a_simulated_and_a_real_run_side_by_side(tmp_path: Path, say: Say) -> None:
    pytest.importorskip("torch")
    sim, real = run(say, tmp_path / "sim"), run(say, tmp_path / "real", *REAL)
    said = say("timeline", str(sim), str(real)).success()
    events = read(sim / "timeline.json")
    assert said.startswith(f"{sim}/timeline.json: {len(events):,} events, ")
    assert said.endswith("; open it at https://ui.perfetto.dev or in chrome://tracing\n")
    for pid, folder in ((1, sim), (2, real)):
        marks = [event["id2"]["local"] for event in events if event["ph"] == "n" and event["pid"] == pid]
        assert sorted(marks) == sorted(key for step in decisions_of(folder) for key in step["cached_tokens"])
    assert "exists; choose another --out or pass --overwrite" in say("timeline", str(sim)).error()
    say("timeline", str(sim), "--overwrite").success()


def test_swaps_are_where_they_were_decided(tmp_path: Path, say: Say) -> None:
    folder = run(say, tmp_path / "run", *CROWDED, "trace.output={kind: constant, value: 24}")
    say("timeline", str(folder)).success()
    decided = Counter(
        (round(step["time_s"] * 1e9), name.replace("_", " "), key)
        for step in decisions_of(folder)
        for name in ("swapped_out", "swapped_in")
        for key in step[name]
    )
    assert decided, "nothing was swapped"
    events = read(folder / "timeline.json")
    instants = [event for event in events if event["ph"] == "i"]
    assert Counter((round(e["ts"] * 1000), e["name"], e["args"]["request_id"]) for e in instants) == decided
    assert any(event["name"] == "swap" and event["dur"] > 0 for event in events if event["ph"] == "X")


def test_a_part_of_it(tmp_path: Path, say: Say) -> None:
    folder, out = run(say, tmp_path / "run"), tmp_path / "part.json.gz"
    say("timeline", str(folder), "--steps", "2:3", "--out", str(out)).success()
    steps = [e["args"]["step"] for e in read(out) if e["ph"] == "X" and "args" in e]
    assert steps == [2, 3]
    out.unlink()
    for wrong, text in (
        (("--from", "90"), "nothing happens from 90 s; the run ends at"),
        (("--from", "2", "--to", "1"), "from 2 s to 1 s is no window"),
        (("--from", "-5"), "from -5 s to the end is no window"),
        (("--steps", "700:701"), "no step is in 700:701"),
    ):
        assert text in say("timeline", str(folder), *wrong, "--out", str(out)).error()
        assert not out.exists()


def test_a_run_without_steps_is_drawn_by_its_requests_and_says_so(tmp_path: Path, say: Say) -> None:
    folder = run(say, tmp_path / "run", "record.steps=false")
    said = say("timeline", str(folder))
    assert f"; {folder} has requests only: run again with record.steps=true for its steps" in said.out
    assert any(event["name"] == "request" for event in read(folder / "timeline.json"))
    say("run", f"from={folder}", f"hydra.run.dir={folder}", "overwrite=true").success()
    assert not (folder / "timeline.json").exists(), "it was of the run before"
