"""A sequence as KV memory sees it: its tokens, how many of them are computed, and the blocks that hold their KV."""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from testbed.blocks.chain import Chain, TokenSource

RELEASED: Final = -1  # in a block table: a block outside the sliding window that was released


class KVSequence(TokenSource):
    """What a `BlockManager` knows of a sequence. The manager changes `block_table`, `cpu_table`, `chain` and
    `num_cached_tokens`; the core changes the token counts.

    `num_tokens` counts the tokens so far; `num_computed_tokens` of them have their KV in blocks. Logical block i is
    physical block `block_table[i]` on the GPU or, while the sequence is swapped out, `cpu_table[i]` on the CPU.
    salt: sequences share cached prefixes only if their salts are equal. computes_whole_prompt: it uses no prefix-cache
    hits. The counts are machine words (docs/compiled.md).
    """

    def __init__(
        self, seq_id: int, num_prompt_tokens: int, salt: str, tenant: str, computes_whole_prompt: bool
    ) -> None:
        self.seq_id: i64 = seq_id  # the order of arrival; ties break by it
        self.num_prompt_tokens: i64 = num_prompt_tokens
        self.num_tokens: i64 = num_prompt_tokens
        self.num_computed_tokens: i64 = 0
        self.num_preemptions = 0
        self.shares_blocks = False  # whether it may share a partly filled block: True for a member of a group
        self.is_prefilling = False  # admitted, and no token emitted since
        self.last_step: i64 = -1  # the step that scheduled it last
        self.salt, self.tenant, self.computes_whole_prompt = salt, tenant, computes_whole_prompt
        self.num_cached_tokens: int | None = None  # prefix tokens found at the first admission
        self.block_table: list[int] = []
        self.cpu_table: list[int] = []
        self.chain: Chain | None = None  # the keys of its blocks; None: no prefix caching, or not looked up yet

    @property
    def together(self) -> tuple[KVSequence, ...]:
        """The sequences that are scheduled together with this one, itself included."""
        return (self,)


def num_distinct(tables: list[list[int]]) -> int:
    """Returns the number of distinct blocks in some tables, without the released ones."""
    if len(tables) == 1:
        return len(tables[0]) - tables[0].count(RELEASED)
    return len({block for table in tables for block in table if block != RELEASED})
