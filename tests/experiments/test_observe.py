"""`testbed observe import` on logs of real vLLM 0.32 (CPU build, a random model of 4 layers, a pool of 8 blocks)."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from analysis.explain.request import explain_request
from analysis.explain.whole_run import explain_run
from analysis.load import load_run
from experiments.cli import main
from experiments.configuration.config import RunConfig
from experiments.conform.cases import read_cases
from experiments.conform.replay import replay_case
from experiments.conform.systems import SYSTEMS
from experiments.observe.importing import import_log, trace_of
from experiments.observe.log import read_log
from experiments.observe.records import replay
from experiments.runs.in_vllm import device_of
from testbed.core.commands import Recorder
from testbed.errors import ConfigError
from testbed.specs.profiles import read_profile
from tests.analysis.runs import change_manifest
from tests.experiments.kit import Say

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
    assert "free_blocks_after_commit" in case.steps[-1]
    assert replay_case(case, system, system.preset) is None


@pytest.mark.parametrize(("name", "last", "is_compared"), [("sync", "plan", True), ("async", "commit", False)])
def test_a_log_that_ends_with_a_step_in_flight_conforms_as_far_as_that(
    tmp_path: Path, name: str, last: str, is_compared: bool
) -> None:
    """In an asynchronous one the step in flight was planned before the last commit, and held blocks at it."""
    lines = lines_of(name)
    end = next(number for number, line in enumerate(lines) if line["kind"] == last and line["step"] == 5)
    import_log(written(tmp_path / "log.jsonl", lines[: end + 1]), tmp_path / "run")
    (case,) = read_cases(tmp_path / "run" / "case.jsonl")
    assert ("free_blocks_after_commit" in case.steps[-1]) == is_compared
    system = SYSTEMS[case.system]
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
    assert (run.manifest["backend"], run.manifest["victim_of_auto"]) == ("vllm", "most_recently_admitted")


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_as_long_as_it_ran_alone_and_pauses_are_in_none(tmp_path: Path, name: str) -> None:
    header, *lines = lines_of(name)
    num, pause_ns = sum(line["kind"] == "commit" for line in lines), 10**10
    later = {"ns": lines[-1]["ns"] - header["ns"] + pause_ns, "step": num, "committed": num, "plans": num}
    later |= {"began_ns": later["ns"], "arrival_unix_ns": later["ns"], "commits": num}
    text = json.dumps([{key: value + later.get(key, 0) if key in later else value for key, value in line.items()}
                       for line in lines])  # fmt: skip
    for request_id in {line["id"] for line in lines if "id" in line}:
        text = text.replace(f'"{request_id}"', f'"{request_id} again"')
    log = read_log(written(tmp_path / "log.jsonl", [header, *lines, *json.loads(text)]))
    measured = replay(log, Recorder())
    took = [step.taken_ns - step.planned_ns for step in log.steps]
    since = [after.taken_ns - before.taken_ns for before, after in pairwise(log.steps)]
    assert [one.spans.forward_ns for one in measured] == [*took[:1], *map(min, took[1:], since)]
    assert measured[num - 1].period_ns == log.steps[num - 1].end_ns - log.steps[num - 1].began_ns
    assert sum(one.period_ns for one in measured[:num]) < log.steps[num].began_ns - pause_ns


@pytest.mark.usefixtures("unrendered")
def test_the_profile_can_be_read_and_the_trace_simulated(tmp_path: Path, say: Say) -> None:
    folder = tmp_path / "run"
    said = say("observe", "import", str(LOGS / "sync.jsonl.gz"), "--out", str(folder)).success()
    assert "60 steps, 4 preemptions" in said
    profile = read_profile(folder / "profile.parquet")
    assert profile.manifest.versions == {"vllm": "0.32.0"}
    assert min(step.total_ns for step in profile.steps) > 0
    sim = tmp_path / "sim"
    assert main(["run", f"from={folder}", "backend=sim", "cost=constant", f"hydra.run.dir={sim}"]) == 0
    assert load_run(sim).fingerprint == load_run(folder).fingerprint
    assert main(["report", str(folder), str(sim), "--out", str(tmp_path / "report.html")]) == 0


@pytest.mark.usefixtures("unrendered")
def test_a_log_is_fitted_judged_and_drawn_as_a_run_of_ours(tmp_path: Path, say: Say) -> None:
    folder, fit = tmp_path / "run", tmp_path / "fit.json"
    import_log(LOGS / "sync.jsonl.gz", folder)
    say("calibrate", "fit", str(folder / "profile.parquet"), "--out", str(fit)).success()
    fidelity = ("fidelity", str(folder), "cost=calibrated", f"cost.path={fit}")
    said = say(*fidelity, "--out", str(tmp_path / "out")).success()
    assert "backend=vllm, 11 requests matched one to one" in said
    assert "3 of 14 requests did not end well and were left out" in said
    assert "priced by what was fitted" not in said
    (judged,) = json.loads((tmp_path / "out" / "fidelity.json").read_text())["loads"]
    errors = {line["metric"]: line["error"] for line in judged["errors"]}
    assert abs(errors["e2e_s.mean"]) < 0.1
    assert abs(errors["e2e_s.p50"]) < 0.1
    told, manifest = json.loads(fit.read_text()), json.loads((folder / "manifest.json").read_text())
    told["manifest"]["device_description"] = "AMD EPYC, 7 threads"
    fit.write_text(json.dumps(told))
    note = f"measured on {manifest['device']!r}, and priced by what was fitted on 'AMD EPYC, 7 threads'"
    assert note in say(*fidelity).success()
    say("timeline", str(folder)).success()
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert sum("step" in event.get("args", {}) for event in events if event["ph"] == "X") == 60


def test_who_fits_what_an_import_made_no_profile_of_is_told_why(tmp_path: Path, say: Say) -> None:
    import_log(LOGS / "async.jsonl.gz", tmp_path / "run")
    profile = tmp_path / "run" / "profile.parquet"
    why = "the run there left none (asynchronous steps overlap: what each costs by itself is not known"
    assert f"no profile at {profile}: {why}" in say("calibrate", "fit", str(profile)).error()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("version", "ends_round", "when_alone"),
    [("0.28.0", True, True), ("0.30.9", True, True), ("0.31.0", True, False), ("0.32.0", True, False),
     ("0.33.1", False, False)],
)  # fmt: skip
def test_a_log_is_simulated_by_the_rules_of_its_version(
    tmp_path: Path, name: str, version: str, ends_round: bool, when_alone: bool
) -> None:
    lines = lines_of(name)
    lines[0]["vllm"] = version
    import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    composition = load_run(tmp_path / "run").config["scheduler"]["composition"]
    options = composition if isinstance(composition, dict) else {}
    assert options.get("own_victim_ends_round", False) == ends_round
    assert options.get("threshold_when_alone", False) == when_alone


@pytest.mark.parametrize("version", ["0.27.1", "0.34.0", "1.0.0", "a branch"])
def test_a_log_of_a_version_that_no_preset_mirrors_makes_no_case(tmp_path: Path, version: str) -> None:
    lines = lines_of("sync")
    lines[0]["vllm"] = version
    said = import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    (line,) = [line for line in said if line.startswith("no case")]
    assert f"vLLM {version} is outside of 0.28 to 0.33, whose decisions the presets mirror" in line
    assert not (tmp_path / "run" / "case.jsonl").exists()
    assert len(load_run(tmp_path / "run").steps) == 60


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("sync", {"preempts": False, "is_reset": False}, ""),  # refused: requests had blocks
        ("async", {"preempts": True, "is_reset": True}, "lost its KV to a reset 1 time with a step in flight"),
    ],
)
def test_a_log_with_a_reset_says_why_it_makes_no_case(
    tmp_path: Path, name: str, fields: dict[str, Any], why: str
) -> None:
    """Behind a plan of vLLM's whose commit is not there yet."""
    lines = lines_of(name)
    at = [line["kind"] for line in lines].index("plan") + 1
    plan = lines[at - 1]
    reset = {"ns": plan["ns"], "plans": plan["step"] + 1, "commits": plan["committed"], **fields}
    lines.insert(at, {"kind": "reset_prefix_cache", **reset})
    said = import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    found = [line for line in said if line.startswith("no case")]
    assert (tmp_path / "run" / "case.jsonl").exists() == (not why)
    assert (len(found), why in "".join(found)) == (bool(why), True)


def test_who_was_preempted_by_a_reset_and_aborted_before_the_next_plan_is_named_by_it_and_gone(tmp_path: Path) -> None:
    """A log of vLLM 0.32: a pause that keeps requests and clears the cache, an abort, and on it goes."""
    lines = lines_of("reset_then_abort")
    (aborted,) = [line["id"] for line in lines if line["kind"] == "abort"]
    assert any(aborted in line["preempted"] for line in lines if line["kind"] == "plan")
    import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    requests = load_run(tmp_path / "run").requests.set_index("request_id")
    assert requests.drop(aborted)["num_preemptions"].tolist() == [1, 1, 1]
    assert requests.loc[aborted, ["num_preemptions", "finish_reason"]].tolist() == [0, "abort"]
    assert "for a reset of the prefix cache (1)" in explain_run(load_run(tmp_path / "run"))
    said = explain_request(load_run(tmp_path / "run"), requests.index[1])
    assert "It was preempted once, for a reset of the prefix cache:" in said
    (case,) = read_cases(tmp_path / "run" / "case.jsonl")
    assert replay_case(case, SYSTEMS[case.system], SYSTEMS[case.system].preset) is None
    next(line for line in lines if line["kind"] == "reset_prefix_cache")["preempts"] = False
    import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "other")
    assert "a reset of the prefix cache" not in explain_run(load_run(tmp_path / "other")), "it preempted nobody"


def test_lengths_in_place_of_ids_give_all_but_a_case(tmp_path: Path) -> None:
    lines = lines_of("sync")
    for line in lines:
        if line["kind"] == "add":
            line["prompt"] = len(line["prompt"])
        if line["kind"] == "commit":
            line["emitted"] = {name: len(ids) for name, ids in line["emitted"].items()}
    said = import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    assert any("lengths in place of token ids" in line for line in said)
    assert not (tmp_path / "run" / "case.jsonl").exists()
    assert len(load_run(tmp_path / "run").steps) == 60


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
    assert any(line.startswith("no case") and said in line for line in imported)
    assert not (tmp_path / "run" / "case.jsonl").exists()


def test_a_request_for_what_is_not_here_makes_no_case(tmp_path: Path) -> None:
    lines = lines_of("sync")
    lines[1]["unknown"] = "structured output"
    said = import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    assert any("a request asked for structured output" in line for line in said)


def test_what_speculation_computed_is_no_profile(tmp_path: Path) -> None:
    lines = lines_of("sync")
    lines[0]["unknown"] = ["speculative_config"]
    said = import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    assert [line.split("  ")[0] for line in said if "speculative_config" in line] == ["no case", "no profile"]
    assert not (tmp_path / "run" / "profile.parquet").exists()


def test_the_options_of_the_import_are_named_where_they_are_wrong(tmp_path: Path, say: Say) -> None:
    command = ("observe", "import", str(LOGS / "sync.jsonl.gz"), "--out", str(tmp_path / "run"))
    say(*command).success()
    assert (error := say(*command).error()).endswith("choose another --out or pass --overwrite")
    assert "already holds a run" in error
    say(*command, "--overwrite").success()
    missing = say("observe", "import", str(tmp_path / "nosuch")).error()
    assert missing.endswith("nosuch: does not exist; expected the path of an observer's log")


@pytest.mark.usefixtures("unrendered")
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


@pytest.mark.parametrize(
    ("stored", "simulated"),
    [({"dtype": "float32"}, "bfloat16"), ({"quantization_config": {"quant_method": "fp8"}}, "fp8")],
)
def test_a_checkpoint_that_vllm_computed_in_another_format_is_fitted_and_simulated(
    tmp_path: Path, stored: dict[str, Any], simulated: str
) -> None:
    """vLLM computes a float32 checkpoint in bfloat16, unless it is told not to."""
    lines = lines_of("sync")
    lines[0]["model"] |= {"dtype": "bfloat16", "hf_config": lines[0]["model"]["hf_config"] | stored}
    import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    profile, fit = tmp_path / "run" / "profile.parquet", tmp_path / "fit.json"
    assert main(["calibrate", "fit", str(profile), "--out", str(fit)]) == 0
    calibrated = ["cost=calibrated", f"cost.path={fit}", "cost.outside=allow"]
    again = ["run", f"from={tmp_path / 'run'}", "backend=sim", *calibrated, f"hydra.run.dir={tmp_path / 'sim'}"]
    assert main(again) == 0
    assert RunConfig.from_container(load_run(tmp_path / "sim").config).model.dtype == simulated


def test_what_has_no_configuration_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    lines = lines_of("sync")
    lines[0]["config"]["block_size"] = 0
    with pytest.raises(ConfigError, match=r"cache\.block_size is 0"):
        import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    assert not (tmp_path / "run").exists()


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
    said = import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    (line,) = [line for line in said if line.startswith("no profile")]
    assert reason in line
    assert len(load_run(tmp_path / "run").steps) == 60
    assert (tmp_path / "run" / "case.jsonl").exists()


def test_who_simulates_a_model_of_another_architecture_says_whose_prices_to_take(tmp_path: Path, say: Say) -> None:
    """Its sizes are all there, and it is no decoder of the shape that they would be priced in."""
    lines = lines_of("sync")
    lines[0]["model"]["hf_config"] |= {"architectures": ["Mamba2ForCausalLM"]}
    import_log(written(tmp_path / "log.jsonl", lines), tmp_path / "run")
    assert "Mamba2ForCausalLM is none of" in load_run(tmp_path / "run").manifest["unpriced"]
    again = ["run", f"from={tmp_path / 'run'}", "backend=sim", f"hydra.run.dir={tmp_path / 'sim'}"]
    assert say(*again).error().endswith("say whose prices to take, as model=llama3.1_8b, or choose another cost")
    say(*again, "model=llama3.1_8b", "device=h100").success()


@pytest.mark.usefixtures("unrendered")
def test_engines_stand_side_by_side_in_a_report(tmp_path: Path) -> None:
    for name, backend in (("vllm", "vllm"), ("real", "real")):
        import_log(LOGS / "sync.jsonl.gz", tmp_path / name)
        change_manifest(tmp_path / name, backend=backend)
    sim = tmp_path / "sim"
    assert main(["run", f"from={tmp_path / 'vllm'}", "backend=sim", "cost=constant", f"hydra.run.dir={sim}"]) == 0
    folders = [str(tmp_path / name) for name in ("vllm", "real", "sim")]
    assert main(["report", *folders, "--out", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "| metric | sim | vllm's own | real |" in text or "| metric | sim | real | vllm's own |" in text
