"""The budgets of a scheduler, resolved: nothing is None."""

from __future__ import annotations

from typing import ClassVar

from testbed.core.value import Value


class Limits(Value):
    """max_num_seqs: running sequences. max_num_batched_tokens: tokens a step. long_prefill_token_threshold: 0 is off.
    Partial prefills: prompts that may be part-way at a time, and how many of them longer than the threshold.
    max_num_plans: in flight at a time; 2 is asynchronous scheduling: a step is planned while the one before it runs."""

    FIELDS: ClassVar = (
        "max_num_seqs", "max_num_batched_tokens", "max_model_len", "long_prefill_token_threshold",
        "max_num_partial_prefills", "max_long_partial_prefills", "max_num_plans",
    )  # fmt: skip
    __slots__ = FIELDS

    def __init__(
        self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, long_prefill_token_threshold: int,
        max_num_partial_prefills: int, max_long_partial_prefills: int = 1, max_num_plans: int = 1,
    ) -> None:  # fmt: skip
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len, self.long_prefill_token_threshold = max_model_len, long_prefill_token_threshold
        self.max_num_partial_prefills = max_num_partial_prefills
        self.max_long_partial_prefills = max_long_partial_prefills
        self.max_num_plans = max_num_plans

    def too_long_reason(self, num_prompt_tokens: int) -> str:
        return f"prompt of {num_prompt_tokens} tokens exceeds max_model_len ({self.max_model_len})"
