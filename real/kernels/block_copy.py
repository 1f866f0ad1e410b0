"""Moves KV blocks, any number of pairs in one launch: within the device's memory, or between it and pinned host memory,
which the device reads and writes directly."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048  # words that a program moves in one iteration


@triton.jit(do_not_specialize=["num_items"], do_not_specialize_on_alignment=["pairs"])
def move_kernel(
    target, source, pairs, stride_target_plane, stride_source_plane, num_items,
    PLANES: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program moves every num_programs-th item; an item is a chunk of a block of one plane."""
    CHUNKS: tl.constexpr = (WORDS + CHUNK - 1) // CHUNK
    for item in range(tl.program_id(0).to(tl.int64), num_items, tl.num_programs(0)):
        pair = pairs + 2 * (item // (PLANES * CHUNKS))
        plane = item // CHUNKS % PLANES
        part = item % CHUNKS * CHUNK + tl.arange(0, CHUNK)
        is_part = part < WORDS
        words = tl.load(source + plane * stride_source_plane + tl.load(pair) * WORDS + part, mask=is_part)
        tl.store(target + plane * stride_target_plane + tl.load(pair + 1) * WORDS + part, words, mask=is_part)


def move_blocks(target: Tensor, source: Tensor, pairs: Tensor, max_programs: int | None = None) -> None:
    """Copies blocks from source to target.

    target, source: [planes, num_blocks, *block], contiguous within a plane, on the device or in pinned host memory;
    they can be the same tensor. pairs: int64 [n, 2], (block of the source, block of the target), on the device.
    max_programs: limit, so that other work can run at the same time; None: one program per item.

    The pairs are copied in no particular order. Within one memory no block may be the source of one pair and the target
    of another (the caller guarantees this). If two pairs write to one block, they must write the same values.
    """
    planes = source.shape[0]
    assert target.shape[0] == planes
    assert target.shape[2:] == source.shape[2:], "blocks are of one size"
    assert target[0].is_contiguous()
    assert source[0].is_contiguous()
    size = source[0, 0].nbytes
    word = next(dtype for dtype in (torch.int64, torch.int32, torch.uint8) if size % dtype.itemsize == 0)
    there, here = (one.view(torch.uint8).flatten(2).view(word) for one in (target, source))  # [planes, blocks, words]
    num_words = here.shape[2]
    chunk = min(CHUNK, triton.next_power_of_2(num_words))
    num_items = len(pairs) * planes * triton.cdiv(num_words, chunk)
    move_kernel[(min(num_items, max_programs or num_items),)](
        there, here, pairs.contiguous(), there.stride(0), here.stride(0), num_items,
        PLANES=planes, WORDS=num_words, CHUNK=chunk, num_warps=4,
    )  # fmt: skip
