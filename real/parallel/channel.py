"""Whole messages over a pair of connected sockets, between the driver and one rank. Knows bytes alone."""

from __future__ import annotations

import select
import socket
from contextlib import suppress

HEADER_BYTES = 8


class Channel:
    """One end. One thread may send while another receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        return self._end.fileno()

    def has_message(self, timeout_s: float | None) -> bool:
        """Whether something can be received, or the other end is gone, within this time (None: waits for it)."""
        return bool(select.select([self._end], [], [], timeout_s)[0])

    def send(self, message: bytes) -> None:
        """Raises OSError if the other end is gone, TimeoutError (one of them) if it takes nothing for too long."""
        self._end.sendall(len(message).to_bytes(HEADER_BYTES, "little") + message)

    def receive(self) -> bytes | None:
        """The next message, or None when the other end is gone."""
        header = self._read(HEADER_BYTES)
        return None if header is None else self._read(int.from_bytes(header, "little"))

    def hang_up(self) -> None:
        """The other end learns of it at once, in whatever it does. May be called again."""
        with suppress(OSError):  # the other end has gone first
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _read(self, num_bytes: int) -> bytes | None:
        message = bytearray(num_bytes)
        view, num_read = memoryview(message), 0
        while num_read < num_bytes:
            try:
                num = self._end.recv_into(view[num_read:])
            except OSError:
                return None
            if num == 0:
                return None
            num_read += num
        return bytes(message)


def channel_pair(timeout_s: float) -> tuple[Channel, socket.socket]:
    """The driver's end, and the one that a new process is given. timeout_s: of the driver's sending."""
    ours, theirs = socket.socketpair()
    ours.settimeout(timeout_s)
    return Channel(ours), theirs
