"""`testbed observe import` on logs of real vLLM 0.32 (CPU build, a random model of 4 layers, a pool of 8 blocks)."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.load import load_run, load_sweep
from experiments.cli import main
from experiments.compose import compose_config
from experiments.conform.cases import read_cases
from experiments.conform.replay import replay_case
from experiments.conform.systems import SYSTEMS
from experiments.observe.case import case_of
from experiments.observe.importing import device_of, import_log, trace_of
from experiments.observe.log import read_log
from experiments.observe.stock import options_of_stock
from testbed.errors import ConfigError, RunFolderError
from testbed.specs.profiles import read_profile

LOGS = Path(__file__).parent / "observed"
NAMES = ["sync", "async"]


def lines_of(name: str) -> list[dict[str, Any]]:
    with gzip.open(LOGS / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_what_vllm_decided_is_decided_here_step_for_step(tmp_path: Path, name: str) -> None:
    import_log(LOGS / f"{name}.jsonl.gz", tmp_path / "run")
    (case,) = read_cases(tmp_path / "run" / "case.jsonl")
    system = SYSTEMS[case.system]
    assert system.preset == {"sync": "vllm_v1", "async": "vllm_v1_async"}[name]
    assert sum(len(step["preempted"]) for step in case.steps) >= 3
    assert len(case.aborts) >= 2
    assert replay_case(case, system, system.preset) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_decision_does_not_conform(tmp_path: Path, name: str) -> None:
    lines = lines_of(name)
    plan = next(line for line in lines if line["kind"] == "plan" and len(line["scheduled"]) > 2)
    plan["free_blocks"] += 1
    import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    (case,) = read_cases(tmp_path / "run" / "case.jsonl")
    system = SYSTEMS[case.system]
    mismatch = replay_case(case, system, system.preset)
    assert mismatch is not None
    assert mismatch.reason == "differing after the plan: free_blocks"


@pytest.mark.parametrize("name", NAMES)
def test_the_records_are_what_the_log_says(tmp_path: Path, name: str) -> None:
    import_log(LOGS / f"{name}.jsonl.gz", tmp_path / "run")
    lines, run = lines_of(name), load_run(tmp_path / "run")
    commits = [line for line in lines if line["kind"] == "commit"]
    requests, steps = run.requests, run.steps
    assert len(steps) == len(commits)
    assert steps["num_emitted"].tolist() == [sum(map(len, line["emitted"].values())) for line in commits]
    tokens = [sum(line["scheduled"].values()) for line in lines if line["kind"] == "plan"]
    assert (steps["num_prefill_tokens"] + steps["num_decode_tokens"]).tolist() == tokens
    emitted: dict[str, int] = {}
    for line in commits:
        for request_id, ids in line["emitted"].items():
            emitted[request_id] = emitted.get(request_id, 0) + len(ids)
    assert dict(zip(requests["request_id"], requests["num_output_tokens"], strict=True)) == {
        line["id"]: emitted.get(line["id"], 0) for line in lines if line["kind"] == "add"
    }
    assert set(requests["finish_reason"]) <= {"stop", "length", "abort"}
    assert run.summary["checks"]["work_conserved"]["holds"] is True
    assert run.manifest["backend"] == "vllm"


def test_the_profile_can_be_read_and_the_trace_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["observe", "import", str(LOGS / "sync.jsonl.gz"), "--out", str(folder)]) == 0
    assert "60 steps, 4 preemptions" in capsys.readouterr().out
    profile = read_profile(folder / "profile.parquet")
    assert profile.manifest.versions == {"vllm": "0.32.0"}
    assert min(step.total_ns for step in profile.steps) > 0
    sim = tmp_path / "sim"
    assert main(["run", f"from={folder}", "backend=sim", "cost=constant", f"hydra.run.dir={sim}"]) == 0
    assert load_run(sim).fingerprint == load_run(folder).fingerprint
    assert main(["report", str(folder), str(sim), "--out", str(tmp_path / "report.html")]) == 0


def test_a_log_is_fitted_judged_and_drawn_as_a_run_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, fit = tmp_path / "run", tmp_path / "fit.json"
    assert main(["observe", "import", str(LOGS / "sync.jsonl.gz"), "--out", str(folder)]) == 0
    assert main(["calibrate", "fit", str(folder / "profile.parquet"), "--out", str(fit)]) == 0
    capsys.readouterr()
    assert main(["fidelity", str(folder), "cost=calibrated", f"cost.path={fit}", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "backend=vllm, 11 requests matched one to one" in said
    assert "3 of 14 requests did not end well and were left out" in said
    (judged,) = json.loads((tmp_path / "out" / "fidelity.json").read_text())["loads"]
    errors = {line["metric"]: line["error"] for line in judged["errors"]}
    assert abs(errors["e2e_s.mean"]) < 0.1
    assert abs(errors["e2e_s.p50"]) < 0.1
    assert main(["timeline", str(folder)]) == 0
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert sum("step" in event.get("args", {}) for event in events if event["ph"] == "X") == 60


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("version", "ends_round"), [("0.32.0", True), ("0.33.1", False)])
def test_a_log_is_simulated_by_the_rules_of_its_version(
    tmp_path: Path, name: str, version: str, ends_round: bool
) -> None:
    lines = lines_of(name)
    lines[0]["vllm"] = version
    import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    composition = load_run(tmp_path / "run").config["scheduler"]["composition"]
    said = composition.get("own_victim_ends_round", False) if isinstance(composition, dict) else False
    assert said == ends_round


@pytest.mark.parametrize("version", ["0.27.1", "0.34.0", "1.0.0", "a branch"])
def test_a_log_of_a_version_that_no_preset_mirrors_makes_no_case(tmp_path: Path, version: str) -> None:
    lines = lines_of("sync")
    lines[0]["vllm"] = version
    said = import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run").lines
    (line,) = [line for line in said if line.startswith("no case")]
    assert f"vLLM {version} is outside of 0.28 to 0.33, whose decisions the presets mirror" in line
    assert not (tmp_path / "run" / "case.jsonl").exists()
    assert len(load_run(tmp_path / "run").steps) == 60


def test_lengths_in_place_of_ids_give_all_but_a_case(tmp_path: Path) -> None:
    lines = lines_of("sync")
    for line in lines:
        if line["kind"] == "add":
            line["prompt"] = len(line["prompt"])
        if line["kind"] == "commit":
            line["emitted"] = {name: len(ids) for name, ids in line["emitted"].items()}
    said = import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run").lines
    assert any("lengths in place of token ids" in line for line in said)
    assert not (tmp_path / "run" / "case.jsonl").exists()
    assert len(load_run(tmp_path / "run").steps) == 60


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_of_a_log_that_is_cut_all_is_kept_that_was_finished(tmp_path: Path, name: str, share: float) -> None:
    with gzip.open(LOGS / f"{name}.jsonl.gz", "rb") as file:
        text = file.read()
    (tmp_path / "log.jsonl").write_bytes(text[: int(len(text) * share)])
    num_steps = text[: int(len(text) * share)].count(b'"kind":"commit"')
    said = import_log(tmp_path / "log.jsonl", tmp_path / "run").lines
    assert "had not ended where the log ends, and count as aborted then" in said[0]
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
    said = import_log(tmp_path / "log.jsonl.gz", tmp_path / "run").lines
    assert "had not ended where the log ends" in said[0]
    run = load_run(tmp_path / "run")
    assert num_steps - 1 <= len(run.steps) <= num_steps < 60


def test_a_packed_log_without_a_whole_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl.gz").write_bytes((LOGS / "sync.jsonl.gz").read_bytes()[:100])
    with pytest.raises(RunFolderError, match="damaged compressed file"):
        import_log(tmp_path / "log.jsonl.gz", tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_num_active_seqs", 2, "max_num_active_seqs=2"),
        ("max_num_scheduled_tokens", 8, "max_num_scheduled_tokens=8"),
        ("enable_chunked_prefill", False, "enable_chunked_prefill=False"),
        ("scheduler_reserve_full_isl", False, "scheduler_reserve_full_isl=False"),
        ("long_prefill_token_threshold_adaptive", True, "long_prefill_token_threshold_adaptive=True"),
        ("kv_cache_specs", ["SlidingWindowSpec"], "of a SlidingWindowSpec"),
    ],
)
def test_settings_that_the_preset_has_not_make_no_case(tmp_path: Path, name: str, value: object, said: str) -> None:
    lines = lines_of("sync")
    lines[0]["config"][name] = value
    imported = import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    assert any(line.startswith("no case") and said in line for line in imported.lines)
    assert not (tmp_path / "run" / "case.jsonl").exists()


def test_a_request_for_what_is_not_here_makes_no_case(tmp_path: Path) -> None:
    lines = lines_of("sync")
    lines[1]["unknown"] = "structured output"
    said = import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run").lines
    assert any("a request asked for structured output" in line for line in said)


def test_a_request_without_token_ids_is_left_out_and_the_others_are_kept(tmp_path: Path) -> None:
    lines = lines_of("sync")
    adds = [line for line in lines if line["kind"] == "add"]
    adds[1] |= {"prompt": [], "unknown": "prompts of embeddings"}
    adds[5] |= {"prompt": []}
    imported = import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    said = "2 requests were left out: empty prompts, prompts of embeddings"
    assert [line.split("  ")[0] for line in imported.lines if said in line] == ["no case", "no profile"]
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
    assert any("1 requests were left out: streaming sessions" in line for line in imported.lines)
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
    said = re.search(r"; (\d+) requests had not ended", imported.lines[0])
    assert said is not None
    assert 0 < int(said[1]) <= num_aborted
    again = ["run", f"from={tmp_path / 'run'}", "backend=sim", "cost=constant", f"hydra.run.dir={tmp_path / 'sim'}"]
    assert main(again) == 0


@pytest.mark.parametrize("name", NAMES)
def test_wherever_a_log_ends_its_case_conforms(tmp_path: Path, name: str) -> None:
    whole = lines_of(name)
    first = next(place for place, line in enumerate(whole) if line["kind"] == "commit")
    for num_lines in range(first + 1, len(whole) + 1):
        log = read_log(written(tmp_path / "log.jsonl", whole[:num_lines]))
        (tmp_path / "case.jsonl").write_text(json.dumps(case_of(log, "cut")))
        (case,) = read_cases(tmp_path / "case.jsonl")
        system = SYSTEMS[case.system]
        assert replay_case(case, system, system.preset) is None, f"cut after line {num_lines}"


def test_what_speculation_computed_is_no_profile(tmp_path: Path) -> None:
    lines = lines_of("sync")
    lines[0]["unknown"] = ["speculative_config"]
    said = import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run").lines
    assert [line.split("  ")[0] for line in said if "speculative_config" in line] == ["no case", "no profile"]
    assert not (tmp_path / "run" / "profile.parquet").exists()


def test_the_options_of_the_import_are_named_where_they_are_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(LOGS / "sync.jsonl.gz")
    assert main(["observe", "import", log, "--out", str(tmp_path / "run")]) == 0
    assert main(["observe", "import", log, "--out", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err.strip().endswith("choose another --out or pass --overwrite")
    assert main(["observe", "import", log, "--out", str(tmp_path / "run"), "--overwrite"]) == 0
    assert main(["observe", "import", str(tmp_path / "nosuch")]) == 1
    assert capsys.readouterr().err.strip().endswith("nosuch: does not exist; expected the path of an observer's log")


@pytest.mark.parametrize("kind", ["plan", "commit"])
@pytest.mark.parametrize("name", NAMES)
def test_a_log_with_a_hole_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    whole = lines_of(name)
    for step in range(0, 58, 7):
        lines = [line for line in whole if (line["kind"], line.get("step")) != (kind, step)]
        with pytest.raises(RunFolderError, match=r"not a line of an observer's log.* is missing"):
            import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_steps_that_cannot_have_been_leave_no_folder(tmp_path: Path) -> None:
    lines = lines_of("sync")
    planned(lines, 20)["admitted"] = dict.fromkeys(planned(lines, 20)["scheduled"], 10_000)
    with pytest.raises(RunFolderError, match="its steps do not fit together"):
        import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_imported_run_can_be_moved(tmp_path: Path) -> None:
    import_log(LOGS / "sync.jsonl.gz", tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    again = ["run", f"from={tmp_path / 'moved'}", "backend=sim", "cost=constant", f"hydra.run.dir={tmp_path / 'sim'}"]
    assert main(again) == 0
    assert main(["fidelity", str(tmp_path / "moved"), "cost=constant", "--out", str(tmp_path / "out")]) == 0


def test_a_run_on_a_cpu_had_no_gpu(tmp_path: Path) -> None:
    import_log(LOGS / "sync.jsonl.gz", tmp_path / "run")
    assert load_run(tmp_path / "run").manifest["machine"] == {"gpu": None}


@pytest.mark.parametrize(("policy", "is_made"), [("fcfs", True), ("priority", False)])
def test_under_priorities_requests_must_come_in_order(tmp_path: Path, policy: str, is_made: bool) -> None:
    """vLLM breaks ties by the instant of arrival, which several samples of a prompt share."""
    lines = lines_of("sync")
    lines[0]["config"]["policy"] = policy
    adds = [line for line in lines if line["kind"] == "add"]
    adds[1]["arrival_unix_ns"] = adds[0]["arrival_unix_ns"]
    import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    assert (tmp_path / "run" / "case.jsonl").exists() == is_made


def test_a_case_has_salts_and_who_skips_the_cache(tmp_path: Path) -> None:
    lines = lines_of("sync")
    first, second = [line for line in lines if line["kind"] == "add"][:2]
    first["salt"], second["skips_cache"] = "a tenant", True
    import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    (case,) = read_cases(tmp_path / "run" / "case.jsonl")
    requests = sorted(case.requests, key=lambda request: int(request.request_id))
    assert [request.cache_salt for request in requests[:3]] == ["a tenant", "", ""]
    assert [request.sampling.prompt_logprobs is not None for request in requests[:3]] == [False, True, False]


def test_an_aborted_request_wants_no_more_than_it_had_leave_for(tmp_path: Path) -> None:
    """Else one token more is planned ahead for one whose last is on its way."""
    lines = lines_of("async")
    aborted = next(line for line in lines if line["kind"] == "abort")
    added = next(line for line in lines if line["kind"] == "add" and line["id"] == aborted["id"])
    emitted = sum(len(line["emitted"].get(aborted["id"], ())) for line in lines if line["kind"] == "commit")
    added["max_tokens"] = emitted + 1
    log = read_log(written(tmp_path / "log.jsonl", lines))
    assert len(log.requests[aborted["id"]].wanted) == emitted + 1


@pytest.mark.parametrize("name", NAMES)
def test_an_aborted_request_is_as_long_in_the_trace_as_it_was(tmp_path: Path, name: str) -> None:
    """vLLM's front end aborts a request at its stop string. One that had emitted nothing ends at its instant."""
    log = read_log(LOGS / f"{name}.jsonl.gz")
    rows = {row.request_id: row for row in trace_of(log, name)}
    aborted = [one for one in log.requests.values() if one.aborted is not None]
    assert any(one.output for one in aborted)
    for one in aborted:
        output, cancelled_ns = rows[one.name].output, rows[one.name].cancel_after_ns
        assert output is not None
        assert output.num_tokens == (len(one.output) or one.max_tokens)
        assert cancelled_ns == (one.ended_ns or 0) - one.arrival_ns


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
        (lambda lines: lines[1].pop("prompt"), "log.jsonl:2: not a line of an observer's log"),
        (lambda lines: lines.remove(planned(lines, 6)), "or one before it is missing: 6 is not there"),
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
        (lambda lines: lines[1].update(priority=2**31), "its priority is 2147483648"),
        (lambda lines: lines[1].update(prompt=2**30), "its prompt has 1"),
        (lambda lines: planned(lines, 6).update(free_blocks=2**31), "its free_blocks is 2147483648"),
        (lambda lines: lines[3].update(emitted=[]), "log.jsonl:4: not a line of an observer's log"),
    ],
)
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


def test_a_gpu_is_found_in_the_device_library_or_asked_for(tmp_path: Path) -> None:
    lines = lines_of("sync")
    lines[0]["device"] |= {"type": "cuda", "name": "NVIDIA H100 80GB HBM3"}
    assert device_of(lines[0]) == "h100"
    lines[0]["device"]["name"] = "NVIDIA Nothing 9000"
    log = written(tmp_path / "log.jsonl", lines)
    with pytest.raises(ConfigError, match="say which is nearest with --device"):
        import_log(log, tmp_path / "run")
    with pytest.raises(ConfigError, match="h1000"):
        import_log(log, tmp_path / "run", device="h1000")
    assert not (tmp_path / "run").exists()
    import_log(log, tmp_path / "run", device="a100")


def test_what_has_no_configuration_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    lines = lines_of("sync")
    lines[0]["config"]["block_size"] = 0
    with pytest.raises(ConfigError, match=r"cache\.block_size is 0"):
        import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    import_log(LOGS / "sync.jsonl.gz", tmp_path / "run")
    with pytest.raises(RunFolderError, match="already holds a run"):
        import_log(LOGS / "sync.jsonl.gz", tmp_path / "run")
    import_log(LOGS / "sync.jsonl.gz", tmp_path / "run", overwrite=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hf_config": {"architectures": ["Strange"], "layers": 3}}, "is not supported"),
        ({"dtype": "float4"}, "the model computes in 'float4'"),
    ],
)
def test_of_a_model_without_a_price_all_else_is_kept(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    lines = lines_of("sync")
    lines[0]["model"] |= change
    said = import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run").lines
    (line,) = [line for line in said if line.startswith("no profile")]
    assert reason in line
    assert len(load_run(tmp_path / "run").steps) == 60
    assert (tmp_path / "run" / "case.jsonl").exists()


def test_without_vllm_a_run_says_what_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is here")
    (tmp_path / "config.json").write_text(json.dumps(lines_of("sync")[0]["model"]["hf_config"]))
    settings = ["run", "backend=vllm", f"model.path={tmp_path}", "device=cpu", f"hydra.run.dir={tmp_path / 'run'}"]
    assert main([*settings, "cache.num_cpu_blocks=0"]) == 1
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: backend=vllm needs vLLM in this environment")
    assert "\n" not in said
    assert not (tmp_path / "run" / "manifest.json").exists()


@pytest.mark.parametrize("scheduler", ["vllm_v1", "vllm_v1_async"])
def test_what_vllms_own_scheduler_is_told(scheduler: str) -> None:
    bounds = ["scheduler.max_num_seqs=3", "cache.num_gpu_blocks=8", "cache.watermark=0"]
    preset = ["backend=vllm", f"scheduler={scheduler}", *bounds]
    assert options_of_stock(compose_config(preset)) == {"scheduling_policy": "fcfs"}
    more = ["scheduler.queue_order=priority", "scheduler.long_prefill_token_threshold=9"]
    told = {"scheduling_policy": "priority", "long_prefill_token_threshold": 9}
    assert options_of_stock(compose_config([*preset, *more])) == told


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("scheduler=sarathi", "scheduler.composition"),
        ("scheduler=vllm_v1_0_8", "scheduler.composition"),
        ("scheduler.queue_order=sjf", "scheduler.queue_order"),
        ("scheduler.victim=least_progress", "scheduler.victim"),
        ("scheduler.kv_rules.allocate=whole", "scheduler.kv_rules"),
        ("cache.watermark=0.1", "cache.watermark"),
        ("cache.isolate_tenants=true", "cache.isolate_tenants"),
    ],
)
def test_what_vllms_own_scheduler_has_not_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, key: str
) -> None:
    """Else a run would bear the name of a policy that had no part in it."""
    folder = tmp_path / "run"
    status = main(["run", "backend=vllm", "backend.decides=vllm", setting, "device=cpu", f"hydra.run.dir={folder}"])
    said = capsys.readouterr().err
    assert status != 0
    assert f"vLLM's own scheduler, which scheduler=vllm_v1 mirrors, has no {key}=" in said
    assert not folder.exists()


def test_engines_stand_side_by_side_in_a_report(tmp_path: Path) -> None:
    for name, backend in (("vllm", "vllm"), ("real", "real")):
        import_log(LOGS / "sync.jsonl.gz", tmp_path / name)
        file = tmp_path / name / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"backend": backend}))
    sim = tmp_path / "sim"
    assert main(["run", f"from={tmp_path / 'vllm'}", "backend=sim", "cost=constant", f"hydra.run.dir={sim}"]) == 0
    folders = [str(tmp_path / name) for name in ("vllm", "real", "sim")]
    assert main(["report", *folders, "--out", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "| metric | sim | vllm's own | real |" in text or "| metric | sim | real | vllm's own |" in text
