"""Log-probabilities under the model's own distribution: of the sampled tokens and of the likeliest ones.

They are computed from the model's logits, before biases, penalties, temperature and filters (vLLM's `raw_logprobs`). A
rank is 1 plus the number of strictly likelier tokens. The order of equally likely tokens in a list depends on the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from testbed.core.outcome import TokenLogprobs

MAX_SCORED_ELEMENTS = 2**22  # rows x vocabulary at a time: bounds the memory of copied logits


class Scored(NamedTuple):
    """Log-probabilities of tokens, and the likeliest tokens for each of them."""

    logprobs: Tensor  # float32 [n]
    ranks: Tensor  # int64 [n], from 1
    top_logprobs: Tensor  # float32 [n, num_top], largest first
    top_tokens: Tensor  # int64 [n, num_top]


def score(logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int) -> Scored:
    """Scores `token_ids` int64 [n] in `rows` int64 [n] of logits float32 [num_rows, vocab]. Does not wait."""
    num_top = min(num_top, logits.shape[-1])

    def some(rows: Tensor, token_ids: Tensor) -> Scored:
        return _score(logits.index_select(0, rows), token_ids, num_top)

    return Scored(*in_parts(some, at_a_time(MAX_SCORED_ELEMENTS, logits.shape[-1]), rows, token_ids))


def in_parts(work: Callable[..., Sequence[Tensor]], size: int, *columns: Tensor) -> list[Tensor]:
    """Applies `work` to at most `size` elements of the columns at a time, and concatenates the results."""
    parts = [work(*some) for some in zip(*(torch.split(column, size) for column in columns), strict=True)]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def at_a_time(max_elements: int, vocab_size: int) -> int:
    """Returns how many rows of a vocabulary have at most `max_elements` elements together; at least 1."""
    return max(1, max_elements // vocab_size)


def _score(logits: Tensor, token_ids: Tensor, num_top: int) -> Scored:
    """Scores one token per row. logits: float32 [n, vocab]."""
    total = logits.logsumexp(dim=-1, keepdim=True)  # [n, 1]
    chosen = logits.gather(1, token_ids[:, None])  # [n, 1]
    ranks = (logits > chosen).sum(dim=-1) + 1
    if num_top:
        values, indices = logits.topk(num_top, dim=-1)
    else:
        values, indices = logits[:, :0], ranks[:, None][:, :0]
    return Scored((chosen - total).squeeze(1), ranks, values - total, indices)


def to_lists(scored: Scored, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Returns each token's result on the host, with num_top[i] of the likeliest tokens. Waits for the device."""
    logprobs, ranks, top_logprobs, top_tokens = (column.tolist() for column in scored)
    return [
        TokenLogprobs(logprob, rank, tuple(zip(tokens[:num], values[:num], strict=True)))
        for logprob, rank, values, tokens, num in zip(logprobs, ranks, top_logprobs, top_tokens, num_top, strict=True)
    ]
