"""Observers' logs that are cut, damaged or odd: what is there is kept, what cannot have been is refused in one line."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from analysis.load import load_run, load_sweep
from experiments.cli import main
from experiments.configuration.compose import compose_config
from experiments.conform import replay
from experiments.conform.cases import read_cases
from experiments.conform.replay import replay_case
from experiments.conform.systems import SYSTEMS
from experiments.observe.case import case_of
from experiments.observe.importing import import_log
from experiments.observe.log import read_log
from testbed.errors import RunFolderError
from tests.experiments.test_observe import LOGS, NAMES, lines_of, written


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_of_a_log_that_is_cut_all_is_kept_that_was_finished(tmp_path: Path, name: str, share: float) -> None:
    with gzip.open(LOGS / f"{name}.jsonl.gz", "rb") as file:
        text = file.read()
    (tmp_path / "log.jsonl").write_bytes(text[: int(len(text) * share)])
    num_steps = text[: int(len(text) * share)].count(b'"kind":"commit"')
    said = import_log(tmp_path / "log.jsonl", tmp_path / "run")
    assert "not ended where the log ends: counted as aborted then" in said[0]
    run = load_sweep(tmp_path / "run").runs[0]
    assert num_steps - 1 <= len(run.steps) <= num_steps
    (case,) = read_cases(tmp_path / "run" / "case.jsonl")
    assert len(case.steps) == len(run.steps)
    assert replay_case(case, SYSTEMS[case.system], SYSTEMS[case.system].preset) is None


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_of_a_packed_log_that_is_cut_all_is_kept_that_can_be_unpacked(tmp_path: Path, share: float) -> None:
    packed = (LOGS / "sync.jsonl.gz").read_bytes()
    there = packed[: int(len(packed) * share)]
    (tmp_path / "log.jsonl.gz").write_bytes(there)
    num_steps = zlib.decompressobj(wbits=31).decompress(there).count(b'"kind":"commit"')
    said = import_log(tmp_path / "log.jsonl.gz", tmp_path / "run")
    assert "not ended where the log ends" in said[0]
    run = load_run(tmp_path / "run")
    assert num_steps - 1 <= len(run.steps) <= num_steps < 60


def test_a_packed_log_without_a_whole_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl.gz").write_bytes((LOGS / "sync.jsonl.gz").read_bytes()[:100])
    with pytest.raises(RunFolderError, match="damaged compressed file"):
        import_log(tmp_path / "log.jsonl.gz", tmp_path / "run")


def test_a_request_without_token_ids_is_left_out_and_the_others_are_kept(tmp_path: Path) -> None:
    lines = lines_of("sync")
    adds = [line for line in lines if line["kind"] == "add"]
    adds[1] |= {"prompt": [], "unknown": "prompts of embeddings"}
    adds[5] |= {"prompt": []}
    imported = import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    said = "2 requests left out: empty prompts, prompts of embeddings"
    assert [line.split("  ")[0] for line in imported if said in line] == ["no case", "no profile"]
    run = load_run(tmp_path / "run")
    assert said in run.manifest["trace"]["notes"]
    assert run.manifest["status"] == "complete"
    assert not {adds[1]["id"], adds[5]["id"]} & set(run.requests["request_id"])
    assert (len(run.requests), len(run.steps)) == (len(adds) - 2, 60)


def test_a_streaming_session_is_left_out_with_all_its_turns(tmp_path: Path) -> None:
    """vLLM says of each of its turns that the request has ended, and goes on with its tokens."""
    lines = lines_of("sync")
    first = next(line for line in lines if line["kind"] == "add")
    first["unknown"] = "streaming sessions"
    ends = next(place for place, line in enumerate(lines) if first["id"] in line.get("ended", {}))
    lines.insert(ends + 1, {**first, "unknown": "", "ns": lines[ends]["ns"]})
    imported = import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    assert any("1 request left out: streaming sessions" in line for line in imported)
    assert first["id"] not in set(load_run(tmp_path / "run").requests["request_id"])


def test_an_id_that_is_added_again_while_it_is_served_is_a_session(tmp_path: Path) -> None:
    lines = lines_of("sync")
    place, first = next((place, line) for place, line in enumerate(lines) if line["kind"] == "add")
    lines.insert(place + 2, {**first, "ns": lines[place + 1]["ns"]})
    assert read_log(written(tmp_path / "log.jsonl", lines)).left_out == ("streaming sessions",)


def test_an_id_that_comes_again_after_its_end_is_numbered(tmp_path: Path) -> None:
    lines = lines_of("sync")
    old = next(name for line in lines for name in line.get("ended", {}))
    end = next(place for place, line in enumerate(lines) if old in line.get("ended", {}))
    new = next(line["id"] for line in lines[end:] if line["kind"] == "add")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "log.jsonl").write_text(text.replace(new, old))
    import_log(tmp_path / "log.jsonl", tmp_path / "run")
    assert {old, f"{old}~2"} < set(load_run(tmp_path / "run").requests["request_id"])
    (case,) = read_cases(tmp_path / "run" / "case.jsonl")
    assert replay_case(case, SYSTEMS[case.system], SYSTEMS[case.system].preset) is None


def test_the_id_of_one_that_was_left_out_may_come_again(tmp_path: Path) -> None:
    lines = lines_of("sync")
    first = next(line for line in lines if line["kind"] == "add")
    ends = next(place for place, line in enumerate(lines) if first["id"] in line.get("ended", {}))
    num_steps = sum(line["kind"] == "commit" for line in lines[: ends + 1])
    again = {**first, "plans": num_steps, "commits": num_steps, "ns": lines[ends]["ns"]}
    first |= {"prompt": [], "unknown": "prompts of embeddings"}
    lines.insert(ends + 1, again)
    log = read_log(written(tmp_path / "log.jsonl", lines))
    assert log.left_out == ("prompts of embeddings",)
    assert f"{first['id']}~2" in log.requests


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_lines", [14, 51, 97])
def test_the_trace_of_a_log_that_ends_early_runs(tmp_path: Path, name: str, num_lines: int) -> None:
    imported = import_log(written(tmp_path / "log.jsonl", lines_of(name)[:num_lines]), tmp_path / "run")
    run = load_run(tmp_path / "run")
    num_aborted = int((run.requests["finish_reason"] == "abort").sum())
    said = re.search(r"; (\d+) requests? not ended", imported[0])
    assert said is not None
    assert 0 < int(said[1]) <= num_aborted
    again = ["run", f"from={tmp_path / 'run'}", "backend=sim", "cost=constant", f"hydra.run.dir={tmp_path / 'sim'}"]
    assert main(again) == 0


@pytest.mark.parametrize("name", NAMES)
def test_wherever_a_log_ends_its_case_conforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    composed = cache(lambda *overrides: compose_config([*overrides]))  # all cases have one configuration
    monkeypatch.setattr(replay, "compose_config", lambda overrides: composed(*overrides))
    whole = lines_of(name)
    first = next(place for place, line in enumerate(whole) if line["kind"] == "commit")
    for num_lines in range(first + 1, len(whole) + 1):
        log = read_log(written(tmp_path / "log.jsonl", whole[:num_lines]))
        (tmp_path / "case.jsonl").write_text(json.dumps(case_of(log, "cut")))
        (case,) = read_cases(tmp_path / "case.jsonl")
        system = SYSTEMS[case.system]
        assert replay_case(case, system, system.preset) is None, f"cut after line {num_lines}"


@pytest.mark.parametrize("kind", ["plan", "commit"])
@pytest.mark.parametrize("name", NAMES)
def test_a_log_with_a_hole_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    whole = lines_of(name)
    for step in range(0, 58, 7):
        lines = [line for line in whole if (line["kind"], line.get("step")) != (kind, step)]
        with pytest.raises(RunFolderError, match=r"not a line of an observer's log.* is missing"):
            import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        (
            "reset_then_abort",
            "reset_prefix_cache",
            "step 6 preempted all that ran, as only a reset of the prefix cache",
        ),
        ("reset_then_abort", "abort", "in step 6 vLLM had 3 requests, and 4 by its lines before: one is missing"),
        ("sync", "abort", "in step 1 vLLM had 4 requests, and 5 by its lines before: one is missing"),
        ("async", "abort", "in step 5 vLLM had 13 requests, and 14 by its lines before: one is missing"),
    ],
)
def test_a_missing_line_that_no_other_needs_is_told_and_makes_no_case(
    tmp_path: Path, name: str, kind: str, said: str
) -> None:
    lines = lines_of(name)
    lines.remove(next(line for line in lines if line["kind"] == kind))
    imported = import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    (told,) = [line for line in imported if line.startswith("no case")]
    assert said in told
    assert not (tmp_path / "run" / "case.jsonl").exists()
    assert len(load_run(tmp_path / "run").steps) == sum(line["kind"] == "commit" for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_an_abort_of_whom_no_line_added_is_a_hole(tmp_path: Path, name: str) -> None:
    """Of one that no step had: no other line names it."""
    lines = lines_of(name)
    at = next(place for place, line in enumerate(lines) if line["kind"] == "plan")
    lines.insert(at + 1, {"kind": "abort", "id": "r99", "ns": lines[at]["ns"], "plans": 1, "commits": 0})
    with pytest.raises(
        RunFolderError,
        match=r"log\.jsonl:\d+: .*no line before it adds request 'r99': one is missing\); take the log as",
    ):
        import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")


def test_without_the_line_that_added_it_an_aborted_request_is_a_hole(tmp_path: Path) -> None:
    lines = lines_of("sync")
    for aborted in [line["id"] for line in lines if line["kind"] == "abort"]:
        rest = [line for line in lines if (line["kind"], line.get("id")) != ("add", aborted)]
        with pytest.raises(RunFolderError, match=f"no line before it adds request '{aborted}': one is missing"):
            import_log(written(tmp_path / "log.jsonl", rest), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_steps_that_cannot_have_been_leave_no_folder(tmp_path: Path) -> None:
    lines = lines_of("sync")
    planned(lines, 20)["admitted"] = dict.fromkeys(planned(lines, 20)["scheduled"], 10_000)
    with pytest.raises(RunFolderError, match=r"fit together \(sequence 1: RUNNING does not lead to RUNNING\); it was"):
        import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def planned(lines: list[dict[str, Any]], step: int) -> dict[str, Any]:
    return next(line for line in lines if line["kind"] == "plan" and line["step"] == step)


Change = Callable[[list[dict[str, Any]]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines.clear(), "is empty"),
        (lambda lines: lines.pop(0), "not the first line of an observer's log"),
        (lambda lines: lines[0].update(version=9), "a log of version 9"),
        (lambda lines: lines[3].update(kind="surprise"), "log.jsonl:4: not a line of an observer's log"),
        (lambda lines: lines[1].pop("prompt"), "log.jsonl:2: not a line of an observer's log: it has no 'prompt'"),
        (lambda lines: lines.remove(planned(lines, 6)),
         "(it ends step 6, and no line before it plans that step: one is missing); take the log as vLLM left it"),
        (lambda lines: lines.__delitem__(slice(2, None)), "has no step that was finished"),
        (lambda lines: lines[0].pop("device"), "log.jsonl:1: the first line of the log is damaged: its device is None"),
        (lambda lines: lines[0].pop("vllm"), "its vllm is None"),
        (lambda lines: lines[0]["model"].pop("hf_config"), "its model.hf_config is None"),
        (lambda lines: lines[0]["config"].pop("watermark"), "its config.watermark is None"),
        (lambda lines: lines[0]["config"].update(max_model_len="64"), "its config.max_model_len is '64'"),
        (lambda lines: lines[0].update(config=[]), "its config is []"),
        (lambda lines: lines[0].update(unknown=[1]), "its unknown is [1]"),
        (lambda lines: lines[0]["config"].update(kv_cache_specs=5), "its config.kv_cache_specs is 5"),
        (lambda lines: lines[0].update(unix_ns=10**30), "its unix_ns is 1"),
        (lambda lines: lines[1].update(priority="1"), "its priority is '1'"),
        (lambda lines: lines[1].update(prompt=2**30), "its prompt has 1"),
        (lambda lines: planned(lines, 6).update(free_blocks=2**31), "its free_blocks is 2147483648"),
        (lambda lines: lines[3].update(emitted=[]), "log.jsonl:4: not a line of an observer's log"),
        (lambda lines: lines[1].update(max_tokens=0),
         "log.jsonl:2: not a line of an observer's log (its max_tokens is 0)"),
        (lambda lines: planned(lines, 6).update(scheduled=dict.fromkeys(planned(lines, 6)["scheduled"], 2**30)),
         "its scheduled is {"),
        (lambda lines: planned(lines, 6).update(step=7),
         "not a line of an observer's log (it is step 7, and 6 are before it: a line is missing)"),
        (lambda lines: lines[1].update(prompt=200), "(its prompt has 200 tokens, and a request of vLLM's 160 at most)"),
    ],
)  # fmt: skip
def test_what_is_no_log_is_refused_in_one_line(tmp_path: Path, change: Change, message: str) -> None:
    lines = lines_of("sync")
    change(lines)
    with pytest.raises(RunFolderError) as refused:
        import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_line_in_the_middle_that_is_no_json_is_named(tmp_path: Path) -> None:
    lines = [json.dumps(line) for line in lines_of("sync")]
    lines[5] = lines[5][:20]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    with pytest.raises(RunFolderError, match=r"log\.jsonl:6"):
        import_log(tmp_path / "log.jsonl", tmp_path / "run")
