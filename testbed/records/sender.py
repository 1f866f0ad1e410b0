"""The token delivery of a server: sends the tokens of its engines to their clients, one after the other."""

from __future__ import annotations

from mypy_extensions import i64


class Sender:
    """Sends to one client at a time, in the order of the tokens; each send takes `ns_per_token`.

    If an earlier token of the same request still waits to be sent, both are sent together, as vLLM merges outputs. So,
    however slow the server is, a client waits at most once for each other client. An aborted request keeps its turn.
    """

    def __init__(self, ns_per_token: int) -> None:
        self._ns_per_token: i64 = ns_per_token
        self._free_ns = i64(0)  # when all tokens taken so far are sent
        self._sent_ns: dict[str, int] = {}  # by request: when its client receives the newest token

    def send(self, request_id: str, emitted_ns: int) -> int:
        """Takes a token emitted at `emitted_ns`; returns when its client has it."""
        waiting_ns = self._sent_ns.get(request_id, 0)
        if waiting_ns > emitted_ns:
            return waiting_ns
        self._free_ns = max(self._free_ns, i64(emitted_ns)) + self._ns_per_token
        self._sent_ns[request_id] = sent_ns = int(self._free_ns)
        return sent_ns

    def last_ns(self, request_id: str, now_ns: int) -> int:
        """Returns when the client of a request that has just ended has all its tokens. Forgets the request."""
        return max(now_ns, self._sent_ns.pop(request_id, now_ns))
