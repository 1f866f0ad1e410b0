"""Handles Ctrl-C at step boundaries: records end with a complete step, whose digest is in the manifest.

SIGTERM (from a cluster) and SIGHUP (from a closed terminal, unless under nohup) are treated like Ctrl-C; in a run from
Python, unless the caller handles them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from testbed.core.commands import Execute, Resume, WaitUntil
from testbed.core.serve import Loop

_OTHERS = (signal.SIGTERM, signal.SIGHUP)
_ending: list[int] = []  # those of them that came during a run
PATIENCE_S = 3.0  # time after Ctrl-C until a message reports that the step is still running


class _Presses:
    """Whether Ctrl-C was pressed. It takes effect at once during a wait, and when pressed a second time; SIGTERM and
    SIGHUP, which come once, after PATIENCE_S too."""

    def __init__(self) -> None:
        self.is_pressed = False
        self.is_waiting = False
        self._patience = threading.Timer(PATIENCE_S, _tell_where)
        self._patience.daemon = True
        _ending.clear()

    def handle(self, number: int, frame: FrameType | None) -> None:
        if number in _OTHERS:
            _ending.append(number)
        if self.is_waiting or self.is_pressed:
            raise KeyboardInterrupt
        self.is_pressed = True
        self._patience.start()

    def close(self) -> None:
        self._patience.cancel()


def _tell_where() -> None:
    """Reports where the main thread is, in case a policy loops or a step of the model is long, and ends it there after
    a SIGTERM."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    where = "" if frame is None else f", at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}()"
    said = (
        f"this step has not ended in {PATIENCE_S:g} s{{}}; ended there"
        if _ending
        else "stops once this step ends{}; Ctrl-C again ends it here"
    )
    print(f"\n{said.format(where)}", file=sys.stderr, flush=True)
    if _ending:
        os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def interruptible(loops: list[Loop]) -> Iterator[list[Loop]]:
    """Yields the loops so that Ctrl-C raises KeyboardInterrupt between two steps. A single loop can also be interrupted
    in a wait; with several loops another one may be in a step. Outside the main thread: yields them unchanged."""
    if threading.current_thread() is not threading.main_thread():
        yield loops
        return
    presses = _Presses()
    try:
        with _handled(presses.handle):
            yield [_watched(loop, presses, is_alone=len(loops) == 1) for loop in loops]
    finally:
        presses.close()


_late: list[int] = []  # the signals that came within `undisturbed`


@contextmanager
def undisturbed() -> Iterator[None]:
    """Context in which Ctrl-C has no effect: records are being closed, and a second press would lose them. Callers that
    continue afterwards check `was_pressed`."""
    with _handled(lambda number, frame: _late.append(number)):
        yield


def was_pressed() -> bool:
    """Whether Ctrl-C was pressed within `undisturbed` since the last call."""
    is_pressed = bool(_late)
    _late.clear()
    return is_pressed


@contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP act like Ctrl-C. If SIGINT has no handler or is ignored, they raise
    KeyboardInterrupt."""

    def handle(number: int, frame: FrameType | None) -> None:
        _ending.append(number)
        if not callable(signal.getsignal(signal.SIGINT)):
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    with _handled(handle, (signal.SIGTERM,) if is_ignored else _OTHERS):
        yield


@contextmanager
def _handled(handler: Any, numbers: Iterable[signal.Signals] | None = None) -> Iterator[None]:
    """Context in which `handler` gets these signals, by default SIGINT and those of the others that nobody handles.
    Outside the main thread: no change."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if numbers is None:
        numbers = [signal.SIGINT, *(number for number in _OTHERS if signal.getsignal(number) is signal.SIG_DFL)]
    before = {number: signal.signal(number, handler) for number in numbers}
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
