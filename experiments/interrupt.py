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
def interruptible(loop: Loop) -> Iterator[Loop]:
    """The loop, raising KeyboardInterrupt between two steps, or out of a wait. Outside the main thread: unchanged."""
    if threading.current_thread() is not threading.main_thread():
        yield loop
        return
    presses = _Presses()
    before = signal.signal(signal.SIGINT, presses.handle)
    try:
        yield _watched(loop, presses)
    finally:
        signal.signal(signal.SIGINT, before)


def _watched(loop: Loop, presses: _Presses) -> Generator[WaitUntil | Execute, Resume, None]:
    command = next(loop, None)
    while command is not None:
        if presses.is_pressed:
            raise KeyboardInterrupt
        presses.is_waiting = isinstance(command, WaitUntil)
        resume = yield command
        presses.is_waiting = False
        try:
            command = loop.send(resume)
        except StopIteration:
            return
