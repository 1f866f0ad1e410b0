"""The process of a rank other than the driver's, or of a replica: builds its share of the model and executes plans.

Started by real.parallel.processes. A rank reads no clock, writes no records and samples no tokens. Its whole process
ends at once when the driver's end of the connection is closed.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass

from real.config import EngineOptions, RealConfig
from real.parallel.processes import READY, Channel, Failure, end_here
from testbed.errors import TestbedError
from testbed.specs.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Setup:
    """What a rank gets when it starts. port: that of `host_store`'s store."""

    rank: int
    size: int
    port: int
    device_type: str
    spec: ModelSpec
    config: RealConfig
    options: EngineOptions

    def work(self, channel: Channel) -> None:
        """Runs in the rank's process: executes plans until the driver closes the connection."""
        import torch

        from real.backend import RealBackend
        from real.parallel.distributed import find_store, join
        from real.parallel.wire import unpack

        if self.device_type == "cuda":
            torch.cuda.set_device(self.rank)
        store = find_store(self.port, self.size)
        channel.send(pickle.dumps(READY))
        group = join(store, self.rank, self.size, self.device_type, self.config.rank_timeout_s)
        backend = RealBackend(self.spec, self.config, self.options, group)
        while (message := channel.receive()) is not None:
            backend.start(unpack(message)).wait()


def main() -> None:
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    threading.Thread(target=_end_with_driver, args=(end.fileno(),), daemon=True).start()
    channel = Channel(end)
    try:
        message = channel.receive()
        if message is not None:
            pickle.loads(message).work(channel)
    except BaseException as error:  # noqa: BLE001  (whatever it is, the driver says it)
        with suppress(OSError):  # the driver has ended first
            channel.send(pickle.dumps(_failure(error)))
        end_here(1)
    end_here(0)


def _end_with_driver(fileno: int) -> None:
    hangup = select.poll()
    hangup.register(fileno, 0)  # POLLHUP is always reported
    hangup.poll()
    end_here(1)


def _failure(error: BaseException) -> Failure:
    """Describes the error in one line; for an error that is no TestbedError, with its class and source line."""
    text = str(error).partition("\n")[0]
    if not isinstance(error, TestbedError):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {text} ({os.path.basename(frame.filename)}:{frame.lineno})"
    return Failure(type(error).__name__, text, "".join(traceback.format_exception(error)))


if __name__ == "__main__":
    main()
