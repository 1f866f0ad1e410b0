"""Chooses the tokens of a step, from its logits to its outcomes, without a wait between launch and result.

Random rows use the exponential race: with E_i ~ Exp(1), argmin E_i / p_i is distributed as p. In logarithms this is
argmax (logit_i / temperature - log E_i): no normalisation, no cumulative sum, no wait for the device. Tokens that a
filter removes have the logit -inf and lose every race.

Draws of one kind are computed together. A batch pays for penalties, filters and log-probabilities only if one of its
requests uses them. When the samples of one prompt diverge, a row samples several tokens from the same logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from real import kernels
from real.kernels import host_layers
from real.kernels.host_layers import by_host
from real.sampling.beams import Candidates, advance, best_continuations, is_beam
from real.sampling.inputs import DrawGroup, PromptInputs, SampleInputs, draws_at_a_time
from real.sampling.logprobs import Scored, at_a_time, in_parts, score, to_lists
from real.sampling.noise import log_exponential
from real.sampling.shaping import Filters, edit, filter_, penalise
from testbed.core.outcome import Outcome, PromptLogprobs, TokenLogprobs
from testbed.core.plan import ScheduledSequence

MAX_PROMPT_ELEMENTS = 2**24  # rows x vocabulary of prompt logits at a time

ToLogits = Callable[[Tensor], Tensor]  # indices int64 [m] of the batch's tokens -> logits float32 [m, vocab]


class Drawn(NamedTuple):
    """Results of a step's sampling. Tensors on the host are valid only once the device is done."""

    token_ids: Tensor  # int64 [num_draws]: the first token of each row that samples, then the further ones
    newest: Tensor  # the same on the device
    logprobs: Scored | None
    prompts: Scored | None
    beams: Candidates | None


def launch(logits: Tensor, inputs: SampleInputs, to_logits: ToLogits) -> Drawn:
    """Launches the sampling and scoring of a step. logits: float32 [num_rows, vocab], of the rows that sample; they are
    not changed."""
    token_ids = choose(logits, inputs)
    scored = None
    if inputs.logprobs is not None:
        rows, targets, num_top = inputs.logprobs
        scored = score(logits, rows, token_ids[targets], max(num_top))
    prompts = None if inputs.prompts is None else _score_prompts(inputs.prompts, logits.shape[-1], to_logits)
    beams = None if inputs.beams is None else best_continuations(logits, inputs.beams)
    return Drawn(
        _to_host(token_ids),
        token_ids,
        None if scored is None else Scored(*map(_to_host, scored)),
        None if prompts is None else Scored(*map(_to_host, prompts)),
        None if beams is None else Candidates(*map(_to_host, beams)),
    )


@by_host(host_layers.argmax)
def largest(logits: Tensor) -> Tensor:
    """Logits float32 [num_rows, vocab] -> int64 [num_rows]: the index of the largest."""
    return logits.argmax(dim=-1)


def _to_host(tensor: Tensor) -> Tensor:
    """Copies to pinned memory, after the device's earlier work, without waiting. On a CPU there is nothing to copy."""
    return tensor.to("cpu", non_blocking=True)


def choose(logits: Tensor, inputs: SampleInputs) -> Tensor:
    """Logits float32 [num_rows, vocab] -> ids int64 [num_draws]."""
    if inputs.needs_argmax:
        token_ids = largest(logits)
        if inputs.num_draws > len(token_ids):
            token_ids = torch.cat([token_ids, token_ids.new_empty(inputs.num_draws - len(token_ids))])
    else:
        token_ids = torch.empty(inputs.num_draws, dtype=torch.int64, device=logits.device)
    draw = _draw_by_kernels if kernels.has_kernels(logits.device) else _draw_by_torch
    for group in inputs.groups:
        draw(token_ids, logits, group)
    return token_ids


def _draw_by_kernels(token_ids: Tensor, logits: Tensor, group: DrawGroup) -> None:
    """Writes the token of each draw of the group to token_ids. logits: float32 [num_rows, vocab]."""
    from real.kernels.race import draw_tokens

    if group.temperatures is None or group.keys is None:
        _draw_by_torch(token_ids, logits, group)
        return
    rows = group.rows
    if group.is_copied:
        logits, rows = edited(logits, group), torch.arange(len(rows), device=logits.device)
    draw_tokens(token_ids, group.targets, logits, rows, group.temperatures, group.keys, group.filters)


def _draw_by_torch(token_ids: Tensor, logits: Tensor, group: DrawGroup) -> None:
    """Does the same as `_draw_by_kernels`, if kernels cannot run and for draws that take the largest logit."""
    for part in _cut(group, draws_at_a_time(logits.shape[-1])):
        chosen = shape(logits, part)
        if part.keys is not None:
            chosen -= log_exponential(part.keys, logits.shape[-1])
        token_ids[part.targets] = chosen.argmax(dim=-1)


def edited(logits: Tensor, group: DrawGroup) -> Tensor:
    """Logits float32 [num_rows, vocab] -> a copy for each draw of the group, with biases and penalties: [n, vocab]."""
    chosen = logits.index_select(0, group.rows)
    if group.edits is not None:
        edit(chosen, group.edits)
    if group.penalties is not None:
        penalise(chosen, group.penalties)
    return chosen


def shape(logits: Tensor, group: DrawGroup) -> Tensor:
    """Logits float32 [num_rows, vocab] -> the logits from which each draw of the group is made: float32 [n, vocab]."""
    chosen = edited(logits, group)
    if group.temperatures is None:
        return chosen
    chosen -= chosen.amax(dim=-1, keepdim=True)  # a tiny temperature then gives 0 and -inf, never inf
    chosen /= group.temperatures.clamp(min=1e-30)[:, None]
    if group.filters is not None:
        filter_(chosen, group.filters, group.num_ranked)
    return chosen


def _cut(group: DrawGroup, size: int) -> Iterator[DrawGroup]:
    """Splits the group into parts of at most `size` draws."""
    if len(group.rows) <= size:
        yield group
        return
    assert not group.is_copied, "such a group is made no larger"
    for begin in range(0, len(group.rows), size):
        part = slice(begin, begin + size)
        yield group._replace(
            targets=group.targets[part],
            rows=group.rows[part],
            temperatures=None if group.temperatures is None else group.temperatures[part],
            keys=None if group.keys is None else group.keys[part],
            filters=None if group.filters is None else Filters(*(column[part] for column in group.filters)),
        )


def _score_prompts(prompts: PromptInputs, vocab_size: int, to_logits: ToLogits) -> Scored:
    def some(places: Tensor, token_ids: Tensor) -> Scored:
        logits = to_logits(places)  # [at most that many, vocab]
        return score(logits, torch.arange(len(places), device=logits.device), token_ids, max(prompts.num_top))

    return Scored(*in_parts(some, at_a_time(MAX_PROMPT_ELEMENTS, vocab_size), prompts.places, prompts.token_ids))


# --- results on the host ---


def outcomes(
    sampled: Sequence[ScheduledSequence],
    inputs: SampleInputs,
    drawn: Drawn,
    eos_token_id: int | None,
    max_model_len: int,
) -> tuple[Outcome, ...]:
    """Returns the outcome of each row that samples and is not forced, in order of the rows. Waits for the device."""
    token_ids = drawn.token_ids.tolist()
    beams = [row for row in sampled if is_beam(row)]
    found = iter(() if drawn.beams is None else advance(beams, drawn.beams, eos_token_id, max_model_len))
    scored: Iterator[TokenLogprobs] = iter(())
    if drawn.logprobs is not None and inputs.logprobs is not None:
        scored = iter(to_lists(drawn.logprobs, inputs.logprobs.num_top))
    result: list[Outcome] = []
    for row, first, forks in zip(sampled, token_ids, inputs.forks, strict=False):  # further tokens follow
        if row.forced:
            continue
        if is_beam(row):
            result.append(next(found))
            continue
        further = tuple([token_ids[place] for place in forks]) if forks else ()
        logprobs = tuple([next(scored) for _ in (first, *further)]) if row.sampling.needs_logprobs else ()
        result.append(Outcome(row.seq_id, (first,), forks=further, logprobs=logprobs))
    return tuple(result)


def prompt_logprobs(inputs: SampleInputs, drawn: Drawn) -> tuple[PromptLogprobs, ...]:
    """Returns those of each row that computed a part of a prompt that is to be scored. Waits for the device."""
    if drawn.prompts is None or inputs.prompts is None:
        return ()
    scored = iter(to_lists(drawn.prompts, inputs.prompts.num_top))
    return tuple(
        [
            PromptLogprobs(seq_id, start, tuple([next(scored) for _ in range(num)]))
            for seq_id, start, num in inputs.prompts.parts
        ]
    )
