"""Step times from a fit to measured steps: curves over the number of rows, and coefficients for everything else.

The form is that of the roofline, with measured numbers instead of a data sheet's. The work of all rows (projections,
MLP, norms, launches) is a piecewise linear non-decreasing curve over the rows of a step: its tokens, or the rows of the
graph in which the profiled engine replays it. One curve is for steps of decodes only, one for steps with prefills.
Attention is linear in the decodes' context, in how far contexts are below the longest (both have separate coefficients
for steps with prefills), in the prefills' context and (query, key) pairs, and in the pairs among a chunk's own tokens.
Step times are integers from plain arithmetic. sim/cost/calibration.py makes the fit.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from mypy_extensions import mypyc_attr

from sim.cost.base import Captured, decode_skew, pairs_doubled, to_ns
from sim.cost.profiled_range import Ranges, RangeWatch
from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape
from testbed.specs.profiles import ProfileManifest

Curve = tuple[tuple[int, float], ...]  # (rows, ns): knots, rows ascending


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The time of each unit, in ns."""

    decode_context_token: float = 0.0  # K and V of one position, read for one decode
    decode_skew_token: float = 0.0  # a position that a decode has less than the longest: cost of tiles or padding
    mixed_decode: float = 0.0  # a decode row of a step with prefills, in addition to its share of the curve
    mixed_decode_context_token: float = 0.0  # as decode_context_token, which it replaces in steps with prefills
    mixed_decode_skew_token: float = 0.0  # as decode_skew_token, likewise
    prefill: float = 0.0  # a prompt or chunk
    prefill_context_token: float = 0.0  # a position that a chunk attends to
    prefill_pair: float = 0.0  # a (query, key) pair of a chunk
    prefill_own_pair: float = 0.0  # a pair among its own tokens, added to prefill_pair: kernels skip masks differently
    logits_row: float = 0.0  # a row whose logits are needed: LM head
    swap_call: float = 0.0  # each direction (out, in) in which the step swaps
    swapped_out_block: float = 0.0
    swapped_in_block: float = 0.0
    copied_block: float = 0.0
    sampler: float = 0.0  # a step that samples
    sampled_row: float = 0.0
    host: float = 0.0  # each step
    host_row: float = 0.0  # a decode, a prompt or a chunk
    host_prefills: float = 0.0  # a step with prompts or chunks: its batch is another than the last step's
    host_prefill_token: float = 0.0
    host_moved_block: float = 0.0


class Quality(NamedTuple):
    """Relative errors |predicted - measured| / measured of steps whose shapes were left out of the fit.

    bias: relative error of the sum of all steps, above 0 if predictions are too long. noise: median relative deviation
    of repeats from the mean of their shape, which no model can beat; None without repeats.
    """

    num_steps: int
    num_shapes: int
    median: float
    p90: float
    bias: float
    noise: float | None


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fit. decode_curve, prefill_curve: ns over the rows of a step. quality: for each region, and for `all`.

    repeated_saving: the share of a position's time that is saved if another decode of the step reads its K and V too; 0
    also for a profile without such positions.
    """

    manifest: ProfileManifest
    decode_curve: Curve
    prefill_curve: Curve
    coefficients: Coefficients
    ranges: Ranges
    quality: dict[str, Quality]
    num_folds: int
    repeated_saving: float = 0.0

    def scaled(self, host: float, device: float) -> Calibration:
        """Returns the fit for a machine whose host takes `host` times as long, and everything else `device` times."""
        factors = {name: host if name.startswith("host") else device for name in COEFFICIENTS}
        values = {name: getattr(self.coefficients, name) * factor for name, factor in factors.items()}
        curves = [tuple((rows, ns * device) for rows, ns in curve) for curve in (self.decode_curve, self.prefill_curve)]
        return replace(self, decode_curve=curves[0], prefill_curve=curves[1], coefficients=Coefficients(**values))


@mypyc_attr(allow_interpreted_subclasses=True)
class CalibratedCost:
    """Predicts step times from a Calibration. Host work is prepare_ns, swaps and copies are swap_ns, the sampler is
    sample_ns, everything else forward_ns."""

    def __init__(self, calibration: Calibration, outside: str = "warn") -> None:
        self.calibration = calibration
        self._outside = outside
        self._window = calibration.manifest.sliding_window
        self._c = calibration.coefficients
        self._captured = captured_by(calibration.manifest)
        self._dense: dict[tuple[int, bool, bool], int] = {}  # (tokens, one of each sequence, with prefills) -> ns

    def watch(self) -> RangeWatch:
        """Returns a recorder that counts the steps of a run that leave the profiled range."""
        return RangeWatch(self.calibration.ranges, self._outside, self.calibration.repeated_saving > 0)

    def price(self, shape: BatchShape) -> Spans:
        num_decodes, num_samples, has_prefills, c = shape.num_decodes, shape.num_samples, bool(shape.prefills), self._c
        num_prefill_tokens = prefill_ns = 0
        if has_prefills:
            num_prefill_tokens, prefill_ns = self._prefill_attention(shape)
        host_ns = self._host_ns(shape, num_prefill_tokens)
        swap_ns = self._swap_ns(shape.num_blocks_swapped_out, shape.num_blocks_swapped_in)
        if shape.num_blocks_copied:
            swap_ns += to_ns(shape.num_blocks_copied * c.copied_block)
        num_tokens, forward_ns = num_decodes + num_prefill_tokens, 0
        if num_tokens:
            forward_ns = self._dense_ns(num_tokens, shape) + prefill_ns
            forward_ns += self._decode_ns(shape, has_prefills)
            forward_ns += to_ns(num_samples * c.logits_row)
        sample_ns = to_ns(c.sampler + num_samples * c.sampled_row) if num_samples else 0
        return Spans(0, host_ns, swap_ns, forward_ns, sample_ns)

    def breakdown(self, shape: BatchShape) -> dict[str, int]:
        """Returns the ns of each part that the fit distinguishes; their sum is that of price(shape)."""
        num_decodes, num_samples, has_prefills = shape.num_decodes, shape.num_samples, bool(shape.prefills)
        num_prefill_tokens, prefill_ns = self._prefill_attention(shape)
        parts = {
            "host": self._host_ns(shape, num_prefill_tokens),
            "swap": self._swap_ns(shape.num_blocks_swapped_out, shape.num_blocks_swapped_in),
            "block_copy": to_ns(shape.num_blocks_copied * self._c.copied_block),
        }
        num_tokens = num_decodes + num_prefill_tokens
        if num_tokens:
            parts["dense"] = self._dense_ns(num_tokens, shape)
            parts["attention_decode"] = self._decode_ns(shape, has_prefills)
            parts["attention_prefill"] = prefill_ns
            parts["lm_head"] = to_ns(num_samples * self._c.logits_row)
        if num_samples:
            parts["sampler"] = to_ns(self._c.sampler + num_samples * self._c.sampled_row)
        return parts

    def _host_ns(self, shape: BatchShape, num_prefill_tokens: int) -> int:
        num_prefills, c = len(shape.prefills), self._c
        host = c.host + (shape.num_decodes + num_prefills) * c.host_row
        if num_prefills:
            host += c.host_prefills + num_prefill_tokens * c.host_prefill_token
        return max(1, to_ns(host + shape.num_blocks_moved * c.host_moved_block))

    def _swap_ns(self, num_out: int, num_in: int) -> int:
        c = self._c
        if not num_out and not num_in:
            return 0
        calls = (num_out > 0) + (num_in > 0)
        return to_ns(calls * c.swap_call + num_out * c.swapped_out_block + num_in * c.swapped_in_block)

    def _decode_ns(self, shape: BatchShape, has_prefills: bool) -> int:
        num, context, c = shape.num_decodes, shape.decode_context_tokens, self._c
        if num == 0:
            return 0
        skew = decode_skew(shape)
        read = context - shape.repeated_context_tokens * self.calibration.repeated_saving
        if not has_prefills:
            return to_ns(read * c.decode_context_token + skew * c.decode_skew_token)
        mixed_ns = num * c.mixed_decode + read * c.mixed_decode_context_token
        return to_ns(mixed_ns + skew * c.mixed_decode_skew_token)

    def _prefill_attention(self, shape: BatchShape) -> tuple[int, int]:
        """Returns the number of tokens of all chunks, and the ns of their attention."""
        num_tokens = reads = pairs = own_pairs = 0
        for chunk in shape.prefills:
            num_tokens += chunk.num_tokens
            own_pairs += pairs_doubled(0, chunk.num_tokens, self._window)
            reads += chunk.start + chunk.num_tokens
            pairs += pairs_doubled(chunk.start, chunk.num_tokens, self._window)
        c = self._c
        pairs_ns = pairs * (c.prefill_pair / 2) + own_pairs * (c.prefill_own_pair / 2)
        return num_tokens, to_ns(len(shape.prefills) * c.prefill + reads * c.prefill_context_token + pairs_ns)

    def _dense_ns(self, num_tokens: int, shape: BatchShape) -> int:
        """Returns the ns of the work of all rows. It depends only on the cached key: num_tokens and kind of `shape`."""
        has_prefills = bool(shape.prefills)
        kind = num_tokens, num_tokens == shape.num_decodes + len(shape.prefills), has_prefills
        found = self._dense.get(kind)
        if found is None:
            curve = self.calibration.prefill_curve if has_prefills else self.calibration.decode_curve
            found = self._dense[kind] = to_ns(curve_at(curve, self._captured.rows_of(shape)))
        return found


def captured_by(manifest: ProfileManifest) -> Captured:
    """Returns the captured sizes of the engine that was profiled."""
    return Captured(manifest.captured_decodes, manifest.captured_tokens)


def curve_at(curve: Curve, num_rows: int) -> float:
    """Returns the value of a curve: constant below its first knot, and beyond its last knot with the slope from
    the last lower knot to it."""
    if num_rows <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    right = min(bisect_right(curve, (num_rows, float("inf"))), len(curve) - 1)
    left = right - 1
    if num_rows > curve[-1][0]:
        while left and curve[left][1] >= curve[-1][1]:
            left -= 1
        right = len(curve) - 1
    (x0, y0), (x1, y1) = curve[left], curve[right]
    if num_rows == x1:
        return y1
    return y0 + (y1 - y0) * (num_rows - x0) / (x1 - x0)


COEFFICIENTS = tuple(item.name for item in fields(Coefficients))
