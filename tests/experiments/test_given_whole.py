"""Keys that are given whole: in files of the user's own, and their parameters one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import simulate
from experiments.configuration.compose import compose_config, compose_from, compose_raw, to_overrides
from testbed.errors import ConfigError
from tests.experiments.kit import SHORT, TINY, Say, option

ORDER = "testbed.policies.orders.priority"


def own(folder: Path, group: str, text: str) -> list[str]:
    """The overrides that choose an option of the user's with this text."""
    option(folder, f"{group}/mine", text)
    return [f"hydra.searchpath=['file://{folder}']", f"{group}=mine"]


@pytest.mark.parametrize(
    ("group", "text", "key", "expected"),
    [
        ("scheduler", f"defaults: [vllm_v1, _self_]\nqueue_order: {{_target_: {ORDER}}}\n", "queue_order", "_target_"),
        ("backend", "defaults: [sim]\nrouter: {_target_: my.Router, depth: {a: 1}}\n", "router", "depth"),
        ("model", "defaults: [tiny, _self_]\nrope_scaling: {rope_type: yarn, factor: 4}\n", "rope_scaling", "factor"),
        ("experiment", "# @package _global_\nscheduler:\n  queue_order: {_target_: my.Order}\n", "", ""),
    ],
)
def test_an_own_file_may_give_a_mapping_for_a_key_that_is_given_whole(
    group: str, text: str, key: str, expected: str, tmp_path: Path
) -> None:
    raw = compose_raw(own(tmp_path, group, text))
    found = raw[group][key] if key else raw["scheduler"]["queue_order"]
    assert (expected or "_target_") in found


def test_an_own_file_may_merge_mappings(tmp_path: Path) -> None:
    text = "prompt: &lengths {kind: uniform, min_tokens: 4, max_tokens: 24}\noutput:\n  <<: *lengths\n  max_tokens: 9\n"
    config = compose_config(own(tmp_path, "trace", "defaults: [synthetic]\n" + text))
    assert (config.raw["trace"]["output"]["min_tokens"], config.raw["trace"]["output"]["max_tokens"]) == (4, 9)
    wrong = own(tmp_path, "trace", "defaults: [synthetic]\n" + text.replace("min_tokens", "min_tokns"))
    with pytest.raises(ConfigError, match=r"mine.yaml, line 2: unknown key 'trace.prompt.min_tokns'"):
        compose_config(wrong)


def test_one_parameter_of_what_the_option_gives_whole() -> None:
    config = compose_config(["model=llama3.1_8b", "model.rope_scaling.factor=4"])
    assert config.raw["model"]["rope_scaling"]["factor"] == 4
    assert config.raw["model"]["rope_scaling"]["rope_type"] == "llama3"


WHOLE = f"scheduler.queue_order={{_target_: {ORDER}, ageing_per_s: 0.1}}"


def test_one_parameter_of_what_an_override_gave_whole(tmp_path: Path, say: Say) -> None:
    one = "scheduler.queue_order.ageing_per_s=0.2"
    config = compose_config([WHOLE, one])
    assert config.raw["scheduler"]["queue_order"] == {"_target_": ORDER, "ageing_per_s": 0.2}
    again = compose_from(dict(compose_config([WHOLE]).raw), [one])
    assert again.raw["scheduler"]["queue_order"]["ageing_per_s"] == 0.2
    run = ("run", "-m", *TINY, *SHORT, WHOLE, f"{one},0.3", f"hydra.sweep.dir={tmp_path / 's'}")
    said = say(*run).success()
    assert "complete     2 points" in said


def test_from_python_as_a_mapping() -> None:
    config = compose_config(to_overrides({"model": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}}))
    assert config.raw["model"]["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0}


def test_a_parameter_from_python_keeps_its_type() -> None:
    texts = ["7", "1e3", "1_0", "nan", "Inf", "true", "null", "2024.1", "fp8", "a.b", "it's"]
    given = {"texts": texts, "mixed": [7, 1e3, True, None], "lengths": {"chat, short": "0.5", "a:{b}": 2, 3: "c"}}
    order = {"_target_": ORDER, **given}
    config = compose_config(to_overrides({"scheduler": {"queue_order": order}}))
    assert config.raw["scheduler"]["queue_order"] == order


def test_what_an_interpolation_of_an_own_trace_lacks_is_said_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^trace: cannot make 'builtins.dict': Interpolation key 'sed' not found$"):
        simulate({"_target_": "builtins.dict", "num": "${sed}"})


def test_files_that_editors_hide_are_no_options(tmp_path: Path, say: Say) -> None:
    chosen = own(tmp_path, "device", "# my card\ndefaults: [h100, _self_]\n")
    (tmp_path / "device" / ".#mine.yaml").symlink_to("me@host.7")
    (tmp_path / "device" / "._mine.yaml").write_bytes(b"\0\xff")
    assert compose_config(chosen).device.name == "mine"
    said = say("list", "device", "--config-dir", str(tmp_path)).out.splitlines()
    assert [line.split() for line in said if "mine" in line] == [["mine", "my", "card"]]
    (tmp_path / "device" / "mine.yaml").write_bytes(b"# caf\xe9\n")
    assert "caf\ufffd" in say("list", "device", "--config-dir", str(tmp_path)).out


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "scheduler.queue_order.ageing_per_s=1",
            "scheduler.queue_order is given whole, as in 'scheduler.queue_order={_target_: …, ageing_per_s: …}'",
        ),
        ("model.rope_scaling.factor=4", "model.rope_scaling is given whole, as in "),
        ("cache.block_size.size=4", "unknown key 'cache.block_size.size'; cache.block_size has no keys of its own"),
    ],
)
def test_a_parameter_of_what_is_no_mapping_is_refused(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config([override])
    assert expected in str(caught.value)
