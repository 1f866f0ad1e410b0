"""Beam search over the rows of a plan: which continuations go on, which are finished, which beams are dropped.

A step of a group considers every continuation of every live beam, ranked by summed log-probability. The rules are those
of Hugging Face's `generate` with `early_stopping=True`:

- a stop token among the best `beam_width` continuations finishes a hypothesis; a less likely one is ignored;
- the best `beam_width` continuations without a stop token are the next live beams;
- the search ends when `beam_width` hypotheses are finished; beams that are still live are dropped in that step. All
  hypotheses that finish in the last step are kept, so there can be up to 2 * beam_width - 1;
- at the length limit, which all beams of a group reach together, the best `beam_width` continuations finish, with a
  stop token or without.

The core decides when a sequence ends: a finished hypothesis is an Outcome whose token is a stop token, or reaches the
limit.

No state is kept from step to step: a row has its sum (`score`) and the number of finished sequences of its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from real.sampling.logprobs import MAX_SCORED_ELEMENTS, at_a_time, in_parts
from testbed.core.outcome import Outcome, TokenLogprobs
from testbed.core.plan import ScheduledSequence
from testbed.core.request import SamplingParams


class BeamInputs(NamedTuple):
    """The beams among the rows that sample, and how many continuations of each are considered."""

    rows: Tensor  # int64 [num_beams], indices into the rows that sample
    num_candidates: int


class Candidates(NamedTuple):
    """The best continuations of each beam, best first; of equals the smaller token id."""

    log_probs: Tensor  # float32 [num_beams, num_candidates]
    token_ids: Tensor  # int64 [num_beams, num_candidates]


class Continuation(NamedTuple):
    """One beam and its next token. Sorts best first; ties by row, then by place: so candidates of a row beyond those
    that it needs, which other requests of the batch may ask for, change nothing."""

    negative_score: float
    row: int  # index into the group's rows
    place: int  # among the row's candidates
    token: int


def is_beam(row: ScheduledSequence) -> bool:
    """Whether the row's next token is found by beam search, not sampled."""
    return row.sampling.beam_width > 0 and not row.forced


def beam_inputs(sampled: Sequence[ScheduledSequence]) -> BeamInputs | None:
    """Returns the beams among the rows that sample, on the host; None if there are none."""
    beams = [(number, row.sampling) for number, row in enumerate(sampled) if is_beam(row)]
    if not beams:
        return None
    # enough for a row's best `width` tokens and its best `width` tokens that do not end it (EOS is one more stop token)
    needed = [
        max(sampling.beam_width + len(sampling.stop_token_ids) + 1, sampling.logprobs or 0) for _, sampling in beams
    ]
    return BeamInputs(torch.tensor([number for number, _ in beams]), max(needed))


def stop_tokens(sampling: SamplingParams, eos_token_id: int | None) -> tuple[int, ...]:
    """Returns the tokens at which the core ends a sequence."""
    if eos_token_id is None or sampling.ignore_eos:
        return sampling.stop_token_ids
    return (*sampling.stop_token_ids, eos_token_id)


def advance(
    rows: Sequence[ScheduledSequence], candidates: Candidates, eos_token_id: int | None, max_model_len: int
) -> list[Outcome]:
    """Returns one outcome for each beam row of a step, in row order. Waits for the device."""
    log_probs, token_ids = candidates.log_probs.tolist(), candidates.token_ids.tolist()
    outcomes: list[Outcome] = []
    seen: list[int] = []
    for group_id, members in groupby(rows, key=lambda row: row.group_id):
        assert group_id not in seen, f"the beams of group {group_id} do not stand together"
        seen.append(group_id)
        group = list(members)
        part = slice(len(outcomes), len(outcomes) + len(group))
        outcomes += _advance_group(group, log_probs[part], token_ids[part], eos_token_id, max_model_len)
    return outcomes


def _advance_group(
    rows: list[ScheduledSequence],
    log_probs: list[list[float]],
    token_ids: list[list[int]],
    eos_token_id: int | None,
    max_model_len: int,
) -> list[Outcome]:
    first, sampling = rows[0], rows[0].sampling
    position = first.start + first.num_tokens
    assert all(row.start + row.num_tokens == position for row in rows), (
        f"the beams of group {first.group_id} are not of one length"
    )
    width, stops = sampling.beam_width, stop_tokens(sampling, eos_token_id)
    ranked = sorted(
        Continuation(-(row.score + log_prob), index, place, token)
        for index, row in enumerate(rows)
        for place, (log_prob, token) in enumerate(zip(log_probs[index], token_ids[index], strict=True))
    )
    num_output_tokens = position + 1 - first.num_prompt_tokens  # with this step's
    if num_output_tokens <= sampling.min_tokens:  # too early to end
        ranked = [each for each in ranked if each.token not in stops]
    finished = [each for each in ranked[:width] if each.token in stops]
    if num_output_tokens == sampling.max_tokens or position + 1 >= max_model_len:
        live = [each for each in ranked[:width] if each.token not in stops]  # they end with this token
    elif first.num_finished + len(finished) >= width:
        live = []
    else:
        live = [each for each in ranked if each.token not in stops][:width]
    outcomes: list[Outcome] = []
    for index, row in enumerate(rows):
        # a live continuation comes first, so that it keeps the sequence and its blocks
        own = [each for each in (*live, *finished) if each.row == index]
        top = tuple(zip(token_ids[index], log_probs[index], strict=True))[: sampling.logprobs or 0]
        values = [log_probs[index][each.place] for each in own]
        logprobs = tuple([TokenLogprobs(value, 1 + log_probs[index].index(value), top) for value in values])
        tokens = tuple([each.token for each in own])
        outcomes.append(Outcome(row.seq_id, tokens[:1], forks=tokens[1:], dropped=not tokens, logprobs=logprobs))
    return outcomes


def best_continuations(logits: Tensor, inputs: BeamInputs) -> Candidates:
    """Returns the best next tokens of each beam. logits: float32 [num_rows, vocab]. Does not wait for the device."""
    vocab_size = logits.shape[-1]
    num_candidates = min(inputs.num_candidates, vocab_size)

    def some(rows: Tensor) -> Candidates:
        chosen = logits[rows]  # [at most that many, vocab]
        token_ids = _keys(chosen).topk(num_candidates, dim=-1).indices  # [at most that many, num_candidates]
        return Candidates(chosen.gather(-1, token_ids) - chosen.logsumexp(dim=-1, keepdim=True), token_ids)

    return Candidates(*in_parts(some, at_a_time(MAX_SCORED_ELEMENTS, vocab_size), inputs.rows))


def _keys(logits: Tensor) -> Tensor:
    """Returns int64 numbers in the order of the logits, no two of a row equal: of equal logits the smaller token id is
    larger. topk itself takes any of equals, and others for another k."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    vocab_size = logits.shape[-1]
    return ordered * vocab_size + torch.arange(vocab_size - 1, -1, -1, device=logits.device)
