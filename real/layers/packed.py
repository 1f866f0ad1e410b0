"""GEMMs on a CPU over weights in oneDNN's own memory layout.

torch's own float32 GEMM takes another library, which is two to three times as slow on the CPUs of some makers. Its
bfloat16 GEMM converts the layout of the weight at each call. The converted copy here is as large as its weight, and is
made at the first GEMM with it. torch's own GEMM runs instead if the copy would leave too little memory, or if oneDNN
has no GEMM of this type for the CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from real.host_memory import available_bytes

DTYPES = (torch.float32, torch.bfloat16)
MAX_CODED_WEIGHT, MAX_CODED_ROWS = 2**21, 512
MIN_LEFT_BYTES = 2 * 1024**3  # memory that must remain available after a copy is made
_coded: set[tuple[object, ...]] = set()  # the shapes for which this process has made code


class _Layout(NamedTuple):
    """weight: in oneDNN's layout; None: torch's GEMM is to be used. version: that of the weight when it was copied."""

    weight: Tensor | None
    version: int


def packed(weight: Tensor) -> Tensor | None:
    """Returns a weight [out_features, in_features] in oneDNN's layout; None: torch's own GEMM is to be used.

    Only for parameters, which live as long as their layer. A weight that was written to is converted again.
    """
    if not isinstance(weight, nn.Parameter) or not weight.is_cpu or weight.dtype not in DTYPES:
        return None
    kept = weight.__dict__.get("layout_of_onednn")  # freed together with the weight
    if kept is None or kept.version != weight._version:
        kept = _Layout(_laid_out(weight), weight._version)
        weight.__dict__["layout_of_onednn"] = kept
    found: Tensor | None = kept.weight
    return found


def is_known_to_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN has GEMMs of this type here. bfloat16 needs AVX-512 or similar; torch can be built without it."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype is not torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def multiply_packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`, weight in oneDNN's layout: [num_tokens, in_features] -> [num_tokens, out_features].

    oneDNN makes code for each new number of rows, which takes as long as computing some hundred rows of a small model.
    Few steps have the same number of tokens, so rows are padded to one of a few numbers.
    """
    num_tokens = len(x)
    padding = _bucket(num_tokens) - num_tokens
    if padding:
        x = torch.cat((x, x.new_zeros(padding, x.shape[1])))
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product[:num_tokens]


def make_code(model: nn.Module, num_tokens: int) -> None:
    """Makes oneDNN's code for the GEMMs of a model that has run a step, for up to `num_tokens` rows. Leaves out GEMMs
    that take far longer than making their code."""
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
    """Rounds up to a number of at most five significant binary digits, which adds at most a sixteenth."""
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
