"""`from experiments import simulate, replay`: the same run as from the command line, in one call."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import analysis
from analysis.load import Run, load_run
from experiments import find_capacity, replay, simulate
from experiments.configuration.compose import _composed, compose_raw
from testbed.errors import ConfigError, RunFolderError, TestbedError
from testbed.traces.generators import SyntheticConfig, generate
from tests.experiments.kit import TINY, Say, manifest_of, trace_of, write_rows

ROWS = [{"request_id": f"r{i}", "arrival_time": i / 100, "prompt_tokens": 6 + i, "output_tokens": 4} for i in range(5)]
SMALL: dict[str, Any] = {
    "model": {"name": "tiny", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256},
    "cache": {"block_size": 4, "num_gpu_blocks": 64, "num_cpu_blocks": 0},
    "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
}  # fmt: skip


def test_one_trace_in_four_forms_is_one_run(tmp_path: Path, say: Say) -> None:
    path = write_rows(tmp_path / "t.jsonl", ROWS)
    digests = set()
    for form in (ROWS, path, str(path), trace_of(tmp_path, ROWS), {"name": "jsonl", "path": str(path)}):
        run = simulate(form, **SMALL)
        assert run.is_complete
        assert run.requests["request_id"].tolist() == [row["request_id"] for row in ROWS]
        digests.add((run.manifest["digest"], run.fingerprint))
    say("run", *TINY, "trace=jsonl", f"trace.path={path}", f"hydra.run.dir={tmp_path / 'cli'}").success()
    manifest = manifest_of(tmp_path / "cli")
    assert digests == {(manifest["digest"], manifest["trace"]["fingerprint"])}


def test_settings_choose_options_and_keys(tmp_path: Path) -> None:
    run = simulate(
        generate(SyntheticConfig(num_requests=5)),
        folder=tmp_path / "here",
        scheduler="decode_first",
        cost={"name": "constant", "step_s": 0.5},
        cache={"watermark": None, "prefix_caching": False},
    )
    assert run.path == tmp_path / "here"
    assert run.manifest["scheduler"] == "decode_first"
    assert (run.steps["end_ns"] - run.steps["start_ns"] == 5 * 10**8).all()
    assert run.summary["num_requests"] == 5


def test_no_slo_is_as_none_given() -> None:
    run = simulate(ROWS, **SMALL, slo=None, report=None)
    assert run.slo is None
    classes = [{"tenant": "none", "e2e_s": 1e-9}]
    assert simulate(ROWS, **SMALL, slo={"ttft_s": 1.0, "classes": classes}).summary["slo"]["num_met"] == 0


def test_a_dotted_key_is_told_how_a_group_s_keys_are_given() -> None:
    with pytest.raises(ConfigError, match=r"there is no group 'cache.block_size' \(give cache={'block_size': …}\);"):
        simulate(ROWS, **{"cache.block_size": 32})


def test_a_key_in_a_mapping_and_dotted_is_given_twice() -> None:
    with pytest.raises(ConfigError, match=r"^scheduler.kv_rules.allocate is given 2 times, and only the last would"):
        simulate(ROWS, scheduler={"kv_rules": {"allocate": "whole"}, "kv_rules.allocate": "chunk"})


def test_the_run_that_is_returned_is_the_one_in_its_folder(tmp_path: Path) -> None:
    for name, settings in (("rows", {}), ("transformed", {"sampling": {"max_tokens": None}, "seed": 7})):
        run = simulate(ROWS, folder=tmp_path / name, **SMALL, **settings)
        loaded = load_run(tmp_path / name)
        assert (run.config, run.manifest) == (loaded.config, loaded.manifest)


def test_points_of_a_sweep_are_composed_as_hydra_composes_each() -> None:
    for overrides in (
        ["scheduler=orca", "cache.block_size=8", "seed=3", "overwrite=true"],
        ["scheduler=orca", "cache={block_size: 32}", "cache.watermark=0.5", "++cache.eviction=fifo"],
        ["scheduler=orca", "trace.transforms=[{name: thin, fraction: 0.5}]"],
        ["experiment=demo", "scheduler=vllm_v0", "scheduler.max_num_seqs=7"],
        ["scheduler=orca"],
    ):
        whole = OmegaConf.to_container(_composed(tuple(overrides), ()), resolve=True)
        assert compose_raw(overrides) == compose_raw(overrides) == whole


def test_a_program_s_own_hydra_is_left_as_it_was() -> None:
    with initialize_config_module("hydra.conf", version_base="1.3"):
        before = GlobalHydra.instance().hydra
        compose_raw(["scheduler=static", "seed=77"])
        assert GlobalHydra.instance().hydra is before


def test_a_folder_is_not_overwritten(tmp_path: Path) -> None:
    simulate(ROWS, folder=tmp_path / "run", **SMALL)
    with pytest.raises(TestbedError, match="already holds a run"):
        simulate(ROWS, folder=tmp_path / "run", **SMALL)
    simulate(ROWS, folder=tmp_path / "run", overwrite=True, **SMALL)


def test_a_trace_given_in_python_is_repeated_from_its_folder(tmp_path: Path, say: Say) -> None:
    run = simulate(ROWS, folder=tmp_path / "run", **SMALL)
    say("run", f"from={tmp_path / 'run'}", f"hydra.run.dir={tmp_path / 'again'}").success()
    again = manifest_of(tmp_path / "again")
    assert (again["digest"], again["trace"]["fingerprint"]) == (run.manifest["digest"], run.fingerprint)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    say("run", f"from={moved}", f"hydra.run.dir={tmp_path / 'third'}").success()
    assert manifest_of(tmp_path / "third")["digest"] == run.manifest["digest"]
    say("run", f"from={moved}", f"hydra.run.dir={moved}", "overwrite=true").success()
    say("run", f"from={moved}", f"hydra.run.dir={tmp_path / 'fourth'}").success()


def test_bad_input_raises_one_line(tmp_path: Path) -> None:
    for trace, match in (([{"prompt_tokens": 3}], "arrival_time"), (tmp_path / "no.jsonl", "no.jsonl"), ([], "no req")):
        with pytest.raises(TestbedError, match=match) as refused:
            simulate(trace, **SMALL)
        assert "\n" not in str(refused.value)
        assert "/testbed-" not in str(refused.value), "a temporary file that nobody knows"
    (tmp_path / "one.csv").touch()
    for folder in (tmp_path / "one.csv", tmp_path / "one.csv" / "x"):
        with pytest.raises(TestbedError, match=f"folder is {folder}: "):
            simulate(ROWS, folder=folder, **SMALL)
    with pytest.raises(ConfigError, match=r"^folder is empty; name one$"):
        simulate(ROWS, folder="", **SMALL)
    with pytest.raises(ConfigError, match=r"^folder is 'a\\x00b'; a path has no NUL character$"):
        simulate(ROWS, folder="a\0b", **SMALL)
    with pytest.raises(ConfigError, match=r"^trace is empty; name one$"):
        simulate("")
    with pytest.raises(ConfigError, match=r"^find_capacity was given \['slo.ttft_s=1'\]; give overrides, as 'slo\."):
        find_capacity(["slo.ttft_s=1"], folder=tmp_path / "searched")


def test_an_experiment_that_is_a_sweep_is_not_taken_for_one_run() -> None:
    with pytest.raises(ConfigError, match=r"^the experiment sweeps cache.watermark and seed: `testbed run -m` "):
        simulate({"num_requests": 3}, experiment="watermark")
    one = simulate({"num_requests": 3}, experiment="watermark", cache={"watermark": 0.05}, seed=1)
    assert (one.config["cache"]["watermark"], one.config["seed"]) == (0.05, 1)


def test_a_notebook_shows_an_error_in_one_line() -> None:
    with pytest.raises(ConfigError) as refused:
        simulate(ROWS, folder="")
    assert refused.value._render_traceback_() == ["ConfigError: folder is empty; name one"]


def test_replay_runs_the_engine(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    backend = {"device": "cpu", "num_threads": 1, "pace": "as_fast_as_possible"}
    real = replay(ROWS, folder=tmp_path / "real", backend=backend, **SMALL)
    assert real.manifest["backend"] == "real"
    sim = simulate(ROWS, **SMALL)
    for column in ("request_id", "num_prompt_tokens", "num_output_tokens"):
        assert real.requests[column].tolist() == sim.requests[column].tolist()
    recorded = simulate(ROWS, cost={"name": "recorded", "run": str(tmp_path / "real")}, **SMALL)
    assert recorded.manifest["digest"] == real.manifest["digest"]


THREE: Any = 3  # where a path or rows are expected
NONE: Any = None


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: simulate(pd.DataFrame(ROWS)), "df.to_dict('records')"),
        (lambda: simulate([THREE]), "the trace has 3 where a row is expected"),
        (lambda: simulate([{"arrival_time": object()}]), "the trace's row {'arrival_time': <object"),
        (lambda: simulate("synthetic"), "trace is 'synthetic', and a string is a file's path; give the group's keys: "),
        (lambda: simulate(ROWS, folder=THREE), "folder is 3; give a path"),
        (lambda: simulate(ROWS, scheduler={"queue_order": min}), "scheduler.queue_order is <built-in function min>"),
        (lambda: simulate(ROWS, cache={"watermark": object()}), "cache.watermark is <object"),
        *(
            (lambda backend=backend: replay(ROWS, backend=backend), "replay runs an engine, and backend is")
            for backend in ("sim", {"name": "sim"}, THREE)
        ),
        (lambda: simulate(ROWS, backend="real"), "simulate runs no engine, and backend is 'real'; call replay"),
        (lambda: simulate(ROWS, backend={"name": "vllm"}), "simulate runs no engine, and backend is "),
        (lambda: find_capacity(folder=THREE), "folder is 3; give a path"),
        (lambda: analysis.load(NONE), "the run folder is None; give a path"),
        (lambda: analysis.load([THREE]), "the run folder is 3; give a path"),
    ],
)
def test_an_argument_of_another_kind_is_named_in_one_line(call: Callable[[], object], said: str) -> None:
    with pytest.raises(TestbedError) as caught:
        call()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_folder_nothing_is_left_when_python_ends(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    script = (
        "from experiments import simulate; import analysis; print(simulate({'num_requests': 3}, model='tiny').path)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    made = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert made.stdout.startswith(str(tmp_path / "tmp" / "testbed-"))
    assert not list((tmp_path / "tmp").glob("testbed-*"))


def test_a_temporary_folder_goes_with_its_run_in_the_process_that_made_it() -> None:
    run = simulate(ROWS, **SMALL)
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        assert pool.submit(_same, run).result().path == run.path, "a copy ends in the worker, and its folder does not"
        assert pool.submit(_total, ROWS).result() == run.summary["num_requests"]
        with pytest.raises(RunFolderError, match="is deleted with this worker's run; give simulate a folder"):
            pool.submit(simulate, ROWS, **SMALL).result()
    folder = run.path
    assert load_run(folder).summary == run.summary
    del run
    gc.collect()
    assert not folder.parent.exists()


def _same(run: Run) -> Run:
    return run


def _total(rows: list[dict[str, Any]]) -> int:
    return int(simulate(rows, **SMALL).summary["num_requests"])


def test_plots_are_there_after_import_analysis() -> None:
    script = "import analysis, sys; assert 'matplotlib' not in sys.modules; analysis.plots.latency_cdf"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_module_of_the_user_hides_none_of_ours(tmp_path):
    for name in ("analysis", "sim", "real"):
        (tmp_path / f"{name}.py").write_text("import pandas\n")
    run = "from experiments.cli import main; main(['run', 'trace.num_requests=2', 'hydra.run.dir=r'])"
    command = [sys.executable, "-P", "-c", run]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (tmp_path / "r" / "summary.json").is_file(), ran.stderr
    (tmp_path / "script.py").write_text("from experiments import simulate\n")
    said = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert said.stderr.splitlines()[-1].endswith("hides the testbed's package 'analysis'; give that file another name")
