"""Which steps a profile measures: a grid over the quantities that a step's time depends on, within the engine's limits.

An episode is a few decoding sequences and other work in the same steps, step by step. Sizes grow geometrically, and
many are not round, because kernels favour multiples of 16 and traffic does not. To separate the terms of a cost model,
there are: the same decodes with and without prompts, with short and long contexts, of equal and of different lengths;
the same tokens as one prompt and as several, with and without a cached prefix, with and without decodes; chunks that do
not end their prompt and so need no logits; blocks swapped out, in, both, and copied, next to the same decodes. Steps of
only prompts are measured after one another and between steps of decodes, as these leave different data in a CPU's
caches. All functions are pure functions of the room and a seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import NamedTuple

from testbed.core.plan import PrefillChunk

MIN_CONTEXT = 8  # tokens of the shortest decoding sequences
COMMON_CONTEXT = 1024  # tokens of sequences with a prefix in common that are not the longest
NUM_ALONE = 3  # measured steps of an episode of decodes only
SPLITS = (1, 2, 4, 16)  # numbers of prompts into which a prefill's tokens are split
MAX_WAITING = 64  # most decoding sequences that wait while prompts are computed
MAX_MOVED_SHARE = 4  # at most a fourth of the GPU pool is moved at once
Batch = tuple[PrefillChunk, ...]


class Room(NamedTuple):
    """The limits of the engine and its scheduler."""

    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class Moves(NamedTuple):
    """Blocks that one step moves."""

    num_out: int = 0
    num_in: int = 0
    num_copied: int = 0


@dataclass(frozen=True, slots=True)
class Episode:
    """Steps with decoding sequences of these contexts: `num_alone` steps of decodes only, one step for each of `moves`,
    and one for each of `batches`. A batch is prompts that arrive together: (cached prefix, new tokens) each.

    budget: token budget of a step; None: no limit. Only with a budget is a prompt cut into chunks. decodes_wait:
    prompts are computed without decodes, and each batch is followed by a step of decodes only. num_common: whole blocks
    of tokens with which all decoding sequences begin, and which they share.
    """

    contexts: tuple[int, ...] = ()
    num_alone: int = 0
    moves: tuple[Moves, ...] = ()
    batches: tuple[Batch, ...] = ()
    budget: int | None = None
    decodes_wait: bool = False
    num_common: int = 0

    @property
    def num_steps(self) -> int:
        """The most steps that the decoding sequences take, steps of chunks and a few for the setup included."""
        chunks = [sum(chunk.num_tokens for chunk in batch) for batch in self.batches]
        budget = None if self.budget is None else max(1, self.budget - len(self.contexts))
        num_chunks = len(chunks) if budget is None else sum(tokens // budget + 2 for tokens in chunks)
        num_chunks += len(chunks) * self.decodes_wait
        num_setup = 0 if budget is None else sum(self.contexts) // budget + 2 * len(self.contexts)
        return num_setup + self.num_alone + len(self.moves) + num_chunks + 3

    def fits(self, room: Room) -> bool:
        """Whether the GPU's blocks and max_num_seqs are enough, and no sequence is too long."""
        longest = [context + self.num_steps for context in self.contexts]
        ends = [sum(chunk) for batch in self.batches for chunk in batch]
        held = sum(map(room.blocks, longest))
        held += sum(room.blocks(chunk.start) for batch in self.batches for chunk in batch)
        held += max((sum(room.blocks(sum(chunk)) for chunk in batch) for batch in self.batches), default=0)
        widest = max(map(len, self.batches), default=0) + len(self.contexts)
        return (
            held <= room.num_gpu_blocks
            and widest <= room.max_num_seqs
            and max((*longest, *ends), default=0) < room.max_model_len
        )


def design(room: Room, *, is_quick: bool = False, seed: int = 0) -> list[Episode]:
    """Returns the episodes of a profile that fit, each once. is_quick: only a few sizes of each kind."""
    draw = Random(seed)
    parts = (_decodes, _prefills, _cached, _mixed, _chunks, _moves)
    return list(dict.fromkeys(one for part in parts for one in part(room, is_quick, draw) if one.fits(room)))


def anywhere(num_blocks: int, seed: int = 0) -> list[int]:
    """Returns all blocks in random order, as a pool after long use allocates them."""
    return Random(seed).sample(range(num_blocks), num_blocks)


def ladder(low: int, high: int, factor: int, draw: Random | None = None) -> list[int]:
    """Returns sizes from low to high, each `factor` times the last; with `draw`, also random ones in between."""
    if low > high:
        return []
    sizes = [low]
    while sizes[-1] * factor < high:
        sizes.append(sizes[-1] * factor)
    sizes.append(high)
    between = [] if draw is None else [draw.randint(a + 1, b - 1) for a, b in pairwise(sizes) if b - a > 1]
    return sorted({*sizes, *between})


def rungs(low: int, high: int, factor: int, draw: Random) -> list[int]:
    """Returns both ends of a ladder, and a random size from each of its intervals: few are round, as in traffic."""
    between = [draw.randint(a, b - 1) for a, b in pairwise(ladder(low, high, factor))]
    return sorted({low, high, *between}) if low <= high else []


def _decodes(room: Room, is_quick: bool, draw: Random) -> Iterator[Episode]:
    """Decodes only: batch sizes, each with equal contexts from short to the longest that fit, and with random ones."""
    most = min(room.max_num_seqs, room.max_num_batched_tokens, room.num_gpu_blocks)
    for num in ladder(1, most, 4, None) if is_quick else ladder(1, most, 2, draw):
        longest = _longest_context(room, num, NUM_ALONE)
        if longest < 1:
            continue
        shortest = min(MIN_CONTEXT, longest)
        shares = (0.0, 1.0) if is_quick else (0.0, 1 / 3, 2 / 3, 1.0)
        for context in sorted({round(shortest * (longest / shortest) ** share) for share in shares}):
            yield Episode((context,) * num, NUM_ALONE)
        yield Episode(tuple(draw.randint(1, longest) for _ in range(num)), NUM_ALONE)
        contexts = longest, min(longest, COMMON_CONTEXT)
        for context, share in itertools.product(contexts, (0.25, 0.75)):  # the same contexts, of which a part is shared
            num_common = int(context * share) // room.block_size * room.block_size
            if num > 1 and num_common:
                yield Episode((context,) * num, NUM_ALONE, num_common=num_common)


def _longest_context(room: Room, num: int, num_steps: int, *, beside: int = 0) -> int:
    """Returns the longest context of `num` equal sequences that fit together, leave `beside` blocks free, and decode
    for `num_steps` and a few more."""
    held = (room.num_gpu_blocks - beside) // num * room.block_size
    return min(held, room.max_model_len - 1) - num_steps - 4


def _prefills(room: Room, is_quick: bool, draw: Random) -> Iterator[Episode]:
    """Prompts only, without other sequences and while decodes wait: sizes and splits."""
    most = min(room.max_num_batched_tokens, room.max_model_len - 2, room.num_gpu_blocks * room.block_size)
    for total in rungs(2, most, 4, draw) if is_quick else ladder(2, most, 2, draw):
        splits = [_split(total, num) for num in SPLITS if num * 2 <= total and num <= room.max_num_seqs]
        yield Episode(batches=tuple(splits))
        most_waiting = min(MAX_WAITING, room.max_num_seqs // 2, room.max_num_batched_tokens, room.num_gpu_blocks)
        num_waiting = draw.randint(1, max(1, most_waiting))
        splits = [batch for batch in splits if len(batch) + num_waiting <= room.max_num_seqs]
        beside = max((sum(room.blocks(chunk.num_tokens) for chunk in batch) for batch in splits), default=0)
        longest = _longest_context(room, num_waiting, 2 * len(splits), beside=beside)
        if splits and longest > 0:
            contexts = tuple(draw.randint(1, longest) for _ in range(num_waiting))
            yield Episode(contexts, batches=tuple(splits), decodes_wait=True)
    together = room.max_num_batched_tokens
    if together > most > 0:  # more than one prompt can have, but several can
        num = -(-together // most)
        yield Episode(batches=tuple([_split(together, parts) for parts in (num, 2 * num) if parts <= together]))


def _split(total: int, num: int) -> Batch:
    return tuple(PrefillChunk(0, total // num + (index < total % num)) for index in range(num))


def _cached(room: Room, is_quick: bool, draw: Random) -> Iterator[Episode]:
    """Prompts after a cached prefix, as after a prefix-cache hit or an earlier chunk."""
    longest = min(room.max_model_len - 2, room.num_gpu_blocks // 2 * room.block_size)
    most = min(room.max_num_batched_tokens, longest)
    for num_tokens in ladder(1, most, 16, None) if is_quick else ladder(1, most, 4, draw):
        farthest = (longest - num_tokens) // room.block_size
        for num_blocks in ladder(1, farthest, 8 if is_quick else 4):
            yield Episode(batches=((PrefillChunk(num_blocks * room.block_size, num_tokens),),))


def _mixed(room: Room, is_quick: bool, draw: Random) -> Iterator[Episode]:
    """Prompts and chunks in steps with decodes."""
    most = min(room.max_num_seqs, room.max_num_batched_tokens) - 1
    for num in ladder(1, most, 16, None) if is_quick else rungs(1, most, 2, draw):
        left = min(room.max_num_batched_tokens - num, room.max_model_len - 2)
        sizes = rungs(1, left, 16, draw) if is_quick else ladder(1, left, 4, draw)
        start = room.max_model_len // 2 // room.block_size * room.block_size  # of a prompt after a cached prefix
        beside = max(room.blocks(left) + 4, 2 * room.blocks(start) + 1)
        longest = _longest_context(room, num, 1, beside=min(beside, room.num_gpu_blocks // 2))
        if longest < 1:
            continue
        kinds = [(context,) * num for context in sorted({min(MIN_CONTEXT, longest), max(1, longest // 4), longest})]
        kinds.append(tuple(draw.randint(1, longest) for _ in range(num)))
        batches = [_split(size, 1) for size in sizes]
        for size in sizes:
            splits = [parts for parts in SPLITS[1:] if 4 * parts <= size and num + parts <= room.max_num_seqs]
            batches += [_split(size, draw.choice(splits))] if splits else []
        for batch in batches:
            for contexts in draw.sample(kinds, 2):
                yield Episode(contexts, batches=(batch,))
        for contexts in kinds:
            yield Episode(contexts, batches=((PrefillChunk(start, min(left, room.block_size)),),))


def _chunks(room: Room, is_quick: bool, draw: Random) -> Iterator[Episode]:
    """Prompts that take several steps; only the last chunk needs logits."""
    longest = min(room.max_model_len - 2, room.num_gpu_blocks // 2 * room.block_size)
    for budget in ladder(16, room.max_num_batched_tokens, 8 if is_quick else 4, None if is_quick else draw):
        for num in (0, min(room.max_num_seqs - 1, budget // 4)):
            prompt = min(longest, 3 * budget + budget // 2)
            if prompt > budget:
                yield Episode((MIN_CONTEXT,) * num, batches=((PrefillChunk(0, prompt),),), budget=budget)


def _moves(room: Room, is_quick: bool, draw: Random) -> Iterator[Episode]:
    """Blocks moved in steps with a few decodes."""
    context = (MIN_CONTEXT,) * min(4, room.max_num_seqs)
    factor, between = (16, None) if is_quick else (4, draw)
    swapped = ladder(1, min(room.num_cpu_blocks, room.num_gpu_blocks // MAX_MOVED_SHARE), factor, between)
    copied = ladder(1, min(room.max_num_seqs, room.num_gpu_blocks // MAX_MOVED_SHARE), factor, between)
    moves = [one for num in swapped for one in (Moves(num), Moves(0, num), Moves(num - num // 2, num // 2))]
    moves += [Moves(0, 0, num) for num in copied]
    draw.shuffle(moves)
    for index in range(0, len(moves), 8):
        yield Episode(context, moves=tuple(moves[index : index + 8]))
