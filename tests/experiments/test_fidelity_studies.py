"""`testbed fidelity` of a study of which only aggregates are public."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.fidelity.comparing import FidelityResult, comparison_lines
from experiments.fidelity.outputs import BEGIN, END
from experiments.fidelity.simulating import composed, described
from experiments.fidelity.study import OURS, read_study, trace_of
from experiments.fidelity.study_report import Score, Simulated, lowest_lines, page_lines, study_lines
from tests.experiments.documented_files import check_keys
from tests.experiments.fidelity_kit import compared, error_line, fidelity, ran, result
from tests.experiments.measured_files import study, study_file


def test_a_page_gets_the_table_between_its_marks_and_no_folders(tmp_path, say):
    file, page = study_file(tmp_path, study()), tmp_path / "page.md"
    assert "no such file" in error_line(say, file, "--page", page)
    page.write_text("before\n")
    assert "once each, in this order" in error_line(say, file, "--page", page)
    page.write_text(f"before\n{BEGIN}old{END}\nafter\n")
    words = "cost=roofline device.step_overhead_ns=600000"
    for _ in range(2):
        assert fidelity(file, "--beside", words, "--page", page) == 0
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    command = text.partition("`")[2].partition("`")[0]
    assert shlex.split(command) == ["testbed", "fidelity", "study.json", "--beside", words, "--page", str(page)]
    assert f"fidelity {tmp_path}/study.json" not in text
    assert text.count("Mean absolute percentage errors, whole runs") == 1


@pytest.mark.usefixtures("unrendered")
def test_a_planted_factor_is_found_in_the_first_stage_and_the_second_judges_it(tmp_path, capsys):
    file, overrides = study_file(tmp_path, study(2)), ["scheduler=vllm_v1"]
    assert fidelity(file, *overrides, "device.kernel_factor=1.4", "--out", tmp_path / "slow") == 0
    planted = study(2)
    for run, slow in zip(planted, result(tmp_path / "slow")["runs"], strict=True):
        run["measured_ms"] = slow["simulated_ms"]
    planted[1]["workload"]["stages"] = [{"duration": 2, "rate": 5}]  # nothing would judge it
    study_file(tmp_path, planted)
    more = ["--fit", "kernels", "--beside", "device.gemm_floor_ns=5000"]
    found = compared(tmp_path, file, *overrides, *more)
    check_keys("fidelity.md", "### `fidelity.json` of a study", found)
    plain, beside = found["fits"]
    assert plain["who"] == "this simulator, kernels fitted"
    assert beside["who"] == "this simulator, device.gemm_floor_ns=5000, kernels fitted"
    assert list(plain["runs"]) == ["run-0"]
    assert plain["runs"]["run-0"]["given"] == {"device.kernel_factor": 1.0}
    assert plain["runs"]["run-0"]["fitted"]["device.kernel_factor"] == pytest.approx(1.4, rel=0.01)
    assert beside["runs"]["run-0"]["fitted"]["device.kernel_factor"] < 1.4
    assert set(found["runs"][0]["predicted_ms"]["this simulator, kernels fitted"]) == {"stage1"}
    scores = {score["who"]: score for score in found["mape"]["stage1"]}
    assert scores["this simulator"]["errors"]["tpot_mean"] > 0.1
    assert scores["this simulator, kernels fitted"]["errors"]["tpot_mean"] < 0.01
    assert "| this simulator, kernels fitted: run-0 | kernels 1 | kernels 1.4 |" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_study_that_cannot_be_fitted_is_refused(tmp_path, say):
    file = study_file(tmp_path, runs := study())
    assert "run-0 ran on one device, which has no collectives" in error_line(say, file, "--fit", "link")
    assert "cost=constant does not depend on it" in error_line(say, file, "--fit", "kernels", "cost=constant")
    runs[0]["workload"]["stages"] = [{"duration": 2, "rate": 5}]
    study_file(tmp_path, runs)
    assert "no run of the study has two stages" in error_line(say, file, "--fit", "host")


def test_prices_that_are_not_there_are_missed_before_anything_runs(tmp_path, say):
    file = study_file(tmp_path, study())
    said = error_line(
        say, file, "--beside", f"cost=tables cost.path={tmp_path / 'none.parquet'}", "--out", tmp_path / "out"
    )
    assert "none.parquet" in said
    assert not (tmp_path / "out").exists()


def test_a_study_is_simulated_beside_what_others_predicted(tmp_path, capsys):
    file = study_file(tmp_path, study(2))
    found = compared(tmp_path, file, "scheduler=vllm_v1")
    assert found["kind"] == "study"
    assert "scheduler=vllm_v1 " in found["runs"][0]["used"]
    assert "scheduler.max_num_seqs=64" in found["runs"][0]["used"]
    ours = found["runs"][0]["simulated_ms"]
    assert set(ours) == {"all", "stage0", "stage1"}
    scores = {score["who"]: score for score in found["mape"]["all"]}
    assert scores["other"]["num_runs"] == 1
    assert scores["other"]["errors"]["ttft_mean"] == pytest.approx(1.0)
    assert scores["other"]["errors"]["e2e_mean"] == pytest.approx(0.5)
    assert scores["this simulator"]["num_runs"] == 2
    ttfts = [run["simulated_ms"]["all"]["ttft_mean"] for run in found["runs"]]  # each with instants of its own
    expected = sum(abs(ttft - 12.0) / 12.0 for ttft in ttfts) / len(ttfts)
    assert scores["this simulator"]["errors"]["ttft_mean"] == pytest.approx(expected)
    assert "Lowest, of those that predict all 2 runs: E2E mean this simulator" in capsys.readouterr().out
    assert (tmp_path / "out" / "fidelity.png").exists()


def test_the_text_of_a_study_has_signed_errors_and_those_of_each_predictor():
    values = study(2)
    for part, means in values[1]["measured_ms"].items():
        values[1]["measured_ms"][part] = means | {"itl_mean": 6.4}
    runs = read_study(values, Path("study.json"), [])
    ours = {part: {"e2e_mean": 66.0, "ttft_mean": 6.0} for part in runs[0].parts}
    found = [Simulated(run, "as it is", ours) for run in runs]
    text, page = ([" ".join(line.split()) for line in "\n".join(to(found, [])).split("\n")]
                  for to in (study_lines, page_lines))  # fmt: skip
    dashes = " | –" * 6 + " |"
    signed, other = f" | +10.0 | -50.0{dashes}", "| other | 1 | 50.0 [10.0] | 100 [50.0] | 100 [–] | 37.5 [–] |"
    assert [line for line in text if line.endswith(signed)] == [
        f"| run-{number} {part}{signed}" for number in (0, 1) for part in ("all", "stage0", "stage1")
    ]
    assert text.count(f"| this simulator | 2 | 10.0 | 50.0{dashes}") == 3
    assert sum(line.startswith(other) for line in text) == 3
    assert [line for line in text if "gaps" in line] == [
        "- run-1: measured (E2E - TTFT) / ITL is 8 gaps, and 16 tokens have 15: tokens came in chunks or outputs were "
        "of another length; TPOT here is (E2E - TTFT) / (tokens - 1)"
    ]
    assert page[0] == "Signed errors of whole runs, %:"
    assert [line for line in page if line.endswith(signed)] == [f"| run-{number}{signed}" for number in (0, 1)]


@pytest.mark.usefixtures("unrendered")
def test_a_study_is_simulated_under_other_settings_beside(tmp_path, say):
    file = study_file(tmp_path, study())
    slow = "scheduler=vllm_v1 device.step_overhead_ns=9000000"
    found = compared(tmp_path, file, "scheduler=vllm_v1", "--beside", slow)
    ours, row = (found["runs"][0][key] for key in ("simulated_ms", "predicted_ms"))
    assert row[f"this simulator, {slow}"]["all"]["e2e_mean"] > ours["all"]["e2e_mean"] + 8
    assert [score["who"] for score in found["mape"]["all"]][:2] == ["this simulator", f"this simulator, {slow}"]
    assert "scheduller" in error_line(say, file, "--beside", "scheduller=vllm_v1")


def test_files_of_the_model_replace_what_the_study_says_of_it(tmp_path):
    shape = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 512, "torch_dtype": "float16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    path = f"model.path={tmp_path}"
    (run,) = read_study(study(), Path("study.json"), [path])
    assert "model.dtype=bfloat16" in run.settings
    assert composed(run.settings, [path]).model.dtype == "float16"


def test_prompts_repeat_as_the_file_says(tmp_path):
    runs = study(3)
    for run, shared in zip(
        runs, ({}, {"num_unique_system_prompts": 2}, {"num_users_per_system_prompt": 2}), strict=True
    ):
        run["workload"] |= shared
    both = study()[0] | {"name": "both"}
    both["workload"] |= {"num_unique_system_prompts": 3, "num_users_per_system_prompt": 2}
    found = [trace_of(run, 0) for run in read_study([*runs, both], Path("study.json"), [])]
    prompts = [[row.prompt for row in trace.rows] for trace in found]
    assert all({sum(span.length for span in prompt) for prompt in of} == {200} for of in prompts)
    assert [len(set(of)) for of in prompts] == [30, 30, 30, 6]
    assert [len({prompt[0] for prompt in of}) for of in prompts] == [30, 2, 30, 3]
    assert prompts[3][:6] == prompts[3][6:12] == prompts[3][24:]  # in turn, over the stages
    assert len({row.output for row in found[3].rows}) == 30


@pytest.mark.usefixtures("unrendered")
def test_what_repeats_is_found_in_the_cache(tmp_path):
    runs = study()
    runs[0]["workload"] |= {"question_len": 900, "num_unique_system_prompts": 2, "num_users_per_system_prompt": 2}
    run = compared(tmp_path, study_file(tmp_path, runs), "--beside", "cache.prefix_caching=false")["runs"][0]
    whole_ms = run["predicted_ms"]["this simulator, cache.prefix_caching=false"]["stage1"]["ttft_mean"]
    assert run["simulated_ms"]["stage1"]["ttft_mean"] < 0.8 * whole_ms


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ('cost="tables', "--beside 'cost=\"tables': No closing quotation; quote it as"),
        ("", "--beside '' has no override; expected one or more"),
        ("trace.limit=3", "'trace.limit=3': the measured run is the trace"),
        ("backend=vllm", "'backend=vllm': the measured run is the trace, and the simulator runs it"),
        ("hydra.run.dir=x", "'hydra.run.dir=x': runs are kept where --out says"),
    ],
)
def test_what_cannot_be_laid_over_a_measured_run_is_refused(tmp_path, say, words, said):
    file = study_file(tmp_path, study())
    assert said in error_line(say, file, "--beside", words)
    if words and '"' not in words:
        assert said in error_line(say, file, words)
        assert said in error_line(say, ran(tmp_path / "run").path, words)
    assert fidelity(file, "--beside", "backend.frontend_ns=1000000") == 0


def test_a_study_of_no_runs_is_refused(tmp_path, say):
    file = study_file(tmp_path, [])
    assert f"{file}: an empty list; expected at least one run" in error_line(say, file)


def test_every_column_says_who_is_lowest():
    full = {"e2e_mean": 0.1, "ttft_mean": 0.3, "ttft_p99": 0.4}
    few = {"e2e_mean": 0.2, "ttft_p90": 0.05, "ttft_p99": 0.1}
    rows = [
        Score(OURS, 3, full, full),
        Score(f"{OURS}, cost=tables", 3, dict.fromkeys(full, 0.01), full),
        Score("whole", 3, {"e2e_mean": 0.2, "ttft_mean": 0.2, "ttft_p99": 0.1}, full),
        Score("part", 1, few, {"e2e_mean": 0.3, "ttft_p90": 0.1, "ttft_p99": 0.05}),
    ]
    (said,) = lowest_lines(rows)
    assert said == (
        "Lowest, of those that predict all 3 runs: E2E mean this simulator (10.0), TTFT mean whole (20.0), "
        "TTFT P99 whole (10.0). Lower than this simulator on its own 1 runs: part (E2E mean, TTFT P90)."
    )


@pytest.mark.usefixtures("unrendered")
def test_outputs_of_one_token_have_no_gaps(tmp_path, capsys):
    runs = study(2)
    for run, itl_ms in zip(runs, (0.0, 3.2), strict=True):
        run["workload"]["output_len"] = 1
        run["measured_ms"] = {
            part: {**known, "itl_mean": itl_ms, "e2e_mean": 12.0} for part, known in run["measured_ms"].items()
        }
    (ours, _) = compared(tmp_path, study_file(tmp_path, runs))["mape"]["all"]
    assert "Notes" not in capsys.readouterr().out
    assert {"e2e_mean", "ttft_mean"} <= ours["errors"].keys()
    assert not {"itl_mean", "tpot_mean"} & ours["errors"].keys()


def test_a_study_plans_ahead_where_its_engine_does(tmp_path, capsys):
    assert fidelity(study_file(tmp_path, study())) == 0
    assert "scheduler=vllm_v1_async " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("engine", "recommended", "filtering"),
    [
        ("vLLM 0.7.3", None, None),
        ("vLLM 0.8.5", 0.6, "sort"),
        ("vLLM 0.20.2", 0.6, "sort"),
        ("vLLM 0.21.0", 0.6, "select"),
        ("VLLM-0.8.5", 0.6, "sort"),
        ("vLLM V1 0.15.1", 0.6, "sort"),
        ("SGLang 0.4, compared with vLLM 0.15", None, None),
        ("TensorRT-LLM 1.0.0", None, None),
        ("mine", None, None),
    ],
)
def test_a_study_draws_as_its_engine_does(tmp_path, engine, recommended, filtering):
    (run,) = read_study([study()[0] | {"engine": engine}], tmp_path / "study.json", [])
    config = composed(run.settings, [])
    assert config.sampling.temperature == (recommended or 0.0)
    assert config.sampling.top_k == (20 if recommended else 0)
    assert (f"cost.filtering={filtering}" in run.settings) == (filtering is not None)
    assert config.raw["cost"]["filtering"] == (filtering or "select")
    assert ("sampling.top_k=20" in described(config)) == (recommended is not None)
    assert " cache.num_gpu_blocks=null " in described(composed(run.settings, ["cache.num_gpu_blocks=null"]))
    assert composed(run.settings, ["sampling=default"]).sampling.temperature == 0.0


def test_what_a_study_says_in_vain_is_told_and_who_is_alone_is_not_called_lowest(tmp_path, capsys):
    runs = study(2)
    runs[1] |= {"colour": "red", "predicted_ms": {}}
    runs[0]["predicted_ms"] = {}
    means = runs[1]["measured_ms"]["all"]
    runs[1]["measured_ms"] = runs[1]["measured_ms"] | {"all": means | {"e2e_p95": 80.0}, "stage9": means}
    runs[1]["workload"] = runs[1]["workload"] | {"kind": "chat", "stages": [
        {"duration": 2, "rate": 5, "arrivals": "even"}, {"duration": 1, "rate": 20}]}  # fmt: skip
    assert fidelity(study_file(tmp_path, runs)) == 0
    said = capsys.readouterr().out
    assert "- not read, of some run or all: 'colour', 'workload.kind', 'workload.stages.arrivals', " in said
    assert ", 'measured_ms.all.e2e_p95', 'measured_ms.stage9'" in said
    assert "Lowest" not in said
    assert "sampling.top_k=20 cost.filtering=sort" in said


def test_stages_are_filled_at_random_or_evenly(tmp_path):
    even = study()[0] | {"name": "even"}
    even["workload"] = even["workload"] | {"arrivals": "even"}
    found = [trace_of(run, 0) for run in read_study([*study(2), even], tmp_path / "study.json", [])]
    instants = [[row.arrival_ns for row in trace.rows] for trace in found]
    assert instants[0] != instants[1], "runs have draws of their own"
    assert instants[2] == [i * 200_000_000 for i in range(10)] + [2_000_000_000 + i * 50_000_000 for i in range(20)]
    for trace, of in zip(found, instants, strict=True):
        assert [row.request_id.partition("-")[0] for row in trace.rows] == ["stage0"] * 10 + ["stage1"] * 20
        assert of == sorted(of)
        assert of[9] <= 2e9 <= of[10]
        assert of[29] <= 3e9
    assert (instants[0][9], instants[0][29]) == (2_000_000_000, 3_000_000_000), "gaps are scaled to fill the stage"
    (again,) = (trace_of(run, 1) for run in read_study(study(), tmp_path / "study.json", []))
    assert [row.arrival_ns for row in again.rows] != instants[0], "another seed"
    many = study()[0]
    many["workload"] = many["workload"] | {"stages": [{"duration": 1000, "rate": 10}]}
    many["measured_ms"] = dict.fromkeys(("all", "stage0"), many["measured_ms"]["all"])
    (run,) = read_study([many | {"predicted_ms": {}}], tmp_path / "study.json", [])
    gaps = np.diff([0, *(row.arrival_ns for row in trace_of(run, 0).rows)]) / 1e9
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1, abs=0.05), "an exponential distribution's"
    assert np.mean(gaps > 0.1) == pytest.approx(np.exp(-1), abs=0.02)


@pytest.mark.parametrize(
    ("max_num_seqs", "overrides", "expected"),
    [
        (64, [], 128),
        (300, [], 512),
        (None, [], 512),
        (64, ["cost=tables"], 128),
        ("64", [], 128),
        (64, ["cost.max_captured_tokens=0"], 0),
        (64, ["cost=tables", "cost=linear"], None),  # of another cost model: a --beside, say
    ],
)
def test_a_study_captures_steps_with_prompts_as_vllm_does(tmp_path, max_num_seqs, overrides, expected):
    runs = study()
    del runs[0]["max_num_seqs"]
    if max_num_seqs is not None:
        runs[0]["max_num_seqs"] = max_num_seqs
    (run,) = read_study(runs, tmp_path / "study.json", [])
    assert composed(run.settings, overrides).raw["cost"].get("max_captured_tokens") == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: run["workload"].update(output_len=0),
         "field 'workload.output_len' is 0; expected a whole number of tokens"),
        (lambda run: run["workload"].update(stages=[]), "field 'workload.stages' is empty"),
        (lambda run: run["workload"].update(arrivals="poisson"),
         "field 'workload.arrivals' is 'poisson'; expected one of exponential, even"),
        (lambda run: run["workload"]["stages"][1].update(duration=0),
         "field 'workload.stages[1]' sends no request (0 s at 20 a second)"),
        (lambda run: run["workload"]["stages"][0].update(rate=1e7),
         "field 'workload.stages' sends 20,000,000 requests; expected at most 2,000,000 a run"),
        (lambda run: run["measured_ms"]["stage1"].update(e2e_mean=8),
         "field 'measured_ms.stage1.e2e_mean' is 8.0; expected at least ttft_mean, 12"),
        (lambda run: run.update(name="run-0"), "field 'name' is 'run-0'; expected a name not used before (first at"),
        (lambda run: run.update(name=["a"]), "field 'name' is ['a']; expected a name"),
        (lambda run: run.update(predicted_ms={"this simulator, x": {}}),
         "field 'predicted_ms' is 'this simulator, x'; expected another name"),
        (lambda run: run.pop("model"), "field 'model' is absent"),
        (lambda run: run.update(model="acme/none"), "the model is 'acme/none', which the library does not have"),
        (lambda run: run.update(device="Abacus"), "the device is 'Abacus'"),
        (lambda run: run["measured_ms"].pop("stage1"), "field 'measured_ms' has no 'stage1'"),
        (lambda run: run["measured_ms"]["all"].update(ttft_mean=-1), "field 'measured_ms.all.ttft_mean' is -1"),
        (lambda run: run["measured_ms"]["stage0"].update(itl_mean=0),
         "field 'measured_ms.stage0.itl_mean' is 0, between 16 tokens; expected a mean above 0"),
        (lambda run: run.update(tensor_paralel_size=2),
         "unknown field 'tensor_paralel_size'; did you mean 'tensor_parallel_size'? Correct it, or leave it out"),
        (lambda run: run["workload"].update(arrival="even"),
         "unknown field 'workload.arrival'; did you mean 'arrivals'"),
        (lambda run: run["measured_ms"]["stage0"].update(ttft_men=5),
         "unknown field 'measured_ms.stage0.ttft_men'; did you mean 'ttft_mean'"),
        (lambda run: run.update(tensor_parallel_size=True),
         "field 'tensor_parallel_size' is True; expected a whole number from 1 to"),
        (lambda run: run.update(tensor_parallel_size=3), "device.tensor_parallel_size is 3; it must divide the 16"),
    ],
)  # fmt: skip
def test_a_study_that_is_wrong_says_where(tmp_path, say, change, said):
    runs = study(2)
    runs[1] = json.loads(json.dumps(runs[1]))
    change(runs[1])
    file = study_file(tmp_path, runs)
    message = error_line(say, file)
    assert f"{file}: run 2" in message
    assert said in message


def test_the_published_study_is_read_whole(capsys):
    file = Path(os.environ.get("TESTBED_TRACES", "")) / "measured" / "h100_vllm_0.15" / "runs.json"
    if "TESTBED_TRACES" not in os.environ or not file.is_file():
        pytest.skip("set TESTBED_TRACES to a folder with measured/h100_vllm_0.15/runs.json")
    assert fidelity(file) == 0
    assert "Lowest, of those that predict all 9 runs" in capsys.readouterr().out


def test_policies_that_the_engine_does_not_tell_apart_have_neither_tau_nor_the_same_best():
    row = {"metric": "ttft_s.mean", "num_policies": 2, "kendall_tau": 1.0, "sim_winner": "a", "real_winner": "a",
           "same_winner": True}  # fmt: skip
    told = row | {"num_told_apart": 1, "num_same_order": 1, "winner_is_clear": True}
    ranking = pd.DataFrame([told, row | {"num_told_apart": 0, "num_same_order": 0, "winner_is_clear": False}])
    lines = comparison_lines(FidelityResult((), ((["a", "b"], ranking, []),), None))[-1].splitlines()[-2:]
    assert [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines] == [
        ["TTFT mean", "+1.00", "a", "a", "yes", "1 of 1"],
        ["TTFT mean", "–", "a", "a", "–", "none told apart"],
    ]
