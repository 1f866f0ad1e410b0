"""The growing text of one sequence: tokens in, text out. Stop strings are found across token boundaries, and text that
may still be cut off is not returned.

Which stop string ends a text does not depend on how the text is cut into pieces. It is the one that is complete first;
of those that end at the same character, the one that began first.
"""

from __future__ import annotations

from collections.abc import Container

from real.text.detokenizer import Detokenizer
from testbed.core.request import SamplingParams


class StopStrings:
    """Holds back text that may be the beginning of a stop string. is_included: the stop string stays in the text."""

    def __init__(self, stops: tuple[str, ...], *, is_included: bool = False) -> None:
        self.found: str | None = None
        self._stops = stops
        self._is_included = is_included
        self._held = ""
        self._num_early = 0  # characters from the first held one on within which an end does not count

    def push(self, piece: str, pending: str = "", *, is_searched: bool = True) -> str:
        """Adds text; returns what can be shown now. Returns nothing after a stop string was found.

        pending: text that follows if the sequence ends here; it can still change. It is searched too, but is returned
        only if a stop string ends in it. is_searched: False if a stop string that ends here does not count; one may
        begin here.
        """
        if self.found is not None:
            return ""
        text = self._held + piece
        hit = None
        if is_searched:
            hit = self._first(text + pending, max(len(self._held), self._num_early))
        else:
            self._num_early = max(self._num_early, len(text + pending))  # bytes may have spoiled what was pending
        if hit is not None:
            start, end, self.found = hit
            self._held = ""
            return (text + pending)[: end if self._is_included else start]
        num_shown = len(text) - self._num_held(text)
        self._held = text[num_shown:]
        self._num_early = max(0, self._num_early - num_shown)
        return text[:num_shown]

    def finish(self) -> str:
        """Returns the text that was held back, as no stop string was completed."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, num_old: int) -> tuple[int, int, str] | None:
        """Returns (start, end, stop string) of the stop string that is complete first behind the `num_old` characters
        of earlier pieces; None if there is none."""
        hits = [(text.find(stop, max(0, num_old - len(stop) + 1)), stop) for stop in self._stops]
        found = [(start + len(stop), start, stop) for start, stop in hits if start >= 0]
        if not found:
            return None
        end, start, stop = min(found)
        return start, end, stop

    def _num_held(self, text: str) -> int:
        """Returns the length of the longest end of the text with which a stop string begins."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class SequenceText:
    """The text of one sequence, built token by token. end_tokens: tokens that end it and are not part of its text."""

    def __init__(self, detokenizer: Detokenizer, sampling: SamplingParams, end_tokens: Container[int]) -> None:
        self.num_tokens = 0  # taken so far
        self._detokenizer = detokenizer
        self._min_tokens = sampling.min_tokens
        self._end_tokens = () if sampling.include_stop_str_in_output else end_tokens
        self._stops: StopStrings | None = None
        if sampling.stop:
            self._stops = StopStrings(sampling.stop, is_included=sampling.include_stop_str_in_output)
        self._parts: list[str] = []
        self._num_taken = 0  # parts that `take` has returned
        self._is_over = False

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the text; None if none has."""
        return None if self._stops is None else self._stops.found

    def push(self, token: int) -> None:
        self.num_tokens += 1
        if token in self._end_tokens:
            return
        piece = self._detokenizer.push(token)
        if self._stops is not None:
            is_searched = self.num_tokens > self._min_tokens
            piece = self._stops.push(piece, self._detokenizer.pending(), is_searched=is_searched)
        if piece:
            self._parts.append(piece)

    def finish(self) -> None:
        """Adds the text that was held back, as the sequence has ended."""
        if self.stop is not None or self._is_over:
            return
        self._is_over = True
        held = "" if self._stops is None else self._stops.finish()
        rest = held + self._detokenizer.finish()
        if rest:
            self._parts.append(rest)

    def take(self) -> str:
        """Returns the text that is new since the last call."""
        new = "".join(self._parts[self._num_taken :])
        self._num_taken = len(self._parts)
        return new

    @property
    def text(self) -> str:
        """The whole text, as far as it is final."""
        return "".join(self._parts)
