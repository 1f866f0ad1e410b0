"""Values that are swept as globs, ranges and mappings, and overrides that come in turn, are read one way everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.load import load_sweep
from experiments.capacity.arms import parse
from experiments.configuration.compose import check_values, compose_config, compose_from
from experiments.configuration.grammar import parsed
from experiments.configuration.options import Library, options
from experiments.configuration.overrides import swept_values
from testbed.errors import ConfigError
from tests.experiments.kit import SHORT, TINY, Said, Say, option


def sweep(say: Say, folder: Path, *more: str) -> Said:
    return say("run", "-m", *TINY, *SHORT, f"hydra.sweep.dir={folder}", *more)


def test_the_later_override_holds_whether_it_is_added_or_not() -> None:
    assert compose_config(["seed=2", "++seed=1"]).seed == 1
    assert compose_config(["++seed=1", "seed=2"]).seed == 2
    assert compose_from(dict(compose_config(["seed=3"]).raw), ["++seed=1"]).seed == 1
    with pytest.raises(ConfigError, match="An item is already at 'seed'"):
        compose_config(["seed=2", "+seed=1"])


def test_a_key_that_is_added_may_have_several_values() -> None:
    own = "scheduler.queue_order={_target_: mine.Own}"
    check_values([own, "scheduler=vllm_v1,sarathi", "+scheduler.queue_order.gain=1,2"], is_sweep=True)
    with pytest.raises(ConfigError, match=r"An item is already at 'cache.block_size'"):
        check_values(["+cache.block_size=8,16"], is_sweep=True)


def test_options_are_swept_by_a_pattern(tmp_path: Path, say: Say) -> None:
    option(tmp_path, "scheduler/orca_of_mine", "defaults: [orca, _self_]\nname: orca_of_mine\n")
    sweep(say, tmp_path / "s", f"--config-dir={tmp_path}", "scheduler=glob(orca*)").success()
    assert {run.manifest["scheduler"] for run in load_sweep(tmp_path / "s").runs} == {"orca", "orca_of_mine"}
    assert "scheduler=glob(nope*) has no values; give some" in sweep(say, tmp_path, "scheduler=glob(nope*)").error()


def test_mappings_of_a_group_are_swept(tmp_path: Path, say: Say) -> None:
    sweep(say, tmp_path / "s", "cache={watermark: 0.1},{watermark: 0.2}").success()
    assert {run.config["cache"]["watermark"] for run in load_sweep(tmp_path / "s").runs} == {0.1, 0.2}
    wrong = sweep(say, tmp_path / "t", "cache={watermark: 0.1},{blok_size: 16}").error()
    assert wrong.startswith("unknown key 'cache.blok_size'")
    wrong = sweep(say, tmp_path / "t", "cache={watermark: 0.1},3").error()
    assert wrong == "cache=3 is no name of an option; expected key=value, and for cache one of: default"


COSTS = ("cost=constant,roofline", "cost.kernel_launch_ns=4000,5000", "cost.logits=gather")


def test_a_key_that_some_of_the_options_have_is_theirs(tmp_path: Path, say: Say) -> None:
    sweep(say, tmp_path / "s", *COSTS).success()
    manifests = [run.manifest for run in load_sweep(tmp_path / "s").runs]
    assert [one["swept"] for one in manifests] == [
        {"cost": "constant"},
        {"cost": "roofline", "cost.kernel_launch_ns": "4000"},
        {"cost": "roofline", "cost.kernel_launch_ns": "5000"},
    ]
    assert ["cost.logits" in one["given"] for one in manifests] == [False, True, True]
    assert "done before  3 of 3 points" in sweep(say, tmp_path / "s", *COSTS).out
    wrong = sweep(say, tmp_path / "s", "cost=constant,roofline", "cost.kernel_launch=4").error()
    assert wrong.startswith("unknown key 'cost.kernel_launch'")
    wrong = sweep(say, tmp_path / "s", "cost=constant,roofline", "cost.kernel_launch_ns=soon").error()
    assert wrong == "cost.kernel_launch_ns is 'soon'; it must be a whole number"
    arms, _ = parse([*TINY, *SHORT, "slo.ttft_s=1", *COSTS])
    assert [arm.name for arm in arms] == [
        "constant, kernel launch default", "roofline, kernel launch 4 µs", "roofline, kernel launch 5 µs",
    ]  # fmt: skip


def test_labels_of_points_are_what_a_user_types(tmp_path: Path, say: Say) -> None:
    assert swept_values(parsed("cache.prefix_caching=true,false"), Library()) == [
        f"cache.prefix_caching={value}" for value in ("true", "false")
    ]
    assert swept_values(parsed("seed=1,0"), Library()) == ["seed=1", "seed=0"]
    said = sweep(say, tmp_path / "s", "cache.prefix_caching=true,false").out
    assert "cache.prefix_caching=false: " in said
    assert "False" not in said


def test_also_where_an_overlay_sweeps_the_options(tmp_path: Path, say: Say) -> None:
    def study(params: str) -> list[str]:
        text = f"# @package _global_\nhydra: {{mode: MULTIRUN, sweeper: {{params: {{{params}}}}}}}\n"
        option(tmp_path, "experiment/mine", text)
        return [f"--config-dir={tmp_path}", "experiment=mine", f"hydra.sweep.dir={tmp_path / 's'}", *TINY, *SHORT]

    say("run", *study('cost: "constant,roofline"'), "cost.kernel_launch_ns=4000").success()
    costs = [run.config["cost"] for run in load_sweep(tmp_path / "s").runs]
    assert [cost.get("kernel_launch_ns") for cost in costs] == [None, 4000]
    option(tmp_path, "experiment/other", "# @package _global_\nseed: 7\n")
    both = [item.replace("=mine", "=[other,mine]") for item in study('cost: "constant,roofline"')]
    say("run", *both, "cost.kernel_launch_ns=4000").success()
    assert sorted(run.config["seed"] for run in load_sweep(tmp_path / "s").runs) == [0, 0, 7, 7]
    wrong = say("run", *study('cache.blok_size: "8,16"')).error()
    file = tmp_path / "experiment" / "mine.yaml"
    assert wrong.startswith(f"{file}: unknown key 'cache.blok_size'; did you mean 'cache.block_size'?")
    for given in ("scheduler.watermark=0.5", "++scheduler.watermark=0.5"):
        said = say("run", *study('scheduler.watermark: "0.1,0.2", seed: "0,1"'), given).success()
        assert "complete     2 points: " in said, "what is given is not swept"


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ('sead: "0,1"', "unknown key 'sead'; did you mean 'seed'?"),
        ("seed: ''", "seed is ''; it must be a whole number"),
        ("seed: true", "seed is 'True'; it must be a whole number"),
        ('seed: "0,1", Seed: "0,1"', "unknown key 'Seed'; did you mean 'seed'?"),
        ('seed: "0,("', "cannot read the override 'seed=0,('"),
        ('scheduler: "nope,orca"', "scheduler has no option 'nope'"),
    ],
)
def test_an_error_in_what_a_file_sweeps_names_it(tmp_path: Path, say: Say, params: str, said: str) -> None:
    text = f"# @package _global_\nhydra: {{mode: MULTIRUN, sweeper: {{params: {{{params}}}}}}}\n"
    file = option(tmp_path, "experiment/mine", text)
    run = ("run", f"--config-dir={tmp_path}", "experiment=mine", f"hydra.sweep.dir={tmp_path / 's'}")
    assert say(*run).error().startswith(f"{file}: {said}")


def test_an_error_in_what_is_typed_names_no_file(tmp_path: Path, say: Say) -> None:
    option(tmp_path, "experiment/mine", "# @package _global_\nhydra: {sweeper: {params: {seed: '0,1'}}}\n")
    for typed in ("seed=x", "cache.block_size=x"):
        said = say("run", "-m", f"--config-dir={tmp_path}", "experiment=mine", typed).error()
        assert said == f"{typed.partition('=')[0]} is 'x'; it must be a whole number"


def test_a_class_of_the_users_has_the_keys_of_its_file(tmp_path: Path, say: Say) -> None:
    text = "_target_: sim.cost.constant.ConstantCost\nconfig: {_target_: sim.cost.config.ConstantConfig, step_s: 0.5}\n"
    option(tmp_path, "cost/mine", text)
    sweep(say, tmp_path / "s", f"--config-dir={tmp_path}", "cost=roofline,mine", "cost.kernel_launch_ns=4000").success()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("cache.watermark=interval(0,1)", "cache.watermark=interval(0,1): only lists of values are swept: "),
        ("seed=range(0,2,0)", "seed=range(0,2,0): "),
        ("scheduler=glob(nope*)", "scheduler=glob(nope*) has no values; give some, as scheduler=a,b,c"),
    ],
)
def test_a_capacity_names_what_is_no_list(override: str, expected: str, say: Say) -> None:
    assert say("capacity", *TINY, *SHORT, "slo.ttft_s=1", override).error().startswith(expected)


def test_a_capacity_takes_a_pattern() -> None:
    arms, _ = parse([*TINY, *SHORT, "slo.ttft_s=1", "scheduler=glob(vllm_v0*)"])
    assert [arm.name for arm in arms] == [name for name in options("scheduler") if name.startswith("vllm_v0")]


def test_what_an_overlay_says_of_a_sweep_is_no_override(say: Say) -> None:
    for override in ("hydra.sweeper.params={seed: '0,1'}", "+hydra.sweeper.params.seed='0,1'"):
        assert "give key=a,b with -m" in say("run", override).error()


def test_callbacks_of_one_s_own_are_hydras_to_find(say: Say) -> None:
    assert "there is no group" not in say("run", "+hydra/callbacks=nope").error()


def test_a_file_of_one_s_own_that_was_edited_is_read_again(tmp_path: Path) -> None:
    for size in (8, 128):
        option(tmp_path, "cache/mine", f"defaults: [default]\nblock_size: {size}\n")
        assert compose_config([f"hydra.searchpath=['file://{tmp_path}']", "cache=mine"]).cache.block_size == size
