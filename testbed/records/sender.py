"""A server's way out: it sends the tokens of its engines to their clients, one after the other."""

from __future__ import annotations

from mypy_extensions import i64


class Sender:
    """Sends one token at a time, in the order emitted; each takes ns_per_token, and 0 sends at once.

    What a step emitted waits for what the steps before it did: a server that is too slow for its engine falls behind.
    """

    def __init__(self, ns_per_token: int = 0) -> None:
        self.free_ns = i64(0)  # when it has sent all that it was given
        self._ns_per_token: i64 = ns_per_token

    def send(self, emitted_ns: i64) -> i64:
        """Takes a token that was emitted just now; when its client has it."""
        if not self._ns_per_token:  # nothing waits: engines whose clocks differ may share it
            return emitted_ns
        self.free_ns = max(self.free_ns, emitted_ns) + self._ns_per_token
        return self.free_ns
