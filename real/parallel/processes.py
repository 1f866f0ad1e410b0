"""Starts, watches and ends the processes of ranks other than the driver's, and of replicas. Knows no tensors; needs no
torch.

A rank is a new interpreter, not a fork, because CUDA and threads do not survive a fork; the user's program is not run
again. A pair of sockets connects it to the driver. When a rank dies, its socket closes, and the driver notices at once.
When the driver dies, the rank notices in the same way and ends itself. So no process is left behind after a success, a
failure, an interrupt or a SIGKILL of the driver. Only the driver handles signals that a terminal or a cluster sends to
all processes, as only the driver knows where a step ends.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

from testbed import errors
from testbed.errors import DeviceError, TestbedError

GRACE_S = 2.0  # wait for the first cause: a rank that lost a peer can report it before the peer's end is known
END_S = 5.0  # time to end before a process is killed
LOST = "LostPeerError"  # of a rank that failed because another rank had ended
HEADER_BYTES = 8  # of a message: its length
READY = "ready"  # message of a rank once it is connected
WORKER = "real.parallel.worker"  # what its process runs

_started: list[subprocess.Popen[bytes]] = []  # by this process


class Channel:
    """Sends and receives whole messages at one end of a socket pair. One thread can `send` while another receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._early: deque[bytes] = deque()  # messages that came in `send_across`

    def fileno(self) -> int:
        return self._end.fileno()

    def has_message(self, timeout_s: float | None) -> bool:
        """Whether within this time a message arrives or the other end closes. None: waits without limit."""
        return bool(self._early or select.select([self._end], [], [], timeout_s)[0])

    def send(self, message: bytes) -> None:
        """Raises OSError if the other end is closed; its subclass TimeoutError if that reads nothing for too long."""
        self._end.sendall(_framed(message))

    def send_across(self, message: bytes) -> None:
        """Sends while the other end may be sending: messages that come first are kept for `receive`. Otherwise two
        messages longer than the connection's buffers would wait for each other. Only one end may do this. Raises as
        `send`."""
        left = memoryview(_framed(message))
        while left:
            readable, writable, _ = select.select([self._end], [self._end], [], self._end.gettimeout())
            if writable:
                left = left[self._end.send(left) :]
            elif not readable:
                raise TimeoutError("timed out")
            elif (early := self._receive()) is None:
                raise ConnectionResetError("the other end has closed")
            else:
                self._early.append(early)

    def receive(self) -> bytes | None:
        """Returns the next message; None if the other end is closed. Raises TimeoutError if it stops within one."""
        return self._early.popleft() if self._early else self._receive()

    def _receive(self) -> bytes | None:
        header = self._read(HEADER_BYTES)
        return None if header is None else self._read(int.from_bytes(header, "little"))

    def hang_up(self) -> None:
        """Closes the connection; the other end notices at once, whatever it is doing. Can be called again."""
        with suppress(OSError):  # the other end has closed first
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _read(self, num_bytes: int) -> bytes | None:
        message = bytearray(num_bytes)
        view, num_read = memoryview(message), 0
        while num_read < num_bytes:
            try:
                num = self._end.recv_into(view[num_read:])
            except TimeoutError:
                raise
            except OSError:
                return None
            if num == 0:
                return None
            num_read += num
        return bytes(message)


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(HEADER_BYTES, "little") + message


class Failure(NamedTuple):
    """Why a rank or a replica ended. kind: class of the exception that it reported; empty: it reported none."""

    kind: str
    message: str
    traceback: str = ""  # for the log

    def error(self, who: str) -> TestbedError:
        """Returns the failure as an exception. who: names the process."""
        made = getattr(errors, self.kind, None) if self.kind else None
        if not (isinstance(made, type) and issubclass(made, TestbedError)):
            made = DeviceError
        return made(f"{who} {f'failed: {self.message}' if self.kind else self.message}")


class Ranks:
    """Ranks 1 … size - 1. setups: the setup that each gets when it starts, in order of ranks; any picklable objects.

    timeout_s: how long a rank may take to accept a message. Not thread-safe, except for its own watching thread.
    """

    def __init__(self, setups: Sequence[Any], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._on_failure: Callable[[], None] | None = None
        self._changed = threading.Condition()  # guards the next three
        self._failures: dict[int, Failure] = {}
        self._ready: set[int] = set()
        self._is_failed = False
        self._is_closed = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._bell, self._rope = socket.socketpair()  # closing the rope ends the watch
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        try:
            for setup in setups:
                process, channel = spawn(timeout_s)
                self._processes.append(process)
                self._channels.append(channel)
                channel.send(pickle.dumps(setup))
            self._watcher.start()
        except BaseException:
            self.close()
            raise

    # --- for the driver ---

    def wait_until_ready(self) -> None:
        """Waits until each rank has sent READY. Raises the failure of a rank that ended instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_failed or len(self._ready) == len(self._channels))
        self.check()

    def on_failure(self, free: Callable[[], None]) -> None:
        """Sets a callback. free: called by the watching thread once a rank has failed, to end waits for that rank."""
        self._on_failure = free

    def send(self, message: bytes) -> None:
        """Sends to each rank. Raises the failure of a rank that does not accept the message."""
        for channel in self._channels:
            try:
                channel.send(message)
            except OSError as error:
                raise self.cause(str(error)) from None

    def check(self) -> None:
        """Raises the failure of a rank, if there is one."""
        if self._is_failed:
            raise self.cause("")

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Waits until `is_done` returns True. Raises the failure of a rank, also if nothing happens for too long."""
        deadline = time.monotonic() + self._timeout_s
        while not is_done():
            self.check()
            if time.monotonic() > deadline:
                raise self.cause(f"nothing in {self._timeout_s:g} s")

    def cause(self, symptom: str) -> TestbedError:
        """Returns why the ranks do not go on, as an error to raise. symptom: what was observed in this process."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_failed, GRACE_S)
            cause, lost = self._first_cause(), next(iter(self._failures.values()), None)
        if cause is not None:
            return cause
        last = len(self._channels)
        who = "rank 1" if last == 1 else f"one of ranks 1 to {last}"
        what = symptom if lost is None else lost.message
        return DeviceError(f"{who} does not answer ({what}); if it was only slow, raise backend.rank_timeout_s")

    def close(self) -> None:
        """Ends the processes and waits for their end. Can be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._rope.close()
        if self._watcher.ident is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        for channel in self._channels:
            channel.hang_up()
        for process in self._processes:
            end_process(process)
        self._bell.close()

    # --- the watching thread ---

    def _watch(self) -> None:
        """Receives messages of the ranks until one fails or the driver closes."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ, 0)
            for rank, channel in enumerate(self._channels, 1):
                selector.register(channel, selectors.EVENT_READ, rank)
            deadline: float | None = None
            while deadline is None or (self._first_cause() is None and time.monotonic() < deadline):
                for key, _ in selector.select(None if deadline is None else deadline - time.monotonic()):
                    if key.data == 0:
                        return
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                if self._failures and deadline is None:
                    deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            process.kill()
        with self._changed:
            self._is_failed = True
            self._changed.notify_all()
        if self._on_failure is not None:
            self._on_failure()

    def _hear(self, rank: int) -> bool:
        """Receives one message; returns False if the connection has ended instead, or stopped within a message."""
        message, end = None, "has stopped within a message"
        with suppress(TimeoutError):
            if (message := self._channels[rank - 1].receive()) is None:
                end = describe_end(self._processes[rank - 1])
        with self._changed:
            if message is None:
                self._failures.setdefault(rank, Failure("", end))
            elif isinstance(said := heard(message, f"rank {rank}"), Failure):
                self._failures[rank] = said
            else:
                self._ready.add(rank)
            self._changed.notify_all()
        return message is not None

    def _first_cause(self) -> TestbedError | None:
        causes = (failure.error(f"rank {rank}") for rank, failure in self._failures.items() if failure.kind != LOST)
        return next(causes, None)


def heard(message: bytes, who: str) -> Any:
    """Unpickles the message of a process; a failure's traceback goes to the log."""
    said = pickle.loads(message)
    if isinstance(said, Failure):
        logging.getLogger("testbed").info("%s failed\n%s", who, said.traceback)
    return said


def describe_end(process: subprocess.Popen[bytes]) -> str:
    """Describes how a process ended whose connection has closed."""
    try:
        code = process.wait(END_S)
    except subprocess.TimeoutExpired:
        return f"(process {process.pid}) has closed its connection"
    if code >= 0:
        return f"(process {process.pid}) ended by itself with exit status {code}"
    name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
    hint = "; the system kills whoever takes too much memory" if -code == signal.SIGKILL else ""
    return f"(process {process.pid}) was killed by {name}{hint}"


def end_process(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(ValueError):  # it was ended before
        _started.remove(process)


def end_here(status: int) -> NoReturn:
    """Ends this process at once, and those that it started: one that hangs would not notice. Skips the clean-up of
    libraries, which may wait for other ranks."""
    for process in _started:
        process.kill()
    os._exit(status)


def spawn(timeout_s: float, environment: dict[str, str] | None = None) -> tuple[subprocess.Popen[bytes], Channel]:
    """Starts the process of a rank or of a replica; returns it and the driver's end of the connection.

    It finds modules where this process does. environment: additional variables. timeout_s: limit for sending to it.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    ours, theirs = socket.socketpair()
    ours.settimeout(timeout_s)
    with theirs, _blocked_signals():
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        )
    _started.append(process)
    return process, Channel(ours)


def is_spawned() -> bool:
    """Whether this process is a rank's or a replica's, which `spawn` started."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)  # pdb leaves none
    return spec is not None and spec.name == WORKER


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Blocks Ctrl-C, SIGTERM and SIGHUP. A process started meanwhile keeps the block; here they arrive afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
