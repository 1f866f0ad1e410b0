"""`testbed explain`: every moment of every request is told once, and runs without decisions are repeated for them."""

from __future__ import annotations

import json
import random
import re
from math import inf
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from analysis.explain.decisions import decided_steps
from analysis.explain.frames import Told
from experiments.runs.run import execute
from testbed import compiled
from testbed.core.commands import Recorder
from testbed.core.outcome import Finished
from testbed.core.preempting import Preempting
from testbed.core.sequence import Sequence
from testbed.errors import ConfigError
from tests.experiments.kit import REAL, SHORT, TINY, Say, config_of, needs_engine, write_rows

PRESETS = (
    "vllm_v1", "vllm_v1_async", "vllm_v0", "vllm_v0_chunked", "vllm_v0_classic", "sarathi", "orca", "static",
    "nano_vllm", "trtllm_max_util", "sglang_lpm", "lightllm", "vtc",
)  # fmt: skip
TIGHT = (
    "trace.num_requests=16", "trace.rate=3000", "cache.num_gpu_blocks=22", "cache.watermark=0",
    "trace.output={kind: uniform, min_tokens: 8, max_tokens: 30}",
)  # fmt: skip


def world(seed: int) -> tuple[str, ...]:
    """Overrides of a small run that is short of something."""
    draw = random.Random(seed)
    preset = PRESETS[seed % len(PRESETS)]
    chosen = [f"scheduler={preset}", *TIGHT, f"trace.num_requests={draw.choice([8, 20])}", f"seed={seed}"]
    chosen += [f"cache.num_gpu_blocks={draw.choice([20, 24, 40])}", f"scheduler.max_num_seqs={draw.choice([2, 4, 8])}"]
    chosen += [f"cache.prefix_caching={draw.choice(['true', 'false'])}", "allow_ignored=true", "record.explain=true"]
    if draw.random() < 0.5:
        chosen += ["cache.num_cpu_blocks=40", f"scheduler.preemption={draw.choice(['swap', 'auto', 'recompute'])}"]
    if draw.random() < 0.3 and preset != "vllm_v1_async":
        chosen.append("backend.num_replicas=2")
    if draw.random() < 0.3:
        chosen.append("sampling.n=2")
    if draw.random() < 0.4:
        chosen.append(f"scheduler.queue_order={draw.choice(['sjf', 'lcfs', 'hrrn', 'priority'])}")
    return (*TINY, *SHORT, *chosen)


@pytest.mark.parametrize("seed", range(26))
def test_every_moment_of_every_request_is_told_once(tmp_path: Path, seed: int) -> None:
    overrides = world(seed)
    try:
        folder = execute(config_of(overrides), tmp_path / "run").folder
    except ConfigError as error:
        pytest.skip(str(error))
    told = Told(folder)
    waits, requests = told.waits, told.requests.set_index("request_id")
    own = waits.groupby(["request_id", "start_ns", "end_ns"])["ns"].sum().reset_index()
    assert (own["ns"] == own["end_ns"] - own["start_ns"]).all()
    assert waits["head_ns"].between(0, waits["ns"]).all()
    by_request: dict[str, Any] = {}
    for name, facts in requests.iterrows():
        follower = Told(told.run, str(name)).follower
        assert follower is not None
        life = follower.stretches()
        bounds = [facts["queued_ns"], *(one.end_ns for one in life)]
        assert bounds[-1] == facts["finish_ns"], name
        assert [one.start_ns for one in life] == bounds[:-1], name
        assert all(one.end_ns > one.start_ns for one in life)
        for one in life:
            if one.state in ("waiting", "swapped"):
                key = str(name), one.cause
                ns, at_head = by_request.get(key, (0, 0))
                lasted = one.end_ns - one.start_ns
                by_request[key] = ns + lasted, at_head + lasted * (one.ahead == (name,))
    sums = waits.groupby(["request_id", "cause"])[["ns", "head_ns"]].sum()
    assert {key: tuple(row) for key, row in zip(sums.index, sums.to_numpy().tolist(), strict=True)} == by_request
    preempted = told.preemptions.groupby("request_id").agg(num=("step", "size"), again=("recomputed_tokens", "sum"))
    preempted = preempted.reindex(requests.index, fill_value=0)
    assert preempted["num"].tolist() == requests["num_preemptions"].tolist()
    assert preempted["again"].tolist() == requests["num_recomputed_tokens"].tolist()


@pytest.mark.parametrize("preset", ["vllm_v1", "vllm_v0", "sarathi", "nano_vllm"])
def test_who_waits_and_for_how_long_is_what_a_plain_count_says(tmp_path: Path, preset: str) -> None:
    """Of requests of one sequence: all steps in which a request is there, and neither runs nor is swapped out."""
    overrides = (*TINY, *SHORT, *TIGHT, f"scheduler={preset}", "record.explain=true", "cache.num_cpu_blocks=40")
    folder = execute(config_of(overrides), tmp_path / "run").folder
    told = Told(folder, within_s=(0.0, inf))
    (taker,) = told.takers
    taken: dict[str, int] = {}
    own_ns = dict.fromkeys(told.slowest["request_id"], 0.0)
    counted: dict[str, int] = {}
    steps = list(decided_steps(told.run))
    running: set[str] = set()
    for step, later in zip(steps, [*steps[1:], None], strict=True):
        running |= {*step.admitted, *step.swapped_in}
        running -= set(step.victims)
        is_waiting: list[bool] = []
        until = step.end_ns if later is None else later.start_ns
        for row in told.requests.itertuples():
            is_there = row.queued_ns <= step.start_ns and row.finish_ns > step.start_ns
            is_waiting.append(is_there and row.request_id not in running)
            if is_waiting[-1]:
                counted[row.request_id] = counted.get(row.request_id, 0) + until - step.start_ns
            if row.request_id in own_ns and step.end_ns <= row.first_token_ns:
                own = step.scheduled.get(row.request_id, 0) / sum(step.scheduled.values())
                own_ns[row.request_id] += own * (step.end_ns - step.start_ns)
        if step.blocked_by == "token_budget" and any(is_waiting):
            for name, num in step.scheduled.items():
                taken[name] = taken.get(name, 0) + num
    assert taker.taken.get("token_budget", {}) == taken
    assert taker.own_ns == pytest.approx(own_ns)
    assert told.waits.groupby("request_id")["ns"].sum().to_dict() == counted


@pytest.mark.skipif(compiled.current().mode == "compiled", reason="watches the core from inside")
@pytest.mark.parametrize("order", ["fcfs", "sjf", "priority"])
@pytest.mark.parametrize("preset", ["vllm_v1", "vllm_v0", "sarathi"])
def test_for_whom_is_what_the_core_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str, order: str
) -> None:
    seen: list[tuple[str, str | None]] = []
    preempt = Preempting.preempt

    def watched(self: Preempting, seq: Sequence, grower: Sequence | None = None) -> None:
        seen.append((seq.request_id, None if grower is None else grower.request_id))
        preempt(self, seq, grower)

    monkeypatch.setattr(Preempting, "preempt", watched)
    overrides = (*TINY, *SHORT, *TIGHT, f"scheduler={preset}", f"scheduler.queue_order={order}", "record.explain=true")
    found = Told(execute(config_of(overrides), tmp_path / "run").folder).preemptions
    assert len(found) > 0
    pairs = zip(found["request_id"], found["for_request_id"], strict=True)
    assert [(name, None if pd.isna(whose) else whose) for name, whose in pairs] == seen


# --- the command ---


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return execute(config_of((*TINY, *SHORT, *TIGHT)), tmp_path / "run").folder


def test_a_simulated_run_without_decisions_is_simulated_again(plain: Path, tmp_path: Path, say: Say) -> None:
    before = {file.name: file.read_bytes() for file in plain.iterdir()}
    digest = json.loads(before["manifest.json"])["digest"]
    said = say("explain", str(plain)).success()
    assert said.startswith("16 requests waited ")
    assert re.search(
        rf"^Longest in all: (r\d+) .*; `testbed explain {re.escape(str(plain))} \1`\.$", said, re.MULTILINE
    )
    assert f"the run was simulated again: the same decision digest ({digest})" in said
    assert {file.name: file.read_bytes() for file in plain.iterdir()} == before
    kept = tmp_path / "kept"
    one = say("explain", str(plain), "r9", "--keep", str(kept))
    assert one.out.splitlines()[-1].endswith(f"kept in {kept}")
    assert say("explain", str(kept), "r9").out.splitlines()[:-1] == one.out.splitlines()[:-1]
    assert "already holds a run" in say("explain", str(plain), "--keep", str(kept)).error()


class Interrupting(Recorder):
    """Ctrl-C when more than five requests have ended."""

    def __init__(self) -> None:
        self.num_ended = 0

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        self.num_ended += len(finished)
        if self.num_ended > 5:
            raise KeyboardInterrupt


def test_an_interrupted_run_is_told_as_far_as_it_came(plain: Path, tmp_path: Path, say: Say) -> None:
    cut = tmp_path / "cut"
    execute(config_of((*TINY, *SHORT, *TIGHT)), cut, watch=Interrupting())
    assert not (cut / "done").exists()
    said = say("explain", str(cut), "r15", "--keep", str(tmp_path / "kept")).success()
    assert "It had not ended when the run was interrupted." in said
    assert said.splitlines()[-1].startswith("partial      the run did not finish")
    assert "the run was simulated again" in said
    steps = [pq.read_metadata(folder / "steps.parquet").num_rows for folder in (cut, tmp_path / "kept")]
    assert len((tmp_path / "kept" / "decisions.jsonl").read_text().splitlines()) == steps[0] == steps[1] > 0


def test_a_run_that_decides_otherwise_now_is_refused(here: Path, say: Say) -> None:
    rows = [{"request_id": f"r{i}", "arrival_time": 0, "prompt_tokens": 20, "output_tokens": 9} for i in range(9)]
    write_rows(here / "rows.jsonl", rows)
    run = ("trace=jsonl", "trace.path=rows.jsonl", "hydra.run.dir=run")
    say("run", *TINY, *run).success()
    write_rows(here / "rows.jsonl", rows[:-1])
    assert "was repeated and decided otherwise" in say("explain", "run").error()
    (here / "rows.jsonl").unlink()
    assert "rows.jsonl" in say("explain", "run").error()


@needs_engine
def test_a_real_run_s_tape_is_replayed(tmp_path: Path, say: Say) -> None:
    folder = execute(config_of((*TINY, *SHORT, *TIGHT, *REAL)), tmp_path / "run").folder
    said = say("explain", str(folder)).success()
    assert "the run's tape was replayed: the same decision digest" in said
    say("explain", str(folder), "r3").success()
    (folder / "tape.jsonl").unlink()
    assert "has no decisions.jsonl and no tape to replay" in say("explain", str(folder)).error()


def test_a_run_with_decisions_and_without_steps_is_simulated_again(tmp_path: Path, say: Say) -> None:
    folder = tmp_path / "run"
    say("run", *TINY, *SHORT, "record.decisions=true", "record.steps=false", f"hydra.run.dir={folder}")
    said = say("explain", str(folder)).success()
    assert "the run was simulated again: the same decision digest" in said
    (folder / "manifest.json").write_text((folder / "manifest.json").read_text().replace('"sim"', '"vllm"'))
    error = say("explain", str(folder)).error()
    assert "has no steps (record.steps=false) and no tape to replay" in error
    assert error.endswith("make the run again with record.explain=true record.steps=true")


def test_a_name_that_would_steer_a_terminal_is_printed_with_escapes(tmp_path: Path, say: Say) -> None:
    name, shown = "\x1b[2Ja\u202eb\nc é", "\\x1b[2Ja\\u202eb\\nc é"
    rows = [{"request_id": name, "tenant": name, "arrival_time": 0, "prompt_tokens": 4, "output_tokens": 2}]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    inspected = say("trace", "inspect", "jsonl", str(file)).out
    assert f"tenants         1: {shown} 100%" in inspected
    say("run", *TINY, "trace=jsonl", f"trace.path={file}", f"hydra.run.dir={tmp_path / 'run'}")
    told = say("explain", str(tmp_path / "run")).out
    assert shown.partition("\\n")[0] in told
    assert not {"\x1b", "\u202e"} & {*told, *inspected}


def test_a_window_is_the_timeline_s_and_the_run_is_named_as_it_was_given(plain: Path, say: Say) -> None:
    times = pq.read_table(plain / "requests.parquet")["arrival_ns"].to_pylist()
    middle = sorted(times)[8] / 1e9
    assert say("explain", str(plain), "--to", repr(middle)).out.startswith("8 requests")
    said = say("explain", str(plain), "--from", repr(middle)).out
    assert said.startswith("8 requests")
    assert re.search(rf"`testbed explain {plain} r\d+`\.", said)
    for command in ("explain", "timeline"):
        error = say(command, str(plain), "--from", "4", "--to", "3").error()
        assert error == "from 4 s to 3 s is no window; give 0 <= --from < --to"
    assert "and one is named; leave out either" in say("explain", str(plain), "r1", "--to", "3").error()


def test_mistakes_name_the_thing_and_the_fix(plain: Path, tmp_path: Path, say: Say) -> None:
    unknown = say("explain", str(plain), "r99").error()
    assert unknown == f"{plain} has no request 'r99' among its 16; nearest: r9, r8, r7"
    sweep = say("explain", str(tmp_path)).error()
    assert sweep == f"{tmp_path} is no run, but has 1 below it; name one: {plain}"


@pytest.mark.parametrize(("name", "column"), [("steps.parquet", "start_ns"), ("requests.parquet", "arrival_ns")])
def test_one_wrong_bit_in_the_records_is_told_of_the_run_s_own_file(
    plain: Path, name: str, column: str, say: Say
) -> None:
    """Most wrong bits make other numbers of a file that Arrow reads."""
    chunk = pq.read_metadata(plain / name).row_group(0).column(pq.read_schema(plain / name).names.index(column))
    data = bytearray((plain / name).read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 1
    (plain / name).write_bytes(data)
    for command in ("explain", "fidelity", "timeline"):
        said = say(command, str(plain)).error()
        assert said.startswith(f"{plain / name}: cannot be read as Parquet (could not verify page integrity"), command


def test_what_vllm_s_own_scheduler_did_is_told_from_its_log(tmp_path: Path, say: Say) -> None:
    log = Path(__file__).with_name("observed") / "sync.jsonl.gz"
    folder = tmp_path / "run"
    say("observe", "import", str(log), "--out", str(folder)).success()
    said = say("explain", str(folder)).success()
    assert "decisions.jsonl" in said.splitlines()[-1]
    told = Told(folder)
    assert set(told.preemptions["why"]) == {"unknown"}
    assert told.preemptions["for_request_id"].isna().all()


def test_the_page_shows_what_the_command_says(here: Path, say: Say) -> None:
    docs = Path(__file__).parents[2] / "docs"
    blocks = re.findall(r"```\w*\n(.*?)```", (docs / "explain.md").read_text(), re.DOTALL)
    commands = blocks[0].splitlines()
    rows = re.search(r"```json\n(.*?)```", (docs / "life-of-a-request.md").read_text(), re.DOTALL)
    assert rows is not None
    (here / "two.jsonl").write_text(rows[1])
    say(*commands[0].split()[1:]).success()
    assert commands[1] == "testbed explain run b"
    assert say(*commands[1].split()[1:]).out.replace("\xa0", " ") == blocks[1]
