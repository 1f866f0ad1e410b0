"""Replays on the real engine from the command line: at a speed, with outputs forced by token, by length, or not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch")

from analysis.comparison.pairs import infer_pairs
from analysis.load import load_run
from experiments.cli import main
from experiments.commands.app import _speed_of, config_from
from experiments.configuration.config import RunConfig
from experiments.configuration.saved import saved_config
from experiments.configuration.settings import FORCED
from experiments.runs.parity import check_parity
from experiments.runs.run import execute
from experiments.wiring.build import simulated_pools
from experiments.wiring.traces import build_trace, forcing
from real.checkpoint import make_checkpoint
from testbed.core.request import Request
from testbed.core.sampling import SamplingParams
from testbed.records.tape import read_tape
from testbed.traces.fingerprint import fingerprint
from testbed.traces.readers.own import read_jsonl
from tests.experiments.kit import REAL, SHORT, TINY, Say, config_of, manifest_of, table_of

SESSIONS = {"trace__min_turns": 2, "trace__max_turns": 3, "trace__closed_loop": True, "trace__think_time_s": 0.02}


def replayed(folder: Path, **settings: object) -> Path:
    """A run on the real engine; settings: group__key=value."""
    result = execute(config_of((*TINY, *SHORT, *REAL), **settings), folder)
    assert result.status == "complete", result.message
    return folder


@pytest.mark.parametrize("more", [{}, SESSIONS], ids=["open", "closed loop"])
def test_a_replay_at_a_speed_divides_when_requests_come_and_nothing_else(tmp_path, more):
    fast = replayed(tmp_path / "fast", **more, backend__speed=4.0)
    assert manifest_of(fast)["replay"]["speed"] == 4.0
    itself = build_trace(config_of((*TINY, *SHORT, *REAL), **more))
    assert manifest_of(fast)["trace"]["fingerprint"] == fingerprint(itself)
    rows = {row.request_id: row for row in read_jsonl(fast / "trace.jsonl").rows}
    finish = {}
    table = table_of(fast).to_pylist()
    for row in table:
        finish[(row["session_id"], row["turn"])] = row["finish_ns"]
    for row in table:
        source = rows[row["request_id"]]
        if source.think_ns is None:
            assert row["arrival_ns"] == round(source.arrival_ns / 4)
        else:
            before = finish[(row["session_id"], row["turn"] - 1)]
            assert row["arrival_ns"] == before + round(source.think_ns / 4)
    assert check_parity(fast).divergence is None


@pytest.mark.usefixtures("unrendered")
def test_a_simulation_of_a_replay_has_its_speed_and_only_such_a_one_is_paired_with_it(tmp_path, capsys, say):
    fast = replayed(tmp_path / "fast", backend__speed=4.0)
    real = load_run(fast)
    keys = ["backend=sim", "cost=linear"]
    same = execute(config_from(fast, keys), tmp_path / "same")
    other = execute(config_from(fast, [*keys, "trace.transforms=[]"]), tmp_path / "other")
    assert same.manifest["trace"]["notes"] == ["the trace's clock x 4"]
    sims = [load_run(one.folder) for one in (other, same)]
    assert [pair.sim.path for pair in infer_pairs([*sims, real])] == [same.folder]
    tape = ["backend=sim", "cost=recorded", f"cost.run={fast}"]
    assert load_run(execute(config_from(fast, tape), tmp_path / "tape").folder).fingerprint == real.fingerprint
    say("fidelity", str(fast), "cost=linear", "--out", str(tmp_path / "out")).success()
    say("report", str(tmp_path / "out" / "runs"), "--out", str(tmp_path / "r.html")).success()
    saved = {"backend": {"speed": 4.0}, "trace": {"_target_": "mine.make"}}
    assert not _speed_of(saved, keys)
    assert "note: simulated at speed 1 and not 4" in capsys.readouterr().err


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_lag_and_host_time_are_in_manifest_and_summary(tmp_path, plans_ahead):
    folder = replayed(tmp_path / "run", scheduler__async_scheduling=plans_ahead)
    manifest, summary = manifest_of(folder), json.loads((folder / "summary.json").read_text())
    assert summary["replay"] == manifest["replay"]
    requests, steps = table_of(folder).to_pylist(), table_of(folder, "steps").to_pylist()
    waited = [row["queued_ns"] - row["arrival_ns"] for row in requests]
    told = manifest["replay"]
    assert told["num_arrivals"] == len(requests)
    mean_s = told["lag_s"]["mean"] + told["boundary_wait_s"]["mean"]
    assert mean_s == pytest.approx(sum(waited) / len(waited) / 1e9)
    parts = ("schedule_ns", "prepare_ns", "swap_ns", "forward_ns", "sample_ns")
    device = sum(row[part] for row in steps for part in parts[2:])
    lengths = sum(row["end_ns"] - row["start_ns"] for row in steps)
    assert manifest["host"]["step_s"] == pytest.approx(lengths / len(steps) / 1e9)
    assert 0 < summary["host_share"] == pytest.approx(1 - device / lengths)
    assert manifest["host"]["core_wait_share"] is None or 0 <= manifest["host"]["core_wait_share"] < 1
    within = parts[2:] if plans_ahead else parts  # a step that is planned ahead is prepared during the one before
    assert all(sum(row[part] for part in within) <= row["end_ns"] - row["start_ns"] for row in steps)
    assert manifest["host"]["exposed_share"] == pytest.approx(summary["host_share"])


@pytest.mark.parametrize("forced", FORCED)
def test_outputs_are_forced_as_asked_for_and_every_replay_has_parity(tmp_path, forced):
    drawn = {"sampling__temperature": 1.0, "sampling__max_tokens": 5, "sampling__ignore_eos": True}
    folder = replayed(tmp_path / "run", trace__forced=forced, **drawn)
    rows = {row.request_id: row for row in read_jsonl(folder / "trace.jsonl").rows}
    wanted = {name: 5 if forced == "nothing" else row.num_output_tokens for name, row in rows.items()}
    assert {row["request_id"]: row["num_output_tokens"] for row in table_of(folder).to_pylist()} == wanted
    assert len({*wanted.values()}) > 1 or forced == "nothing"
    tape = [json.loads(line) for line in (folder / "tape.jsonl").read_text().splitlines()]
    outcomes = [one for line in tape if line["kind"] == "step" for one in line["outcomes"] or ()]
    assert bool(outcomes) is (forced != "tokens"), "forced tokens need no outcomes, all others are on the tape"
    assert check_parity(folder).divergence is None
    replay = (*TINY, "trace=jsonl", "trace.path=x", "cost=recorded", "cost.run=x")
    again = config_of(replay, **drawn, trace__path=str(folder / "trace.jsonl"), cost__run=str(folder))
    assert execute(again, tmp_path / "again").status == "complete"
    assert manifest_of(tmp_path / "again")["digest"] == manifest_of(folder)["digest"]


def test_lengths_are_kept_whatever_would_end_a_sequence():
    sampling = SamplingParams(max_tokens=9, min_tokens=8, stop_token_ids=(7,), stop=("x",), temperature=0.5)
    request = Request("r", [1, 2], forced_output=[4, 5, 6, 7, 8], sampling=sampling)
    assert forcing(request, "tokens") is request
    free = forcing(request, "nothing")
    assert (free.forced_output, free.sampling) == (None, sampling)
    lengths = forcing(request, "lengths")
    assert lengths.forced_output is None
    assert lengths.sampling == replace(
        sampling, max_tokens=5, min_tokens=0, ignore_eos=True, stop_token_ids=(), stop=()
    )
    unrecorded = request.replace(forced_output=None)
    assert forcing(unrecorded, "lengths") is unrecorded


@pytest.mark.parametrize("width", [1, 3])
def test_of_beams_only_the_length_is_forced(tmp_path, width):
    ends = {"sampling__beam_width": width, "sampling__stop_token_ids": [*range(0, 500, 3)]}
    folder = replayed(tmp_path / "run", **ends, cache__num_gpu_blocks=400)
    rows = {row.request_id: row.num_output_tokens for row in read_jsonl(folder / "trace.jsonl").rows}
    assert {row["request_id"]: row["num_token_steps"] for row in table_of(folder).to_pylist()} == rows
    assert check_parity(folder).divergence is None
    simulated = execute(config_from(folder, ["backend=sim", "cost=linear"]), tmp_path / "simulated")
    assert {row["request_id"]: row["num_token_steps"] for row in table_of(simulated.folder).to_pylist()} == rows


def test_a_forced_run_samples_every_token_that_a_free_one_samples(tmp_path, monkeypatch):
    """What the model does is the same: the rows whose logits are made and drawn from, step by step."""
    from real.backend import RealBackend  # not at the top: it needs torch
    from real.runner import ModelRunner

    counts: list[list[int]] = []
    drawn: list[int] = []
    launch, draw = RealBackend._launch, ModelRunner.draw

    def counting(self, plan, inputs):
        drawn.clear()
        launched = launch(self, plan, inputs)
        counts[-1].append(plan.shape.num_samples)
        assert sum(drawn) == plan.shape.num_samples
        return launched

    def counted(self, *given):
        launched = draw(self, *given)
        drawn.append(len(launched.token_ids))
        return launched

    monkeypatch.setattr(RealBackend, "_launch", counting)
    monkeypatch.setattr(ModelRunner, "draw", counted)
    for forced in ("tokens", "lengths"):
        counts.append([])
        replayed(tmp_path / forced, trace__forced=forced, trace__arrival="all_at_once")
    assert counts[0] == counts[1]
    assert sum(counts[0]) == sum(row["num_output_tokens"] for row in table_of(tmp_path / "tokens").to_pylist())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("backend.speed=0", "backend.speed is 0.0; it must be above 0: 2 replays a trace twice as fast"),
        ("backend.speed=-2", "backend.speed is -2.0; it must be above 0"),
        ("backend.speed=inf", "backend.speed is inf; it must be above 0"),
        ("backend.speed=1e-300", "backend.speed is 1e-300; it must be large enough that the last arrival comes before"),
        ("trace.forced=length", "trace.forced is 'length'; did you mean 'lengths'? choose one of tokens, lengths, "),
        ("backend.pace=fast", "backend.pace is 'fast'; choose one of real_time, as_fast_as_possible"),
    ],
)
def test_impossible_replays_are_one_line(say, tmp_path, override, message):
    said = say("run", *TINY, *SHORT, *REAL, override, f"hydra.run.dir={tmp_path / 'run'}")
    assert message in said.error()
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_the_simulator_needs_lengths(say, tmp_path):
    said = say("run", *TINY, *SHORT, "trace.forced=nothing", f"hydra.run.dir={tmp_path / 'run'}")
    assert "the simulator has no model; choose tokens or lengths" in said.error()
    config = config_of(trace__forced="lengths")
    assert config.trace.forced == "lengths"
    say("run", *TINY, *SHORT, "trace.forced=lengths", f"hydra.run.dir={tmp_path / 'run'}").success()


def test_what_the_model_ends_is_bounded_by_its_own_parameter(say, tmp_path):
    output = "trace.output={kind: constant, min_tokens: 2, max_tokens: 8}"
    free = [*TINY, *SHORT, *REAL, "trace.forced=nothing", "sampling.ignore_eos=true", output]
    cut = ["trace.output={kind: constant, value: 9, min_tokens: 1, max_tokens: 8}", "sampling.max_tokens=2"]
    said = say("run", *free, *cut, f"hydra.run.dir={tmp_path / 'cut'}")
    assert "trace.forced=nothing: sampling.max_tokens bounds outputs, no setting of the trace" in said.out
    said = say("run", *free, "cache.num_gpu_blocks=4", f"hydra.run.dir={tmp_path / 'small'}")
    assert "Cut them with trace.max_prompt_tokens or sampling.max_tokens, raise the limit" in said.err
    simulated = say("run", *TINY, *SHORT, "cache.num_gpu_blocks=1", f"hydra.run.dir={tmp_path / 'simulated'}")
    assert "Cut them with trace.max_prompt_tokens or trace.max_output_tokens" in simulated.err


def test_a_run_that_is_scaled_by_a_probe_says_by_which_and_another_may_take_the_same(say, tmp_path):
    paced = [*TINY, *SHORT, *REAL, "backend.pace=probe_scaled"]
    said = say("run", *paced, f"hydra.run.dir={tmp_path / 'first'}").success()
    probe = manifest_of(tmp_path / "first")["replay"]["probe"]
    assert probe["num_probes"] >= 3
    assert f"for runs to compare: backend.pace=probe_scaled backend.probe_ns={probe['probe_ns']}" in said
    say("run", *paced, f"backend.probe_ns={probe['probe_ns']}", f"hydra.run.dir={tmp_path / 'again'}").success()
    assert manifest_of(tmp_path / "again")["replay"]["probe"]["probe_ns"] == probe["probe_ns"]
    alone = say("run", *TINY, *SHORT, *REAL, "backend.probe_ns=9", f"hydra.run.dir={tmp_path / 'no'}")
    assert "backend.probe_ns is of backend.pace=probe_scaled; choose it, or set probe_ns=null" in alone.error()


def test_a_sweep_whose_points_each_have_a_clock_of_their_own_says_so(tmp_path: Path, say: Say) -> None:
    given = ["run", "-m", *TINY, *SHORT, *REAL, "seed=0,1", "backend.pace=probe_scaled", f"hydra.sweep.dir={tmp_path}"]
    said = say(*given).out
    assert "note         backend.pace=probe_scaled without backend.probe_ns: each of 2 points scales" in said
    assert "without backend.probe_ns" not in say(*given).out, "nothing is left to run"
    assert "without backend.probe_ns" not in say(*given, "backend.probe_ns=100000").out


def test_a_real_run_is_simulated_in_the_pool_that_it_had(tmp_path: Path, say: Say) -> None:
    say("run", *REAL, *TINY, *SHORT, "backend.cpu_kv_bytes=1000000", f"hydra.run.dir={tmp_path / 'real'}")
    had = manifest_of(tmp_path / "real")["num_gpu_blocks"]
    elsewhere = simulated_pools(config_of((*TINY, *SHORT, "device=h100"))).num_gpu_blocks
    cases = (("sim", (), had), ("given", ("cache.num_gpu_blocks=99",), 99), ("other", ("device=h100",), elsewhere))
    for name, options, expected in cases:
        again = (f"from={tmp_path / 'real'}", "backend=sim", *options, f"hydra.run.dir={tmp_path / name}")
        say("run", *again).success()
        assert manifest_of(tmp_path / name)["num_gpu_blocks"] == expected


@pytest.mark.usefixtures("unrendered")
def test_a_real_run_is_simulated_in_the_dtype_that_it_computed_in(tmp_path: Path, say: Say) -> None:
    folder = make_checkpoint(tmp_path / "model", config_of((*TINY, *SHORT)).model, seed=3)
    had = config_of((*TINY, *SHORT)).model.dtype
    other = "bfloat16" if had == "float32" else "float32"
    unlike = f"note: the engine computed in {other} (backend.dtype), and is simulated in {had}: give "
    for name, model, chosen, dtype, said in (
        ("named", TINY, (), other, ""),
        ("keyed", TINY, ("model.eos_token_id=7",), other, ""),
        ("chosen", TINY, (f"model.dtype={had}",), had, f"{unlike}model.dtype={other}"),
        ("files", (f"model.path={folder}", "device=cpu"), (), had, f"{unlike}model.path a copy of config.json that"),
    ):
        real, sim, out = (tmp_path / f"{name}_{kind}" for kind in ("real", "sim", "fidelity"))
        say("run", *REAL, *model, *SHORT, f"backend.dtype={other}", f"hydra.run.dir={real}")
        ran = say("run", f"from={real}", "backend=sim", *chosen, f"hydra.run.dir={sim}")
        compared = say("fidelity", str(real), *chosen, "--out", str(out))
        assert (ran.status, compared.status) == (0, 0), ran.err + compared.err
        for printed, made in ((ran.err, sim), (compared.out, next(out.glob("**/simulated")))):
            assert said in printed
            assert (unlike in printed) == bool(said)
            assert RunConfig.from_container(saved_config(made)).model.dtype == dtype


def test_an_output_ends_at_any_token_that_the_checkpoint_names_as_an_end(tmp_path: Path) -> None:
    spec = config_of((*TINY, *SHORT)).model
    folder = make_checkpoint(tmp_path / "model", replace(spec, eos_token_id=511), seed=3)
    ends = [*range(0, 500, 3)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    drawn = {"trace__forced": "nothing", "sampling__temperature": 1.0, "sampling__max_tokens": 40}
    free = replayed(tmp_path / "run", model__path=str(folder), **drawn)
    for row in table_of(free).to_pylist():
        assert row["finish_reason"] == "stop", "among 167 ends of 512 tokens, 40 draws find one"
    steps = read_tape(free / "tape.jsonl").steps
    tokens = [token for step in steps for one in step.outcomes or () for token in one.tokens]
    assert sum(token in ends for token in tokens) == len(table_of(free)), "each ends at its first"
    assert manifest_of(free)["end_token_ids"] == [511, *ends]
    (folder / "generation_config.json").unlink()
    assert check_parity(free).divergence is None, "of a run, not of what the checkpoint says today"
    ignoring = replayed(tmp_path / "ignoring", model__path=str(folder), **drawn, sampling__ignore_eos=True)
    assert {row["num_output_tokens"] for row in table_of(ignoring).to_pylist()} == {40}


def test_beams_are_swapped_where_everything_else_is_recomputed(tmp_path: Path) -> None:
    beams = {"sampling__beam_width": 3, "trace__forced": "nothing", "sampling__max_tokens": 40}
    memory = {"cache__num_gpu_blocks": 26, "cache__num_cpu_blocks": 64, "scheduler__preemption": "recompute"}
    folder = replayed(tmp_path / "run", **beams, **memory, sampling__ignore_eos=True)
    assert sum(pq.read_table(folder / "steps.parquet")["num_swapped_out"].to_pylist()) > 0
    assert check_parity(folder).divergence is None


def test_groups_that_the_model_ended_are_simulated_as_long_as_they_were(tmp_path: Path) -> None:
    ended = {"trace__forced": "nothing", "sampling__n": 2, "sampling__temperature": 1.0, "cache__num_gpu_blocks": 400}
    alike = replayed(tmp_path / "alike", **ended, sampling__max_tokens=20, sampling__ignore_eos=True)
    apart = replayed(tmp_path / "apart", **ended, sampling__max_tokens=60, sampling__stop_token_ids=[*range(9)])
    beams = {
        "trace__forced": "nothing", "sampling__beam_width": 3, "sampling__max_tokens": 60,
        "sampling__stop_token_ids": [*range(0, 500, 9)], "cache__num_gpu_blocks": 400,
    }  # fmt: skip
    ended_beams = replayed(tmp_path / "beams", **beams)
    for measured in (alike, apart, ended_beams):
        out = tmp_path / f"of-{measured.name}"
        assert main(["fidelity", str(measured), "device=cpu", "cost=linear", "--out", str(out)]) == 0
        steps, simulated = (
            {row["request_id"]: row["num_token_steps"] for row in table_of(folder).to_pylist()}
            for folder in (measured, out / "runs" / measured.name / "simulated")
        )
        assert simulated == steps
        said = "sequences ended apart are simulated as if all ended with the last" in (out / "fidelity.md").read_text()
        assert said is (measured != alike)
