"""The config.json of published checkpoints: a simulated model has as many weights as transformers's, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from testbed.specs.hf_config import load_hf_config, why_uncounted
from testbed.specs.model import ModelSpec

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def shape(architecture: str, kind: str, sizes: tuple[int, ...], length: int, **more: Any) -> dict[str, Any]:
    """sizes: hidden, intermediate, layers, heads, KV heads, vocabulary."""
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "vocab_size",
    )  # fmt: skip
    common = {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "max_position_embeddings": length}
    sized = dict(zip(names, sizes, strict=True))
    return {"architectures": [f"{architecture}ForCausalLM"], "model_type": kind, **common, **sized, **more}


# Each with the bytes of K and V of a token, counted by hand: 2 x layers x KV heads x head size x 2 bytes.
COUNTED: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama-3.2-1B": (32_768, shape("Llama", "llama", (2048, 8192, 16, 32, 8, 128256), 131072, rope_scaling=LLAMA3,
        tie_word_embeddings=True, head_dim=64)),
    "Llama-3.2-1B by transformers 5": (32_768, shape("Llama", "llama", (2048, 8192, 16, 32, 8, 128256), 131072,
        tie_word_embeddings=True, dtype="bfloat16", rope_parameters={**LLAMA3, "rope_theta": 5e5})),
    "Mistral-Nemo": (163_840, shape("Mistral", "mistral", (5120, 14336, 40, 32, 8, 131072), 131072, head_dim=128,
        sliding_window=None)),
    "Qwen2.5-7B": (57_344, shape("Qwen2", "qwen2", (3584, 18944, 28, 28, 4, 152064), 131072, sliding_window=131072,
        use_sliding_window=False)),
    "Qwen3-4B": (147_456, shape("Qwen3", "qwen3", (2560, 9728, 36, 32, 8, 151936), 40960, head_dim=128,
        tie_word_embeddings=True)),
    "Qwen3-30B-A3B": (98_304, shape("Qwen3Moe", "qwen3_moe", (2048, 6144, 48, 32, 4, 151936), 40960, head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)),
    "Mixtral-8x7B": (131_072, shape("Mixtral", "mixtral", (4096, 14336, 32, 32, 8, 32000), 32768, num_local_experts=8,
        num_experts_per_tok=2)),
    "Phi-4": (204_800, shape("Phi3", "phi3", (5120, 17920, 40, 40, 10, 100352), 16384, pad_token_id=100349)),
    "GLM-4-9B": (40_960, shape("Glm4", "glm4", (4096, 13696, 40, 32, 2, 151552), 32768, head_dim=128,
        partial_rotary_factor=0.5, pad_token_id=151329)),
    "GLM-4-9B of 2024": (40_960, shape("Glm", "glm", (4096, 13696, 40, 32, 2, 151552), 131072, head_dim=128,
        attention_bias=True)),
    "Granite-3.1-8B": (163_840, shape("Granite", "granite", (4096, 12800, 40, 32, 8, 49155), 131072,
        tie_word_embeddings=True)),
    "OLMo-7B": (524_288, shape("Olmo", "olmo", (4096, 11008, 32, 32, 32, 50304), 2048)),
    "OLMo-2-7B": (524_288, shape("Olmo2", "olmo2", (4096, 11008, 32, 32, 32, 100352), 4096, pad_token_id=100277)),
    "SmolLM3-3B": (73_728, shape("SmolLM3", "smollm3", (2048, 11008, 36, 16, 4, 128256), 65536,
        tie_word_embeddings=True)),
    "Command-R": (1_310_720, shape("Cohere", "cohere", (8192, 22528, 40, 64, 64, 256000), 131072,
        tie_word_embeddings=True)),
    "ERNIE-4.5-0.3B": (18_432, shape("Ernie4_5", "ernie4_5", (1024, 3072, 18, 16, 2, 103424), 131072, head_dim=128,
        tie_word_embeddings=True)),
    "Gemma-7B": (458_752, shape("Gemma", "gemma", (3072, 24576, 28, 16, 16, 256000), 8192, head_dim=256,
        tie_word_embeddings=True)),
    "Helium-1-2B": (245_760, shape("Helium", "helium", (2560, 7040, 24, 20, 20, 48000), 4096, head_dim=128)),
    "Seed-OSS-36B": (262_144, shape("SeedOss", "seed_oss", (5120, 27648, 64, 80, 8, 155136), 524288, head_dim=128,
        attention_bias=True, attention_out_bias=False)),
    "StableLM-3B": (327_680, shape("StableLm", "stablelm", (2560, 6912, 32, 32, 32, 50304), 4096)),
}  # fmt: skip
MOE = {"moe_intermediate_size": 1408, "num_experts_per_tok": 4}
UNCOUNTED = {
    "DeepSeek-V2-Lite": shape(
        "DeepseekV2", "deepseek_v2", (2048, 10944, 27, 16, 16, 102400), 163840, rope_scaling=YARN, kv_lora_rank=512,
        n_routed_experts=64, n_shared_experts=2, **MOE,
    ),
    "Qwen1.5-MoE": shape(
        "Qwen2Moe", "qwen2_moe", (2048, 5632, 24, 16, 16, 151936), 8192, num_experts=60, **MOE
    ),
    "gpt-oss-20b": shape("GptOss", "gpt_oss", (2880, 2880, 24, 64, 8, 201088), 131072, num_local_experts=32),
    "Gemma-2-9B": shape("Gemma2", "gemma2", (3584, 14336, 42, 16, 8, 256000), 8192, sliding_window=4096),
    "Gemma-3-12B by transformers 5": shape(
        "Gemma3", "gemma3_text", (3840, 15360, 48, 16, 8, 262208), 131072, rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "Falcon-7B": shape("Falcon", "falcon", (4544, 18176, 32, 71, 1, 65024), 2048, multi_query=True),
    "Pythia-6.9B": shape("GPTNeoX", "gpt_neox", (4096, 16384, 32, 32, 32, 50432), 2048),
    "a Qwen2 with windows": shape(
        "Qwen2", "qwen2", (3584, 18944, 28, 28, 4, 152064), 131072, use_sliding_window=True, sliding_window=4096,
        max_window_layers=21,
    ),
    "a Qwen3-MoE with dense layers": shape(
        "Qwen3Moe", "qwen3_moe", (2048, 6144, 48, 32, 4, 151936), 40960, num_experts=128, mlp_only_layers=[0], **MOE
    ),
}  # fmt: skip


def spec_of(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelSpec("m", **load_hf_config(folder), path=str(folder))


@pytest.mark.parametrize("name", COUNTED)
def test_a_counted_model_has_the_weights_of_transformers(tmp_path: Path, name: str) -> None:
    kv_bytes, config = COUNTED[name]
    spec = spec_of(tmp_path, config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert why_uncounted(spec) == ""
    assert spec.num_parameters == pytest.approx(model.num_parameters(), rel=1e-3)
    assert spec.weight_bytes() == 2 * spec.num_parameters
    assert spec.kv_bytes_per_token() == kv_bytes
    assert spec.max_length == config["max_position_embeddings"]


@pytest.mark.parametrize("name", [name for name in COUNTED if not name.startswith(("StableLM", "GLM"))])
def test_whether_embeddings_are_tied_is_as_in_transformers_where_a_file_does_not_say(tmp_path: Path, name: str) -> None:
    config = {key: value for key, value in COUNTED[name][1].items() if key != "tie_word_embeddings"}
    spec = spec_of(tmp_path, config)
    assert spec.tie_word_embeddings == AutoConfig.from_pretrained(tmp_path).tie_word_embeddings


@pytest.mark.parametrize("name", UNCOUNTED)
def test_a_model_of_another_shape_is_not_counted(tmp_path: Path, name: str) -> None:
    assert why_uncounted(spec_of(tmp_path, UNCOUNTED[name]))
