"""The work of a sampler in addition to a greedy one: temperature and noise, penalties, filters, log-probabilities.

Counted in kernels and in bytes of each logit, as vLLM's sampler passes over the logits (0.14, `v1/sample`). The times
of filters with and without a sort come from published timings: docs/results/2026-11-26-sampling-cost.md has the
sources, and the errors of this model.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from testbed.core.sampling import SamplingParams

LOGIT_BYTES: Final = 4


class Passes(NamedTuple):
    """num_kernels: launches, each with the device's floor. bytes_per_logit: read and written for each logit of each
    row. num_sweeps: passes of one multiprocessor over one row; their time does not depend on the number of rows."""

    num_kernels: int
    bytes_per_logit: int
    num_sweeps: int = 0


_TEMPERATURE: Final = Passes(1, 8)
_DRAW: Final = Passes(4, 28)  # softmax, noise, race, its argmax
_PENALTIES: Final = Passes(15, 85)  # token counts of prompt and output, and the changes to the logits
_MIN_P: Final = Passes(5, 30)
_LOGPROBS: Final = Passes(10, 28)  # of the likeliest tokens, and ranks
_SORT: Final = Passes(60, 400)  # torch.sort, cumulated sum, scatter
_SORT_TOP_K: Final = Passes(8, 45)  # top_k in addition to top_p
_TOP_K: Final = Passes(12, 35)  # top_k only: torch.topk
_SELECT_TOP_P: Final = Passes(10, 20, 2)  # FlashInfer's kernels also sample
_SELECT_TOP_K: Final = Passes(10, 20, 6)
_SELECT_BOTH: Final = Passes(10, 20, 8)


class Drawing:
    """The time that these sampling parameters add to a greedy sampler; None adds nothing.

    filtering: as `cost.filtering`. floor_ns: of a kernel. ns_per_byte: of the device's memory.
    """

    def __init__(
        self, sampling: SamplingParams | None, filtering: str, vocab_size: int, num_sms: int, *, floor_ns: float,
        ns_per_byte: float,
    ) -> None:  # fmt: skip
        parts = [] if sampling is None else _parts(sampling, filtering)
        swept_bytes = num_sms * LOGIT_BYTES * sum(part.num_sweeps for part in parts)  # as if every one had a row
        self._step_ns = floor_ns * sum(part.num_kernels for part in parts) + vocab_size * swept_bytes * ns_per_byte
        self._row_ns = vocab_size * sum(part.bytes_per_logit for part in parts) * ns_per_byte

    def ns(self, num_rows: int) -> float:
        """num_rows: 1 or more."""
        return self._step_ns + num_rows * self._row_ns


def is_plain(sampling: SamplingParams) -> bool:
    """Whether the parameters add no work to a greedy sampler."""
    return not _parts(sampling, "sort")


def filters(sampling: SamplingParams) -> bool:
    """Whether tokens are sampled from a part of the vocabulary only (top_k, top_p), as `cost.filtering` sets how."""
    return _is_drawn(sampling) and (sampling.top_k > 0 or sampling.top_p < 1.0)


def _is_drawn(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0.0 and not sampling.beam_width


def _parts(sampling: SamplingParams, filtering: str) -> list[Passes]:
    parts: list[Passes] = []
    if sampling.is_penalised:
        parts.append(_PENALTIES)
    if sampling.needs_logprobs:
        parts.append(_LOGPROBS)
    if not _is_drawn(sampling):
        return parts
    parts.append(_TEMPERATURE)
    if sampling.min_p > 0.0:
        parts.append(_MIN_P)
    has_top_k, has_top_p = sampling.top_k > 0, sampling.top_p < 1.0
    if filtering == "select" and filters(sampling):
        parts.append(_SELECT_BOTH if has_top_k and has_top_p else _SELECT_TOP_K if has_top_k else _SELECT_TOP_P)
        return parts
    parts.append(_DRAW)
    if has_top_p:
        parts.append(_SORT)
    if has_top_k:
        parts.append(_SORT_TOP_K if has_top_p else _TOP_K)
    return parts
