"""A Hugging Face config.json is read whole, or one line says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.errors import ConfigError, ModelError
from testbed.hf_config import load_hf_config
from testbed.specs import ModelSpec

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
        ("[]", "holds no JSON object"),
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
        ({"rope_theta": "1e6"}, "'rope_theta' is '1e6'; it must be a finite number above 0"),
        ({"rope_parameters": [1]}, "'rope_parameters' is [1]"),
        ({"rms_norm_eps": None}, "'rms_norm_eps' is None"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
        ({"torch_dtype": "int3"}, "'dtype' is 'int3'; it must be one of float32, bfloat16"),
        ({"dtype": ["float32"]}, "'dtype' is ['float32']"),
        ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' is 'no'"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' is '</s>'"),
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
    config.write_text(
        json.dumps({"architectures": ["OPTForCausalLM"], "word_embed_proj_dim": 32, "ffn_dim": 9, **shape})
    )
    spec = ModelSpec("opt", **load_hf_config(config))  # tied, as transformers has it where the file is silent
    assert spec.num_embedding_parameters == 100 * 32 + 2 * 32 * 64 + (2048 + 2) * 64
    assert spec.num_mlp_parameters == 2 * 64 * 9


@pytest.mark.parametrize("field", ["sliding_window", "word_embed_proj_dim", "head_dim"])
def test_a_size_of_zero_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{field} is 0; it must be at least 1"):
        ModelSpec("m", **{field: 0})
