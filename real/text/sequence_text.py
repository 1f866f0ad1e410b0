"""The text of one sequence as it grows: tokens in, text out, stop strings watched."""

from __future__ import annotations

from collections.abc import Container

from real.text.detokenizer import Detokenizer
from real.text.stops import StopStrings
from testbed.core.request import SamplingParams


class SequenceText:
    """Takes the tokens one by one. end_tokens: those that end the sequence, which are no part of its text."""

    def __init__(self, detokenizer: Detokenizer, sampling: SamplingParams, end_tokens: Container[int]) -> None:
        self.num_tokens = 0  # taken so far
        self._detokenizer = detokenizer
        self._min_tokens = sampling.min_tokens
        self._end_tokens = () if sampling.include_stop_str_in_output else end_tokens
        self._stops: StopStrings | None = None
        if sampling.stop:
            self._stops = StopStrings(sampling.stop, is_included=sampling.include_stop_str_in_output)
        self._parts: list[str] = []
        self._num_taken = 0  # of the parts
        self._is_over = False

    @property
    def stop(self) -> str | None:
        """The stop string that the text has come to."""
        return None if self._stops is None else self._stops.found

    def push(self, token: int) -> None:
        self.num_tokens += 1
        if token in self._end_tokens:
            return
        piece = self._detokenizer.push(token)
        if self._stops is not None and self.num_tokens > self._min_tokens:
            piece = self._stops.push(piece, self._detokenizer.pending())
        if piece:
            self._parts.append(piece)

    def finish(self) -> None:
        """The sequence has ended: what was held back is text."""
        if self.stop is not None or self._is_over:
            return
        self._is_over = True
        held = "" if self._stops is None else self._stops.finish()
        rest = held + self._detokenizer.finish()
        if rest:
            self._parts.append(rest)

    def take(self) -> str:
        """The text that is new since the last call."""
        new = "".join(self._parts[self._num_taken :])
        self._num_taken = len(self._parts)
        return new

    @property
    def text(self) -> str:
        """All of it, as far as it is settled."""
        return "".join(self._parts)
