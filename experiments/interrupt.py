"""Ctrl-C at a step's boundary: what is recorded ends with a whole step, and the manifest's digest is that step's."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType

from testbed.interfaces import Execute, Resume, WaitUntil
from testbed.serve import Loop


class _Presses:
    """Whether Ctrl-C was pressed, and whether it may take effect at once: in a wait, and on the second press."""

    def __init__(self) -> None:
        self.is_pressed = False
        self.is_waiting = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_waiting or self.is_pressed:
            raise KeyboardInterrupt
        self.is_pressed = True


@contextmanager
def interruptible(loops: list[Loop]) -> Iterator[list[Loop]]:
    """The loops, raising KeyboardInterrupt between two steps, or out of a wait of the only one: where there are others,
    one of them may be in a step. Outside the main thread: unchanged."""
    if threading.current_thread() is not threading.main_thread():
        yield loops
        return
    presses = _Presses()
    before = signal.signal(signal.SIGINT, presses.handle)
    try:
        yield [_watched(loop, presses, is_alone=len(loops) == 1) for loop in loops]
    finally:
        signal.signal(signal.SIGINT, before)


def _watched(loop: Loop, presses: _Presses, *, is_alone: bool) -> Generator[WaitUntil | Execute, Resume, None]:
    command = next(loop, None)
    while command is not None:
        if presses.is_pressed:
            raise KeyboardInterrupt
        presses.is_waiting = is_alone and isinstance(command, WaitUntil)
        resume = yield command
        presses.is_waiting = False
        try:
            command = loop.send(resume)
        except StopIteration:
            return
