"""The budgets of a scheduler, resolved: nothing is None."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """max_num_seqs: running sequences. max_num_batched_tokens: tokens a step. long_prefill_token_threshold: 0 is off.
    Partial prefills: prompts that may be part-way at a time, and how many of them longer than the threshold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int
    max_num_partial_prefills: int
    max_long_partial_prefills: int = 1

    def too_long_reason(self, num_prompt_tokens: int) -> str:
        return f"prompt of {num_prompt_tokens} tokens exceeds max_model_len ({self.max_model_len})"
