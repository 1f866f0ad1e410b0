"""The work of a mixture of experts: how many experts a step touches, and how many rows their products have.

What a router chooses is not known before a run. Here each token is taken to go to `per_token` of `num_experts`, any of
them alike and apart from all others: E experts, k a token, n tokens touch E (1 - (1 - k / E)^n) of them on average.
Trained routers are less even, on one text more so: the real number is lower, and the fullest expert has more rows.
"""

from __future__ import annotations

from typing import Final

from testbed.specs.model import ModelSpec

MIN_TILE: Final = 16  # rows: the least that tensor cores multiply


def expert_products(
    model: ModelSpec, num_ranks: int, num_tokens: int, num_rows: int, most: int
) -> list[tuple[str, float, float]]:
    """(name, FLOPs, bytes) of the products of one layer's experts on one rank; of a model that has some.

    num_rows: with a captured graph's padding, whose rows are alike: to a router one more token. most: see
    computed_rows.
    """
    experts = model.experts
    assert experts is not None
    hidden, inner = model.hidden_size, -(-experts.inner_size // num_ranks)
    pairs = num_rows * experts.per_token
    touched = touched_experts(experts.num, experts.per_token, num_tokens + (num_rows > num_tokens))
    rows, found = computed_rows(touched, pairs, most), []
    for name, num_in, num_out in (("experts_gate_up", hidden, 2 * inner), ("experts_down", inner, hidden)):
        moved = pairs * (num_in + num_out) * model.activation_dtype_bytes
        found.append((name, 2 * rows * num_in * num_out, touched * num_in * num_out * model.dtype_bytes + moved))
    return found


def touched_experts(num_experts: int, per_token: int, num_tokens: int) -> float:
    """The expected number of experts that some token of a step goes to."""
    return num_experts * (1.0 - power(1.0 - per_token / num_experts, num_tokens))


def power(base: float, exponent: int) -> float:
    """base^exponent by squaring: only products, so that it is the same number on every machine."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def computed_rows(touched: float, num_pairs: int, most: int) -> float:
    """Rows that a product over `num_pairs` (token, expert) pairs computes, in whole tiles of each touched expert.

    most: rows of a device's tile. Kernels of experts take smaller ones for fewer rows: the power of two, at least 16,
    that holds the mean of a touched expert. An expert fills one tile at least, and half of its last one on average.
    """
    tile = 1
    while tile < most and (tile < MIN_TILE or tile * touched < num_pairs):
        tile *= 2
    return max(touched * tile, num_pairs + touched * (tile - 1) / 2)
