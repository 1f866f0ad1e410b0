"""Counts the prompt tokens that are computed for the first time."""

from __future__ import annotations

from testbed.core.sequence import Sequence


class PromptMeter:
    """Tracks how far each request's prompt has been computed. Tokens computed again after a preemption do not count."""

    def __init__(self) -> None:
        self._reached: dict[str, int] = {}  # by request: its sequences have one prompt

    def missing(self, seq: Sequence) -> int:
        """Returns the number of prompt tokens after the furthest position that was ever computed."""
        return seq.num_prompt_tokens - self._reached.get(seq.request_id, 0)

    def count(self, seq: Sequence, num_tokens: int, num_emitted: int) -> int:
        """Returns how many of the newest `num_tokens` computed tokens are prompt tokens computed for the first time. A
        sequence that emitted had computed all its tokens, even if it was preempted since."""
        reached = self._reached.get(seq.request_id, 0)
        if reached == seq.num_prompt_tokens:
            return 0
        num_computed_tokens = seq.num_computed_tokens - seq.num_in_flight_tokens
        if num_emitted:
            num_computed_tokens = seq.num_known_tokens - num_emitted
        end = min(num_computed_tokens, seq.num_prompt_tokens)
        if end <= reached:
            return 0
        self._reached[seq.request_id] = end
        return max(0, end - max(reached, num_computed_tokens - num_tokens))

    def forget(self, seq: Sequence) -> None:
        self._reached.pop(seq.request_id, None)
