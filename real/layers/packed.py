"""Products on a CPU over weights that oneDNN has laid out for itself.

torch's own float32 product takes another library, which is two to three times as slow on the CPUs of some makers, and
its bfloat16 product lays the weight out anew each time. A layout is as large as its weight; it is made when the weight
is first multiplied by. Where that would leave too little memory, or where oneDNN has no such product for this CPU, the
product is torch's own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from real.host_memory import available_bytes

DTYPES = (torch.float32, torch.bfloat16)
MAX_CODED_WEIGHT, MAX_CODED_ROWS = 2**21, 512
MIN_LEFT_BYTES = 2 * 1024**3  # that a layout leaves to others
_coded: set[tuple[object, ...]] = set()  # in this process: of what shapes


class _Layout(NamedTuple):
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
        kept = _Layout(_laid_out(weight), weight._version)
        weight.__dict__["layout_of_onednn"] = kept
    found: Tensor | None = kept.weight
    return found


def is_known_to_onednn(dtype: torch.dtype) -> bool:
    """Whether it has products of this type here: bfloat16 wants AVX-512 or its like, a build may be without oneDNN."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype is not torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def multiply_packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`, the weight laid out: [num_tokens, in_features] -> [num_tokens, out_features].

    oneDNN makes code for each number of rows that it meets, which takes as long as some hundred rows of a small model.
    Steps seldom have as many tokens as another had: rows are added up to a number that stands for several.
    """
    num_tokens = len(x)
    padding = _bucket(num_tokens) - num_tokens
    if padding:
        x = torch.cat((x, x.new_zeros(padding, x.shape[1])))
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product[:num_tokens]


def make_code(model: nn.Module, num_tokens: int) -> None:
    """Makes oneDNN's code of the products of a model that has made a step, up to so many rows; not of products that
    take far longer than their code."""
    for module in model.modules():
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if not isinstance(weight, nn.Parameter) or weight.numel() > MAX_CODED_WEIGHT:
            continue
        laid_out = packed(weight) if "layout_of_onednn" in weight.__dict__ else None
        if laid_out is None:
            continue
        for number in sorted({_bucket(number) for number in range(1, min(num_tokens, MAX_CODED_ROWS) + 1)}):
            key = (number, *weight.shape, weight.dtype, bias is None, torch.get_num_threads())
            if key not in _coded:
                _coded.add(key)
                multiply_packed(weight.new_zeros(number, weight.shape[1]), laid_out, bias)


def _bucket(num_tokens: int) -> int:
    """The next number of five binary digits and zeros: at most a sixteenth more."""
    step = 1 << max(0, num_tokens.bit_length() - 5)
    return -(-num_tokens // step) * step


def _laid_out(weight: nn.Parameter) -> Tensor | None:
    if not is_known_to_onednn(weight.dtype):
        return None
    available = available_bytes()
    if available is not None and available - weight.nbytes < MIN_LEFT_BYTES:
        return None
    laid_out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return laid_out
