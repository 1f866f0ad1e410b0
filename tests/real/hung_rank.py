"""Replicas and ranks that do nothing useful, for tests. Imported by their processes, so it imports little."""

from __future__ import annotations

import os
import pickle
import signal

from real.parallel.processes import Channel, is_spawned, spawn


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


class SaysWhatItIs:
    """A replica's setup: it says whether its process knows that `spawn` started it."""

    def work(self, channel: Channel) -> None:
        channel.send(pickle.dumps(is_spawned()))


class LeftByDriver:
    """A rank's setup: it fails, and nobody listens any more."""

    def work(self, channel: Channel) -> None:
        channel.hang_up()
        raise ValueError("a collective failed")
