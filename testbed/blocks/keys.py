"""Block keys: a chain of xxhash64 values over the tokens of full blocks, so that equal prefixes have equal keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array

from mypy_extensions import mypyc_attr
from xxhash import xxh64_intdigest


@mypyc_attr(allow_interpreted_subclasses=True)
class KeySource(ABC):
    """Makes the keys of full blocks of `block_size` tokens.

    are_unique: whether equal keys mean equal contents, except for rare collisions, so that keys may be made late.
    """

    def __init__(self, block_size: int, *, are_unique: bool = True) -> None:
        self.block_size = block_size
        self.are_unique = are_unique

    @abstractmethod
    def extend(self, keys: list[int], contents: list[bytes], tokens: array[int], num_blocks: int, salt: str) -> None:
        """Appends keys and contents (which are compared to confirm a hit) until there are `num_blocks` of each."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TokenKeys(KeySource):
    """key = xxh64 of the token ids, seeded with the previous block's key; the first block's seed is a hash of the salt.

    The salt is also part of the first block's content: equal tokens with two salts never match, even if keys collide.
    """

    def extend(self, keys: list[int], contents: list[bytes], tokens: array[int], num_blocks: int, salt: str) -> None:
        first, size = len(keys), self.block_size
        width = size * tokens.itemsize
        data = tokens[first * size : num_blocks * size].tobytes()  # a copy: with a view, the array could not grow
        key = keys[-1] if keys else xxh64_intdigest(salt.encode())
        for offset in range(0, (num_blocks - first) * width, width):
            content = data[offset : offset + width]
            key = self.key_of(content, key)
            contents.append(content if keys else salt.encode() + content)
            keys.append(key)

    def key_of(self, content: bytes, previous_key: int) -> int:
        return xxh64_intdigest(content, previous_key)
