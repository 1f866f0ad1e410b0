"""Ctrl-C at a step's boundary: what is recorded ends with a whole step, and the manifest's digest is that step's.

What a cluster sends (SIGTERM) and a terminal that is closed (SIGHUP; not under nohup) is taken as Ctrl-C is.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from testbed.core.commands import Execute, Resume, WaitUntil
from testbed.core.serve import Loop

_OTHERS = (signal.SIGTERM, signal.SIGHUP)
PATIENCE_S = 3.0  # from Ctrl-C until a step that goes on is told of


class _Presses:
    """Whether Ctrl-C was pressed, and whether it may take effect at once: in a wait, and on the second press."""

    def __init__(self) -> None:
        self.is_pressed = False
        self.is_waiting = False
        self._patience = threading.Timer(PATIENCE_S, _tell_where)
        self._patience.daemon = True

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_waiting or self.is_pressed:
            raise KeyboardInterrupt
        self.is_pressed = True
        self._patience.start()

    def close(self) -> None:
        self._patience.cancel()


def _tell_where() -> None:
    """A policy that loops, or a long step of a model: where it is, to whoever waits for its end."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    where = "" if frame is None else f", at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}()"
    print(f"\nstops once this step ends{where}; Ctrl-C or SIGTERM again ends it here", file=sys.stderr, flush=True)


@contextmanager
def interruptible(loops: list[Loop]) -> Iterator[list[Loop]]:
    """The loops, raising KeyboardInterrupt between two steps, or out of a wait of the only one: where there are others,
    one of them may be in a step. Outside the main thread: unchanged."""
    if threading.current_thread() is not threading.main_thread():
        yield loops
        return
    presses = _Presses()
    try:
        with _handled(presses.handle):
            yield [_watched(loop, presses, is_alone=len(loops) == 1) for loop in loops]
    finally:
        presses.close()


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
    with _handled(_late.handle):
        yield


def was_pressed() -> bool:
    """Whether Ctrl-C came since the last time that this was asked, and nothing was done about it."""
    is_pressed, _late.is_pressed = _late.is_pressed, False
    return is_pressed


@contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """Within, the other signals do what Ctrl-C does, whatever that is; they end the process where it is ignored."""

    def handle(number: int, frame: FrameType | None) -> None:
        if not callable(signal.getsignal(signal.SIGINT)):
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    with _handled(handle, _OTHERS):
        yield


@contextmanager
def _handled(handler: Any, numbers: tuple[signal.Signals, ...] = (signal.SIGINT, *_OTHERS)) -> Iterator[None]:
    """Within, these signals are `handler`'s, but for a SIGHUP that is ignored. Outside the main thread: as before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    before = {
        number: signal.signal(number, handler) for number in numbers if not (is_ignored and number is signal.SIGHUP)
    }
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
