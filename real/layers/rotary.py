"""Rotary position embedding (Su et al. 2021), in the half-split layout of Hugging Face's Llama and Qwen models.

Angles are computed once a step from the positions themselves and shared by all layers: no table, no maximum length.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Angles position / theta^(2i / head_dim) for i < head_dim / 2."""

    inverse_frequencies: Tensor  # [head_dim / 2], float32

    def __init__(self, head_dim: int, theta: float, device: torch.device) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        self.register_buffer("inverse_frequencies", 1.0 / theta**exponents, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions [num_tokens] -> cos and sin, [num_tokens, 1, head_dim / 2] in the given format."""
        angles = positions.to(torch.float32)[:, None, None] * self.inverse_frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each head's pairs (x[i], x[i + head_dim / 2]): [num_tokens, num_heads, head_dim], same shape out."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
