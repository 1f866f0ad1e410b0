"""The activation functions between the projections of a feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn import functional

from real.kernels import takes_rows

PLAIN: Mapping[str, Callable[[Tensor], Tensor]] = {"relu": functional.relu, "gelu": functional.gelu}


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020): [num_tokens, 2 * intermediate], gate then up -> silu(gate) * up, [num_tokens,
    intermediate]."""
    if takes_rows(gate_up):
        from real.kernels import gpu_layers  # not at the top: needs Triton

        return gpu_layers.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
