"""Weights come in whole and in the right place, or one line says what is wrong."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from real import loader
from real.checkpoint import make_checkpoint
from real.loader import INDEX_FILE, SINGLE_FILE
from real.models.registry import MODELS
from testbed.errors import ConfigError, ModelError
from testbed.specs.hf_config import ARCHITECTURES as KNOWN
from testbed.specs.hf_config import load_hf_config
from testbed.specs.model import ModelSpec
from tests.real.engine_helpers import ARCHITECTURES, checkpoint, load_error, row, step_logits, tiny_backend, tiny_spec

K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def spec(tmp_path):
    return checkpoint(tmp_path, tiny_spec())


def edit(spec: ModelSpec, change) -> None:
    file = Path(spec.path) / SINGLE_FILE
    weights = load_file(file)
    change(weights)
    save_file(weights, file)


def logits_of(spec: ModelSpec, **options) -> torch.Tensor:
    return step_logits(tiny_backend(spec, **options), row(0, [1, 2, 3, 4, 5], [7, 1]))


def test_a_checkpoint_is_a_function_of_spec_and_seed_and_reads_back_as_its_spec(tmp_path):
    spec = tiny_spec()
    one, two, other = (make_checkpoint(tmp_path / name, spec, seed) for name, seed in [("a", 1), ("b", 1), ("c", 2)])
    assert (one / SINGLE_FILE).read_bytes() == (two / SINGLE_FILE).read_bytes() != (other / SINGLE_FILE).read_bytes()
    assert ModelSpec(name=spec.name, **load_hf_config(one)) == spec


def test_a_checkpoint_is_never_written_over_something(spec):
    with pytest.raises(ModelError, match="not an empty folder"):
        make_checkpoint(spec.path, tiny_spec())


def test_dummy_weights_depend_on_the_seed_alone(tmp_path):
    spec = checkpoint(tmp_path, tiny_spec())  # drawn with seed 11
    torch.testing.assert_close(logits_of(tiny_spec(), seed=11), logits_of(spec), atol=0, rtol=0)
    assert not torch.equal(logits_of(tiny_spec(), seed=12), logits_of(spec))
    torch.testing.assert_close(logits_of(spec, load_format="dummy", seed=12), logits_of(tiny_spec(), seed=12))


@pytest.mark.parametrize("seed", [2**64 + 12, 2**80 + 12])
def test_a_seed_of_more_than_64_bits_is_reduced(seed):
    assert torch.equal(logits_of(tiny_spec(), seed=seed), logits_of(tiny_spec(), seed=12))


def test_sharded_files_load_like_a_single_one(spec):
    expected = logits_of(spec)
    folder = Path(spec.path)
    weights = load_file(folder / SINGLE_FILE)
    names = sorted(weights)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: weights[name] for name in members}, folder / file)
    (folder / SINGLE_FILE).unlink()
    weight_map = {name: file for file, members in shards.items() for name in members}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits_of(spec), expected)
    (folder / "two.safetensors").unlink()
    assert "names two.safetensors, which is not there" in load_error(spec)
    for name in ("../one.safetensors", 3):
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
        assert f"names {name!r}; expected the name of a file beside it" in load_error(spec)


def test_weights_are_converted_to_the_format_asked_for(spec):
    edit(spec, lambda weights: weights.update({name: tensor.bfloat16() for name, tensor in weights.items()}))
    assert torch.equal(logits_of(spec), logits_of(spec))
    assert logits_of(spec, dtype="bfloat16").dtype == torch.float32
    torch.testing.assert_close(logits_of(spec, dtype="bfloat16"), logits_of(spec), atol=0.15, rtol=0)


def test_a_tied_checkpoint_may_repeat_its_head(spec):
    expected = logits_of(spec)
    edit(spec, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits_of(spec), expected)


def test_a_tied_checkpoint_may_have_its_head_alone(spec):
    """As transformers reads it."""
    expected = logits_of(spec)
    edit(spec, lambda weights: weights.update({"lm_head.weight": weights.pop("model.embed_tokens.weight")}))
    assert torch.equal(logits_of(spec), expected)
    edit(spec, lambda weights: weights["lm_head.weight"].__setitem__((0, 0), float("nan")))
    assert "weight 'lm_head.weight' has values that are not finite" in load_error(spec)


BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (K_PROJ, None, f"lacks weight '{K_PROJ}' of shape [32, 64]"),
        (K_PROJ, torch.zeros(16, 64), f"weight '{K_PROJ}' has shape [16, 64], the model config expects [32, 64]"),
        (K_PROJ, torch.ones(32, 64, dtype=torch.int8), "is stored as I8; expected one of F32"),
        (BIAS, torch.zeros(64), f"'{BIAS}', which the model does not have"),
    ],
    ids=["missing", "another shape", "integers", "unknown"],
)
def test_a_weight_that_the_model_does_not_expect_is_named_with_its_file(spec, name, tensor, said):
    edit(spec, lambda weights: weights.pop(name) if tensor is None else weights.update({name: tensor}))
    message = load_error(spec)
    assert said in message
    assert spec.path in message
    assert SINGLE_FILE in message or tensor is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_values_that_are_not_finite(spec, value):
    edit(spec, lambda weights: weights[K_PROJ].__setitem__((0, 0), value))
    options = {"dtype": "float16"} if value == 1e30 else {}  # too large for it
    message = load_error(spec, **options)
    assert SINGLE_FILE in message
    assert f"{K_PROJ!r} has values that are not finite, as {options.get('dtype', 'float32')};" in message


def test_a_config_with_fewer_layers_than_the_checkpoint_is_noticed(spec):
    assert "model.layers.1." in load_error(replace(spec, num_hidden_layers=1))


def test_truncated_file(spec):
    file = Path(spec.path) / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:1000])
    assert "not a readable safetensors file" in load_error(spec)


def test_other_formats_are_named(spec):
    folder = Path(spec.path)
    (folder / SINGLE_FILE).rename(folder / "pytorch_model.bin")
    assert "found pytorch_model.bin, which is not read" in load_error(spec)
    (folder / "pytorch_model.bin").unlink()
    assert "found no weights" in load_error(spec)


def test_no_model_at_the_path(tmp_path):
    assert "no model at" in load_error(replace(tiny_spec(), path=str(tmp_path / "nowhere")))
    assert "model.path is not set" in load_error(tiny_spec(), load_format="safetensors")


def test_index_that_is_none(spec):
    (Path(spec.path) / INDEX_FILE).write_text("[]")
    assert "not an index of safetensors" in load_error(spec)


def test_an_index_left_beside_a_whole_file_is_not_guessed_about(spec):
    """transformers takes the one, vLLM the other."""
    folder = Path(spec.path)
    weights = load_file(folder / SINGLE_FILE)
    (folder / "model-00001-of-00001.safetensors").write_bytes((folder / SINGLE_FILE).read_bytes())
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert f"has {SINGLE_FILE} and also {INDEX_FILE}, which names others" in load_error(spec)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(weights, SINGLE_FILE)}))
    assert logits_of(spec).isfinite().all()


def test_a_config_file_alone_gives_random_weights(spec):
    backend = tiny_backend(replace(spec, path=f"{spec.path}/config.json"))
    assert backend.load_format == "dummy"
    assert tiny_backend(spec).load_format == "safetensors"


def test_unsupported_architecture(tmp_path):
    message = load_error(tiny_spec(architecture="MambaForCausalLM"))
    assert "'MambaForCausalLM'" in message
    assert "supported: Qwen3ForCausalLM" in message


def test_each_architecture_has_its_defaults_and_a_small_model_of_the_tests():
    """Without defaults of its own a key that config.json leaves out is another architecture's: wrong without a word."""
    assert set(MODELS) <= set(KNOWN)
    assert set(MODELS) == {tiny_spec(**changes).architecture for changes in ARCHITECTURES.values()}


MIXED = ["full_attention", "sliding_attention"]
OPTIONS = [
    ("qwen3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope type 'longrope'"),
    ("qwen3", {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "in a part of each"),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}, "sliding-window attention in"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": MIXED}, "in some layers only"),
    ("qwen3", {"hidden_act": "gelu"}, "activation 'gelu' (not silu)"),
    ("qwen3 moe", {"mlp_only_layers": [0]}, "experts in some layers only"),
    ("qwen3 moe", {"decoder_sparse_step": 2}, "experts in some layers only"),
    ("qwen3 moe", {"moe_intermediate_size": 12}, "experts.0.down_proj.weight' has shape [64, 24]"),
    ("qwen3 moe", {"num_experts": 7}, "mlp.gate.weight' has shape [6, 64], the model config expects [7, 64]"),
    ("qwen3", {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}, "mlp.down_proj.weight', which the model"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "weights quantised by 'gptq'"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "is stored as F32; expected one of F8_E4M3"),
    ("llama", {"attention_bias": True}, "lacks weight 'model.layers.0.self_attn.q_proj.bias' of shape [64] and 7 more"),
    ("llama", {"tie_word_embeddings": True}, "'lm_head.weight' differs from 'model.embed_tokens.weight'"),
    ("opt", {"activation_function": "silu"}, "activation 'silu' (not relu or gelu)"),
    ("opt", {"enable_bias": False}, "which the model does not have"),
    ("opt", {"_remove_final_layer_norm": True}, "its final LayerNorm removed"),
    ("opt", {"layer_norm_elementwise_affine": False}, "LayerNorm without weights"),
    ("opt", {"do_layer_norm_before": False}, "'model.decoder.final_layer_norm.bias', which the model does not have"),
    ("opt", {"tie_word_embeddings": False}, "config.json lack tie_word_embeddings: true?"),
]


def configured(spec: ModelSpec, option: dict[str, object]) -> ModelSpec:
    """The spec that the folder's config.json gives, once it has the option too."""
    file = Path(spec.path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | option))
    return replace(spec, **load_hf_config(spec.path))


@pytest.mark.parametrize(("name", "option", "what"), OPTIONS)
def test_options_that_would_change_the_result_are_refused(tmp_path, name, option, what):
    spec = checkpoint(tmp_path, tiny_spec(**ARCHITECTURES[name]))
    message = load_error(configured(spec, option))
    assert what in message
    assert spec.path in message


def test_a_spec_that_disagrees_with_its_folder_is_refused(spec):
    configured(spec, {"rope_theta": 5e5})
    assert "has rope_theta 10000.0, and" in load_error(spec)
    assert "says 500000.0" in load_error(spec)


@pytest.mark.parametrize(("change", "what"), [({"norm_topk_prob": False}, "norm_topk_prob False"),
                                              ({"num_experts_per_tok": 3}, "num_experts_per_tok 3")])  # fmt: skip
def test_what_no_weight_gives_away_of_experts_is_compared(tmp_path, change, what):
    spec = checkpoint(tmp_path, tiny_spec(**ARCHITECTURES["qwen3 moe"]))
    assert f"has {what}, and" in load_error(replace(spec, **change))


def test_a_missing_expert_is_named(tmp_path):
    spec = checkpoint(tmp_path, tiny_spec(**ARCHITECTURES["qwen3 moe"]))
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    edit(spec, lambda weights: weights.pop(name))
    assert f"lacks weight {name!r} of shape [24, 64]; the checkpoint is incomplete" in load_error(spec)


def test_experts_belong_to_their_architecture():
    experts = {name: value for name, value in ARCHITECTURES["qwen3 moe"].items() if name != "architecture"}
    assert "has num_experts 6, which the real engine does not" in load_error(tiny_spec(**experts))
    assert "has num_experts None, which" in load_error(tiny_spec(architecture="Qwen3MoeForCausalLM"))


def test_learned_positions_end(tmp_path):
    spec = checkpoint(tmp_path, tiny_spec(**ARCHITECTURES["opt"], max_position_embeddings=32))
    with pytest.raises(ConfigError, match="set to 33 tokens, and model tiny-test has learned positions for 32"):
        tiny_backend(spec, max_model_len=33)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_checkpoints_read_back_as_their_spec(tmp_path, name):
    spec = tiny_spec(**ARCHITECTURES[name])
    assert ModelSpec(name=spec.name, **load_hf_config(make_checkpoint(tmp_path / "m", spec))) == spec


def test_a_checkpoint_of_the_model_without_its_head_lacks_a_level_of_names(tmp_path):
    spec = checkpoint(tmp_path, tiny_spec(**ARCHITECTURES["opt"]))
    expected = logits_of(spec)

    def rename(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            weights[name.removeprefix("model.")] = weights.pop(name)

    edit(spec, rename)
    assert torch.equal(logits_of(spec), expected)


def test_weights_have_a_bar_on_a_terminal_of_the_main_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(loader._shown("ab", 2)) == ["a", "b"]
    assert not loader._shown("ab", 2).disable
    for name, told in (("is_spawned", True), ("parent_process", "a sweep's")):
        with monkeypatch.context() as patch:
            patch.setattr(loader, name, lambda told=told: told)
            assert loader._shown("ab", 2) == "ab"
