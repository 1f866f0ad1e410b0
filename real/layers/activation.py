"""The activation functions between the projections of a feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn import functional

from real.layers.compiled import compiled_on_cuda

PLAIN: Mapping[str, Callable[[Tensor], Tensor]] = {"relu": functional.relu, "gelu": functional.gelu}


@compiled_on_cuda
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020): [num_tokens, 2 * intermediate], gate then up -> silu(gate) * up, [num_tokens,
    intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
