"""The gated activation of SwiGLU feed-forward layers (Shazeer 2020)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[num_tokens, 2 * intermediate], gate and up side by side -> silu(gate) * up, [num_tokens, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
