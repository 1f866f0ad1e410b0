"""OPT (Zhang et al. 2022): learned positions, multi-head attention, LayerNorm, a plain feed-forward, biases everywhere.

Only OPT-350m normalises after each residual addition instead of before each block, and embeds tokens in fewer
dimensions than the layers have. Module names follow those of Hugging Face, so that its checkpoints load by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from real.attention.interface import StepAttention
from real.device import Placement
from real.layers.activation import PLAIN
from real.layers.embedding import LMHead, VocabEmbedding
from real.layers.linear import Linear, QKVParallel, RowParallel, even_part
from real.layers.slots import empty_parameter
from real.models.interface import CausalLM
from testbed.specs.model import ModelSpec

EPS = 1e-5  # not given in the configs
OFFSET = 2  # the first two rows of the table belong to no position


class LearnedPositions(nn.Module):
    """Positions [num_tokens], each below max_position_embeddings -> [num_tokens, hidden]."""

    def __init__(self, spec: ModelSpec, placement: Placement) -> None:
        super().__init__()
        self.weight = empty_parameter((spec.max_position_embeddings + OFFSET, spec.hidden_size), placement)

    def forward(self, positions: Tensor) -> Tensor:
        return functional.embedding(positions + OFFSET, self.weight)


def layer_norm(size: int, placement: Placement) -> nn.LayerNorm:
    """Returns a LayerNorm over the last dimension, which has `size` elements (Ba et al. 2016)."""
    return nn.LayerNorm(size, EPS, device=placement.device, dtype=placement.dtype).requires_grad_(False)


class OPTAttention(nn.Module):
    def __init__(self, spec: ModelSpec, placement: Placement) -> None:
        super().__init__()
        self.qkv_proj = QKVParallel(spec, placement, bias=spec.attention_bias)
        attended = even_part(spec.num_attention_heads * spec.head_dim, placement)
        self.out_proj = RowParallel(attended, spec.hidden_size, placement, bias=spec.attention_bias)

    def forward(self, hidden: Tensor, kv_cache: Tensor, attention: StepAttention) -> Tensor:
        query, key, value = self.qkv_proj.project(hidden)
        output: Tensor = self.out_proj(attention(query, key, value, kv_cache).flatten(1))
        return output


class OPTLayer(nn.Module):
    def __init__(self, spec: ModelSpec, placement: Placement) -> None:
        super().__init__()
        self.normalizes_before = spec.do_layer_norm_before
        self.activation = PLAIN[spec.hidden_act]
        self.self_attn = OPTAttention(spec, placement)
        self.self_attn_layer_norm = layer_norm(spec.hidden_size, placement)
        inner = even_part(spec.intermediate_size, placement)
        self.fc1 = Linear(spec.hidden_size, {"": inner}, placement, bias=spec.mlp_bias)
        self.fc2 = RowParallel(inner, spec.hidden_size, placement, bias=spec.mlp_bias)
        self.final_layer_norm = layer_norm(spec.hidden_size, placement)

    def forward(self, hidden: Tensor, kv_cache: Tensor, attention: StepAttention) -> Tensor:
        """[num_tokens, hidden] -> the same shape."""
        if self.normalizes_before:
            hidden = hidden + self.self_attn(self.self_attn_layer_norm(hidden), kv_cache, attention)
            return hidden + self._feed_forward(self.final_layer_norm(hidden))
        hidden = self.self_attn_layer_norm(hidden + self.self_attn(hidden, kv_cache, attention))
        output: Tensor = self.final_layer_norm(hidden + self._feed_forward(hidden))
        return output

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.fc2(self.activation(self.fc1(hidden)))
        return output


class OPTDecoder(nn.Module):
    def __init__(self, spec: ModelSpec, placement: Placement) -> None:
        super().__init__()
        narrow, wide = spec.embedding_size, spec.hidden_size
        self.embed_tokens = VocabEmbedding(spec.vocab_size, narrow, placement)
        self.embed_positions = LearnedPositions(spec, placement)
        self.project_in = Linear(narrow, wide, placement) if narrow != wide else None
        self.layers = nn.ModuleList(OPTLayer(spec, placement) for _ in range(spec.num_hidden_layers))
        self.final_layer_norm = layer_norm(wide, placement) if spec.do_layer_norm_before else None
        self.project_out = Linear(wide, narrow, placement) if narrow != wide else None

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Iterable[Tensor], attention: StepAttention
    ) -> Tensor:
        hidden: Tensor = self.embed_tokens(token_ids)  # [num_tokens, embedding_size]
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        hidden = hidden + self.embed_positions(positions)  # [num_tokens, hidden]
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden = layer(hidden, kv_cache, attention)
        if self.final_layer_norm is not None:
            hidden = self.final_layer_norm(hidden)
        return hidden if self.project_out is None else self.project_out(hidden)


class OPTModel(nn.Module):
    """Adds `decoder` to the module names, as in Hugging Face's checkpoints."""

    def __init__(self, spec: ModelSpec, placement: Placement) -> None:
        super().__init__()
        self.decoder = OPTDecoder(spec, placement)

    def forward(self, *inputs: Any) -> Tensor:
        hidden: Tensor = self.decoder(*inputs)
        return hidden


class OPTForCausalLM(CausalLM):
    """See CausalLM for the shapes; `hidden` there is the size of the embedding."""

    def __init__(self, spec: ModelSpec, placement: Placement) -> None:
        model = OPTModel(spec, placement)
        tied_to = model.decoder.embed_tokens if spec.tie_word_embeddings else None
        super().__init__(model, LMHead(spec.vocab_size, spec.embedding_size, placement, tied_to))
