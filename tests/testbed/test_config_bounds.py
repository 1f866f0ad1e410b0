"""Values that no machine can serve are refused by name, before anything is made of them."""

from __future__ import annotations

import pytest

from testbed.blocks.config import MAX_NUM_BLOCKS, CacheConfig, check_pool_sizes
from testbed.core.request import SamplingParams
from testbed.errors import ConfigError, RequestError


@pytest.mark.parametrize("field", ["num_gpu_blocks", "num_cpu_blocks"])
def test_pools_beyond_what_can_be_managed_are_refused(field: str) -> None:
    CacheConfig(**{field: MAX_NUM_BLOCKS})
    with pytest.raises(ConfigError, match=rf"cache\.{field} is 100000001; it must be from [01] to 100,000,000, or"):
        CacheConfig(**{field: MAX_NUM_BLOCKS + 1})


@pytest.mark.parametrize("space", [1e30, float("inf"), float("nan"), -1.0])
def test_swap_space_is_bounded(space: float) -> None:
    with pytest.raises(ConfigError, match=r"cache\.swap_space_gib is"):
        CacheConfig(swap_space_gib=space)


@pytest.mark.parametrize(
    ("sizes", "fix"),
    [
        ((10**9, 0), r"1,000,000,000 KV blocks; .* set cache\.num_gpu_blocks"),
        ((1, 10**9), r"cache\.swap_space_gib holds"),
    ],
)
def test_pools_derived_from_memory_are_bounded_too(sizes: tuple[int, int], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        check_pool_sizes(*sizes)


def test_sampling_is_named_with_its_group() -> None:
    with pytest.raises(RequestError, match=r"^sampling\.max_tokens is 0"):
        SamplingParams(max_tokens=0)
    with pytest.raises(RequestError, match=r"^sampling\.temperature is nan"):
        SamplingParams(temperature=float("nan"))
