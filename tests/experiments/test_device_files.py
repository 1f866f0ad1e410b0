"""A user's own device, model or preset: its file's numbers and name are used, and what is wrong with it is said with
file, line, field and expectation."""

from pathlib import Path

import pytest

from analysis import load
from analysis.reports.trust import Source
from experiments.configuration.compose import compose_config
from experiments.configuration.options import read_option
from experiments.configuration.saved import read_config
from testbed.errors import ConfigError
from testbed.specs.device import DEVICE_FIELDS, DeviceSpec
from tests.experiments.kit import SHORT, TINY, Say, manifest_of, option


def test_an_own_device_has_what_its_file_says_and_the_rest_of_the_one_it_begins_with(tmp_path):
    text = "defaults: [a100, _self_]\nname: mine\nmemory_bytes: 48000000000\nflops_per_s: 2.5e14\n"
    option(tmp_path, "device/mine", text)
    place = f"hydra.searchpath=['file://{tmp_path}']"
    device = compose_config([place, "device=mine", "device.step_overhead_ns=7"]).device
    assert (device.name, device.memory_bytes, device.flops_per_s) == ("mine", 48 * 10**9, 2.5e14)
    assert device.memory_bytes_per_s == 2.039e12  # the a100's
    assert device.step_overhead_ns == 7


def test_a_device_file_beside_the_folder_is_a_thing_of_the_past(tmp_path, say):
    gone = "device.path is gone: a device of your own is my_conf/device/mine.yaml, as"
    assert gone in say("run", "device.path=mine.yaml", f"hydra.run.dir={tmp_path / 'run'}").error()
    say("run", "trace.num_requests=2", f"hydra.run.dir={tmp_path / 'old'}").success()
    text = (config := tmp_path / "old" / "config.yaml").read_text()
    for path, told in (("null", ""), ("mine.yaml", "error: device.path is gone")):  # of a folder that is older
        config.write_text(text.replace("\ndevice:\n", f"\ndevice:\n  path: {path}\n"))
        assert say("run", f"from={tmp_path / 'old'}", f"hydra.run.dir={tmp_path / path}").err.startswith(told)
        assert (tmp_path / path / "done").exists() is (not told)


def test_the_librarys_own_files_say_all_of_a_device():
    folder = Path(__file__).parents[2] / "experiments" / "conf" / "device"
    for file in folder.glob("*.yaml"):
        found = read_option(file)
        begins, _ = found["defaults"]
        if begins != "_schema":
            found = read_option(folder / f"{begins}.yaml") | found
        of_fabrics = {f"interconnect_{name}" for name in ("efficiency", "max_ranks", "latency_ns")}
        without = of_fabrics if found["interconnect"].startswith("pcie_") else set()
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
        DeviceSpec("d", interconnect="nvlink", **{"interconnect_bytes_per_s": 1e11, field: value})


@pytest.mark.parametrize(
    "override",
    ["device.flops_per_s=1e-300", "device.host_link_bytes_per_s=0.5", "device.compute_efficiency=1e-300",
     "device.step_overhead_ns=" + "9" * 400, "device.memory_bytes=" + "9" * 400, "cost.kernel_launch_ns=" + "9" * 400,
     "model.hidden_size=" + "9" * 400, "model.sliding_window=" + "9" * 400, "model.rope_theta=1e300"],
    ids=range(9),
)  # fmt: skip
def test_a_number_that_no_price_could_be_made_of_is_refused_where_it_is_given(tmp_path, say, override):
    error = say("run", override, f"hydra.run.dir={tmp_path / 'run'}").error()
    assert error.startswith(f"{override.split('=')[0]} is ")
    assert "it must be " in error
    assert len(error) < 192
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("memory_bytes: lots", "line 6: device.memory_bytes is 'lots'; it must be a whole number"),
        ("source: " + "[" * 5000, "not YAML: nested too deeply"),
        ("memory_bytez: 3", "line 6: unknown key 'device.memory_bytez'; did you mean 'device.memory_bytes'?"),
    ],
)
def test_an_option_of_a_users_config_folder_is_named_by_file_and_line(tmp_path, say, line, message):
    file = option(tmp_path, "device/mine", f"defaults:\n  - _schema\n  - _self_\n\nname: mine\n{line}\n")
    error = say("run", "--config-dir", str(tmp_path), "device=mine", f"hydra.run.dir={tmp_path / 'run'}").error()
    assert f"{file}{':' if 'deeply' in message else ','} {message}" in error
    option(tmp_path, "device/right", "defaults: [h100, _self_]\nmemory_bytes: 40000000000\nsource: mine\n")
    assert error in say("run", "-m", "--config-dir", str(tmp_path), "device=mine,right").error()


@pytest.mark.parametrize(
    ("group", "line", "missing"),
    [
        ("device", "flops_per_s: 1e15", "kind, memory_bytes, memory_bytes_per_s"),
        ("model", "head_dim: 64", "architecture, hidden_size, intermediate_size, num_hidden_layers, num_attention_he"),
    ],
)
def test_an_own_device_or_model_has_what_defines_it_or_begins_with_another(tmp_path, say, group, line, missing):
    run = ["run", "--config-dir", str(tmp_path), f"{group}=mine", "trace.num_requests=2", f"hydra.run.dir={tmp_path}/r"]
    file = option(tmp_path, f"{group}/mine", f"defaults: [_schema, _self_]\nname: mine\n{line}\n")
    assert say(*run).error().startswith(f"{file} lacks {missing}")
    option(tmp_path, f"{group}/mine", "path: nowhere\n")
    assert say(*run).error().startswith(f"{file} lacks {missing.partition(',')[0]}")
    begin = "h100" if group == "device" else "tiny"
    option(tmp_path, f"{group}/mine", f"defaults: [{begin}, _self_]\n{line}\n")
    say(*run).success()
    assert manifest_of(tmp_path / "r")[group] == "mine", "not the name of the one that it begins with"


@pytest.mark.parametrize("group", ["device", "model"])
def test_a_fit_of_ours_is_no_fit_of_a_device_or_model_that_begins_with_its_own(tmp_path, say, group):
    begin = {"device": "h100", "model": "qwen3_0.6b"}[group]
    mine = ("--config-dir", str(tmp_path), f"{group}=mine")
    run = ["run", *mine, "cost=calibrated", *SHORT, f"hydra.run.dir={tmp_path}/r"]
    option(tmp_path, f"{group}/mine", f"defaults: [{begin}, _self_]\n")
    names = {"device": "qwen3_0.6b on mine", "model": "mine on h100"}
    assert f"no fit for {names[group]} comes with the testbed" in say(*run).error()
    option(tmp_path, f"{group}/mine", f"defaults: [{begin}, _self_]\nname: {begin}\n")
    say(*run).success()


@pytest.mark.parametrize(
    ("files", "chosen", "said"),
    [
        ({"device/h100": "defaults: [h100, _self_]"}, [],
         "device=h100 is the shipped option of that name; give the file"),
        ({"experiment/watermark": "seed: 3"}, ["experiment=watermark"], "experiment=watermark is the shipped option"),
        *[
            ({option: "seed: 3"}, [chosen] * bool(chosen), "is the shipped option of that name; give the file an")
            for option, chosen in (
                ("cache/default", ""), ("slo/default", ""), ("record/default", ""), ("report/default", ""),
                ("sampling/default", ""), ("backend/sim", ""), ("trace/synthetic", ""), ("cost/linear", "cost=linear"),
                ("cost/roofline", ""),
            )
        ],
        ({"cache/default": "defaults: [default, _self_]"}, [], "cache=default is the shipped option of that name"),
        ({"cache/default": "block_size: 8", "cache/a": "defaults: [default, _self_]"}, ["cache=a"],
         "cache=default is the shipped option of that name"),
        ({"device/h100": "", "device/a": "defaults: [h100, _self_]"}, ["device=a"],
         "device=h100 is the shipped option of that name"),
        *[
            ({f"{group}/a": f"# @package _global_\ndefaults: [{base}, _self_]"}, [f"{group}=a"],
             f"a.yaml: its keys are those of {group}; leave out its # @package line")
            for group, base in (("device", "h100"), ("scheduler", "orca"), ("cache", "default"))
        ],
        ({"device/a": "defaults: [a, _self_]"}, ["device=a"], "a.yaml begins with itself (a → a); begin with another"),
        ({"device/a": "defaults: [b]", "device/b": "defaults: [a]"}, ["device=a"], "begins with itself (a → b → a)"),
        *[
            ({f"{group}/a": f"defaults: {wrong}"}, [f"{group}=a"], "a.yaml: defaults is")
            for group, wrong in (
                ("device", "5"), ("device", ""), ("cost", "h100"), ("model", "[5]"), ("trace", "[[h100]]"),
                ("scheduler", "{a: 1}"), ("device", "[{a: b, c: d}]"), ("device", '["", _self_]'),
            )
        ],
        *[
            ({"scheduler/a": text}, ["scheduler=a"], "a.yaml begins with no option of scheduler; begin with one, as")
            for text in ("", "max_num_seqs: 8", "name: a", "defaults: [_self_]", "defaults: [/scheduler/vllm_v1]")
        ],
        ({"scheduler/a": "defaults: [_self_, vllm_v1]\nmax_num_seqs: 8"}, ["scheduler=a"],
         "a.yaml: what follows _self_ in its defaults replaces its own keys; put it last"),
        ({"cost/a": "filtering: sort"}, ["cost=a"], "a.yaml begins with no option of cost; name a class, as _target_"),
        ({"model/a": ""}, ["model=a"], "as defaults: [llama2_13b, _self_]"),
        ({"scheduler/a": "_target_: mine.Scheduler"}, ["scheduler=a"],
         "scheduler._target_: the scheduler is always the"),
    ],
)  # fmt: skip
def test_an_option_that_is_shipped_too_or_is_no_option_is_refused(
    tmp_path: Path, say: Say, files: dict[str, str], chosen: list[str], said: str
) -> None:
    for name, text in files.items():
        option(tmp_path, name, f"{text}\n")
    assert said in say("run", f"--config-dir={tmp_path}", *chosen, f"hydra.run.dir={tmp_path / 'run'}").error()
    assert not (tmp_path / "run").exists()


def test_a_launcher_of_ones_own_may_have_the_name_of_one_that_is_no_file(tmp_path: Path, say: Say) -> None:
    option(tmp_path, "hydra/launcher/basic", "_target_: nowhere.Launcher\n")
    said = say("run", "-m", f"--config-dir={tmp_path}", "seed=0,1", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert said.status == 1
    assert "nowhere" in said.err, "Hydra takes the user's"


@pytest.mark.parametrize("more", [(), ("hydra.verbose=false",), ("-m",)], ids=["alone", "by Hydra's app", "a sweep"])
@pytest.mark.parametrize("begins", ["vllm_v1", "_schema"])
def test_a_preset_of_ones_own_has_its_files_name_and_not_that_of_the_one_it_begins_with(
    here: Path, say: Say, begins: str, more: tuple[str, ...]
) -> None:
    option(here / "conf", "scheduler/ours", f"defaults: [{begins}, _self_]\nmax_num_seqs: 4\n")
    option(here / "conf", "scheduler/named", "defaults: [ours, _self_]\nname: by its file\n")
    into = ("hydra.sweep.dir=runs",) if "-m" in more else ("hydra.run.dir=runs/one",)
    for chosen, name in (("ours", "ours"), ("named", "by its file")):
        run = ("--config-dir", "conf", f"scheduler={chosen}", *TINY, *SHORT, *into, *more)
        said = say("run", *run, "overwrite=true").success()
        folders = sorted(path.parent for path in (here / "runs").glob("*/done"))
        assert name in [read_config(folder)["scheduler"]["name"] for folder in folders]
        if "-m" not in more:
            assert f"scheduler={name}, " in said


@pytest.mark.parametrize(
    ("text", "more", "name"),
    [
        ("defaults: [base, _self_]\n", (), "ours"),
        ("defaults: [base, _self_]\n", ("experiment=overlay",), "by an overlay"),
        ("defaults: [base, _self_]\nname: by its file\n", ("scheduler.name=typed",), "typed"),
    ],
    ids=["of a named one", "an overlay's", "an override's"],
)
def test_the_name_of_a_preset_of_ones_own_is_given_by_whoever_comes_last(
    tmp_path: Path, text: str, more: tuple[str, ...], name: str
) -> None:
    option(tmp_path, "scheduler/base", "defaults: [sarathi, _self_]\nname: the one it begins with\n")
    option(tmp_path, "experiment/overlay", "# @package _global_\nscheduler: {name: by an overlay}\n")
    option(tmp_path, "scheduler/ours", text)
    chosen = [f"hydra.searchpath=['file://{tmp_path}']", "scheduler=ours", *more]
    assert compose_config(chosen).scheduler.name == name


def test_a_preset_in_a_folder_of_a_folder_is_told_in_one_line(here: Path, say: Say) -> None:
    option(here / "conf", "scheduler/deep/ours", "defaults: [/scheduler/sarathi, _self_]\n")
    error = say("run", "--config-dir", "conf", "scheduler=deep/ours", "hydra.run.dir=run").error()
    assert error.startswith(f"{here}/conf/scheduler/deep/ours.yaml begins with no option of scheduler; begin with")


def test_ranks_on_a_device_that_names_no_interconnect_are_refused(tmp_path, say):
    text = "kind: cuda\nmemory_bytes: 288000000000\nmemory_bytes_per_s: 8e12\nflops_per_s: 2.5e15\n"
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "mine.yaml").write_text(f"defaults: [_schema, _self_]\nname: mine\n{text}")
    few = ("trace.num_requests=2", "device=mine", "--config-dir", str(tmp_path))
    say("run", *few, f"hydra.run.dir={tmp_path / 'one'}").success()
    refused = say("run", *few, "device.tensor_parallel_size=2", f"hydra.run.dir={tmp_path / 'two'}").error()
    assert "device mine names no interconnect; set device.interconnect to one of nvlink, xgmi, pcie_p2p" in refused


@pytest.mark.parametrize(
    ("options", "level", "has_floors"),
    [
        (("device=h100",), "fair", None),
        (("device=h100", "device.step_overhead_ns=9", "device.memory_bytes=90000000000"), "fair", None),
        (("device=h100", "device.fp8_efficiency=0.3"), "fair", None),
        (("device=h100", "device.fp8_efficiency=0.3", "model.dtype=fp8"), "poor", True),
        (("device=mi300x",), "poor", True),
        (("device=h100", "device.flops_per_s=2e15"), "poor", True),
        (("device=h100", "device.gemm_floor_ns=0", "device.kernel_floor_ns=0"), "poor", False),
        (("device=mi300x", "cost=linear"), None, None),
    ],
)
def test_step_times_of_kernels_that_nobody_timed_are_trusted_less(tmp_path, say, options, level, has_floors):
    said = say("run", "trace.num_requests=2", *options, f"hydra.run.dir={tmp_path / 'run'}").success()
    run = load(tmp_path / "run")
    source = Source.of(run.manifest, run.flat_config)
    assert run.manifest["cost_kernels"] == {"fair": "measured", "poor": "estimated", None: None}[level]
    assert source.level == (level or "poor")
    assert ("nobody timed" in source.said) == (level == "poor")
    assert (f"nobody timed kernels of {run.manifest['device']}" in said) == (has_floors is not None)
    assert ("without floors (device.gemm_floor_ns and kernel_floor_ns are 0)" in said) == (has_floors is False)
