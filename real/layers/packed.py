"""Products on a CPU over weights that oneDNN has laid out for itself.

torch's own float32 product takes another library, which is two to three times as slow on the CPUs of some makers, and
its bfloat16 product lays the weight out anew each time. A layout is as large as its weight; it is made when the weight
is first multiplied by, and where that would leave too little memory the product is torch's own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from real.host_memory import available_bytes

DTYPES = (torch.float32, torch.bfloat16)
MIN_LEFT_BYTES = 2 * 1024**3  # that a layout leaves to others


class Layout(NamedTuple):
    """weight: as oneDNN wants it; None: there was no room. version: of the weight that it was made of."""

    weight: Tensor | None
    version: int


def packed(weight: Tensor) -> Tensor | None:
    """A weight [out_features, in_features] as oneDNN wants it; None: torch's own product is to be taken.

    Only of a parameter, which stays; it is laid out again once it has been written to.
    """
    if not isinstance(weight, nn.Parameter) or not weight.is_cpu or weight.dtype not in DTYPES:
        return None
    kept = weight.__dict__.get("layout_of_onednn")  # goes when the weight goes
    if kept is None or kept.version != weight._version:
        kept = Layout(_laid_out(weight), weight._version)
        weight.__dict__["layout_of_onednn"] = kept
    found: Tensor | None = kept.weight
    return found


def multiply_packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`, the weight laid out: [num_tokens, in_features] -> [num_tokens, out_features]."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _laid_out(weight: nn.Parameter) -> Tensor | None:
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # a build of torch without oneDNN
        return None
    available = available_bytes()
    if available is not None and available - weight.nbytes < MIN_LEFT_BYTES:
        return None
    laid_out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return laid_out
