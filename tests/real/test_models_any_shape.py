"""Any shape of any architecture, cut and shared out in any way, gives the logits of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from real.models.registry import MODELS
from testbed.specs.model import ModelSpec, RopeScaling
from tests.real.engine_helpers import TOLERANCE, checkpoint, row, step_logits, tiny_backend
from tests.real.thread_ranks import on_ranks

SCALINGS = [
    None, RopeScaling("linear", 3.0), RopeScaling("dynamic", 2.0), RopeScaling("llama3", 4.0, 16),
    RopeScaling("yarn", 2.5, 32, beta_fast=4.0),
]  # fmt: skip


def experts(draw: Any) -> dict[str, Any]:
    num = draw(st.integers(1, 9))
    return {
        "num_experts": num,
        "num_experts_per_tok": draw(st.integers(1, num)),
        "moe_intermediate_size": 2 * draw(st.integers(1, 20)),
        "norm_topk_prob": draw(st.booleans()),
    }


@st.composite
def specs(draw: Any) -> ModelSpec:
    architecture = draw(st.sampled_from([*MODELS]))
    is_opt, has_bias = architecture == "OPTForCausalLM", draw(st.booleans())
    kv_heads, group = draw(st.sampled_from([(1, 2), (1, 4), (2, 1), (2, 3), (4, 1), (4, 2)]))
    heads = kv_heads * group
    head_dim = draw(st.sampled_from([1, 3, 5, 8, 15, 64]) if is_opt else st.sampled_from([4, 6, 8, 20, 64, 96, 128]))
    # transformers' Llama wants a hidden size that is a multiple of the heads, its OPT has head_dim * heads
    hidden = heads * (head_dim if is_opt else draw(st.sampled_from([1, 4, 7])))
    return ModelSpec(
        name="any", architecture=architecture, hidden_size=hidden, intermediate_size=2 * draw(st.integers(1, 40)),
        num_hidden_layers=draw(st.integers(1, 3)), num_attention_heads=heads,
        num_key_value_heads=heads if is_opt else kv_heads, head_dim=head_dim, vocab_size=draw(st.integers(40, 130)),
        max_position_embeddings=draw(st.sampled_from([32, 200])), tie_word_embeddings=draw(st.booleans()),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-3])), rope_theta=draw(st.sampled_from([1e4, 5e5])), dtype="float32",
        sliding_window=draw(st.sampled_from([None, 1, 5, 30])) if architecture == "MistralForCausalLM" else None,
        word_embed_proj_dim=draw(st.sampled_from([None, 3, 10])) if is_opt else None,
        rope_scaling=None if is_opt else draw(st.sampled_from(SCALINGS)),
        attention_bias=has_bias and architecture not in ("MistralForCausalLM", "Qwen2ForCausalLM"),
        mlp_bias=has_bias and (is_opt or architecture == "LlamaForCausalLM"),
        hidden_act=draw(st.sampled_from(["relu", "gelu"])) if is_opt else "silu",
        **(experts(draw) if architecture == "Qwen3MoeForCausalLM" else {}),
        do_layer_norm_before=draw(st.booleans()) if is_opt else True,
    )  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    spec=specs(), num_ranks=st.sampled_from([1, 2]), block_size=st.sampled_from([1, 3, 4, 16]),
    cuts=st.sets(st.integers(1, 25)), seed=st.integers(0, 99),
)  # fmt: skip
def test_logits_are_those_of_transformers(spec, num_ranks, block_size, cuts, seed):
    rng = random.Random(seed)
    tokens = [rng.randrange(spec.vocab_size) for _ in range(26)]
    table = rng.sample(range(64), -(-26 // block_size))
    with TemporaryDirectory() as folder:
        spec = checkpoint(Path(folder), spec)
        model = AutoModelForCausalLM.from_pretrained(
            spec.path, dtype=torch.float32, experts_implementation="eager"
        ).eval()
        with torch.inference_mode():  # in float64: float32's own error may be larger than ours
            expected = model.double()(torch.tensor([tokens])).logits[:, -1].float()

        def computed(**group: Any) -> torch.Tensor:
            backend = tiny_backend(spec, block_size=block_size, sliding_window=spec.sliding_window, **group)
            start = 0
            for end in sorted(cuts):
                step_logits(backend, row(0, tokens, table, start=start, end=end, samples=False))
                start = end
            return step_logits(backend, row(0, tokens, table, start=start))

        results = [computed()] if num_ranks == 1 else on_ranks(2, lambda rank: computed(group=rank))
    scale = max(1.0, float(expected.abs().max()))
    for logits in results:
        torch.testing.assert_close(logits, expected, atol=TOLERANCE * scale, rtol=0)
