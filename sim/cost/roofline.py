"""The roofline model: each operator takes the longer of its arithmetic and its memory traffic.

    time = floor + max(flops / (peak x compute efficiency), bytes / (bandwidth x memory efficiency))    (Williams, 2009)

The floor is the time of a kernel in a chain of kernels in addition to its work. Weights are read once a step, attention
reads the exact context of each row, GQA shares K and V between heads. A layer's small kernels (norms, rotary embedding,
KV store, activation) are bound by memory; they are one operator here. A step with prefills has one attention kernel
over chunks and decodes, or one for each, as the library has it; the arithmetic of one with chunks is counted in whole
tiles of query rows, and in whole waves of tiles over the multiprocessors. Not modelled: how well a given kernel fills a
device at a given shape. The efficiencies approximate that; `tables` and `calibrated` measure it. docs/cost-models.md
derives the formulas; tests/cost/test_roofline_sums.py counts the same work row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mypy_extensions import mypyc_attr

from sim.cost.attention import CHECKED, MixedAttention, Tiles
from sim.cost.base import Captured, to_ns
from sim.cost.collectives import collectives_of
from sim.cost.config import RooflineConfig
from sim.cost.drawing import LOGIT_BYTES, Drawing
from sim.cost.experts import expert_products
from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.core.sampling import SamplingParams
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec, check_ranks

_LARGE_KERNELS: Final = 5  # of a layer: qkv, attention, o, gate-up, down; with experts also the router's GEMM
_SAMPLER_KERNELS: Final = 10
_TOKEN_BYTES: Final = 8
_QUANTISING_BYTES: Final = 5  # to convert one activation to FP8: read for the largest value, read again, written


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of the KV cache: tokens of a block, type of K and V (None: the model's), sliding window (None: none)."""

    block_size: int = 16
    kv_dtype: str | None = None
    sliding_window: int | None = None


@mypyc_attr(allow_interpreted_subclasses=True)
class RooflineCost:
    """Predicts the time of a step of `model` on `tensor_parallel_size` devices.

    The host's part (the device's step_overhead_ns) is prepare_ns, swaps and copies of blocks are swap_ns, the sampler
    is sample_ns, everything else forward_ns. float32 runs at half of the device's 2-byte rate (TF32), except on a CPU,
    whose rate is that of float32. sampling: parameters of every row; None: greedy. Raises ConfigError if the heads
    cannot be divided among the ranks, or for FP8 arithmetic on a device without it.
    """

    def __init__(
        self, model: ModelSpec, device: DeviceSpec, config: RooflineConfig | None = None, *,
        tensor_parallel_size: int = 1, kv_layout: KVLayout | None = None, sampling: SamplingParams | None = None,
    ) -> None:  # fmt: skip
        check_ranks(model, tensor_parallel_size)
        device.check_joins(tensor_parallel_size)
        size, layers = tensor_parallel_size, model.num_hidden_layers
        layout = kv_layout or KVLayout()
        self.config = config or RooflineConfig()
        self._model = model
        self._experts = model.experts
        self._size = size
        slow = device.kernel_factor
        rate = device.flops_per_s / slow * (0.5 if model.dtype == "float32" and device.kind != "cpu" else 1.0)
        self._ns_per_flop = 1e9 / (rate * device.compute_efficiency)
        self._multiplies_fp8 = model.dtype == "fp8" and self.config.multiplies_fp8(device)
        self._ns_per_fp8_flop = 1e9 / (2 * rate * device.fp8_efficiency) if self._multiplies_fp8 else 0.0
        self._ns_per_byte = slow * 1e9 / (device.memory_bytes_per_s * device.memory_efficiency)
        self._collectives = collectives_of(size, device)
        self._q_size = model.num_attention_heads * model.head_dim // size
        self._kv_size = model.num_kv_heads_per_rank(size) * model.head_dim
        # per-token constants of attention, over all layers of one rank
        token_bytes = model.kv_bytes_per_token(layout.kv_dtype, size)
        self._kv_ns_per_token = token_bytes * self._ns_per_byte
        self._qo_ns_per_token = layers * 2 * self._q_size * model.activation_dtype_bytes * self._ns_per_byte
        self._attention_ns_per_pair = layers * 4 * self._q_size * 1e9 / (rate * device.attention_efficiency)
        self._decode_attention_floor_ns = slow * layers * device.decode_attention_floor_ns
        kernel = self.config.mixed_attention or device.mixed_attention
        self._splits = kernel == "split"  # then its kernel for prefills is as the device's
        is_checked = device.kind == "cpu" or CHECKED.get(device.name) == kernel
        self.unchecked = "" if is_checked else f"{kernel} on {device.name}"  # of mixed steps
        packs_heads = (device.mixed_attention if self._splits else kernel) == "packed"
        self._mixed = self._kernel_of_mixed(device, layout.sliding_window, packs_heads)
        self._small_kernels = self._elements_of_small_kernels()
        self._cached_bytes = device.cache_bytes // 4  # as the measured tables of activations of two devices show
        self._gemm_floor_ns, self._kernel_floor_ns = slow * device.gemm_floor_ns, slow * device.kernel_floor_ns
        self._drawing = Drawing(
            sampling, self.config.filtering, model.vocab_size, device.num_sms, floor_ns=self._kernel_floor_ns,
            ns_per_byte=self._ns_per_byte,
        )  # fmt: skip
        self._gemm_tile_rows = device.gemm_tile_rows
        block_bytes = layout.block_size * token_bytes
        self._swap_ns_per_block = block_bytes * 1e9 / device.host_link_bytes_per_s
        self._swap_latency_ns = device.host_link_latency_ns
        self._copy_ns_per_block = 2 * block_bytes * self._ns_per_byte
        self._host_ns = max(1, device.step_overhead_ns)
        on_cpu = device.kind == "cpu"
        has_graphs = self.config.cuda_graphs and not on_cpu
        most = (self.config.max_captured_size, self.config.max_captured_tokens) if has_graphs else (0, 0)
        self._captured = Captured(*most)
        self._graph_launch_ns = self.config.graph_launch_ns
        self._launch_ns = 0 if on_cpu else self.config.kernel_launch_ns * self._num_kernels()
        self._dense: dict[int, int] = {}  # tokens in the batch -> ns of the operators that depend on nothing else
        self._of_experts: dict[tuple[int, int], dict[str, int]] = {}  # tokens, rows -> ns of router and experts
        self._sampled: dict[int, tuple[int, int]] = {}  # rows that need logits -> (LM head, sampler)

    def _kernel_of_mixed(self, device: DeviceSpec, window: int | None, packs_heads: bool) -> MixedAttention:
        num_heads, group = self._q_size // self._model.head_dim, max(1, self._q_size // self._kv_size)
        return MixedAttention(
            device, self._model.num_hidden_layers, num_heads, group, window, packs_heads=packs_heads,
            ns_per_pair=self._attention_ns_per_pair, kv_ns_per_token=self._kv_ns_per_token,
            qo_ns_per_token=self._qo_ns_per_token,
        )  # fmt: skip

    def price(self, shape: BatchShape) -> Spans:
        num_decodes, prefills = shape.num_decodes, shape.prefills
        num_tokens = num_decodes
        if prefills:
            num_tokens += shape.num_prefill_tokens
            attention = self._mixed_attention_ns(
                num_decodes, shape.decode_context_tokens, shape.longest_decode_context, prefills
            )
        else:
            attention = self._decode_attention_ns(num_decodes, shape.decode_context_tokens)
        swap_ns = self._swap_ns(shape.num_blocks_swapped_out, shape.num_blocks_swapped_in)
        if shape.num_blocks_copied:
            swap_ns += to_ns(shape.num_blocks_copied * self._copy_ns_per_block)
        if num_tokens == 0:
            return Spans(0, self._host_ns, swap_ns, 0, 0)
        captured = self._captured.rows(num_tokens, num_decodes + len(prefills))
        rows = captured or num_tokens
        rest_ns, sampler_ns = self._rest_ns(rows, shape.num_samples)
        device_ns = rest_ns + attention
        if self._experts is not None:
            device_ns += sum(self._expert_parts(num_tokens, rows).values())
        launch_ns = self._graph_launch_ns if captured else max(0, self._launch_ns - device_ns)
        return Spans(0, self._host_ns, swap_ns, device_ns + launch_ns, sampler_ns)

    def _rest_ns(self, num_tokens: int, num_samples: int) -> tuple[int, int]:
        """Returns the ns that depend only on the numbers of tokens and sampled rows: the device's and the sampler's."""
        dense = self._dense.get(num_tokens)
        if dense is None:
            dense = self._dense[num_tokens] = sum(self._dense_parts(num_tokens).values())
        head = self._sampled.get(num_samples)
        if head is None:
            parts = self._sample_parts(num_samples)
            of_sampler = parts["sampler"] + parts["drawing"]
            head = self._sampled[num_samples] = parts["lm_head"] + parts["gather"], of_sampler
        return dense + head[0], head[1]

    def breakdown(self, shape: BatchShape) -> dict[str, int]:
        """Returns the ns of each operator, over all layers; their sum is that of price(shape).

        launch: a graph's replay, or how long the device waits for eager launches. sampler: a greedy one, and the
        broadcast of its tokens (logits=gather). drawing: what the sampling parameters add to a greedy sampler.
        """
        num_decodes, context, prefills = shape.num_decodes, shape.decode_context_tokens, shape.prefills
        parts = {
            "host": self._host_ns,
            "swap": self._swap_ns(shape.num_blocks_swapped_out, shape.num_blocks_swapped_in),
        }
        parts["block_copy"] = to_ns(shape.num_blocks_copied * self._copy_ns_per_block)
        if shape.num_tokens == 0:
            return parts
        captured = self._captured.rows(shape.num_tokens, num_decodes + len(prefills))
        rows = captured or shape.num_tokens
        operators = self._dense_parts(rows) | self._expert_parts(shape.num_tokens, rows)
        if prefills:  # the time that the decodes add is attention_decode
            prefill_ns = self._mixed_attention_ns(0, 0, 0, prefills)
            both_ns = self._mixed_attention_ns(num_decodes, context, shape.longest_decode_context, prefills)
            operators |= {"attention_decode": both_ns - prefill_ns, "attention_prefill": prefill_ns}
        else:
            operators |= {"attention_decode": self._decode_attention_ns(num_decodes, context), "attention_prefill": 0}
        operators |= self._sample_parts(shape.num_samples)
        sampling = {name: operators.pop(name) for name in ("sampler", "drawing")}
        idle = max(0, self._launch_ns - sum(operators.values()))
        launch = self._graph_launch_ns if captured else idle
        return parts | operators | {"launch": launch} | sampling

    def num_rows(self, shape: BatchShape) -> int:
        """Returns the rows of the GEMMs: of a captured step its padded size."""
        return self._captured.rows_of(shape)

    def _num_kernels(self) -> int:
        """Returns the eager launches of a step: layers, embedding, last norm, LM head, sampler, and collectives."""
        layers, own = self._model.num_hidden_layers, 0 if self._experts is None else 1
        quantising = 4 if self._multiplies_fp8 else 0  # one before each GEMM
        of_layer = _LARGE_KERNELS + own + quantising + len(self._small_kernels)
        return layers * of_layer + 4 + (2 * layers + 2 if self._size > 1 else 0)

    def _matmul_ns(self, times: int, num_rows: int, num_in: int, num_out: int, weight_bytes: int) -> int:
        """Returns the ns of `times` GEMMs [num_rows, num_in] x [num_in, num_out]. weight_bytes: of one weight."""
        flops = 2 * -(-num_rows // self._gemm_tile_rows) * self._gemm_tile_rows * num_in * num_out
        num_bytes = num_in * num_out * weight_bytes + num_rows * (num_in + num_out) * self._model.activation_dtype_bytes
        num_inputs = num_rows * num_in if weight_bytes == 1 else 0
        return self._products_ns(times, flops, num_bytes, num_inputs)

    def _products_ns(self, times: int, flops: float, num_bytes: float, num_inputs: int) -> int:
        """num_inputs: elements of 2 bytes among `num_bytes` that FP8 arithmetic converts before; 0: in no case."""
        if not num_inputs or not self._multiplies_fp8:
            return to_ns(times * (self._gemm_floor_ns + max(flops * self._ns_per_flop, num_bytes * self._ns_per_byte)))
        bytes_ns = (num_bytes - num_inputs) * self._ns_per_byte
        quantising_ns = self._kernel_floor_ns + num_inputs * _QUANTISING_BYTES * self._ns_per_byte
        return to_ns(times * (quantising_ns + self._gemm_floor_ns + max(flops * self._ns_per_fp8_flop, bytes_ns)))

    def product_ns(self, num_rows: int, num_in: int, num_out: int, weight_bytes: int) -> int:
        """Returns the roofline's ns of one GEMM [num_rows, num_in] x [num_in, num_out], also in subclasses.
        weight_bytes: of one weight."""
        return RooflineCost._matmul_ns(self, 1, num_rows, num_in, num_out, weight_bytes)

    def products(self) -> list[tuple[str, int, int]]:
        """Returns (name, num_in, num_out) of each GEMM on one rank, except router and experts. All are once a layer,
        but the last, the LM head, is once a step."""
        model, hidden = self._model, self._model.hidden_size
        attention = [("qkv", hidden, self._q_size + 2 * self._kv_size), ("o", self._q_size, hidden)]
        head = [("lm_head", model.embedding_size, -(-model.vocab_size // self._size))]
        if self._experts is not None:
            return attention + head
        inner = -(-model.intermediate_size // self._size)
        return [*attention, ("gate_up", hidden, (model.num_mlp_matrices - 1) * inner), ("down", inner, hidden), *head]

    def _expert_parts(self, num_tokens: int, num_rows: int) -> dict[str, int]:
        """Returns the ns of router and experts of all layers; empty without them. num_rows: with a graph's padding."""
        model, found = self._model, self._of_experts.get((num_tokens, num_rows))
        if self._experts is None or found is not None:
            return found or {}
        layers, width = model.num_hidden_layers, model.activation_dtype_bytes
        parts = {"router": self._matmul_ns(layers, num_rows, model.hidden_size, self._experts.num, width)}
        for name, flops, num_bytes, num_inputs in expert_products(
            model, self._size, num_tokens, num_rows, self._gemm_tile_rows
        ):
            parts[name] = self._products_ns(layers, flops, num_bytes, num_inputs)
        self._of_experts[num_tokens, num_rows] = parts
        return parts

    def _dense_parts(self, num_tokens: int) -> dict[str, int]:
        """Returns the ns of the operators that depend only on the number of tokens."""
        layers, width, hidden = self._model.num_hidden_layers, self._model.dtype_bytes, self._model.hidden_size
        act_bytes = num_tokens * self._model.activation_dtype_bytes
        products = {
            name: self._matmul_ns(layers, num_tokens, num_in, num_out, width)
            for name, num_in, num_out in self.products()[:-1]
        }
        reduced = self._collectives.all_reduce_ns(act_bytes * hidden)
        return {
            "embedding": to_ns(self._kernel_floor_ns + 2 * act_bytes * hidden * self._ns_per_byte),
            **products,
            "elementwise": to_ns(layers * self._elementwise_ns(num_tokens)),
            "all_reduce": to_ns((2 * layers + 1) * reduced),  # after o, after the MLP, after the embedding
        }

    def _elements_of_small_kernels(self) -> list[int]:
        """Returns the elements that each kernel of a layer reads and writes for a token, but GEMMs and attention."""
        model, inner, heads = self._model, -(-self._model.inner_size // self._size), self._q_size + self._kv_size
        norm, store, activation = 4 * model.hidden_size, 4 * self._kv_size, model.num_mlp_matrices * inner
        elements = [norm, norm, store, activation]
        if model.has_rotary:
            elements.append(2 * heads)
        if model.has_qk_norm:
            elements.append(2 * heads)
        if self._experts is not None:
            elements += [0, 0, (self._experts.per_token + 1) * model.hidden_size]  # choosing, sorting, summing
        return elements

    def _elementwise_ns(self, num_tokens: int) -> float:
        """Returns the ns of one layer's small kernels: norms with residual, rotary embedding, KV store, activation."""
        act_bytes = num_tokens * self._model.activation_dtype_bytes
        cached = self._cached_bytes  # what the kernel before left there
        moved = sum(max(0, act_bytes * elements - cached) for elements in self._small_kernels)
        return len(self._small_kernels) * self._kernel_floor_ns + moved * self._ns_per_byte

    def _sample_parts(self, num_samples: int) -> dict[str, int]:
        """Returns the ns of the LM head, of gathering its logits, of a greedy sampler, and of sampling beyond that."""
        if num_samples == 0:
            return {"lm_head": 0, "gather": 0, "sampler": 0, "drawing": 0}
        links, num_bytes = self._collectives, self.gathered_bytes(num_samples)
        _, num_in, num_out = self.products()[-1]
        head = self._matmul_ns(1, num_samples, num_in, num_out, self._model.activation_dtype_bytes)
        sampler, drawing_ns = self._sampler_ns(num_samples), self._drawing.ns(num_samples)
        gathered = links.all_gather_ns(num_bytes)
        if self.config.logits == "gather":  # at one rank: its link carries as much as in an all-gather
            sampler += links.broadcast_ns(num_samples * _TOKEN_BYTES)
        return {"lm_head": head, "gather": to_ns(gathered), "sampler": to_ns(sampler), "drawing": to_ns(drawing_ns)}

    def gathered_bytes(self, num_samples: int) -> int:
        """Returns the bytes of the logits that ranks gather, which become float32 only after that."""
        return num_samples * self._model.vocab_size * self._model.activation_dtype_bytes

    def _sampler_ns(self, num_samples: int) -> float:
        """Returns the ns of a greedy sampler, whose kernels pass over the logits twice."""
        logit_bytes = num_samples * self._model.vocab_size * LOGIT_BYTES
        return _SAMPLER_KERNELS * self._kernel_floor_ns + 2 * logit_bytes * self._ns_per_byte

    def _decode_attention_ns(self, num_decodes: int, context: int) -> int:
        """Returns the ns of one kernel over all rows: the longer of their summed arithmetic and their summed traffic.

        The sum of each row's own maximum would be longer by at most one token's K/V and Q/O for each row (see
        docs/cost-models.md). The keys of a row are split among multiprocessors and its heads share tiles: no padding.
        """
        if num_decodes == 0:
            return 0
        flops_ns = context * self._attention_ns_per_pair
        bytes_ns = (context + num_decodes) * self._kv_ns_per_token + num_decodes * self._qo_ns_per_token
        return to_ns(self._decode_attention_floor_ns + max(flops_ns, bytes_ns))

    def _mixed_attention_ns(
        self, num_decodes: int, context: int, longest: int, prefills: tuple[PrefillChunk, ...]
    ) -> int:
        """Returns the ns of one kernel over chunks and decodes, or of one for each."""
        return self._attention_of(self._mixed.tiles_of(prefills), num_decodes, context, longest)

    def _attention_of(self, tiles: Tiles, num_decodes: int, context: int, longest: int) -> int:
        if self._splits:
            return self._mixed.ns(tiles, 0, 0, 0) + self._decode_attention_ns(num_decodes, context)
        return self._mixed.ns(tiles, num_decodes, context, longest)

    def _swap_ns(self, num_out: int, num_in: int) -> int:
        """Returns the ns of both directions, one after the other, each with the link's latency once. Every rank moves
        its own share."""
        if not num_out and not num_in:
            return 0
        latency_ns = self._swap_latency_ns * ((num_out > 0) + (num_in > 0))
        return to_ns((num_out + num_in) * self._swap_ns_per_block) + latency_ns
