"""What was decided once is decided again: random worlds, whole runs, logged cases of real schedulers, real tapes."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments.configuration.config import RunConfig
from experiments.configuration.saved import read_config
from experiments.runs.parity import check_parity
from testbed.records.tape import Tape, read_tape
from tests.experiments.kit import manifest_of
from tests.golden import configurations, oracle_cases, tapes, worlds
from tests.golden.world import FLAGS
from tests.parity.kit import replayed_run
from tests.properties.policies import ADMISSIONS, COMPOSITIONS, EVICTIONS, PREEMPTIONS, QUEUES, VICTIMS

# --- random worlds ---

CHUNK = 100
SEVERAL = {  # in how many worlds each of the rarer things happened at least; all else in 500
    "preempted by recompute": 400,
    "swapped in": 300,
    "aborted what was swapped out": 50,
    "block ids decide": 100,
    "did not end by itself": 20,
}


@pytest.mark.parametrize("first", range(0, worlds.NUM_WORLDS, CHUNK))
def test_random_worlds_are_decided_as_they_were(first: int) -> None:
    lines = worlds.differing(range(first, first + CHUNK))
    assert not lines, "\n".join([*lines, "step by step: python -m tests.golden.worlds --world <number>"])


@pytest.mark.parametrize("number", range(6))
def test_a_world_drawn_anew_is_kept_as_data(number: int) -> None:
    drawn = worlds._draw_setup(number)
    assert worlds._setup(json.loads(json.dumps(worlds._container(drawn)))) == drawn


def test_the_worlds_are_drawn_as_they_were() -> None:
    drawn = worlds.fingerprint_of_requests()
    assert drawn == worlds.recorded_fingerprint(), "random_request draws otherwise: these are other worlds"
    assert list(worlds.recorded()) == list(range(worlds.NUM_WORLDS)) == list(range(len(worlds.setups())))


def test_everything_happens_in_many_worlds() -> None:
    found = worlds.num_worlds_by_flag()
    assert {name: found[name] for name in FLAGS.values() if found[name] < SEVERAL.get(name, 500)} == {}


def test_every_policy_decides_in_many_worlds() -> None:
    for field, names in (
        ("composition", COMPOSITIONS),
        ("queue", QUEUES),
        ("admission", ADMISSIONS),
        ("preemption", PREEMPTIONS),
        ("victim", VICTIMS),
        ("eviction", EVICTIONS),
    ):
        found = Counter(getattr(setup, field) for setup in worlds.setups())
        assert found.keys() <= set(names)
        assert min(found.values()) >= 40, found


# --- whole simulated runs ---


@pytest.mark.parametrize("name", configurations.CASES)
def test_a_simulated_run_is_decided_as_it_was(tmp_path: Path, name: str) -> None:
    case = configurations.CASES[name]
    if configurations.is_absent(case):
        pytest.skip(f"set TESTBED_TRACES to a folder with {case.file}")
    found, _ = configurations.run(name, tmp_path / "run")
    recorded = configurations.recorded()[name]
    assert found.fingerprint == recorded.fingerprint, "another trace (numpy's samplers?), so nothing can be said"
    assert found == recorded


def test_the_simulated_runs_are_different_runs() -> None:
    recorded = configurations.recorded()
    assert list(recorded) == list(configurations.CASES)
    assert len({record.digest for record in recorded.values()}) == len(recorded)


# --- cases of real schedulers ---


@pytest.mark.parametrize("file", oracle_cases.FILES)
def test_a_case_of_a_real_scheduler_is_decided_as_it_was(file: str) -> None:
    if oracle_cases.is_absent(file):
        pytest.skip(f"set TESTBED_ORACLES to a folder with {file}")
    assert oracle_cases.differing(file) == []


# --- tapes of the real engine ---


@cache
def tape_of(name: str) -> Tape:
    return read_tape(tapes.FOLDER / name / "tape.jsonl")


@pytest.mark.parametrize("name", tapes.RUNS)
def test_a_tape_is_decided_as_it_was(name: str) -> None:
    report = check_parity(tapes.FOLDER / name)
    assert report.divergence is None
    recorded = manifest_of(tapes.FOLDER / name)
    assert (f"{report.digest:016x}", report.num_steps) == (recorded["digest"], recorded["num_steps"])


@pytest.mark.parametrize("name", tapes.RUNS)
def test_a_simulation_at_recorded_prices_decides_as_the_tape(tmp_path: Path, name: str) -> None:
    config = RunConfig.from_container(read_config(tapes.FOLDER / name))
    replayed = manifest_of(replayed_run(tmp_path / "sim", config, tapes.FOLDER / name).folder)
    recorded = manifest_of(tapes.FOLDER / name)
    for key in ("digest", "num_steps", "num_sent", "prefix_cache"):
        assert replayed[key] == recorded[key], key


@pytest.mark.parametrize("name", tapes.RUNS)
def test_on_each_tape_happens_what_its_name_says(name: str) -> None:
    tape = tape_of(name)
    steps: list[dict[str, Any]] = [step.decision for step in tape.steps]
    outcomes = [outcome for step in tape.steps for outcome in step.outcomes or ()]
    assert sum(len(step["preempted"]) + len(step["swapped_out"]) for step in steps) >= 2
    assert any(step["ignored"] == ["too-long"] for step in steps)
    assert [event.request_id for event in tape.events if event.kind == "abort"] == ["cancelled"]
    assert any(any(step["cached_tokens"].values()) for step in steps) is ("uncached" not in name)
    if any(word in name for word in ("swap", "samples", "beams")):
        assert any(step["swapped_in"] for step in steps)
    assert bool(outcomes) is ("sampled" in name or "beams" in name)
    assert any(outcome.forks for outcome in outcomes) is ("samples-sampled" in name or "beams" in name)
    assert any(outcome.dropped for outcome in outcomes) is ("beams" in name)
    if "sampled" in name:
        assert any(token in tapes.STOPS for outcome in outcomes for token in outcome.tokens), "nothing was stopped"


def test_no_tape_says_where_it_was_made() -> None:
    assert sorted(path.name for path in tapes.FOLDER.iterdir()) == sorted(tapes.RUNS)
    for name in tapes.RUNS:
        folder = tapes.FOLDER / name
        assert sorted(path.name for path in folder.iterdir()) == sorted(tapes.FILES)
        assert not [file for file in tapes.FILES if "/" in (folder / file).read_text()]
