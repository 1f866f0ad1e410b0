"""Standard output and error that take whatever is said, after the reader has left too."""

from __future__ import annotations

import os
import sys


def go_on_unheard() -> None:
    """After a BrokenPipeError: what is still said to standard output is dropped."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
