"""The time of a collective operation between the ranks of tensor parallelism: volumes over links, and latencies.

n ranks, B bytes in all, L the latency of a hop, D = ceil(log2 n). Volume on the busiest link, longest chain of hops:

    all-reduce   ring 2 (n - 1) / n B, 2 (n - 1) L      tree 2 B, 2 D L
                 through a switch also: all from all (n - 1) B, 2 L; or in two halves 2 (n - 1) / n B, 4 L
    all-gather   ring (n - 1) / n B, (n - 1) L          tree (recursive doubling) (n - 1) / n B, D L
    gather       into the root's one link: ring (n - 1) / n B, (n - 1) L; tree (n - 1) / n B, D L
    broadcast    ring (scatter, then all-gather) 2 (n - 1) / n B, (n - 1 + D) L; tree (binomial) D B, D L

The fastest counts, as a library picks it. (Thakur, Rabenseifner, Gropp: "Optimization of collective communication
operations in MPICH", IJHPCA 2005.) The tree's all-reduce is NCCL's double binary tree: pipelined, so its volume does
not grow with its depth. If a switch joins all ranks (NVLink), each rank can read directly from every other one, as in
vLLM's custom all-reduce: the whole message, or its share of the sum and then the shares of the others.

Through xGMI each pair of ranks has its own link, so each of n ranks has n - 1 of them. Over PCIe an all-reduce of two
ranks takes 20 us plus its bytes at 15 GB/s through the host's memory, or 10 us plus its bytes at 35 GB/s if the cards
reach one another; more ranks share the host's links. Not modelled: links of unequal speed, networks between nodes.
"""

from __future__ import annotations

from testbed.specs.device import DeviceSpec

PCIE = {  # bytes/s of each of two, up to four, and more ranks; ns of a hop
    "pcie_p2p": ((35e9, 28e9, 24e9), 5_000),  # of RTX PRO 6000 Server: aiconfigurator-core 0.12.0's all-reduces
    "pcie_host": ((15e9, 5e9, 2e9), 10_000),  # of four and more L40S: the same tables
}


def collectives_of(size: int, device: DeviceSpec) -> Collectives:
    """Returns the collectives between `size` devices of this kind, over its `interconnect`."""
    num_links = max(1, size - 1) if device.interconnect == "xgmi" else 1
    bytes_per_s = num_links * device.interconnect_bytes_per_s * device.interconnect_efficiency
    latency_ns = device.interconnect_latency_ns
    if device.is_over_pcie:
        rates, latency_ns = PCIE[device.interconnect]
        rate = rates[0 if size <= 2 else 1 if size <= 4 else 2]
        bytes_per_s = min(rate, device.host_link_bytes_per_s)  # no faster than the slot
    is_switched = not device.is_over_pcie  # or joined as directly
    return Collectives(size, bytes_per_s, latency_ns, is_switched=is_switched, factor=device.interconnect_factor)


class Collectives:
    """The times of one call between `size` ranks, in ns, as floats that the caller rounds once."""

    def __init__(
        self, size: int, link_bytes_per_s: float, latency_ns: int, *, is_switched: bool = False, factor: float = 1.0
    ) -> None:
        self.size, self.link_bytes_per_s, self.latency_ns = size, link_bytes_per_s, latency_ns
        self.is_switched, self.factor = is_switched, factor
        self._ns_per_byte = 1e9 / link_bytes_per_s * factor if size > 1 else 0.0  # one rank needs no link
        self._hop_ns = latency_ns * factor
        self._depth = (size - 1).bit_length()  # ceil(log2 size)

    def all_reduce_ns(self, num_bytes: int) -> float:
        """num_bytes: of the message that each rank contributes to the sum."""
        if self.size == 1:
            return 0.0
        hops = self.size - 1
        ring = 2 * hops * num_bytes / self.size * self._ns_per_byte + 2 * hops * self._hop_ns
        tree = 2 * num_bytes * self._ns_per_byte + 2 * self._depth * self._hop_ns
        if not self.is_switched:
            return min(ring, tree)
        whole = hops * num_bytes * self._ns_per_byte + 2 * self._hop_ns
        halves = 2 * hops * num_bytes / self.size * self._ns_per_byte + 4 * self._hop_ns
        return min(ring, tree, whole, halves)

    def all_gather_ns(self, num_bytes: int) -> float:
        """num_bytes: of the gathered result, at all ranks or at one: the busiest link carries as much. The tree has the
        volume of the ring, and fewer hops."""
        if self.size == 1:
            return 0.0
        return (self.size - 1) * num_bytes / self.size * self._ns_per_byte + self._depth * self._hop_ns

    def broadcast_ns(self, num_bytes: int) -> float:
        """num_bytes: of the message that one rank sends to all."""
        if self.size == 1:
            return 0.0
        hops = self.size - 1
        ring = 2 * hops * num_bytes / self.size * self._ns_per_byte + (hops + self._depth) * self._hop_ns
        tree = self._depth * num_bytes * self._ns_per_byte + self._depth * self._hop_ns
        return min(ring, tree)
