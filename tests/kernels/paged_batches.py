"""Random paged batches and what attention must give for them: from the definitions, in float64, token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from real.attention.interface import AttentionMetadata, AttentionSpec, metadata_of

CPU = torch.device("cpu")
NO_BLOCK = 10**6  # torch raises if it is read

EXPONENT_AND_MANTISSA = {"fp8_e4m3": (4, 3), "fp8_e5m2": (5, 2)}
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}


def make_spec(
    num_kv_heads: int = 2, group: int = 2, head_dim: int = 8, block_size: int = 4, dtype: torch.dtype = torch.float32,
    device: torch.device = CPU, window: int | None = None, kv_dtype: str = "auto",
    scales: tuple[float, float] = (1.0, 1.0), alibi: bool = False,
) -> AttentionSpec:  # fmt: skip
    num_heads = num_kv_heads * group
    slopes = tuple(0.5 ** (1 + 0.7 * head) for head in range(num_heads)) if alibi else None
    return AttentionSpec(
        num_heads, num_kv_heads, head_dim, 0.3, block_size, device, dtype, window, kv_dtype, *scales, slopes
    )


def fp8_values(kv_dtype: str) -> np.ndarray:
    """What the codes 0 … 127 mean, float64 [128]; those of no finite number are infinite. With 128 more: negative."""
    exponent_bits, mantissa_bits = EXPONENT_AND_MANTISSA[kv_dtype]
    codes = np.arange(128)
    exponents, mantissas = codes >> mantissa_bits, (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    values = np.where(exponents == 0, mantissas * 2.0 ** (1 - bias), (1 + mantissas) * 2.0 ** (exponents - bias))
    values[values > LARGEST[kv_dtype]] = np.inf
    return values


def round_to_fp8(x: np.ndarray, kv_dtype: str) -> np.ndarray:
    """The codes (uint8) of the nearest numbers; between two, the even code; beyond the largest, the largest."""
    values = fp8_values(kv_dtype)
    values = values[np.isfinite(values)]
    magnitude = np.minimum(np.abs(x.astype(np.float64)), values[-1])
    above = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    to_lower, to_upper = magnitude - values[above - 1], values[above] - magnitude
    is_upper = (to_upper < to_lower) | ((to_upper == to_lower) & (above % 2 == 0))
    return (np.where(is_upper, above, above - 1) + 128 * np.signbit(x)).astype(np.uint8)


def read_fp8(codes: np.ndarray, kv_dtype: str) -> np.ndarray:
    return np.where(codes < 128, 1.0, -1.0) * fp8_values(kv_dtype)[codes % 128]


def cached(x: Tensor, scale: float, spec: AttentionSpec) -> Tensor:
    """What is read from the cache after x was written, in float64."""
    if spec.kv_dtype == "auto":
        return x.double()
    divided = x.float().numpy() * np.float32(1.0 / scale)
    return torch.from_numpy(read_fp8(round_to_fp8(divided, spec.kv_dtype), spec.kv_dtype)) * scale


class Batch:
    """Random sequences in random blocks: KV memory that holds their cached positions, and this step's projections.

    poison: what positions hold that belong to nobody.
    """

    def __init__(
        self, spec: AttentionSpec, rows: Sequence[tuple[int, int]], seed: int, released: int = NO_BLOCK,
        poison: float = 0.0,
    ) -> None:  # fmt: skip
        """Rows are (cached positions, new tokens). released: stands for blocks outside a row's window."""
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        size = spec.block_size
        blocks_of = [-(-(before + new) // size) for before, new in rows]
        free = rng.sample(range(sum(blocks_of) + 3), sum(blocks_of) + 3)
        tables = [[free.pop() for _ in range(num)] for num in blocks_of]
        self.spec, self.rows, self.tables = spec, list(rows), tables
        num_tokens = sum(new for _, new in rows)
        self.query = torch.randn(num_tokens, spec.num_heads, spec.head_dim, generator=generator).to(spec.dtype)
        new_shape = (2, num_tokens, spec.num_kv_heads, spec.head_dim)
        self.key, self.value = torch.randn(new_shape, generator=generator).to(spec.dtype)
        shape = (2, sum(blocks_of) + 3, size, spec.num_kv_heads, spec.head_dim)
        self.kv_cache = torch.full(shape, poison, dtype=torch.float32).to(spec.cache_dtype)
        self.filled = torch.zeros(2, shape[1] * size, *shape[3:], dtype=torch.float64)  # what is read from the cache
        slots = [self.slots(row, 0, before) for row, (before, _) in enumerate(rows)]
        self._fill(spec, [*chain(*slots)], torch.randn(2, sum(map(len, slots)), *shape[3:], generator=generator))
        self.metadata = self._metadata(released)

    def slots(self, row: int, first: int, last: int) -> list[int]:
        """Where positions first … last - 1 of a row lie."""
        size, table = self.spec.block_size, self.tables[row]
        return [table[p // size] * size + p % size for p in range(first, last)]

    def _fill(self, spec: AttentionSpec, slots: list[int], content: Tensor) -> None:
        for i, scale in enumerate((spec.k_scale, spec.v_scale)):
            if spec.kv_dtype == "auto":
                stored = content[i].to(spec.dtype)
                self.kv_cache[i].flatten(0, 1)[slots] = stored
            else:
                stored = content[i].to(spec.dtype)
                codes = round_to_fp8(stored.float().numpy() * np.float32(1.0 / scale), spec.kv_dtype)
                self.kv_cache[i].view(torch.uint8).flatten(0, 1)[slots] = torch.from_numpy(codes)
            self.filled[i][slots] = cached(stored, scale, spec)

    def _metadata(self, released: int) -> AttentionMetadata:
        spec, size = self.spec, self.spec.block_size
        width = max(len(table) for table in self.tables)
        padded = [table + [0] * (width - len(table)) for table in self.tables]
        if spec.sliding_window is not None:
            for table, (before, _) in zip(padded, self.rows, strict=True):
                num_released = max(0, before + 1 - spec.sliding_window) // size
                table[:num_released] = [released] * num_released
        slots = [self.slots(row, before, before + new) for row, (before, new) in enumerate(self.rows)]
        slot_mapping, tables = torch.tensor([*chain(*slots)]), torch.tensor(padded, dtype=torch.int32)
        return metadata_of([(new, before + new) for before, new in self.rows], slot_mapping, tables)

    def expected(self) -> Tensor:
        """Softmax attention, one query at a time, from the definition of a slot."""
        spec = self.spec
        cache = self.filled.clone()
        cache[0, self.metadata.slot_mapping] = cached(self.key, spec.k_scale, spec)
        cache[1, self.metadata.slot_mapping] = cached(self.value, spec.v_scale, spec)
        slopes = torch.tensor(spec.alibi_slopes or [0.0] * spec.num_heads, dtype=torch.float64)
        group = spec.num_heads // spec.num_kv_heads
        output = []
        for row, (first, last) in enumerate(pairwise(self.metadata.query_starts.tolist())):
            for token in range(first, last):
                own = self.rows[row][0] + token - first  # its position
                since = max(0, own + 1 - (spec.sliding_window or 10**9))
                keys, values = cache[:, self.slots(row, since, own + 1)].repeat_interleave(group, 2)
                scores = torch.einsum("hd,phd->hp", self.query[token].double(), keys) * spec.scale
                distances = torch.arange(since - own, 1, dtype=torch.float64)
                weights = (scores + slopes[:, None] * distances).softmax(-1)
                output.append(torch.einsum("hp,phd->hd", weights, values))
        return torch.stack(output)

    def to(self, device: torch.device) -> Batch:
        """The same batch, its tensors on the device; expected() still wants the one on the CPU."""
        moved = object.__new__(Batch)
        moved.spec = self.spec._replace(device=device)
        moved.rows, moved.tables, moved.filled = self.rows, self.tables, self.filled
        moved.query, moved.key, moved.value = (x.to(device) for x in (self.query, self.key, self.value))
        moved.kv_cache = self.kv_cache.to(device)
        fields = (getattr(self.metadata, name) for name in AttentionMetadata.__dataclass_fields__)
        moved.metadata = AttentionMetadata(*(x.to(device) if isinstance(x, Tensor) else x for x in fields))
        return moved
