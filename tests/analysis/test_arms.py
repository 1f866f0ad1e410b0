"""Runs into arms and loads, and what these are called."""

from __future__ import annotations

import itertools

import pytest

from analysis import format as fmt
from analysis.comparison.arms import by_load, infer_arms, replicates
from analysis.comparison.groups import experiments
from analysis.comparison.pairs import engine_of, infer_pairs, join_repeats
from analysis.load import load, load_run, load_sweep
from analysis.naming import apart, level_names
from tests.analysis.runs import change_config, change_manifest, write_run


def test_what_a_model_recommends_sets_no_runs_apart(tmp_path):
    """`sampling` says what was taken of it."""
    new = changed_run(tmp_path / "new", model__recommended={"top_p": 0.9})
    assert len(infer_arms([changed_run(tmp_path / "old"), new])) == 1


def changed_run(folder, backend="sim", **settings):
    """A run whose configuration has these too."""
    change_config(write_run(folder, backend, num_requests=10), **settings)
    return load_run(folder)


def test_the_speed_of_a_replay_is_a_load_and_no_policy(tmp_path):
    runs = [changed_run(tmp_path / f"{speed}", "real", backend__speed=speed) for speed in (2.0, 8.0)]
    (arm,) = infer_arms(runs)
    assert list(by_load([arm], [])) == ["backend.speed = 2", "backend.speed = 8"]
    assert len(experiments(runs)) == 1


def test_seeds_of_the_trace_alone_make_replicates_and_no_loads(tmp_path):
    for seed in range(2):
        change_config(write_run(tmp_path / f"{seed}", seed=seed, num_requests=10), seed=0, trace__seed=seed)
    (arm,) = infer_arms(load_sweep(tmp_path).runs)
    assert list(by_load([arm], [])) == [""]
    assert len(replicates(arm)) == 2


def test_a_unit_follows_the_value_and_is_no_part_of_the_name():
    levels = {"device.host_link_bytes_per_s": 5.5e10, "backend.schedule_ns": 1500, "cache.swap_space_gib": 4.0}
    assert level_names(levels) == "host link bandwidth 55 GB/s, schedule 1.5 µs, swap space 4 GiB"
    assert level_names({"backend.schedule_ns": 10**14 + 1}) == "schedule 100000.000000001 s", "as exact as the number"
    assert level_names(
        {"device.host_link_bytes_per_s": 0, "backend.schedule_ns": 2 * 10**6, "cache.swap_space_gib": 0.5}
    ) == ("host link bandwidth 0 B/s, schedule 2 ms, swap space 0.5 GiB")
    assert level_names({"backend.schedule_ns": None, "slo.ttft_s": 2}) == "schedule default, ttft s 2"


def test_an_option_without_a_noun_gets_one():
    assert level_names({"sampling.name": "recommended", "scheduler.name": "unified"}) == "recommended sampling, unified"


def test_levels_with_commas_of_their_own_are_told_apart_whole(tmp_path):
    one, other = (level_names({"order": value, "watermark": 0}) for value in ("By(n=3, xs=[1, [2, 3]])", "a, 3"))
    assert apart(one, other) == ("order By(n=3,xs=[1,[2,3]])", "order a,3", "watermark 0")
    runs = [changed_run(tmp_path / name, scheduler={"_target_": f"{name}.By, 2"}) for name in ("mine", "yours")]
    first, second = (arm.name for arm in infer_arms(runs))
    assert (first, second) == ("By,2 (mine.By,2)", "By,2 (yours.By,2)")


@pytest.mark.parametrize(("rates", "label"), [((4, 4.2), ""), ((4, 8), " ({} requests/s)")])
def test_a_load_says_its_rate_where_its_settings_do_not(tmp_path, rates, label):
    runs = []
    for users, rate in zip((2, 9), rates, strict=True):
        folder = write_run(tmp_path / f"{users}", num_requests=40, rate=rate)
        change_config(folder, trace__num_users=users, trace__rate=1.0)
        runs.append(load_run(folder))
    offered = [fmt.significant(run.summary["throughput"]["offered_per_s"]) for run in runs]
    expected = [f"num_users = {users}{label.format(rate)}" for users, rate in zip((2, 9), offered, strict=True)]
    assert list(by_load(infer_arms(runs), [])) == expected


def test_a_load_leaves_out_the_transformations_that_all_share(tmp_path):
    runs = []
    for rate in (4, 8):
        folder = write_run(tmp_path / f"{rate}", num_requests=40, rate=rate)
        steps = [{"name": "window", "end_s": 60}, {"name": "set_rate", "rate": rate}, {"name": "label", "classes": []}]
        change_config(folder, trace__transforms=steps, trace__rate=1.0)
        runs.append(load_run(folder))
    told = [label.partition(" (")[0] for label in by_load(infer_arms(runs), [])]
    assert told == ["transforms = set_rate(rate=4)", "transforms = set_rate(rate=8)"]


def test_a_simulation_of_a_measured_run_has_its_load(tmp_path):
    runs = []
    for rate in (4, 8):
        runs.append(changed_run(folder := tmp_path / f"{rate}", trace__path=f"{folder}/trace.jsonl"))
        runs[-1].manifest["measured_trace"] = {"name": "synthetic", "path": None, "rate": rate}
    assert list(by_load(infer_arms(runs), [])) == ["rate = 4 requests/s", "rate = 8 requests/s"]


def test_only_a_path_through_a_runs_own_folder_says_nothing_of_its_load(tmp_path):
    """A part of a name is no folder: the run in 8/ of trace8.jsonl."""
    runs = [changed_run(tmp_path / name, trace__path=f"/data/trace{name}.jsonl") for name in ("4", "8")]
    assert list(by_load(infer_arms(runs), [])) == ["path = /data/trace4.jsonl", "path = /data/trace8.jsonl"]


def test_a_real_run_is_paired_with_the_simulation_of_its_model_and_first_with_the_one_beside_it(tmp_path):
    for model in ("a", "b"):
        change_config(write_run(tmp_path / model / "sim", num_requests=8), model__name=model, backend__num_replicas=1)
        for name in ("1-again", f"{model}/real"):
            change_config(write_run(tmp_path / name, "real", num_requests=8), model__name=model)
    change_config(write_run(tmp_path / "2-vllm", "vllm", num_requests=8), model__name="b")
    pairs = join_repeats(infer_pairs(load_sweep(tmp_path).runs))
    names = {
        (pair.sim.path.parent.name, engine_of(pair.real)): [
            run.path.relative_to(tmp_path).as_posix() for run in pair.reals
        ]
        for pair in pairs
    }
    assert names == {("a", "real"): ["a/real"], ("b", "real"): ["b/real", "1-again"], ("b", "vllm"): ["2-vllm"]}
    change_config(tmp_path / "b/sim", model__name="c")
    assert [pair.real.path.parent.name for pair in infer_pairs(load_sweep(tmp_path).runs)] == ["a"], "b has none"
    for name in ("b/sim", "b/real", "1-again"):
        change_manifest(tmp_path / name, measured_trace={"name": "synthetic"})
    kept = [pair.real.path for pair in infer_pairs(load_sweep(tmp_path).runs)]
    assert tmp_path / "b/real" in kept, "testbed fidelity simulated it as another model"


def test_pairs_of_one_policy_are_told_apart_by_their_loads(tmp_path):
    for rate in (4, 8):
        for backend in ("sim", "real"):
            folder = write_run(tmp_path / f"{backend}-{rate}", backend, num_requests=8, rate=rate)
            change_config(folder, trace__rate=rate)
    labels = [pair.label for pair in infer_pairs(load_sweep(tmp_path).runs)]
    assert labels == ["decode_first at rate = 4", "decode_first at rate = 8"]


def test_classes_of_one_name_in_two_modules_are_two_arms_with_two_names(tmp_path):
    """A policy that was copied to be changed has the name of the first."""
    own = [{"_target_": f"{module}.Cap", "share": 0.5 + digit / 1e9} for module in ("old", "new") for digit in (0, 1)]
    for place, admission in enumerate(["watermark", *own]):
        changed_run(tmp_path / f"{place // 3}" / f"{place}", scheduler__admission=admission)
    names = [f"admission {one['_target_']}(share={one['share']})" for one in own]
    for sweep in (load_sweep(tmp_path), load([tmp_path / "0", tmp_path / "1"])):
        assert [arm.name for arm in infer_arms(sweep.runs)] == ["admission watermark", *names]
    assert [arm.name for arm in infer_arms(load_sweep(tmp_path / "0").runs)] == ["admission watermark", *names[:2]]

    both = [run for run in load_sweep(tmp_path / "1").runs if "new" in str(run.config)]
    assert [arm.name for arm in infer_arms(both)] == ["share 0.5 (0.5)", "share 0.5 (0.500000001)"]
    (tmp_path / "0" / "0" / "done").unlink()  # no plain name any more
    arms = infer_arms(load([tmp_path / "0" / "1", tmp_path / "1" / "3"]).runs)
    assert [arm.name for arm in arms] == ["Cap (old.Cap)", "Cap (new.Cap)"]


def test_a_cost_model_or_trace_of_ones_own_has_its_name_beside_a_shipped_one(tmp_path):
    of = {"shipped": {"name": "x"}, "mine": {"_target_": "mine.X", "of": "x"}}
    for cost, trace in itertools.product(of, repeat=2):
        change_config(write_run(tmp_path / f"{cost}-{trace}", num_requests=10), cost=of[cost], trace=of[trace])
    runs = load_sweep(tmp_path).runs
    arms = infer_arms(runs)
    assert [arm.name for arm in arms] == ["mine.X", "x"]
    assert [label.partition(" (")[0] for label in by_load(arms, [])] == ["trace = mine.X", "trace = x"]
    for run in runs[:2]:
        change_config(run.path, trace={"_target_": "mine.Y"})
    mine = load([tmp_path / name for name in ("mine-mine", "shipped-mine")]).runs
    assert list(by_load(infer_arms(mine), [])) == ["trace = mine.Y", "trace = mine.X"]


def test_loads_that_differ_in_the_last_digits_are_two(tmp_path):
    for place, start_s in enumerate((1e6, 1e6 + 0.5)):
        change_config(write_run(tmp_path / f"{place}", num_requests=10), trace__start_s=start_s)
    loads = by_load(infer_arms(load_sweep(tmp_path).runs), [])
    assert list(loads) == ["start_s = 1e+06", "start_s = 1e+06 (1000000.5)"]
