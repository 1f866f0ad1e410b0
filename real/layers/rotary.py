"""Rotary position embedding (Su et al. 2021), in the half-split layout of Hugging Face's Llama and Qwen models.

Angles are computed once a step from the positions themselves and shared by all layers: no table, no maximum length.
Frequencies are computed in float32 on the CPU, as transformers does, and scaled by its formulas:

- `linear` divides them all (position interpolation); `llama3` divides the slow ones; `yarn` (Peng et al. 2023) moves
  from the plain to the divided ones along the dimensions, and multiplies cosines and sines.
- `dynamic` raises theta with the length of the sequence, once that exceeds the model's. transformers takes the longest
  sequence of the call and turns the keys of that call by it. Here a token's length is its own position + 1, which is
  what transformers does token by token. So a key depends on its position alone, not on how a prompt was cut, who
  computed it first or what shares its batch: cached prefixes and preempted sequences stay right. Up to the model's
  length both agree always; a prompt beyond it is turned otherwise than in one call of transformers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from real.layers.compiled import compiled_on_cuda
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
        frequencies = scaled_frequencies(spec, 1.0 / spec.rope_theta**exponents)
        self.register_buffer("inverse_frequencies", frequencies.to(device), persistent=False)
        self.register_buffer("exponents", exponents.to(device), persistent=False)
        self.amplitude = yarn_amplitude(scaling) if scaling is not None and scaling.rope_type == "yarn" else 1.0
        self._dynamic_factor = scaling.factor if scaling is not None and scaling.rope_type == "dynamic" else None
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
        """[head_dim / 2], or [num_tokens, head_dim / 2] where each token has its own."""
        factor = self._dynamic_factor
        if factor is None:
            return self.inverse_frequencies
        lengths = (positions + 1).clamp(min=self._trained_length)[:, None]
        growth = (factor * lengths / self._trained_length) - (factor - 1)  # 1 at the trained length
        theta = self._theta * growth ** (self._head_dim / (self._head_dim - 2))
        is_longer = lengths > self._trained_length
        return torch.where(is_longer, 1.0 / theta**self.exponents, self.inverse_frequencies)


def scaled_frequencies(spec: ModelSpec, frequencies: Tensor) -> Tensor:
    """What the model's rope scaling makes of the plain frequencies; float32 [head_dim / 2], both."""
    scaling = spec.rope_scaling
    if scaling is None or scaling.rope_type == "dynamic":
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    length = scaling.original_max_position_embeddings or spec.max_position_embeddings
    if scaling.rope_type == "llama3":
        return _llama3(frequencies, scaling, length)
    assert scaling.rope_type == "yarn", scaling.rope_type
    return _yarn(frequencies, scaling, length, spec)


def _llama3(frequencies: Tensor, scaling: RopeScaling, length: int) -> Tensor:
    """As the code that Llama 3.1 was released with: waves longer than `length / low` are slowed down, those shorter
    than `length / high` are kept, and what lies between is a mean of both."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    waves = 2 * math.pi / frequencies
    slowed = frequencies / scaling.factor
    share = (length / waves - low) / (high - low)  # of the plain frequency
    between = (1 - share) * slowed + share * frequencies
    return torch.where(waves > length / low, slowed, torch.where(waves < length / high, frequencies, between))


def _yarn(frequencies: Tensor, scaling: RopeScaling, length: int, spec: ModelSpec) -> Tensor:
    """Dimensions that turn more than `beta_fast` times within the length are kept, those below `beta_slow` slowed."""

    def dimension(num_turns: float) -> float:
        turns = math.log(length / (num_turns * 2 * math.pi))
        return spec.head_dim * turns / (2 * math.log(spec.rope_theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.head_dim - 1)
    width = last - first if last != first else 0.001
    slowed = ((torch.arange(len(frequencies), dtype=torch.float32) - first) / width).clamp(0, 1)  # the share
    return frequencies / scaling.factor * slowed + frequencies * (1 - slowed)


def yarn_amplitude(scaling: RopeScaling) -> float:
    """What cosines and sines are multiplied by, so that attention is no flatter over more positions."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return scale(scaling.mscale) / scale(scaling.mscale_all_dim)
    return scale(1.0)


@compiled_on_cuda
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each head's pairs (x[i], x[i + head_dim / 2]): [num_tokens, num_heads, head_dim], same shape out."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
