"""The PCIe link between a device and its host: transfers queue, one at a time in each direction. Knows no plans.

Full duplex: what is swapped out and what is swapped in do not slow each other down. The link serves a queue in the
order of requests; how long a transfer takes (latency and bytes over bandwidth) is priced by the cost model. Several
replicas may share one link: then they wait for each other.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any

import simpy

Process = Generator[Any, Any, None]


class HostLink:
    """Two queues: out (device to host) and in (host to device)."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._out = simpy.Resource(env)
        self._in = simpy.Resource(env)
        self.busy_out_ns = 0  # time that transfers have taken so far, without their waiting
        self.busy_in_ns = 0

    def move_out(self, duration_ns: int) -> simpy.Process:
        """A transfer that queues now; the process ends with it."""
        self.busy_out_ns += duration_ns
        return self._env.process(self._move(self._out, duration_ns, []))

    def move_in(self, duration_ns: int, after: Iterable[simpy.Event]) -> simpy.Process:
        """A transfer that queues once `after` has happened: what it reads is there, what it overwrites is saved."""
        self.busy_in_ns += duration_ns
        return self._env.process(self._move(self._in, duration_ns, list(after)))

    def _move(self, queue: simpy.Resource, duration_ns: int, after: list[simpy.Event]) -> Process:
        if after:
            yield self._env.all_of(after)
        with queue.request() as turn:
            yield turn
            yield self._env.timeout(duration_ns)


class SwapsUnderWay:
    """The swap-outs of one replica that have not ended, by the blocks that must not be touched before."""

    def __init__(self) -> None:
        self._by_gpu_block: dict[int, simpy.Process] = {}  # is read: must not be overwritten
        self._by_cpu_block: dict[int, simpy.Process] = {}  # is written: must not be read

    def __bool__(self) -> bool:
        """Whether one has not ended. Forgets those that have."""
        if self._by_gpu_block:
            for blocks in (self._by_gpu_block, self._by_cpu_block):
                for block in [block for block, transfer in blocks.items() if transfer.processed]:
                    del blocks[block]
        return bool(self._by_gpu_block)

    def add(self, pairs: Iterable[tuple[int, int]], transfer: simpy.Process) -> None:
        """pairs: (GPU block, CPU block). A later transfer of a block ends later: it takes the earlier one's place."""
        for gpu_block, cpu_block in pairs:
            self._by_gpu_block[gpu_block] = transfer
            self._by_cpu_block[cpu_block] = transfer

    def before_writing(self, gpu_blocks: Iterable[int]) -> list[simpy.Process]:
        """What must end before these GPU blocks are overwritten."""
        return list(_found(self._by_gpu_block, gpu_blocks))

    def before_reading(self, cpu_blocks: Iterable[int]) -> list[simpy.Process]:
        """What must end before these CPU blocks are read."""
        return list(_found(self._by_cpu_block, cpu_blocks))


def _found(transfers: dict[int, simpy.Process], blocks: Iterable[int]) -> Iterator[simpy.Process]:
    """The transfers of these blocks, each once."""
    return iter(dict.fromkeys(transfers[block] for block in blocks if block in transfers))
