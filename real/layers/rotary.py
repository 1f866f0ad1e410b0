"""Rotary position embedding (Su et al. 2021), in the half-split layout of Hugging Face's Llama and Qwen models.

Angles are computed once per step from the positions and shared by all layers: no table, no maximum length. Frequencies
are computed in float32 on the CPU; for `linear`, `llama3` and `yarn` scaling, by transformers' own functions. `dynamic`
raises theta with the length of the sequence, once that exceeds the model's. transformers takes the longest sequence of
the call and rotates all keys of that call by it. Here the length is the token's own position + 1, which equals
transformers called token by token. So a key depends only on its position, not on how a prompt was cut into chunks,
which request computed it first, or the batch. This keeps cached prefixes and preempted sequences correct. Up to the
model's length both always agree; a longer prompt is rotated differently than in one call of transformers.
"""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from testbed.specs.model import ModelSpec, RopeScaling

ROPE_TYPES = ("linear", "dynamic", "llama3", "yarn")


class RotaryEmbedding(nn.Module):
    """Angles position * frequency_i for i < head_dim / 2; unscaled, frequency_i = 1 / theta^(2i / head_dim)."""

    inverse_frequencies: Tensor  # [head_dim / 2], float32
    exponents: Tensor  # [head_dim / 2], float32

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        super().__init__()
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
        scaling = spec.rope_scaling
        is_dynamic = scaling is not None and scaling.rope_type == "dynamic"
        frequencies, self.amplitude = 1.0 / spec.rope_theta**exponents, 1.0
        if scaling is not None and not is_dynamic:
            frequencies, self.amplitude = scaled_frequencies(spec, scaling)
        self.register_buffer("inverse_frequencies", frequencies.to(device), persistent=False)
        self.register_buffer("exponents", exponents.to(device), persistent=False)
        self._dynamic_factor = scaling.factor if scaling is not None and is_dynamic else None
        self._theta = spec.rope_theta
        self._head_dim = spec.head_dim
        self._trained_length = spec.max_position_embeddings

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions [num_tokens] -> cos and sin, [num_tokens, 1, head_dim / 2] in the given format."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies(positions)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        if self.amplitude != 1.0:
            cos, sin = cos * self.amplitude, sin * self.amplitude
        return cos.to(dtype), sin.to(dtype)

    def _frequencies(self, positions: Tensor) -> Tensor:
        """Returns frequencies [head_dim / 2], or [num_tokens, head_dim / 2] if each token has its own."""
        factor = self._dynamic_factor
        if factor is None:
            return self.inverse_frequencies
        lengths = (positions + 1).clamp(min=self._trained_length)[:, None]
        growth = (factor * lengths / self._trained_length) - (factor - 1)  # 1 at the trained length
        theta = self._theta * growth ** (self._head_dim / (self._head_dim - 2))
        is_longer = lengths > self._trained_length
        return torch.where(is_longer, 1.0 / theta**self.exponents, self.inverse_frequencies)


def scaled_frequencies(spec: ModelSpec, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Returns transformers' frequencies, float32 [head_dim / 2], and the factor of cosines and sines."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # not at the top: half a second

    rope = {key: value for key, value in asdict(scaling).items() if value is not None}
    rope = {"original_max_position_embeddings": spec.max_position_embeddings, **rope}
    config = SimpleNamespace(  # what those functions read of a model's config
        head_dim=spec.head_dim, hidden_size=spec.hidden_size, num_attention_heads=spec.num_attention_heads,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters={**rope, "rope_theta": spec.rope_theta}, standardize_rope_params=lambda: None,
    )  # fmt: skip
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[scaling.rope_type](config, torch.device("cpu"))
    return frequencies, amplitude


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each head's pairs (x[i], x[i + head_dim / 2]): [num_tokens, num_heads, head_dim] -> the same shape."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
