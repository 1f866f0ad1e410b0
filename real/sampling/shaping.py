"""What changes the logits before a token is chosen: biases and masks, penalties, filters. In float32, row by row.

The order is vLLM's (v1/sample/sampler.py): masks and biases, penalties, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NEGATIVE_INFINITY = float("-inf")


class Edits(NamedTuple):
    """Numbers that are added to single logits; -inf forbids a token."""

    draws: Tensor  # int64 [num_edits], ascending
    tokens: Tensor  # int64 [num_edits]
    values: Tensor  # float32 [num_edits]


class Penalties(NamedTuple):
    """What was said before, and what it costs to say it again."""

    repetition: Tensor  # float32 [n]
    presence: Tensor  # float32 [n]
    frequency: Tensor  # float32 [n]
    draws: Tensor  # int64 [num_known], of each known token, ascending
    tokens: Tensor  # int32 [num_known]
    is_output: Tensor  # float32 [num_known], 1 or 0


class Filters(NamedTuple):
    """Which tokens are left to draw from."""

    log_min_p: Tensor  # float32 [n], -inf: off
    top_k: Tensor  # int64 [n], the vocabulary's size: off
    top_p: Tensor  # float32 [n], 2: off


def edit(logits: Tensor, edits: Edits) -> None:
    """Adds to single logits, in place. logits: float32 [n, vocab], contiguous."""
    places = edits.draws * logits.shape[-1] + edits.tokens
    logits.view(-1).scatter_add_(0, places, edits.values)


def penalise(logits: Tensor, penalties: Penalties) -> None:
    """Presence, frequency (OpenAI's: of output tokens) and repetition (Keskar et al. 2019, as Hugging Face has it: of
    prompt and output), in place. logits: float32 [n, vocab]."""
    places = penalties.draws * logits.shape[-1] + penalties.tokens  # [num_known]
    counts = torch.zeros_like(logits)
    counts.view(-1).scatter_add_(0, places, torch.ones_like(penalties.is_output))
    repetition = torch.where(counts > 0, penalties.repetition[:, None], 1.0)  # [n, vocab]
    torch.where(logits > 0, logits / repetition, logits * repetition, out=logits)
    counts.zero_().view(-1).scatter_add_(0, places, penalties.is_output)
    logits -= counts * penalties.frequency[:, None]
    logits -= (counts > 0) * penalties.presence[:, None]


def filter_(logits: Tensor, filters: Filters, num_ranked: int) -> None:
    """Masks what is not to be drawn, in place. logits: float32 [n, vocab], after the temperature, largest 0.

    Each filter sees what the one before has left, renormalised. Tokens as likely as the least likely one that is left
    are left too, so that the result does not depend on how a device orders equals. num_ranked: how many of the largest
    logits must be looked at in order (the vocabulary's size: a full sort; 0: neither top-k nor top-p is used): the
    largest top_k, if every row that has a top_p has a top_k.
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
    before = probs.cumsum(dim=-1) - probs  # of all that is likelier
    num_kept = (before < filters.top_p[:, None]).sum(dim=-1, keepdim=True).clamp_(min=1)  # [n, 1]
    nucleus = ranked.gather(1, num_kept - 1)
    nucleus.masked_fill_((filters.top_p > 1.0)[:, None], NEGATIVE_INFINITY)
    logits.masked_fill_(logits < nucleus, NEGATIVE_INFINITY)
