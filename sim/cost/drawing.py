"""What a sampler does beside finding the largest logit: temperature and noise, penalties, filters, log-probabilities.

Counted in kernels and in bytes of each logit, as vLLM's sampler passes over them (0.14, `v1/sample`). What sorting
costs, and selecting without a sort, was timed by others: docs/cost-models.md says by whom, and how far this is off.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from testbed.core.sampling import SamplingParams
from testbed.specs.device import DeviceSpec

LOGIT_BYTES: Final = 4


class Work(NamedTuple):
    """num_sweeps: passes of one multiprocessor over each row, rows side by side."""

    num_kernels: int = 0
    bytes_per_logit: int = 0
    num_sweeps: int = 0


_DRAW: Final = Work(5, 36)  # temperature, softmax, noise, race, its argmax
_PENALTIES: Final = Work(15, 85)  # counts of prompt and output, and what they change
_MIN_P: Final = Work(5, 30)
_LOGPROBS: Final = Work(10, 28)  # the likeliest ones, and ranks
_SORT: Final = Work(50, 380)  # torch.sort, cumulated sum, scatter
_SORT_TOP_K: Final = Work(8, 45)  # beside it
_TOP_K: Final = Work(12, 35)  # alone: torch.topk
_SELECT_TOP_P: Final = Work(12, 0, 4)
_SELECT_TOP_K: Final = Work(40, 0, 4)  # with top-p or without


class Drawing:
    """How long sampling by these parameters takes beside a greedy row's. filtering: as `cost.filtering`."""

    def __init__(self, sampling: SamplingParams | None, filtering: str, vocab_size: int, device: DeviceSpec) -> None:
        parts = [] if sampling is None else _parts(sampling, filtering)
        self.is_plain = not parts
        self._num_sms = device.num_sms
        self._floor_ns = device.kernel_factor * device.kernel_floor_ns * sum(part.num_kernels for part in parts)
        self._bytes_per_row = vocab_size * sum(part.bytes_per_logit for part in parts)
        self._swept_bytes = vocab_size * LOGIT_BYTES * sum(part.num_sweeps for part in parts)
        self._ns_per_byte = device.kernel_factor * 1e9 / (device.memory_bytes_per_s * device.memory_efficiency)

    def ns(self, num_rows: int) -> float:
        """num_rows: 1 or more."""
        side_by_side = -(-num_rows // self._num_sms) * self._num_sms  # each as long as if all multiprocessors had one
        num_bytes = num_rows * self._bytes_per_row + side_by_side * self._swept_bytes
        return self._floor_ns + num_bytes * self._ns_per_byte


def _parts(sampling: SamplingParams, filtering: str) -> list[Work]:
    parts: list[Work] = []
    if sampling.is_penalised:
        parts.append(_PENALTIES)
    if sampling.needs_logprobs:
        parts.append(_LOGPROBS)
    if sampling.temperature == 0.0 or sampling.beam_width:
        return parts
    parts.append(_DRAW)
    if sampling.min_p > 0.0:
        parts.append(_MIN_P)
    has_top_k, has_top_p = sampling.top_k > 0, sampling.top_p < 1.0
    if filtering == "sort":
        if has_top_p:
            parts.append(_SORT)
        if has_top_k:
            parts.append(_SORT_TOP_K if has_top_p else _TOP_K)
    elif has_top_k:
        parts.append(_SELECT_TOP_K)
    elif has_top_p:
        parts.append(_SELECT_TOP_P)
    return parts
