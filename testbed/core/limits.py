"""The limits of a scheduler, with all defaults resolved: no value is None."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int  # running sequences
    max_num_batched_tokens: int  # tokens of a step
    max_model_len: int
    long_prefill_token_threshold: int  # 0: off; decode_first: 4 % of max_model_len
    max_num_partial_prefills: int  # prompts that may be partly prefilled at the same time
    max_long_partial_prefills: int = 1  # those of them that are longer than the threshold
    max_num_plans: int = 1  # plans in flight; 2: asynchronous scheduling, the next step is planned while one runs

    def too_long_reason(self, num_prompt_tokens: int) -> str:
        return f"prompt of {num_prompt_tokens} tokens exceeds max_model_len ({self.max_model_len})"
