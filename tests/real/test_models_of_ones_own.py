"""A model that is not shipped, OLMo 2, from a layer of its own: what a new architecture has to write."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from real.layers.norm import RMSNorm
from real.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from real.models.registry import MODELS
from tests.real.engine_helpers import PIECES, TOLERANCE, checkpoint, logits_of_pieces, tiny_spec


class Attention(LlamaAttention):
    """Normalises the whole projections of q and k, not each head."""

    def __init__(self, spec, placement, scheme) -> None:
        super().__init__(spec, placement, scheme)
        self.q_norm = RMSNorm(spec.num_attention_heads * spec.head_dim, spec.rms_norm_eps, placement)
        self.k_norm = RMSNorm(spec.num_key_value_heads * spec.head_dim, spec.rms_norm_eps, placement)

    def forward(self, hidden, rotation, kv_cache, attention) -> Tensor:
        query, key, value = self.qkv_proj.project(hidden)
        query = self.q_norm(query.flatten(1)).view(query.shape)
        key = self.k_norm(key.flatten(1)).view(key.shape)
        return self.o_proj(attention(query, key, value, kv_cache, rotation).flatten(1))


class Layer(nn.Module):
    """Norms after attention and feed-forward."""

    def __init__(self, spec, placement, scheme) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(spec, placement, scheme), LlamaMLP(spec, placement, scheme)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, placement)
        self.post_feedforward_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, placement)

    def forward(self, hidden, residual, rotation, kv_cache, attention) -> tuple[Tensor, Tensor]:
        stream = hidden if residual is None else hidden + residual
        stream = stream + self.post_attention_layernorm(self.self_attn(stream, rotation, kv_cache, attention))
        return self.post_feedforward_layernorm(self.mlp(stream)), stream


def test_an_architecture_needs_only_its_layer(monkeypatch, tmp_path):
    monkeypatch.setitem(MODELS, "Olmo2ForCausalLM", partial(LlamaForCausalLM, layer=Layer))
    spec = checkpoint(tmp_path, tiny_spec(architecture="Olmo2ForCausalLM", tie_word_embeddings=False))
    reference = AutoModelForCausalLM.from_pretrained(spec.path, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = [reference(torch.tensor([tokens])).logits[0, -1] for tokens in (PIECES, [*PIECES, 4])]
    for attention in ("auto", "torch"):
        found = logits_of_pieces(spec, attention=attention)
        torch.testing.assert_close(found, torch.stack(wanted), atol=TOLERANCE, rtol=0)
