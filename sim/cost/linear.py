"""A step's time as a linear function of its shape, with coefficients that are given.

The features are those on which a transformer's work depends linearly: tokens (projections and MLP), decode context (KV
read), pairs of prefill attention, blocks moved. Unlike the roofline, it cannot express that a small batch takes as long
as a slightly larger one (weights are read once).
"""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from sim.cost.base import attention_pairs_doubled, to_ns
from sim.cost.config import LinearConfig
from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape


@mypyc_attr(allow_interpreted_subclasses=True)
class LinearCost:
    """Predicts step times by LinearConfig: swaps and copies of blocks are swap_ns, everything else is forward_ns. A
    step takes at least 1 ns; one that computes and moves nothing takes no time.

    Terms are summed in a fixed order, with copies after all others except swaps, which are rounded on their own. The ns
    of a term are what it adds to the rounded sum.

    sliding_window: of the attention; None: it attends to everything.
    """

    def __init__(self, config: LinearConfig, sliding_window: int | None = None) -> None:
        self._window = sliding_window
        self._base_ns = config.base_s * 1e9
        self._prefill_ns = config.per_prefill_token_s * 1e9
        self._decode_ns = config.per_decode_s * 1e9
        self._context_ns = config.per_decode_context_token_s * 1e9
        self._half_pair_ns = config.per_prefill_attention_pair_s * 1e9 / 2
        self._swap_ns = config.per_swapped_block_s * 1e9
        self._copy_ns = config.per_copied_block_s * 1e9

    def price(self, shape: BatchShape) -> Spans:
        if shape.is_empty:
            return Spans()
        forward = self._base_ns + shape.num_decodes * self._decode_ns + shape.decode_context_tokens * self._context_ns
        if shape.prefills:
            doubled_pairs = attention_pairs_doubled(shape, self._window)
            forward = forward + shape.num_prefill_tokens * self._prefill_ns + doubled_pairs * self._half_pair_ns
        forward_ns = to_ns(forward)
        num_swapped = shape.num_blocks_swapped_out + shape.num_blocks_swapped_in
        swap_ns = to_ns(num_swapped * self._swap_ns) if num_swapped else 0
        if shape.num_blocks_copied:
            swap_ns += to_ns(forward + shape.num_blocks_copied * self._copy_ns) - forward_ns
        return Spans(0, 0, swap_ns, forward_ns or (0 if swap_ns else 1), 0)

    def breakdown(self, shape: BatchShape) -> dict[str, int]:
        """Returns the ns of each term; their sum is that of price(shape)."""
        terms = {
            "base": 0.0 if shape.is_empty else self._base_ns,
            "decodes": shape.num_decodes * self._decode_ns,
            "decode_context": shape.decode_context_tokens * self._context_ns,
            "prefill_tokens": shape.num_prefill_tokens * self._prefill_ns,
            "prefill_attention": attention_pairs_doubled(shape, self._window) * self._half_pair_ns,
            "block_copy": shape.num_blocks_copied * self._copy_ns,
        }
        parts, running, rounded = {}, 0.0, 0
        for name, term in terms.items():
            running = running + term
            parts[name], rounded = to_ns(running) - rounded, to_ns(running)
        spans = self.price(shape)
        parts["base"] += spans.forward_ns - (rounded - parts["block_copy"])  # a step lasts at least 1 ns
        return parts | {"swap": spans.swap_ns - parts["block_copy"]}
