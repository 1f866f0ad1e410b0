"""A user's own device: its numbers are used, and what is wrong is said with file, line, field and expectation."""

from pathlib import Path

import pytest

from experiments.cli import main
from experiments.configuration.compose import compose_config
from experiments.configuration.options import read_option
from testbed.errors import ConfigError
from testbed.specs.device import DEVICE_FIELDS, DeviceSpec


def mine(folder: Path, text: str, name: str = "device/mine") -> str:
    """Writes an option of one's own; returns the override that finds it."""
    file = folder / f"{name}.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return f"hydra.searchpath=['file://{folder}']"


def test_an_own_device_has_what_its_file_says_and_the_rest_of_the_one_it_begins_with(tmp_path):
    text = "defaults: [a100, _self_]\nname: mine\nmemory_bytes: 48000000000\nflops_per_s: 2.5e14\n"
    device = compose_config([mine(tmp_path, text), "device=mine", "device.step_overhead_ns=7"]).device
    assert (device.name, device.memory_bytes, device.flops_per_s) == ("mine", 48 * 10**9, 2.5e14)
    assert device.memory_bytes_per_s == 2.039e12  # the a100's
    assert device.step_overhead_ns == 7


def test_a_device_file_beside_the_folder_is_a_thing_of_the_past(tmp_path, capsys):
    assert main(["run", "device.path=mine.yaml", f"hydra.run.dir={tmp_path / 'run'}"]) == 1
    assert "device.path is gone: a device of your own is my_conf/device/mine.yaml, as" in capsys.readouterr().err
    assert main(["run", "trace.num_requests=2", f"hydra.run.dir={tmp_path / 'old'}"]) == 0
    text = (config := tmp_path / "old" / "config.yaml").read_text()
    for path, status in (("null", 0), ("mine.yaml", 1)):  # of a folder that is older
        config.write_text(text.replace("\ndevice:\n", f"\ndevice:\n  path: {path}\n"))
        assert main(["run", f"from={tmp_path / 'old'}", f"hydra.run.dir={tmp_path / path}"]) == status
    assert "device.path is gone" in capsys.readouterr().err


def test_the_librarys_own_files_say_all_of_a_device():
    folder = Path(__file__).parents[2] / "experiments" / "conf" / "device"
    for file in folder.glob("*.yaml"):
        found = read_option(file)
        of_nvlink = {f"interconnect_{name}" for name in ("efficiency", "latency_ns")}
        without = of_nvlink if found["interconnect"] != "nvlink" else set()
        assert set(found) == {"defaults", *DEVICE_FIELDS} - without


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("memory_bytes", 1.5, "memory_bytes is 1.5; it must be a whole number of bytes"),
        ("memory_bytes", True, "memory_bytes is true; it must be a whole number of bytes, from 1 to 1e18"),
        ("compute_efficiency", 70, "compute_efficiency is 70; it must be a share from 1e-6 to 1"),
        ("kind", "tpu", "kind is 'tpu'; it must be one of cuda, cpu"),
        ("host_link_latency_ns", -1, "host_link_latency_ns is -1; it must be a whole number of ns, from 0 to 1,000,"),
        ("name", 3, "name is 3; it must be a name"),
    ],
)
def test_a_bad_value_is_named_with_what_it_must_be(field, value, message):
    with pytest.raises(ConfigError, match=rf"^device\.{message}"):
        DeviceSpec(**{"name": "d", field: value})


@pytest.mark.parametrize("field", ["memory_bytes", "memory_bytes_per_s", "flops_per_s", "interconnect_bytes_per_s",
                                   "host_link_bytes_per_s", "compute_efficiency", "memory_efficiency"])  # fmt: skip
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_impossible_numbers_are_refused(field, value):
    is_no_link = field == "interconnect_bytes_per_s" and value == 0
    with pytest.raises(ConfigError, match="d has none" if is_no_link else rf"device\.{field} is .*; it must be a "):
        DeviceSpec("d", **{field: value})


@pytest.mark.parametrize(
    "override",
    ["device.flops_per_s=1e-300", "device.host_link_bytes_per_s=0.5", "device.compute_efficiency=1e-300",
     "device.step_overhead_ns=" + "9" * 400, "device.memory_bytes=" + "9" * 400, "cost.kernel_launch_ns=" + "9" * 400,
     "model.hidden_size=" + "9" * 400, "model.sliding_window=" + "9" * 400, "model.rope_theta=1e300"],
    ids=range(9),
)  # fmt: skip
def test_a_number_that_no_price_could_be_made_of_is_refused_where_it_is_given(tmp_path, capsys, override):
    assert main(["run", override, f"hydra.run.dir={tmp_path / 'run'}"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {override.split('=')[0]} is ")
    assert "it must be " in err
    assert (err.count("\n"), len(err) < 200) == (1, True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("memory_bytes: lots", "line 6: device.memory_bytes is 'lots'; it must be a whole number"),
        ("source: " + "[" * 5000, "not YAML: nested too deeply"),
        ("memory_bytez: 3", "line 6: unknown key 'device.memory_bytez'; did you mean 'device.memory_bytes'?"),
    ],
)
def test_an_option_of_a_users_config_folder_is_named_by_file_and_line(tmp_path, capsys, line, message):
    (tmp_path / "device").mkdir()
    file = tmp_path / "device" / "mine.yaml"
    file.write_text(f"defaults:\n  - _schema\n  - _self_\n\nname: mine\n{line}\n")
    assert main(["run", "--config-dir", str(tmp_path), "device=mine", f"hydra.run.dir={tmp_path / 'run'}"]) == 1
    assert f"{file}{':' if 'deeply' in message else ','} {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("group", "line", "missing"),
    [
        ("device", "flops_per_s: 1e15", "kind, memory_bytes, memory_bytes_per_s"),
        ("model", "head_dim: 64", "architecture, hidden_size, intermediate_size, num_hidden_layers, num_attention_he"),
    ],
)
def test_an_own_device_or_model_has_what_defines_it_or_begins_with_another(tmp_path, capsys, group, line, missing):
    (tmp_path / group).mkdir()
    file = tmp_path / group / "mine.yaml"
    run = ["run", "--config-dir", str(tmp_path), f"{group}=mine", "trace.num_requests=2"]
    file.write_text(f"defaults: [_schema, _self_]\nname: mine\n{line}\n")
    assert main([*run, f"hydra.run.dir={tmp_path / 'refused'}"]) == 1
    assert f"error: {file} lacks {missing}" in capsys.readouterr().err
    file.write_text("path: nowhere\n")
    assert main([*run, f"hydra.run.dir={tmp_path / 'refused'}"]) == 1
    assert f"error: {file} lacks name, " in capsys.readouterr().err
    file.write_text(f"defaults: [{'h100' if group == 'device' else 'tiny'}, _self_]\nname: mine\n{line}\n")
    assert main([*run, f"hydra.run.dir={tmp_path / 'run'}"]) == 0


@pytest.mark.parametrize(
    ("files", "chosen", "said"),
    [
        (
            {"device/h100": "defaults: [h100, _self_]"},
            [],
            "device=h100 is the shipped option of that name; give the file",
        ),
        ({"experiment/watermark": "seed: 3"}, ["experiment=watermark"], "experiment=watermark is the shipped option"),
        ({"device/a": "defaults: [a, _self_]"}, ["device=a"], "a.yaml begins with itself (a → a); begin with another"),
        ({"device/a": "defaults: [b]", "device/b": "defaults: [a]"}, ["device=a"], "begins with itself (a → b → a)"),
        *[
            ({f"{group}/a": f"defaults: {wrong}"}, [f"{group}=a"], "a.yaml: defaults is")
            for group, wrong in (
                ("device", "5"),
                ("device", ""),
                ("cost", "h100"),
                ("model", "[5]"),
                ("trace", "[[h100]]"),
                ("scheduler", "{a: 1}"),
                ("device", "[{a: b, c: d}]"),
                ("device", '["", _self_]'),
            )
        ],
        (
            {"scheduler/a": "_target_: mine.Scheduler"},
            ["scheduler=a"],
            "scheduler._target_: the scheduler is always the",
        ),
    ],
)
def test_an_option_that_is_shipped_too_or_is_no_option_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], chosen: list[str], said: str
) -> None:
    for name, text in files.items():
        file = tmp_path / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{text}\n")
    assert main(["run", f"--config-dir={tmp_path}", *chosen, f"hydra.run.dir={tmp_path / 'run'}"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
    assert not (tmp_path / "run").exists()


def test_a_launcher_of_ones_own_may_have_the_name_of_one_that_is_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hydra" / "launcher" / "basic.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("_target_: nowhere.Launcher\n")
    arguments = ["run", "-m", f"--config-dir={tmp_path}", "seed=0,1", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    assert main(arguments) == 1
    assert "nowhere" in capsys.readouterr().err, "Hydra takes the user's"
