"""Llama 2 and 3, Mistral, Qwen2, Qwen3 and Qwen3-MoE: grouped-query attention, rotary positions, RMSNorm, SwiGLU.

All share one implementation; the spec says how an architecture differs. If it has experts, they replace the
feed-forward. Mistral's sliding window is handled by the attention provider. Module names follow Hugging Face's, so that
its checkpoints load by name.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from real.attention.interface import HeadNorm, StepAttention
from real.device import Placement
from real.layers.activation import silu_and_mul
from real.layers.embedding import LMHead, VocabEmbedding
from real.layers.experts import SparseFeedForward
from real.layers.fp8 import linear_method
from real.layers.linear import Linear, QKVParallel, RowParallel, even_part
from real.layers.norm import RMSNorm
from real.layers.rotary import RotaryEmbedding
from real.models.interface import CausalLM
from testbed.specs.model import ModelSpec
from testbed.specs.quantization import Fp8Scheme


class LlamaAttention(nn.Module):
    def __init__(self, spec: ModelSpec, placement: Placement, scheme: Fp8Scheme | None) -> None:
        super().__init__()
        head_dim, method = spec.head_dim, linear_method(scheme)
        qkv_bias, o_bias = spec.attention_biases
        self.qkv_proj = QKVParallel(spec, placement, bias=qkv_bias, method=method)
        attended = even_part(spec.num_attention_heads * head_dim, placement)
        self.o_proj = RowParallel(attended, spec.hidden_size, placement, bias=o_bias, method=method)
        self.q_norm, self.k_norm = (
            RMSNorm(head_dim, spec.rms_norm_eps, placement) if spec.has_qk_norm else None for _ in range(2)
        )

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], kv_cache: Tensor, attention: StepAttention
    ) -> Tensor:
        query, key, value = self.qkv_proj.project(hidden)
        attended = attention(query, key, value, kv_cache, rotation, self._head_norm())
        output: Tensor = self.o_proj(attended.flatten(1))
        return output

    def _head_norm(self) -> HeadNorm | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class LlamaMLP(nn.Module):
    def __init__(self, spec: ModelSpec, placement: Placement, scheme: Fp8Scheme | None) -> None:
        super().__init__()
        inner, bias, method = even_part(spec.intermediate_size, placement), spec.mlp_bias, linear_method(scheme)
        gate_up = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = Linear(spec.hidden_size, gate_up, placement, bias=bias, method=method)
        self.down_proj = RowParallel(inner, spec.hidden_size, placement, bias=bias, method=method)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))
        return output


class LlamaLayer(nn.Module):
    def __init__(self, spec: ModelSpec, placement: Placement, scheme: Fp8Scheme | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, placement)
        self.self_attn = LlamaAttention(spec, placement, scheme)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, placement)
        self.mlp = (
            LlamaMLP(spec, placement, scheme)
            if spec.experts is None
            else SparseFeedForward(spec, spec.experts, placement, scheme)
        )

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        kv_cache: Tensor,
        attention: StepAttention,
    ) -> tuple[Tensor, Tensor]:
        """Returns (output of the feed-forward, residual stream without it), both [num_tokens, hidden]."""
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm.add_and_normalize(hidden, residual)
        hidden = self.self_attn(hidden, rotation, kv_cache, attention)
        hidden, residual = self.post_attention_layernorm.add_and_normalize(hidden, residual)
        return self.mlp(hidden), residual


class LlamaModel(nn.Module):
    def __init__(self, spec: ModelSpec, placement: Placement, scheme: Fp8Scheme | None, layer: type[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(spec.vocab_size, spec.hidden_size, placement)
        self.layers = nn.ModuleList(layer(spec, placement, scheme) for _ in range(spec.num_hidden_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, placement)
        self.rotary = RotaryEmbedding(spec, placement.device)

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Iterable[Tensor], attention: StepAttention
    ) -> Tensor:
        hidden = self.embed_tokens(token_ids)  # [num_tokens, hidden]
        rotation = self.rotary(positions, hidden.dtype)
        residual: Tensor | None = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden, residual = layer(hidden, residual, rotation, kv_cache, attention)
        assert residual is not None
        normalized, _ = self.norm.add_and_normalize(hidden, residual)
        return normalized


class LlamaForCausalLM(CausalLM):
    """See CausalLM for the shapes. scheme: quantisation of the layers' projections; None: they are not quantised.
    layer: the class of the layers, which is made and called as LlamaLayer."""

    def __init__(
        self,
        spec: ModelSpec,
        placement: Placement,
        scheme: Fp8Scheme | None = None,
        layer: type[nn.Module] = LlamaLayer,
    ) -> None:
        model = LlamaModel(spec, placement, scheme, layer)
        tied_to = model.embed_tokens if spec.tie_word_embeddings else None
        super().__init__(model, LMHead(spec.vocab_size, spec.hidden_size, placement, tied_to))
