"""A mixture of experts (Shazeer et al. 2017) in the place of a feed-forward: a router gives each token to a few of many
small feed-forwards, and their results are summed by its shares.

Under tensor parallelism every rank has a part of every expert, and the ranks' results are summed; the router is whole
on every rank. On a GPU the Triton kernels of real/kernels/experts.py compute it; elsewhere the torch code below does,
expert by expert, which waits for the routing and so cannot be captured.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from real.device import Placement
from real.kernels import why_not
from real.layers.activation import silu_and_mul
from real.layers.linear import Linear, share
from real.layers.slots import Slot, empty_parameter, shared
from testbed.errors import DeviceError
from testbed.specs.model import ExpertsShape, ModelSpec


class GateUpExperts(nn.Module):
    """`weight` [num_experts, 2 * inner / ranks, hidden]: of each expert, gate above up."""

    def __init__(self, shape: ExpertsShape, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.inner, self.kept = shape.inner_size, share(shape.inner_size, placement)
        self.start = placement.group.rank * self.kept
        self.weight = empty_parameter((shape.num, 2 * self.kept, hidden_size), placement)

    def slots(self, name: str, parameter: Tensor) -> Mapping[str, Slot]:
        return {
            f"{expert}.{part}": shared(view, 0, self.start, self.inner)
            for expert, weight in enumerate(parameter)
            for part, view in zip(("gate_proj", "up_proj"), weight.split(self.kept), strict=True)
        }


class DownExperts(nn.Module):
    """`weight` [num_experts, hidden, inner / ranks]."""

    def __init__(self, shape: ExpertsShape, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.inner, kept = shape.inner_size, share(shape.inner_size, placement)
        self.start = placement.group.rank * kept
        self.weight = empty_parameter((shape.num, hidden_size, kept), placement)

    def slots(self, name: str, parameter: Tensor) -> Mapping[str, Slot]:
        return {
            f"{expert}.down_proj": shared(weight, 1, self.start, self.inner) for expert, weight in enumerate(parameter)
        }


class Experts(nn.Module):
    """All experts of a layer."""

    def __init__(self, shape: ExpertsShape, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.gate_up_proj = GateUpExperts(shape, hidden_size, placement)
        self.down_proj = DownExperts(shape, hidden_size, placement)

    def forward(self, x: Tensor, shares: Tensor, experts: Tensor) -> Tensor:
        """x [num_tokens, hidden]; shares and experts [num_tokens, per_token] -> [num_tokens, hidden], of this rank."""
        gate_up, down = self.gate_up_proj.weight, self.down_proj.weight
        if x.is_cuda:
            from real.kernels.experts import run_experts  # not at the top: needs Triton

            return run_experts(x, shares, experts, gate_up, down)
        return run_experts_one_by_one(x, shares, experts, gate_up, down)


class SparseFeedForward(nn.Module):
    """Router and experts, [num_tokens, hidden] in and out. Module names are those of Hugging Face's Qwen3-MoE.

    Raises DeviceError on a GPU that the kernels cannot run on.
    """

    def __init__(self, spec: ModelSpec, shape: ExpertsShape, placement: Placement) -> None:
        super().__init__()
        if placement.device.type == "cuda" and (why := why_not(placement.device)) is not None:
            raise DeviceError(f"model {spec.name} has experts, whose Triton kernels do not run here: {why}")
        self.group = placement.group
        self.per_token, self.norm_topk_prob = shape.per_token, spec.norm_topk_prob
        self.gate = Linear(spec.hidden_size, shape.num, placement)
        self.experts = Experts(shape, spec.hidden_size, placement)

    def forward(self, hidden: Tensor) -> Tensor:
        shares, experts = choose_experts(self.gate(hidden), self.per_token, normalizes=self.norm_topk_prob)
        return self.group.all_reduce(self.experts(hidden, shares.to(hidden.dtype), experts))


def choose_experts(scores: Tensor, per_token: int, *, normalizes: bool) -> tuple[Tensor, Tensor]:
    """The likeliest experts of each token by the softmax over all: scores [num_tokens, num_experts] -> (shares,
    float32, and experts, int64, [num_tokens, per_token]). normalizes: the shares of a token add up to 1."""
    shares, experts = scores.softmax(-1, dtype=torch.float32).topk(per_token, dim=-1)
    return (shares / shares.sum(-1, keepdim=True) if normalizes else shares), experts


def run_experts_one_by_one(x: Tensor, shares: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As real.kernels.experts.run_experts, in plain torch: each expert that was chosen takes its tokens at once."""
    result = torch.zeros_like(x)
    for expert in sorted({*experts.flatten().tolist()}):
        tokens, place = (experts == expert).nonzero(as_tuple=True)
        inner = silu_and_mul(functional.linear(x[tokens], gate_up[expert]))
        result.index_add_(0, tokens, functional.linear(inner, down[expert]) * shares[tokens, place, None])
    return result
