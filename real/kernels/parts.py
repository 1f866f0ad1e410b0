"""How the contexts of a step's decodes are cut into parts, one program each (Flash-Decoding, Dao et al. 2023).

All parts of a step have the same length, which the device chooses from the contexts of all rows. So a long row among
short ones is spread over several multiprocessors. This also holds in a CUDA graph, of which the host knows only the
longest possible context.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from real.kernels.attend import MAX_WINDOW

MIN_PART = 128  # keys that are worth a program of their own
MAX_WHOLE = 4096  # most keys of one program if there are enough programs; the others would wait for a longer one
PROGRAMS_PER_SM = 4  # aim of a launch
ROWS, ITEMS = 128, 32  # rows and items of one iteration of plan_kernel


@triton.jit
def load_keys(context_lens, query_starts, index, num_rows, window, HAS_WINDOW: tl.constexpr, IS_MIXED: tl.constexpr):
    """Loads how many keys the rows at `index` attend to; 0 for rows that are no decodes and beyond the last row."""
    exists = index < num_rows
    num_keys = tl.load(context_lens + index, mask=exists, other=0)
    if HAS_WINDOW:
        num_keys = tl.minimum(num_keys, window)
    if IS_MIXED:
        begin = tl.load(query_starts + index, mask=exists, other=0)
        num_keys = tl.where(tl.load(query_starts + index + 1, mask=exists, other=0) - begin == 1, num_keys, 0)
    return num_keys


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "num_parts", "window"],
    do_not_specialize_on_alignment=["context_lens", "query_starts"],
)
def plan_kernel(
    items, starts, context_lens, query_starts, num_rows, num_items, num_parts, window,
    LEAST: tl.constexpr, ROWS: tl.constexpr, ITEMS: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_MIXED: tl.constexpr,
):  # fmt: skip
    """Each program writes ITEMS items of Parts. num_parts: into how many parts of equal length all keys should be cut.

    Every program sums over all rows on its own.
    """
    total = 0
    for first in range(0, num_rows, ROWS):
        index = first + tl.arange(0, ROWS)
        total += tl.sum(load_keys(context_lens, query_starts, index, num_rows, window, HAS_WINDOW, IS_MIXED), 0)
    length = tl.maximum((total + num_parts - 1) // num_parts, 1)
    length = (length + LEAST - 1) // LEAST * LEAST
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    owner = tl.zeros([ITEMS], tl.int32)  # number of rows whose items all come before: the item's own row
    begin = tl.zeros([ITEMS], tl.int32)  # first item of that row
    end = tl.full([ITEMS], 2**30, tl.int32)  # item after the last of that row
    num_before = 0
    for first in range(0, num_rows, ROWS):
        index = first + tl.arange(0, ROWS)
        num_keys = load_keys(context_lens, query_starts, index, num_rows, window, HAS_WINDOW, IS_MIXED)
        own = (num_keys + length - 1) // length
        ends = num_before + tl.cumsum(own, 0)
        is_before = (ends[None, :] <= item[:, None]) & (index < num_rows)[None, :]
        is_behind = (ends[None, :] > item[:, None]) & (index < num_rows)[None, :]
        owner += tl.sum(is_before.to(tl.int32), 1)
        begin = tl.maximum(begin, tl.max(tl.where(is_before, ends[None, :], 0), 1))
        end = tl.minimum(end, tl.min(tl.where(is_behind, ends[None, :], 2**30), 1))
        if tl.program_id(0) == 0:
            tl.store(starts + index, ends - own, mask=index < num_rows)
        num_before += tl.sum(own, 0)
    if tl.program_id(0) == 0:
        tl.store(starts + num_rows, num_before)
    is_item = item < num_items
    tl.store(items + 4 * item, tl.where(item < num_before, owner, -1), mask=is_item)
    tl.store(items + 4 * item + 1, item - begin, mask=is_item)
    tl.store(items + 4 * item + 2, end - begin, mask=is_item)
    tl.store(items + 4 * item + 3, tl.zeros([ITEMS], tl.int32) + length, mask=is_item)


@cache
def num_processors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class Parts(NamedTuple):
    """How the contexts of a step's decodes are cut; both tensors are on the device.

    items: int32 [items, 4], for each part: its row (-1: no part); its index among the row's parts; the number of the
    row's parts; the length of all parts in keys. starts: int32 [rows + 1], the first item of each row.
    """

    items: Tensor
    starts: Tensor


def choose_num_parts(num_rows: int, programs: int, max_keys: int, num_sms: int) -> int:
    """Returns into how many parts of equal length all keys of a step should be cut; 1: rows stay whole.

    programs: number of programs for one row. max_keys: the most keys that a row can attend to.
    """
    filling = -(-PROGRAMS_PER_SM * num_sms // programs)
    is_full = 2 * num_rows > filling
    return 1 if max_keys <= (MAX_WHOLE if is_full else MIN_PART) else filling


def plan_parts(
    context_lens: Tensor,
    query_starts: Tensor | None,
    window: int | None,
    *,
    programs: int,
    max_context: int,
    num_decodes: int,
    num_parts: int | None = None,
) -> Parts | None:
    """Cuts contexts into parts, once per step for all its layers; None: rows stay whole. Shapes as for paged_decode.

    programs: number of programs for one part. max_context: upper bound of the decodes' contexts. num_decodes: rows that
    are certainly decodes. num_parts: None: choose_num_parts decides. Does not wait; depends on no value on the device.
    """
    num_rows = len(context_lens)
    max_keys = max_context if window is None else min(max_context, window)
    if num_parts is None:
        num_parts = choose_num_parts(num_decodes, programs, max_keys, num_processors(context_lens.device))
    if num_parts == 1:
        return None
    num_items = min(num_rows + num_parts, num_rows * triton.cdiv(max_keys, MIN_PART))  # upper bound
    parts = Parts(context_lens.new_empty((num_items, 4)), context_lens.new_empty(num_rows + 1))
    plan_kernel[(triton.cdiv(num_items, ITEMS),)](
        *parts, context_lens, query_starts, num_rows, num_items, num_parts,
        0 if window is None else min(window, MAX_WINDOW),
        LEAST=MIN_PART, ROWS=ROWS, ITEMS=ITEMS, HAS_WINDOW=window is not None, IS_MIXED=query_starts is not None,
        num_warps=4,
    )  # fmt: skip
    return parts
