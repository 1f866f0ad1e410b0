"""The library of models and devices: every file is a valid spec, named as its file, near the published numbers."""

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from sim.cost.roofline import RooflineCost
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.errors import ConfigError
from testbed.specs.device import DeviceSpec
from testbed.specs.memory import num_kv_blocks
from testbed.specs.model import ModelSpec

CONF = Path(__file__).parents[2] / "experiments" / "conf"
MODELS = sorted(path.stem if path.suffix == ".yaml" else path.name for path in (CONF / "model").glob("*.yaml"))
DEVICES = sorted(path.stem for path in (CONF / "device").glob("*.yaml"))

# parameters by model cards, papers and the index files of the weights; bytes of K and V a token by hand:
# 2 x layers x KV heads x head size x 2
PUBLISHED = {
    "qwen3_0.6b": (0.596e9, 114_688),
    "qwen3_1.7b": (1.721e9, 114_688),
    "qwen3_4b": (4.022e9, 147_456),
    "qwen3_8b": (8.191e9, 147_456),
    "qwen3_14b": (14.768e9, 163_840),
    "qwen3_32b": (32.762e9, 262_144),
    "qwen3_30b_a3b": (30.532e9, 98_304),
    "qwen3_235b_a22b": (235.094e9, 192_512),
    "llama2_7b": (6.738e9, 524_288),
    "llama2_13b": (13.016e9, 819_200),
    "llama2_70b": (68.977e9, 327_680),
    "llama3_8b": (8.030e9, 131_072),
    "llama3_70b": (70.554e9, 327_680),
    "llama3.1_8b": (8.030e9, 131_072),
    "llama3.1_70b": (70.554e9, 327_680),
    "llama3.1_405b": (405.853e9, 516_096),
    "llama3.2_1b": (1.236e9, 32_768),
    "llama3.2_3b": (3.213e9, 114_688),
    "opt_125m": (125.2e6, 36_864),
    "opt_350m": (331.2e6, 98_304),
    "opt_1.3b": (1.316e9, 196_608),
    "opt_2.7b": (2.652e9, 327_680),
    "opt_6.7b": (6.658e9, 524_288),
    "opt_13b": (12.853e9, 819_200),
    "opt_30b": (29.974e9, 1_376_256),
    "opt_66b": (65.720e9, 2_359_296),
    "mistral_7b_v0.1": (7.242e9, 131_072),
    "mistral_7b_v0.3": (7.248e9, 131_072),
    "mistral_nemo_12b": (12.248e9, 163_840),
    "mistral_small_24b": (23.572e9, 163_840),
    "qwen2.5_0.5b": (0.494e9, 12_288),
    "qwen2.5_1.5b": (1.544e9, 28_672),
    "qwen2.5_3b": (3.086e9, 36_864),
    "qwen2.5_7b": (7.616e9, 57_344),
    "qwen2.5_14b": (14.770e9, 196_608),
    "qwen2.5_32b": (32.764e9, 262_144),
    "qwen2.5_72b": (72.706e9, 327_680),
    "yi_34b": (34.389e9, 245_760),
}


def merged(group: str, name: str) -> DictConfig:
    """A file of the library, laid over the one that it begins with."""
    values = OmegaConf.load(CONF / group / f"{name}.yaml")
    begins, own = values.pop("defaults")
    assert own == "_self_"
    return values if begins == "_schema" else OmegaConf.merge(merged(group, begins), values)


def load(group: str, name: str) -> dict:
    return OmegaConf.to_object(merged(group, name))


def model(name: str) -> ModelSpec:
    return ModelSpec(**load("model", name))


def device(name: str) -> DeviceSpec:
    return DeviceSpec(**load("device", name))


def test_the_library_has_what_the_documents_promise():
    assert set(MODELS) == {*PUBLISHED, "tiny"}
    assert set(DEVICES) >= {"h200", "h100", "a100", "b200", "l40s", "rtx4090", "rtx_pro_6000", "mi300x", "t4", "cpu"}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_valid(name):
    spec = model(name)
    assert spec.name == name
    assert spec.sliding_window == (4096 if name == "mistral_7b_v0.1" else None)
    if name != "tiny":
        num_parameters, kv_bytes = PUBLISHED[name]
        assert spec.num_parameters == pytest.approx(num_parameters, rel=0.001)
        assert spec.kv_bytes_per_token() == kv_bytes
        assert "Source: config.json of " in (CONF / "model" / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", DEVICES)
def test_devices_are_valid_and_name_their_source(name):
    spec = device(name)
    assert spec.name == name
    assert spec.source
    assert spec.kind == ("cpu" if name == "cpu" else "cuda")
    assert 1 < spec.flops_per_s / spec.memory_bytes_per_s < 500  # flops per byte: no unit was missed
    text = (CONF / "device" / f"{name}.yaml").read_text()
    for line in text.splitlines()[4:]:
        if line.partition(":")[0] not in ("name", "kind", "source", "defaults", ""):
            assert "#" in line, f"no source: {line}"


def test_the_demo_model_is_small():
    assert model("tiny").num_parameters < 6e6


@pytest.mark.parametrize("name", DEVICES)
def test_a_small_model_fits_on_every_device_and_has_a_price(name):
    spec = device(name)
    shape = model("qwen3_0.6b")
    assert (
        num_kv_blocks(
            memory_bytes=spec.memory_bytes, utilization=0.9, weight_bytes=shape.weight_bytes(), activation_bytes=0,
            block_bytes=16 * shape.kv_bytes_per_token(),
        )
        > 500
    )  # fmt: skip
    assert RooflineCost(shape, spec).price(BatchShape(8, 8000, (), 8)).total_ns > 100_000


@pytest.mark.parametrize("name", ["h100", "h200", "a100", "gb200", "mi300x", "l40s"])
def test_more_ranks_than_an_interconnect_joins_have_no_price(name):
    spec, shape = device(name), replace(model("qwen3_0.6b"), num_attention_heads=128)
    most = {"a100": 16, "gb200": 72, "l40s": None}.get(name, 8)
    assert spec.interconnect_max_ranks == most
    for size in (8, 16, 64, 128):
        if most is None or size <= most:
            RooflineCost(shape, spec, tensor_parallel_size=size)
            continue
        with pytest.raises(ConfigError, match=rf"^device\.tensor_parallel_size is {size}; \w+ joins at most {most} of"):
            RooflineCost(shape, spec, tensor_parallel_size=size)
        RooflineCost(shape, replace(spec, interconnect_max_ranks=None), tensor_parallel_size=size)
        RooflineCost(shape, replace(spec, interconnect="pcie_host"), tensor_parallel_size=size)


def test_prices_lie_between_the_peak_and_a_third_of_it():
    """By hand, Llama-3.1-8B in bfloat16 on one H100: 15 GB of weights at 3.35 TB/s are 4.5 ms a token, and
    2 x 7.0e9 x 2048 FLOP at 989 TFLOPS are 29 ms a prompt."""
    cost = RooflineCost(model("llama3.1_8b"), device("h100"))
    assert 4.5e6 < cost.price(BatchShape(1, 1000, (), 1)).total_ns < 13.5e6
    assert 29e6 < cost.price(BatchShape(0, 0, (PrefillChunk(0, 2048),), 1)).total_ns < 87e6
