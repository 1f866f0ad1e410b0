"""Several ranks in one process: a thread each, which meet at every sum and gather."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from testbed.specs.model import ModelSpec
from tests.real.engine_helpers import TOLERANCE, logits_of_pieces

T = TypeVar("T")


class ThreadRank:
    """One rank of a group of threads."""

    def __init__(self, rank: int, tensors: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(tensors)
        self._tensors = tensors
        self._barrier = barrier

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._everybody(tensor)).sum(0)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._everybody(tensor), dim=-1)

    def _everybody(self, tensor: Tensor) -> list[Tensor]:
        self._tensors[self.rank] = tensor.clone()
        self._barrier.wait()
        tensors = [other for other in self._tensors if other is not None]
        self._barrier.wait()
        assert len(tensors) == self.size
        return tensors


def on_ranks(num_ranks: int, work: Callable[[ThreadRank], T]) -> list[T]:
    """What each rank's work returns, by rank. Raises the error of a rank that failed by itself."""
    tensors: list[Tensor | None] = [None] * num_ranks
    barrier = threading.Barrier(num_ranks, timeout=60)

    def one(rank: int) -> T:
        has_result = False
        try:
            result = work(ThreadRank(rank, tensors, barrier))
            has_result = True
            return result
        finally:
            if not has_result:
                barrier.abort()  # the others wait no longer

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(one, rank) for rank in range(num_ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (own or errors)[0]
    return [future.result() for future in futures]


def check_ranks_agree(spec: ModelSpec, num_ranks: int, tolerance: float = TOLERANCE, **options: object) -> Tensor:
    """Each of the ranks together has the logits of one rank by itself, which are returned."""
    expected = logits_of_pieces(spec, seed=5, **options)
    for logits in on_ranks(num_ranks, lambda rank: logits_of_pieces(spec, group=rank, seed=5, **options)):
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)
    return expected
