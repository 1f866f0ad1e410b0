"""Turns the rows of a plan into the tensors from which the device samples. Runs on the host; a backend sends them.

A *draw* is one token to choose, at random or as the largest logit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from real.sampling.beams import BeamInputs, beam_inputs, stop_tokens
from real.sampling.logprobs import at_a_time
from real.sampling.noise import Streams, draw_keys, streams_of
from real.sampling.shaping import Edits, Filters, Penalties
from testbed.core.plan import ScheduledSequence
from testbed.core.request import SamplingParams

T = TypeVar("T")
FORBIDDEN = float("-inf")
NO_TOP_P = 2.0  # no sum of probabilities reaches it: the filter is off
MAX_NOISE_ELEMENTS = 2**22  # draws x vocabulary at a time: bounds the memory of copied logits and 64-bit hashes


class Source(NamedTuple):
    """What draws depend on in addition to their rows. run_seed: for requests without a seed."""

    vocab_size: int
    run_seed: int = 0
    eos_token_id: int | None = None


class Kind(NamedTuple):
    """Draws of one kind are computed together. All False: the largest logit, which needs no inputs."""

    is_random: bool = False
    is_edited: bool = False
    is_penalised: bool = False
    is_filtered: bool = False
    is_sorted: bool = False  # top-p without top-k: all tokens must be sorted


GREEDY = Kind()


class Draw(NamedTuple):
    """One token to choose. target: its index in the step's output. number: index of its row among those that sample.
    member: which of the row's draws it is."""

    target: int
    number: int
    row: ScheduledSequence
    member: int = 0


class DrawGroup(NamedTuple):
    """Draws of one kind; at most `draws_at_a_time` if logits are copied for them."""

    targets: Tensor  # int64 [n], indices in the step's output
    rows: Tensor  # int64 [n], among the rows that sample
    temperatures: Tensor | None  # float32 [n]
    keys: Tensor | None  # int64 [n], one hash key for each draw
    edits: Edits | None
    penalties: Penalties | None
    filters: Filters | None
    num_ranked: int  # how many of the likeliest tokens the filters need in order
    streams: Streams | None = None  # on the host: the part of the keys that does not depend on positions

    @property
    def is_copied(self) -> bool:
        return self.edits is not None or self.penalties is not None


class LogprobInputs(NamedTuple):
    """Tokens whose log-probabilities are requested."""

    rows: Tensor  # int64 [m], among the rows that sample
    targets: Tensor  # int64 [m], indices in the step's output
    num_top: tuple[int, ...]  # how many of the likeliest tokens are requested with each


class PromptInputs(NamedTuple):
    """Tokens of prompts whose log-probabilities are requested."""

    places: Tensor  # int64 [m], indices in the batch of the tokens that predict them
    token_ids: Tensor  # int64 [m]
    num_top: tuple[int, ...]  # how many of the likeliest tokens are requested with each
    parts: tuple[tuple[int, int, int], ...]  # (seq_id, position of the first token, number of tokens) for each row


class SampleInputs(NamedTuple):
    """Everything that is sampled in a step.

    The output has the first token of each row that samples, in order of the rows. After these come the further tokens
    of random rows that sample several.
    """

    forks: list[tuple[int, ...]]  # for each row that samples, indices in the output of its tokens after the first
    num_draws: int  # length of the output
    needs_argmax: bool  # whether any row takes the largest of its unchanged logits
    groups: tuple[DrawGroup, ...]
    logprobs: LogprobInputs | None
    prompts: PromptInputs | None
    beams: BeamInputs | None


def sample_inputs(rows: Sequence[ScheduledSequence], source: Source) -> SampleInputs:
    """Returns the inputs for the rows of a plan."""
    sampled = [row for row in rows if row.samples]
    groups: dict[Kind, list[Draw]] = {}
    forks: list[tuple[int, ...]] = []
    num_draws = len(sampled)
    for number, row in enumerate(sampled):
        kind = kind_of(row, source)
        group = groups.setdefault(kind, [])
        group.append(Draw(number, number, row))
        own: tuple[int, ...] = ()
        if row.num_samples > 1 and kind.is_random:
            own = tuple(range(num_draws, num_draws + row.num_samples - 1))
            group += [Draw(place, number, row, member) for member, place in enumerate(own, 1)]
            num_draws += len(own)
        elif row.num_samples > 1 and not row.sampling.beam_width:
            own = (number,) * (row.num_samples - 1)
        forks.append(own)
    needs_argmax = groups.pop(GREEDY, None) is not None
    return SampleInputs(
        forks,
        num_draws,
        needs_argmax,
        tuple([_group(kind, part, source) for kind, draws in groups.items() for part in _parts(kind, draws, source)]),
        _logprob_inputs(sampled, forks),
        _prompt_inputs(rows, source.vocab_size),
        beam_inputs(sampled),
    )


def kind_of(row: ScheduledSequence, source: Source) -> Kind:
    """Returns how the row's tokens are chosen. Beams use the unchanged logits."""
    sampling = row.sampling
    if sampling.beam_width:
        return GREEDY
    is_edited = bool(sampling.logit_bias) or bool(sampling.min_tokens and _ends_too_early(row))
    is_penalised = sampling.is_penalised
    if not sampling.temperature > 0.0:
        return Kind(False, is_edited, is_penalised) if is_edited or is_penalised else GREEDY
    is_limited = 0 < sampling.top_k < source.vocab_size
    return Kind(True, is_edited, is_penalised, sampling.is_filtered, sampling.top_p < 1.0 and not is_limited)


def _ends_too_early(row: ScheduledSequence) -> bool:
    """Whether the sequence has fewer than `min_tokens` output tokens, so that it must not end now."""
    return row.start + row.num_tokens - row.num_prompt_tokens < row.sampling.min_tokens


# --- draws ---


def draws_at_a_time(vocab_size: int) -> int:
    return at_a_time(MAX_NOISE_ELEMENTS, vocab_size)


def _parts(kind: Kind, draws: list[Draw], source: Source) -> list[list[Draw]]:
    """Splits draws of one kind into the draws of one DrawGroup each."""
    if not (kind.is_edited or kind.is_penalised):
        return [draws]
    size = draws_at_a_time(source.vocab_size)
    return [draws[begin : begin + size] for begin in range(0, len(draws), size)]


def _group(kind: Kind, draws: list[Draw], source: Source) -> DrawGroup:
    temperatures = keys = streams = None
    if kind.is_random:
        temperatures = _floats([draw.row.sampling.temperature for draw in draws])
        streams = streams_of([draw.row for draw in draws], [draw.member for draw in draws], source.run_seed)
        positions = np.array([draw.row.start + draw.row.num_tokens for draw in draws])
        keys = torch.from_numpy(draw_keys(streams, positions))
    edits = _edits(draws, source) if kind.is_edited else None
    penalties = _penalties(draws) if kind.is_penalised else None
    filters, num_ranked = _filters(draws, source.vocab_size) if kind.is_filtered else (None, 0)
    targets, rows = torch.tensor([draw.target for draw in draws]), torch.tensor([draw.number for draw in draws])
    return DrawGroup(targets, rows, temperatures, keys, edits, penalties, filters, num_ranked, streams)


def _edits(draws: list[Draw], source: Source) -> Edits:
    each: list[list[tuple[int, float]]] = []
    for draw in draws:
        sampling = draw.row.sampling
        own = list(sampling.logit_bias)
        assert all(token < source.vocab_size for token, _ in own), "biases are of tokens in the model's vocabulary"
        if sampling.min_tokens and _ends_too_early(draw.row):
            stops = stop_tokens(sampling, source.eos_token_id)
            own += [(token, FORBIDDEN) for token in stops if token < source.vocab_size]
        each.append(own)
    counts = [len(own) for own in each]
    flat = [item for own in each for item in own]
    return Edits(
        torch.from_numpy(np.repeat(np.arange(len(draws)), counts)),
        torch.tensor([token for token, _ in flat], dtype=torch.int64),
        _floats([value for _, value in flat]),
    )


def _penalties(draws: list[Draw]) -> Penalties:
    params = [draw.row.sampling for draw in draws]
    histories = [np.asarray(draw.row.history, dtype=np.int32) for draw in draws]
    counts = [len(history) for history in histories]
    for draw, count in zip(draws, counts, strict=True):
        assert count == draw.row.start + draw.row.num_tokens, "a row that is penalised says all its known tokens"
    draw_of = np.repeat(np.arange(len(draws)), counts)
    positions = np.concatenate([np.arange(count) for count in counts])
    is_output = positions >= np.repeat([draw.row.num_prompt_tokens for draw in draws], counts)
    return Penalties(
        _floats([one.repetition_penalty for one in params]),
        _floats([one.presence_penalty for one in params]),
        _floats([one.frequency_penalty for one in params]),
        torch.from_numpy(draw_of),
        torch.from_numpy(np.concatenate(histories)),
        torch.from_numpy(is_output.astype(np.float32)),
    )


def _filters(draws: list[Draw], vocab_size: int) -> tuple[Filters, int]:
    params = [draw.row.sampling for draw in draws]
    top_k = [min(one.top_k, vocab_size) if one.top_k > 0 else vocab_size for one in params]
    log_min_p = np.log(np.array([one.min_p for one in params]), where=[one.min_p > 0 for one in params],
                       out=np.full(len(params), -np.inf))  # fmt: skip
    if any(one.top_p < 1.0 and k == vocab_size for one, k in zip(params, top_k, strict=True)):
        num_ranked = vocab_size
    else:
        num_ranked = max([k for k in top_k if k < vocab_size], default=0)
    filters = Filters(
        torch.from_numpy(log_min_p.astype(np.float32)),
        torch.tensor(top_k),
        _floats([one.top_p if one.top_p < 1.0 else NO_TOP_P for one in params]),
    )
    return filters, num_ranked


def _floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


# --- log-probabilities ---


def _logprob_inputs(sampled: list[ScheduledSequence], forks: list[tuple[int, ...]]) -> LogprobInputs | None:
    """Returns the inputs for every token that a row emits. A forced row emits none; beams compute their own."""
    wanted = [
        (number, place, row.sampling.logprobs or 0)
        for number, row in enumerate(sampled)
        if row.sampling.needs_logprobs and not row.forced and not row.sampling.beam_width
        for place in (number, *forks[number])
    ]
    if not wanted:
        return None
    rows, targets, num_top = zip(*wanted, strict=True)
    return LogprobInputs(torch.tensor(rows), torch.tensor(targets), num_top)


def _prompt_inputs(rows: Sequence[ScheduledSequence], vocab_size: int) -> PromptInputs | None:
    """Returns the tokens of prompts to score: each computed token predicts the next, if that is in the prompt too."""
    places: list[int] = []
    token_ids: list[int] = []
    num_top: list[int] = []
    parts: list[tuple[int, int, int]] = []
    first = 0
    for row in rows:
        if row.sampling.prompt_logprobs is not None:
            num = min(row.start + row.num_tokens, row.num_prompt_tokens - 1) - row.start
            if num > 0:
                assert len(row.history) >= row.num_prompt_tokens, "the row says all its known tokens"
                places += range(first, first + num)
                token_ids += row.history[row.start + 1 : row.start + 1 + num]
                num_top += [row.sampling.prompt_logprobs] * num
                parts.append((row.seq_id, row.start + 1, num))
        first += row.num_tokens
    if not parts:
        return None
    assert 0 <= min(token_ids) <= max(token_ids) < vocab_size, "every token is in the model's vocabulary"
    return PromptInputs(torch.tensor(places), torch.tensor(token_ids), tuple(num_top), tuple(parts))


def heaviest_rows(num_rows: int) -> list[ScheduledSequence]:
    """Returns rows that use every feature of the sampler, to measure its memory. The second samples from all tokens
    without a filter, which is another kind of draw, with other kernels."""
    sampling = SamplingParams(
        temperature=1.0, top_p=0.9, min_p=0.1, repetition_penalty=1.1, logprobs=1, logit_bias=((0, 1.0),)
    )
    plain = SamplingParams(temperature=1.0)
    return [
        ScheduledSequence(
            number, 0, 1, (0,), True, False, (), plain if number == 1 else sampling, num_prompt_tokens=1, history=(0,)
        )
        for number in range(num_rows)
    ]


# --- sending to the device ---


def sent(inputs: T, send: Callable[[Sequence[np.ndarray]], list[Tensor]]) -> T:
    """Returns the inputs with tensors replaced by those that `send` returns; it gets all of them at once, as arrays."""
    leaves = list(_tensors(inputs))
    if not leaves:
        return inputs
    return cast(T, _rebuilt(inputs, iter(send([tensor.numpy() for tensor in leaves]))))


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, tuple):
        for part in item:
            if isinstance(part, Tensor | tuple):
                yield from _tensors(part)


def _rebuilt(item: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(item, Tensor):
        return next(tensors)
    if not isinstance(item, tuple):
        return item
    parts = [_rebuilt(part, tensors) for part in item]
    return type(item)(*parts) if hasattr(item, "_fields") else tuple(parts)
