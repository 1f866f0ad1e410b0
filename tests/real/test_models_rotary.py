"""Rotary positions turn queries and keys as transformers does, under every rope scaling."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from real.layers.rotary import RotaryEmbedding, rotate
from testbed.specs.model import ModelSpec, RopeScaling
from tests.real.engine_helpers import ARCHITECTURES, TOLERANCE, checkpoint, row, step_logits, tiny_backend, tiny_spec

CPU = torch.device("cpu")
POSITIONS = torch.tensor([0, 1, 2, 7, 63, 64, 65, 500, 4095, 4096, 8191, 32767, 100_001, 131_071])


def theirs(spec: ModelSpec) -> LlamaRotaryEmbedding:
    scaling = spec.rope_scaling
    rope = {"rope_type": "default"} if scaling is None else {k: v for k, v in asdict(scaling).items() if v is not None}
    config = LlamaConfig(
        hidden_size=spec.hidden_size, num_attention_heads=spec.num_attention_heads, head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings, rope_parameters={**rope, "rope_theta": spec.rope_theta},
    )  # fmt: skip
    return LlamaRotaryEmbedding(config)


def assert_same_rotation(spec: ModelSpec, positions: torch.Tensor, reference: LlamaRotaryEmbedding) -> None:
    cos, sin = RotaryEmbedding(spec, CPU)(positions, torch.float32)
    half = spec.head_dim // 2
    for ours, other in zip((cos, sin), reference(torch.zeros(1), positions[None]), strict=True):
        # an ulp of a frequency, times the position, is an angle
        atol = 1e-6 + 2e-7 * float(positions.max())
        torch.testing.assert_close(ours[:, 0], other[0, :, :half], atol=atol, rtol=0)


numbers = {"factor": st.floats(1.0, 40.0), "original_max_position_embeddings": st.sampled_from([64, 4096, 8192, 32768])}
SCALINGS = st.one_of(
    st.none(),
    st.builds(RopeScaling, st.just("linear"), numbers["factor"]),
    st.builds(
        RopeScaling, st.just("llama3"), **numbers, low_freq_factor=st.floats(0.5, 2.0),
        high_freq_factor=st.floats(2.5, 8.0),
    ),
    st.builds(
        RopeScaling, st.just("yarn"), **numbers, beta_fast=st.floats(8.0, 64.0), beta_slow=st.floats(0.5, 4.0),
        attention_factor=st.none() | st.floats(0.5, 2.0), mscale=st.none() | st.floats(0.5, 2.0),
        mscale_all_dim=st.none() | st.floats(0.5, 2.0), truncate=st.booleans(),
    ),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    scaling=SCALINGS, head_dim=st.sampled_from([2, 6, 20, 64, 80, 96, 128, 256]), theta=st.sampled_from([1e4, 5e5, 1e6])
)
def test_rotations_are_those_of_transformers(scaling, head_dim, theta):
    spec = tiny_spec(head_dim=head_dim, rope_theta=theta, max_position_embeddings=131_072, rope_scaling=scaling)
    assert_same_rotation(spec, POSITIONS, theirs(spec))


def test_scaling_turns_otherwise_than_none():
    """Else the test above could not fail."""
    scalings = (None, RopeScaling("linear", 2.0), RopeScaling("llama3", 8.0, 4096), RopeScaling("yarn", 4.0, 4096))
    specs = [tiny_spec(head_dim=64, rope_scaling=scaling) for scaling in scalings]
    rotations = [RotaryEmbedding(spec, CPU)(POSITIONS, torch.float32)[0] for spec in specs]
    for index, one in enumerate(rotations):
        assert all((one - other).abs().max() > 0.1 for other in rotations[:index])


@pytest.mark.parametrize("factor", [1.0, 2.7, 8.0])
def test_dynamic_scaling_of_a_token_is_that_of_the_sequence_which_it_ends(factor):
    """Also in one batch of tokens of many sequences, where transformers knows one length only."""
    spec = tiny_spec(max_position_embeddings=64, rope_scaling=RopeScaling("dynamic", factor))
    reference = theirs(spec)
    together = RotaryEmbedding(spec, CPU)(POSITIONS, torch.float32)
    for index, position in enumerate(POSITIONS.tolist()):
        alone = torch.tensor([position])
        assert_same_rotation(spec, alone, reference)
        for one, many in zip(RotaryEmbedding(spec, CPU)(alone, torch.float32), together, strict=True):
            torch.testing.assert_close(one[0], many[index], atol=0, rtol=0)
    beyond = torch.tensor([500])
    plain = RotaryEmbedding(replace(spec, rope_scaling=None), CPU)(beyond, torch.float32)[0]
    assert not torch.equal(RotaryEmbedding(spec, CPU)(beyond, torch.float32)[0], plain)


def test_decodes_beyond_the_trained_length_under_dynamic_scaling(tmp_path):
    """As transformers with its KV cache: each token is turned by the length at which it came, and stays so. What is
    recomputed in one step, or in chunks, gives the same."""
    changes = ARCHITECTURES["llama dynamic"] | {"max_position_embeddings": 16}
    spec = checkpoint(tmp_path, tiny_spec(**changes))
    model = AutoModelForCausalLM.from_pretrained(spec.path, dtype=torch.float32).eval()
    tokens, table = [5, 77, 130, 9, 301, 44, 8, 2, 19, 63], [7, 3, 9, 1, 12, 20, 33, 40]
    backend = tiny_backend(spec, max_model_len=32)
    step_logits(backend, row(0, tokens, table))
    with torch.inference_mode():
        output = model(torch.tensor([tokens]), use_cache=True)
        for _ in range(20):  # 10 -> 30 tokens, of which the model was trained on 16
            tokens.append(int(output.logits[0, -1].argmax()))
            output = model(torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True)
            logits = step_logits(backend, row(0, tokens, table, start=len(tokens) - 1))
            torch.testing.assert_close(logits, output.logits[:, -1], atol=TOLERANCE, rtol=0)
    fresh = tiny_backend(spec, max_model_len=32)
    step_logits(fresh, row(1, tokens, table[::-1], end=13, samples=False))
    again = step_logits(fresh, row(1, tokens, table[::-1], start=13))
    torch.testing.assert_close(again, output.logits[:, -1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_as_transformers_rounds_it(dtype):
    spec = tiny_spec(head_dim=64)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(len(POSITIONS), 3, 64, generator=generator).to(dtype)
    cos, sin = RotaryEmbedding(spec, CPU)(POSITIONS, dtype)
    reference = theirs(spec)(x, POSITIONS[None])
    expected, _ = apply_rotary_pos_emb(x[None], x[None], *reference, unsqueeze_dim=2)
    assert torch.equal(rotate(x, cos, sin), expected[0])
