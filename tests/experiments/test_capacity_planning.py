"""What a planner reads beside a capacity: how far to trust it, what it is for each GPU, which policies do not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments import find_capacity
from experiments.capacity.arms import parse
from experiments.capacity.command import warnings
from testbed.errors import DeviceError, TestbedError
from tests.experiments.kit import REAL, SHORT, TINY, Say, write_rows

SERVER = (
    "model=tiny", "device=h100", "cost=constant", "cost.step_s=0.01", "scheduler.max_num_seqs=1",
    "cache.prefix_caching=false", "cache.num_gpu_blocks=4096",
)  # fmt: skip
TOKENS = ("trace.prompt={kind: constant, value: 1}", "trace.output={kind: constant, value: 10}")
pytestmark = pytest.mark.usefixtures("unrendered")


def notes(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("note: ")]


def test_the_cost_model_and_the_trust_of_a_report_are_said(tmp_path: Path, say: Say) -> None:
    run = (*TINY, *SHORT, "slo.ttft_s=1e-3", "device=h100", "cost.step_s=0.02")
    said = say("capacity", *run[:-1], "cost=roofline", "--out", str(tmp_path / "a")).out
    assert "; sim, tiny on h100, cost roofline, trace synthetic" in said
    assert "trust in step times: fair (from a data sheet)" in said
    said = say("capacity", *run, "cost=constant", "--out", str(tmp_path / "b")).out
    assert "; sim, tiny on h100, cost constant, trace synthetic" in said
    lines = [
        "trust in fidelity: poor (simulated; how far from a real engine was not measured)",
        "trust in step times: poor (made up: they show a mechanism)",
    ]
    assert "\n".join(["", *lines, ""]) in said
    assert all(f"\n- {line}\n" in (tmp_path / "b" / "capacity.md").read_text() for line in lines)
    trust = json.loads((tmp_path / "b" / "capacity.json").read_text())["trust"]
    assert [(one["about"], one["level"]) for one in trust] == [("fidelity", "poor"), ("step times", "poor")]


def test_each_fit_s_error_is_said_and_the_steps_outside_it_once(tmp_path: Path) -> None:
    words = ("model=qwen3_8b", "cost=calibrated", "trace.num_requests=60", "trace.rate=200", "slo.ttft_s=1")
    found = find_capacity(*words, "device=h100,h200", folder=tmp_path, tolerance=0.5)
    (told,) = (one.why for one in found.trust if one.about == "step times")
    assert re.match(r"h100: fitted to measured steps; those left out of the fit are 1.9 % off .*; h200: fitted", told)
    assert told.count("EXTRAPOLATED STEP TIMES") == 2
    assert not any("EXTRAPOLATED" in note for one in found.found for note in warnings(one))


def test_an_engine_s_capacity_is_not_called_simulated(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = (*TINY, *REAL, *SHORT, "slo.ttft_s=1e-3")
    (trust,) = find_capacity(*words, folder=tmp_path, tolerance=0.5).trust
    assert trust.why.startswith("measured on a real engine, nothing is simulated")


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        ((), "other seeds have the same requests of trace=jsonl: give seed=0,1,2,3,4, and draw apart: "),
        (("trace.transforms=[{name: thin, fraction: 0.5}]",), "give several seeds, as seed=0,1,2,3,4"),
        (("trace.transforms=[{name: thin, fraction: 0.5}]", "trace.seed=3"), "0,1,2,3,4, and leave out trace.seed"),
        (("trace.transforms=[{name: repeat, times: 2}]",), "and draw apart: add {name: bootstrap} to trace.transforms"),
    ],
)
def test_the_advice_for_replicates_is_one_that_works(more: tuple[str, ...], advice: str, tmp_path: Path) -> None:
    rows = [{"arrival_time": i**1.1 / 25, "prompt_tokens": 1, "output_tokens": 1 + i % 4} for i in range(60)]
    trace = ("trace=jsonl", f"trace.path={write_rows(tmp_path / 't.jsonl', rows)}", "slo.ttft_s=1")
    ((arm,), _) = parse([*SERVER, *trace, *more])
    assert advice in arm.replicates
    if not more:
        (words,) = re.findall(r"'(trace.transforms=.*?)'", arm.replicates)
        parse([*SERVER, *trace, "seed=0,1,2,3,4", words])


def test_a_policy_that_does_not_fit_has_a_row_and_the_others_go_on(tmp_path: Path, say: Say) -> None:
    some = [item for item in TINY if "num_gpu_blocks" not in item]
    share = "cache.gpu_memory_utilization=0.000001,0.001"
    words = (*some, *SHORT, "device=h100", "slo.ttft_s=1e-3", "slo.attainment=0.5", "trace.rate=100")
    said = say("capacity", *words, share, "--out", str(tmp_path / "a"))
    assert "gpu memory utilization 1e-06 does not fit: no room for one KV block of" in said.error()
    assert re.search(r"^\| gpu memory utilization 0.001 +\| [\d.]+ req/s ", said.out, re.MULTILINE)
    assert re.search(r"^\| gpu memory utilization 1e-06 +\| does not fit +\| –", said.out, re.MULTILINE)
    found = find_capacity(*words, share, folder=tmp_path / "a")
    assert (found.baseline, [*found.unfit]) == ("gpu memory utilization 0.001", ["gpu memory utilization 1e-06"])
    assert str(found).endswith("gpu memory utilization 1e-06: does not fit")
    with pytest.raises(DeviceError, match=r"^gpu memory utilization 1e-06: no room for one KV block"):
        find_capacity(*words, share.replace("0.001", "0.000002"), folder=tmp_path / "b")
    with pytest.raises(TestbedError, match=r"^l40s: cost=calibrated: no fit for qwen3_8b on l40s"):
        find_capacity(
            "model=qwen3_8b", "device=h100,l40s", "cost=calibrated", *SHORT, "slo.ttft_s=1", folder=tmp_path / "c"
        )


def test_fleets_are_compared_by_gpu_over_traces_that_are_long_enough(tmp_path: Path, say: Say) -> None:
    fleets = (*SERVER, *TOKENS, "slo.ttft_s=1", "backend.num_replicas=1,2,4", "trace.rate=8")
    said = say("capacity", *fleets, "trace.num_requests=60", "--out", str(tmp_path / "a")).success()
    capacities = re.findall(r"^\| num replicas (\d) +\| ([\d.]+) req/s +\| (\d) +\| ([\d.]+) req/s", said, re.MULTILINE)
    assert [(num, gpus) for num, _, gpus, _ in capacities] == [("1", "1"), ("2", "2"), ("4", "4")]
    for num, all_of_it, _, each in capacities:
        assert float(each) == pytest.approx(float(all_of_it) / int(num), rel=1e-3)
    (note,) = (line for line in notes(said) if "the more GPUs a policy has" in line)
    (enough,) = re.findall(r"at least ([\d,]+) requests", note)
    longer = f"trace.num_requests={enough.replace(',', '')}"
    said = say("capacity", *fleets, longer, "--out", str(tmp_path / "b")).success()
    assert not [line for line in notes(said) if "more GPUs" in line or "the run is short" in line]


def test_policies_of_as_many_gpus_have_no_column_for_them(tmp_path: Path, say: Say) -> None:
    words = (*TINY, *SHORT, "slo.ttft_s=1e-3", "slo.attainment=0.5", "trace.rate=100")
    for more in (("device=h100", "scheduler.max_num_seqs=2,4"), ("device=cpu", "backend.num_replicas=1,2")):
        said = say("capacity", *[w for w in words if "seqs" not in w], *more, "--out", str(tmp_path / more[0])).out
        assert "| capacity " in said
        assert "GPU" not in said
    tensor = ("model=llama3.1_8b", "device=h100", "slo.ttft_s=1", "trace.num_requests=9")
    arms, _ = parse([*tensor, "backend.num_replicas=3", "device.tensor_parallel_size=1,4"])
    assert [arm.num_gpus for arm in arms] == [3, 12]


def test_a_goodput_that_counts_how_sessions_end_is_noted(tmp_path: Path, say: Say) -> None:
    words = (*SERVER, *TOKENS, "trace.rate=1", "slo.ttft_s=1", "slo.attainment=0.9", "trace.num_requests=200")
    turns = ("trace.min_turns=4", "trace.max_turns=4", "trace.turn_prompt={kind: constant, value: 1}")
    said = say("capacity", *words, *turns, "trace.think_time_s=5", "--out", str(tmp_path / "a")).out
    (note,) = (line for line in notes(said) if "goodput is " in line)
    goodput, met = map(float, re.findall(r"([\d.]+) req/s", note))
    assert f"| {goodput:.4g} req/s" in said
    assert met > goodput / 0.85
    said = say("capacity", *words, "--out", str(tmp_path / "b")).out
    assert not [line for line in notes(said) if "goodput is " in line]


def test_a_run_as_long_as_is_asked_for_is_not_short(tmp_path: Path, say: Say) -> None:
    words = (*SERVER, *TOKENS, "slo.ttft_s=3", "trace.rate=8")
    said = say("capacity", *words, "trace.num_requests=60", "--out", str(tmp_path / "a")).success()
    (enough,) = re.findall(r"the run is short: .* at least ([\d,]+) requests", said)
    longer = f"trace.num_requests={enough.replace(',', '')}"
    assert "is short" not in say("capacity", *words, longer, "--out", str(tmp_path / "b")).success()
