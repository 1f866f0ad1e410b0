"""Checks that weights and KV memory fit in the host's memory. Too large an allocation succeeds on Linux, and the system
kills the process later, when the memory is used."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from testbed.errors import DeviceError

MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/proc/self/cgroup")  # lines of id:controllers:path
CGROUP_ROOT = Path("/sys/fs/cgroup")
# by controllers, of version 2 and of version 1: their folder, the files of limit and use, and the part of the use, in
# memory.stat, that the kernel takes back when it is needed
CONTROLLERS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
PROCESS_BYTES = 400 * 1024**2  # of an engine's process, without model and cache
RESERVE_BYTES = 256 * 1024**2  # for the temporaries of a step and the core
TABLE_BYTES = 128  # of a block table's Python objects


def available_bytes() -> int | None:
    """Returns the memory that can be allocated without swapping, as estimated by Linux; less if the limit of a
    container or batch job leaves less; None on other systems."""
    if not MEMINFO.is_file():
        return None
    for line in MEMINFO.read_text(encoding="utf-8").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return min([int(amount.split()[0]) * 1024, *_left_by_cgroups()])
    return None


def _left_by_cgroups() -> list[int]:
    """Returns what each limit on the memory of this process leaves: of its cgroup and of those around it. Pages of
    files that were not read again do not count as used, as they are dropped first."""
    left = []
    for line in CGROUPS.read_text(encoding="utf-8").splitlines() if CGROUPS.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in CONTROLLERS:
            continue
        folder, limit, used, reclaimable = CONTROLLERS[controllers]
        own = CGROUP_ROOT / folder / path.lstrip("/")
        for group in (own, *own.parents):
            with suppress(OSError, ValueError):  # no such file, or no number: it has no limit
                stat = dict(pair.split() for pair in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
                in_use = int((group / used).read_text(encoding="utf-8")) - int(stat.get(reclaimable, 0))
                left.append(int((group / limit).read_text(encoding="utf-8")) - in_use)
    return left


def check_fits(model_name: str, weight_bytes: int, num_blocks: int, block_bytes: int, num_replicas: int = 1) -> None:
    """Raises DeviceError if the processes of several replicas, the weights, or weights and KV blocks together need more
    memory than is available for each replica.

    The swap pool is not counted, as its pages are allocated only when they are first written.
    """
    available = available_bytes()
    if available is None:
        return
    if num_replicas > 1:
        needed = num_replicas * PROCESS_BYTES
        if needed > available:
            raise DeviceError(
                f"backend.num_replicas is {num_replicas}: their processes alone take {needed:,} bytes, and "
                f"{available:,} are available; lower it"
            )
        available = available // num_replicas - PROCESS_BYTES
    here = "available" + f" for each of {num_replicas} replicas" * (num_replicas > 1)
    weights = f"the weights of {model_name} ({weight_bytes:,} bytes)"
    if weight_bytes + RESERVE_BYTES > available:
        raise DeviceError(
            f"{weights} do not fit in the {available:,} bytes that are {here}, of which {RESERVE_BYTES:,} are kept "
            "for the steps; choose a smaller model, or backend=sim"
        )
    if weight_bytes + num_blocks * block_bytes + RESERVE_BYTES > available:
        raise DeviceError(
            f"no memory for {num_blocks} KV blocks on cpu, {block_bytes:,} bytes each, beside {weights}: "
            f"{available:,} bytes are {here}; lower cache.num_gpu_blocks or backend.cpu_kv_bytes"
        )


def check_tables_fit(max_num_seqs: int, max_blocks: int) -> None:
    """Raises DeviceError if the block tables of `max_num_seqs` sequences need more memory than is available.

    The host has two copies of each, int32 [max_blocks]: its own, and the one that is the device's, or is sent there.
    """
    available = available_bytes()
    needed = max_num_seqs * (2 * 4 * max_blocks + TABLE_BYTES)
    if available is not None and needed + RESERVE_BYTES > available:
        raise DeviceError(
            f"scheduler.max_num_seqs is {max_num_seqs}: the block tables of as many sequences take {needed:,} bytes, "
            f"and {available:,} are available, of which {RESERVE_BYTES:,} are kept for the steps; lower it"
        )
