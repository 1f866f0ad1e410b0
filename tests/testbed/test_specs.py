"""A Hugging Face config.json is read whole, or one line says what is wrong with it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import ConfigError, ModelError
from testbed.specs.device import DeviceSpec
from testbed.specs.hf_config import load_hf_config
from testbed.specs.model import ModelSpec, Recommended, RopeScaling, check_ranks

GOOD = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}


def error_of(path: Path, content: str | bytes) -> str:
    file = path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError) as error:
        load_hf_config(path)
    message = str(error.value)
    assert str(file) in message
    assert "\n" not in message
    return message


def test_what_is_absent_has_the_defaults_of_hugging_face(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GOOD, "max_position_embeddings": None, "eos_token_id": []}))
    spec = ModelSpec(name="m", **load_hf_config(tmp_path))
    assert (spec.head_dim, spec.intermediate_size, spec.max_position_embeddings) == (16, 256, 2048)
    assert spec.eos_token_id is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x04\xff", "not JSON: not UTF-8 text"),
        ("{", "is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "is not JSON"),
        ("[]", "is not a JSON object"),
    ],
    ids=range(5),
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str | bytes, message: str) -> None:
    assert message in error_of(tmp_path, content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": [7]}, "must name one architecture"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "64"}, "'hidden_size' is '64'"),
        ({"rope_theta": 0}, "'rope_theta' is 0; it must be a number above 0, at most 1e12"),
        ({"rope_theta": "1e6"}, "'rope_theta' is '1e6'; it must be a number above 0, at most 1e12"),
        ({"rope_parameters": [1]}, "'rope_parameters' is [1]"),
        ({"rms_norm_eps": None}, "'rms_norm_eps' is null"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
        ({"torch_dtype": "int3"}, "'dtype' is 'int3'; it must be one of float32, bfloat16"),
        ({"dtype": ["float32"]}, "'dtype' is ['float32']"),
        ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' is 'no'"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' is '</s>'"),
        ({"attention_bias": "yes"}, "'attention_bias' is 'yes'; it must be true or false"),
        ({"hidden_act": 3}, "'hidden_act' is 3"),
        ({"rope_scaling": "linear"}, "'rope_scaling' is 'linear'; it must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' lacks 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "'factor' is 0; it must be a number above 0, at most 1e12"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling 'llama3' lacks 'low_freq_factor'"),
        ({"rope_parameters": {"full_attention": {}}}, "'rope_parameters' differs by the kind of layer"),
        ({"layer_types": 7}, "'layer_types' is 7; it must be a list of 2, each full_attention or sliding_attention"),
        ({"layer_types": ["full_attention"]}, "'layer_types' is ['full_attention']; it must be a list of 2"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "it must be a list of 2"),
        ({"max_window_layers": "2"}, "'max_window_layers' is '2'; it must be a whole number from 0"),
    ],
)
def test_a_value_that_cannot_be_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    assert message in error_of(tmp_path, json.dumps({**GOOD, **change}))


def test_another_kind_of_architecture_is_named_before_its_missing_fields(tmp_path: Path) -> None:
    message = error_of(tmp_path, json.dumps({"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "vocab_size": 50257}))
    assert "architecture 'GPT2LMHeadModel' is not supported: its config has no hidden_size" in message
    assert "LlamaForCausalLM" in message


def test_a_window_and_a_narrow_embedding_are_read(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    config.write_text(json.dumps({"architectures": ["MistralForCausalLM"], "sliding_window": 4096, **shape}))
    assert load_hf_config(config)["sliding_window"] == 4096
    config.write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "sliding_window": 4096, **shape}))
    assert load_hf_config(config)["sliding_window"] is None  # Qwen's is not used unless its config says so
    off = {"sliding_window": 0, "use_sliding_window": False}  # as transformers writes it
    config.write_text(json.dumps({"architectures": ["Qwen2MoeForCausalLM"], **off, **shape}))
    assert load_hf_config(config)["sliding_window"] is None
    config.write_text(
        json.dumps({"architectures": ["OPTForCausalLM"], "word_embed_proj_dim": 32, "ffn_dim": 9, **shape})
    )
    spec = ModelSpec("opt", **load_hf_config(config))  # tied, as transformers has it where the file is silent
    assert spec.num_embedding_parameters == 100 * 32 + 2 * 32 * 64 + (2048 + 2) * 64
    assert spec.num_mlp_parameters == 2 * 64 * 9


def test_a_mixtral_has_experts_as_large_as_its_mlp(tmp_path: Path) -> None:
    """It has no key for the size of an expert, and another for their number."""
    mixtral = {**GOOD, "architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2, "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps({**mixtral, "intermediate_size": 96, "num_experts_per_tok": 2}))
    spec = ModelSpec("m", **load_hf_config(tmp_path))
    assert spec.experts == (4, 2, 96)
    assert spec.norm_topk_prob
    assert spec.num_mlp_parameters == 4 * 3 * 64 * 96 + 4 * 64
    assert spec.num_active_mlp_parameters == 2 * 3 * 64 * 96 + 4 * 64


ROPE: list[tuple[dict[str, object], RopeScaling | None, float, int]] = [
    ({"rope_theta": 5e5}, None, 5e5, 2048),
    ({"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, None, 7.0, 2048),
    ({"rope_scaling": {"type": "linear", "factor": 4}}, RopeScaling("linear", 4), 1e4, 8192),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 9}},
     RopeScaling("dynamic", 2.0), 1e4, 4096),
    ({"rope_parameters": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512}},
     RopeScaling("yarn", 4.0, 512), 1e4, 2048),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2, "high_freq_factor": 5}},
     RopeScaling("llama3", 8.0, low_freq_factor=2, high_freq_factor=5), 1e4, 2048),
    ({"rope_scaling": {"type": "su", "short_factor": [1.0]}}, RopeScaling("su"), 1e4, 2048),
    ({"rope_theta": 3.0, "rope_parameters": {"rope_type": "linear", "factor": 1.5, "rope_theta": 5.0}},
     RopeScaling("linear", 1.5), 5.0, 3072),
]  # fmt: skip


@pytest.mark.parametrize(("change", "scaling", "theta", "length"), ROPE)
def test_rotary_positions_are_read_in_the_words_of_transformers_4_and_5(
    tmp_path: Path, change: dict[str, object], scaling: RopeScaling | None, theta: float, length: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GOOD, "max_position_embeddings": 2048, **change}))
    spec = ModelSpec(name="m", **load_hf_config(tmp_path))
    assert (spec.rope_scaling, spec.rope_theta, spec.max_length) == (scaling, theta, length)


SILENT: dict[str, dict[str, object]] = {  # what transformers takes where the file says nothing
    "Qwen3ForCausalLM": {"head_dim": 128, "num_key_value_heads": 32, "sliding_window": None, "eos_token_id": None},
    "Qwen3MoeForCausalLM": {
        "head_dim": 16,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    "Qwen2ForCausalLM": {"head_dim": 16, "num_key_value_heads": 32, "sliding_window": None, "eos_token_id": None},
    "LlamaForCausalLM": {"head_dim": 16, "num_key_value_heads": 4, "sliding_window": None, "eos_token_id": 2},
    "MistralForCausalLM": {"head_dim": 16, "num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2},
    "MixtralForCausalLM": {"num_key_value_heads": 8, "num_experts": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "Phi3ForCausalLM": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 32000},
    "OPTForCausalLM": {"head_dim": 16, "hidden_act": "relu", "attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("architecture", SILENT)
def test_a_silent_file_has_the_defaults_of_its_architecture(tmp_path: Path, architecture: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GOOD, "architectures": [architecture]}))
    found = load_hf_config(tmp_path)
    assert {key: found[key] for key in SILENT[architecture]} == SILENT[architecture]


def test_biases_that_an_architecture_does_not_have_are_not_read(tmp_path: Path) -> None:
    cases = {
        "MistralForCausalLM": (False, False),
        "Qwen2ForCausalLM": (False, False),
        "Qwen3ForCausalLM": (True, False),
    }
    for architecture, expected in cases.items():
        config = {**GOOD, "architectures": [architecture], "attention_bias": True, "mlp_bias": True}
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = load_hf_config(tmp_path)
        assert (found["attention_bias"], found["mlp_bias"]) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_attention_heads (6) must be a multiple of num_key"),
        ({"dtype": "int4"}, "model.dtype is 'int4'; choose one of float32, "),
        ({"num_experts": 8, "moe_intermediate_size": 4}, "model.num_experts_per_tok is null; set all of num_experts, "),
        ({"num_experts": 8}, "model.num_experts_per_tok is null; set all of num_experts, num_experts_per_tok, "),
        ({"num_experts": 0, "num_experts_per_tok": 1, "moe_intermediate_size": 4}, "model.num_experts is 0; it must"),
        (
            {"num_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 4},
            "(3) must be at most num_experts (2)",
        ),
    ],
)
def test_a_model_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ModelSpec("m", **fields)


def test_the_most_that_can_be_is_a_model() -> None:
    spec = ModelSpec("m", word_embed_proj_dim=9, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=4)
    assert (spec.embedding_size, spec.experts) == (9, (2, 2, 4))
    spec = ModelSpec("m", num_attention_heads=12, num_key_value_heads=6)
    assert [spec.num_kv_heads_per_rank(size) for size in (1, 2, 3, 12)] == [6, 3, 2, 1]
    check_ranks(spec, 12)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 4; it must divide the 6 KV heads of model m, or"):
        check_ranks(spec, 4)
    with pytest.raises(ConfigError, match=r"^model\.recommended\.top_p is 2"):
        Recommended(top_p=2)
    with pytest.raises(ConfigError, match=r"^model\.rope_scaling\.factor is 0; it must be a number above 0"):
        RopeScaling("linear", factor=0)


def test_a_device_whose_link_has_no_rate_has_none() -> None:
    DeviceSpec("d", interconnect="pcie_p2p", interconnect_bytes_per_s=0)
    with pytest.raises(ConfigError, match=r"interconnect=nvlink, and d has none: choose pcie_p2p or pcie_host"):
        DeviceSpec("d", interconnect="nvlink")
    with pytest.raises(ConfigError, match=r"interconnect=xgmi, and d has none"):
        DeviceSpec("d", interconnect="xgmi", interconnect_bytes_per_s=0)


@pytest.mark.parametrize("field", ["sliding_window", "word_embed_proj_dim", "head_dim"])
def test_a_size_of_zero_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{field} is 0; it must be from 1 to "):
        ModelSpec("m", **{field: 0})
