"""Changes logits before a token is sampled: biases and masks, penalties, filters; in float32, each row on its own.

The order is vLLM's (v1/sample/sampler.py): masks and biases, penalties, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NEGATIVE_INFINITY = float("-inf")


class Edits(NamedTuple):
    """Values that are added to single logits; -inf forbids a token."""

    draws: Tensor  # int64 [num_edits], the draw that each is for; ascending
    tokens: Tensor  # int64 [num_edits]
    values: Tensor  # float32 [num_edits]


class Penalties(NamedTuple):
    """The penalties of each draw, and the tokens so far (prompt plus generated) of each draw."""

    repetition: Tensor  # float32 [n]
    presence: Tensor  # float32 [n]
    frequency: Tensor  # float32 [n]
    draws: Tensor  # int64 [num_known], the draw that each token belongs to; ascending
    tokens: Tensor  # int32 [num_known]
    is_output: Tensor  # float32 [num_known], 1 for generated tokens, 0 for those of the prompt


class Filters(NamedTuple):
    """The limits that remove tokens before sampling."""

    log_min_p: Tensor  # float32 [n], -inf: off
    top_k: Tensor  # int64 [n], the vocabulary's size: off
    top_p: Tensor  # float32 [n], 2: off


def edit(logits: Tensor, edits: Edits) -> None:
    """Adds the edits to single logits, in place. logits: float32 [n, vocab], contiguous."""
    places = edits.draws * logits.shape[-1] + edits.tokens
    logits.view(-1).scatter_add_(0, places, edits.values)


def penalise(logits: Tensor, penalties: Penalties) -> None:
    """Applies penalties in place: repetition (Keskar et al. 2019, Hugging Face's rule) for tokens of prompt and output;
    presence and frequency (OpenAI's) for tokens of the output. logits: float32 [n, vocab]."""
    places = penalties.draws * logits.shape[-1] + penalties.tokens  # [num_known]
    counts = torch.zeros_like(logits)
    counts.view(-1).scatter_add_(0, places, torch.ones_like(penalties.is_output))
    repetition = torch.where(counts > 0, penalties.repetition[:, None], 1.0)  # [n, vocab]
    torch.where(logits > 0, logits / repetition, logits * repetition, out=logits)
    counts.zero_().view(-1).scatter_add_(0, places, penalties.is_output)
    logits -= counts * penalties.frequency[:, None]
    logits -= (counts > 0) * penalties.presence[:, None]


def filter_(logits: Tensor, filters: Filters, num_ranked: int) -> None:
    """Masks the tokens that the filters remove, in place. logits: float32 [n, vocab], after the temperature, largest 0.

    Each filter acts on the tokens that the one before has left, renormalised. Ties with the least likely kept token are
    kept too, so that the result does not depend on how a device sorts equals. num_ranked: how many of the largest
    logits are needed in order. It is 0 if neither top-k nor top-p is used, the largest top_k if every row with a top_p
    has a top_k, and otherwise the vocabulary's size (a full sort).
    """
    logits.masked_fill_(logits < filters.log_min_p[:, None], NEGATIVE_INFINITY)
    if not num_ranked:
        return
    if num_ranked < logits.shape[-1]:
        ranked = logits.topk(num_ranked, dim=-1).values  # [n, num_ranked]
    else:
        ranked = logits.sort(dim=-1, descending=True).values
    least = ranked.gather(1, filters.top_k.clamp(max=num_ranked)[:, None] - 1)  # [n, 1]
    is_unlimited = filters.top_k >= logits.shape[-1]
    least.masked_fill_(is_unlimited[:, None], NEGATIVE_INFINITY)
    logits.masked_fill_(logits < least, NEGATIVE_INFINITY)
    probs = (ranked - logits.logsumexp(dim=-1, keepdim=True)).exp_()
    before = probs.cumsum(dim=-1) - probs  # total probability of all likelier tokens
    num_kept = (before < filters.top_p[:, None]).sum(dim=-1, keepdim=True).clamp_(min=1)  # [n, 1]
    nucleus = ranked.gather(1, num_kept - 1)
    nucleus.masked_fill_((filters.top_p > 1.0)[:, None], NEGATIVE_INFINITY)
    logits.masked_fill_(logits < nucleus, NEGATIVE_INFINITY)
