"""Which steps a profile measures: a grid over what a step's price depends on, within what the engine can do.

An episode is a few sequences that decode, and what is done beside them, step by step. Sizes go up geometrically, and
many of them are not round: kernels like multiples of 16, and traffic does not. What tells the terms of a
price apart: the same decodes, alone and beside prompts, with short and long contexts, equal and ragged; the same tokens
as one prompt and as several, from the start and behind a cached prefix, alone and beside decodes; chunks that do not
end their prompt and so need no logits; blocks moved out, in, both, and copied, beside the same decodes. Prompts alone
come one after the other and between decodes, which leave other things in a CPU's caches, as prompts do to decodes. Pure
functions of the room and a seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import NamedTuple

from testbed.core.plan import PrefillChunk

MIN_CONTEXT = 8  # tokens of the shortest sequences that decode
NUM_ALONE = 3  # measured steps of decodes alone, in an episode that is about them
SPLITS = (1, 2, 4, 16)  # prompts that a prefill of so many tokens is split into
MAX_WAITING = 64  # sequences that wait while prompts are computed
MAX_MOVED_SHARE = 4  # at most a fourth of a pool is moved at once
Batch = tuple[PrefillChunk, ...]


class Room(NamedTuple):
    """What the engine and its scheduler allow."""

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
    """Sequences with these contexts decode; then come `num_alone` steps of decodes alone, one step for each of `moves`,
    and one for each of `batches`, prompts that come together: their cached prefix and their new tokens.

    budget: tokens that a step may compute; None: whatever comes. Only with a budget is a prompt cut into chunks.
    decodes_wait: prompts are computed alone, and after each batch of them comes a step of decodes alone.
    """

    contexts: tuple[int, ...] = ()
    num_alone: int = 0
    moves: tuple[Moves, ...] = ()
    batches: tuple[Batch, ...] = ()
    budget: int | None = None
    decodes_wait: bool = False

    @property
    def num_steps(self) -> int:
        """Steps that sequences which decode take, at most: those of chunks and a few to begin with included."""
        chunks = [sum(chunk.num_tokens for chunk in batch) for batch in self.batches]
        budget = None if self.budget is None else max(1, self.budget - len(self.contexts))
        num_chunks = len(chunks) if budget is None else sum(tokens // budget + 2 for tokens in chunks)
        num_chunks += len(chunks) * self.decodes_wait
        num_setup = 0 if budget is None else sum(self.contexts) // budget + 2 * len(self.contexts)
        return num_setup + self.num_alone + len(self.moves) + num_chunks + 3

    def fits(self, room: Room) -> bool:
        """Whether the pools hold it, and no sequence is too long."""
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
    """The episodes of a profile, each once, none that does not fit. is_quick: a few sizes of each kind."""
    draw = Random(seed)
    parts = (_decodes, _prefills, _cached, _mixed, _chunks, _moves)
    return [one for part in parts for one in part(room, is_quick, draw) if one.fits(room)]


def anywhere(num_blocks: int, seed: int = 0) -> list[int]:
    """Blocks in an order in which a pool that has been in use for long may hand them out."""
    return Random(seed).sample(range(num_blocks), num_blocks)


def ladder(low: int, high: int, factor: int, draw: Random | None = None) -> list[int]:
    """From low to high, each `factor` times the one before; with `draw`, also a size between any two neighbours."""
    if low > high:
        return []
    sizes = [low]
    while sizes[-1] * factor < high:
        sizes.append(sizes[-1] * factor)
    sizes.append(high)
    between = [] if draw is None else [draw.randint(a + 1, b - 1) for a, b in pairwise(sizes) if b - a > 1]
    return sorted({*sizes, *between})


def rungs(low: int, high: int, factor: int, draw: Random) -> list[int]:
    """Both ends of a ladder, and a size from each of its steps between: as traffic has them, seldom a round one."""
    between = [draw.randint(a, b - 1) for a, b in pairwise(ladder(low, high, factor))]
    return sorted({low, high, *between}) if low <= high else []


def _decodes(room: Room, is_quick: bool, draw: Random) -> Iterator[Episode]:
    """Batch sizes, each with contexts from short to as long as fits, and with ragged ones."""
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


def _longest_context(room: Room, num: int, num_steps: int, *, beside: int = 0) -> int:
    """Of `num` equal sequences that fit together, with `beside` blocks left, and then decode for `num_steps` and a
    few."""
    held = (room.num_gpu_blocks - beside) // num * room.block_size
    return min(held, room.max_model_len - 1) - num_steps - 4


def _prefills(room: Room, is_quick: bool, draw: Random) -> Iterator[Episode]:
    """Prompts alone, and while others wait: sizes and splits."""
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
    if together > most > 0:  # no prompt is so long, but several fit into a step
        num = -(-together // most)
        yield Episode(batches=tuple([_split(together, parts) for parts in (num, 2 * num) if parts <= together]))


def _split(total: int, num: int) -> Batch:
    return tuple(PrefillChunk(0, total // num + (index < total % num)) for index in range(num))


def _cached(room: Room, is_quick: bool, draw: Random) -> Iterator[Episode]:
    """Prompts behind a cached prefix, as a hit or an earlier chunk leaves it."""
    longest = min(room.max_model_len - 2, room.num_gpu_blocks // 2 * room.block_size)
    most = min(room.max_num_batched_tokens, longest)
    for num_tokens in ladder(1, most, 16, None) if is_quick else ladder(1, most, 4, draw):
        farthest = (longest - num_tokens) // room.block_size
        for num_blocks in ladder(1, farthest, 8 if is_quick else 4):
            yield Episode(batches=((PrefillChunk(num_blocks * room.block_size, num_tokens),),))


def _mixed(room: Room, is_quick: bool, draw: Random) -> Iterator[Episode]:
    """Prompts and chunks beside decodes."""
    most = min(room.max_num_seqs, room.max_num_batched_tokens) - 1
    for num in ladder(1, most, 16, None) if is_quick else rungs(1, most, 2, draw):
        left = min(room.max_num_batched_tokens - num, room.max_model_len - 2)
        sizes = rungs(1, left, 16, draw) if is_quick else ladder(1, left, 4, draw)
        start = room.max_model_len // 2 // room.block_size * room.block_size  # of a prompt behind a cached prefix
        beside = max(room.blocks(left) + 4, 2 * room.blocks(start) + 1)
        longest = _longest_context(room, num, 1, beside=min(beside, room.num_gpu_blocks // 2))
        if longest < 1:
            continue
        kinds = [(context,) * num for context in sorted({min(MIN_CONTEXT, longest), max(1, longest // 4), longest})]
        kinds.append(tuple(draw.randint(1, longest) for _ in range(num)))
        batches = [_split(size, 1) for size in sizes]
        batches += [_split(size, 4) for size in sizes if size >= 16 and num + 4 <= room.max_num_seqs]
        for batch in batches:
            for contexts in draw.sample(kinds, 2):
                yield Episode(contexts, batches=(batch,))
        for contexts in kinds:
            yield Episode(contexts, batches=((PrefillChunk(start, min(left, room.block_size)),),))


def _chunks(room: Room, is_quick: bool, draw: Random) -> Iterator[Episode]:
    """A prompt that takes several steps: only its last chunk needs logits."""
    longest = min(room.max_model_len - 2, room.num_gpu_blocks // 2 * room.block_size)
    for budget in ladder(16, room.max_num_batched_tokens, 8 if is_quick else 4, None if is_quick else draw):
        for num in (0, min(room.max_num_seqs - 1, budget // 4)):
            prompt = min(longest, 3 * budget + budget // 2)
            if prompt > budget:
                yield Episode((MIN_CONTEXT,) * num, batches=((PrefillChunk(0, prompt),),), budget=budget)


def _moves(room: Room, is_quick: bool, draw: Random) -> Iterator[Episode]:
    """Blocks moved beside a few decodes."""
    context = (MIN_CONTEXT,) * min(4, room.max_num_seqs)
    factor, between = (16, None) if is_quick else (4, draw)
    swapped = ladder(1, min(room.num_cpu_blocks, room.num_gpu_blocks // MAX_MOVED_SHARE), factor, between)
    copied = ladder(1, min(room.max_num_seqs, room.num_gpu_blocks // MAX_MOVED_SHARE), factor, between)
    moves = [one for num in swapped for one in (Moves(num), Moves(0, num), Moves(num - num // 2, num // 2))]
    moves += [Moves(0, 0, num) for num in copied]
    draw.shuffle(moves)
    for index in range(0, len(moves), 8):
        yield Episode(context, moves=tuple(moves[index : index + 8]))
