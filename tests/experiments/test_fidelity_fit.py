"""`testbed fidelity --fit`: a planted error is found in the first half of a run, and the second half judges it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from analysis.load import load_run
from experiments import simulate
from experiments.fidelity import comparing, fitting
from testbed.traces.arrange import arrange
from testbed.traces.readers.own import read_jsonl
from tests.analysis.runs import change_columns
from tests.experiments.documented_files import check_keys
from tests.experiments.fidelity_kit import (
    ENGINE,
    FEW,
    GIVEN_NS,
    PLANTED_NS,
    TRACE,
    compared,
    copied,
    fidelity,
    ran,
    result,
)

pytestmark = pytest.mark.usefixtures("unrendered")  # words and numbers alone are looked at

HOST = "device.step_overhead_ns"
CALIBRATED = ENGINE | {"model": {"name": "qwen3_8b"}, "scheduler": {"name": "vllm_v1", "max_model_len": 4096}}


def fitted(folder: Path, *arguments: object) -> dict:
    out = folder.with_name(folder.name + "-out")
    assert fidelity(folder, f"device.step_overhead_ns={GIVEN_NS}", "--fit", "host", "--out", out, *arguments) == 0
    return result(out)


def test_a_planted_overhead_is_recovered_and_the_second_half_judges_it(tmp_path):
    found = fitted(ran(tmp_path / "planted", PLANTED_NS, trace=FEW).path)
    check_keys("fidelity.md", "### `fidelity.json`", found, besides=("rankings",))
    assert found["fit"]["given"] == {HOST: GIVEN_NS}
    assert found["fit"]["fitted"][HOST] == pytest.approx(PLANTED_NS, rel=0.02)
    halves = found["loads"][0]["second_half"]
    for given, after in zip(halves["as_given"], halves["fitted"], strict=True):
        if given["metric"] in ("tpot_s.mean", "e2e_s.mean"):
            assert given["error"] < -0.005
            assert abs(after["error"]) < 0.002


def test_the_second_half_has_no_part_in_the_fit(tmp_path):
    """Other arrivals, lengths and latencies there: the fitted scalar is the very same number."""
    one = ran(tmp_path / "one", PLANTED_NS, trace=FEW)
    rows = list(read_jsonl(copied(one, tmp_path / "kept") / "trace.jsonl").rows)
    half = len(rows) // 2
    changed = [
        row._replace(arrival_ns=row.arrival_ns * 2, prompt=rows[0].prompt, output=rows[1].output) for row in rows[half:]
    ]
    other = ran(tmp_path / "other", PLANTED_NS, trace=arrange("changed", rows[:half] + changed))
    slower_ttft_of_second_half(other.path, {row.request_id for row in rows[half:]})
    fits = [fitted(folder)["fit"] for folder in (one.path, other.path)]
    assert fits[0]["fitted"] == fits[1]["fitted"]
    assert list(fits[0]["num_scored"].values()) == list(fits[1]["num_scored"].values())


def test_in_an_overload_what_was_measured_in_the_second_half_has_no_part_either(tmp_path, capsys):
    trace = {**FEW, "rate": 400}
    runs = [ran(tmp_path / name, PLANTED_NS, trace=trace).path for name in ("one", "other")]
    slower_ttft_of_second_half(runs[1], {f"r{i}" for i in range(12, 24)})
    fits = [fitted(folder)["fit"] for folder in runs]
    assert fits[0]["fitted"] == fits[1]["fitted"]
    assert fits[0]["fitted"][HOST] == pytest.approx(PLANTED_NS, rel=0.02)
    assert fits[0]["not_apart"] == ["one"]
    assert "too few of one had ended by then" in capsys.readouterr().out


def slower_ttft_of_second_half(folder: Path, ids: set[str]) -> None:
    requests = load_run(folder).requests
    late_ns = 10**9 * requests.request_id.isin(ids)
    change_columns(
        folder / "requests.parquet", **{name: requests[name] + late_ns for name in ("first_token_ns", "finish_ns")}
    )


def test_a_planted_factor_is_recovered_over_pcie_too(tmp_path, capsys):
    trace = {**TRACE, "num_requests": 12, "output": {"kind": "uniform", "min_tokens": 2, "max_tokens": 6}}
    device = {"name": "l40s", "tensor_parallel_size": 2, "interconnect_factor": 2.5}
    run = simulate(trace, folder=tmp_path / "pcie", device=device, **ENGINE)
    found = compared(tmp_path, run.path, "device.interconnect_factor=1", "--fit", "link")["fit"]
    assert found["given"] == {"device.interconnect_factor": 1.0}
    assert found["fitted"]["device.interconnect_factor"] == pytest.approx(2.5, rel=0.02)
    assert "| device.interconnect_factor |" in capsys.readouterr().out


@pytest.mark.parametrize("planted", [{"host_factor": 0.6}, {"host_factor": 2.0, "device_factor": 0.8}])
def test_a_calibrated_fit_is_taken_to_the_machine_of_the_run(tmp_path, planted):
    cost = {"name": "calibrated", **planted}
    runs = [
        simulate(
            {**FEW, "rate": rate}, folder=tmp_path / str(rate), cost=cost, device={"name": "h100"}, **CALIBRATED
        ).path
        for rate in (4, 60)
    ]
    names = {"host_factor": "host", "device_factor": "kernels"}
    given = [f"cost.{key}=1" for key in planted]
    asked = ",".join(names[key] for key in planted)
    found = compared(tmp_path, *runs, *given, "--fit", asked)
    assert found["fit"]["fitted"] == {f"cost.{key}": pytest.approx(value, rel=0.03) for key, value in planted.items()}
    for load in found["loads"]:
        errors = {row["metric"]: row["error"] for row in load["second_half"]["fitted"]}
        assert abs(errors["e2e_s.mean"]) < 0.002
    text = (tmp_path / "out" / "fidelity.md").read_text()
    assert "| mean of absolute errors, second halves | as given, % | fitted, % |" in text
    assert "no better on the halves" not in text


def test_a_fit_that_is_worse_where_it_has_not_looked_says_so():
    def half(tpot: float, e2e: float) -> pd.DataFrame:
        return pd.DataFrame({"metric": ["tpot_s.mean", "e2e_s.mean"], "error": [tpot, e2e]})

    loads = [SimpleNamespace(second=(half(0.02, -0.05), half(-0.04, 0.01)))] * 2
    shown, note = comparing._second_halves(loads, ["tpot_s.mean", "e2e_s.mean"])
    cells = [[cell.strip() for cell in line.split("|")[1:4]] for line in shown.splitlines()[2:]]
    assert cells == [["TPOT mean", "2.0", "4.0"], ["E2E mean", "5.0", "1.0"]]
    assert note.endswith("that it has not seen: TPOT mean")


def test_a_planted_front_end_is_recovered_by_ttft(tmp_path, capsys):
    planted = simulate(FEW, folder=tmp_path / "far", backend={"frontend_ns": 9_000_000}, **ENGINE)
    found = compared(tmp_path, planted.path, "backend.frontend_ns=0", "--fit", "frontend")
    assert found["fit"]["fitted"]["backend.frontend_ns"] == pytest.approx(9e6, rel=0.02)
    (after,) = [row for row in found["loads"][0]["second_half"]["fitted"] if row["metric"] == "ttft_s.mean"]
    assert abs(after["error"]) < 0.01
    assert "| backend.frontend_ns |" in (said := capsys.readouterr().out)
    assert "Squared log errors of mean TPOT, E2E and TTFT" in said


def test_a_front_end_is_found_beside_kernels_from_nothing(tmp_path, capsys):
    planted = simulate(
        FEW, folder=tmp_path / "far", backend={"frontend_ns": 9_000_000}, device={"name": "h100", "kernel_factor": 1.2},
        **ENGINE,
    )  # fmt: skip
    given = ["backend.frontend_ns=0", "device.kernel_factor=1"]
    found = compared(tmp_path, planted.path, *given, "--fit", "kernels,frontend")["fit"]
    assert found["fitted"]["device.kernel_factor"] == pytest.approx(1.2, rel=0.02)
    assert found["fitted"]["backend.frontend_ns"] == pytest.approx(9e6, rel=0.1)
    assert "edge" not in capsys.readouterr().out


def test_a_search_that_ends_before_it_came_to_rest_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fitting, "MAX_TRIED", 7)
    run = simulate(FEW, folder=tmp_path / "far", backend={"frontend_ns": 9_000_000}, **ENGINE)
    found = compared(tmp_path, run.path, "backend.frontend_ns=0", "--fit", "kernels,frontend")["fit"]
    of = "device.kernel_factor and backend.frontend_ns"
    said = f"the search for {of} ended after 7 simulations, before it came to rest"
    assert said in capsys.readouterr().out
    assert any(note.startswith(said) for note in found["notes"])


def test_a_front_end_of_nothing_is_no_fault(tmp_path, capsys):
    run = simulate(FEW, folder=tmp_path / "near", **ENGINE)
    assert compared(tmp_path, run.path, "--fit", "frontend")["fit"]["losses"][1] < 1e-6
    assert "edge" not in capsys.readouterr().out


@pytest.mark.slow
def test_link_is_fitted_beside_host(tmp_path):
    trace = {**TRACE, "num_requests": 10, "output": {"kind": "uniform", "min_tokens": 5, "max_tokens": 20}}
    device = {"name": "h100", "tensor_parallel_size": 4, "step_overhead_ns": PLANTED_NS, "interconnect_factor": 3,
              "interconnect_efficiency": 1.0, "gemm_floor_ns": 2000}  # fmt: skip
    run = simulate(trace, folder=tmp_path / "two", device=device, **{**ENGINE, "model": "llama3.1_8b"})
    given = [f"device.step_overhead_ns={GIVEN_NS}", "device.interconnect_factor=1"]
    found = compared(tmp_path, run.path, *given, "--fit", "host,link")
    assert found["fit"]["losses"][1] < 1e-3 * found["fit"]["losses"][0]
    for row in found["loads"][0]["second_half"]["fitted"]:
        if row["metric"] in ("tpot_s.mean", "e2e_s.mean"):
            assert abs(row["error"]) < 0.02  # on one small load each stands in for the other; as given it is 0.2


def test_what_was_used_names_the_fit_and_its_factors(tmp_path):
    run = simulate(FEW, folder=tmp_path / "run", cost={"name": "calibrated"}, device={"name": "h200"}, **CALIBRATED)
    assert run.manifest["cost_error"]["median"] > 0
    out = tmp_path / "out"
    assert fidelity(run.path, "cost.host_factor=2", "--fit", "kernels", "--out", out) == 0
    used = result(out)["loads"][0]["used"]
    assert " fit=qwen3_8b-h200.json cost.host_factor=2 seed=" in used
    assert "step_overhead_ns" not in used
    scaled = load_run(out / "runs" / "run" / "simulated")
    assert scaled.manifest["cost_error"] is None, "on such a machine it was not measured"
    assert not (out / "runs" / "run" / "fitted").exists(), "a report of the runs is of the simulator as it was given"
    assert (out / "fitted" / "run" / "fitted" / "done").exists()
