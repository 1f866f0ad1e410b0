"""Counts what of a prompt was computed for the first time."""

from __future__ import annotations

from testbed.core.sequence import Sequence


class PromptMeter:
    """How far each request's prompt has been computed. What is computed again after a preemption does not count."""

    def __init__(self) -> None:
        self._reached: dict[str, int] = {}  # by request: its sequences have one prompt

    def missing(self, seq: Sequence) -> int:
        """Prompt tokens that were never computed nor found in the cache when some behind them were computed."""
        return seq.num_prompt_tokens - self._reached.get(seq.request.request_id, 0)

    def count(self, seq: Sequence, num_tokens: int) -> int:
        """How many of the newest `num_tokens` computed tokens are prompt tokens, computed for the first time."""
        reached = self._reached.get(seq.request.request_id, 0)
        if reached == seq.num_prompt_tokens:
            return 0
        num_computed_tokens = seq.num_computed_tokens - seq.num_in_flight_tokens
        end = min(num_computed_tokens, seq.num_prompt_tokens)
        if end <= reached:
            return 0
        self._reached[seq.request.request_id] = end
        return max(0, end - max(reached, num_computed_tokens - num_tokens))

    def forget(self, seq: Sequence) -> None:
        self._reached.pop(seq.request.request_id, None)
