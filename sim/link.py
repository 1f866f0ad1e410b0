"""The PCIe link between a device and its host: transfers queue, one at a time in each direction. Knows no plans.

Full duplex: swap-outs and swap-ins do not slow each other down. Each direction serves its transfers first come, first
served. The cost model gives the time of a transfer (latency, plus bytes over bandwidth). Several replicas can share one
link; then they wait for each other.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import simpy

Process = Generator[Any, Any, None]


class HostLink:
    """Two queues: out (device to host) and in (host to device)."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._out = simpy.Resource(env)
        self._in = simpy.Resource(env)

    def move_out(self, duration_ns: int) -> simpy.Process:
        """Returns the process of a transfer that queues now. The process ends with the transfer."""
        return self._env.process(self._move(self._out, duration_ns, []))

    def move_in(self, duration_ns: int, after: Iterable[simpy.Event]) -> simpy.Process:
        """Returns the process of a transfer that queues after all events of `after`: the blocks that it reads are then
        written, and the blocks that it overwrites are saved."""
        return self._env.process(self._move(self._in, duration_ns, list(after)))

    def _move(self, queue: simpy.Resource, duration_ns: int, after: list[simpy.Event]) -> Process:
        if after:
            yield self._env.all_of(after)
        with queue.request() as turn:
            yield turn
            yield self._env.timeout(duration_ns)


class SwapsUnderWay:
    """The swap-outs of one replica that have not ended, by the blocks that must not be used before they end."""

    def __init__(self) -> None:
        self._by_gpu_block: dict[int, simpy.Process] = {}  # source blocks: must not be overwritten yet
        self._by_cpu_block: dict[int, simpy.Process] = {}  # destination blocks: must not be read yet

    def __bool__(self) -> bool:
        """Whether any swap-out has not ended. Forgets those that have ended."""
        if self._by_gpu_block:
            for blocks in (self._by_gpu_block, self._by_cpu_block):
                for block in [block for block, transfer in blocks.items() if transfer.processed]:
                    del blocks[block]
        return bool(self._by_gpu_block)

    def add(self, pairs: Iterable[tuple[int, int]], transfer: simpy.Process) -> None:
        """Adds a swap-out. pairs: (GPU block, CPU block). It replaces an earlier transfer of the same block, which ends
        earlier."""
        for gpu_block, cpu_block in pairs:
            self._by_gpu_block[gpu_block] = transfer
            self._by_cpu_block[cpu_block] = transfer

    def before_writing(self, gpu_blocks: Iterable[int]) -> list[simpy.Process]:
        """Returns the swap-outs that must end before these GPU blocks are overwritten."""
        return _found(self._by_gpu_block, gpu_blocks)

    def before_reading(self, cpu_blocks: Iterable[int]) -> list[simpy.Process]:
        """Returns the swap-outs that must end before these CPU blocks are read."""
        return _found(self._by_cpu_block, cpu_blocks)


def _found(transfers: dict[int, simpy.Process], blocks: Iterable[int]) -> list[simpy.Process]:
    """Returns the transfers of these blocks, each once."""
    return list(dict.fromkeys(transfers[block] for block in blocks if block in transfers))
