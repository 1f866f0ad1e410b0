"""A user's own device: its numbers are used, and what is wrong is said with file, line, field and expectation."""

from pathlib import Path

import pytest

from experiments.cli import main
from experiments.configuration.compose import compose_config, compose_from
from experiments.configuration.device_file import read_device_file
from testbed.errors import ConfigError, DeviceError
from testbed.specs.device import DEVICE_FIELDS, DeviceSpec


def written(folder: Path, text: str) -> Path:
    file = folder / "mine.yaml"
    file.write_text(text)
    return file


def test_a_file_replaces_what_it_has(tmp_path):
    file = written(tmp_path, "# ours\nname: mine\nmemory_bytes: 48e9\nflops_per_s: 2.5e14\nstep_overhead_ns: 7\n")
    device = compose_config([f"device.path={file}", "device=a100"]).device
    assert (device.name, device.memory_bytes, device.flops_per_s, device.step_overhead_ns) == (
        "mine",
        48 * 10**9,
        2.5e14,
        7,
    )
    assert device.memory_bytes_per_s == 2.039e12  # the chosen device's


def test_what_a_file_gives_cannot_be_set_beside_it(tmp_path):
    """It would have no effect, and two arms that differ in it would be the same."""
    path = f"device.path={written(tmp_path, 'flops_per_s: 2.5e14')}"
    for given in ("device.flops_per_s=1e14", "device={flops_per_s: 1e14}"):
        with pytest.raises(
            ConfigError, match=r"^device\.flops_per_s has no effect with device\.path, whose file gives it"
        ):
            compose_config([given, path])
    assert compose_config([path, "device.step_overhead_ns=7"]).device.step_overhead_ns == 7
    assert compose_config([path, "device.path=null", "device.flops_per_s=1e14"]).device.flops_per_s == 1e14
    with pytest.raises(ConfigError, match=r"device\.flops_per_s has no effect"):
        compose_from(compose_config([path]).raw, ["device.flops_per_s=1e14"])


@pytest.mark.parametrize("given", ["device.path=file.yaml", "experiment=measured"])
def test_a_file_replaces_what_an_own_device_has_wherever_its_path_is_given(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    Path("file.yaml").write_text("step_overhead_ns: 7\n")
    own = {"device/mine": "defaults: [h100, _self_]\nname: mine\nstep_overhead_ns: 5\n"}
    own |= {"experiment/measured": "# @package _global_\ndevice: {path: file.yaml}\n"}
    for name, text in own.items():
        Path(name).parent.mkdir()
        Path(f"{name}.yaml").write_text(text)
    searched = f"hydra.searchpath=['file://{tmp_path}']"
    assert compose_config([searched, "device=mine", given]).device.step_overhead_ns == 7
    Path("device/mine.yaml").write_text(f"{own['device/mine']}path: file.yaml\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml, line 3: device\.step_overhead_ns has no effect with"):
        compose_config([searched, "device=mine"])


def test_the_librarys_own_files_are_device_files():
    folder = Path(__file__).parents[2] / "experiments" / "conf" / "device"
    for file in folder.glob("*.yaml"):
        found = read_device_file(file)
        of_nvlink = {f"interconnect_{name}" for name in ("efficiency", "latency_ns")}
        assert set(found) == set(DEVICE_FIELDS) - (of_nvlink if found["interconnect"] != "nvlink" else set())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("memory_bytes: lots", "memory_bytes is 'lots'; it must be a whole number of bytes, from 1 to 1e18"),
        ("memory_bytes: -80e9", "memory_bytes is '-80e9'; it must be a whole number of bytes, from 1 to 1e18"),
        ("memory_bytes: 1.5", "memory_bytes is '1.5'; it must be a whole number of bytes"),
        ("memory_bytes: '80e9'", "memory_bytes is '80e9'"),
        ("memory_bytes:", "memory_bytes is ''"),
        ("memory_bytes: [1, 2]", "memory_bytes is not a single value"),
        ("memory_bytes: true", "memory_bytes is 'true'"),
        ("flops_per_s: .nan", "flops_per_s is '.nan'; it must be a number from 1 to 1e30"),
        ("flops_per_s: .inf", "flops_per_s is '.inf'; it must be a number from 1 to 1e30"),
        ("compute_efficiency: 70", "compute_efficiency is '70'; it must be a share from 1e-6 to 1"),
        ("flops_per_s: 1e-300", "flops_per_s is '1e-300'; it must be a number from 1 to 1e30"),
        ("flops_per_s: " + "9" * 400, "flops_per_s is '9999"),
        ("memory_bytes: " + "9" * 5000, "memory_bytes is '9999"),
        ("name: {" + "a: {" * 5000, "not YAML: nested too deeply"),
        ("? [1, 2]\n: 3", "unknown field 'not a name'"),
        ("kind: tpu", "kind is 'tpu'; it must be one of cuda, cpu"),
        ("host_link_latency_ns: -1", "host_link_latency_ns is '-1'; it must be a whole number of ns, from 0 to 1,000,"),
        ("name: 3", "name is '3'; it must be a name"),
        ("memory_byte: 3", "unknown field 'memory_byte'; did you mean 'memory_bytes'?"),
        ("kind: cuda\nkind: cuda", "kind stands twice"),
        ("kind: [", "not YAML: "),
    ],
)
def test_a_bad_line_is_named(tmp_path, capsys, line, message):
    file = written(tmp_path, f"# ours\n\nsource: us\n{line}\n")
    assert main(["run", f"device.path={file}", f"hydra.run.dir={tmp_path / 'run'}"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert len(err) < 600 + len(str(file))
    place = "" if "deeply" in message else f", line {5 if 'twice' in message or 'not YAML' in message else 4}"
    assert f"{file}{place}: {message}" in err


def test_what_is_no_device_file_is_refused(tmp_path):
    with pytest.raises(DeviceError, match=r"device\.path: no file at .*absent\.yaml"):
        read_device_file(tmp_path / "absent.yaml")
    with pytest.raises(DeviceError, match=r"mine\.yaml: expected fields of a device"):
        read_device_file(written(tmp_path, "- 1\n"))
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DeviceError, match=r"mine\.yaml"):
        read_device_file(tmp_path / "mine.yaml")


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
