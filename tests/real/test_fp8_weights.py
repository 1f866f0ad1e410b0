"""Weights in FP8 with scales: what they give is what the weights that they stand for give."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from real.checkpoint import make_checkpoint
from real.layers.fp8 import STORED, Fp8Layout
from real.layers.linear import Kept, Part, whole_part
from real.loader import SINGLE_FILE
from testbed.specs.hf_config import load_hf_config
from testbed.specs.model import ModelSpec
from testbed.specs.quantization import PER_BLOCK, PER_CHANNEL, PER_TENSOR, Fp8Scheme, fp8_scheme
from tests.real.engine_helpers import ARCHITECTURES, load_error, logits_of_pieces, tiny_backend, tiny_spec
from tests.real.thread_ranks import check_ranks_agree, on_ranks

SCHEMES = {
    "a tensor": PER_TENSOR,
    "a channel": PER_CHANNEL,
    "blocks of 128": PER_BLOCK,
    "blocks that end within heads and ranks": Fp8Scheme(10, 7, "weight_scale_inv"),
    "blocks of compressed-tensors": Fp8Scheme(20, 12, "weight_scale"),
}
K_PROJ = "model.layers.1.self_attn.k_proj."
TOLERANCE = 2e-5  # of float32 sums in another order, on weights that are rounded once in float32


def fp8_spec(folder: Path, scheme: Fp8Scheme, **changes: object) -> ModelSpec:
    """Of a fresh random checkpoint, as its folder says it."""
    made = tiny_spec(dtype="fp8", **changes)
    path = make_checkpoint(folder / "fp8", made, seed=3, scheme=scheme)
    spec = ModelSpec(made.name, **load_hf_config(path), path=str(path))
    assert spec == replace(made, path=str(path))
    return spec


def dequantized(spec: ModelSpec, scheme: Fp8Scheme, folder: Path) -> ModelSpec:
    """A checkpoint of the weights that those of FP8 stand for: each times its scale, in float64, one by one."""
    assert spec.path is not None
    stored = load_file(Path(spec.path) / SINGLE_FILE)
    weights = {}
    for name, tensor in stored.items():
        if ".weight_scale" in name:
            continue
        if tensor.dtype == STORED:
            scales = stored[name.removesuffix("weight") + scheme.scale_name].double()
            num_rows, num_columns = tensor.shape
            tall, wide = scheme.rows or num_rows, scheme.columns or num_columns
            assert scales.shape == (() if scheme.rows is None else (-(-num_rows // tall), -(-num_columns // wide)))
            scales = scales.reshape(-(-num_rows // tall), -(-num_columns // wide))
            values = tensor.double()
            for i in range(scales.shape[0]):
                for j in range(scales.shape[1]):
                    values[i * tall : (i + 1) * tall, j * wide : (j + 1) * wide] *= scales[i, j]
            tensor = values
        weights[name] = tensor.float()
    folder.mkdir()
    save_file(weights, folder / SINGLE_FILE)
    config = json.loads((Path(spec.path) / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    return ModelSpec(spec.name, **load_hf_config(folder), path=str(folder))


def logits_of(spec: ModelSpec, **options) -> torch.Tensor:
    return logits_of_pieces(spec, dtype="float32", **options)


@pytest.mark.parametrize("name", ["qwen3", "qwen3 moe", "qwen2 untied", "llama with biases", "mistral"])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_logits_are_those_of_the_weights_that_are_meant(tmp_path, scheme, name):
    """On two and on four ranks too, which begin and end within blocks, and hold KV heads twice."""
    spec = fp8_spec(tmp_path, scheme, **ARCHITECTURES[name])
    expected = logits_of(dequantized(spec, scheme, tmp_path / "wide"))
    on_several = [on_ranks(num_ranks, lambda rank: logits_of(spec, group=rank)) for num_ranks in (2, 4)]
    for logits in (logits_of(spec), *chain(*on_several)):
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_what_is_kept_is_a_byte_a_weight():
    model = tiny_backend(tiny_spec(dtype="fp8")).runner.model
    stored = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert all((dtype == STORED) == name.endswith("_proj.weight") for name, dtype in stored.items())
    assert stored["model.embed_tokens.weight"] == torch.bfloat16
    assert stored["model.layers.0.mlp.down_proj.weight_scale_inv"] == torch.float32


def test_random_weights_do_not_depend_on_the_ranks_and_keep_their_scale():
    logits = check_ranks_agree(tiny_spec(dtype="fp8", num_key_value_heads=1), 2, TOLERANCE, dtype="float32")
    assert 0.3 < float(logits.std()) < 3


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 4))
def test_a_rank_keeps_the_scales_of_the_groups_that_it_touches(size, group, num_ranks):
    size *= num_ranks
    for rank in range(num_ranks):
        part = Part(size, rank * size // num_ranks, size // num_ranks)
        layout = Fp8Layout(Fp8Scheme(group, group), Kept({"one": part, "other": part}, whole_part(1)))
        own = [place // group for place in range(part.start, part.start + part.kept)]
        num = len(set(own))
        expected = [place - own[0] for place in own]
        assert layout.groups(torch.device("cpu"))[0].tolist() == [*expected, *(place + num for place in expected)]
        assert layout.shape == (2 * num, 1)
        assert [slot.start for slot in layout.slots(torch.zeros(layout.shape)).values()] == [own[0]] * 2


# --- what is refused ---


def edit(spec: ModelSpec, **changes: torch.Tensor | None) -> None:
    """Weights of a layer's k_proj: another, or None: away."""
    file = Path(spec.path or "") / SINGLE_FILE
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}  # not of the file that is written over
    for name, tensor in changes.items():
        weights.pop(K_PROJ + name, None)
        if tensor is not None:
            weights[K_PROJ + name] = tensor
    save_file(weights, file)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_missing_scale_is_named(tmp_path, scheme):
    spec = fp8_spec(tmp_path, scheme)
    edit(spec, **{scheme.scale_name: None})
    message = load_error(spec)
    assert f"lacks weight '{K_PROJ}{scheme.scale_name}' of shape [" in message
    assert str(spec.path) in message


@pytest.mark.parametrize(
    ("scheme", "shape", "expected"),
    [(PER_TENSOR, [3], "[]"), (PER_CHANNEL, [32], "[32, 1]"), (PER_CHANNEL, [1], "[32, 1]"),
     (PER_BLOCK, [2, 1], "[1, 1]"), (Fp8Scheme(10, 7, "weight_scale_inv"), [10, 4], "[4, 10]")],
)  # fmt: skip
def test_a_scale_of_another_shape_is_named(tmp_path, scheme, shape, expected):
    spec = fp8_spec(tmp_path, scheme)
    edit(spec, **{scheme.scale_name: torch.ones(shape)})
    name = K_PROJ + scheme.scale_name
    assert f"{SINGLE_FILE}: weight {name!r} has shape {shape}, the model config expects {expected}" in load_error(spec)


def test_a_tensors_scale_may_be_a_list_of_one_and_scales_of_activations_are_left_out(tmp_path):
    spec = fp8_spec(tmp_path, PER_TENSOR)
    file = Path(spec.path or "") / SINGLE_FILE
    scale = load_file(file)[K_PROJ + "weight_scale"].clone()
    expected = logits_of(spec)
    edit(spec, weight_scale=scale.reshape(1).bfloat16().float(), input_scale=torch.tensor(3.0))
    edit(spec, weight_scale=scale.reshape(1))
    assert torch.equal(logits_of(spec), expected)


def test_values_that_are_not_finite_are_named(tmp_path):
    spec = fp8_spec(tmp_path, PER_BLOCK)
    edit(spec, weight_scale_inv=torch.full((1, 1), float("inf")))
    assert f"{K_PROJ}weight_scale_inv' has values that are not finite, as float32" in load_error(spec)
    edit(spec, weight_scale_inv=torch.ones(1, 1), weight=torch.full((32, 64), float("nan")).to(STORED))
    assert f"{K_PROJ}weight' has values that are not finite, as float8_e4m3fn" in load_error(spec)


def test_weights_in_another_format_than_the_config_says_are_named(tmp_path):
    spec = fp8_spec(tmp_path, PER_BLOCK)
    edit(spec, weight=torch.ones(32, 64).bfloat16())
    assert f"{K_PROJ}weight' is stored as BF16; expected one of F8_E4M3" in load_error(spec)
    wide = dequantized(fp8_spec(tmp_path / "b", PER_BLOCK), PER_BLOCK, tmp_path / "wide")
    edit(wide, weight=torch.ones(32, 64).to(STORED))
    assert f"{K_PROJ}weight' is stored as F8_E4M3; expected one of F32" in load_error(wide)
    assert "has dtype 'fp8', and " in load_error(replace(wide, dtype="fp8"))
    assert "has weights in 'float32'; leave model.dtype" in load_error(replace(wide, dtype="fp8"))
    assert "has weights in 'fp8'; leave model.dtype" in load_error(replace(spec, dtype="bfloat16"))


def test_what_has_no_fp8_weights_here_is_named():
    assert "FP8 weights in OPT" in load_error(tiny_spec(dtype="fp8", **ARCHITECTURES["opt"]))


GROUP = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "tensor"}}
OTHER_NUMBERS = "weights quantised by compressed-tensors as other than symmetric float of 8 bits"
OTHER_GROUPS = "weights quantised by compressed-tensors in other groups than one of all linear layers"
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}, "ignore": ["lm_head"]}


def compressed(strategy: object, **weights: object) -> dict[str, object]:
    """COMPRESSED with another strategy, and what else it says of the weights."""
    return {
        **COMPRESSED,
        "config_groups": {"a": {**GROUP, "weights": {**GROUP["weights"], "strategy": strategy, **weights}}},
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
          "modules_to_not_convert": ["lm_head", "model.layers.3.input_layernorm", "model.layers.3.mlp.gate"]},
         PER_BLOCK),
        ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, PER_TENSOR),
        (COMPRESSED, PER_TENSOR),
        ({**COMPRESSED, "ignore": ["lm_head", "re:.*block_sparse_moe.gate"]}, PER_TENSOR),  # Mixtral
        (compressed("block", block_structure=[64, 32]), Fp8Scheme(64, 32, "weight_scale")),
        (compressed("block"), "FP8 weights in blocks of None"),
        ({**COMPRESSED, "ignore": ["re:.*lm_head"], "sparsity_config": {"format": "dense"}}, PER_TENSOR),
        ({}, None),
        ({"quant_method": "gptq", "bits": 4}, "weights quantised by 'gptq' (not fp8 or compressed-tensors)"),
        ({"quant_method": ["fp8"]}, "weights quantised by ['fp8'] (not fp8 or compressed-tensors)"),
        ("int4", "quantised weights ('int4')"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8 weights in 'e5m2' with scales in 'float' (not e4m3 and float)"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "FP8 weights in blocks of [128]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "FP8 weights in blocks of [0, 128]"),
        ({"quant_method": "fp8", "ignored_layers": ["model.layers.0.mlp.down_proj"]},
         "FP8 weights but in 'model.layers.0.mlp.down_proj'"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"},
         "FP8 weights in 'e4m3' with scales in 'ue8m0' (not e4m3 and float)"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, PER_TENSOR),
        ({"quant_method": "fp8", "modules_to_not_convert": ["layers.0.mlp"]}, "FP8 weights but in 'layers.0.mlp'"),
        ({**COMPRESSED, "ignore": ["layers.0.mlp"]}, "FP8 weights but in 'layers.0.mlp'"),
        ({"quant_method": "fp8", "ignored_layers": [5]}, "FP8 weights but in 5"),
        ({**COMPRESSED, "kv_cache_scheme": {"num_bits": 8}}, OTHER_NUMBERS),
        (compressed("tensor", num_bits=4), OTHER_NUMBERS),
        (compressed("tensor", type="int"), OTHER_NUMBERS),
        (compressed("tensor", symmetric=False), OTHER_NUMBERS),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, OTHER_NUMBERS),
        ({**COMPRESSED, "sparsity_config": "sparse"}, OTHER_NUMBERS),
        ({**COMPRESSED, "config_groups": {"a": GROUP, "b": GROUP}}, OTHER_GROUPS),
        ({**COMPRESSED, "config_groups": {"a": {**GROUP, "targets": ["re:.*mlp.*"]}}}, OTHER_GROUPS),
        ({**COMPRESSED, "config_groups": {"a": {**GROUP, "weights": None}}}, OTHER_GROUPS),
        ({**COMPRESSED, "config_groups": {"a": "Linear"}}, OTHER_GROUPS),
        ({**COMPRESSED, "config_groups": [GROUP]}, OTHER_GROUPS),
        (compressed(["tensor"]), "weights quantised by compressed-tensors per ['tensor'] (not tensor, channel, block)"),
        (compressed("group"), "weights quantised by compressed-tensors per 'group' (not tensor, channel, block)"),
    ],
)  # fmt: skip
def test_configs_of_others_are_read_or_named(config, expected):
    assert fp8_scheme({"quantization_config": config}) == expected
    assert fp8_scheme({"compression_config": config}) == expected  # as compressed-tensors called it at first


def test_a_config_that_is_not_read_is_refused_by_name_before_anything_is_loaded(tmp_path):
    spec = fp8_spec(tmp_path, PER_BLOCK)
    file = Path(spec.path or "") / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    file.write_text(json.dumps(config))
    (file.parent / SINGLE_FILE).unlink()
    message = load_error(replace(spec, **load_hf_config(spec.path)))
    assert "has weights quantised by 'awq' (not fp8 or compressed-tensors), which the real engine does not" in message
