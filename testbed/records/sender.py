"""A server's way out: it sends the tokens of its engines to their clients, one after the other."""

from __future__ import annotations

from mypy_extensions import i64


class Sender:
    """Sends one token at a time, in the order emitted; each takes ns_per_token.

    What a step emitted waits for what the steps before it did: a server that is too slow for its engine falls behind.
    Tokens of a request that was aborted meanwhile keep their place.
    """

    def __init__(self, ns_per_token: int) -> None:
        self.free_ns = i64(0)  # when it has sent all that it was given
        self._ns_per_token: i64 = ns_per_token
        self._sent_ns: dict[str, int] = {}  # when its client had the last token of a request, or will have it

    def send(self, request_id: str, emitted_ns: i64) -> i64:
        """Takes a token that was emitted just now; when its client has it."""
        self.free_ns = max(self.free_ns, emitted_ns) + self._ns_per_token
        self._sent_ns[request_id] = self.free_ns
        return self.free_ns

    def last_ns(self, request_id: str, now_ns: int) -> int:
        """When the client of a request that has ended just now has all of it. The request is forgotten."""
        return max(now_ns, self._sent_ns.pop(request_id, now_ns))
