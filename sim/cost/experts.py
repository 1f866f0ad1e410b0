"""The work of a mixture of experts: how many experts a step touches, and how many rows their GEMMs have.

A router's choices are not known before a run. The assumption here is that each token goes to `per_token` of
`num_experts`, all equally likely and independent of other tokens. With E experts and k for each token, n tokens then
touch E (1 - (1 - k / E)^n) experts on average. Trained routers are less even, even more so within one text: the real
number is lower, and the fullest expert has more rows.
"""

from __future__ import annotations

from typing import Final

from testbed.specs.model import ModelSpec

MIN_TILE: Final = 16  # rows: the fewest that tensor cores multiply


def expert_products(
    model: ModelSpec, num_ranks: int, num_tokens: int, num_rows: int, most: int
) -> list[tuple[str, float, float, int]]:
    """Returns (name, FLOPs, bytes, 8-bit inputs) of the GEMMs of one layer's experts on one rank. The model must have
    experts.

    Inputs are elements, 0 if the weights have more than 8 bits. num_rows: with a captured graph's padding, whose
    identical rows count as one more token to the router. most: see computed_rows.
    """
    experts = model.experts
    assert experts is not None
    hidden, inner = model.hidden_size, -(-experts.inner_size // num_ranks)
    pairs = num_rows * experts.per_token
    touched = touched_experts(experts.num, experts.per_token, num_tokens + (num_rows > num_tokens))
    rows, found = computed_rows(touched, pairs, most), []
    for name, num_in, num_out, num_inputs in (
        ("experts_gate_up", hidden, 2 * inner, num_rows * hidden),
        ("experts_down", inner, hidden, pairs * inner),
    ):
        moved = pairs * (num_in + num_out) * model.activation_dtype_bytes
        num_bytes = touched * num_in * num_out * model.dtype_bytes + moved
        found.append((name, 2 * rows * num_in * num_out, num_bytes, num_inputs if model.dtype == "fp8" else 0))
    return found


def touched_experts(num_experts: int, per_token: int, num_tokens: int) -> float:
    """Returns the expected number of experts to which at least one token of a step goes."""
    return num_experts * (1.0 - power(1.0 - per_token / num_experts, num_tokens))


def power(base: float, exponent: int) -> float:
    """Returns base^exponent by squaring: only multiplications, so that it is the same number on every machine."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def computed_rows(touched: float, num_pairs: int, most: int) -> float:
    """Returns the rows that a GEMM over `num_pairs` (token, expert) pairs computes, in whole tiles for each expert.

    most: rows of the device's tile. Kernels of experts use smaller tiles for fewer rows: the power of two, at least 16,
    that holds the mean rows of a touched expert. Each has at least one tile, and fills half of its last on average.
    """
    tile = 1
    while tile < most and (tile < MIN_TILE or tile * touched < num_pairs):
        tile *= 2
    return max(touched * tile, num_pairs + touched * (tile - 1) / 2)
