"""Setups of ranks and replicas, for tests. Imported by their processes, so it imports little."""

from __future__ import annotations

import os
import pickle
import signal
import sys

from real.parallel.processes import Channel, spawn


class HungRank:
    """A replica's setup. fails: whether the replica then fails, or works until the driver leaves."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails

    def work(self, channel: Channel) -> None:
        rank, _ = spawn(1.0)
        os.kill(rank.pid, signal.SIGSTOP)
        channel.send(pickle.dumps(rank.pid))
        if self.fails:
            raise ValueError("a rank does not answer")
        signal.pause()


class LeftByDriver:
    """A rank's setup: it fails, and nobody listens any more."""

    def work(self, channel: Channel) -> None:
        channel.hang_up()
        raise ValueError("a collective failed")


class ShowsBar:
    """Says whether the loader's progress bar is off in a process with a terminal."""

    def work(self, channel: Channel) -> None:
        from real import loader

        setattr(sys.stderr, "isatty", lambda: True)  # noqa: B010  (mypy knows it as a method)
        channel.send(pickle.dumps(loader._shown("ab", 2).disable))
