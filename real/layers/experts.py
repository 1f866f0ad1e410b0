"""A mixture of experts (Shazeer et al. 2017) instead of a feed-forward layer. A router sends each token to a few of
many small feed-forwards, and their results are summed, weighted by the router's shares.

Under tensor parallelism every rank has a part of every expert, and the ranks' results are summed. Every rank has the
whole router. On a GPU the Triton kernels of real/kernels/experts.py compute the experts. Elsewhere the torch code below
does, expert by expert; it reads the routing on the host, so it cannot be captured.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from real.device import Placement
from real.kernels import why_not
from real.layers.activation import silu_and_mul
from real.layers.fp8 import fp8_matrix, linear_method
from real.layers.linear import Kept, Linear, even_part, whole_part
from real.layers.matrix import Matrix
from real.layers.slots import Slot
from testbed.errors import DeviceError
from testbed.specs.model import ExpertsShape, ModelSpec
from testbed.specs.quantization import Fp8Scheme


class ExpertProjection(nn.Module):
    """One or several projections of every expert: `weight` [num_experts, out_features, in_features], with scales if it
    is FP8. num: number of experts. kept: what this rank keeps of one expert's weight."""

    weight: Tensor

    def __init__(self, num: int, kept: Kept, placement: Placement, scheme: Fp8Scheme | None) -> None:
        super().__init__()
        self._kept, self._scheme, self._method = kept, scheme, linear_method(scheme)
        self._method.create_weights(self, kept, placement, (num,))

    @property
    def matrix(self) -> Matrix:
        scheme = self._scheme
        return Matrix(self.weight) if scheme is None else fp8_matrix(self, scheme, self._kept.columns)

    def slots(self, name: str, parameter: Tensor) -> Mapping[str, Slot]:
        return {
            f"{expert}.{part}": slot
            for expert, one in enumerate(parameter)
            for part, slot in self._method.slots(self._kept, name, one).items()
        }


class Experts(nn.Module):
    """All experts of a layer."""

    def __init__(
        self, shape: ExpertsShape, hidden_size: int, placement: Placement, scheme: Fp8Scheme | None = None
    ) -> None:
        super().__init__()
        hidden, inner = whole_part(hidden_size), even_part(shape.inner_size, placement)
        gate_up = {"gate_proj": inner, "up_proj": inner}  # rows of gate, then of up
        self.gate_up_proj = ExpertProjection(shape.num, Kept(gate_up, hidden), placement, scheme)
        self.down_proj = ExpertProjection(shape.num, Kept({"down_proj": hidden}, inner), placement, scheme)

    def forward(self, x: Tensor, shares: Tensor, experts: Tensor) -> Tensor:
        """x [num_tokens, hidden]; shares and experts [num_tokens, per_token] -> this rank's part of the sum,
        [num_tokens, hidden]."""
        gate_up, down = self.gate_up_proj.matrix, self.down_proj.matrix
        if x.is_cuda:
            from real.kernels.experts import run_experts  # not at the top: needs Triton

            return run_experts(x, shares, experts, gate_up, down)
        return run_experts_one_by_one(x, shares, experts, gate_up, down)


class SparseFeedForward(nn.Module):
    """Router and experts: [num_tokens, hidden] -> the same shape. Module names are those of Hugging Face's Qwen3-MoE.

    scheme: quantisation of the experts' weights; None: none. The router is never quantised. Raises DeviceError on a GPU
    on which the kernels cannot run.
    """

    def __init__(
        self, spec: ModelSpec, shape: ExpertsShape, placement: Placement, scheme: Fp8Scheme | None = None
    ) -> None:
        super().__init__()
        if placement.device.type == "cuda" and (why := why_not(placement.device)) is not None:
            raise DeviceError(f"model {spec.name} has experts, whose Triton kernels do not run here: {why}")
        self.group = placement.group
        self.per_token, self.norm_topk_prob = shape.per_token, spec.norm_topk_prob
        self.gate = Linear(spec.hidden_size, shape.num, placement)
        self.experts = Experts(shape, spec.hidden_size, placement, scheme)

    def forward(self, hidden: Tensor) -> Tensor:
        shares, experts = choose_experts(self.gate(hidden), self.per_token, normalizes=self.norm_topk_prob)
        return self.group.all_reduce(self.experts(hidden, shares, experts))


def choose_experts(scores: Tensor, per_token: int, *, normalizes: bool) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token with the largest softmax over all: scores [num_tokens, num_experts] -> (shares
    in the scores' format, experts int32), both [num_tokens, per_token]. normalizes: the shares of a token add up to
    1."""
    if scores.is_cuda:
        from real.kernels.routing import choose  # not at the top: needs Triton

        return choose(scores, per_token, normalizes=normalizes)
    shares, experts = scores.softmax(-1, dtype=torch.float32).topk(per_token, dim=-1)
    return (shares / shares.sum(-1, keepdim=True) if normalizes else shares).to(scores.dtype), experts.int()


def run_experts_one_by_one(x: Tensor, shares: Tensor, experts: Tensor, gate_up: Matrix, down: Matrix) -> Tensor:
    """Computes the same as real.kernels.experts.run_experts in plain torch, one GEMM pair per chosen expert."""
    result = torch.zeros_like(x)
    for expert in sorted({*experts.flatten().tolist()}):
        tokens, place = (experts == expert).nonzero(as_tuple=True)
        inner = silu_and_mul(functional.linear(x[tokens], gate_up.one(expert).dense(x.dtype)))
        result.index_add_(
            0, tokens, functional.linear(inner, down.one(expert).dense(x.dtype)) * shares[tokens, place, None]
        )
    return result
