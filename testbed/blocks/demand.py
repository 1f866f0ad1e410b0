"""Demand: how many blocks a number of tokens needs. Arithmetic over counts; knows no tables and no pools."""

from __future__ import annotations

from enum import Enum, auto

from mypy_extensions import i64

from testbed.blocks.config import KVRules
from testbed.blocks.kv_sequence import KVSequence
from testbed.errors import ConfigError


class AllocStatus(Enum):
    """Whether a sequence can be admitted or swapped in: now, later, or never."""

    OK = auto()
    LATER = auto()
    NEVER = auto()


class Demand:
    """The demand of sequences under the KV rules. The other arguments are those of `BlockManager`.

    Raises ConfigError for options that the rules do not support.
    """

    def __init__(self, block_size: int, rules: KVRules, max_model_len: int, lookahead: int, window: int | None) -> None:
        _check_goes_together(rules, lookahead, window)
        self.block_size: i64 = block_size
        self._is_by_chunk = rules.allocate == "chunk"
        self.max_model_len: i64 = max_model_len
        self.lookahead_slots: i64 = lookahead
        self.sliding_window = window

    def num_blocks_for(self, num_tokens: i64) -> i64:
        return -(-num_tokens // self.block_size)

    def num_new_blocks(self, seq: KVSequence, num_tokens: i64, num_held: i64) -> i64:
        """Returns how many blocks, beyond `num_held`, a running sequence needs for its next `num_tokens` tokens."""
        end = seq.num_computed_tokens + num_tokens
        missing = (end if seq.is_prefilling else self._with_lookahead(end)) - num_held * self.block_size
        return self.num_blocks_for(missing) if missing > 0 else 0

    def num_held_at_most(self, num_tokens: int, chunk: int = 1) -> int:
        """Returns the most blocks that a sequence holds on the way to `num_tokens`, `chunk` tokens a step."""
        num_blocks = self.num_blocks_for(self._with_lookahead(num_tokens))
        if self.sliding_window is not None and self._is_by_chunk:
            num_blocks = min(num_blocks, self.num_blocks_for(self.sliding_window + chunk - 1) + 2)
        return num_blocks

    def _with_lookahead(self, num_tokens: i64) -> i64:
        """Returns the slots for these tokens and the lookahead, which ends at `max_model_len` as in vLLM V1."""
        return max(num_tokens, min(num_tokens + self.lookahead_slots, self.max_model_len))

    def num_touched(self, seq: KVSequence) -> int:
        """Returns what `swap_test=full_blocks` counts: the full blocks, and one for the next token. During the prefill
        of a prompt allocated whole: the blocks of the prompt."""
        is_whole = seq.is_prefilling and not self._is_by_chunk
        num_tokens = seq.num_tokens if is_whole else seq.num_computed_tokens
        return num_tokens // self.block_size + (not is_whole or num_tokens % self.block_size > 0)


def _check_goes_together(rules: KVRules, lookahead_slots: int, sliding_window: int | None) -> None:
    if lookahead_slots and (rules.growth_test != "exact" or rules.swap_test != "all_blocks"):
        raise ConfigError(
            f"scheduler.lookahead_slots is {lookahead_slots}, which scheduler.kv_rules.growth_test={rules.growth_test} "
            f"and swap_test={rules.swap_test} do not count; set it to 0, or the rules to exact and all_blocks"
        )
    if sliding_window is not None and rules.duplicates != "listed":
        raise ConfigError(
            f"cache.sliding_window or model.sliding_window, {sliding_window}, releases blocks that scheduler."
            f"kv_rules.duplicates={rules.duplicates} would still name; set both to null, or take another preset"
        )
