"""Normalisation by the root mean square (Zhang & Sennrich 2019), fused with the residual addition that precedes it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from real.device import Placement
from real.kernels import host_layers, takes_rows
from real.kernels.host_layers import by_host
from real.layers.slots import empty_parameter


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, which has `size` elements."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter((size,), placement)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add_and_normalize(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Adds x to the residual stream and normalises the sum: (normalised, new residual), both [num_tokens, size].

        Overwrites x, which becomes the new residual.
        """
        return add_rms_norm(x, residual, self.weight, self.eps), x


@by_host(host_layers.rms_norm)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if takes_rows(x):
        from real.kernels import gpu_layers  # not at the top: needs Triton

        return gpu_layers.rms_norm(x, weight, eps)
    return functional.rms_norm(x, weight.shape, weight, eps)


@by_host(host_layers.add_rms_norm)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds the residual to x in place; returns the normalised sum."""
    if takes_rows(x):
        from real.kernels import gpu_layers

        return gpu_layers.rms_norm(x, weight, eps, residual)
    return functional.rms_norm(x.add_(residual), weight.shape, weight, eps)
