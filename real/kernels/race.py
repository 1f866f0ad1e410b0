"""Draws tokens from logits: temperature, min-p, top-k, top-p, and the exponential race over what they leave.

In four launches, however many draws there are: the largest logit of each part of a vocabulary; where there are filters,
the least logit that they keep, found by halving an interval, without a sort; the winner of each part; the winner. Noise
is a hash of (key, token id), as in real/sampling/noise.py. No sum is taken in an order that depends on the batch, so a
draw does not either. What torch computes (real/sampling/sampler.py) differs by roundings of float32 alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 8192  # logits of one program
BLOCK = 1024  # that it looks at at a time
FILTER_BLOCK = 4096  # the same, where one program looks at a whole row, several times
# one number a draw: where a group is drawn in parts they begin anywhere
OF_DRAWS = ["rows", "temperatures", "keys", "log_min_p", "top_k", "top_p", "targets"]
NO_LIMIT = tl.constexpr(2.0)  # of top-p: no sum of probabilities reaches it

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))  # splitmix64's, as signed numbers
FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
SECOND = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit
def shift_right(state, BITS: tl.constexpr):
    """A logical shift of int64."""
    MASK: tl.constexpr = (1 << (64 - BITS)) - 1
    return (state >> BITS) & MASK


@triton.jit
def log_exponential(key, token):
    """Log E with E ~ Exp(1); see real/sampling/noise.py."""
    state = key + (token + 1).to(tl.int64) * GOLDEN
    state = (state ^ shift_right(state, 30)) * FIRST
    state = (state ^ shift_right(state, 27)) * SECOND
    state = state ^ shift_right(state, 31)
    uniform = (shift_right(state, 24) + 1).to(tl.float32) * (2.0**-40)
    uniform = tl.minimum(uniform, 1.0 - 2.0**-24)
    # -log(1 - u). A GPU's logarithm errs by 2^-22, whatever its size: near 0, where races are won, by its series
    series = tl.zeros_like(uniform) + 1.0 / 12.0
    for i in tl.static_range(11):
        series = series * uniform + 1.0 / (11 - i)
    exponential = tl.where(uniform < 0.25, series * uniform, -tl.log(1.0 - uniform))
    return tl.log(exponential)


@triton.jit
def load_scaled(row, token, vocab_size, largest, temperature):
    """Logits over the temperature, largest 0; -inf behind the vocabulary."""
    logit = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
    return (logit - largest) / temperature


@triton.jit(do_not_specialize=["vocab_size"], do_not_specialize_on_alignment=OF_DRAWS)
def largest_kernel(
    largest, logits, rows, vocab_size, stride_row, PART: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (draw, part of the vocabulary): its largest logit."""
    draw = tl.program_id(0)
    row = logits + tl.load(rows + draw) * stride_row
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    first = tl.program_id(1) * PART
    for begin in range(first, tl.minimum(first + PART, vocab_size), BLOCK):
        token = begin + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.load(row + token, mask=token < vocab_size, other=float("-inf")))
    tl.store(largest + draw * tl.num_programs(1) + tl.program_id(1), tl.max(most, 0))


@triton.jit
def load_largest(largest, draw, num_parts, PARTS_PAD: tl.constexpr):
    part = tl.arange(0, PARTS_PAD)
    own = tl.load(largest + draw * num_parts + part, mask=part < num_parts, other=float("-inf"))
    return tl.max(own, 0)


@triton.jit
def beyond(row, vocab_size, largest, temperature, middle, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens are likelier than `middle`, or what they weigh (exp of the logit); the least of these, and the
    largest of the others."""
    total = 0.0
    above = tl.full([BLOCK], float("inf"), tl.float32)
    below = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, vocab_size, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        x = load_scaled(row, token, vocab_size, largest, temperature)
        is_above = x > middle
        weight = is_above.to(tl.float32)
        if BY_MASS:
            weight = tl.where(is_above, tl.exp(x), 0.0)
        total += tl.sum(weight, 0)
        above = tl.minimum(above, tl.where(is_above, x, float("inf")))
        below = tl.maximum(below, tl.where(is_above, float("-inf"), x))
    return total, tl.min(above, 0), tl.max(below, 0)


@triton.jit
def least_kept(row, vocab_size, largest, temperature, low, limit, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The least logit from `low` on, itself a logit, for which all that is likelier numbers, or weighs, less than
    `limit`. The largest logit, 0, is always kept.

    An interval that holds it is halved until one logit is left in it; its ends are logits themselves.
    """
    high = tl.zeros_like(low)
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle < high, middle, low)  # where no float lies between
        total, above, below = beyond(row, vocab_size, largest, temperature, middle, BY_MASS, BLOCK)
        low = tl.where(total < limit, low, above)
        high = tl.where(total < limit, below, high)
    return high


@triton.jit(do_not_specialize=["vocab_size", "num_parts"], do_not_specialize_on_alignment=OF_DRAWS)
def least_kernel(
    least, largest, logits, rows, temperatures, log_min_p, top_k, top_p, vocab_size, num_parts, stride_row,
    BLOCK: tl.constexpr, PARTS_PAD: tl.constexpr,
):  # fmt: skip
    """Program (draw): the least logit that its filters keep, after the temperature. Each filter sees what the one
    before has left; equals of the least are kept."""
    draw = tl.program_id(0)
    row = logits + tl.load(rows + draw) * stride_row
    most = load_largest(largest, draw, num_parts, PARTS_PAD)
    temperature = tl.maximum(tl.load(temperatures + draw), 1e-30)
    floor, limit = tl.load(log_min_p + draw), tl.load(top_p + draw)
    low = tl.full([BLOCK], 0.0, tl.float32)
    for begin in range(0, vocab_size, BLOCK):
        x = load_scaled(row, begin + tl.arange(0, BLOCK), vocab_size, most, temperature)
        low = tl.minimum(low, tl.where((x >= floor) & (x > float("-inf")), x, 0.0))
    kept = tl.min(low, 0)
    k = tl.load(top_k + draw)
    if k < vocab_size:
        kept = least_kept(row, vocab_size, most, temperature, kept, k.to(tl.float32), False, BLOCK)
    if limit < NO_LIMIT:
        total = 0.0
        for begin in range(0, vocab_size, BLOCK):
            x = load_scaled(row, begin + tl.arange(0, BLOCK), vocab_size, most, temperature)
            total += tl.sum(tl.where(x >= kept, tl.exp(x), 0.0), 0)
        kept = least_kept(row, vocab_size, most, temperature, kept, limit * total, True, BLOCK)
    tl.store(least + draw, kept)


@triton.jit(do_not_specialize=["vocab_size"], do_not_specialize_on_alignment=OF_DRAWS)
def race_kernel(
    scores, winners, largest, least, logits, rows, temperatures, keys, vocab_size, stride_row,
    PART: tl.constexpr, BLOCK: tl.constexpr, PARTS_PAD: tl.constexpr, IS_FILTERED: tl.constexpr,
):  # fmt: skip
    """Program (draw, part of the vocabulary): the token that comes first, of equals the one with the smallest id."""
    draw, num_parts = tl.program_id(0), tl.num_programs(1)
    row = logits + tl.load(rows + draw) * stride_row
    most = load_largest(largest, draw, num_parts, PARTS_PAD)
    temperature, key = tl.maximum(tl.load(temperatures + draw), 1e-30), tl.load(keys + draw)
    score = tl.full([BLOCK], float("-inf"), tl.float32)
    winner = tl.zeros([BLOCK], tl.int32)
    first = tl.program_id(1) * PART
    for begin in range(first, tl.minimum(first + PART, vocab_size), BLOCK):
        token = begin + tl.arange(0, BLOCK)
        x = load_scaled(row, token, vocab_size, most, temperature)
        if IS_FILTERED:
            x = tl.where(x >= tl.load(least + draw), x, float("-inf"))
        x -= log_exponential(key, token)
        winner = tl.where(x > score, token, winner)
        score = tl.maximum(score, x)
    best = tl.max(score, 0)
    place = draw * num_parts + tl.program_id(1)
    tl.store(scores + place, best)
    tl.store(winners + place, tl.min(tl.where(score == best, winner, vocab_size), 0))


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=OF_DRAWS)
def pick_kernel(token_ids, targets, scores, winners, num_parts, PARTS_PAD: tl.constexpr):
    """Program (draw): the token that comes first of all parts' winners, to its place in the step's output."""
    draw = tl.program_id(0)
    part = tl.arange(0, PARTS_PAD)
    score = tl.load(scores + draw * num_parts + part, mask=part < num_parts, other=float("-inf"))
    best = tl.argmax(score, 0)
    tl.store(token_ids + tl.load(targets + draw), tl.load(winners + draw * num_parts + best).to(tl.int64))


def draw_tokens(
    token_ids: Tensor,
    targets: Tensor,
    logits: Tensor,
    rows: Tensor,
    temperatures: Tensor,
    keys: Tensor,
    limits: tuple[Tensor, ...] | None,
) -> None:
    """Draw i, from row rows[i] of logits, is written to token_ids[targets[i]].

    token_ids: int64 [num_draws]; targets: int64 [n]; logits: float32 [num_rows, vocab]; rows: int64 [n];
    temperatures: float32 [n]; keys: int64 [n]. limits, each [n]: log of min-p, float32, -inf: off; top-k, int64, the
    vocabulary's size: off; top-p, float32, 2: off. None keeps all tokens.
    """
    largest = largest_logits(logits, rows)
    least = None if limits is None else least_logits(logits, rows, temperatures, limits, largest)
    grid = num_draws, num_parts = largest.shape
    scores, winners = torch.empty_like(largest), torch.empty_like(largest, dtype=torch.int32)
    parts_pad = triton.next_power_of_2(num_parts)
    race_kernel[grid](
        scores, winners, largest, least, logits, rows, temperatures, keys, logits.shape[1], logits.stride(0),
        PART=PART, BLOCK=BLOCK, PARTS_PAD=parts_pad, IS_FILTERED=least is not None, num_warps=4,
    )  # fmt: skip
    pick_kernel[(num_draws,)](token_ids, targets, scores, winners, num_parts, PARTS_PAD=parts_pad, num_warps=1)


def largest_logits(logits: Tensor, rows: Tensor) -> Tensor:
    """Of each part of these rows: float32 [n, num_parts]."""
    assert logits.stride(1) == 1, "the logits of a row lie side by side"
    vocab_size = logits.shape[1]
    largest = logits.new_empty((len(rows), triton.cdiv(vocab_size, PART)))
    largest_kernel[tuple(largest.shape)](
        largest, logits, rows, vocab_size, logits.stride(0), PART=PART, BLOCK=BLOCK, num_warps=4
    )
    return largest


def least_logits(
    logits: Tensor, rows: Tensor, temperatures: Tensor, limits: tuple[Tensor, ...], largest: Tensor
) -> Tensor:
    """The least that the limits keep of each draw, over the temperature, where the largest is 0: float32 [n]."""
    num_draws, num_parts = largest.shape
    least = logits.new_empty(num_draws)
    least_kernel[(num_draws,)](
        least, largest, logits, rows, temperatures, *limits, logits.shape[1], num_parts, logits.stride(0),
        BLOCK=FILTER_BLOCK, PARTS_PAD=triton.next_power_of_2(num_parts), num_warps=16,
    )  # fmt: skip
    return least
