"""Whole generations: greedy tokens are those of transformers, and folders that transformers wrote just work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.generation import GenerateDecoderOnlyOutput

from testbed.core.request import Request, SamplingParams
from testbed.specs.hf_config import load_hf_config
from testbed.specs.model import ModelSpec
from tests.real.engine_helpers import ARCHITECTURES, TOLERANCE, checkpoint, row, step_logits, tiny_backend, tiny_spec
from tests.real.served import Requests, served
from tests.real.test_engine_under_core import PROMPTS
from tests.testbed.core_kit import make_limits

NUM_TOKENS = 24
CHECKED = (0, 1, 3, 6, 7)  # of the prompts; the others are there for company
MARGIN = 1e-4  # between the reference's best two: below it either token is right


def greedy(model, prompt: list[int]) -> Iterator[tuple[int, float]]:
    """Each token that transformers generates, and its margin."""
    output = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    assert isinstance(output, GenerateDecoderOnlyOutput)
    for token, logits in zip(output.sequences[0, len(prompt) :].tolist(), output.logits, strict=True):
        best = logits[0].topk(2).values
        yield token, float(best[0] - best[1])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(tmp_path, name):
    """With preemptions, cached prefixes and chunks of prompts on the way."""
    spec = checkpoint(tmp_path, tiny_spec(**ARCHITECTURES[name]))
    backend = tiny_backend(spec, num_gpu_blocks=24, sliding_window=spec.sliding_window)
    requests = [
        Request(f"r{i}", prompt, arrival_ns=1_000_000 * i, sampling=SamplingParams(max_tokens=NUM_TOKENS))
        for i, prompt in enumerate(PROMPTS)
    ]
    inbox = served(
        backend, Requests(requests), "unified", num_blocks=24, sliding_window=spec.sliding_window,
        limits=make_limits(budget=16, model_len=256),
    )  # fmt: skip
    assert inbox.num_cached_tokens > 0
    assert (inbox.num_preemptions > 0) == (spec.sliding_window is None)  # blocks behind a window are given back
    model = AutoModelForCausalLM.from_pretrained(spec.path, dtype=torch.float32).eval()
    num_equal = 0
    assert all(len(output) == NUM_TOKENS for output in inbox.outputs.values())
    for i in CHECKED:
        for token, (expected, margin) in zip(inbox.outputs[f"r{i}"], greedy(model, PROMPTS[i]), strict=True):
            if token != expected:
                assert margin < MARGIN
                break  # from here on the texts differ
            num_equal += 1
    assert num_equal > 0.9 * NUM_TOKENS * len(CHECKED)


SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 211}
CONFIGS = {
    "Qwen3ForCausalLM": Qwen3Config(**SIZES, intermediate_size=80, num_key_value_heads=3, head_dim=14),
    "Qwen3MoeForCausalLM": Qwen3MoeConfig(
        **SIZES, num_key_value_heads=2, head_dim=10, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=16
    ),
    "Qwen2ForCausalLM": Qwen2Config(
        **SIZES, intermediate_size=80, num_key_value_heads=2, tie_word_embeddings=True, use_sliding_window=True,
        sliding_window=6, max_window_layers=0,
    ),
    "LlamaForCausalLM": LlamaConfig(
        **SIZES, intermediate_size=80, max_position_embeddings=512, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True, eos_token_id=[9, 4],
        rope_parameters={"rope_theta": 5e4, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    ),
    "MistralForCausalLM": MistralConfig(**SIZES, intermediate_size=80, num_key_value_heads=2, sliding_window=7),
    "OPTForCausalLM": OPTConfig(**SIZES, ffn_dim=80, word_embed_proj_dim=20, do_layer_norm_before=False, init_std=0.2),
}  # fmt: skip
TRANSFORMERS_4 = {"dtype": "torch_dtype", "rope_parameters": "rope_scaling"}


def saved_by_transformers(architecture: str, folder: Path) -> torch.nn.Module:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture], dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.0 if name.endswith("bias") else 1.0, 0.2)
        else:
            torch.nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_folder_that_transformers_wrote(tmp_path, architecture):
    model = saved_by_transformers(architecture, tmp_path)
    prompt = [7, 210, 3, 99, 54, 20, 1, 0, 88, 150, 33]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[:, -1]

    def assert_right() -> None:
        spec = ModelSpec(architecture, **load_hf_config(tmp_path), path=str(tmp_path))
        assert spec.eos_token_id == (9 if architecture == "LlamaForCausalLM" else model.config.eos_token_id)
        backend = tiny_backend(spec, sliding_window=spec.sliding_window)
        step_logits(backend, row(0, prompt, [4, 2, 9], end=6, samples=False))
        logits = step_logits(backend, row(0, prompt, [4, 2, 9], start=6))
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)

    assert_right()
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for new, old in TRANSFORMERS_4.items():
        if new in config:
            config[old] = config.pop(new)
    if "rope_scaling" in config:
        config["rope_theta"] = config["rope_scaling"].pop("rope_theta")
        config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")
    if architecture == "LlamaForCausalLM":
        del config["head_dim"]  # where it is hidden_size / num_attention_heads, older files do not have it
        del config["num_key_value_heads"]
    file.write_text(json.dumps(config))
    assert_right()
