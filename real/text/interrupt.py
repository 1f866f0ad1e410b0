"""Ctrl-C between steps: a step that has begun is finished first, so that the engine stays usable."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred() -> Iterator[None]:
    """Within, the first Ctrl-C waits for the end, where the former handler gets it; a second raises at once.

    Outside the main thread, and where Ctrl-C is ignored, nothing changes.
    """
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(former):
        yield
        return
    pressed: list[tuple[int, FrameType | None]] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append((number, frame))

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
    if pressed:
        former(*pressed[0])
