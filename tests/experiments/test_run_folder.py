"""A run folder holds what the issue says, to the column; it is enough to repeat the run; nothing in it is chance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml

from analysis.load import load_run
from experiments import simulate
from experiments.configuration.compose import compose_from
from experiments.configuration.saved import read_config
from experiments.runs.run import execute
from testbed import compiled
from testbed.records.schema import MANIFEST_KEYS, REQUEST_COLUMNS, STEP_COLUMNS
from testbed.traces.fingerprint import fingerprint
from testbed.traces.readers.own import read_jsonl
from tests.experiments.kit import (
    BACKENDS,
    SHORT,
    TIGHT,
    TINY,
    Say,
    config_of,
    decisions_of,
    manifest_of,
    table_of,
    trace_of,
    write_rows,
)

FILES = {
    "config.yaml", "manifest.json", "requests.parquet", "steps.parquet", "summary.json", "decisions.jsonl", "run.log",
    "done",
}  # fmt: skip
DECISION_FIELDS = [
    "step", "time_s", "scheduled", "preempted", "swapped_out", "swapped_in", "ignored", "cached_tokens",
    "free_blocks", "free_cpu_blocks",
]  # fmt: skip
DECIDED = TIGHT | {"record__decisions": True}


@pytest.fixture(scope="module", params=BACKENDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with hits and preemptions, decisions recorded."""
    folder = tmp_path_factory.mktemp("run") / "run"
    result = execute(config_of((*TINY, *SHORT, *request.param), **DECIDED), folder, command="testbed run it")
    assert result.exit_status == 0
    assert result.summary["preemptions"]["total"] > 0
    return folder


def is_real(folder: Path) -> bool:
    return manifest_of(folder)["backend"] == "real"


def test_the_files_are_those_and_no_others(made: Path) -> None:
    more = {"tape.jsonl", "trace.jsonl"} if is_real(made) else set()
    assert {file.name for file in made.iterdir()} == FILES | more


def test_tables_have_the_columns_and_types_of_the_schema(made: Path) -> None:
    names = {"double": "double", "list<int64>": "list<element: int64>"}
    for name, columns in (("requests", REQUEST_COLUMNS), ("steps", STEP_COLUMNS)):
        schema = table_of(made, name).schema
        assert schema.names == list(columns)
        assert [str(field.type) for field in schema] == [names.get(kind, kind) for kind in columns.values()]


def test_the_instants_of_a_request_are_in_order_and_the_rest_follows_from_them(made: Path) -> None:
    rows = table_of(made).to_pylist()
    assert len({row["request_id"] for row in rows}) == len(rows) == 14
    for row in rows:
        times = row["token_ns"]
        assert len(times) == row["num_output_tokens"] > 0
        assert 0 <= row["arrival_ns"] <= row["queued_ns"] <= row["first_scheduled_ns"] < times[0]
        assert all(before < after for before, after in pairwise(times))
        assert row["first_token_ns"] == times[0]
        assert row["finish_ns"] == times[-1]
        assert row["ttft_s"] == pytest.approx((times[0] - row["arrival_ns"]) / 1e9, abs=0)
        assert row["e2e_s"] == pytest.approx((times[-1] - row["arrival_ns"]) / 1e9, abs=0)
        expected = (times[-1] - times[0]) / (len(times) - 1) / 1e9 if len(times) > 1 else None
        assert row["tpot_s"] == (None if expected is None else pytest.approx(expected, rel=1e-12))
        assert row["finish_reason"] == "length"
    assert sum(row["num_preemptions"] for row in rows) > 0
    assert sum(row["num_cached_tokens"] for row in rows) > 0


def test_steps_follow_one_another_and_their_sums_agree_with_the_requests(made: Path) -> None:
    steps, requests = table_of(made, "steps").to_pandas(), table_of(made).to_pandas()
    assert steps["step"].tolist() == list(range(len(steps)))
    assert (steps["end_ns"] > steps["start_ns"]).all()
    assert (steps["start_ns"].to_numpy()[1:] >= steps["end_ns"].to_numpy()[:-1]).all()
    assert steps["num_emitted"].sum() == requests["num_output_tokens"].sum()
    assert steps["num_preempted"].sum() == requests["num_preemptions"].sum()
    assert steps["free_gpu_blocks"].between(0, 22).all()
    instants = set(steps["end_ns"])
    assert {ns for times in requests["token_ns"] for ns in times} <= instants
    assert f"{steps['digest'].iloc[-1]:016x}" == manifest_of(made)["digest"]


def test_decisions_have_the_fields_of_the_issue_and_agree_with_the_steps(made: Path) -> None:
    steps = table_of(made, "steps").to_pylist()
    decided = decisions_of(made)
    assert len(decided) == len(steps)
    for line, row in zip(decided, steps, strict=True):
        assert list(line) == DECISION_FIELDS
        assert line["step"] == row["step"]
        assert line["time_s"] == row["start_ns"] / 1e9
        assert sum(line["scheduled"].values()) == row["num_decode_tokens"] + row["num_prefill_tokens"]
        assert len(line["preempted"]) == row["num_preempted"]
        assert sum(line["cached_tokens"].values()) == row["num_cached_tokens"]
        assert len(line["cached_tokens"]) == row["num_admitted"]
        assert set(line["cached_tokens"]) <= set(line["scheduled"])
        assert line["free_blocks"] == row["free_gpu_blocks"]
        assert (line["swapped_out"], line["swapped_in"], line["ignored"]) == ([], [], [])
        assert line["free_cpu_blocks"] == 0
    assert any(line["preempted"] for line in decided)
    assert any(n for line in decided for n in line["cached_tokens"].values())


def test_the_manifest_has_every_key_and_says_what_is_true(made: Path) -> None:
    manifest = manifest_of(made)
    assert set(MANIFEST_KEYS) == set(manifest)
    assert manifest["status"] == "complete"
    assert manifest["command"] == "testbed run it"
    assert manifest["trace"]["num_requests"] == manifest["num_sent"] == 14
    assert manifest["num_steps"] == table_of(made, "steps").num_rows
    assert (manifest["num_gpu_blocks"], manifest["block_size"], manifest["seed"]) == (22, 4, 0)
    assert (made / "done").read_text().strip() == manifest["digest"]
    assert {"python", "simpy", "numpy", "llm-serving-testbed"} <= set(manifest["versions"])
    assert {"platform", "cpu", "num_cores", "gpu"} <= set(manifest["machine"])
    assert (manifest["cost"] is None) is is_real(made)
    assert manifest["attention"] in (("cpu", "torch") if is_real(made) else (None,))
    if is_real(made):
        assert manifest["attention_reasons"]["flash_attn"] == "it needs CUDA, the device is cpu"
    assert manifest["core"] == compiled.current().mode
    assert (manifest["compiler"] is None) is (manifest["core"] == "interpreted")


def test_the_configuration_is_resolved_and_whole(made: Path) -> None:
    raw = yaml.safe_load((made / "config.yaml").read_text())
    assert "${" not in (made / "config.yaml").read_text()
    assert {"backend", "scheduler", "cache", "trace", "model", "device", "cost", "sampling", "record", "seed"} <= set(
        raw
    )
    assert raw["cache"]["num_gpu_blocks"] == 22


def test_the_summary_is_what_analysis_makes_of_the_records(made: Path) -> None:
    stored = json.loads((made / "summary.json").read_text())
    assert stored == json.loads(json.dumps(load_run(made).summarise()))
    assert stored["num_requests"] == 14


def test_the_log_names_the_trace(made: Path) -> None:
    log = (made / "run.log").read_text()
    assert manifest_of(made)["trace"]["fingerprint"] in log
    assert "complete" in log


def test_a_real_runs_trace_file_is_the_trace(made: Path) -> None:
    if not is_real(made):
        pytest.skip("simulated runs have none")
    assert fingerprint(read_jsonl(made / "trace.jsonl")) == manifest_of(made)["trace"]["fingerprint"]


def test_records_can_be_thinned(tmp_path: Path) -> None:
    execute(config_of(record__token_times=False), tmp_path / "run")
    assert table_of(tmp_path / "run")["token_ns"].null_count == 6
    assert table_of(tmp_path / "run")["ttft_s"].null_count == 0
    assert not (tmp_path / "run" / "decisions.jsonl").exists()


# --- repeating a run ---


def test_a_run_is_repeated_from_its_folder(made: Path, tmp_path: Path, say: Say) -> None:
    said = say("run", f"from={made}", f"hydra.run.dir={tmp_path / 'again'}").success()
    again, first = manifest_of(tmp_path / "again"), manifest_of(made)
    assert again["trace"]["fingerprint"] == first["trace"]["fingerprint"]
    assert f"repeated     {made}: " in said
    assert (f"testbed parity {made}" in said) == is_real(made), "its step times are measured again"
    if not is_real(made):  # a real run's instants, and so its decisions, are its own
        assert f"the same decisions, digest {first['digest']}" in said
        assert again["digest"] == first["digest"]
        assert table_of(tmp_path / "again").equals(table_of(made))
        assert table_of(tmp_path / "again", "steps").equals(table_of(made, "steps"))
    assert read_config(tmp_path / "again") == compose_from(read_config(made), []).raw


def test_an_override_makes_it_another_run(tmp_path: Path, say: Say) -> None:
    execute(config_of(**DECIDED), tmp_path / "run")
    where = f"hydra.run.dir={tmp_path / 'again'}"
    say("run", f"from={tmp_path / 'run'}", "cache.num_gpu_blocks=40", where).success()
    again, first = manifest_of(tmp_path / "again"), manifest_of(tmp_path / "run")
    assert again["digest"] != first["digest"]
    assert again["trace"]["fingerprint"] == first["trace"]["fingerprint"]
    changed = say("run", f"from={tmp_path / 'run'}", "cache.num_gpu_blocks=40", where, "overwrite=true")
    assert "repeated" not in changed.out
    error = say("run", f"from={tmp_path / 'run'}", "cache.blok_size=3", f"hydra.run.dir={tmp_path / 'c'}")
    assert "cache.block_size" in error.error()
    assert "already holds a run" in say("run", f"from={tmp_path / 'run'}", where).error()


def test_a_term_of_prices_that_came_later_changes_no_run_of_before() -> None:
    saved = config_of().raw
    before = saved | {
        "device": {key: value for key, value in saved["device"].items() if key != "interconnect_efficiency"}
    }
    assert saved["device"]["interconnect_efficiency"] < 1
    assert compose_from(before, []).device.interconnect_efficiency == 1
    assert compose_from(before, ["device=h100"]).device.interconnect_efficiency < 1, "another device is the library's"


def test_a_run_of_a_file_is_repeated_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say) -> None:
    trace_of(tmp_path, [{"arrival_time": 0, "prompt_tokens": 9, "output_tokens": 4}])
    monkeypatch.chdir(tmp_path)
    say("run", *TINY, "trace=jsonl", "trace.path=rows.jsonl", "hydra.run.dir=run").success()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    say("run", f"from={tmp_path / 'run'}", "hydra.run.dir=../again").success()
    assert manifest_of(tmp_path / "again")["digest"] == manifest_of(tmp_path / "run")["digest"]
    say("explain", "../run").success()
    say("fidelity", "../run").success()


def test_a_run_is_the_same_where_its_file_lies_elsewhere_and_not_with_another_file(tmp_path: Path, say: Say) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"arrival_time": 0, "prompt_tokens": 9, "output_tokens": 4}])
    run = tmp_path / "run"
    say("run", *TINY, "trace=jsonl", f"trace.path={file}", f"hydra.run.dir={run}").success()
    moved = file.rename(tmp_path / "moved.jsonl")
    said = say("run", f"from={run}", f"trace.path={moved}", f"hydra.run.dir={tmp_path / 'a'}").success()
    assert f"repeated     {run}: the same decisions" in said
    moved.write_text(moved.read_text().replace("9", "90"))
    said = say("run", f"from={run}", f"trace.path={moved}", f"hydra.run.dir={tmp_path / 'b'}").success()
    assert f"repeated     {run}: other decisions (its trace is another)" in said


# --- nothing is chance ---


def test_the_same_configuration_gives_the_same_run_byte_for_byte(tmp_path: Path) -> None:
    for name in ("a", "b"):
        execute(config_of(**DECIDED), tmp_path / name)
    for name in ("requests.parquet", "steps.parquet", "decisions.jsonl", "config.yaml", "summary.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_another_seed_is_another_trace_and_another_policy_is_not(tmp_path: Path) -> None:
    prints = []
    for name, dotted in (("a", {}), ("b", {"seed": 1}), ("c", {"scheduler__composition": "decode_first"})):
        execute(config_of(**dotted), tmp_path / name)
        prints.append(manifest_of(tmp_path / name)["trace"]["fingerprint"])
    assert prints[0] == prints[2] != prints[1]


SCRIPT = """
import sys
from pathlib import Path
from experiments.runs.run import execute
from tests.experiments.kit import config_of
from tests.experiments.test_run_folder import DECIDED
execute(config_of(**DECIDED), Path(sys.argv[1]))
"""


def test_the_hash_seed_of_python_changes_nothing(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / seed)], env=environment, check=True, timeout=60)
    for name in ("requests.parquet", "steps.parquet", "decisions.jsonl"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name


# --- constant cost: a clock that a reader can follow ---


def test_with_steps_of_a_second_step_k_starts_at_second_k(tmp_path: Path, say: Say) -> None:
    rows = [{"request_id": f"r{i}", "arrival_time": i * 2, "prompt_tokens": 10, "output_tokens": 5} for i in range(6)]
    trace_of(tmp_path, rows)
    more = ("trace=jsonl", f"trace.path={tmp_path / 'rows.jsonl'}", "cost=constant", "cost.step_s=1")
    folder = tmp_path / "run"
    say("run", *TINY, *more, "record.decisions=true", f"hydra.run.dir={folder}").success()
    assert [line["time_s"] for line in decisions_of(folder)] == list(range(len(decisions_of(folder))))
    steps = table_of(folder, "steps").to_pandas()
    assert (steps["end_ns"] - steps["start_ns"] == 10**9).all()
    assert np.array_equal(steps["start_ns"], np.arange(len(steps)) * 10**9)
    first = table_of(folder).to_pylist()[0]
    assert first["token_ns"] == [10**9 * k for k in range(1, 6)]


def test_an_idle_run_jumps_to_the_next_arrival(tmp_path: Path) -> None:
    rows = [{"arrival_time": t, "prompt_tokens": 4, "output_tokens": 2} for t in (3, 10)]
    config = config_of((*TINY, "cost=constant", "cost.step_s=1"), record__decisions=True)
    execute(config, tmp_path / "run", trace=trace_of(tmp_path, rows))
    assert [line["time_s"] for line in decisions_of(tmp_path / "run")] == [3, 4, 10, 11]


def test_a_group_can_be_exchanged_when_a_run_is_repeated(made: Path, tmp_path: Path, say: Say) -> None:
    other = ("backend=sim", "cost=constant", "cost.step_s=0.001")
    say("run", f"from={made}", *other, f"hydra.run.dir={tmp_path / 'x'}").success()
    assert (manifest_of(tmp_path / "x")["cost"], manifest_of(tmp_path / "x")["backend"]) == ("constant", "sim")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("seed=x", "seed is 'x'; it must be a whole number"),
        ("cache.num_gpu_blocks=abc", "cache.num_gpu_blocks is 'abc'; it must be a whole number"),
        ("cache.blok=1", "cache.block_size"),
    ],
)
def test_what_changes_a_repeated_run_is_checked_as_any_other(
    made: Path, tmp_path: Path, say: Say, override: str, told: str
) -> None:
    said = say("run", f"from={made}", override, f"hydra.run.dir={tmp_path / 'x'}")
    assert said.status == 1
    assert told in said.error()


def test_leave_to_overwrite_is_not_inherited(tmp_path: Path, say: Say) -> None:
    first, precious = tmp_path / "first", tmp_path / "precious"
    say("run", *TINY, *SHORT, f"hydra.run.dir={first}", "overwrite=true").success()
    say("run", *TINY, *SHORT, "seed=1", f"hydra.run.dir={precious}").success()
    before = (precious / "manifest.json").read_bytes()
    assert "already holds a run" in say("run", f"from={first}", f"hydra.run.dir={precious}").error()
    assert (precious / "manifest.json").read_bytes() == before


def test_a_run_and_a_sweep_never_share_a_folder(tmp_path: Path, say: Say) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    say("run", *TINY, *SHORT, f"hydra.run.dir={one}").success()
    say("run", "-m", *TINY, *SHORT, "seed=0,1", f"hydra.sweep.dir={many}").success()
    files = sorted(path.name for path in (*one.rglob("*"), *many.rglob("*")))
    for words, said in (
        ((f"hydra.run.dir={many}", "overwrite=true"), "holds other runs"),
        ((f"hydra.run.dir={one / 'inside'}",), "holds a run, and other runs need a folder of their own"),
        (("-m", "seed=0,1", f"hydra.sweep.dir={one}"), "choose another hydra.sweep.dir"),
    ):
        assert said in say("run", *TINY, *SHORT, *words).error()
    assert sorted(path.name for path in (*one.rglob("*"), *many.rglob("*"))) == files


def test_a_manifest_says_what_its_maker_set(tmp_path: Path, say: Say) -> None:
    """As data, whatever made it: the command line, a repetition with changes, Python."""
    one, again = tmp_path / "one", tmp_path / "again"
    say("run", *TINY, *SHORT, "seed=3", f"hydra.run.dir={one}")
    given = manifest_of(one)["given"]
    assert (given["seed"], given["model"], given["trace.rate"]) == ("3", "tiny", "400")
    assert not [key for key in given if key.startswith("hydra")]
    say("run", f"from={one}", "seed=4", "cache.watermark=0.1", f"hydra.run.dir={again}")
    assert manifest_of(again)["given"] == given | {"seed": "4", "cache.watermark": "0.1"}
    made = simulate({"num_requests": 5}, model="tiny", scheduler={"max_num_seqs": 4}, folder=tmp_path / "made")
    assert made.manifest["given"] | {"model": "tiny", "scheduler.max_num_seqs": "4"} == made.manifest["given"]
    for folder in (one, again, tmp_path / "made"):
        assert (manifest_of(folder)["swept"], manifest_of(folder)["point"]) == (None, None)


def test_without_a_summary_the_records_are_the_same(tmp_path: Path) -> None:
    whole, bare = (execute(config_of(), tmp_path / name, has_summary=name == "whole") for name in ("whole", "bare"))
    assert (bare.status, bare.summary, bare.notes) == ("complete", {}, ())
    kept, left = ({file.name for file in one.folder.iterdir()} for one in (whole, bare))
    assert kept - left == {"summary.json"}
    assert load_run(bare.folder).summary == whole.summary
