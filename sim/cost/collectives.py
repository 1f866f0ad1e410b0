"""What a collective operation between the ranks of tensor parallelism costs: volumes over links, and latencies.

Ring: 2 (n - 1) / n of the data in 2 (n - 1) hops for an all-reduce, half of both for an all-gather. Tree: an all-reduce
passes the data up and down, 2 ceil(log2 n) hops. The library picks the faster, and so does this
(Thakur, Rabenseifner, Gropp: "Optimization of collective communication operations in MPICH", IJHPCA 2005).
"""

from __future__ import annotations


class Collectives:
    """Times in ns (floats, to be rounded once by the caller) of one call between `size` ranks."""

    def __init__(self, size: int, link_bytes_per_s: float, latency_ns: int) -> None:
        self.size = size
        self._ns_per_byte = 1e9 / link_bytes_per_s
        self._latency_ns = latency_ns
        self._depth = (size - 1).bit_length()  # ceil(log2 size)

    def all_reduce_ns(self, num_bytes: int) -> float:
        if self.size == 1:
            return 0.0
        hops = self.size - 1
        ring = 2 * hops * num_bytes / self.size * self._ns_per_byte + 2 * hops * self._latency_ns
        tree = 2 * num_bytes * self._ns_per_byte + 2 * self._depth * self._latency_ns
        return min(ring, tree)

    def all_gather_ns(self, num_bytes: int) -> float:
        """num_bytes: of the gathered whole."""
        if self.size == 1:
            return 0.0
        hops = self.size - 1
        return hops * num_bytes / self.size * self._ns_per_byte + self._depth * self._latency_ns
