"""Texts that come in any order, printed in the order of their prompts."""

from __future__ import annotations

from collections.abc import Callable


class Printer:
    """Prints texts in the order of prompts and outputs: of the first that is not over as it comes, of others later.

    labels: a line above each text; None where there is only one text, which is printed bare.
    """

    def __init__(self, labels: list[str] | None, write: Callable[[str], object]) -> None:
        self._labels = labels
        self._write = write
        self._texts: dict[tuple[int, int], list[str]] = {}  # not printed yet, by (prompt, output)
        self._over: dict[tuple[int, int], None] = {}
        self._num_outputs: dict[int, int] = {}  # of prompts that are over
        self._at = (0, 0)
        self._has_begun = False

    def add(self, index: int, place: int, text: str, is_over: bool) -> None:
        self._texts.setdefault((index, place), []).append(text)
        if is_over:
            self._over[index, place] = None
        self._print()

    def close(self, index: int, num_outputs: int) -> None:
        """All outputs of a prompt are over."""
        self._num_outputs[index] = num_outputs
        self._print()

    def flush(self) -> None:
        """Prints what waits for something before it that will not come."""
        if self._has_begun:
            self._end()
        for at in sorted(self._texts):
            self._at = at
            self._begin()
            self._end()

    def _print(self) -> None:
        while True:
            index, place = self._at
            if place >= self._num_outputs.get(index, place + 1):
                self._at = (index + 1, 0)
            elif self._at in self._texts:
                self._begin()
                if self._at not in self._over:
                    return
                self._end()
                self._at = (index, place + 1)
            else:
                return

    def _begin(self) -> None:
        """Its label, if that is not there yet, and what there is of its text."""
        index, place = self._at
        if not self._has_begun and self._labels is not None:
            self._write(f"[{index}{f'.{place}' if place else ''}] {self._labels[index]}\n")
        self._has_begun = True
        self._write("".join(self._texts[self._at]))
        self._texts[self._at].clear()

    def _end(self) -> None:
        self._write("\n")
        self._texts.pop(self._at, None)
        self._has_begun = False
