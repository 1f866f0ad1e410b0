"""Kernels of layers as a FakeGPU runs them: GEMMs of a few tokens, norms, SwiGLU, experts; see fake_launches.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from real.layers.experts import choose_experts
from tests.real.fake_launches import FP8, SETTLED, Values, check_strides, must


def tiles_of(values: Values) -> Iterator[tuple[int, slice, Tensor]]:
    """Of each tile its expert, its places in sorted order, and its pairs."""
    order, weight, tiles = values["order"], values["weight"], values["tiles"]
    must(order.dtype == tiles.dtype == torch.int32, "pairs and tiles are 32 bits wide")
    check_strides(
        values, stride_x=("x", 0), stride_expert=("weight", 0), stride_row=("weight", 1), stride_output=("output", 0)
    )
    must(weight.stride(2) == values["x"].stride(1) == 1 and values["NUM_IN"] == weight.shape[2], "rows of one piece")
    for expert, first, last in tiles.tolist():
        must(0 <= expert < len(weight) and last - first <= values["BLOCK_M"], "tiles of one expert")
        if first < last:
            yield expert, slice(first, last), order[first:last].long()


def expert_weight(values: Values, expert: int) -> Tensor:
    """float32 [out, in]."""
    weight, scales = values["weight"][expert], values["scales"]
    if scales is None:
        return weight.float()
    check_strides(values, stride_scales=("scales", 0), stride_scale_row=("scales", 1))
    return dequantized(values, weight, scales[expert], values["BLOCK_K"] if values["IS_EVEN"] else 1)


def dequantized(values: Values, weight: Tensor, scales: Tensor, num_even: int) -> Tensor:
    """An FP8 weight as float32. num_even: columns that must have one scale."""
    rows, columns = values["row_groups"].long(), values["column_groups"].long()
    must(values["FORMAT"] % SETTLED == (1 if weight.dtype == FP8[2] else 2), "e4m3 as it is, or its bits")
    must(all(len(load.unique()) == 1 for load in columns.split(num_even)), "columns that have one scale")
    return weight.view(FP8[2]).float() * scales[rows][:, columns]


def fp8_weight(values: Values, num_even: int) -> Tensor:
    check_strides(values, stride_row=("weight", 0), stride_scale_row=("scales", 0))
    must((values["NUM_OUT"], values["NUM_IN"]) == values["weight"].shape, "the weight's sizes")
    return dequantized(values, values["weight"], values["scales"], num_even)


def dequantize(values: Values) -> None:
    check_strides(values, stride_output=("output", 0))
    values["output"].copy_(fp8_weight(values, values["TILE"] if values["IS_EVEN"] else 1))


def multiply(values: Values) -> None:
    """A few tokens by a plain weight or by one in FP8, whose parts' sums are kept beside."""
    check_strides(values, stride_x=("x", 0), stride_row=("weight", 0))
    x, size, output = values["x"].float(), values["num_turns"] * values["BLOCK_K"], values["output"]
    must(x.shape == (values["num_tokens"], values["NUM_IN"]), "the sizes of the input")
    must(values["weight"].shape == (values["NUM_OUT"], values["NUM_IN"]), "the weight's sizes")
    must(len(x) <= values["BLOCK_M"] and output.shape == (len(x), values["NUM_OUT"]), "a program for all tokens")
    must(values["HAS_BIAS"] == (values["bias"] is not None), "a bias if there is one")
    num_parts = -(-values["NUM_IN"] // size)
    must(values["IS_SPLIT"] == (num_parts > 1), "parts are added")
    if num_parts > 1:
        sums, tickets = values["sums"], values["tickets"]
        must(sums.dtype == torch.float32 and sums.shape == (num_parts, *output.shape), "a place for each sum")
        must(len(tickets) >= -(-values["NUM_OUT"] // values["BLOCK_N"]) and not tickets.any(), "a ticket each")
    plain = values["weight"].float() if values["scales"] is None else fp8_weight(values, values["BLOCK_K"])
    output.copy_(x @ plain.T + (values["bias"] if values["HAS_BIAS"] else 0))


def norm(values: Values) -> None:
    x, weight = values["x"], values["weight"]
    must(x.shape[1] == len(weight) == values["SIZE"] <= values["PAD"], "the size of a row")
    must(values["HAS_RESIDUAL"] == (values["residual"] is not None), "a residual if there is one")
    if values["HAS_RESIDUAL"]:
        x.add_(values["residual"])
    values["output"].copy_(torch.nn.functional.rms_norm(x, weight.shape, weight, values["eps"]))


def silu(values: Values) -> None:
    must(values["gate_up"].shape[1] == 2 * values["SIZE"], "gate, then up")
    gate, up = values["gate_up"].chunk(2, dim=-1)
    values["output"].copy_(torch.nn.functional.silu(gate) * up)


def choose(values: Values) -> None:
    check_strides(values, stride_scores=("scores", 0))
    given = choose_experts(values["scores"], values["PER_TOKEN"], normalizes=values["NORMALIZES"])
    for name, tensor in zip(("shares", "experts"), given, strict=True):
        must(values[name].shape == tensor.shape and values[name].is_contiguous(), "a place for each chosen expert")
        values[name].copy_(tensor)


def route(values: Values) -> None:
    flat, size = values["experts"].flatten(), values["BLOCK_M"]
    must((values["num_pairs"], values["num_tiles"]) == (len(flat), len(values["tiles"])), "pairs and tiles that exist")
    values["order"].copy_(flat.argsort(stable=True))
    tiles, first = [], 0
    for expert, count in enumerate(flat.bincount(minlength=values["NUM"]).tolist()):
        tiles += [(expert, first + at, first + min(at + size, count)) for at in range(0, count, size)]
        first += count
    must(len(tiles) <= len(values["tiles"]), "enough tiles")
    values["tiles"].copy_(torch.tensor([*tiles, *[(0, 0, 0)] * (len(values["tiles"]) - len(tiles))]))


def gate_up(values: Values) -> None:
    must(2 * values["NUM_OUT"] == values["weight"].shape[1], "gate above up")
    for expert, places, pairs in tiles_of(values):
        x = values["x"][pairs // values["PER_TOKEN"]].float()
        gate, up = (x @ expert_weight(values, expert).T).chunk(2, 1)
        values["output"][places] = (torch.nn.functional.silu(gate) * up).to(values["output"].dtype)


def down(values: Values) -> None:
    must(values["NUM_OUT"] == values["weight"].shape[1], "an output feature a row")
    for expert, places, pairs in tiles_of(values):
        x = values["x"][places].float() @ expert_weight(values, expert).T
        values["output"][pairs] = (x * values["shares"].flatten()[pairs, None].float()).to(values["output"].dtype)


def add_experts(values: Values) -> None:
    output, results = values["output"], values["results"]
    must(results.shape == (len(output) * values["PER_TOKEN"], values["SIZE"]), "a result of each expert")
    output.copy_(results.view(len(output), values["PER_TOKEN"], -1).sum(1))
