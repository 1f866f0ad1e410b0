"""Ctrl-C at a step's boundary: what is recorded ends with a whole step, and the manifest's digest is that step's.

SIGTERM, which a cluster sends, is taken as Ctrl-C is.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from testbed.core.commands import Execute, Resume, WaitUntil
from testbed.core.serve import Loop


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
    with _handled(presses.handle):
        yield [_watched(loop, presses, is_alone=len(loops) == 1) for loop in loops]


class _Late:
    """Whether Ctrl-C came while nothing was to be disturbed."""

    def __init__(self) -> None:
        self.is_pressed = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.is_pressed = True


_late = _Late()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Within, Ctrl-C has no effect: records are being closed, and an impatient second press would lose them. Who goes
    on afterwards asks `was_pressed`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handled(_late.handle):
        yield


def was_pressed() -> bool:
    """Whether Ctrl-C came since the last time that this was asked, and nothing was done about it."""
    is_pressed, _late.is_pressed = _late.is_pressed, False
    return is_pressed


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Within, SIGTERM does what Ctrl-C does, whatever that is; it ends the process where Ctrl-C is ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if not callable(signal.getsignal(signal.SIGINT)):
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    former = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def _handled(handler: Any) -> Iterator[None]:
    """Within, both signals are `handler`'s."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


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
