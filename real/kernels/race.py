"""Samples tokens from logits: temperature, min-p, top-k, top-p, and the exponential race over the tokens that remain.

A draw is one token to sample. Any number of draws takes four launches: the largest logit of each part of the
vocabulary; if there are filters, the least logit that they keep, found by halving an interval, without a sort; the
winner of each part; the winner. Noise is a hash of (key, token id), as in real/sampling/noise.py. The order of every
sum is independent of the batch, and so is the sampled token. Results of torch (real/sampling/sampler.py) differ only by
roundings of float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 8192  # logits of one program
BLOCK = 1024  # logits of one iteration
FILTER_BLOCK = 4096  # logits of one iteration of least_kernel, where one program reads a whole row several times
# arrays with one number per draw; a group that is sampled in parts passes slices, whose alignment varies
OF_DRAWS = ["rows", "temperatures", "keys", "log_min_p", "top_k", "top_p", "targets"]
NO_LIMIT = tl.constexpr(2.0)  # a top-p that no sum of probabilities reaches: the filter is off

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
    # -log(1 - u). The absolute error of a GPU's logarithm is 2^-22. Near 0, where races are won, its series is used
    series = tl.zeros_like(uniform) + 1.0 / 12.0
    for i in tl.static_range(11):
        series = series * uniform + 1.0 / (11 - i)
    exponential = tl.where(uniform < 0.25, series * uniform, -tl.log(1.0 - uniform))
    return tl.log(exponential)


@triton.jit
def load_scaled(row, token, vocab_size, largest, temperature):
    """Loads logits, shifted so that the largest is 0, over the temperature; -inf beyond the vocabulary."""
    logit = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
    return (logit - largest) / temperature


@triton.jit(do_not_specialize_on_alignment=OF_DRAWS)
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
    """Returns how many logits are above `middle` (with BY_MASS: the sum of their exponentials); the least of these; the
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
    """Returns the least logit, from `low` on, such that the number of logits above it (with BY_MASS: the sum of their
    exponentials) is less than `limit`. `low` must be a logit of the row. The largest logit, 0, is always kept.

    An interval that contains the result is halved until one logit is left in it; its ends are logits themselves.
    """
    high = tl.zeros_like(low)
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle < high, middle, low)  # if there is no float in between
        total, above, below = beyond(row, vocab_size, largest, temperature, middle, BY_MASS, BLOCK)
        low = tl.where(total < limit, low, above)
        high = tl.where(total < limit, below, high)
    return high


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=OF_DRAWS)
def least_kernel(
    least, largest, logits, rows, temperatures, log_min_p, top_k, top_p, vocab_size, num_parts, stride_row,
    BLOCK: tl.constexpr, PARTS_PAD: tl.constexpr,
):  # fmt: skip
    """Program (draw): the least logit that its filters keep, after the temperature. Each filter acts on the tokens that
    the one before has left; ties with the least are kept."""
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


@triton.jit(do_not_specialize_on_alignment=OF_DRAWS)
def race_kernel(
    scores, winners, largest, least, logits, rows, temperatures, keys, vocab_size, stride_row,
    PART: tl.constexpr, BLOCK: tl.constexpr, PARTS_PAD: tl.constexpr, IS_FILTERED: tl.constexpr,
):  # fmt: skip
    """Program (draw, part of the vocabulary): the token with the best score; of equal ones, the smallest id."""
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
    """Program (draw): writes the best of all parts' winners to its index in the step's output."""
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
    """Samples draw i from row rows[i] of logits and writes the token to token_ids[targets[i]].

    token_ids: int64 [num_draws]; targets: int64 [n]; logits: float32 [num_rows, vocab]; rows: int64 [n];
    temperatures: float32 [n]; keys: int64 [n]. limits: None keeps all tokens; else three tensors [n]: log of min-p,
    float32 (-inf: off); top-k, int64 (the vocabulary's size: off); top-p, float32 (2: off).
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
    """Returns the largest logit of each part of these rows: float32 [n, num_parts]."""
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
    """Returns the least logit that the limits keep of each draw, float32 [n]; shifted and divided as by load_scaled."""
    num_draws, num_parts = largest.shape
    least = logits.new_empty(num_draws)
    least_kernel[(num_draws,)](
        least, largest, logits, rows, temperatures, *limits, logits.shape[1], num_parts, logits.stride(0),
        BLOCK=FILTER_BLOCK, PARTS_PAD=triton.next_power_of_2(num_parts), num_warps=16,
    )  # fmt: skip
    return least
