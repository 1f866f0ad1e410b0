"""Products on a CPU over weights that oneDNN has laid out for itself.

torch's own float32 product takes another library, which is two to three times as slow on the CPUs of some makers, and
its bfloat16 product lays the weight out anew each time. A layout is as large as its weight; it is made when the weight
is first multiplied by, and where that would leave too little memory the product is torch's own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from real.host_memory import available_bytes

DTYPES = (torch.float32, torch.bfloat16)
PADDED_USES = 4  # of a number of rows, before it gets code of its own
MIN_LEFT_BYTES = 2 * 1024**3  # that a layout leaves to others


class Layout(NamedTuple):
    """weight: as oneDNN wants it. uses: how often it was multiplied by so many rows."""

    weight: Tensor
    uses: dict[int, int]


class _Kept(NamedTuple):
    """layout: None where there was no room. version: of the weight that it was made of."""

    layout: Layout | None
    version: int


def packed(weight: Tensor) -> Layout | None:
    """A weight [out_features, in_features] as oneDNN wants it; None: torch's own product is to be taken.

    Only of a parameter, which stays; it is laid out again once it has been written to.
    """
    if not isinstance(weight, nn.Parameter) or not weight.is_cpu or weight.dtype not in DTYPES:
        return None
    kept = weight.__dict__.get("layout_of_onednn")  # goes when the weight goes
    if kept is None or kept.version != weight._version:
        kept = _Kept(_laid_out(weight), weight._version)
        weight.__dict__["layout_of_onednn"] = kept
    found: Layout | None = kept.layout
    return found


def multiply_packed(x: Tensor, layout: Layout, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`, the weight laid out: [num_tokens, in_features] -> [num_tokens, out_features].

    oneDNN makes code for each number of rows that it meets, which takes as long as some hundred rows do. Steps seldom
    have as many tokens as another had: rows are added up to a number that stands for several, until one has come often.
    """
    num_tokens = len(x)
    uses = layout.uses[num_tokens] = layout.uses.get(num_tokens, 0) + 1
    padding = _bucket(num_tokens) - num_tokens if uses <= PADDED_USES else 0
    if padding:
        x = functional.pad(x, (0, 0, 0, padding))
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, layout.weight, bias, "none", [], "")
    return product[:num_tokens]


def _bucket(num_tokens: int) -> int:
    """The next number of four binary digits and zeros: at most an eighth more."""
    step = 1 << max(0, num_tokens.bit_length() - 4)
    return -(-num_tokens // step) * step


def _laid_out(weight: nn.Parameter) -> Layout | None:
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # a build of torch without oneDNN
        return None
    available = available_bytes()
    if available is not None and available - weight.nbytes < MIN_LEFT_BYTES:
        return None
    return Layout(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None), {})
