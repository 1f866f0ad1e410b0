"""Step times from measured operators: the roofline, with each operator looked up if a table of this device has it.

Looked up are GEMMs, attention of prompts, of decodes and of both together, collectives, and, if the tables have them,
norms, rotary embedding, activation and sampler (sim/cost/measured.py makes the grids). All other operators are the
roofline's. Beyond the ends of a table, its last value is scaled as the roofline grows. `origins` gives the source of
each operator's time, and a run notes the shares of these sources.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from mypy_extensions import mypyc_attr

from sim.cost.base import to_ns
from sim.cost.collectives import Collectives
from sim.cost.config import RooflineConfig
from sim.cost.grid import Grid
from sim.cost.roofline import KVLayout, RooflineCost
from testbed.core.commands import Recorder, StepView
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.core.sampling import SamplingParams
from testbed.core.value import Value
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec

MEASURED, SCALED, ROOFLINE = "measured", "scaled", "roofline"


class Part(Value):
    """A grid of one operator. is_exact: measured at this model's own sizes; else interpolated from other sizes."""

    FIELDS: ClassVar = ("grid", "is_exact")
    __slots__ = FIELDS

    def __init__(self, grid: Grid, is_exact: bool) -> None:
        self.grid = grid
        self.is_exact = is_exact

    def at(self, size: int, roofline: Callable[[int], float]) -> float:
        """Returns the value at `size` of a one-dimensional grid; beyond its ends the last value, scaled as the roofline
        grows."""
        ns = self.grid.along(float(size))
        nearest = min(max(float(size), self.grid.first), self.grid.last)
        return ns if nearest == size else ns * (roofline(size) / roofline(int(nearest)))


class Measured(Value):
    """The grids of one model on one device, in ns of one call, of one layer, except prefill and mixed.

    gemm: (num_in, num_out) -> over rows. decode: over (sequences, context of each). prefill: measured time / roofline,
    over (tokens, positions before them). mixed: the same ratio, over (tokens, positions before them, decodes, context
    of each). all_reduce, all_gather: over bytes. elementwise: over tokens. sampler: over rows.
    """

    FIELDS: ClassVar = (
        "gemm", "decode", "prefill", "mixed", "all_reduce", "all_gather", "elementwise", "sampler", "sources",
    )  # fmt: skip
    __slots__ = FIELDS

    def __init__(
        self, gemm: dict[tuple[int, int], Part], decode: Part | None, prefill: Part | None, mixed: Part | None,
        all_reduce: Part | None, all_gather: Part | None, elementwise: Part | None, sampler: Part | None,
        sources: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.gemm = gemm
        self.decode = decode
        self.prefill = prefill
        self.mixed = mixed
        self.all_reduce = all_reduce
        self.all_gather = all_gather
        self.elementwise = elementwise
        self.sampler = sampler
        self.sources = sources


class MeasuredCollectives(Collectives):
    """All-reduce and all-gather from tables; broadcast by volume and hops."""

    def __init__(self, base: Collectives, measured: Measured) -> None:
        super().__init__(
            base.size, base.link_bytes_per_s, base.latency_ns, is_switched=base.is_switched, factor=base.factor
        )
        self._base, self._reduce, self._gather = base, measured.all_reduce, measured.all_gather

    def all_reduce_ns(self, num_bytes: int) -> float:
        return self._measured_ns(self._reduce, num_bytes, self._base.all_reduce_ns)

    def all_gather_ns(self, num_bytes: int) -> float:
        return self._measured_ns(self._gather, num_bytes, self._base.all_gather_ns)

    def _measured_ns(self, part: Part | None, num_bytes: int, by_volume: Callable[[int], float]) -> float:
        if part is None or self.size == 1:
            return by_volume(num_bytes)
        return part.at(num_bytes, by_volume) * self.factor


@mypyc_attr(allow_interpreted_subclasses=True)
class TablesCost(RooflineCost):
    """Predicts step times from measured operators; the base class predicts the operators that the tables lack."""

    def __init__(
        self, model: ModelSpec, device: DeviceSpec, config: RooflineConfig | None = None, *, measured: Measured,
        tensor_parallel_size: int = 1, kv_layout: KVLayout | None = None, sampling: SamplingParams | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            model, device, config, tensor_parallel_size=tensor_parallel_size, kv_layout=kv_layout, sampling=sampling
        )
        self.measured = measured.replace(mixed=None) if self._splits else measured  # that table is of one kernel
        if model.dtype == "fp8" and not self._multiplies_fp8:  # measured were GEMMs in FP8, but for the LM head
            _, *head = self.products()[-1]
            kept = {sizes: part for sizes, part in measured.gemm.items() if [*sizes] == head}
            self.measured = self.measured.replace(gemm=kept)
        if self.measured.mixed is not None:
            self.unchecked = ""
        self._factor = device.kernel_factor
        layout = kv_layout or KVLayout()
        is_counted = layout.sliding_window is None and not (layout.kv_dtype or "").startswith("fp8")
        self._least_ns_per_pair = self._attention_ns_per_pair * device.attention_efficiency if is_counted else 0.0
        self._collectives = MeasuredCollectives(self._collectives, measured)
        self._decodes: dict[int, Grid] = {}  # sequences -> ns over the sum of their contexts

    def watch(self) -> OriginWatch:
        """Returns a recorder that adds up the sources of a run's step times."""
        return OriginWatch(self)

    def origins(self, shape: BatchShape) -> dict[str, str]:
        """Returns the source of each operator that takes time: MEASURED, SCALED from other sizes, or ROOFLINE."""
        measured, names = self.measured, self.breakdown(shape)
        found = dict.fromkeys(names, ROOFLINE)
        rows, width = self.num_rows(shape), self._model.activation_dtype_bytes
        for name, num_in, num_out in self.products():
            part = measured.gemm.get((num_in, num_out))
            found[name] = _origin(part, (shape.num_samples if name == "lm_head" else rows,))
        found |= self._attention_origins(shape)
        found["elementwise"] = _origin(measured.elementwise, (rows,))
        found["sampler"] = _origin(measured.sampler, (shape.num_samples,))
        found["all_reduce"] = _origin(measured.all_reduce, (rows * self._model.hidden_size * width,))
        found["gather"] = _origin(measured.all_gather, (self.gathered_bytes(shape.num_samples),))
        return {name: origin for name, origin in found.items() if names.get(name)}

    def _attention_origins(self, shape: BatchShape) -> dict[str, str]:
        measured, num = self.measured, shape.num_decodes
        each = shape.decode_context_tokens / num if num else 0.0
        if not shape.prefills:
            return {"attention_decode": _origin(measured.decode, (num, each))} if num else {}
        largest = max(shape.prefills, key=lambda chunk: chunk.num_tokens * (chunk.start + chunk.num_tokens))
        found = {"attention_prefill": _origin(measured.prefill, (largest.num_tokens, largest.start))}
        if num:
            mixed = _origin(measured.mixed, (shape.num_prefill_tokens, largest.start, num, each))
            found["attention_decode"] = _origin(measured.decode, (num, each)) if self._splits else mixed
        return found

    def _matmul_ns(self, times: int, num_rows: int, num_in: int, num_out: int, weight_bytes: int) -> int:
        part = self.measured.gemm.get((num_in, num_out))
        if part is None:
            return super()._matmul_ns(times, num_rows, num_in, num_out, weight_bytes)
        ns = part.at(num_rows, lambda rows: self.product_ns(rows, num_in, num_out, weight_bytes))
        return to_ns(self._factor * times * ns)

    def _decode_attention_ns(self, num_decodes: int, context: int) -> int:
        part = self.measured.decode
        if part is None or num_decodes == 0:
            return super()._decode_attention_ns(num_decodes, context)
        line = self._decodes.get(num_decodes)
        if line is None:
            line = self._decodes[num_decodes] = self._decode_line(part.grid, num_decodes)
        x = float(context)
        if line.first <= x <= line.last:
            return to_ns(line.along(x))
        nearest = line.first if x < line.first else line.last
        growth = super()._decode_attention_ns(num_decodes, context)
        return to_ns(line.along(nearest) * growth / super()._decode_attention_ns(num_decodes, int(nearest)))

    def _decode_line(self, grid: Grid, num_decodes: int) -> Grid:
        """Returns the ns of all layers over the sum of contexts, for one number of decodes: a run has few such numbers
        and many sums of contexts."""
        layers, batches = self._model.num_hidden_layers, grid.axes[0]
        within = min(max(num_decodes, int(batches[0])), int(batches[-1]))
        values = []
        for context in grid.axes[1]:
            ns = self._factor * layers * grid.at((within, context))
            if within != num_decodes:
                ns *= super()._decode_attention_ns(num_decodes, int(num_decodes * context))
                ns /= super()._decode_attention_ns(within, int(within * context))
            values.append(ns)
        return Grid([[num_decodes * context for context in grid.axes[1]]], values)

    def _mixed_attention_ns(
        self, num_decodes: int, context: int, longest: int, prefills: tuple[PrefillChunk, ...]
    ) -> int:
        measured, tiles = self.measured, self._mixed.tiles_of(prefills)
        whole_ns = self._attention_of(tiles, num_decodes, context, longest)
        if measured.prefill is None:
            return whole_ns
        alone_ns = whole_ns if num_decodes == 0 else self._mixed.ns(tiles, 0, 0, 0)
        ratio, num_pairs, num_tokens, start = _chunks_by(measured.prefill.grid, prefills)
        # at least their arithmetic at the data sheet's rate: a short prompt's ratio, which is applied to a chunk behind
        # a context that no table has, may be too low for it
        prefill_ns = max(alone_ns * ratio, num_pairs * self._least_ns_per_pair)
        if num_decodes == 0 or measured.mixed is None:
            return to_ns(prefill_ns + whole_ns - alone_ns)
        grid = measured.mixed.grid
        grid.seek(0, num_tokens)
        grid.seek(1, start)
        grid.seek(2, num_decodes)
        grid.seek(3, context / num_decodes)
        mixed_ns = whole_ns * grid.value()
        return to_ns(max(mixed_ns, prefill_ns))  # prompts are never cheaper with decodes next to them

    def _elementwise_ns(self, num_tokens: int) -> float:
        return self._small_ns(self.measured.elementwise, num_tokens, super()._elementwise_ns)

    def _sampler_ns(self, num_samples: int) -> float:
        return self._small_ns(self.measured.sampler, num_samples, super()._sampler_ns)

    def _small_ns(self, part: Part | None, size: int, roofline: Callable[[int], float]) -> float:
        return roofline(size) if part is None else self._factor * part.at(size, roofline)


def _chunks_by(grid: Grid, prefills: tuple[PrefillChunk, ...]) -> tuple[float, float, int, int]:
    """Returns the mean of measured time / roofline over chunks, by a grid of prompts, weighted by about their (query,
    key) pairs; these pairs; their tokens; and the start of the chunk with most pairs (tables of mixed attention have
    one chunk)."""
    ratios, pairs, corners, num_tokens, most, start = 0.0, 0, 0, 0, -1, 0
    for chunk in prefills:
        own = chunk.num_tokens * (chunk.start + chunk.num_tokens)
        grid.seek(0, chunk.num_tokens)
        grid.seek(1, chunk.start)
        ratios += own * grid.value()
        pairs += own
        corners += chunk.num_tokens * chunk.num_tokens
        num_tokens += chunk.num_tokens
        if own > most:
            most, start = own, chunk.start
    return ratios / pairs, pairs - corners / 2, num_tokens, start


def _origin(part: Part | None, point: tuple[float, ...]) -> str:
    if part is None:
        return ROOFLINE
    return MEASURED if part.is_exact and part.grid.clamped(point) == point else SCALED


class OriginWatch(Recorder):
    """Adds up, over every 64th step of a run, the time from each source."""

    def __init__(self, cost: TablesCost) -> None:
        self._cost = cost
        self._num_seen = 0
        self._ns: dict[str, int] = {}  # origin -> ns
        self._filled: dict[str, int] = {}  # operator with the roofline's time -> ns

    def committed(self, step: StepView) -> None:
        self._num_seen += 1
        shape = step.plan.shape
        if self._num_seen % 64 != 1 or shape.is_empty:
            return
        parts, origins = self._cost.breakdown(shape), self._cost.origins(shape)
        for name, origin in origins.items():
            self._ns[origin] = self._ns.get(origin, 0) + parts[name]
            if origin == ROOFLINE:
                self._filled[name] = self._filled.get(name, 0) + parts[name]

    def shares(self) -> dict[str, float]:
        """Returns the share of the time from each source; empty if no step took any."""
        total = sum(self._ns.values())
        return {name: self._ns.get(name, 0) / total for name in (MEASURED, SCALED, ROOFLINE)} if total else {}

    def notes(self) -> list[str]:
        """Returns one line: the shares of the time by source, and the operators of the roofline, the largest first."""
        share = {name: f"{100 * one:.0f} %" for name, one in self.shares().items()}
        if not share:
            return []
        filled = sorted(self._filled, key=lambda name: -self._filled[name])[:4]
        return [
            f"prices: {share[MEASURED]} of the time is measured ({'; '.join(self._cost.measured.sources)}), "
            f"{share[SCALED]} scaled from other sizes, {share[ROOFLINE]} the roofline's"
            + (f" ({', '.join(filled)})" if filled else "")
        ]
