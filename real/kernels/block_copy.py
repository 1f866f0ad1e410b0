"""Copies KV blocks, keys and values of all layers, any number of pairs, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024  # words of one program


@triton.jit(do_not_specialize_on_alignment=["pairs"])
def copy_kernel(words, pairs, stride_plane, WORDS: tl.constexpr, CHUNK: tl.constexpr):
    """Program (pair, plane, chunk of the block); a plane is the keys or the values of a layer."""
    pair = pairs + 2 * tl.program_id(0)
    source, destination = tl.load(pair), tl.load(pair + 1)
    plane = words + tl.program_id(1).to(tl.int64) * stride_plane
    part = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    is_part = part < WORDS
    tl.store(plane + destination * WORDS + part, tl.load(plane + source * WORDS + part, mask=is_part), mask=is_part)


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """cache: contiguous [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]; pairs: int64 [n, 2], (source
    block, destination block), on the cache's device.

    The pairs are copied in no order: no block may be the destination of two, or the source of one and the destination
    of another (the caller excludes these).
    """
    assert cache.is_contiguous(), "all layers are one piece of memory"
    num_layers, _, num_blocks = cache.shape[:3]
    raw = cache.view(num_layers * 2, num_blocks, -1).view(torch.uint8)  # [planes, num_blocks, bytes of a block]
    word = next(dtype for dtype in (torch.int64, torch.int32, torch.uint8) if raw.shape[2] % dtype.itemsize == 0)
    words = raw.view(word)
    size = words.shape[2]
    chunk = min(CHUNK, triton.next_power_of_2(size))
    copy_kernel[(len(pairs), words.shape[0], triton.cdiv(size, chunk))](
        words, pairs.contiguous(), words.stride(0), WORDS=size, CHUNK=chunk, num_warps=4
    )
