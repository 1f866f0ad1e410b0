"""A server's way out: it sends the tokens of its engines to their clients, one after the other."""

from __future__ import annotations

from mypy_extensions import i64


class Sender:
    """Sends to one client at a time, in the order in which tokens came; each time takes ns_per_token.

    A token whose request still waits for its turn is sent with the one before it, as vLLM merges outputs: however slow
    the server is, a client waits for each of the others once at most. Who was aborted meanwhile keeps its turn.
    """

    def __init__(self, ns_per_token: int) -> None:
        self._ns_per_token: i64 = ns_per_token
        self._free_ns = i64(0)  # when it has sent all that it was given
        self._sent_ns: dict[str, int] = {}  # of each request its newest token, when the client has it or will have it

    def send(self, request_id: str, emitted_ns: int) -> int:
        """Takes a token that was emitted just now; when its client has it."""
        waiting_ns = self._sent_ns.get(request_id, 0)
        if waiting_ns > emitted_ns:
            return waiting_ns
        self._free_ns = max(self._free_ns, i64(emitted_ns)) + self._ns_per_token
        self._sent_ns[request_id] = sent_ns = int(self._free_ns)
        return sent_ns

    def last_ns(self, request_id: str, now_ns: int) -> int:
        """When the client of a request that has ended just now has all of it. The request is forgotten."""
        return max(now_ns, self._sent_ns.pop(request_id, now_ns))
