"""Standard output and error that take whatever is said: any character, and after the reader has left."""

from __future__ import annotations

import io
import os
import sys


def take_any_character() -> None:
    """A character that the terminal's encoding lacks is shown as its escape, and stops nothing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def go_on_unheard() -> None:
    """After a BrokenPipeError: what is still said to standard output is dropped."""
    if sys.stdout is not None:  # as where it was closed from the start
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
